"""Token ids exactly as a server sees them, and the loss mask.

A sample is the prompt rendered with the generation prompt and the recorded template arguments, followed by the target's
own response ids; exactly those response ids are supervised. No generation markers are needed, no template text is
supervised.
"""

import re
from pathlib import Path
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .errors import UserError
from .files import sha256_hex
from .target import read_config, tokenizer_sha256

Message = dict[str, Any]
Tool = dict[str, Any]
DATES = ("02 Jan 2024", "30 Nov 2025")  # what two different days put into a template that asks for the date


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the local folder `folder`; nothing is downloaded. UserError when there is none."""
    read_config(folder)
    tokenizer_sha256(folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of the tokenizer's chat template. UserError when it has none."""
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no chat template; put the one that serving uses into the "
            "target's folder as chat_template.jinja."
        )
    return tokenizer.get_chat_template()


def template_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the chat template's text."""
    return sha256_hex(chat_template(tokenizer).encode("utf-8"))


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    template_args: dict[str, Any],
    tools: list[Tool] | None,
    *,
    generation: bool = True,
    clock: str = "",
) -> str:
    """The text, with the generation prompt if `generation`; `clock` is put before the template."""
    fixed = {"chat_template": clock + chat_template(tokenizer), "add_generation_prompt": generation, "tokenize": False}
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, **fixed, **template_args)
    except (TemplateError, TypeError) as error:  # raise_exception in the template, or content it cannot join
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"the chat template refuses a conversation of the roles {roles}: {error}; correct or remove it."
        ) from error


def check_template_args(tokenizer: PreTrainedTokenizerBase, template_args: dict[str, Any]) -> None:
    """UserError for an argument whose name the chat template never mentions: it would be ignored without a word."""
    for name in template_args:
        if not re.search(rf"\b{re.escape(name)}\b", chat_template(tokenizer)):
            raise UserError(
                f"the chat template never reads the argument {name!r}; correct its name in --template-args."
            )


def prompt_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    template_args: dict[str, Any],
    tools: list[Tool] | None = None,
) -> str:
    """What a server renders for `messages` and the `tools` (JSON schemas) it may call. UserError when the text depends
    on the day (two dates are tried).
    """
    template = chat_template(tokenizer)
    text = _render(tokenizer, messages, template_args, tools)
    if "strftime_now" in template:
        # transformers hands the clock to the template as a global function; a macro of the same name goes before it
        clocks = ("{%- macro strftime_now(format) -%}" + date + "{%- endmacro -%}" for date in DATES)
        one, other = (_render(tokenizer, messages, template_args, tools, clock=clock) for clock in clocks)
        if one != other:
            place = next(i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1])
            names = sorted(set(re.findall(r"\b\w*date\w*\b", template))) or ["its date argument"]
            raise UserError(
                f"the chat template writes today's date: it gives {one[max(place - 20, 0) : place + 12]!r} on one day "
                f"and {other[max(place - 20, 0) : place + 12]!r} on another, so prompts stop matching what is served; "
                "pin it, for "
                f'example --template-args \'{{"{names[0]}": "26 Jul 2024"}}\', and serve with the same value.'
            )
    return text


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    template_args: dict[str, Any],
    tools: list[Tool] | None = None,
) -> list[int]:
    """The ids of `apply_chat_template(messages, tools=tools, add_generation_prompt=True, **template_args)`; UserError
    as prompt_text.
    """
    text = prompt_text(tokenizer, messages, template_args, tools)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def whole_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    template_args: dict[str, Any],
    tools: list[Tool] | None = None,
) -> str:
    """`messages` rendered without the generation prompt: what a data set's own answers look like to training code."""
    return _render(tokenizer, messages, template_args, tools, generation=False)


def parted(tokenizer: PreTrainedTokenizerBase, have: list[int], served: list[int], owner: str = "the file has") -> str:
    """Both renderings around the first id in which they differ, for a message; `owner` says whose `have` is."""
    place = next((i for i, pair in enumerate(zip(have, served)) if pair[0] != pair[1]), min(len(have), len(served)))
    texts = (tokenizer.decode(ids[max(place - 5, 0) : place + 10]) for ids in (have, served))
    return "at id {}: {} ...{!r}, serving renders ...{!r}".format(place, owner, *texts)


def sample_tokens(
    prompt: list[int], response: list[int], max_length: int, spans: list[tuple[int, int]] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids int32 [S] = prompt + response, cut to `max_length`, and loss_mask uint8 [S], 1 exactly on response ids:
    those of `response`, or of the turns at `spans` [start, end) where the prompt holds earlier ones.
    """
    input_ids = torch.tensor((prompt + response)[:max_length], dtype=torch.int32)
    loss_mask = torch.zeros(len(input_ids), dtype=torch.uint8)
    for start, end in [(len(prompt), len(prompt) + len(response))] if spans is None else spans:
        loss_mask[start:end] = 1
    return input_ids, loss_mask
