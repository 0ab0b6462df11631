"""The shards of one task: the target's forward pass in this thread, hashing and the disk in another."""

import json
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from .errors import UserError
from .features import FeatureTaps, Sample
from .manifest import Manifest
from .plan import Batches, Planned
from .records import make_record, write_record
from .shards import ShardWriter, shard_name
from .tokens import sample_tokens

IN_FLIGHT = 2  # batches of states that may wait for the writer


class Row(NamedTuple):
    """A sample before the forward pass: its line of the responses file, ids int32 [S] and loss mask uint8 [S]."""

    line: dict[str, Any]
    input_ids: torch.Tensor
    loss_mask: torch.Tensor


def read_batch(responses: Path, batch: list[Planned]) -> list[Row]:
    """The rows of `batch`: prompt and response of a sample's last turn, supervised on the responses of its turns."""
    rows = []
    with open(responses, "rb") as file:
        for sample in batch:
            file.seek(sample.line)
            line = json.loads(file.readline())
            spans = [(span.start, span.end) for span in sample.spans if span.supervised]
            prompt, response = line["prompt_token_ids"], line["response_token_ids"]
            rows.append(Row(line, *sample_tokens(prompt, response, sample.tokens, spans)))
    return rows


class _ShardFile:
    """One shard on its way to the disk; its methods run on the writer's thread, in the order of submission."""

    def __init__(self, out: Path, number: int, dtype: str):
        self.out, self.dtype = out, dtype
        self.name = shard_name(number)
        self.writer: ShardWriter | None = None
        self.metas: list[dict[str, Any]] = []
        self.broken = False  # a batch failed: what is queued behind it must not finish a shard that lacks it

    def add(self, batch: list[Planned], rows: list[Row], results: list[Sample]) -> None:
        """Append a computed batch."""
        if self.broken:
            return
        try:
            self._append(batch, rows, results)
        except BaseException:
            self.abandon()
            raise

    def _append(self, batch: list[Planned], rows: list[Row], results: list[Sample]) -> None:
        self.writer = self.writer or ShardWriter(self.out, self.name)
        for planned, row, result in zip(batch, rows, results):
            # a row of fp8 codes that was not finite has a scale that is not
            checked = result.states.get("hidden_scale", result.states["hidden"])
            if not checked.isfinite().all():
                raise UserError(
                    f"sample {planned.id}: the target's states hold NaN or infinity; check the target's weights and "
                    f"that {self.dtype} is a dtype it can run in."
                )
            meta = {
                "id": planned.id,
                "source": row.line["source"],
                "turns": [span._asdict() for span in planned.spans],
                "probes": result.probes,
                "argmax_matches": result.argmax_matches,
            }
            if result.fp8_error is not None:
                meta["fp8_error"] = result.fp8_error
            self.writer.add(planned.key, meta, row.input_ids, row.loss_mask, result.states)
            self.metas.append(meta)

    def abandon(self) -> None:
        """Leave nothing of an unfinished shard."""
        self.broken = True
        if self.writer is not None:
            self.writer.abandon()

    def close(self) -> None:
        """Make the shard durable, publish it, and put its record beside it unless another process was faster."""
        if self.broken:
            return
        record = make_record(self.writer.samples, self.metas, *self.writer.finish())
        if not self.writer.publish():
            tqdm.write(f"{self.name}: another process has made it")
            return
        write_record(self.out, record)
        shard = record.shard
        error = f", fp8 error {max(shard.fp8_error):.2%} at most" if shard.fp8_error else ""
        tqdm.write(
            f"{self.name}: {shard.samples} samples, {shard.tokens} tokens, {shard.bytes / 1e6:.1f} MB, equal to the "
            f"argmax {shard.argmax_matches / shard.supervised:.2%}{error}"
        )


def compute_shards(
    taps: FeatureTaps, responses: Path, out: Path, manifest: Manifest, batches: Batches, numbers: Iterable[int]
) -> None:
    """Compute and write the shards `numbers` of the plan that are not there yet."""
    tokens = {n: sum(sample.tokens for batch in batches.shards[n] for sample in batch) for n in numbers}
    bar = tqdm(total=sum(tokens.values()), desc="extracting", unit="tok", unit_scale=True)
    waiting: list[Future] = []
    with ThreadPoolExecutor(max_workers=1) as disk, bar:
        for number in tokens:
            if (out / shard_name(number)).exists():
                bar.initial += tokens[number]  # not part of this run's rate
                bar.update(tokens[number])
                continue
            shard = _ShardFile(out, number, manifest.target.dtype)
            try:
                for batch in batches.shards[number]:
                    rows = read_batch(responses, batch)
                    results = taps.run([row.input_ids for row in rows], [row.loss_mask for row in rows])
                    waiting.append(disk.submit(shard.add, batch, rows, results))
                    while len(waiting) > IN_FLIGHT:
                        waiting.pop(0).result()
                    real = sum(sample.tokens for sample in batch)
                    bar.set_postfix(padding=f"{1 - real / (len(batch) * batch[0].tokens):.1%}", refresh=False)
                    bar.update(real)
                waiting.append(disk.submit(shard.close))
            except BaseException:
                disk.submit(shard.abandon)
                raise
        for future in waiting:
            future.result()
