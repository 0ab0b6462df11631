"""The responses file while a run adds to it: one writer, whole lines, found again by sample id."""

import fcntl
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from .conversations import Turn
from .errors import UserError
from .quality import flaws
from .tokens import parted

SYNC = 5  # seconds of finished lines that a power cut may cost
COUNTS = ("lines", "generated", "tokens", "stop", "empty", "cut", "looping")  # shown even where they are 0
EXAMPLES = 3  # ids shown of every flaw
CONTEXT = "dropped: prompt and response exceed the context"


class ResponseFile:
    """Opens `path` for this process alone. `counts` is about all lines that the prompts ask for, kept ones included;
    `bar` about the tokens of this run.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, stop_ids: list[int]):
        self.path, self.tokenizer, self.stop_ids = path, tokenizer, stop_ids
        self.counts: Counter = Counter(dict.fromkeys(COUNTS, 0))
        self.examples: dict[str, list[str]] = defaultdict(list)
        self.places: dict[str, int] = {}  # sample id -> byte offset of its line
        self.bar: tqdm | None = None
        self.synced = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "ab+")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.file.close()
            raise UserError(f"another respond is writing {path}; wait for it or stop it.") from error

    def __enter__(self) -> "ResponseFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.sync()
        self.file.close()
        if self.bar is not None:
            self.bar.close()

    def begin(self, names: Iterable[str], limit: int) -> None:
        """Find the finished lines (a last line that was cut short is cut off the file) and start the bar; `names` are
        the ids that there can be, `limit` the expected tokens of a line. UserError for lines that do not belong here.
        """
        names = set(names)
        self.file.seek(0)
        place = 0
        size = os.fstat(self.file.fileno()).st_size
        with tqdm(total=size, desc="finished lines", unit="B", unit_scale=True, leave=False) as bar:
            for raw in iter(self.file.readline, b""):
                if not raw.endswith(b"\n"):
                    self.file.truncate(place)
                    break
                name = self._parse(raw, place)["id"]
                if name not in names or name in self.places:
                    fault = "is there twice" if name in self.places else "is none of the prompts'"
                    raise UserError(
                        f"{self.path}: the line of {name!r} at byte {place} {fault}: the file was changed; restore it "
                        "or choose another --out."
                    )
                self.places[name] = place
                place += len(raw)
                bar.update(len(raw))
        self.open_turns, self.limit = len(names), limit
        self.bar = tqdm(total=0, desc="responses", unit="tok", unit_scale=True, smoothing=0.05)
        self._expect()

    def _parse(self, raw: bytes, place: int) -> dict[str, Any]:
        try:
            line = json.loads(raw)
            if {"id", "prompt_token_ids", "response_token_ids", "response", "ids_from"} <= line.keys():
                return line
        except (ValueError, AttributeError):
            pass
        raise UserError(
            f"{self.path}: what begins at byte {place} is no line of a responses file: {raw[:60]!r}; restore the file "
            "or choose another --out."
        )

    def kept(self, turn: Turn) -> str | None:
        """The text of the turn's response, counted, if the file holds its line. UserError when the line answers another
        prompt.
        """
        if turn.name not in self.places:
            return None
        self.file.seek(self.places[turn.name])
        line = self._parse(self.file.readline(), self.places[turn.name])
        if line["prompt_token_ids"] != turn.prompt.tolist():
            raise UserError(
                f"{self.path}: the line of {turn.name!r} answers another prompt, "
                f"{parted(self.tokenizer, line['prompt_token_ids'], turn.prompt.tolist())}: lines were changed; "
                "restore the file or choose another --out."
            )
        self._count(line)
        return line["response"]

    def add(self, turn: Turn, ids: list[int], ids_from: str, text: str | None = None) -> str:
        """Append the turn's line and return the response's text: `text`, by default what `ids` without the stop token
        say.
        """
        stopped = ids[-1] in self.stop_ids
        if text is None:
            text = self.tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=True)
        line = turn.line() | {
            "response_token_ids": ids,
            "finish_reason": "stop" if stopped else "length",
            "response": text,
            "ids_from": ids_from,
        }
        self.file.seek(0, os.SEEK_END)
        self.places[turn.name] = self.file.tell()
        self.file.write((json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8"))
        self.file.flush()
        if time.monotonic() - self.synced > SYNC:
            self.sync()
        self.counts["generated"] += 1
        self._count(line)
        return text

    def skip(self, reason: str, turns: int) -> None:
        """Count `turns` that get no line."""
        self.counts[reason] += turns
        self.open_turns -= turns
        self._expect()

    def sync(self) -> None:
        """Make all lines so far survive a power cut."""
        os.fsync(self.file.fileno())
        self.synced = time.monotonic()

    def _count(self, line: dict[str, Any]) -> None:
        ids = line["response_token_ids"]
        self.counts["lines"] += 1
        self.counts["tokens"] += len(ids)
        self.counts["stop"] += ids[-1] in self.stop_ids
        for found in flaws(ids, self.stop_ids, line["response"]):
            self.counts[found] += 1
            self.examples[found].append(line["id"])
            del self.examples[found][EXAMPLES:]
        if line["ids_from"] == "text":
            self.counts["ids from text"] += 1
        self.open_turns -= 1
        self._expect()

    def _expect(self) -> None:
        """Let the bar expect lines as long as those so far."""
        lines = self.counts["lines"]
        each = self.counts["tokens"] / lines if lines else self.limit
        self.bar.total = self.bar.n + round(self.open_turns * each)
        self.bar.set_postfix_str(f"{lines} lines, {self.open_turns} to go", refresh=False)
        self.bar.update(0)

    def report(self) -> None:
        """Print where to look at what is wrong with responses."""
        for found, names in self.examples.items():
            print(f"{found}: {self.counts[found]} responses, for example {', '.join(names)}")
