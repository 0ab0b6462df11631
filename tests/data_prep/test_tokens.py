"""Prompt ids as served, the loss mask, and the six template families."""

from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError

from data_prep.errors import UserError
from data_prep.tiny_target import CHAT_TEMPLATE, make_tiny_tokenizer
from data_prep.tokens import (
    chat_template,
    check_template_args,
    parted,
    prompt_ids,
    prompt_text,
    sample_tokens,
    template_sha256,
)

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
USER = {"role": "user", "content": "Hi there"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": " yo "}


def tokenizer_with(name: str):
    return make_tiny_tokenizer(297, (TEMPLATES / f"{name}.jinja").read_text())


def supervised(tokenizer, ids, mask) -> str:
    return tokenizer.decode(ids[mask.bool()])


@pytest.mark.parametrize("name", ["thinking_switch", "opens_think", "trims", "no_header", "marked"])
def test_prompt_ids_are_those_of_the_serving_call(name):
    tokenizer = tokenizer_with(name)
    for messages in ([USER], [SYSTEM, USER], [SYSTEM, USER, ANSWER, USER]):
        served = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert prompt_ids(tokenizer, messages, {}) == served


def test_tools_reach_the_template_as_in_the_serving_call():
    template = "{%- for tool in tools or [] -%}{{- tool.function.name + '\n' -}}{%- endfor -%}" + CHAT_TEMPLATE
    tokenizer = make_tiny_tokenizer(297, template)
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    served = tokenizer.apply_chat_template([USER], tools=tools, add_generation_prompt=True, return_dict=True)
    assert prompt_ids(tokenizer, [USER], {}, tools) == served["input_ids"] != prompt_ids(tokenizer, [USER], {})
    assert prompt_text(tokenizer, [USER], {}, tools).startswith("look_up\n<|im_start|>user")


def test_renderings_that_part_are_both_shown_from_there():
    tokenizer = tokenizer_with("marked")
    have, served = (tokenizer(f"one two three {word} five")["input_ids"] for word in ("fOur", "four"))
    text = parted(tokenizer, have, served)
    place = next(i for i, pair in enumerate(zip(have, served)) if pair[0] != pair[1])
    assert f"at id {place}:" in text and "fOur five'" in text and "four five'" in text
    assert f"at id {len(have)}:" in parted(tokenizer, have, [*have, 5])


@pytest.mark.parametrize("name", ["thinking_switch", "opens_think", "trims", "no_header", "marked"])
def test_exactly_the_response_is_supervised_whatever_the_template(name):
    tokenizer = tokenizer_with(name)
    prompt = prompt_ids(tokenizer, [USER], {})
    response = tokenizer("<think>\nhm\n</think>\n\nyo  <|im_end|>")["input_ids"]
    ids, mask = sample_tokens(prompt, response, 3072)
    assert ids.tolist() == prompt + response
    assert supervised(tokenizer, ids, mask) == "<think>\nhm\n</think>\n\nyo  <|im_end|>"
    assert 0 < mask.sum() < len(mask)


def test_with_thinking_off_the_empty_think_block_is_in_the_prompt_and_never_supervised():
    tokenizer = tokenizer_with("thinking_switch")
    on, off = (prompt_ids(tokenizer, [USER], {"enable_thinking": flag}) for flag in (True, False))
    assert off[: len(on)] == on and tokenizer.decode(off[len(on) :]) == "<think>\n\n</think>\n\n"
    ids, mask = sample_tokens(off, tokenizer("yo<|im_end|>")["input_ids"], 3072)
    assert supervised(tokenizer, ids, mask) == "yo<|im_end|>"


def test_a_generation_prompt_that_opens_the_think_block_keeps_it_in_the_prompt():
    tokenizer = tokenizer_with("opens_think")
    assert prompt_text(tokenizer, [USER], {}).endswith("<|im_start|>assistant\n<think>\n")
    ids, mask = sample_tokens(prompt_ids(tokenizer, [USER], {}), tokenizer("hm</think>yo<|im_end|>")["input_ids"], 3072)
    assert supervised(tokenizer, ids, mask) == "hm</think>yo<|im_end|>"


def test_a_token_that_would_merge_across_the_border_does_not_move_the_mask():
    tokenizer = tokenizer_with("no_header")
    prompt = prompt_ids(tokenizer, [USER], {})
    response = tokenizer(" text<|im_end|>")["input_ids"]
    ids, mask = sample_tokens(prompt, response, 3072)
    assert ids[mask.bool()].tolist() == response and tokenizer.decode(prompt).endswith("[/INST]")


def test_roles_that_the_template_refuses_are_an_error():
    with pytest.raises(TemplateError, match="alternate"):
        tokenizer_with("no_header").apply_chat_template([USER, USER], tokenize=False)
    with pytest.raises(UserError, match="alternate"):
        prompt_ids(tokenizer_with("no_header"), [USER, USER], {})


def test_the_mask_from_generation_markers_and_the_mask_from_the_ids_agree():
    tokenizer = tokenizer_with("marked")
    whole = tokenizer.apply_chat_template([USER, ANSWER], return_dict=True, return_assistant_tokens_mask=True)
    prompt = prompt_ids(tokenizer, [USER], {})
    response = tokenizer(" yo <|im_end|>")["input_ids"]
    ids, mask = sample_tokens(prompt, response, 3072)
    assert whole["input_ids"][: len(ids)] == ids.tolist()
    assert whole["assistant_masks"][: len(ids)] == mask.tolist() and sum(whole["assistant_masks"]) == mask.sum()


def test_a_template_that_writes_the_date_is_refused_with_the_argument_that_pins_it():
    tokenizer = tokenizer_with("dated")
    with pytest.raises(UserError, match=r'02 Jan 2024.*30 Nov 2025.*--template-args .*"date_string"'):
        prompt_ids(tokenizer, [USER], {})
    pinned = prompt_text(tokenizer, [USER], {"date_string": "26 Jul 2024"})
    assert "Today Date: 26 Jul 2024" in pinned


def test_a_template_argument_that_the_template_never_reads_is_refused_by_name():
    tokenizer = tokenizer_with("thinking_switch")
    check_template_args(tokenizer, {"enable_thinking": False})
    with pytest.raises(UserError, match="enable_thinkin'"):
        check_template_args(tokenizer, {"enable_thinkin": False})


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(UserError, match="no chat template"):
        chat_template(make_tiny_tokenizer(297, None))


def test_the_template_hash_follows_its_text():
    assert template_sha256(tokenizer_with("marked")) != template_sha256(tokenizer_with("trims"))


def test_cutting_to_the_maximum_length_cuts_ids_and_mask_alike():
    ids, mask = sample_tokens([1] * 5, [2] * 5, 7)
    assert ids.tolist() == [1] * 5 + [2] * 2 and mask.tolist() == [0] * 5 + [1] * 2
