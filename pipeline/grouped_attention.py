"""Block attention by groups, on any device: implementation `sdpa` of `attention.py`.

The dense score matrix of a training row is (N*K) x (S + N*K) and mostly hidden. Neighbouring blocks share one call of
PyTorch's scaled dot-product attention: a group scores only the part of its document that its furthest anchor can see
plus its own blocks. It is exact, needs no custom backward, and the cost follows the visible scores when anchors are
sorted.

Shapes: B batch, S context tokens, N anchors, K slots of a block, H query heads, G key/value heads, D head dimension.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Query rows (blocks x slots) that share one call. More rows make better matrix products, fewer waste less on the scores
# between neighbouring blocks; 128 is where the two balance on CPUs for K = 8 and 16.
GROUP_ROWS = 128


class Group(NamedTuple):
    """`blocks` neighbouring blocks that share one call and see context positions low..high-1, as far as `visible`
    allows: bool [b, 1, blocks*K, high - low + blocks*K]."""

    blocks: int
    low: int
    high: int
    visible_B1QT: Tensor


class Rows(NamedTuple):
    """Rows first..last-1 of the batch, which share the groups; together the groups hold all N blocks, in order."""

    first: int
    last: int
    groups: list[Group]


def shared_head_attention(q_BHQD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, visible_B1QT: Tensor | None = None) -> Tensor:
    """Softmax attention with grouped key/value heads, without repeating keys: query heads that share a key head are
    laid out as further query rows of it. visible: None where everything is."""
    B, H, Q, D = q_BHQD.shape
    G = k_BGTD.shape[1]
    rows = q_BHQD.reshape(B, G, (H // G) * Q, D)
    if visible_B1QT is not None:
        visible_B1QT = visible_B1QT.repeat(1, 1, H // G, 1)
    out = F.scaled_dot_product_attention(rows, k_BGTD, v_BGTD, attn_mask=visible_B1QT)
    return out.reshape(B, H, Q, D)


class GroupedAttention:
    """One pass's groups and masks; called in every layer.

    Blocks need no order, but sorted anchors make the prefixes short."""

    def __init__(self, anchors_BN: Tensor, starts_BN: Tensor | None, block_size: int, context_length: int,
                 group_rows: int = GROUP_ROWS):
        self.block_size = block_size
        self.rows = block_groups(anchors_BN, starts_BN, block_size, group_rows)

    def __call__(self, q_BHQD: Tensor, context_k_BGSD: Tensor, context_v_BGSD: Tensor, block_k_BGQD: Tensor,
                 block_v_BGQD: Tensor) -> Tensor:
        tensors = (q_BHQD, context_k_BGSD, context_v_BGSD, block_k_BGQD, block_v_BGQD)
        outputs = [_attend_rows(*(t[first:last] for t in tensors), groups, self.block_size)
                   for first, last, groups in self.rows]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def block_groups(anchors_BN: Tensor, starts_BN: Tensor | None, block_size: int, group_rows: int) -> list[Rows]:
    """How the N blocks of every row are cut into groups."""
    per_group = max(1, group_rows // block_size)
    if starts_BN is None:
        # Rows share their groups: one call each, over the longest prefix.
        furthest = anchors_BN.amax(0).tolist()
        return [Rows(0, len(anchors_BN), _cut(anchors_BN, torch.zeros_like(anchors_BN), furthest, [0] * len(furthest),
                                              block_size, per_group))]
    # Packed rows have their documents at different places, so each has groups of its own, none over two documents.
    return [Rows(b, b + 1, _cut(anchors_BN[b:b + 1], starts_BN[b:b + 1], anchors, starts, block_size, per_group))
            for b, (anchors, starts) in enumerate(zip(anchors_BN.tolist(), starts_BN.tolist()))]


def _cut(anchors_bN: Tensor, starts_bN: Tensor, furthest: list[int], begins: list[int], block_size: int,
         per_group: int) -> list[Group]:
    groups, first, N = [], 0, len(furthest)
    while first < N:
        low, last = begins[first], first + 1
        while last < min(first + per_group, N) and begins[last] == low:
            last += 1
        high = max(low, *furthest[first:last])
        groups.append(Group(last - first, low, high,
                            _group_mask(anchors_bN[:, first:last], starts_bN[:, first:last], low, high, block_size)))
        first = last
    return groups


def _group_mask(anchors_Bn: Tensor, starts_Bn: Tensor, low: int, high: int, block_size: int) -> Tensor:
    """[B, 1, n*K, high - low + n*K], True where a slot may look."""
    B, n = anchors_Bn.shape
    positions = torch.arange(low, high, device=anchors_Bn.device)
    context_BnP = (positions >= starts_Bn[:, :, None]) & (positions < anchors_Bn[:, :, None])
    same_nn = torch.eye(n, dtype=torch.bool, device=anchors_Bn.device).expand(B, n, n)
    visible = torch.cat([context_BnP, same_nn.repeat_interleave(block_size, dim=2)], dim=2)
    return visible.repeat_interleave(block_size, dim=1)[:, None]


def _attend_rows(q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor, groups: list[Group],
                 block_size: int) -> Tensor:
    # Tensors are split once instead of sliced per group: the gradient of a slice is a whole tensor of zeros.
    cuts = sorted({0, context_k.shape[2], *(g.low for g in groups), *(g.high for g in groups)})
    lengths = [end - begin for begin, end in zip(cuts, cuts[1:])]
    context_ks, context_vs = context_k.split(lengths, dim=2), context_v.split(lengths, dim=2)
    sizes = [g.blocks * block_size for g in groups]
    outputs = []
    for group, q_part, k_part, v_part in zip(groups, *(t.split(sizes, dim=2) for t in (q, block_k, block_v))):
        seen = slice(cuts.index(group.low), cuts.index(group.high))
        # An empty context stays in the graph: under ZeRO every parameter needs a gradient in every pass, if only zeros.
        k = torch.cat([*(context_ks[seen] or (context_k[:, :, :0],)), k_part], dim=2)
        v = torch.cat([*(context_vs[seen] or (context_v[:, :, :0],)), v_part], dim=2)
        outputs.append(shared_head_attention(q_part, k, v, group.visible_B1QT))
    return torch.cat(outputs, dim=2)
