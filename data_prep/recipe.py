"""What decides the content of a dataset, beside target and responses."""

from dataclasses import dataclass, field

import torch

from .model import compute_dtype, dtype_name
from .samples import Storage


@dataclass(frozen=True)
class Recipe:
    """The settings of an extraction; None takes the target's or the machine's own (see `prepare` in extract.py)."""

    layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    max_length: int = 3072  # tokens kept of a sample
    shard_bytes: int = 2_000_000_000
    batch_tokens: int = 8192  # positions of a batch, padding included
    storage: Storage = "bf16"
    last_hidden: bool = False  # store the state after the final norm too
    drop: list[str] = field(default_factory=list)  # flaws (quality.py) of responses that are left out
    dtype: str | None = None  # the target runs in it

    def torch_dtype(self) -> torch.dtype:
        """bfloat16 on a GPU and float32 on a CPU unless `dtype` names another."""
        return getattr(torch, self.dtype or dtype_name(compute_dtype()))
