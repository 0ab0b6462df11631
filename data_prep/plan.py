"""Which sample goes where, decided before any computing: a pure function of the responses file and the settings.

Turns of a conversation share one sample where serving would have extended the one into the next. Samples fill shards in
the file's order; inside a shard they are sorted by length, longest first, and cut into batches under a token budget
(padding included); keys number them in that order, so a shard's members are written as they are computed. Neither the
number of tasks nor a restart changes any of it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from .errors import UserError
from .files import canonical_json
from .manifest import Plan
from .quality import flaws
from .samples import Storage
from .shards import sample_bytes
from .tokens import parted, prompt_ids


class Span(NamedTuple):
    """The response of one turn: positions [start, end) of its sample, and whether it is supervised."""

    turn: int
    start: int
    end: int
    finish_reason: str
    supervised: bool


class Planned(NamedTuple):
    """A sample to be: its key (set when its place is known), its id, the byte of the line that holds its last turn (and
    with it all earlier ones), its tokens and its turns.
    """

    key: str
    id: str
    line: int
    tokens: int
    spans: tuple[Span, ...]


class Batches(NamedTuple):
    """The whole plan: shards, each a list of batches, each a list of samples; what was left out; the content's hash."""

    shards: list[list[list[Planned]]]
    dropped: Counter
    cut: int
    from_text: int
    source_sha256: str

    def plan(self) -> Plan:
        """The manifest's summary."""
        samples = [sample for shard in self.shards for batch in shard for sample in batch]
        return Plan(shards=len(self.shards), samples=len(samples), tokens=sum(sample.tokens for sample in samples))

    def padding(self) -> float:
        """Share of the computed positions that are padding."""
        computed = sum(len(batch) * batch[0].tokens for shard in self.shards for batch in shard)
        return 1 - self.plan().tokens / computed


class _Turn(NamedTuple):
    """A line of the responses file: where it is, its lengths, what is wrong with it; `extends`: its prompt begins with the
    turn before it, ids and response ids.
    """

    turn: int
    line: int
    prompt: int
    tokens: int
    finish_reason: str
    flaws: tuple[str, ...]
    extends: bool


def check_line(
    line: dict[str, Any], tokenizer: PreTrainedTokenizerBase, template_args: dict[str, Any], rows: int, mask: int
) -> None:
    """UserError unless a responses line is what the target would have been served, in ids of its own vocabulary."""
    name, prompt, response = line["id"], line["prompt_token_ids"], line["response_token_ids"]
    if not prompt or not response:
        raise UserError(f"sample {name}: {len(prompt)} prompt and {len(response)} response ids; both have to be there.")
    bad = [i for i in prompt + response if not 0 <= i < rows]
    if bad:
        raise UserError(
            f"sample {name}: token id {bad[0]} is not in the target's vocabulary of {rows} rows; regenerate it."
        )
    if mask in prompt or mask in response:
        raise UserError(
            f"sample {name} contains the mask token {mask}, which has to be a row that text never uses; choose another "
            "with --mask-token-id."
        )
    served = prompt_ids(tokenizer, line["messages"], template_args, line.get("tools"))
    if served != prompt:
        raise UserError(
            f"sample {name}: its prompt ids are not what serving renders from its messages, "
            f"{parted(tokenizer, prompt, served)}; regenerate the responses with this target, template and "
            "--template-args."
        )


class _Reader:
    """One pass over a responses file: every line checked and hashed, turns grouped by conversation."""

    def __init__(self, path: Path):
        self.path = path
        self.digest = hashlib.sha256()
        self.from_text = 0
        self.talks: dict[str, list[_Turn]] = {}
        self._ends: dict[str, tuple[int, bytes]] = {}  # conversation -> length and hash of its latest turn's ids

    def read(self, check: Any, stop_ids: list[int]) -> None:
        """Read all lines; `check(line)` raises UserError for one that must not be used."""
        size = self.path.stat().st_size
        with open(self.path, "rb") as file, tqdm(total=size, desc="planning", unit="B", unit_scale=True) as bar:
            while raw := file.readline():
                if not raw.endswith(b"\n"):
                    raise UserError(
                        f"{self.path} ends in half a line: respond was interrupted; run its command again to carry on."
                    )
                line = json.loads(raw)
                check(line)
                self._add(line, file.tell() - len(raw), stop_ids)
                bar.update(len(raw))

    def _add(self, line: dict[str, Any], at: int, stop_ids: list[int]) -> None:
        prompt, response = line["prompt_token_ids"], line["response_token_ids"]
        talk = self.talks.setdefault(line["conversation"], [])
        if any(turn.turn == line["turn"] for turn in talk):
            raise UserError(f"{self.path} holds the sample {line['id']!r} twice; ids have to be different.")
        fields = ("id", "source", "prompt_token_ids", "response_token_ids", "finish_reason")
        self.digest.update(canonical_json([line[name] for name in fields]))
        self.from_text += line["ids_from"] == "text"
        length, digest = self._ends.get(line["conversation"], (0, b""))
        extends = 0 < length < len(prompt) and _ids_hash(prompt[:length]) == digest
        self._ends[line["conversation"]] = (len(prompt) + len(response), _ids_hash(prompt + response))
        found = tuple(flaws(response, stop_ids, line["response"]))
        tokens = len(prompt) + len(response)
        talk.append(_Turn(line["turn"], at, len(prompt), tokens, line["finish_reason"], found, extends))


def _ids_hash(ids: list[int]) -> bytes:
    return hashlib.blake2b(b",".join(b"%d" % i for i in ids), digest_size=16).digest()


def _grouped(talk: list[_Turn]) -> Iterator[list[_Turn]]:
    """Runs of turns that each extend the one before."""
    group: list[_Turn] = []
    for turn in talk:
        if group and not (turn.extends and turn.turn > group[-1].turn):
            yield group
            group = []
        group.append(turn)
    yield group


def _planned(name: str, talk: list[_Turn], group: list[_Turn], max_length: int, drop: list[str]) -> Planned:
    """The sample of a run of turns, cut to `max_length`; what has a flaw of `drop` is there, but not supervised."""
    tokens = min(group[-1].tokens, max_length)
    spans = [
        Span(turn.turn, turn.prompt, min(turn.tokens, tokens), turn.finish_reason, not set(turn.flaws) & set(drop))
        for turn in group
        if turn.prompt < tokens
    ]
    if len(group) < len(talk):
        first, last = group[0].turn + 1, group[-1].turn + 1
        name = f"{name}#{first}" if first == last else f"{name}#{first}-{last}"
    return Planned("", name, group[-1].line, tokens, tuple(spans))


def make_plan(
    responses: Path,
    tokenizer: PreTrainedTokenizerBase,
    template_args: dict[str, Any],
    *,
    vocab_rows: int,
    hidden_size: int,
    features: int,
    mask_token_id: int,
    stop_ids: list[int],
    max_length: int,
    shard_bytes: int,
    batch_tokens: int,
    storage: Storage,
    last_hidden: bool,
    drop: list[str],
) -> Batches:
    """Read and check every line of `responses`, drop what has no two consecutive supervised tokens, and place the
    rest.
    """
    reader = _Reader(responses)
    reader.read(lambda line: check_line(line, tokenizer, template_args, vocab_rows, mask_token_id), stop_ids)
    dropped: Counter = Counter()
    shards: list[list[Planned]] = [[]]
    cut = room = 0
    for name, talk in reader.talks.items():
        for flaw in (flaw for turn in talk for flaw in turn.flaws if flaw in drop):
            dropped[f"{flaw} response"] += 1
        for group in _grouped(talk):
            sample = _planned(name, talk, group, max_length, drop)
            # an anchor is a supervised position whose next one is supervised too
            if not any(span.supervised and span.end - span.start >= 2 for span in sample.spans):
                kept = [turn for turn in group if not set(turn.flaws) & set(drop)]
                reason = f" after cutting to {max_length}" if any(t.tokens - t.prompt >= 2 for t in kept) else ""
                dropped[f"no two consecutive supervised tokens{reason}"] += bool(kept)
                continue
            cut += group[-1].tokens > max_length
            size = sample_bytes(sample.tokens, features, hidden_size, storage, last_hidden)
            if shards[-1] and room < size:
                shards.append([])
            if not shards[-1]:
                room = shard_bytes
            room -= size
            shards[-1].append(sample)
    if not shards[0]:
        reasons = "; ".join(f"{count} {reason}" for reason, count in dropped.items()) or "the file is empty"
        raise UserError(f"{responses}: no sample is left ({reasons}); use longer responses or a larger --max-length.")
    return Batches(_batched(shards, batch_tokens), +dropped, cut, reader.from_text, reader.digest.hexdigest())


def _batched(shards: list[list[Planned]], batch_tokens: int) -> list[list[list[Planned]]]:
    """Sort each shard by length, cut it into batches of at most `batch_tokens` padded positions, and number the
    samples.
    """
    number = 0
    planned = []
    for shard in shards:
        batches: list[list[Planned]] = []
        for sample in sorted(shard, key=lambda sample: -sample.tokens):  # stable: equal lengths keep the file's order
            if not batches or (len(batches[-1]) + 1) * batches[-1][0].tokens > batch_tokens:
                batches.append([])
            batches[-1].append(sample._replace(key=f"{number:06d}"))
            number += 1
        planned.append(batches)
    return planned
