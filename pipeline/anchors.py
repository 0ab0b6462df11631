"""Anchors, and the block layout that belongs to them (spec 2).

A block anchored at position a: slot 0 holds the real token x[a], slots 1..K-1 hold the mask token; slot k sits at
position a + k and its label is x[a + k]; slot 0 predicts nothing. A block ends at its first unsupervised slot, since
nothing behind a hole can be accepted.

Shapes: B batch, S tokens, N anchors, K slots.
"""
import hashlib

import numpy as np
import torch
from torch import Tensor

from data_prep.samples import anchor_positions


def draw_anchors(loss_mask_S: Tensor, max_anchors: int, *, seed: int, epoch: int, key: str) -> Tensor:
    """int64 [n], ascending: up to `max_anchors` valid positions, uniform without replacement.

    A pure function of its arguments: the same on every rank, in every worker, after every restart; another draw each
    epoch. Fewer valid positions than asked for are all taken.
    """
    positions = anchor_positions(loss_mask_S)
    if len(positions) > max_anchors:
        digest = hashlib.sha256(f"anchors/{seed}/{epoch}/{key}".encode()).digest()
        rng = np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))
        chosen = np.sort(rng.choice(len(positions), size=max_anchors, replace=False))
        positions = positions[torch.from_numpy(chosen)]
    return positions


def block_labels(input_ids_BS: Tensor, loss_mask_BS: Tensor, anchors_BN: Tensor, used_BN: Tensor,
                 block_size: int) -> tuple[Tensor, Tensor]:
    """Labels int64 and mask bool, both [B, N, K-1], of slots 1..K-1.

    The mask is True up to the first unsupervised slot, also past the end of the row, and False in unused blocks;
    labels under a False mask are 0 and mean nothing.
    """
    B, S = input_ids_BS.shape
    slots = torch.arange(1, block_size, device=anchors_BN.device)
    positions_BNK = anchors_BN[:, :, None] + slots
    inside_BNK = positions_BNK < S
    index = positions_BNK.clamp(max=S - 1).flatten(1)
    labels = input_ids_BS.long().gather(1, index).view_as(positions_BNK)
    supervised = loss_mask_BS.bool().gather(1, index).view_as(positions_BNK)
    mask = (supervised & inside_BNK & used_BN[:, :, None]).long().cumprod(-1).bool()
    return labels.masked_fill(~mask, 0), mask


def block_input_ids(input_ids_BS: Tensor, anchors_BN: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """int64 [B, N*K]: the anchor's token in slot 0, the mask token in the others."""
    ids_BNK = anchors_BN.new_full((*anchors_BN.shape, block_size), mask_token_id)
    ids_BNK[:, :, 0] = input_ids_BS.long().gather(1, anchors_BN)
    return ids_BNK.flatten(1)
