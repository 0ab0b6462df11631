"""Which turns share a sample, what is dropped, and the places of the samples in shards and batches."""

import json

import pytest
import torch

from data_prep.compute import read_batch
from data_prep.errors import UserError
from data_prep.extract import prepare
from data_prep.plan import make_plan
from data_prep.quality import flaws
from data_prep.recipe import Recipe
from data_prep.tiny_target import make_tiny_tokenizer
from data_prep.tokens import prompt_ids

from ..paths import TEMPLATES
from .conftest import SETTINGS, write_lines

STOP = 2  # <|im_end|>
PLAN = {
    "vocab_rows": 300,
    "hidden_size": 64,
    "features": 3,
    "mask_token_id": 297,
    "stop_ids": [STOP],
    "max_length": 3072,
    "shard_bytes": 10**6,
    "batch_tokens": 4096,
    "storage": "bf16",
    "last_hidden": False,
    "drop": [],
}


def lines_of(tokenizer, talk_id: str, answers: list[str], template_args=None) -> list[dict]:
    """What respond writes for a conversation in which the target says `answers`, each ended by the stop token."""
    messages, lines = [], []
    for turn, answer in enumerate(answers):
        messages = [*messages, {"role": "user", "content": f"question {turn} of {talk_id}"}]
        line = {"id": f"{talk_id}#{turn + 1}", "conversation": talk_id, "turn": turn, "source": "test"}
        line |= {"messages": messages, "prompt_token_ids": prompt_ids(tokenizer, messages, template_args or {})}
        ids = tokenizer(answer)["input_ids"]
        line |= {"response_token_ids": [*ids, STOP], "response": answer, "finish_reason": "stop", "ids_from": "target"}
        lines.append(line)
        messages = [*messages, {"role": "assistant", "content": answer}]
    return lines


def plan(tmp_path, tokenizer, lines, template_args=None, **changes):
    """The plan of a responses file with these lines, and its samples by id."""
    path = tmp_path / "responses.jsonl"
    write_lines(path, lines)
    batches = make_plan(path, tokenizer, template_args or {}, **PLAN | changes)
    rows = {}
    for shard in batches.shards:
        for batch in shard:
            rows |= {sample.id: (sample, row) for sample, row in zip(batch, read_batch(path, batch))}
    return batches, dict(sorted(rows.items()))


def supervised(tokenizer, row) -> list[str]:
    """The texts of the supervised runs of a sample."""
    edges = torch.cat([torch.tensor([0]), row.loss_mask, torch.tensor([0])]).int().diff()
    starts, ends = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return [tokenizer.decode(row.input_ids[a:b]) for a, b in zip(starts, ends)]


def tokenizer_with(name: str):
    return make_tiny_tokenizer(297, (TEMPLATES / f"{name}.jinja").read_text())


def test_turns_share_a_sample_where_each_prompt_extends_the_turn_before(tmp_path):
    tokenizer = tokenizer_with("marked")
    lines = lines_of(tokenizer, "a", ["one", "two words", "three"])
    batches, rows = plan(tmp_path, tokenizer, lines)
    sample, row = rows["a"]
    assert batches.plan().samples == 1 and [span.turn for span in sample.spans] == [0, 1, 2]
    assert supervised(tokenizer, row) == ["one<|im_end|>", "two words<|im_end|>", "three<|im_end|>"]
    assert row.input_ids.tolist() == lines[2]["prompt_token_ids"] + lines[2]["response_token_ids"]
    # the mask from the template's own markers is the same
    messages = [*lines[2]["messages"], {"role": "assistant", "content": "three"}]
    marked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    length = len(row.input_ids)
    assert marked["input_ids"][:length] == row.input_ids.tolist()
    assert marked["assistant_masks"][:length] == row.loss_mask.tolist()


@pytest.mark.parametrize("name", ["thinking_switch", "opens_think"])
def test_turns_whose_thinking_serving_drops_are_samples_of_their_own(tmp_path, name):
    tokenizer = tokenizer_with(name)
    answers = ["<think>\nhm\n</think>\n\none", "<think>\nso\n</think>\n\ntwo"]
    _, rows = plan(tmp_path, tokenizer, lines_of(tokenizer, "a", answers))
    assert list(rows) == ["a#1", "a#2"]
    assert [supervised(tokenizer, row) for _, row in rows.values()] == [[f"{a}<|im_end|>"] for a in answers]
    assert "hm" not in tokenizer.decode(rows["a#2"][1].input_ids)


def test_with_thinking_off_turns_are_separate_where_serving_drops_the_empty_think_block(tmp_path):
    tokenizer, off = tokenizer_with("thinking_switch"), {"enable_thinking": False}
    _, rows = plan(tmp_path, tokenizer, lines_of(tokenizer, "a", ["one", "two"], off), off)
    assert [supervised(tokenizer, row) for _, row in rows.values()] == [["one<|im_end|>"], ["two<|im_end|>"]]


def test_a_trimmed_answer_separates_the_turns_and_one_without_blanks_does_not(tmp_path):
    tokenizer = tokenizer_with("trims")
    lines = lines_of(tokenizer, "a", ["one  ", "two", "three"])
    _, rows = plan(tmp_path, tokenizer, lines)
    assert list(rows) == ["a#1", "a#2-3"] and supervised(tokenizer, rows["a#1"][1]) == ["one  <|im_end|>"]
    assert supervised(tokenizer, rows["a#2-3"][1]) == ["two<|im_end|>", "three<|im_end|>"]


def test_lines_of_a_conversation_may_lie_anywhere_in_the_file_and_only_their_order_counts(tmp_path):
    tokenizer = tokenizer_with("marked")
    a, b = lines_of(tokenizer, "a", ["one", "two"]), lines_of(tokenizer, "b", ["three", "four"])
    _, rows = plan(tmp_path, tokenizer, [a[0], b[0], a[1], b[1]])
    assert set(rows) == {"a", "b"}
    _, rows = plan(tmp_path, tokenizer, [a[1], a[0]])  # a later turn first: still right, as samples of their own
    assert set(rows) == {"a#1", "a#2"}


@pytest.mark.parametrize("drop, kept", [([], 3), (["cut"], 2), (["empty"], 2), (["looping"], 2), (["cut", "empty"], 1)])
def test_flawed_responses_are_dropped_only_where_asked_and_counted(tmp_path, drop, kept):
    tokenizer = tokenizer_with("marked")
    cut, empty, looping = (lines_of(tokenizer, name, ["x"])[0] for name in ("cut", "empty", "looping"))
    cut |= {"response_token_ids": [50, 51, 52], "finish_reason": "length", "response": "abc"}
    empty |= {"response_token_ids": tokenizer("  ")["input_ids"] + [STOP], "response": "  "}
    looping |= {"response_token_ids": [60, 61, 62] * 20 + [STOP], "response": "abc" * 20}
    for line, flaw in ((cut, "cut"), (empty, "empty"), (looping, "looping")):
        assert flaws(line["response_token_ids"], [STOP], line["response"]) == [flaw]
    batches, rows = plan(tmp_path, tokenizer, [cut, empty, looping], drop=drop)
    assert len(rows) == kept and dict(batches.dropped) == {f"{flaw} response": 1 for flaw in drop}


def test_a_dropped_turn_of_a_shared_sample_stays_as_context_without_supervision(tmp_path):
    tokenizer = tokenizer_with("marked")
    lines = lines_of(tokenizer, "a", ["x " * 30, "fine"])
    _, rows = plan(tmp_path, tokenizer, lines, drop=["looping"])
    sample, row = rows["a"]
    assert supervised(tokenizer, row) == ["fine<|im_end|>"] and [span.supervised for span in sample.spans] == [False, True]


def test_cutting_to_the_maximum_length_cuts_the_turns_it_reaches(tmp_path):
    tokenizer = tokenizer_with("marked")
    lines = lines_of(tokenizer, "a", ["one", "two"])
    limit = len(lines[1]["prompt_token_ids"])
    batches, rows = plan(tmp_path, tokenizer, lines, max_length=limit)
    assert supervised(tokenizer, rows["a"][1]) == ["one<|im_end|>"] and batches.cut == 1
    limit += 1
    _, rows = plan(tmp_path, tokenizer, lines, max_length=limit)
    assert len(rows["a"][1].input_ids) == limit and rows["a"][1].loss_mask[-1] == 1


def test_a_turn_that_is_there_twice_is_refused(tmp_path):
    tokenizer = tokenizer_with("marked")
    lines = lines_of(tokenizer, "a", ["one"])
    with pytest.raises(UserError, match="'a#1' twice"):
        plan(tmp_path, tokenizer, lines * 2)


def test_responses_whose_ids_come_from_text_are_counted(tmp_path):
    tokenizer = tokenizer_with("marked")
    lines = [{**line, "ids_from": "text"} for line in lines_of(tokenizer, "a", ["one", "two"])]
    assert plan(tmp_path, tokenizer, lines)[0].from_text == 2


def test_batches_are_within_the_budget_and_sorted_inside_a_shard(responses, target):
    _, batches = prepare(target, responses, Recipe(**SETTINGS))
    for shard in batches.shards:
        lengths = [sample.tokens for batch in shard for sample in batch]
        assert lengths == sorted(lengths, reverse=True)
        assert all(len(batch) == 1 or len(batch) * batch[0].tokens <= 200 for batch in shard)
    keys = [sample.key for shard in batches.shards for batch in shard for sample in batch]
    assert keys == [f"{i:06d}" for i in range(len(keys))]
