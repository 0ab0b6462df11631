"""Reproducible batches: which samples form optimizer step t, and which anchors each draws, is a pure function of
(seed, manifest, t). It depends on neither the number of ranks nor of workers, nor on restarts (design, contract 2).

The samples of all epochs form one stream: a fresh permutation per epoch, one behind the other. Step t takes the items
[t * global_batch, (t + 1) * global_batch) of it, so the tail of an epoch is carried into the next one and nothing is
dropped but the last incomplete step of the run. Skipping ahead on resume reads nothing.
"""
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data_prep.errors import UserError
from data_prep.manifest import SampleEntry
from data_prep.samples import read_sample
from pipeline.anchors import block_input_ids, block_labels, draw_anchors


class Item(NamedTuple):
    entry: SampleEntry
    epoch: int


@dataclass(frozen=True)
class StepPlan:
    """The stream of samples and how it is cut into steps."""

    entries: list[SampleEntry]
    seed: int
    epochs: int
    global_batch: int

    def __post_init__(self):
        if self.steps < 1:
            raise UserError(f"{len(self.entries)} samples x {self.epochs} epochs make no step of {self.global_batch} "
                            "sequences; lower optim.global_batch, raise optim.epochs or prepare more data")

    @property
    def steps(self) -> int:
        return len(self.entries) * self.epochs // self.global_batch

    @property
    def unused(self) -> int:
        """Draws of the last incomplete step, which is not taken."""
        return len(self.entries) * self.epochs % self.global_batch

    def items(self, step: int) -> list[Item]:
        """The samples of optimizer step `step` (0-based), longest last, so that neighbours pad little."""
        first = step * self.global_batch
        items = []
        for at in range(first, first + self.global_batch):
            epoch, place = divmod(at, len(self.entries))
            items.append(Item(self.entries[self._order(epoch)[place]], epoch))
        return sorted(items, key=lambda item: (item.entry.tokens, item.epoch, item.entry.key))

    def _order(self, epoch: int) -> np.ndarray:
        return _permutation(len(self.entries), self.seed, epoch)


_PERMUTATIONS: dict[tuple[int, int, int], np.ndarray] = {}


def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch; the two most recent ones are kept, since a step may span both."""
    key = (n, seed, epoch)
    if key not in _PERMUTATIONS:
        while len(_PERMUTATIONS) >= 2:
            _PERMUTATIONS.pop(next(iter(_PERMUTATIONS)))
        _PERMUTATIONS[key] = np.random.default_rng([seed, epoch]).permutation(n)
    return _PERMUTATIONS[key]


@dataclass
class MicroBatch:
    """b sequences of one rank, padded to the longest. Shapes: S tokens, N anchors, K slots, E = features * hidden."""

    keys: list[str]
    features_BSE: Tensor  # bf16, as stored
    block_ids_BT: Tensor  # int64, T = N * K
    anchors_BN: Tensor  # int64, 0 where unused
    labels_BNJ: Tensor  # int64, J = K - 1
    mask_BNJ: Tensor  # bool
    real_tokens: int  # without padding

    def to(self, device: torch.device, dtype: torch.dtype) -> "MicroBatch":
        moved = {name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
                 for name, value in vars(self).items()}
        return MicroBatch(**{**moved, "features_BSE": moved["features_BSE"].to(dtype)})


class StepDataset(Dataset):
    """Map from optimizer step to this rank's micro-batches; what a DataLoader's workers read ahead."""

    def __init__(self, folder: Path, plan: StepPlan, *, rank: int, world: int, micro_batch: int, max_anchors: int,
                 block_size: int, mask_token_id: int):
        self.folder, self.plan = Path(folder), plan
        self.rank, self.world, self.micro_batch = rank, world, micro_batch
        self.max_anchors, self.block_size, self.mask_token_id = max_anchors, block_size, mask_token_id

    def __len__(self) -> int:
        return self.plan.steps

    def __getitem__(self, step: int) -> list[MicroBatch]:
        items = self.plan.items(step)
        per_pass = self.world * self.micro_batch
        # Ranks are dealt neighbours in length, one each in turn, so that no rank waits for another.
        passes = [items[at:at + per_pass] for at in range(0, len(items), per_pass)]
        return [self._collate(one_pass[self.rank::self.world]) for one_pass in passes]

    def _collate(self, items: list[Item]) -> MicroBatch:
        samples = [read_sample(self.folder / e.shard, e.offset, e.nbytes) for e, _ in items]
        anchors = [draw_anchors(sample["loss_mask"], self.max_anchors, seed=self.plan.seed, epoch=item.epoch,
                                key=item.entry.key) for sample, item in zip(samples, items)]
        B, S, N = len(items), max(len(s["input_ids"]) for s in samples), max(map(len, anchors))
        F, D = samples[0]["hidden"].shape[1:]
        features_BSE = torch.zeros(B, S, F * D, dtype=torch.bfloat16)
        ids_BS = torch.zeros(B, S, dtype=torch.int64)
        loss_mask_BS = torch.zeros(B, S, dtype=torch.uint8)
        anchors_BN = torch.zeros(B, N, dtype=torch.int64)
        used_BN = torch.zeros(B, N, dtype=torch.bool)
        for b, (sample, drawn) in enumerate(zip(samples, anchors)):
            length, n = len(sample["input_ids"]), len(drawn)
            features_BSE[b, :length] = sample["hidden"].flatten(1)
            ids_BS[b, :length] = sample["input_ids"]
            loss_mask_BS[b, :length] = sample["loss_mask"]
            # Unused blocks come first: ascending order keeps the context prefixes of attention groups short.
            anchors_BN[b, N - n:] = drawn
            used_BN[b, N - n:] = True
        labels, mask = block_labels(ids_BS, loss_mask_BS, anchors_BN, used_BN, self.block_size)
        block_ids = block_input_ids(ids_BS, anchors_BN, self.block_size, self.mask_token_id)
        return MicroBatch([e.key for e, _ in items], features_BSE, block_ids, anchors_BN, labels, mask,
                          sum(len(s["input_ids"]) for s in samples))
