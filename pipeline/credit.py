"""Credit: how much each slot of a block counts in the loss (D-PACE, arXiv 2605.18810; spec 3).

With q_j the drafter's probability of the right token at slot j, the accepted length of a block has the surrogate
S = sum_k prod_{i<=k} q_i, and dS/d log q_j = prod_{i<=j} q_i * (1 + sum_{m>j} prod_{i=j+1..m} q_i): cumulative
confidence times continuation value. D-PACE uses exactly that as the weight of slot j, with q smoothed towards 1 in the
weights only, so that a drafter which knows nothing yet still learns its later slots.

A credit is a function from `Block` to weights, listed in CREDITS; a new objective is one more of them. What each is
divided by is in normalisation.py: the weighted mean where the masks alone decide the weights (STATIC_KINDS), the valid
anchors otherwise.
"""
import math
from dataclasses import dataclass

import torch
from torch import Tensor

# DFlash's decay constant for the block sizes its authors published.
DECAY_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True)
class Block:
    """What a credit may look at, without gradient; the tensors are [..., J], slots 1..K-1 of every block.

    alive: 1.0 up to the block's first unsupervised slot, 0.0 there and behind it; nll: -log q_j; correct: True where
    the drafter's argmax is the label, None where the caller did not say; alpha: smoothing in (0, 1]; gamma: decay
    constant, None for DFlash's.
    """

    alive: Tensor
    nll: Tensor
    correct: Tensor | None
    alpha: float
    gamma: float | None

    @property
    def smooth(self) -> Tensor:
        """(1 - alpha) q_j + alpha, 0 behind the block's end. ValueError for an alpha that collapses."""
        if not 0.0 < self.alpha <= 1.0:
            raise ValueError(f"alpha {self.alpha} is outside (0, 1]: at 0 one hopeless slot silences the whole block "
                             "and training collapses; 0.3 to 0.7 is stable, 0.5 the default")
        return self.alive * ((1.0 - self.alpha) * torch.exp(-self.nll) + self.alpha)

    @property
    def rejections(self) -> Tensor:
        """How many slots up to and including each one the target would have rejected: 0 within the accepted prefix."""
        if self.correct is None:
            raise ValueError("this credit depends on which slots are right; pass `correct`")
        return (~self.correct).to(self.alive.dtype).cumsum(-1)


def uniform(block: Block) -> Tensor:
    """Every slot counts the same."""
    return block.alive


def decay(block: Block) -> Tensor:
    """DFlash: exp(-(j - 1) / gamma), whatever the drafter knows (arXiv 2602.06036)."""
    slots = torch.arange(block.alive.shape[-1], dtype=block.alive.dtype, device=block.alive.device)
    return block.alive * torch.exp(-slots / _gamma(block))


def dpace(block: Block) -> Tensor:
    """w_j = sum_{m>=j} prod_{i<=m} q~_i: the gradient of the accepted length's surrogate."""
    return block.smooth.cumprod(-1).flip(-1).cumsum(-1).flip(-1)


def dpace_cumulative(block: Block) -> Tensor:
    """Its first factor alone: prod_{i<=j} q~_i."""
    return block.smooth.cumprod(-1)


def dpace_continuation(block: Block) -> Tensor:
    """Its second factor alone: f_j = 1 + q~_{j+1} * f_{j+1}, from the last slot backwards; unlike a quotient of
    products it never underflows, whatever alpha and block size."""
    smooth = block.smooth
    values = [torch.ones_like(smooth[..., 0])]
    for j in range(smooth.shape[-1] - 1, 0, -1):
        values.append(1.0 + smooth[..., j] * values[-1])
    return block.alive * torch.stack(values[::-1], dim=-1)


def accepted_prefix(block: Block) -> Tensor:
    """1 up to and including the first slot whose argmax is wrong, 0 behind it: only what greedy serving would look at.

    A block has as many terms as the drafter gets right, and one more, so a better drafter is asked for more. Divided by
    the valid anchors a term counts the same at any time; by the weights' sum it would count less the better the
    drafter.
    """
    rejections = block.rejections
    return block.alive * (rejections - (~block.correct).to(rejections.dtype) == 0)


def reanchored_decay(block: Block) -> Tensor:
    """1 up to and including the first slot m whose argmax is wrong, exp(-(j - m) / gamma) behind it: DFlash's decay
    counted from where the next block would begin. A block whose first slot is wrong has exactly DFlash's weights."""
    behind = (block.rejections > 0).to(block.alive.dtype).cumsum(-1) - 1.0
    return block.alive * torch.exp(-behind.clamp(min=0.0) / _gamma(block))


CREDITS = {credit.__name__: credit for credit in (
    uniform, decay, dpace, dpace_cumulative, dpace_continuation, accepted_prefix, reanchored_decay)}
KINDS = tuple(CREDITS)
# Kinds whose weights the masks alone decide.
STATIC_KINDS = ("uniform", "decay")
# Kinds that need a decay constant.
DECAY_KINDS = ("decay", "reanchored_decay")


def credit_weights(kind: str, nll: Tensor, mask: Tensor, *, alpha: float = 0.5, gamma: float | None = None,
                   correct: Tensor | None = None) -> Tensor:
    """Weights of slots 1..K-1, shape [..., J] as `nll` and `mask`; float32 (float64 for float64 input), detached.

    nll: -log q_j of each slot; mask: True where the slot is supervised. A block ends at its first unsupervised slot:
    that slot and all behind it get weight 0. The rest as in `Block`; ValueError on an unknown kind, or a constant that
    the kind does not allow.
    """
    if kind not in CREDITS:
        raise ValueError(f"credit {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    dtype = torch.float64 if nll.dtype == torch.float64 else torch.float32
    return CREDITS[kind](Block(mask.to(dtype).cumprod(-1), nll.detach().to(dtype), correct, alpha, gamma))


def _gamma(block: Block) -> float:
    size = block.alive.shape[-1] + 1
    gamma = DECAY_GAMMA.get(size) if block.gamma is None else block.gamma
    if gamma is None or not (gamma > 0.0 and math.isfinite(gamma)):
        raise ValueError(f"gamma {gamma} for a block of {size}: decay needs a positive constant; set loss.gamma "
                         f"(published: {', '.join(f'{g:g} for block {b}' for b, g in DECAY_GAMMA.items())})")
    return gamma
