"""How the steps of a plan are cut into forward passes: which sequences share a row, and which rank gets which row.

Without packing a row is one sequence. With packing a row holds several documents, none of them cut, up to a budget of
tokens. Every step has the same number of passes on every rank (DeepSpeed's accumulation), the smallest with which no row
of the whole run exceeds the budget; within a step the rows are balanced, so a step that has fewer tokens has shorter
rows instead of emptier ones and the share of padding stays small.

Rows are a function of seed, manifest, step, budget and the number of rows that ranks and micro-batches ask for; that
decides how a step is computed, never which documents and anchors it has nor what it is divided by.

Shapes: T steps, G sequences of a step, R rows of a step.
"""
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from data_prep.errors import UserError
from pipeline.order import Item, StepPlan

STEPS_AT_ONCE = 4096


class Padding(NamedTuple):
    """Row positions of a whole run: those that hold a token; those computed, since rows of a micro-batch are as long as
    its longest; those of ranks that wait for the longest row of a pass. `largest`: positions of the largest micro-batch."""

    tokens: int
    computed: int
    waited: int
    largest: int

    @property
    def share(self) -> float:
        return 1 - self.tokens / self.computed

    @property
    def waiting_share(self) -> float:
        return 1 - self.tokens / self.waited


@dataclass(frozen=True)
class Passes:
    """plan: the steps; pack_tokens: a row's budget of tokens, None: one sequence a row; micro_batch: rows per rank and
    pass."""

    plan: StepPlan
    world: int
    micro_batch: int
    pack_tokens: int | None = None

    def __post_init__(self):
        longest = max(self.plan.entries, key=lambda entry: entry.tokens)
        if self.pack_tokens is not None and longest.tokens > self.pack_tokens:
            raise UserError(f"data.pack_tokens {self.pack_tokens} is less than the {longest.tokens} tokens of sample "
                            f"{longest.key} in {longest.shard}: a document is never cut; set data.pack_tokens to "
                            f"{longest.tokens} or more")
        if self.pack_tokens is None and self.plan.global_batch % self.rows_per_pass:
            raise UserError(f"optim.global_batch {self.plan.global_batch} is no multiple of {self.world} ranks x "
                            f"optim.micro_batch {self.micro_batch} = {self.rows_per_pass}: every rank takes equally many "
                            "micro-batches; change one of the three, or set data.pack_tokens")

    @property
    def rows_per_pass(self) -> int:
        return self.world * self.micro_batch

    @cached_property
    def per_step(self) -> int:
        """Passes of a step on every rank."""
        if self.pack_tokens is None:
            return self.plan.global_batch // self.rows_per_pass
        chunks = list(self._tokens())
        passes = -(-max(int(chunk.sum(1).max()) for chunk in chunks) // (self.pack_tokens * self.rows_per_pass))
        while any(_balance(chunk, passes * self.rows_per_pass)[1].max() > self.pack_tokens for chunk in chunks):
            passes += 1
        return passes

    @cached_property
    def padding(self) -> Padding:
        computed = waited = tokens = largest = 0
        for chunk in self._tokens():
            loads_TR = np.sort(chunk if self.pack_tokens is None else
                               _balance(chunk, self.per_step * self.rows_per_pass)[1], axis=1)
            loads = loads_TR.reshape(-1, self.per_step, self.micro_batch, self.world)  # a rank has every world-th
            rows = loads.max(2) * self.micro_batch
            tokens += int(loads.sum())
            computed += int(rows.sum())
            waited += int(rows.max(-1).sum()) * self.world
            largest = max(largest, int(rows.max()))
        return Padding(tokens, computed, waited, largest)

    def rows(self, step: int, index: int, rank: int) -> list[list[Item]]:
        """The documents of each row of `rank`'s micro-batch `index` of a step; a row may have none."""
        rows = [[item] for item in self.plan.items(step)] if self.pack_tokens is None else self._packed(step)
        one_pass = rows[index * self.rows_per_pass:(index + 1) * self.rows_per_pass]
        # Ranks are dealt neighbours in length, one each in turn, so that no rank waits for another.
        return one_pass[rank::self.world]

    def _packed(self, step: int) -> list[list[Item]]:
        items = self.plan.items(step)[::-1]
        tokens_1G = np.array([[item.entry.tokens for item in items]])
        (row_of,), (loads,) = _balance(tokens_1G, self.per_step * self.rows_per_pass)
        rows: list[list[Item]] = [[] for _ in loads]
        for item, row in zip(items, row_of):
            rows[row].append(item)
        return [rows[row] for row in np.argsort(loads, kind="stable")]

    def _tokens(self):
        """The lengths of the sequences of many steps at a time, [T, G], longest first."""
        for first in range(0, self.plan.steps, STEPS_AT_ONCE):
            yield -np.sort(-self.plan.tokens(first, min(first + STEPS_AT_ONCE, self.plan.steps)), axis=1)


def _balance(tokens_TG: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(row of each sequence [T, G], tokens of each row [T, R]): the longest first, each into the row that has least so
    far. tokens_TG: descending."""
    T, G = tokens_TG.shape
    steps = np.arange(T)
    loads_TR = np.zeros((T, rows), dtype=np.int64)
    row_of_TG = np.empty((T, G), dtype=np.int64)
    for g in range(G):
        row_of_TG[:, g] = row = loads_TR.argmin(1)
        loads_TR[steps, row] += tokens_TG[:, g]
    return row_of_TG, loads_TR
