"""The log of an evaluation's finished prompts, so that a killed run carries on where it stopped.

`results.jsonl` holds one line a prompt, each with the key (hash) of the configuration that made it: weights, prompts,
settings. A run reads back only the lines of its own key. Another configuration's lines stay in the file and are never
mixed in; what differs from the latest of them is told.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from data_prep.errors import UserError
from data_prep.files import canonical_json, sha256_hex


class ResultLog:
    """Records by (prompt, turn) of one configuration; `append` is durable when it returns."""

    def __init__(self, path: Path, configuration: dict):
        self.path = path
        self.key = sha256_hex(canonical_json(configuration))
        lines = _read_complete_lines(path) if path.exists() else []
        self.records = {
            (line["prompt"], line["turn"]): line for line in lines if line["key"] == self.key and "prompt" in line
        }
        headers = [line for line in lines if "configuration" in line]
        self.changes = [] if not headers else _differences(headers[-1]["configuration"], configuration)
        if not headers or headers[-1]["key"] != self.key:
            self._write({"key": self.key, "configuration": configuration})

    def append(self, prompt: int, turn: int, record: dict) -> None:
        line = {"key": self.key, "prompt": prompt, "turn": turn, **record}
        self._write(line)
        self.records[prompt, turn] = line

    def _write(self, line: dict) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _read_complete_lines(path: Path) -> list[dict]:
    """All lines; a last one without its newline was cut by a kill and is removed from the file."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    try:
        return [json.loads(line) for line in content[:end].splitlines()]
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
