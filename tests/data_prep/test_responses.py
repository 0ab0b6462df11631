"""Greedy responses: the model's own generate, resumable, and refused under other settings."""

import fcntl
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.errors import UserError
from data_prep.generate import generate
from data_prep.quality import flaws
from data_prep.responses import meta_path, respond
from data_prep.tiny_target import CHAT_TEMPLATE, make_tiny_target
from data_prep.tokens import load_tokenizer

from .conftest import read_lines, snapshot, write_lines

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"


def test_responses_are_token_for_token_those_of_hugging_face_generate(target, responses):
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    lines = read_lines(responses)
    assert {line["finish_reason"] for line in lines} == {"stop", "length"}
    for line in lines:
        prompt = torch.tensor([line["prompt_token_ids"]])
        whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
        assert whole[0, prompt.shape[1] :].tolist() == line["response_token_ids"], line["id"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_batch_whose_rows_end_at_different_steps_equals_single_rows(tmp_path, family):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_target(tmp_path, family=family)).eval()
    prompts = [[1, 5, 9, 20 + i] + [30 + i] * (i % 7) for i in range(8)]
    alone = [generate(model, [prompt], 70, [2])[0] for prompt in prompts]
    # the stop token that ends the rows at the most different steps
    stop = max(range(300), key=lambda token: len({row.index(token) for row in alone if token in row}))
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in alone]
    counted: list[int] = []
    assert generate(model, prompts, 70, [2, stop], counted.append) == expected
    assert sum(counted) == sum(map(len, expected)) and len(set(map(len, expected))) >= 4


def test_every_assistant_turn_is_generated_in_order_and_is_a_line_of_its_own(target, responses):
    lines = {line["id"]: line for line in read_lines(responses)}
    first, second = lines["talk/with.dots#1"], lines["talk/with.dots#2"]
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == first["response"] != "this answer is not the target's"
    assert [(line["conversation"], line["turn"]) for line in (first, second)] == [
        ("talk/with.dots", 0),
        ("talk/with.dots", 1),
    ]
    tokenizer = load_tokenizer(target)
    for line in lines.values():
        assert line["ids_from"] == "target" and "tools" not in line
        served = tokenizer.apply_chat_template(line["messages"], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        assert line["prompt_token_ids"] == served


def test_an_interrupted_run_carries_on_to_the_same_file(target, prompts, responses, tmp_path):
    whole = responses.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        out = tmp_path / f"{cut}.jsonl"
        out.write_bytes(whole[:cut])
        shutil.copy(meta_path(responses), meta_path(out))
        counts = respond(target, prompts, out, max_new_tokens=12, batch_size=8)
        assert out.read_bytes() == whole and counts["lines"] == 27 and 0 < counts["generated"] <= 27


def test_a_finished_file_is_left_untouched(target, prompts, responses):
    before = snapshot(responses.parent)
    assert respond(target, prompts, responses, max_new_tokens=12, batch_size=8)["generated"] == 0
    assert snapshot(responses.parent) == before


def test_other_settings_are_refused_with_the_fields_that_differ(target, prompts, responses, tmp_path):
    before = snapshot(responses.parent)
    other = make_tiny_target(tmp_path / "other", seed=1, family="qwen3")
    with pytest.raises(UserError, match="max_new_tokens: have 12, expected 13"):
        respond(target, prompts, responses, max_new_tokens=13, batch_size=8)
    with pytest.raises(UserError, match=r"target.embedding_sha256.*stop_token_ids: have \[2, 247\], expected \[2\]"):
        respond(other, prompts, responses, max_new_tokens=12, batch_size=8)
    write_lines(tmp_path / "fewer.jsonl", read_lines(prompts)[:-1])
    with pytest.raises(UserError, match="prompts_sha256"):
        respond(target, tmp_path / "fewer.jsonl", responses, max_new_tokens=12, batch_size=8)
    assert snapshot(responses.parent) == before


def test_a_file_that_respond_did_not_write_is_refused(target, prompts, tmp_path):
    (tmp_path / "mine.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="was not made by respond"):
        respond(target, prompts, tmp_path / "mine.jsonl")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda lines: [*lines, lines[3]], "'p.*' at byte .* is there twice"),
        (lambda lines: [lines[0] | {"id": "p99"}, *lines[1:]], "'p99' at byte 0 is none of the prompts'"),
        (lambda lines: [lines[0], {"id": "p1"}, *lines[1:]], "is no line of a responses file"),
        (
            lambda lines: [line | {"prompt_token_ids": [5, *line["prompt_token_ids"][1:]]} for line in lines],
            r"answers another prompt, at id 0: the file has \.\.\.'.*serving renders \.\.\.'<\|im_start\|>user",
        ),
    ],
)
def test_lines_that_do_not_belong_to_the_prompts_are_refused(target, prompts, responses, tmp_path, change, message):
    out = tmp_path / "changed.jsonl"
    shutil.copy(meta_path(responses), meta_path(out))
    write_lines(out, change(read_lines(responses)))
    before = out.read_bytes()
    with pytest.raises(UserError, match=message):
        respond(target, prompts, out, max_new_tokens=12, batch_size=8)
    assert out.read_bytes() == before


def test_a_file_that_another_run_is_writing_is_refused(target, prompts, tmp_path):
    with open(tmp_path / "r.jsonl", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another respond is writing"):
            respond(target, prompts, tmp_path / "r.jsonl", max_new_tokens=12)


def test_flaws_are_counted_over_all_lines_and_examples_shown(target, prompts, responses, capsys):
    counts = respond(target, prompts, responses, max_new_tokens=12, batch_size=8)
    lines = read_lines(responses)
    found = {line["id"]: flaws(line["response_token_ids"], [2, 247], line["response"]) for line in lines}
    for name in ("empty", "cut", "looping"):
        assert counts[name] == sum(name in flawed for flawed in found.values())
    assert counts["cut"] == 27 - counts["stop"] > 0 and counts["generated"] == 0
    assert counts["tokens"] == sum(len(line["response_token_ids"]) for line in lines)
    first = [line["id"] for line in lines if line["finish_reason"] == "length"][:3]
    assert f"cut: {counts['cut']} responses, for example {', '.join(first)}\n" in capsys.readouterr().out


def test_conversations_that_have_nothing_to_answer_are_dropped_with_the_reason(target, tmp_path):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    user, greeting = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
    talks = [[user], [user, call], [greeting, user]]
    write_lines(tmp_path / "p.jsonl", [{"id": f"t{i}", "messages": talk} for i, talk in enumerate(talks)])
    counts = respond(target, tmp_path / "p.jsonl", tmp_path / "r.jsonl", max_new_tokens=2, batch_size=4)
    assert counts["lines"] == 1 and counts["dropped: ends with a tool call"] == 1
    assert counts["dropped: an answer follows no user or tool turn"] == 1


def test_two_samples_of_one_name_are_refused(target, tmp_path):
    write_lines(tmp_path / "p.jsonl", [{"id": "a", "turns": ["x", "y"]}, {"id": "a#2", "prompt": "z"}])
    with pytest.raises(UserError, match="'a' and 'a#2' both have a sample 'a#2'"):
        respond(target, tmp_path / "p.jsonl", tmp_path / "r.jsonl", max_new_tokens=2)


@pytest.mark.parametrize("name", ["thinking_switch", "opens_think", "trims", "no_header", "marked"])
def test_each_turns_prompt_is_what_serving_renders_after_the_targets_own_answers(target, tmp_path, name):
    folder = shutil.copytree(target, tmp_path / "t")
    shutil.copy(TEMPLATES / f"{name}.jinja", folder / "chat_template.jinja")
    write_lines(tmp_path / "p.jsonl", [{"id": "a", "turns": ["Hi", "And then?", "Why?"]}])
    args = {"enable_thinking": False} if name == "thinking_switch" else {}
    respond(folder, tmp_path / "p.jsonl", tmp_path / "r.jsonl", max_new_tokens=4, batch_size=1, template_args=args)
    lines, tokenizer = read_lines(tmp_path / "r.jsonl"), load_tokenizer(folder)
    assert [line["id"] for line in lines] == ["a#1", "a#2", "a#3"]
    for i, line in enumerate(lines):
        said = [message["content"] for message in line["messages"] if message["role"] == "assistant"]
        assert said == [earlier["response"] for earlier in lines[:i]]
        served = tokenizer.apply_chat_template(line["messages"], add_generation_prompt=True, return_dict=True, **args)
        assert line["prompt_token_ids"] == served["input_ids"]


def test_tools_are_rendered_into_the_prompt_and_kept_in_the_line(target, tmp_path):
    folder = shutil.copytree(target, tmp_path / "t")
    template = "{%- for tool in tools or [] -%}{{- tool.function.name + '\\n' -}}{%- endfor -%}" + CHAT_TEMPLATE
    (folder / "chat_template.jinja").write_text(template)
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    write_lines(tmp_path / "p.jsonl", [{"id": "a", "prompt": "x", "tools": tools}, {"id": "b", "prompt": "x"}])
    respond(folder, tmp_path / "p.jsonl", tmp_path / "r.jsonl", max_new_tokens=2, batch_size=2)
    lines = {line["id"]: line for line in read_lines(tmp_path / "r.jsonl")}
    assert lines["a"]["tools"] == tools and "tools" not in lines["b"]
    text = load_tokenizer(folder).decode(lines["a"]["prompt_token_ids"])
    assert text.startswith("look_up\n<|im_start|>user")


def test_prompts_that_do_not_fit_the_context_are_dropped_and_counted(target, tmp_path):
    small = shutil.copytree(target, tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 60}))
    write_lines(tmp_path / "p.jsonl", [{"id": "a", "prompt": "short"}, {"id": "b", "turns": ["long " * 40, "more"]}])
    counts = respond(small, tmp_path / "p.jsonl", tmp_path / "r.jsonl", max_new_tokens=4)
    assert counts["lines"] == 1 and counts["dropped: prompt and response exceed the context"] == 2


def test_a_conversation_that_the_template_refuses_is_named(target, tmp_path):
    folder = shutil.copytree(target, tmp_path / "strict")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only one turn') }}")
    write_lines(tmp_path / "p.jsonl", [{"id": "odd", "prompt": "x"}])
    with pytest.raises(UserError, match="prompt odd: .*roles user: only one turn"):
        respond(folder, tmp_path / "p.jsonl", tmp_path / "r.jsonl")
