"""Reading ahead: worker processes fill a bounded number of bytes, and whatever goes wrong reaches all ranks at once.

A rank that could not read must not just leave, since the others would wait for it in their next collective. So neither
a damaged sample, an unreachable shard nor a dead worker raises here: they travel with the step's batch, and `agree`, the
collective that sums the loss's denominator anyway, stops all ranks at the same step.
"""
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data_prep.errors import UserError
from pipeline.batches import MicroBatch, StepDataset
from pipeline.buffers import Lease, Pool, page_lock
from pipeline.runtime import Runtime
from pipeline.workers import Worker, read_place

READ_AHEAD = 8  # micro-batches per worker at most: more only delay the start


@dataclass
class StepBatch:
    """A rank's part of one optimizer step. problem: why it could not be read; then micro_batches are not all there."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    problem: str | None = None

    @property
    def damaged(self) -> list[str]:
        return [text for mb in self.micro_batches for text in mb.damaged]


def read_ahead(workers: int, budget: int, largest: int) -> tuple[int, int]:
    """(workers, micro-batches ahead per worker) of which no more than `budget` bytes are ever held; `largest`: bytes of
    the largest micro-batch. UserError where not even one fits."""
    if workers == 0:
        return 0, 0
    room = budget // largest
    if room < 1:
        raise UserError(f"data.prefetch_bytes {budget} is less than the largest micro-batch of this run, {largest} bytes "
                        "of states: raise it, lower optim.micro_batch or data.pack_tokens, or set data.workers=0 to read "
                        "nothing ahead")
    workers = min(workers, room)
    return workers, min(READ_AHEAD, room // workers)


class StepLoader:
    """The batches of steps first..last-1, in order; a context manager that ends its workers.

    A micro-batch lies in a buffer that is filled again once nothing holds the micro-batch any more. There are buffers
    for what is read ahead and for one step; whoever keeps more makes this process read by itself, into further ones.
    """

    def __init__(self, data: StepDataset, first: int, last: int, *, workers: int, budget: int, pin_memory: bool = False):
        self.data, self.per_step = data, data.passes.per_step
        self._place, self._end = first * self.per_step, last * self.per_step  # of what is read next
        workers, ahead = read_ahead(workers, budget, data.largest_bytes)
        self._ahead, self._asked = workers * ahead, deque[tuple[Worker, Lease]]()
        self._own = Pool(data.largest_bytes)
        self._shared = Pool(data.largest_bytes, count=self._ahead + self.per_step if workers else 0)
        self.workers = deque(Worker(data, self._shared.buffers) for _ in range(workers))
        if pin_memory:  # after the fork: what the driver knows about pages is not for the workers
            self._own.lock_pages(page_lock)
            self._shared.lock_pages(page_lock)
        self._ask()

    def __enter__(self) -> "StepLoader":
        return self

    def __exit__(self, *_) -> None:
        for worker in self.workers:
            worker.ask_to_end()
        for worker in self.workers:
            worker.end()

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        batch = StepBatch()
        for _ in range(self.per_step):
            found = self._next()
            if isinstance(found, str):
                batch.problem = found
                break
            batch.micro_batches.append(found)
        return batch

    def _ask(self, wait: bool = False) -> None:
        """Workers in turn read ahead as far as budget and free buffers allow; wait: for one at least, if all that keeps
        it is a GPU's copy."""
        while len(self._asked) < self._ahead and self._place < self._end:
            lease = self._shared.take(wait=wait and not self._asked)
            if lease is None:
                return
            worker = self.workers[0]
            self.workers.rotate(-1)
            worker.ask(self._place, lease.buffer.index)
            self._asked.append((worker, lease))
            self._place += 1

    def _next(self) -> MicroBatch | str:
        if not self._asked:
            self._ask(wait=True)
        if self._asked:
            worker, lease = self._asked.popleft()
            found = worker.answer()
            self._ask()
        elif self._place < self._end:
            lease = self._own.take(wait=True)
            found = read_place(self.data, self._place, lease.memory)
            self._place += 1
        else:
            raise StopIteration
        return found if isinstance(found, str) else found.batch(lease.memory, lease)


def agree(step: int, batch: StepBatch, share: Tensor, on_error: str, runtime: Runtime) -> tuple[float, int]:
    """The step's denominator and its damaged samples, summed over ranks. UserError on all ranks together where any of
    them could not read: under data.on_error `stop` for a damaged sample, else for a problem or where nothing is left.

    share: float64, this rank's part of the denominator (0 where it has a problem).
    """
    mine = [batch.problem is not None, len(batch.damaged), sum(len(mb.keys) for mb in batch.micro_batches)]
    sums = runtime.sum(torch.cat([share.reshape(1), share.new_tensor(mine)])).tolist()
    total, problems, damaged, left = sums[0], *map(int, sums[1:])
    if problems or damaged and (on_error == "stop" or not left):
        raise _refusal(f"step {step + 1}", batch.problem or "; ".join(batch.damaged))
    for text in batch.damaged:
        print(f"step {step + 1}, skipped: {text}", file=sys.stderr, flush=True)
    return total, damaged


def refuse_together(what: str, problem: str | None, runtime: Runtime) -> None:
    """UserError on all ranks where any of them has a problem; all ranks call it. what: was being read for."""
    if runtime.sum(torch.tensor(float(problem is not None), device=runtime.device)) > 0:
        raise _refusal(what, problem)


def _refusal(what: str, problem: str | None) -> UserError:
    return UserError(f"{what}: {problem or 'another rank could not read its samples and says why'}; all ranks stop before it")
