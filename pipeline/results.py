"""The log of an evaluation's finished prompts, so that a killed run carries on where it stopped.

A line of it is one prompt, with the key (hash) of the configuration that made it: weights, prompts, settings. A run
reads back only the lines of its own key. Another configuration's lines stay in the file and are never mixed in; what
differs from the latest of them is told.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from data_prep.errors import UserError
from data_prep.files import canonical_json, sha256_hex


class ResultLog:
    """Records by (prompt, turn) of one configuration; `append` is durable when it returns.

    All results*.jsonl of the folder are read. Task I of several appends to a file of its own, results-I.jsonl, so that
    they may run at the same time.
    """

    def __init__(self, folder: Path, configuration: dict, task: int | None = None):
        self.path = folder / ("results.jsonl" if task is None else f"results-{task}.jsonl")
        self.key = sha256_hex(canonical_json(configuration))
        if self.path.exists():
            _cut_torn_line(self.path)
        self.records: dict[tuple[int, int], dict] = {}
        self._read: dict[Path, int] = {}  # bytes of each file that are in `records`
        self.refresh()
        known = [line for line in _complete_lines(self.path)[0] if "configuration" in line] if self.path.exists() else []
        self.changes = _differences(known[-1]["configuration"], configuration) if known else []
        if not known or known[-1]["key"] != self.key:
            self._write({"key": self.key, "configuration": configuration})

    def refresh(self) -> None:
        """Reads the lines that were added since the last time, by other tasks as well."""
        for path in sorted(self.path.parent.glob("results*.jsonl")):
            lines, self._read[path] = _complete_lines(path, self._read.get(path, 0))
            for line in lines:
                if line["key"] == self.key and "prompt" in line:
                    self.records[line["prompt"], line["turn"]] = line

    def append(self, prompt: int, turn: int, record: dict) -> None:
        line = {"key": self.key, "prompt": prompt, "turn": turn, **record}
        self._write(line)
        self.records[prompt, turn] = line

    def _write(self, line: dict) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _cut_torn_line(path: Path) -> None:
    """A last line without its newline was cut by a kill."""
    content = path.read_bytes()
    if (end := content.rfind(b"\n") + 1) < len(content):
        os.truncate(path, end)


def _complete_lines(path: Path, begin: int = 0) -> tuple[list[dict], int]:
    """The lines from byte `begin` on that have their newline, and where they end."""
    with open(path, "rb") as file:
        file.seek(begin)
        content = file.read()
    end = content.rfind(b"\n") + 1
    try:
        return [json.loads(line) for line in content[:end].splitlines()], begin + end
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is damaged ({error}); delete it to evaluate anew") from error


def _differences(old: dict, new: dict, prefix: str = "") -> list[str]:
    """Dotted names of the values that differ, with both values."""
    names = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            names += _differences(before, after, f"{prefix}{name}.")
        elif before != after:
            names.append(f"{prefix}{name} was {before!r}, is {after!r}")
    return names
