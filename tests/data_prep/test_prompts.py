"""Prompts of every accepted spelling, duplicates, and the split by text."""

import json

import pytest

from data_prep.errors import UserError
from data_prep.prompts import open_turns, prepare_prompts

from .conftest import read_lines, write_lines


def questions(count: int) -> list[dict]:
    return [{"prompt": f"question {i}"} for i in range(count)]


def test_every_spelling_becomes_the_same_messages(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [
        {"id": "1", "messages": talk, "source": "mine"},
        {"id": "2", "conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
        {"id": "3", "turns": ["e", "f"]},
        {"id": "4", "prompt": "g"},
        {"prompt": "h"},
    ]
    write_lines(tmp_path / "in.jsonl", lines)
    prepare_prompts([tmp_path / "in.jsonl"], tmp_path, 0)
    found = read_lines(tmp_path / "train.jsonl")
    assert found[0] == {"id": "1", "source": "mine", "messages": talk}
    assert [[m["role"] for m in line["messages"]] for line in found[1:4]] == [
        ["user", "assistant"],
        ["user", "user"],
        ["user"],
    ]
    assert found[4]["source"] == "in" and len(found[4]["id"]) == 16
    assert (tmp_path / "heldout.jsonl").read_text() == ""


def test_duplicates_are_dropped_and_counted_also_when_only_the_answers_differ(tmp_path):
    ask = {"role": "user", "content": "question 1"}
    answered = {"messages": [ask, {"role": "assistant", "content": "42"}]}
    write_lines(tmp_path / "in.jsonl", [*questions(3), {"prompt": "question 1"}, answered, {"prompt": "  "}])
    counts = prepare_prompts([tmp_path / "in.jsonl"], tmp_path, 1)
    assert counts == {"read": 6, "dropped: duplicate": 2, "dropped: no user text": 1, "train": 2, "heldout": 1}


def test_the_held_out_prompts_depend_on_the_texts_alone(tmp_path):
    lines = questions(30)
    write_lines(tmp_path / "a.jsonl", lines)
    write_lines(tmp_path / "b.jsonl", [{**line, "id": str(i), "source": "x"} for i, line in enumerate(reversed(lines))])
    held = []
    for name in ("a", "b"):
        prepare_prompts([tmp_path / f"{name}.jsonl"], tmp_path / name, 5)
        held.append({line["messages"][0]["content"] for line in read_lines(tmp_path / name / "heldout.jsonl")})
        train = {line["messages"][0]["content"] for line in read_lines(tmp_path / name / "train.jsonl")}
        assert len(train) == 25 and not train & held[-1]
    assert held[0] == held[1] and len(held[0]) == 5


@pytest.mark.parametrize(
    "text, message",
    [
        ("{oops", r"in.jsonl:1 is not JSON"),
        ("[1]", "in.jsonl:1 is a list"),
        ('{"text": "x"}', r"in.jsonl:1: keys \['text'\]"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}', "role 'wizard'"),
        ('{"prompt": 3}', "content of the user turn is 3"),
        ('{"conversations": [{"from": "alien", "value": "x"}]}', "turn from 'alien'"),
        ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}', "both have the id '1'"),
    ],
)
def test_a_line_that_cannot_be_understood_is_named_by_file_and_line(tmp_path, text, message):
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        prepare_prompts([tmp_path / "in.jsonl"], tmp_path / "out", 0)
    assert not (tmp_path / "out").exists()


def test_holding_out_everything_is_refused(tmp_path):
    write_lines(tmp_path / "in.jsonl", questions(3))
    with pytest.raises(UserError, match="--heldout 3 of 3"):
        prepare_prompts([tmp_path / "in.jsonl"], tmp_path, 3)


def test_unicode_survives(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "naïve – 漢字\u2028x"}) + "\n")
    prepare_prompts([tmp_path / "in.jsonl"], tmp_path, 0)
    (line,) = [json.loads(text) for text in (tmp_path / "train.jsonl").read_text().split("\n") if text]
    assert line["messages"][0]["content"] == "naïve – 漢字\u2028x"


def test_the_target_speaks_after_every_user_and_tool_turn_and_tool_calls_stay():
    ask, answer, system = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": "c"},
    )
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    tool = {"role": "tool", "content": "4"}
    assert open_turns([ask]) == [ask, None]
    assert open_turns([system, ask, answer]) == [system, ask, None]
    assert open_turns([ask, ask]) == [ask, None, ask, None]
    assert open_turns([ask, call, tool, answer, ask]) == [ask, call, tool, None, ask, None]
