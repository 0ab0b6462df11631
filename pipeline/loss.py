"""The frozen head and the loss in one pass over chunks of blocks.

The head has no gradient and a credit's weights depend on the block's own slots only, so a chunk of whole blocks
is everything one needs at once: logits, NLL, weights and the gradient for the hidden states are computed together in
the forward pass, and only that gradient is kept. Backward multiplies it by the incoming scalar. Two head-sized products
in all, and the memory of one chunk. Slots without a label never reach the head. On a GPU nothing waits for a value of
the device after the first line, and what lies between the two products is two compiled kernels.

Shapes: A blocks (all rows together), K slots of a block, J = K - 1, D hidden, V vocabulary, R rows that reach the head.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.compiled import compiled
from pipeline.credit import credit_weights

# Bytes of float32 logits held at once. A GPU's matrix units want tall products, a CPU's caches small ones.
CHUNK_BYTES = {"cuda": 2 * 1024**3, "cpu": 256 * 1024**2}


class BlockLoss(NamedTuple):
    """numerator: sum of weight * NLL, a scalar to divide by a global denominator; the others [A, K-1] without gradient:
    nll and weights in float32 (0 where there is no label), correct: the head's argmax is the label."""

    numerator: Tensor
    nll: Tensor
    weights: Tensor
    correct: Tensor


def block_loss(hidden_AKD: Tensor, head_VD: Tensor, labels_AJ: Tensor, mask_AJ: Tensor, kind: str, *,
               alpha: float = 0.5, gamma: float | None = None, chunk_bytes: int | None = None) -> BlockLoss:
    """Weighted cross-entropy of blocks through the frozen head (spec 3), summed, not normalised.

    hidden_AKD: drafter output, slot 0 first; head_VD: frozen, same dtype; labels_AJ, mask_AJ: slots 1..K-1 (J = K - 1)
    as `anchors.block_labels` makes them. Logits, log-softmax, products and sums are float32 (float64 for float64
    input), whatever the dtype of the hidden states. chunk_bytes: of logits at once, by default the device's budget.
    """
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES.get(hidden_AKD.device.type, CHUNK_BYTES["cpu"])
    return BlockLoss(*_BlockLoss.apply(hidden_AKD, head_VD, labels_AJ, mask_AJ, kind, alpha, gamma, chunk_bytes))


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_AKD, head_VD, labels_AJ, mask_AJ, kind, alpha, gamma, chunk_bytes):
        A, K, D = hidden_AKD.shape
        exact = torch.float64 if hidden_AKD.dtype == torch.float64 else torch.float32
        nll_AJ = torch.zeros(A, K - 1, dtype=exact, device=hidden_AKD.device)
        weights_AJ = torch.zeros_like(nll_AJ)
        correct_AJ = torch.zeros_like(mask_AJ)
        hidden_TD = hidden_AKD.reshape(A * K, D)
        grad_TD = torch.zeros_like(hidden_TD) if hidden_AKD.requires_grad else None
        places_R = mask_AJ.flatten().nonzero()[:, 0]
        ends = [0, *mask_AJ.sum(1).cumsum(0).tolist()]  # rows up to the end of every block
        per_chunk = max(1, chunk_bytes // (4 * head_VD.shape[0] * (K - 1)))
        per_chunk = -(-A // -(-A // per_chunk)) if A else 1  # as few chunks, all of one size
        for first in range(0, A, per_chunk):
            part = slice(first, min(first + per_chunk, A))
            places_r = places_R[ends[part.start]:ends[part.stop]]
            chunk = _Chunk(hidden_TD, head_VD, labels_AJ, places_r)
            nll_AJ.view(-1)[places_r], correct_AJ.view(-1)[places_r] = chunk.nll_R, chunk.correct_R
            weights_AJ[part] = credit_weights(kind, nll_AJ[part], mask_AJ[part], alpha=alpha, gamma=gamma,
                                               correct=correct_AJ[part])
            if grad_TD is not None:
                grad_TD[chunk.slots_R] = chunk.gradient(weights_AJ.view(-1)[places_r]).to(grad_TD.dtype)
        ctx.grad = None if grad_TD is None else grad_TD.view(A, K, D)
        ctx.mark_non_differentiable(nll_AJ, weights_AJ, correct_AJ)
        return (weights_AJ * nll_AJ).sum(), nll_AJ, weights_AJ, correct_AJ

    @staticmethod
    def backward(ctx, grad_numerator, *_):
        return ctx.grad * grad_numerator, None, None, None, None, None, None, None


class _Chunk:
    """The rows at `places` (in the flattened [A, J]) between the two products with the head."""

    def __init__(self, hidden_TD: Tensor, head_VD: Tensor, labels_AJ: Tensor, places_R: Tensor):
        J = labels_AJ.shape[1]
        self.head_VD = head_VD
        self.slots_R = places_R + places_R // J + 1  # every block has a slot 0 more than labels
        self.labels_R1 = labels_AJ.reshape(-1)[places_R][:, None]
        self.logits_RV = exact_matmul(hidden_TD[self.slots_R], head_VD.t())
        statistics = _compiled_statistics if head_VD.is_cuda else statistics_in_place
        self.lse_R1, label_R1, correct_R1 = statistics(self.logits_RV, self.labels_R1)
        self.nll_R, self.correct_R = (self.lse_R1 - label_R1)[:, 0], correct_R1[:, 0]

    def gradient(self, weights_R: Tensor) -> Tensor:
        """[R, D], of sum(weights * NLL); uses the logits up."""
        gradient = _compiled_gradient if self.head_VD.is_cuda else gradient_in_place
        return exact_matmul(gradient(self.logits_RV, self.labels_R1, self.lse_R1, weights_R[:, None], self.head_VD.dtype),
                            self.head_VD)


def statistics(logits_RV: Tensor, labels_R1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, the label's logit, and whether it is the largest, each [R, 1]."""
    top_R1 = logits_RV.amax(-1, keepdim=True)
    label_R1 = logits_RV.gather(1, labels_R1)
    return (logits_RV - top_R1).exp().sum(-1, keepdim=True).log() + top_R1, label_R1, label_R1 == top_R1


def gradient(logits_RV: Tensor, labels_R1: Tensor, lse_R1: Tensor, weights_R1: Tensor, dtype: torch.dtype) -> Tensor:
    """d(weight * NLL)/d logits = weight * (softmax - onehot), [R, V]."""
    onehot_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) == labels_R1
    return (((logits_RV - lse_R1).exp() - onehot_RV.to(logits_RV.dtype)) * weights_R1).to(dtype)


_compiled_statistics, _compiled_gradient = compiled(statistics), compiled(gradient)


def statistics_in_place(logits_RV: Tensor, labels_R1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `statistics`, but leaves exp(logit - log-sum-exp), the softmax, where the logits were: uncompiled code pays for
    every pass over memory and for every fresh page."""
    top_R1 = logits_RV.amax(-1, keepdim=True)
    label_R1 = logits_RV.gather(1, labels_R1)
    total_R1 = logits_RV.sub_(top_R1).exp_().sum(-1, keepdim=True)
    logits_RV.div_(total_R1)
    return total_R1.log() + top_R1, label_R1, label_R1 == top_R1


def gradient_in_place(softmax_RV: Tensor, labels_R1: Tensor, lse_R1: Tensor, weights_R1: Tensor,
                      dtype: torch.dtype) -> Tensor:
    """As `gradient`, after `statistics_in_place`."""
    return softmax_RV.mul_(weights_R1).scatter_add_(1, labels_R1, -weights_R1).to(dtype)


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with float32 accumulation AND float32 result for 16-bit input."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
