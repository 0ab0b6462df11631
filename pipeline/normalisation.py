"""What the loss is divided by: known from the masks alone, so it is summed over micro-batches and ranks before the
first backward pass of an optimizer step (spec 3).

`global`: credits that depend on the drafter (all D-PACE kinds, `accepted_prefix`, `reanchored_decay`) divide by the
valid anchors, `decay` and `uniform` by the sum of their weights. Dividing the former by their weights' sum would cancel
the credit: a block that earns more weight would get less per slot; it is not known before the forward pass either.
Dividing by the local batch size makes the gradient depend on how samples fall on ranks. `reference`: the published
code's rule (the number of sequences), for parity tests only.
"""
import torch
from torch import Tensor

from pipeline.credit import STATIC_KINDS, credit_weights

MODES = ("global", "reference")


def denominator(mode: str, kind: str, mask_AJ: Tensor, *, sequences: int, gamma: float | None = None) -> Tensor:
    """float64 scalar: this micro-batch's share of the denominator.

    mask_AJ: bool, slots 1..K-1 of every block; a block is a valid anchor if its first one is True.
    sequences: rows of the micro-batch, used by mode `reference` only.
    """
    if mode not in MODES:
        raise ValueError(f"normalisation {mode!r} is unknown; choose one of {', '.join(MODES)}")
    if kind in STATIC_KINDS:
        zeros = torch.zeros_like(mask_AJ, dtype=torch.float64)
        return credit_weights(kind, zeros, mask_AJ, gamma=gamma).sum()
    if mode == "reference":
        return torch.tensor(float(sequences), dtype=torch.float64, device=mask_AJ.device)
    return mask_AJ[..., 0].sum(dtype=torch.float64)
