"""The processes that read ahead: each is told which micro-batch goes into which buffer, and answers when it is there.

They are forked, so buffers made before are the same memory on both sides: what was read is neither sent nor mapped
again. Only a few hundred bytes about it pass through a pipe.
"""
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

import torch
from torch import Tensor

from data_prep.errors import UserError
from pipeline.batches import Filled, StepDataset
from pipeline.buffers import Buffer

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # meant for the rank, whose workers end with it
POLL = 2  # s between looks at whether the rank lives
PATIENCE = 900  # s for one micro-batch, all attempts of a remote read included; then its worker counts as hanging
LAST_WORDS = 10  # s for a process to end that was asked to, or that has closed its pipe


def read_place(data: StepDataset, place: int, memory: Tensor) -> Filled | str:
    """Micro-batch number `place` of the run, counted over all steps, in `memory`; or the text of the error."""
    try:
        return data.fill(*divmod(place, data.passes.per_step), memory)
    except UserError as error:
        return str(error)


class Worker:
    """A process that reads into `buffers`."""

    def __init__(self, data: StepDataset, buffers: list[Buffer]):
        fork = multiprocessing.get_context("fork")
        self._pipe, other = fork.Pipe()
        self._ending = fork.Event()
        self.process = fork.Process(target=_serve, args=(other, data, buffers, os.getpid(), self._ending), daemon=True)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until it ignores them
        self.process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        other.close()

    def ask(self, place: int, index: int) -> None:
        """Wants micro-batch `place` of the run in the buffer `index`. Answers come in the order of the questions."""
        self._send((place, index))

    def _send(self, message: tuple[int, int] | None) -> None:
        try:
            self._pipe.send(message)
        except OSError:  # it is dead, as the answer will say
            pass

    def answer(self) -> Filled | str:
        """What was asked for longest ago, or the text of the error, also where the process died or hangs."""
        try:
            if self._pipe.poll(PATIENCE):
                return self._pipe.recv()
        except (EOFError, OSError):
            return self._obituary()
        self.process.kill()  # it must not write into a buffer that is somebody else's later
        return (f"the reading process {self.process.pid} delivered nothing for {PATIENCE} s; check the disk or the "
                "server, then continue with --resume auto")

    def _obituary(self) -> str:
        self.process.join(LAST_WORDS)
        return (f"reading process {self.process.name} (pid {self.process.pid}, exit code {self.process.exitcode}) died. "
                "Exit code -9 is a kill, mostly for memory (lower data.prefetch_bytes or data.workers, see `dmesg`), 1 an "
                "error that it printed. The last checkpoint is intact, continue with --resume auto")

    def ask_to_end(self) -> None:
        self._ending.set()
        self._send(None)  # wakes it up where it waits

    def end(self) -> None:
        """Waits for it to end, but not for long: it may hang in a read."""
        self.process.join(LAST_WORDS)
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _serve(pipe: Connection, data: StepDataset, buffers: list[Buffer], rank: int, ending: Event) -> None:
    """Reads what it is asked for until it shall end, or the process `rank`, its parent, has ended."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    while not ending.is_set():
        if not pipe.poll(POLL):
            if os.getppid() != rank:
                return
        elif (message := pipe.recv()) is not None:
            place, index = message
            pipe.send(read_place(data, place, buffers[index].memory))
