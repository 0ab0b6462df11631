"""Held-out evaluation from shards, without the target: how long the drafter's blocks would have been accepted.

A share of the samples, chosen by a hash of their keys, is never trained on. For every valid anchor of a held-out sample
the drafter's block is compared with the stored tokens (teacher forcing). Two numbers come out of it, under two names:

    walk_tau          the anchors that serving visits: from the first one, each step emits the accepted tokens and one
                      of the target's own, and the next anchor is the last token emitted
    all_anchors_tau   the mean over all valid anchors; it counts the easy middles of words that a walk jumps over

Both are emitted tokens per step (accepted + 1). Blocks end with their supervision, so blocks near the end of a response
count less than serving would give them. The numbers are the same for any number of ranks: every pass is computed alone,
and what they return is put together by position, not added up.
"""
import hashlib
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from data_prep.errors import UserError
from data_prep.manifest import SampleEntry
from data_prep.samples import anchor_positions
from pipeline.anchors import block_input_ids, block_labels
from pipeline.batches import MicroBatch
from pipeline.config import RunConfig
from pipeline.loader import refuse_together
from pipeline.reader import DamagedSample, SampleReader


def split(entries: list[SampleEntry], share: float) -> tuple[list[SampleEntry], list[SampleEntry]]:
    """(to train on, held out). A sample's side depends on its key and `share` alone: adding data moves none."""
    held = [entry for entry in entries if _place(entry.key) < share]
    kept = [entry for entry in entries if _place(entry.key) >= share]
    if share and not (held and kept):
        raise UserError(f"evaluation.share {share:g} of {len(entries)} samples holds out {len(held)}; change it so that both "
                        "sides have some, or set it to 0 to train on all and evaluate nothing")
    return kept, held


def _place(key: str) -> float:
    """Uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(f"heldout/{key}".encode()).digest()[:8], "big") / 2**64


@dataclass(frozen=True)
class Pass:
    """Up to `max_anchors` neighbouring anchors of one sample; `first` is their place among all held-out anchors."""

    entry: SampleEntry
    skip: int  # anchors of the sample in earlier passes
    count: int
    first: int


class HeldoutSet:
    """The samples of an evaluation and how ranks share their anchors."""

    def __init__(self, reader: SampleReader, entries: list[SampleEntry], run: RunConfig, mask_token_id: int):
        self.reader, self.mask_token_id = reader, mask_token_id
        self.block_size, self.on_error = run.drafter.block_size, run.data.on_error
        chosen = sorted((e for e in entries if e.anchors), key=lambda e: _place(e.key))[:run.evaluation.samples]
        self.samples = chosen
        self.passes, first = [], 0
        for entry in chosen:
            for skip in range(0, entry.anchors, run.loss.max_anchors):
                count = min(run.loss.max_anchors, entry.anchors - skip)
                self.passes.append(Pass(entry, skip, count, first))
                first += count
        self.anchors = first
        if not first:
            raise UserError(f"none of the {len(entries)} held-out samples has a valid anchor; raise evaluation.share, or set "
                            "evaluation.every to null")

    def batch(self, one: Pass) -> tuple[MicroBatch, Tensor]:
        """The blocks of one pass, one row, and their anchors' positions [N]."""
        sample = self.reader.read(one.entry)
        positions = anchor_positions(sample["loss_mask"])[one.skip:one.skip + one.count]
        ids_1S, anchors_1N = sample["input_ids"].long()[None], positions[None]
        used_1N = torch.ones_like(anchors_1N, dtype=torch.bool)
        labels, mask = block_labels(ids_1S, sample["loss_mask"][None], anchors_1N, used_1N, self.block_size)
        block_ids = block_input_ids(ids_1S, anchors_1N, self.block_size, self.mask_token_id)
        return MicroBatch([one.entry.key], sample["hidden"].flatten(1)[None], block_ids, anchors_1N, labels, mask,
                          ids_1S.shape[1]), positions

    def _nothing(self) -> MicroBatch:
        """One unused block: a rank takes part in a pass whose sample is damaged."""
        features, hidden = self.reader.features
        block_ids_1K = torch.full((1, self.block_size), self.mask_token_id)
        labels_11J = torch.zeros(1, 1, self.block_size - 1, dtype=torch.int64)
        return MicroBatch([], torch.zeros(1, 1, features * hidden, dtype=torch.bfloat16), block_ids_1K,
                          torch.zeros(1, 1, dtype=torch.int64), labels_11J, labels_11J.bool(), 0)

    def evaluate(self, forward, runtime, stop) -> dict[str, float] | None:
        """The held-out numbers, the same on all ranks; None where a stop was asked for meanwhile. Damaged samples end it on
        all ranks, or are left out under data.on_error `skip`.

        forward: MicroBatch -> BlockLoss, a pass of the drafter that all ranks take together.
        """
        # accepted, loss, position, read
        found_A4 = torch.zeros(self.anchors, 4, dtype=torch.float64, device=runtime.device)
        with torch.no_grad():
            for at in range(0, len(self.passes), runtime.world):
                mine = at + runtime.rank
                # Ranks without a pass of their own repeat one, since all take part in gathering the weights.
                one = self.passes[min(mine, len(self.passes) - 1)]
                problem = positions = None
                try:
                    micro_batch, positions = self.batch(one)
                except UserError as error:
                    if self.on_error == "stop" or not isinstance(error, DamagedSample):
                        problem = str(error)
                    else:
                        print(f"held-out evaluation, skipped: {error}", file=sys.stderr, flush=True)
                        micro_batch = self._nothing()
                refuse_together("the held-out evaluation", problem, runtime)
                micro_batch = micro_batch.to(runtime.device, runtime.dtype)
                out, mask_NJ = forward(micro_batch), micro_batch.mask_BNJ[0]
                if mine < len(self.passes) and positions is not None:
                    rows = found_A4[one.first:one.first + one.count]
                    rows[:, 0] = (out.correct & mask_NJ).long().cumprod(-1).sum(-1)
                    rows[:, 1] = (out.weights * out.nll).sum(-1)
                    rows[:, 2] = positions.to(rows)
                    rows[:, 3] = 1
                if stop.asked():
                    return None
        return self._numbers(runtime.sum(found_A4).cpu())

    def _numbers(self, found_A4: Tensor) -> dict[str, float]:
        emitted = steps = samples = 0
        of_samples = found_A4.split([entry.anchors for entry in self.samples])
        for accepted, _, positions, read in (rows.unbind(-1) for rows in of_samples):
            if read.all():
                emitted_here, steps_here = walk(accepted.long().tolist(), positions.long().tolist())
                emitted, steps, samples = emitted + emitted_here, steps + steps_here, samples + 1
        if not samples:
            raise UserError(f"all {len(self.samples)} held-out samples are damaged; restore the shards from a copy, or set "
                            "evaluation.every to null")
        accepted, loss, _, _ = found_A4[found_A4[:, 3] == 1].unbind(-1)
        return {"heldout/walk_tau": emitted / steps, "heldout/all_anchors_tau": 1.0 + accepted.mean().item(),
                "heldout/loss_per_anchor": loss.mean().item(), "heldout/anchors": float(len(accepted)),
                "heldout/samples": float(samples)}


def walk(accepted: list[int], positions: list[int]) -> tuple[int, int]:
    """(tokens emitted, steps taken) along one sample's valid anchors, ascending `positions`.

    A step at position p accepts a tokens and emits a + 1, so the next one stands at p + a + 1, or at the first valid
    anchor behind it where that is none (a response has ended and another begins).
    """
    emitted = steps = at = 0
    for count, position in zip(accepted, positions):
        if position >= at:
            emitted, steps, at = emitted + count + 1, steps + 1, position + count + 1
    return emitted, steps
