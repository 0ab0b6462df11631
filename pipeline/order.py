"""The order of the samples: which ones form optimizer step t is a pure function of (seed, manifest, t). It depends on
neither the number of ranks nor of workers, nor on restarts (design, contract 2).

The samples of all epochs form one stream: a fresh permutation per epoch, one behind the other. Step t takes the items
[t * global_batch, (t + 1) * global_batch) of it, so the tail of an epoch is carried into the next one and nothing is
dropped but the last incomplete step of the run. Keys are shuffled, never states; skipping ahead on resume reads nothing.
"""
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from data_prep.errors import UserError
from data_prep.manifest import SampleEntry


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
        items = [Item(self.entries[number], epoch) for epoch, number in self._draws(first, first + self.global_batch)]
        return sorted(items, key=lambda item: (item.entry.tokens, item.epoch, item.entry.key))

    def tokens(self, first: int, last: int) -> np.ndarray:
        """int64 [T, G]: lengths of the sequences of steps first..last-1, in the stream's order."""
        G = self.global_batch
        parts = []
        for epoch in range(first * G // len(self.entries), (last * G - 1) // len(self.entries) + 1):
            begin = epoch * len(self.entries)
            parts.append(self._lengths[self._order(epoch)[max(first * G - begin, 0):last * G - begin]])
        return np.concatenate(parts).reshape(last - first, G)

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.array([entry.tokens for entry in self.entries], dtype=np.int64)

    def _draws(self, first: int, last: int):
        """(epoch, number of the sample) of the places first..last-1 of the stream."""
        for at in range(first, last):
            epoch, place = divmod(at, len(self.entries))
            yield epoch, self._order(epoch)[place]

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
