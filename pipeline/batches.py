"""What a rank computes at once: the blocks of a few rows, each row one document or, packed, several behind one another.

A document's anchors and labels are drawn and made from it alone, wherever it lies: its share of the loss does not
depend on what it shares a row with.
"""
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pipeline.anchors import block_input_ids, block_labels, draw_anchors
from pipeline.order import Item, StepPlan
from pipeline.passes import Passes
from pipeline.reader import DamagedSample, SampleReader


@dataclass
class MicroBatch:
    """B rows of one rank, padded to the longest. Shapes: S tokens, N anchors, K slots, E = features * hidden."""

    keys: list[str]  # of the documents, row by row
    features_BSE: Tensor  # bf16, as stored
    block_ids_BT: Tensor  # int64, T = N * K
    anchors_BN: Tensor  # int64, places in the row, 0 where unused
    labels_BNJ: Tensor  # int64, J = K - 1
    mask_BNJ: Tensor  # bool
    real_tokens: int  # without padding
    starts_BN: Tensor | None = None  # int64: where the block's document begins, 0 where unused; None: one document a row
    damaged: tuple[str, ...] = ()  # what was wrong with the samples that are missing here

    @property
    def positions_BN(self) -> Tensor:
        """int64: the anchors' positions in their documents."""
        return self.anchors_BN if self.starts_BN is None else self.anchors_BN - self.starts_BN

    def to(self, device: torch.device, dtype: torch.dtype) -> "MicroBatch":
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        moved.features_BSE = moved.features_BSE.to(dtype)
        return moved

    def pin_memory(self) -> "MicroBatch":
        """The DataLoader's hook: pages that a GPU copies from by itself."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change) -> "MicroBatch":
        return MicroBatch(**{name: change(value) if isinstance(value, Tensor) else value
                             for name, value in vars(self).items()})


@dataclass
class _Document:
    """One sample with its n drawn blocks: hidden bf16 [S, F, D], anchors [n], labels, mask [n, K-1], block_ids [n * K]."""

    key: str
    hidden: Tensor
    anchors: Tensor
    labels: Tensor
    mask: Tensor
    block_ids: Tensor


class StepDataset(Dataset):
    """Map from optimizer step to this rank's micro-batches."""

    def __init__(self, reader: SampleReader, passes: Passes, *, rank: int, max_anchors: int, block_size: int,
                 mask_token_id: int):
        self.reader, self.passes, self.rank = reader, passes, rank
        self.max_anchors, self.block_size, self.mask_token_id = max_anchors, block_size, mask_token_id

    @property
    def plan(self) -> StepPlan:
        return self.passes.plan

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest micro-batch of the run: its states, next to which the rest is small."""
        features, hidden = self.reader.features
        return self.passes.padding.largest * features * hidden * 2

    def __len__(self) -> int:
        return self.plan.steps

    def __getitem__(self, step: int) -> list[MicroBatch]:
        return [self.micro_batch(step, index) for index in range(self.passes.per_step)]

    def micro_batch(self, step: int, index: int) -> MicroBatch:
        """The rank's `index`-th micro-batch of a step, without its damaged samples. UserError where a shard cannot be
        read at all."""
        rows, damaged = [], []
        for items in self.passes.rows(step, index, self.rank):
            rows.append([])
            for item in items:
                try:
                    rows[-1].append(self._document(item))
                except DamagedSample as error:
                    damaged.append(str(error))
        return self._collate(rows, tuple(damaged))

    def _document(self, item: Item) -> _Document:
        sample = self.reader.read(item.entry)
        anchors = draw_anchors(sample["loss_mask"], self.max_anchors, seed=self.plan.seed, epoch=item.epoch,
                               key=item.entry.key)
        ids, anchors_1N = sample["input_ids"].long()[None], anchors[None]
        used = torch.ones_like(anchors_1N, dtype=torch.bool)
        labels, mask = block_labels(ids, sample["loss_mask"][None], anchors_1N, used, self.block_size)
        block_ids = block_input_ids(ids, anchors_1N, self.block_size, self.mask_token_id)
        return _Document(item.entry.key, sample["hidden"], anchors, labels[0], mask[0], block_ids[0])

    def _collate(self, rows: list[list[_Document]], damaged: tuple[str, ...]) -> MicroBatch:
        """Rows without a document stay: all ranks take every pass. They have one unused block, whose loss and gradient
        are 0."""
        B, K = len(rows), self.block_size
        tokens = [sum(len(document.hidden) for document in row) for row in rows]
        S, N = max(1, *tokens), max(1, *(sum(len(document.anchors) for document in row) for row in rows))
        features, hidden = self.reader.features
        alone = B == 1 and len(rows[0]) == 1  # then the row is the memory that was read
        features_BSE = (rows[0][0].hidden.flatten(1)[None] if alone else
                        torch.zeros(B, S, features * hidden, dtype=torch.bfloat16))
        block_ids_BNK = torch.full((B, N, K), self.mask_token_id, dtype=torch.int64)
        anchors_BN, starts_BN = torch.zeros(2, B, N, dtype=torch.int64)
        labels_BNJ = torch.zeros(B, N, K - 1, dtype=torch.int64)
        mask_BNJ = torch.zeros(B, N, K - 1, dtype=torch.bool)
        for b, row in enumerate(rows):
            start, first = 0, N - sum(len(document.anchors) for document in row)
            # Unused blocks come first: ascending order keeps the context prefixes of attention groups short.
            for document in row:
                end, blocks = start + len(document.hidden), slice(first, first + len(document.anchors))
                if not alone:
                    features_BSE[b, start:end] = document.hidden.flatten(1)
                block_ids_BNK[b, blocks] = document.block_ids.view(-1, K)
                anchors_BN[b, blocks] = start + document.anchors
                starts_BN[b, blocks] = start
                labels_BNJ[b, blocks], mask_BNJ[b, blocks] = document.labels, document.mask
                start, first = end, blocks.stop
        keys = [document.key for row in rows for document in row]
        return MicroBatch(keys, features_BSE, block_ids_BNK.flatten(1), anchors_BN, labels_BNJ, mask_BNJ, sum(tokens),
                          starts_BN if self.passes.pack_tokens else None, damaged)
