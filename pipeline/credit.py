"""Credit: how much each slot of a block counts in the loss (D-PACE, arXiv 2605.18810; spec 3).

With q_j the drafter's probability of the right token at slot j, the accepted length of a block has the surrogate
S = sum_k prod_{i<=k} q_i, and dS/d log q_j = prod_{i<=j} q_i * (1 + sum_{m>j} prod_{i=j+1..m} q_i): cumulative
confidence times continuation value. D-PACE uses exactly that as the weight of slot j, with q smoothed towards 1 in the
weights only, so that a drafter which knows nothing yet still learns its later slots.
"""
import math

import torch
from torch import Tensor

# DFlash's decay constant for the block sizes its authors published.
DECAY_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}

KINDS = ("uniform", "decay", "dpace", "dpace_cumulative", "dpace_continuation")
# Kinds whose weights the masks alone decide; their loss is the weighted mean. The others divide by the valid anchors.
STATIC_KINDS = ("uniform", "decay")


def credit_weights(kind: str, nll: Tensor, mask: Tensor, *, alpha: float = 0.5, gamma: float | None = None) -> Tensor:
    """Weights of slots 1..B-1, shape [..., K] as `nll` and `mask`; float32 (float64 for float64 input), detached.

    nll: -log q_j of each slot; mask: True where the slot is supervised. A block ends at its first unsupervised slot:
    that slot and all behind it get weight 0. alpha: smoothing in (0, 1], of the D-PACE kinds; gamma: decay constant of
    `decay`, by default DFlash's for its published block sizes. Raises ValueError on anything else.
    """
    if kind not in KINDS:
        raise ValueError(f"credit {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    dtype = torch.float64 if nll.dtype == torch.float64 else torch.float32
    alive = mask.to(dtype).cumprod(-1)
    if kind == "uniform":
        return alive
    if kind == "decay":
        return alive * _decay(nll.shape[-1], gamma, alive)
    if not 0.0 < alpha <= 1.0:
        raise ValueError(f"alpha {alpha} is outside (0, 1]: at 0 one hopeless slot silences the whole block and training "
                         "collapses; 0.3 to 0.7 is stable, 0.5 the default")
    smooth = alive * ((1.0 - alpha) * torch.exp(-nll.detach().to(dtype)) + alpha)
    cumulative = smooth.cumprod(-1)
    if kind == "dpace_cumulative":
        return cumulative
    if kind == "dpace":
        return cumulative.flip(-1).cumsum(-1).flip(-1)
    return alive * _continuation(smooth)


def _decay(slots: int, gamma: float | None, like: Tensor) -> Tensor:
    gamma = DECAY_GAMMA.get(slots + 1) if gamma is None else gamma
    if gamma is None or not (gamma > 0.0 and math.isfinite(gamma)):
        raise ValueError(f"gamma {gamma} for a block of {slots + 1}: decay needs a positive constant; set loss.gamma "
                         f"(published: {', '.join(f'{g:g} for block {b}' for b, g in DECAY_GAMMA.items())})")
    return torch.exp(-torch.arange(slots, dtype=like.dtype, device=like.device) / gamma)


def _continuation(smooth: Tensor) -> Tensor:
    """f_j = 1 + smooth_{j+1} * f_{j+1}, from the last slot backwards; unlike a quotient of products it never
    underflows, whatever alpha and block size."""
    values = [torch.ones_like(smooth[..., 0])]
    for j in range(smooth.shape[-1] - 1, 0, -1):
        values.append(1.0 + smooth[..., j] * values[-1])
    return torch.stack(values[::-1], dim=-1)
