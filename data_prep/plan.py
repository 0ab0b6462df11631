"""Which sample goes where, decided before any computing: a pure function of the responses file and the settings.

Samples fill shards in the file's order; inside a shard they are sorted by length, longest first, and cut into batches
under a token budget (padding included); keys number them in that order, so a shard's members are written as they are
computed.
"""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from .errors import UserError
from .files import canonical_json
from .manifest import Plan
from .shards import sample_bytes
from .tokens import prompt_ids


class Planned(NamedTuple):
    """A sample to be: its key (set when its place is known), the byte of its line in the file, its token counts."""

    key: str
    line: int
    tokens: int
    prompt: int


class Batches(NamedTuple):
    """The whole plan: shards, each a list of batches, each a list of samples; what was dropped; the content's hash."""

    shards: list[list[list[Planned]]]
    dropped: Counter
    cut: int
    source_sha256: str

    def plan(self) -> Plan:
        """The manifest's summary."""
        samples = [sample for shard in self.shards for batch in shard for sample in batch]
        return Plan(shards=len(self.shards), samples=len(samples), tokens=sum(sample.tokens for sample in samples))

    def padding(self) -> float:
        """Share of the computed positions that are padding."""
        computed = sum(len(batch) * batch[0].tokens for shard in self.shards for batch in shard)
        return 1 - self.plan().tokens / computed


def _parted(tokenizer: PreTrainedTokenizerBase, have: list[int], served: list[int]) -> str:
    """Both renderings around the first id in which they differ."""
    place = next((i for i, pair in enumerate(zip(have, served)) if pair[0] != pair[1]), min(len(have), len(served)))
    texts = (tokenizer.decode(ids[max(place - 5, 0) : place + 10]) for ids in (have, served))
    return "at id {}: the file has ...{!r}, serving renders ...{!r}".format(place, *texts)


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
    served = prompt_ids(tokenizer, line["messages"], template_args)
    if served != prompt:
        raise UserError(
            f"sample {name}: its prompt ids are not what serving renders from its messages, "
            f"{_parted(tokenizer, prompt, served)}; regenerate the responses with this target, template and "
            "--template-args."
        )


def make_plan(
    responses: Path,
    tokenizer: PreTrainedTokenizerBase,
    template_args: dict[str, Any],
    *,
    vocab_rows: int,
    hidden_size: int,
    features: int,
    mask_token_id: int,
    max_length: int,
    shard_bytes: int,
    batch_tokens: int,
) -> Batches:
    """Read and check every line of `responses`, drop what has no two consecutive supervised tokens, and place the
    rest.
    """
    dropped: Counter = Counter()
    digest = hashlib.sha256()
    shards: list[list[Planned]] = [[]]
    seen: set[str] = set()
    cut = room = 0
    with open(responses, "rb") as file, tqdm(desc="planning", unit=" samples") as bar:
        while raw := file.readline():
            if not raw.endswith(b"\n"):
                raise UserError(
                    f"{responses} ends in half a line: respond was interrupted; run its command again to carry on."
                )
            line = json.loads(raw)
            check_line(line, tokenizer, template_args, vocab_rows, mask_token_id)
            if line["id"] in seen:
                raise UserError(f"{responses} holds the sample {line['id']!r} twice; ids have to be different.")
            seen.add(line["id"])
            fields = ("id", "source", "prompt_token_ids", "response_token_ids", "finish_reason")
            digest.update(canonical_json([line[name] for name in fields]))
            bar.update()
            prompt = len(line["prompt_token_ids"])
            whole = prompt + len(line["response_token_ids"])
            tokens = min(whole, max_length)
            if tokens - prompt < 2:  # the first supervised position is `prompt`; an anchor needs the next one too
                reason = f" after cutting to {max_length}" if whole - prompt >= 2 else ""
                dropped[f"no two consecutive supervised tokens{reason}"] += 1
                continue
            cut += whole > max_length
            size = sample_bytes(tokens, features, hidden_size)
            if shards[-1] and room < size:
                shards.append([])
            if not shards[-1]:
                room = shard_bytes
            room -= size
            shards[-1].append(Planned("", file.tell() - len(raw), tokens, prompt))
    if not shards[0]:
        reasons = "; ".join(f"{count} {reason}" for reason, count in dropped.items()) or "the file is empty"
        raise UserError(f"{responses}: no sample is left ({reasons}); use longer responses or a larger --max-length.")
    return Batches(_batched(shards, batch_tokens), dropped, cut, digest.hexdigest())


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
