"""Rows of the files that prompts come in: JSON lines, JSON, Parquet, a saved Hugging Face dataset.

A row is a dictionary of plain Python values; beside it goes where it stands ("FILE:LINE" or "FILE: row N", from 1),
which every complaint about it starts with. JSON lines, Parquet and saved datasets are streamed, a JSON file is held in
memory.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UserError

Row = dict[str, Any]

SUPPORTED = "JSON lines (.jsonl), JSON (.json), Parquet (.parquet) or a folder that Dataset.save_to_disk made"
COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz"}
BATCH_ROWS = 1000  # rows of Parquet and Arrow that are Python objects at a time


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """(where, row) for every row of `path`, in order. UserError for a kind of file that cannot be read, and for rows
    that are no objects.

    A saved DatasetDict is read if it has one split. With several of them the user has to say which: nobody wants the
    test split among the training prompts by accident.
    """
    if not path.exists():
        raise UserError(f"there is no {path}; inputs are {SUPPORTED}.")
    if path.is_dir():
        return _read_saved_dataset(path)
    kind = path.suffix.lower()
    if kind in COMPRESSED:
        raise UserError(f"{path} is compressed ({kind}); unpack it first: inputs are {SUPPORTED}.")
    readers = {".jsonl": read_lines, ".ndjson": read_lines, ".json": _read_json, ".parquet": _read_parquet}
    if kind not in readers:
        raise UserError(f"{path} ends in {kind or 'no suffix'!r}; inputs are {SUPPORTED}: convert or rename it.")
    return readers[kind](path)


def _text_error(path: Path, error: UnicodeDecodeError) -> UserError:
    return UserError(f"{path} is not UTF-8 text ({error}); convert it, or give it the suffix of what it is.")


def read_lines(path: Path) -> Iterator[tuple[str, Row]]:
    """("FILE:LINE", parsed line) of a JSONL file; blank lines are passed over. UserError for a line that is no
    object.
    """
    if not path.is_file():
        raise UserError(f"there is no prompts file {path}; pass a JSONL file.")
    with open(path, encoding="utf-8-sig") as file:
        try:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield f"{path}:{number}", _parse_line(text, f"{path}:{number}")
        except UnicodeDecodeError as error:
            raise _text_error(path, error) from error


def _parse_line(text: str, where: str) -> Row:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error}); a prompts file has one JSON object a line.") from error
    if not isinstance(line, dict):
        raise UserError(f"{where} is a {type(line).__name__}; a prompts file has one JSON object a line.")
    return line


def _read_json(path: Path) -> Iterator[tuple[str, Row]]:
    """The objects of a JSON array, or of the one list in a JSON object; JSON lines that are called .json work too."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _text_error(path, error) from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a whole value, and then another one
            yield from read_lines(path)
            return
        raise UserError(f"{path} is not JSON ({error}); correct it there.") from error
    if isinstance(value, dict):
        lists = [name for name, field in value.items() if isinstance(field, list)]
        if len(lists) != 1:
            raise UserError(
                f"{path} is an object with {len(lists)} lists ({', '.join(lists) or 'none'}); a JSON file is an array "
                "of rows, or an object with one list of them: write the rows as JSON lines."
            )
        value = value[lists[0]]
    if not isinstance(value, list):
        raise UserError(f"{path} is a {type(value).__name__}; a JSON file is an array of rows: write JSON lines.")
    for number, row in enumerate(value, 1):
        if not isinstance(row, dict):
            raise UserError(f"{path}: row {number} is a {type(row).__name__}; rows are JSON objects.")
        yield f"{path}: row {number}", row


def _without_nones(value: Any) -> Any:
    """`value` without the None fields of its objects: Arrow fills in the fields that only other rows have."""
    if isinstance(value, dict):
        return {name: _without_nones(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [_without_nones(item) for item in value]
    return value


def _read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", _without_nones(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet after row {number} ({error}); fetch it again.") from error


def _read_saved_dataset(path: Path) -> Iterator[tuple[str, Row]]:
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if len(splits) != 1:
            raise UserError(
                f"{path} holds the splits {', '.join(splits)}; pass the folders of those that you want, for example "
                f"{path / splits[0] if splits else path / 'train'}."
            )
        path = path / splits[0]
    if not (path / "state.json").is_file():
        raise UserError(f"{path} holds no saved dataset (no state.json); inputs are {SUPPORTED}: pass its files.")
    import datasets

    try:
        dataset = datasets.load_from_disk(str(path)).with_format("arrow")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} cannot be read as a saved dataset ({error}); save it again.") from error
    number = 0
    for table in dataset.iter(BATCH_ROWS):
        for row in table.to_pylist():
            number += 1
            yield f"{path}: row {number}", _without_nones(row)
