"""Functions that PyTorch compiles at their first call.

`torch.compile` loads its compiler when it is called, a second or more of every start, also on machines that never run
what it makes.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch


def compiled(function: Callable, **options: Any) -> Callable:
    """`torch.compile(function, **options)`, made when it is first called."""
    make = cache(lambda: torch.compile(function, **options))

    @wraps(function)
    def call(*args, **kwargs):
        return make()(*args, **kwargs)

    return call
