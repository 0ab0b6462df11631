"""`extract` in child processes that can be killed.

They are forked from a server that has imported everything and runs no thread: forking the test process itself would copy
locks that its threads hold.
"""

import importlib
import multiprocessing
import os
import signal

from data_prep.extract import extract

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.data_prep.children"])


def _run(arguments: tuple, options: dict, deadly: tuple[str, str, str, int] | None) -> None:
    if deadly:
        module, owner, name, call = deadly
        holder = importlib.import_module(module)
        holder = getattr(holder, owner) if owner else holder
        original, calls = getattr(holder, name), [0]

        def counting(*args, **kwargs):
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(holder, name, counting)
    extract(*arguments, **options)


def start(*arguments, deadly: tuple[str, str, str, int] | None = None, **options) -> multiprocessing.Process:
    """`extract(*arguments, **options)` in a child; deadly=(module, class or "", function, n): the n-th call kills it."""
    child = _context.Process(target=_run, args=(arguments, options, deadly))
    child.start()
    return child
