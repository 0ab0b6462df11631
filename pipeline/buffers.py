"""The memory that batches live in: taken once, filled again and again.

Fresh memory costs several times what reading costs, since the kernel clears every page of it. So batches lie in the
buffers of a pool, shared with the forked processes that fill them, and page-locked once for a GPU. Nobody hands a
buffer back: a lease gives its memory as a tensor, and when that tensor and all that share its memory are gone, the
buffer is free. What copies from it without owning it (a GPU) says so with `Lease.hold`.
"""
import mmap
import time
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

POLL = 0.0005  # s between looks at whether a copy is done


class Buffer:
    """`nbytes` bytes, the same ones in processes that are forked later. index: its place in its pool."""

    def __init__(self, index: int, nbytes: int):
        self.index, self.map = index, mmap.mmap(-1, nbytes)  # its pages come when they are first written

    @property
    def memory(self) -> Tensor:
        """uint8 [nbytes], without a lease: for the process that fills it."""
        return torch.frombuffer(self.map, dtype=torch.uint8)


class Lease:
    """The use of a buffer, from now until `memory`, uint8 [nbytes], and every tensor that shares it are gone."""

    def __init__(self, buffer: Buffer, free: deque):
        self.buffer, self._copies = buffer, []
        array = np.frombuffer(buffer.map, dtype=np.uint8)  # the storage of all those tensors owns it
        weakref.finalize(array, free.append, (buffer, self._copies)).atexit = False
        self.memory = torch.from_numpy(array)

    def hold(self, done: Callable[[], bool]) -> None:
        """The buffer stays as it is until done() is true, also when its memory has no user any more."""
        self._copies.append(done)


class Pool:
    """`count` buffers of `nbytes` bytes; None: as many as are in use at the same time."""

    def __init__(self, nbytes: int, count: int | None = None):
        self.nbytes, self.grows = nbytes, count is None
        self.buffers: list[Buffer] = []
        self._lock: Callable[[Buffer], None] | None = None
        self._free: deque[tuple[Buffer, list[Callable[[], bool]]]] = deque()  # with the copies that may still run
        for _ in range(count or 0):
            self._add()

    def _add(self) -> None:
        buffer = Buffer(len(self.buffers), self.nbytes)
        if self._lock:
            self._lock(buffer)
        self.buffers.append(buffer)
        self._free.append((buffer, []))

    def lock_pages(self, lock: Callable[[Buffer], None]) -> None:
        """Calls `lock` (see `page_lock`) once for every buffer, those that come later included."""
        self._lock = lock
        for buffer in self.buffers:
            lock(buffer)

    def take(self, wait: bool = False) -> Lease | None:
        """A free buffer; None where there is none and the pool does not grow. wait: for copies that are not done."""
        while True:
            for _ in range(len(self._free)):
                buffer, copies = self._free.popleft()
                if all(done() for done in copies):
                    return Lease(buffer, self._free)
                self._free.append((buffer, copies))
            if self._free and wait:
                time.sleep(POLL)
            elif self.grows:
                self._add()
            else:
                return None


def page_lock(buffer: Buffer) -> None:
    """A GPU copies from a buffer's pages by itself from now on, for as long as the buffer exists."""
    cudart, address = torch.cuda.cudart(), buffer.memory.data_ptr()
    torch.cuda.check_error(cudart.cudaHostRegister(address, len(buffer.map), 0))
    weakref.finalize(buffer, cudart.cudaHostUnregister, address)
