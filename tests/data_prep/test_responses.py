"""Greedy responses: the model's own generate, resumable, and refused under other settings."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.errors import UserError
from data_prep.generate import generate
from data_prep.responses import meta_path, respond
from data_prep.tiny_target import make_tiny_target
from data_prep.tokens import load_tokenizer

from .conftest import read_lines, snapshot, write_lines


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
