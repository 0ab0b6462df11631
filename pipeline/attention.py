"""Block attention: queries from the block, keys and values from [context ; block].

Two callers, one mathematics. Training hands over N blocks of a row at once; block n sees the context before its anchor
and itself, never another block. Inference hands over one block behind a cache, where everything is visible.

The dense score matrix of a training row is (N*K) x (S + N*K) and mostly hidden. `grouped_block_attention` walks over
groups of neighbouring blocks instead: a group scores only the context prefix its furthest anchor can see plus its own
blocks. It is exact, needs no custom backward, and the cost follows the visible scores when anchors are sorted.

Shapes: B batch, S context tokens, N anchors, K slots of a block, H query heads, G key/value heads, D head dimension.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

# Query rows (blocks x slots) that share one call. More rows make better matrix products, fewer waste less on the scores
# between neighbouring blocks; 128 is where the two balance on CPUs for K = 8 and 16.
GROUP_ROWS = 128


def _attend(q_BHQD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, visible_B1QT: Tensor | None) -> Tensor:
    """Softmax attention with grouped key/value heads, without repeating keys: query heads that share a key head are
    laid out as further query rows of it."""
    B, H, Q, D = q_BHQD.shape
    G = k_BGTD.shape[1]
    rows = q_BHQD.reshape(B, G, (H // G) * Q, D)
    if visible_B1QT is not None:
        visible_B1QT = visible_B1QT.repeat(1, 1, H // G, 1)
    out = F.scaled_dot_product_attention(rows, k_BGTD, v_BGTD, attn_mask=visible_B1QT)
    return out.reshape(B, H, Q, D)


def grouped_block_attention(
    q_BHQD: Tensor,
    context_k_BGSD: Tensor,
    context_v_BGSD: Tensor,
    block_k_BGQD: Tensor,
    block_v_BGQD: Tensor,
    anchors_BN: Tensor,
    block_size: int,
    group_rows: int = GROUP_ROWS,
) -> Tensor:
    """Masked attention of N blocks a row, Q = N * block_size; returns [B, H, Q, D].

    Block n of row b sees context positions `< anchors_BN[b, n]` and all slots of itself (spec 2; DFlash, 2602.06036).
    An unused block carries anchor 0: it sees only itself, so its rows stay finite. Anchors need no order, but sorted
    ones make the prefixes short.
    """
    N = anchors_BN.shape[1]
    per_group = max(1, group_rows // block_size)
    furthest = anchors_BN.amax(0).tolist()
    outputs = []
    for first in range(0, N, per_group):
        last = min(first + per_group, N)
        rows = slice(first * block_size, last * block_size)
        prefix = max(furthest[first:last])
        k = torch.cat([context_k_BGSD[:, :, :prefix], block_k_BGQD[:, :, rows]], dim=2)
        v = torch.cat([context_v_BGSD[:, :, :prefix], block_v_BGQD[:, :, rows]], dim=2)
        visible = _group_mask(anchors_BN[:, first:last], prefix, block_size)
        outputs.append(_attend(q_BHQD[:, :, rows], k, v, visible))
    return torch.cat(outputs, dim=2)


def _group_mask(anchors_Bn: Tensor, prefix: int, block_size: int) -> Tensor:
    """[B, 1, n*K, prefix + n*K], True where a slot may look."""
    B, n = anchors_Bn.shape
    positions = torch.arange(prefix, device=anchors_Bn.device)
    context_BnP = positions < anchors_Bn[:, :, None]
    same_nn = torch.eye(n, dtype=torch.bool, device=anchors_Bn.device).expand(B, n, n)
    visible = torch.cat([context_BnP, same_nn.repeat_interleave(block_size, dim=2)], dim=2)
    return visible.repeat_interleave(block_size, dim=1)[:, None]


def cached_block_attention(q_BHKD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    """Attention of one block over T = context + K keys that are all visible; returns [B, H, K, D]."""
    return _attend(q_BHKD, k_BGTD, v_BGTD, None)
