"""Block attention with FlashAttention 2 kernels: first half of implementation `flash` of `attention.py`.

The kernels know no mask like ours, so what is visible is cut into rectangles that need none. Blocks sorted by anchor see
a staircase of context. Its later half of blocks sees all context before the half's first anchor, which is a rectangle;
what remains are two staircases of half as many blocks. All rectangles of one depth have rows and keys of their own: they
are one call with many lengths. The last call gives every block its remaining context and its own slots. Not one hidden
score is computed. The parts are merged by their log-sum-exp, and in the backward pass every part gets the merged output
and log-sum-exp, as in ring attention (Liu et al., arXiv 2310.01889).

Kernels are those of the `flash-attn` package, or without it the copy that PyTorch has (same algorithm, CUDA only).

Shapes: B batch, S context tokens, N anchors, K slots, H query and G key/value heads, D head dimension; R = B*N*K rows,
P = B*(S + N*K) places of keys.
"""
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Part(NamedTuple):
    """Rectangles that share one call: places of their rows and keys, behind one another, and cumulative lengths int32."""

    rows: Tensor
    keys: Tensor
    row_ends: Tensor
    key_ends: Tensor
    most_rows: int
    most_keys: int


class FlashAttention:
    """One pass's parts; called in every layer. ValueError unless the blocks of a row ascend by (start, anchor)."""

    def __init__(self, anchors_BN: Tensor, starts_BN: Tensor | None, block_size: int, context_length: int, kernels=None):
        anchors = anchors_BN.cpu().numpy()
        starts = np.zeros_like(anchors) if starts_BN is None else starts_BN.cpu().numpy()
        if (np.diff(starts, axis=1) < 0).any() or (np.diff(anchors, axis=1) < 0).any():
            raise ValueError("blocks must ascend by the place of their anchors in the row; sort them first")
        self.parts = [part.to(anchors_BN.device) for part in staircase_parts(anchors, starts, block_size, context_length)]
        self.kernels = kernels or flash_kernels()

    def __call__(self, q_BHQD: Tensor, context_k_BGSD: Tensor, context_v_BGSD: Tensor, block_k_BGQD: Tensor,
                 block_v_BGQD: Tensor) -> Tensor:
        B, _, Q, _ = q_BHQD.shape
        flat = lambda *parts: torch.cat(parts, dim=2).transpose(1, 2).flatten(0, 1)  # noqa: E731
        out_RHD = _MergedParts.apply(flat(q_BHQD), flat(context_k_BGSD, block_k_BGQD), flat(context_v_BGSD, block_v_BGQD),
                                     self.parts, self.kernels)
        return out_RHD.unflatten(0, (B, Q)).transpose(1, 2)


class _Lengths(NamedTuple):
    """Rectangles of one call before they are places: first row and rows, first key and keys of each."""

    row: list[int]
    rows: list[int]
    key: list[int]
    keys: list[int]


def staircase_parts(anchors_BN: np.ndarray, starts_BN: np.ndarray, K: int, S: int) -> list["_PlacedPart"]:
    """The calls; the first one holds every row, in order."""
    B, N = anchors_BN.shape
    T = S + N * K
    leaf, by_depth = [], []
    for b in range(B):
        anchors, starts = anchors_BN[b].tolist(), starts_BN[b].tolist()
        first = 0
        while first < N:
            last = first + 1
            while last < N and starts[last] == starts[first]:
                last += 1
            stairs = [(first, last, starts[first], 0)]  # blocks first..last-1 see places from `low` on
            while stairs:
                i, j, low, depth = stairs.pop()
                if j - i == 1:
                    leaf.append((b, i, low, anchors[i]))
                    continue
                middle = (i + j) // 2
                cut = anchors[middle]
                if cut > low:
                    while len(by_depth) <= depth:
                        by_depth.append([])
                    by_depth[depth].append((b * N * K + middle * K, (j - middle) * K, b * T + low, cut - low))
                stairs += [(middle, j, cut, depth + 1), (i, middle, low, depth + 1)]
            first = last
    rows = [(b * N * K + i * K, K) for b, i, _, _ in leaf]
    context = [(b * T + low, end - low) for b, _, low, end in leaf]
    own = [(b * T + S + i * K, K) for b, i, _, _ in leaf]
    keys = [piece for pair in zip(context, own) for piece in pair]
    first_part = _PlacedPart(_places(rows), _places(keys), [K] * len(rows), [n + K for _, n in context])
    return [first_part, *(_PlacedPart(_places([r[:2] for r in part]), _places([r[2:] for r in part]),
                                      [r[1] for r in part], [r[3] for r in part]) for part in by_depth if part)]


def _places(pieces: list[tuple[int, int]]) -> np.ndarray:
    """int64: begin, begin + 1, ... of every (begin, length), behind one another."""
    begins, lengths = np.array(pieces, dtype=np.int64).reshape(-1, 2).T
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(begins - offsets, lengths) + np.arange(lengths.sum())


class _PlacedPart(NamedTuple):
    rows: np.ndarray
    keys: np.ndarray
    row_lengths: list[int]
    key_lengths: list[int]

    def to(self, device: torch.device) -> Part:
        ends = [torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)
                for lengths in (self.row_lengths, self.key_lengths)]
        return Part(torch.from_numpy(self.rows).to(device), torch.from_numpy(self.keys).to(device), *ends,
                    max(self.row_lengths), max(self.key_lengths))


class _MergedParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_RHD, k_PGD, v_PGD, parts, kernels):
        scale = q_RHD.shape[-1] ** -0.5
        out_RHD, lse_RH = None, None
        for part in parts:
            piece, lse_Hr = kernels.forward(q_RHD[part.rows], k_PGD[part.keys], v_PGD[part.keys], part, scale)
            lse_rH = lse_Hr.t()
            if out_RHD is None:  # the first part has every row
                out_RHD, lse_RH = piece.to(lse_rH.dtype), lse_rH.contiguous()
                continue
            before = lse_RH[part.rows]
            both = torch.logaddexp(before, lse_rH)
            out_RHD[part.rows] = (out_RHD[part.rows] * (before - both).exp()[..., None]
                                  + piece * (lse_rH - both).exp()[..., None])
            lse_RH[part.rows] = both
        out_RHD = out_RHD.to(q_RHD.dtype)
        ctx.save_for_backward(q_RHD, k_PGD, v_PGD, out_RHD, lse_RH)
        ctx.parts, ctx.kernels, ctx.scale = parts, kernels, scale
        return out_RHD

    @staticmethod
    def backward(ctx, grad_RHD):
        q_RHD, k_PGD, v_PGD, out_RHD, lse_RH = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(t, dtype=lse_RH.dtype) for t in (q_RHD, k_PGD, v_PGD))
        for part in ctx.parts:
            rows, keys = part.rows, part.keys
            pieces = ctx.kernels.backward(grad_RHD[rows], q_RHD[rows], k_PGD[keys], v_PGD[keys], out_RHD[rows],
                                          lse_RH[rows].t().contiguous(), part, ctx.scale)
            for total, places, piece in zip((dq, dk, dv), (rows, keys, keys), pieces):
                total[places] += piece  # no place occurs twice in a part
        return dq.to(q_RHD.dtype), dk.to(k_PGD.dtype), dv.to(v_PGD.dtype), None, None


def flash_kernels():
    """The installed package's kernels, else PyTorch's own."""
    try:
        from flash_attn import flash_attn_interface
    except ImportError:
        return TorchKernels()
    return PackageKernels(flash_attn_interface)


class PackageKernels:
    """Variable-length kernels of `flash_attn.flash_attn_interface` (version 2)."""

    def __init__(self, interface):
        self.interface = interface

    def forward(self, q, k, v, part: Part, scale: float) -> tuple[Tensor, Tensor]:
        """Output [r, H, D] and log-sum-exp [H, r] of the part's rows."""
        return self.interface._flash_attn_varlen_forward(
            q, k, v, part.row_ends, part.key_ends, part.most_rows, part.most_keys, dropout_p=0.0, softmax_scale=scale,
            causal=False)[:2]

    def backward(self, grad, q, k, v, out, lse_Hr, part: Part, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.interface._flash_attn_varlen_backward(
            grad.contiguous(), q, k, v, out, lse_Hr, dq, dk, dv, part.row_ends, part.key_ends, part.most_rows,
            part.most_keys, dropout_p=0.0, softmax_scale=scale, causal=False, window_size_left=-1, window_size_right=-1,
            softcap=0.0, alibi_slopes=None, deterministic=False)
        return dq, dk, dv


class TorchKernels:
    """PyTorch's copy of the same kernels."""

    def forward(self, q, k, v, part: Part, scale: float) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, part.row_ends, part.key_ends, part.most_rows, part.most_keys, 0.0, False, False, scale=scale)[:2]

    def backward(self, grad, q, k, v, out, lse_Hr, part: Part, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, lse_Hr, part.row_ends, part.key_ends, part.most_rows, part.most_keys, 0.0,
            False, no_dropout, no_dropout, scale=scale)
