"""Reading ahead: worker processes fill a bounded number of bytes, and whatever goes wrong reaches all ranks at once.

A rank that could not read must not just leave, since the others would wait for it in their next collective. So neither
a damaged sample, an unreachable shard nor a dead worker raises here: they travel with the step's batch, and `agree`, the
collective that sums the loss's denominator anyway, stops all ranks at the same step.
"""
import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data_prep.errors import UserError
from pipeline.batches import MicroBatch, StepDataset
from pipeline.runtime import Runtime

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # meant for the rank, whose workers end with it
READ_AHEAD = 8  # micro-batches per worker at most: more only delay the start
POLL = 2  # s between looks at whether the workers live
PATIENCE = 900  # s for one micro-batch, all attempts of a remote read included; then its worker counts as hanging


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


def _ignore_signals(_worker: int) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class _PassDataset(Dataset):
    """Map from a micro-batch's place in the run to it, or to the text of the error."""

    def __init__(self, data: StepDataset):
        self.data = data

    def __len__(self) -> int:
        return len(self.data) * self.data.passes.per_step

    def __getitem__(self, place: int) -> MicroBatch | str:
        try:
            return self.data.micro_batch(*divmod(place, self.data.passes.per_step))
        except UserError as error:
            return str(error)


class StepLoader:
    """The batches of steps first..last-1, in order; a context manager that ends its workers."""

    def __init__(self, data: StepDataset, first: int, last: int, *, workers: int, budget: int, pin_memory: bool = False):
        self.per_step = data.passes.per_step
        workers, ahead = read_ahead(workers, budget, data.largest_bytes)
        places = range(first * self.per_step, last * self.per_step)
        loader = DataLoader(_PassDataset(data), batch_size=None, sampler=places, num_workers=workers,
                            prefetch_factor=ahead or None, pin_memory=pin_memory, worker_init_fn=_ignore_signals,
                            timeout=POLL if workers else 0)
        # A tensor that a worker hands over holds a file descriptor as long as it lives.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        children, on_death = set(multiprocessing.active_children()), signal.getsignal(signal.SIGCHLD)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the workers ignore them
        self._places = iter(loader)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._workers = [child for child in multiprocessing.active_children() if child not in children]
        # torch would raise out of whatever line runs when a worker dies; this rank has to tell the others first.
        signal.signal(signal.SIGCHLD, on_death)

    def __enter__(self) -> "StepLoader":
        return self

    def __exit__(self, *_) -> None:
        self._places = None  # asks the workers to end and waits for them, but not for long
        for worker in self._workers:
            worker.kill()  # one that hangs in a read
            worker.join()

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        batch = StepBatch()
        for _ in range(self.per_step):
            found = self._wait()
            if isinstance(found, str):
                batch.problem = found
                break
            batch.micro_batches.append(found)
        return batch

    def _wait(self) -> MicroBatch | str:
        began = time.monotonic()
        while True:
            try:
                return next(self._places)
            except RuntimeError as error:  # torch's, after POLL seconds without a micro-batch or for a dead worker
                if not self._workers:
                    raise
                alive = all(worker.exitcode is None for worker in self._workers)
                if not alive or time.monotonic() - began > PATIENCE:
                    return self._obituary(error)

    def _obituary(self, error: RuntimeError) -> str:
        dead = ", ".join(f"{worker.name} (pid {worker.pid}, exit code {worker.exitcode})"
                         for worker in self._workers if worker.exitcode is not None)
        if not dead:
            return (f"the reading processes {', '.join(str(worker.pid) for worker in self._workers)} delivered "
                    f"nothing for {PATIENCE} s: {error}; check the disk or the server, then continue with --resume auto")
        return (f"reading process {dead} died: {error}. Exit code -9 is a kill, mostly for memory (lower "
                "data.prefetch_bytes or data.workers, see `dmesg`); -7 is a full /dev/shm (enlarge it). The last checkpoint "
                "is intact, continue with --resume auto")


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
