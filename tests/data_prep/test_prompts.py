"""Prompts: duplicates, the split by text, lengths, a reason for everything dropped, and benchmarks kept whole."""

import json
import shutil
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data_prep.errors import UserError
from data_prep.near_duplicates import jaccard, shingles
from data_prep.prompts import is_heldout, prepare_benchmarks, prepare_prompts, prompt_key
from data_prep.responses import read_prompts
from data_prep.tokens import load_tokenizer
from tests.paths import BENCHMARKS, TEMPLATES

from .conftest import read_lines, write_lines

STORY = (
    "Tell a story about a small green dragon who lives under the old stone bridge near our village and guards a box of "
    "letters that nobody in the whole valley has ever read"
)


def questions(count: int) -> list[dict]:
    return [{"prompt": f"question {i}"} for i in range(count)]


def prepare(folder: Path, rows: list[dict], heldout: float = 0, **options):
    write_lines(folder / "in.jsonl", rows)
    return prepare_prompts([folder / "in.jsonl"], folder / "out", heldout, **options)


def result(folder: Path, name: str = "train") -> list[dict]:
    return read_lines(folder / "out" / f"{name}.jsonl")


def summary(folder: Path) -> dict:
    return json.loads((folder / "out/summary.json").read_text())


def texts_of(lines: list[dict]) -> set[str]:
    return {line["messages"][0]["content"] for line in lines}


def test_every_spelling_becomes_a_line_of_one_schema_in_input_order(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    counts = prepare(
        tmp_path,
        [
            {"id": 1, "messages": talk, "source": "mine", "tools": '[{"name": "f"}]'},
            {"id": "2", "conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
            {"id": "3", "turns": ["e", "f"]},
            {"id": None, "source": None, "system": "s", "prompt": "g", "response": "h"},
        ],
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    one, two, three, four = result(tmp_path)
    assert one == {"id": "1", "source": "mine", "messages": talk, "tools": tools}
    assert [len(line["messages"]) for line in (two, three, four)] == [2, 2, 3] and "tools" not in two
    assert four["source"] == "in" and len(four["id"]) == 16
    assert counts == {"read": 4, "train": 4, "heldout": 0} and result(tmp_path, "heldout") == []


def test_the_result_goes_through_again_unchanged(tmp_path):
    rows = [{"id": "1", "turns": ["a", "b"], "tools": [{"name": "f"}]}, {"prompt": "x", "response": "y"}]
    prepare(tmp_path, rows)
    before = (tmp_path / "out/train.jsonl").read_bytes()
    prepare_prompts([tmp_path / "out/train.jsonl"], tmp_path / "again", 0)
    assert (tmp_path / "again/train.jsonl").read_bytes() == before
    assert len(read_prompts(tmp_path / "out/train.jsonl")) == 2


def test_duplicates_are_dropped_and_counted_also_when_only_the_answers_differ(tmp_path):
    ask = {"role": "user", "content": "question 1"}
    answered = {"messages": [ask, {"role": "assistant", "content": "42"}]}
    rows = [*questions(3), {"prompt": "question 1"}, answered, {"prompt": "  "}]
    assert prepare(tmp_path, rows) == {
        "read": 6,
        "dropped: duplicate": 2,
        "dropped: no user text": 1,
        "train": 3,
        "heldout": 0,
    }


def test_the_same_question_with_other_tools_or_another_system_turn_is_another_prompt(tmp_path):
    others = [{"tools": [{"name": "f"}]}, {"system": "Talk like a pirate."}]
    assert prepare(tmp_path, [{"prompt": "a"}, *({"prompt": "a", **other} for other in others)])["train"] == 3


def test_near_duplicates_are_dropped_counted_and_shown_and_similarity_1_keeps_them(tmp_path, capsys):
    rows = [{"id": "one", "prompt": STORY}, {"id": "two", "prompt": STORY + ", please"}, *questions(12)]
    counts = prepare(tmp_path, rows)
    assert counts == {"read": 14, "dropped: near-duplicate": 1, "train": 13, "heldout": 0}
    (pair,) = summary(tmp_path)["near_duplicates"]
    assert {pair["dropped"], pair["kept"]} == {"one", "two"} and pair["similarity"] == pytest.approx(33 / 38, abs=1e-3)
    shown = f"{pair['dropped']!r} shares {pair['similarity']} with {pair['kept']!r}"
    assert f"dropped: near-duplicate 1, for example {shown}\n" in capsys.readouterr().out
    assert pair["dropped"] not in {line["id"] for line in result(tmp_path)}
    assert prepare(tmp_path, rows, similarity=1)["train"] == 14


def test_neither_a_long_common_system_turn_nor_a_common_question_makes_near_duplicates(tmp_path):
    rules = " ".join(f"Rule {i} is that nobody speaks of thing {i}." for i in range(50))
    rows = [{"prompt": f"question {i}", "system": rules} for i in range(5)]
    assert prepare(tmp_path, rows)["train"] == 5
    rows = [{"prompt": STORY, "system": " ".join(f"Rule {i}{j}." for j in range(50))} for i in range(5)]
    assert prepare(tmp_path, rows)["train"] == 5


def test_near_duplicates_never_straddle_the_split(tmp_path):
    rows = [{"prompt": f"Number {i}. {STORY} {end}"} for i in range(30) for end in ("please", "now")]

    def straddling() -> int:
        train, held = ([shingles(text) for text in texts_of(result(tmp_path, name))] for name in ("train", "heldout"))
        return sum(jaccard(one, other) >= 0.8 for one in train for other in held)

    prepare(tmp_path, rows, 0.5, similarity=1)
    assert straddling() > 20
    prepare(tmp_path, [*rows, *questions(20)], 0.5)
    assert straddling() == 0 and result(tmp_path) and result(tmp_path, "heldout")


def test_whether_a_prompt_is_held_out_depends_on_its_text_alone(tmp_path):
    few, many = tmp_path / "few", tmp_path / "many"
    few.mkdir()
    many.mkdir()
    rows = questions(100)
    prepare(few, rows, 0.3)
    held = texts_of(result(few, "heldout"))
    others = [{"id": f"x{i}", "source": "x", "prompt": f"question {i}"} for i in reversed(range(400))]
    prepare(many, others, 0.3)
    assert 15 < len(held) < 45 and not held & texts_of(result(few))
    assert held == texts_of(result(many, "heldout")) & {row["prompt"] for row in rows}
    prepare(many, rows, 0.4)
    assert held < texts_of(result(many, "heldout"))  # a larger share only adds to it


def test_the_held_out_share_is_a_share_of_all_hashes():
    assert is_heldout("0" * 64, 1e-9) and not is_heldout("0" * 64, 0)
    assert is_heldout("7" + "f" * 63, 0.5) and not is_heldout("8" + "0" * 63, 0.5)
    assert is_heldout("f" * 64, 1)


def test_the_survivors_do_not_depend_on_the_order_of_the_rows(tmp_path):
    rows = [{"prompt": f"{STORY} {'very ' * i}good"} for i in range(40)] + questions(10)
    found = []
    for order in (rows, rows[::-1]):
        prepare(tmp_path, order, 0.3, similarity=0.9)
        found.append([texts_of(result(tmp_path, name)) for name in ("train", "heldout")])
    assert found[0] == found[1] and all(found[0])


def test_conversations_that_cannot_be_asked_are_dropped_with_the_reason_per_source(tmp_path):
    ask, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows = [
        {"messages": [answer, ask], "source": "x"},
        {"messages": [ask, {"role": "tool", "content": "4"}], "source": "x"},
        {"messages": [ask, {"role": "assistant", "tool_calls": [{"name": "f"}]}], "source": "y"},
        {"prompt": "half \ud83d an emoji", "source": "y"},
        {"messages": [], "source": "y"},
        {"prompt": "fine", "source": "y"},
    ]
    counts = prepare(tmp_path, rows)
    assert counts["read"] == sum(counts.values()) - 6 and counts["train"] == 1
    assert summary(tmp_path)["sources"] == {
        "x": {
            "read": 2,
            "dropped: an answer follows no user or tool turn": 1,
            "dropped: a tool result follows no tool call": 1,
        },
        "y": {
            "read": 4,
            "dropped: ends with a tool call": 1,
            "dropped: broken Unicode": 1,
            "dropped: no user text": 1,
            "train": 1,
        },
    }
    assert summary(tmp_path)["counts"] == counts


def test_files_of_several_kinds_are_one_set_of_prompts(tmp_path):
    write_lines(tmp_path / "a.jsonl", questions(3))
    rows = [{"prompt": f"question {i}", "response": "yes"} for i in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    counts = prepare_prompts([tmp_path / "a.jsonl", tmp_path / "b.parquet"], tmp_path / "out", 0)
    assert counts == {"read": 8, "dropped: duplicate": 3, "train": 5, "heldout": 0}
    assert [line["source"] for line in result(tmp_path)] == ["a"] * 3 + ["b"] * 2


def test_prompts_are_measured_as_the_target_is_served_them(tmp_path, target, capsys):
    folder = Path(shutil.copytree(target, tmp_path / "target"))
    template = "{{ tools }}{{ mood }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rows = [{"turns": [f"question {'x ' * i}", "ignored"], "tools": tools} for i in range(30)]
    prepare(tmp_path, rows, 0.3, target=folder, template_args={"mood": "happy"}, similarity=1)
    tokenizer = load_tokenizer(folder)
    lines = [*result(tmp_path), *result(tmp_path, "heldout")]
    texts = [f"{tools}happyuser: {line['messages'][0]['content']}" for line in lines]
    lengths = sorted(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
    found = summary(tmp_path)["lengths"]["tokens"]
    assert found == {
        "mean": pytest.approx(sum(lengths) / 30, abs=0.05),
        "median": lengths[14],
        "p90": lengths[26],
        "p99": lengths[29],
        "max": lengths[29],
    }
    assert summary(tmp_path)["target"]["template_args"] == {"mood": "happy"}
    assert f"tokens of a prompt: mean {found['mean']}, median {found['median']}" in capsys.readouterr().out


@pytest.fixture
def strict_target(target, tmp_path) -> Path:
    """A target whose template wants user and assistant turns in turn and raises otherwise."""
    folder = Path(shutil.copytree(target, tmp_path / "strict"))
    shutil.copy(TEMPLATES / "no_header.jinja", folder / "chat_template.jinja")
    return folder


def test_a_prompt_that_the_template_refuses_is_dropped_with_the_template_s_words(tmp_path, strict_target, capsys):
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    bad = [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "4"}]
    rows = [{"id": "bad", "messages": bad}, *questions(3)]
    counts = prepare(tmp_path, rows, target=strict_target)
    assert counts == {"read": 4, "dropped: refused by the chat template": 1, "train": 3, "heldout": 0}
    ((reason, found),) = summary(tmp_path)["refused_by_the_chat_template"].items()
    assert reason == "roles must alternate user/assistant" and found == {"count": 1, "example": "bad"}
    assert f"dropped: refused by the chat template 1, for example 'bad': {reason}" in capsys.readouterr().out


def test_a_template_that_writes_the_date_stops_the_run_instead_of_dropping_everything(tmp_path, target):
    folder = Path(shutil.copytree(target, tmp_path / "dated"))
    shutil.copy(TEMPLATES / "dated.jinja", folder / "chat_template.jinja")
    with pytest.raises(UserError, match="writes today's date"):
        prepare(tmp_path, questions(2), target=folder)
    with pytest.raises(UserError, match="never reads the argument 'nonsense'"):
        prepare(tmp_path, questions(2), target=folder, template_args={"nonsense": 1})


@pytest.mark.parametrize("rows, share", [(questions(3), 1), ([{"prompt": " "}], 0), ([], 0.5)])
def test_leaving_nothing_to_train_on_is_refused_and_writes_nothing(tmp_path, rows, share):
    with pytest.raises(UserError, match=rf"--heldout {share} leaves no prompts to train on \(read {len(rows)}"):
        prepare(tmp_path, rows, share)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("{oops", r"in.jsonl:1 is not JSON"),
        ("[1]", "in.jsonl:1 is a list"),
        ('{"text": "x"}', r"in.jsonl:1: keys \['text'\]"),
        ('{"prompt": "a", "tools": "f"}', "in.jsonl:1: tools is 'f'"),
        ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}', "in.jsonl:2 and .*in.jsonl:1 both have the id '1'"),
    ],
)
def test_a_line_that_cannot_be_understood_is_named_by_file_and_line(tmp_path, text, message):
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        prepare_prompts([tmp_path / "in.jsonl"], tmp_path / "out", 0)
    assert not (tmp_path / "out").exists()


def test_an_input_is_never_replaced_by_the_result(tmp_path):
    write_lines(tmp_path / "train.jsonl", questions(3))
    for stage in (lambda paths: prepare_prompts(paths, tmp_path, 0), lambda paths: prepare_benchmarks(paths, tmp_path)):
        with pytest.raises(UserError, match="would replace its own input"):
            stage([tmp_path / "train.jsonl"])
    assert len(read_lines(tmp_path / "train.jsonl")) == 3


def test_a_similarity_of_0_is_refused(tmp_path):
    with pytest.raises(UserError, match="--similarity 0 would make all prompts duplicates"):
        prepare(tmp_path, questions(3), similarity=0)


def test_unicode_survives(tmp_path):
    prepare(tmp_path, [{"prompt": "naïve – 漢字\u2028x"}])
    (line,) = [json.loads(text) for text in (tmp_path / "out/train.jsonl").read_text().split("\n") if text]
    assert line["messages"][0]["content"] == "naïve – 漢字\u2028x"


def test_a_key_is_the_text_s_and_not_that_of_the_answers_or_of_other_fields():
    ask = {"role": "user", "content": "a"}
    assert prompt_key([ask]) == prompt_key([ask, {"role": "assistant", "content": "b"}], [])
    assert prompt_key([ask]) != prompt_key([ask], [{"type": "function"}])


def test_a_benchmark_keeps_every_row_in_order_also_equal_ones_and_all_its_turns(tmp_path):
    write_lines(tmp_path / "short.jsonl", [{"turns": ["a", "b"]}, {"turns": ["c"]}, {"turns": ["c"]}])
    write_lines(tmp_path / "other.jsonl", [{"turns": [f"question {i}"]} for i in range(3)])
    counts = prepare_benchmarks([tmp_path / "short.jsonl", tmp_path / "other.jsonl"], tmp_path / "out")
    assert counts == {"short": 3, "other": 3}
    lines = result(tmp_path, "short")
    assert [line["id"] for line in lines] == ["short-0001", "short-0002", "short-0003"]
    assert {line["source"] for line in lines} == {"short"}
    assert [[m["content"] for m in line["messages"]] for line in lines] == [["a", "b"], ["c"], ["c"]]
    assert len(read_prompts(tmp_path / "out/other.jsonl")) == 3


@pytest.mark.parametrize(
    "rows, complaint",
    [([], "holds no prompts"), ([{"turns": ["a"]}, {"turns": [" "]}], "in.jsonl:2: no user text; a benchmark is kept")],
)
def test_a_benchmark_that_cannot_be_kept_whole_is_refused(tmp_path, rows, complaint):
    write_lines(tmp_path / "in.jsonl", rows)
    with pytest.raises(UserError, match=complaint):
        prepare_benchmarks([tmp_path / "in.jsonl"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_benchmarks_of_one_name_are_refused(tmp_path):
    paths = [tmp_path / folder / "in.jsonl" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        write_lines(path, [{"turns": ["a"]}])
    with pytest.raises(UserError, match="have one name"):
        prepare_benchmarks(paths, tmp_path / "out")


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="needs the five benchmarks, which are others' data and not in here")
def test_the_five_benchmarks_keep_their_rows_and_turns(tmp_path):
    counts = prepare_benchmarks(sorted(BENCHMARKS.glob("*.jsonl")), tmp_path / "out")
    assert counts == {"gsm8k": 1319, "humaneval": 164, "math500": 500, "mbpp": 257, "mt-bench": 80}
    assert all(len(line["messages"]) == 2 for line in result(tmp_path, "mt-bench"))
    asked = [json.loads(line)["turns"] for line in (BENCHMARKS / "math500.jsonl").read_text().splitlines()]
    assert [[m["content"] for m in line["messages"]] for line in result(tmp_path, "math500")] == asked
