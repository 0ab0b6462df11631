"""The frozen head and the loss in one pass over chunks of blocks.

The head has no gradient and a credit's weights depend on the block's own slots only, so a chunk of whole blocks
is everything one needs at once: logits, NLL, weights and the gradient for the hidden states are computed together in
the forward pass, and only that gradient is kept. Backward multiplies it by the incoming scalar. Two head-sized products
in all, and the memory of one chunk. Slots without a label never reach the head.

Shapes: A blocks (all rows together), K slots of a block, D hidden, V vocabulary, R rows that reach the head.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.credit import credit_weights

# Bytes of float32 logits held at once.
CHUNK_BYTES = 256 * 1024**2


class BlockLoss(NamedTuple):
    """numerator: sum of weight * NLL, a scalar to divide by a global denominator; the others [A, K-1] without gradient:
    nll and weights in float32 (0 where there is no label), correct: the head's argmax is the label."""

    numerator: Tensor
    nll: Tensor
    weights: Tensor
    correct: Tensor


def block_loss(hidden_AKD: Tensor, head_VD: Tensor, labels_AJ: Tensor, mask_AJ: Tensor, kind: str, *,
               alpha: float = 0.5, gamma: float | None = None, chunk_bytes: int = CHUNK_BYTES) -> BlockLoss:
    """Weighted cross-entropy of blocks through the frozen head (spec 3), summed, not normalised.

    hidden_AKD: drafter output, slot 0 first; head_VD: frozen, same dtype; labels_AJ, mask_AJ: slots 1..K-1 (J = K - 1)
    as `anchors.block_labels` makes them. Logits, log-softmax, products and sums are float32 (float64 for float64
    input), whatever the dtype of the hidden states.
    """
    return BlockLoss(*_BlockLoss.apply(hidden_AKD, head_VD, labels_AJ, mask_AJ, kind, alpha, gamma, chunk_bytes))


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_AKD, head_VD, labels_AJ, mask_AJ, kind, alpha, gamma, chunk_bytes):
        A, K, _ = hidden_AKD.shape
        exact = torch.float64 if hidden_AKD.dtype == torch.float64 else torch.float32
        nll = torch.zeros(A, K - 1, dtype=exact, device=hidden_AKD.device)
        weights = torch.zeros_like(nll)
        correct = torch.zeros_like(mask_AJ)
        grad = torch.zeros_like(hidden_AKD) if hidden_AKD.requires_grad else None
        per_chunk = max(1, chunk_bytes // (4 * head_VD.shape[0] * (K - 1)))
        for first in range(0, A, per_chunk):
            part = slice(first, min(first + per_chunk, A))
            _chunk(hidden_AKD[part], head_VD, labels_AJ[part], mask_AJ[part], (kind, alpha, gamma),
                   nll[part], weights[part], correct[part], None if grad is None else grad[part])
        ctx.grad = grad
        ctx.mark_non_differentiable(nll, weights, correct)
        return (weights * nll).sum(), nll, weights, correct

    @staticmethod
    def backward(ctx, grad_numerator, *_):
        return ctx.grad * grad_numerator, None, None, None, None, None, None, None


def _chunk(hidden_CKD, head_VD, labels_CJ, mask_CJ, credit, nll_CJ, weights_CJ, correct_CJ, grad_CKD) -> None:
    """One chunk of blocks; writes into the views it is given."""
    rows_RD = hidden_CKD[:, 1:][mask_CJ]
    labels_R1 = labels_CJ[mask_CJ][:, None]
    logits_RV = _exact_matmul(rows_RD, head_VD.t())
    top_R1 = logits_RV.amax(-1, keepdim=True)
    label_R1 = logits_RV.gather(1, labels_R1)
    correct_CJ[mask_CJ] = (label_R1 == top_R1)[:, 0]
    probabilities_RV = logits_RV.sub_(top_R1).exp_()  # from here on the logits' memory holds exp(logit - top)
    total_R1 = probabilities_RV.sum(-1, keepdim=True)
    nll_CJ[mask_CJ] = (total_R1.log() + top_R1 - label_R1)[:, 0]
    kind, alpha, gamma = credit
    weights_CJ.copy_(credit_weights(kind, nll_CJ, mask_CJ, alpha=alpha, gamma=gamma, correct=correct_CJ))
    if grad_CKD is None:
        return
    weights_R1 = weights_CJ[mask_CJ][:, None]
    # d(w * NLL)/d logits = w * (softmax - onehot)
    probabilities_RV.mul_(weights_R1 / total_R1).scatter_add_(1, labels_R1, -weights_R1)
    grad_rows = _exact_matmul(probabilities_RV.to(head_VD.dtype), head_VD)
    grad_CKD[:, 1:][mask_CJ] = grad_rows.to(grad_CKD.dtype)


def _exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with float32 accumulation AND float32 result for 16-bit input."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
