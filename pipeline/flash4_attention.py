"""Block attention with FlashAttention 4 (package `flash-attn-4`, Hopper and newer): second half of implementation
`flash` of `attention.py`. The kernels take our mask and the tiles to skip directly, forward and backward.
"""
from functools import cache

import torch
from torch import Tensor

from pipeline.tiles import score_tiles

TILE = 128  # both tile lengths of the kernels for head dimensions up to 128


@cache
def _mask_mod():
    """The mask as the kernels compile it into themselves; its tensors are handed over with every call."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def visible(batch, head, row, key, lengths, tensors):
        begins, ends, blocks, key_blocks = tensors
        b, q, k = batch[0], row[0], key[0]
        begin = scalar_to_ssa(begins[b, q], cutlass.Int32)
        end = scalar_to_ssa(ends[b, q], cutlass.Int32)
        block = scalar_to_ssa(blocks[q], cutlass.Int32)
        key_block = scalar_to_ssa(key_blocks[k], cutlass.Int32)
        return ((key >= begin) & (key < end)) | (key_block == block)

    return visible


class Flash4Attention:
    """One pass's mask and tiles; called in every layer."""

    def __init__(self, anchors_BN: Tensor, starts_BN: Tensor | None, block_size: int, context_length: int):
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        tiles = score_tiles(anchors_BN, starts_BN, block_size, context_length, TILE)
        self.tensors = [tiles.row_starts_BQ, tiles.row_ends_BQ, tiles.row_blocks_Q, tiles.key_blocks_T]
        of = lambda partial, full: BlockSparseTensorsTorch(  # noqa: E731
            *tiles.lists(partial), *tiles.lists(full), block_size=(TILE, TILE))
        self.by_rows = of(tiles.partial_BIJ, tiles.full_BIJ)
        self.by_keys = of(tiles.partial_BIJ.mT.contiguous(), tiles.full_BIJ.mT.contiguous())

    def __call__(self, q_BHQD: Tensor, context_k_BGSD: Tensor, context_v_BGSD: Tensor, block_k_BGQD: Tensor,
                 block_v_BGQD: Tensor) -> Tensor:
        from flash_attn.cute.interface import flash_attn_func

        k = torch.cat([context_k_BGSD, block_k_BGQD], dim=2)
        v = torch.cat([context_v_BGSD, block_v_BGQD], dim=2)
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q_BHQD, k, v))
        out, *_ = flash_attn_func(q, k, v, mask_mod=_mask_mod(), aux_tensors=self.tensors, block_sparse_tensors=self.by_rows,
                                  block_sparse_tensors_bwd=self.by_keys)
        return out.transpose(1, 2)
