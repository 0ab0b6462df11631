"""The data's own answers as responses: their text in the target's rendering, tokenised.

A drafter learns less from them than from the target's own words, but they cost no generation. The history of an answer
is the data's own too. Ids come from text, so every line says `ids_from: text`.
"""

from typing import Any

from transformers import PreTrainedTokenizerBase

from .conversations import Conversation, Serving, Turn
from .errors import UserError
from .response_file import CONTEXT, ResponseFile
from .tokens import parted, prompt_text, whole_text


def rendered_answer(rest: str, answer: str, stops: dict[str, int]) -> tuple[str, int | None] | None:
    """The answer as the template renders it and the id of the stop token behind it (None: the template writes none).

    `rest` is what the rendered conversation has behind the prompt, `stops` the stop tokens' texts. Blanks around the
    answer may differ; None where anything else does (a think block that the template puts in front, for example).
    """
    core = answer.strip()
    start = len(rest) - len(rest.lstrip())
    if not rest.startswith(core, start):
        return None
    behind = rest[start + len(core) :]
    tail = behind.lstrip()
    stop = max((text for text in stops if tail.startswith(text)), key=len, default=None)
    if stop is None:
        return None if tail else (rest[: start + len(core)], None)
    return rest[: len(rest) - len(tail)], stops[stop]


def own_answer(turn: Turn, serving: Serving, stop_ids: list[int]) -> tuple[list[int], str]:
    """Ids and text of the data's answer at `turn`. UserError, with both renderings, where the rendered conversation
    does not continue the prompt that is served by exactly this answer.
    """
    tokenizer, template_args = serving.tokenizer, serving.template_args
    talk, place = turn.conversation, turn.conversation.places[turn.number]
    answer: dict[str, Any] = talk.messages[place]
    asked = (tokenizer, talk.history(turn.number), template_args, talk.prompt.get("tools"))
    prompt = prompt_text(*asked)
    whole = whole_text(tokenizer, [*asked[1], answer], *asked[2:])
    stops = {tokenizer.decode([i]): i for i in stop_ids if i < len(tokenizer)}
    found = rendered_answer(whole.removeprefix(prompt), answer["content"], stops) if whole.startswith(prompt) else None
    if found is None:
        served = [*turn.prompt, *_ids(tokenizer, answer["content"]), tokenizer.eos_token_id or stop_ids[0]]
        raise UserError(
            f"sample {turn.name}: rendered with its answer, the conversation is not the served prompt and the answer, "
            f"{parted(tokenizer, _ids(tokenizer, whole), served, 'it is')}; pass the --template-args under which the "
            'template adds nothing (often {"enable_thinking": false}), or leave out --keep-answers.'
        )
    text, stop = found
    return [*_ids(tokenizer, text), *([] if stop is None else [stop])], text


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def answer_from_data(file: ResponseFile, talks: list[Conversation], serving: Serving) -> None:
    """A line for every answer of the data; those whose blanks the template changed are counted as "stripped"."""
    for talk in talks:
        for number, place in enumerate(talk.places):
            turn = serving.turn(talk, number)
            text = file.kept(turn)
            if text is None:
                ids, text = own_answer(turn, serving, file.stop_ids)
                reason = None
                if len(turn.prompt) + len(ids) > serving.context:
                    reason = CONTEXT
                elif not ids:
                    reason = "dropped: neither text nor stop token"
                elif any(i in file.stop_ids for i in ids[:-1]):
                    reason = "dropped: stop token inside the answer"
                if reason is not None:
                    file.skip(reason, 1)
                    continue
                file.add(turn, ids, "text", text)
                file.bar.update(len(ids))
            file.counts["stripped"] += text != talk.messages[place]["content"]
