"""Rows of JSON lines, JSON, Parquet and saved datasets: all of them, in order, as plain Python, with their places."""

import gzip
import json

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from data_prep.errors import UserError
from data_prep.messages import to_messages, to_tools
from data_prep.sources import BATCH_ROWS, read_rows

CALLS = [{"function": {"name": "f", "arguments": {"x": 1}}}]
ROWS = [
    {"id": "1", "messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "parameters": {"x": "int"}}]},
    {"id": "2", "messages": [{"role": "user", "content": "b\u2028c"}, {"role": "assistant", "tool_calls": CALLS}]},
]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in rows), encoding="utf-8-sig")


def json_array(path, rows):
    path.write_text(json.dumps(rows, indent=1))


def json_object(path, rows):
    path.write_text(json.dumps({"version": 2, "data": rows}))


def parquet_file(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def saved(path, rows):
    datasets.Dataset.from_list(rows).save_to_disk(path)


def saved_with_one_split(path, rows):
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(path)


KINDS = {
    "a.jsonl": jsonl,
    "a.ndjson": jsonl,
    "a.json": json_array,
    "b.json": json_object,
    "lines.json": jsonl,
    "a.PARQUET": parquet_file,
    "saved": saved,
    "dict": saved_with_one_split,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_conversations_and_tools(tmp_path, name):
    KINDS[name](tmp_path / name, ROWS)
    rows = list(read_rows(tmp_path / name))
    assert [row["id"] for _, row in rows] == ["1", "2"]
    assert [to_messages(row, where) for where, row in rows] == [to_messages(row, "") for row in ROWS]
    assert [to_tools(row, where) for where, row in rows] == [to_tools(row, "") for row in ROWS]
    assert all(where.startswith(str(tmp_path / name)) and where[-1] in "123" for where, _ in rows)
    json.dumps([row for _, row in rows])  # plain Python all through


@pytest.mark.parametrize("write, name", [(parquet_file, "many.parquet"), (saved, "many")])
def test_batches_lose_no_row_and_the_places_count_on(tmp_path, write, name):
    count = 2 * BATCH_ROWS + 7
    write(tmp_path / name, [{"id": i, "prompt": f"question {i}"} for i in range(count)])
    rows = list(read_rows(tmp_path / name))
    assert [row["id"] for _, row in rows] == list(range(count))
    assert [where for where, _ in rows] == [f"{tmp_path / name}: row {i}" for i in range(1, count + 1)]


def test_a_dataset_that_was_filtered_and_formatted_before_it_was_saved_gives_its_own_rows(tmp_path):
    data = datasets.Dataset.from_list([{"id": i, "turns": ["a", "b"]} for i in range(6)])
    data.select([4, 2]).with_format("numpy").save_to_disk(tmp_path / "saved")
    assert [row for _, row in read_rows(tmp_path / "saved")] == [{"id": i, "turns": ["a", "b"]} for i in (4, 2)]


def test_nones_are_kept_out_of_nested_arrow_fields_but_not_out_of_json(tmp_path):
    rows = [{"calls": [{"x": 1}]}, {"calls": [{"y": 2}, None]}]
    parquet_file(tmp_path / "a.parquet", rows)
    assert [row for _, row in read_rows(tmp_path / "a.parquet")] == rows
    json_array(tmp_path / "a.json", [{"calls": [{"x": None}]}])
    assert [row for _, row in read_rows(tmp_path / "a.json")] == [{"calls": [{"x": None}]}]


def test_a_dataset_of_several_splits_asks_which_one_and_reads_that(tmp_path):
    splits = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="holds the splits train, test; pass the folders.*saved/train"):
        list(read_rows(tmp_path / "saved"))
    assert [row for _, row in read_rows(tmp_path / "saved/test")] == [{"prompt": "test"}]


@pytest.mark.parametrize(
    "name, content, complaint",
    [
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "x"}', mtime=0), r"is compressed \(.gz\); unpack it first: inputs are"),
        ("a.csv", b"prompt\nx\n", r"ends in '.csv'; inputs are JSON lines"),
        ("prompts", b"{}", "ends in 'no suffix'; inputs are"),
        ("a.jsonl", b'{"prompt": "x"}\n{oops\n', "a.jsonl:2 is not JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1 is a list"),
        ("a.jsonl", gzip.compress(b"x", mtime=0), "is not UTF-8 text"),
        ("a.json", b'[{"prompt": "x"}', "a.json is not JSON"),
        ("a.json", b'[{"prompt": "x"}, 3]', "a.json: row 2 is a int"),
        ("a.json", b'"x"', "a.json is a str; a JSON file is an array"),
        ("a.json", b'{"a": [], "b": []}', r"is an object with 2 lists \(a, b\)"),
        ("a.json", b'{"prompt": "x"}', r"is an object with 0 lists \(none\)"),
        ("a.json", b"\xff", "is not UTF-8 text"),
        ("a.parquet", b"PAR1 nothing", "cannot be read as Parquet after row 0"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_can_be(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        list(read_rows(tmp_path / name))


def test_one_flipped_byte_in_a_parquet_file_with_checksums_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    rows = pyarrow.table({"prompt": [f"question {i}" for i in range(4000)]})
    parquet.write_table(rows, path, compression="none", use_dictionary=False, write_page_checksum=True)
    path.write_bytes(path.read_bytes().replace(b"question 3999", b"question 3998", 1))
    with pytest.raises(UserError, match="cannot be read as Parquet after row"):
        list(read_rows(path))


def test_missing_paths_and_folders_that_are_no_dataset_are_refused(tmp_path):
    with pytest.raises(UserError, match="there is no .*nothing.jsonl"):
        read_rows(tmp_path / "nothing.jsonl")
    with pytest.raises(UserError, match="holds no saved dataset"):
        list(read_rows(tmp_path))
    saved(tmp_path / "saved", ROWS)
    next((tmp_path / "saved").glob("*.arrow")).write_bytes(b"damaged")
    with pytest.raises(UserError, match="cannot be read as a saved dataset"):
        list(read_rows(tmp_path / "saved"))
