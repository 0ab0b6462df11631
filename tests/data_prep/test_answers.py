"""The data's own answers: the template families, and refusal where the rendering is not what was served."""

import json
import shutil
from pathlib import Path

import pytest

from data_prep.answers import rendered_answer
from data_prep.errors import UserError
from data_prep.responses import meta_path, read_meta, respond
from data_prep.tokens import load_tokenizer, sample_tokens

from .conftest import read_lines, write_lines

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
USER = {"role": "user", "content": "Hi there"}
MORE = {"role": "user", "content": "And then?"}
THINKING_OFF = {"enable_thinking": False}


def answer(content: str) -> dict:
    return {"role": "assistant", "content": content}


@pytest.fixture
def answers_of(target, tmp_path):
    """(template, messages of conversations, template_args) -> (lines, counts, tokenizer)."""

    def run(template: str | None, *talks: list[dict], **template_args):
        folder = shutil.copytree(target, tmp_path / "target", dirs_exist_ok=True)
        if template:
            shutil.copy(TEMPLATES / f"{template}.jinja", folder / "chat_template.jinja")
        write_lines(tmp_path / "p.jsonl", [{"id": f"t{i}", "messages": talk} for i, talk in enumerate(talks)])
        out = tmp_path / "own.jsonl"
        counts = respond(folder, tmp_path / "p.jsonl", out, keep_answers=True, template_args=template_args)
        return read_lines(out), counts, load_tokenizer(folder)

    return run


@pytest.mark.parametrize(
    "template, template_args, text, prompt_end, blanks",
    [
        ("thinking_switch", THINKING_OFF, "  yo \n", "<think>\n\n</think>\n\n", False),
        ("dated", {"date_string": "26 Jul 2024"}, "  yo \n", "<|im_start|>assistant\n", False),
        ("trims", {}, "yo", "<|im_start|>assistant\n\n", True),
        ("no_header", {}, "   yo \n", " [/INST]", True),
        ("marked", {}, "  yo \n", "<|im_start|>assistant\n", False),
    ],
)
def test_an_answer_is_supervised_as_the_template_renders_it_and_nothing_else_is(
    answers_of, template, template_args, text, prompt_end, blanks
):
    lines, counts, tokenizer = answers_of(template, [USER, answer("  yo \n"), MORE, answer("bye")], **template_args)
    first, second = lines
    assert first["response"] == text and tokenizer.decode(first["response_token_ids"]) == text + "<|im_end|>"
    assert tokenizer.decode(first["prompt_token_ids"]).endswith(prompt_end)
    served = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=True, **template_args)
    assert first["prompt_token_ids"] == served["input_ids"]
    assert (first["finish_reason"], first["ids_from"]) == ("stop", "text")
    assert [line["id"] for line in lines] == ["t0#1", "t0#2"] and [line["turn"] for line in lines] == [0, 1]
    assert second["messages"] == [USER, answer("  yo \n"), MORE]  # the data's history, not the rendered one
    assert second["response"].strip() == "bye"
    assert counts["stripped"] == (0 if not blanks else 2 if template == "no_header" else 1)
    assert counts["lines"] == counts["ids from text"] == 2


def test_a_think_block_that_the_template_puts_in_is_refused_with_both_renderings(answers_of):
    with pytest.raises(
        UserError, match=r"sample t0: .*it is \.\.\.'.*<think>.*serving renders \.\.\.'.*yo<\|im_end\|>"
    ) as e:
        answers_of("thinking_switch", [USER, answer("yo")])
    assert "--template-args" in str(e.value) and "enable_thinking" in str(e.value)


def test_a_think_block_that_the_answer_itself_has_is_its_own_words(answers_of):
    text = "<think>\nhm\n</think>\n\nyo"
    lines, counts, tokenizer = answers_of("thinking_switch", [USER, answer(text)])
    assert tokenizer.decode(lines[0]["response_token_ids"]) == text + "<|im_end|>" and counts["stripped"] == 0


def test_a_template_that_drops_what_the_prompt_opens_is_refused_with_both_renderings(answers_of):
    with pytest.raises(UserError, match=r"sample t0: .*it is \.\.\.'.*serving renders \.\.\.'.*<think>"):
        answers_of("opens_think", [USER, answer("hm</think>yo")])


def test_a_template_that_depends_on_the_date_is_refused_here_too(answers_of):
    with pytest.raises(UserError, match="date_string"):
        answers_of("dated", [USER, answer("yo")])


def test_the_mask_from_the_markers_and_the_responses_of_all_turns_agree(answers_of):
    talk = [USER, answer(" yo "), MORE, answer("bye")]
    lines, _, tokenizer = answers_of("marked", talk)
    whole = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    mask = [0] * len(whole["input_ids"])
    for line in lines:
        ids, own = sample_tokens(line["prompt_token_ids"], line["response_token_ids"], 3072)
        assert whole["input_ids"][: len(ids)] == ids.tolist()
        mask[: len(ids)] = [a | b for a, b in zip(mask, own.tolist())]
    assert mask == whole["assistant_masks"] and 0 < sum(mask) < len(mask)


def test_answers_that_call_tools_are_history_and_conversations_without_answers_are_counted(answers_of):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}
    talk = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "blue"}]
    lines, counts, _ = answers_of(None, [*talk, answer("It is blue.")], [USER], [USER, answer("yo<|im_end|>no")])
    assert [(line["id"], line["response"]) for line in lines] == [("t0", "It is blue.")]
    assert lines[0]["messages"] == talk
    assert counts["dropped: no answer in the data"] == 1 and counts["dropped: stop token inside the answer"] == 1


def test_the_settings_say_that_nothing_was_generated_and_a_run_carries_on(answers_of, tmp_path):
    talks = [[USER, answer(f"answer {i}")] for i in range(5)]
    answers_of("trims", *talks)
    out = tmp_path / "own.jsonl"
    meta = read_meta(out)
    assert (meta["generator"], meta["sampling"], meta["max_new_tokens"]) == ("data", None, None)
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    assert answers_of("trims", *talks)[1]["generated"] == 1 and out.read_bytes() == whole
    assert json.loads(meta_path(out).read_text()) == meta


@pytest.mark.parametrize(
    "rest, text, expected",
    [
        ("yo<E>\n", "yo", ("yo", 2)),
        (" yo<E>", "yo ", (" yo", 2)),
        ("yo <EE>\n", "yo", ("yo ", 3)),
        ("yo\n", "yo", ("yo", None)),
        ("<E>", " ", ("", 2)),
        ("yo then<E>", "yo", None),
        ("<think></think>yo<E>", "yo", None),
        ("ya<E>", "yo", None),
    ],
)
def test_blanks_around_an_answer_may_differ_and_nothing_else(rest, text, expected):
    assert rendered_answer(rest, text, {"<E>": 2, "<EE>": 3}) == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"keep_answers": True, "servers": ["http://x/v1"]}, "--keep-answers generates nothing, so --server"),
        ({"keep_answers": True, "sample": True, "batch_size": 4}, "--sample and --batch-size cannot be meant too"),
        ({"servers": ["http://x/v1"], "batch_size": 4}, "--server leaves batching to the servers, so --batch-size"),
    ],
)
def test_options_that_contradict_each_other_are_refused(target, prompts, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        respond(target, prompts, tmp_path / "r.jsonl", **options)
    assert not (tmp_path / "r.jsonl").exists()
