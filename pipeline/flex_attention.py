"""Block attention with PyTorch's FlexAttention: implementation `flex` of `attention.py`.

One kernel over the whole score matrix that skips hidden tiles and masks the partly visible ones. On a GPU it is
compiled once for all lengths; elsewhere PyTorch evaluates it densely, which tests use.
"""
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from pipeline.compiled import compiled
from pipeline.tiles import score_tiles

TILE = 128  # FlexAttention's own default for its masks

_compiled = compiled(flex_attention, dynamic=True)


class FlexAttention:
    """One pass's block mask; called in every layer. Blocks need no order, but sorted anchors leave fewer partly visible
    tiles."""

    def __init__(self, anchors_BN: Tensor, starts_BN: Tensor | None, block_size: int, context_length: int):
        tiles = score_tiles(anchors_BN, starts_BN, block_size, context_length, TILE)
        begins, ends, blocks, key_blocks = tiles.row_starts_BQ, tiles.row_ends_BQ, tiles.row_blocks_Q, tiles.key_blocks_T

        def visible(b, h, q, k):
            return ((k >= begins[b, q]) & (k < ends[b, q])) | (key_blocks[k] == blocks[q])

        self.mask = BlockMask.from_kv_blocks(*tiles.lists(tiles.partial_BIJ), *tiles.lists(tiles.full_BIJ), BLOCK_SIZE=TILE,
                                             mask_mod=visible, seq_lengths=(len(blocks), len(key_blocks)))

    def __call__(self, q_BHQD: Tensor, context_k_BGSD: Tensor, context_v_BGSD: Tensor, block_k_BGQD: Tensor,
                 block_v_BGQD: Tensor) -> Tensor:
        k = torch.cat([context_k_BGSD, block_k_BGQD], dim=2)
        v = torch.cat([context_v_BGSD, block_v_BGQD], dim=2)
        attend = _compiled if q_BHQD.is_cuda else flex_attention
        return attend(q_BHQD, k, v, block_mask=self.mask, enable_gqa=True)
