"""Asking a run to stop: SIGTERM or SIGUSR1 to any rank, or a file named `stop` in the run's folder.

The request is only remembered; the loop asks for it at the end of every step, of every held-out pass and of every save,
together with all other ranks, so that all stop at the same place.
"""
import signal
from contextlib import contextmanager
from pathlib import Path

import torch

from pipeline.runtime import Runtime

PREEMPTED = 75  # exit code: stopped on request, checkpoint written, start again with --resume auto (EX_TEMPFAIL)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """What this rank has seen; `asked` tells what any rank has."""

    def __init__(self, folder: Path, runtime: Runtime):
        self.file, self.runtime = folder / "stop", runtime
        self._signalled = False

    def _remember(self, *_):
        self._signalled = True

    @contextmanager
    def installed(self):
        before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def seen(self) -> bool:
        return self._signalled or self.file.exists()

    def asked(self) -> bool:
        """Whether any rank was asked to stop: the same answer on all; every rank must call it."""
        flag = torch.tensor(float(self.seen), dtype=torch.float64, device=self.runtime.device)
        return bool(self.runtime.sum(flag) > 0)

    def clear(self) -> None:
        """Forgets the file, so that the next start does not stop again."""
        self.file.unlink(missing_ok=True)
