"""Which tiles of the score matrix are hidden, partly visible or all visible: what block-sparse kernels skip by.

Rows of the matrix are the N*K slots of all blocks, columns the keys [context ; slots]. A slot of block n sees context
positions starts[n] <= s < anchors[n] and the slots of block n. Since anchors lie inside the context, one comparison of
the key's place with the interval covers both kinds of keys, and `key_blocks` tells the own slots.

Shapes: B batch, S context tokens, N anchors, K slots of a block, Q = N*K rows, T = S + Q keys, I row and J key tiles.
"""
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """rows' intervals int32 [B, Q] and blocks int32 [Q], keys' blocks int32 [T] (-1 in the context), and the tiles,
    bool [B, I, J]: `full` where all is visible, `partial` where some is."""

    row_starts_BQ: Tensor
    row_ends_BQ: Tensor
    row_blocks_Q: Tensor
    key_blocks_T: Tensor
    partial_BIJ: Tensor
    full_BIJ: Tensor

    def lists(self, kind_BIJ: Tensor) -> tuple[Tensor, Tensor]:
        """int32 counts [B, 1, I] and indices [B, 1, I, J]: the tiles of every row of tiles, those that count first."""
        order = torch.argsort(kind_BIJ.to(torch.int8), dim=-1, descending=True, stable=True)
        return kind_BIJ.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None].contiguous()


def score_tiles(anchors_BN: Tensor, starts_BN: Tensor | None, block_size: int, context_length: int, tile: int) -> Tiles:
    """The tiles of a pass; no value leaves the device. starts_BN: None where every row is one document."""
    device, K, S = anchors_BN.device, block_size, context_length
    starts_BN = torch.zeros_like(anchors_BN) if starts_BN is None else starts_BN
    N = anchors_BN.shape[1]
    Q, T = N * K, S + N * K
    low_J = torch.arange(0, T, tile, device=device)
    high_J = low_J + tile
    begin, end = starts_BN[:, :, None], anchors_BN[:, :, None]
    own_low = S + K * torch.arange(N, device=device)[:, None]
    own_high = own_low + K
    some_BNJ = ((begin < high_J) & (end > low_J) & (end > begin)) | ((own_low < high_J) & (own_high > low_J))
    whole_BNJ = ((begin <= low_J) & (end >= high_J)) | ((own_low <= low_J) & (own_high >= high_J))
    low_I = torch.arange(0, Q, tile, device=device)
    first_I, last_I = low_I // K, (low_I + tile - 1).clamp(max=Q - 1) // K  # the blocks that rows of a tile belong to
    some_BIJ = _count(some_BNJ, first_I, last_I) > 0
    full_BIJ = _count(whole_BNJ, first_I, last_I) == (last_I - first_I + 1)[:, None]
    row_blocks_Q = torch.arange(Q, device=device, dtype=torch.int32) // K
    key_blocks_T = torch.cat([row_blocks_Q.new_full((S,), -1), row_blocks_Q])
    of_rows = lambda t: t.to(torch.int32).repeat_interleave(K, 1)  # noqa: E731
    return Tiles(of_rows(starts_BN), of_rows(anchors_BN), row_blocks_Q, key_blocks_T, some_BIJ & ~full_BIJ, full_BIJ)


def _count(flags_BNJ: Tensor, first_I: Tensor, last_I: Tensor) -> Tensor:
    """How many of the blocks first..last have the flag, [B, I, J]."""
    sums = torch.nn.functional.pad(flags_BNJ.to(torch.int32).cumsum(1), (0, 0, 1, 0))
    return sums[:, last_I + 1] - sums[:, first_I]
