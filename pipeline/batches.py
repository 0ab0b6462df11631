"""What a rank computes at once: the blocks of a few rows, each row one document or, packed, several behind one another.

A document's anchors and labels are drawn and made from it alone, wherever it lies: its share of the loss does not
depend on what it shares a row with.

All tensors of a micro-batch lie in one stretch of memory, the states first. It is filled once, in whatever process, and
its shape says where everything is.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.anchors import block_input_ids, block_labels, draw_anchors
from pipeline.buffers import Lease
from pipeline.order import Item, StepPlan
from pipeline.passes import Passes
from pipeline.reader import DamagedSample, SampleReader


ALIGNED = 64  # bytes; every tensor of a batch begins on a multiple of it


class Shape(NamedTuple):
    """Of a micro-batch: B rows of S tokens with E values each, N blocks of K slots a row."""

    B: int
    S: int
    E: int
    N: int
    K: int

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """MicroBatch's tensors in `memory`, uint8, wherever that is; they hold what it holds."""
        found, at = {}, 0
        for name, (dtype, shape) in self._parts().items():
            nbytes = math.prod(shape) * dtype.itemsize
            found[name] = memory[at:at + nbytes].view(dtype).view(shape)
            at += -(-nbytes // ALIGNED) * ALIGNED
        return found

    @property
    def nbytes(self) -> int:
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in self._parts().values()]
        return sum(-(-nbytes // ALIGNED) * ALIGNED for nbytes in sizes)

    def _parts(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        B, S, E, N, K = self
        return {"features_BSE": (torch.bfloat16, (B, S, E)), "block_ids_BT": (torch.int64, (B, N * K)),
                "anchors_BN": (torch.int64, (B, N)), "starts_BN": (torch.int64, (B, N)),
                "labels_BNJ": (torch.int64, (B, N, K - 1)), "mask_BNJ": (torch.bool, (B, N, K - 1))}


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
    starts_BN: Tensor | None = None  # int64: where the block's document begins, 0 where unused; None: one a row
    damaged: tuple[str, ...] = ()  # what was wrong with the samples that are missing here
    lease: Lease | None = None  # of the memory that all of it lies in; None where it lies in memory of its own

    @property
    def positions_BN(self) -> Tensor:
        """int64: the anchors' positions in their documents."""
        return self.anchors_BN if self.starts_BN is None else self.anchors_BN - self.starts_BN

    def to(self, device: torch.device, dtype: torch.dtype) -> "MicroBatch":
        moved = MicroBatch(**{name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
                              for name, value in vars(self).items()})
        if self.lease and device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
            self.lease.hold(copied.query)
        moved.features_BSE = moved.features_BSE.to(dtype)
        moved.lease = None  # what still lies in its memory keeps it
        return moved


class Filled(NamedTuple):
    """What a process that filled memory with a micro-batch says about it."""

    shape: Shape
    keys: list[str]
    real_tokens: int
    packed: bool
    damaged: tuple[str, ...]

    def batch(self, memory: Tensor, lease: Lease | None = None) -> MicroBatch:
        """The micro-batch in that memory; lease: of it."""
        tensors = self.shape.tensors(memory)
        if not self.packed:
            tensors["starts_BN"] = None
        return MicroBatch(keys=self.keys, real_tokens=self.real_tokens, damaged=self.damaged, lease=lease, **tensors)


class _Document(NamedTuple):
    """A sample in row b from token `start` on, with its n drawn blocks: anchors [n] in it, labels and mask [n, K-1],
    block_ids [n * K]."""

    key: str
    b: int
    start: int
    anchors: Tensor
    labels: Tensor
    mask: Tensor
    block_ids: Tensor


class StepDataset:
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
        """Bytes that the largest micro-batch of the run takes at most: its states, next to which the rest is small."""
        positions = self.passes.padding.largest  # a row has no more blocks than tokens
        return self._shape(1, positions, positions).nbytes

    def _shape(self, B: int, S: int, N: int) -> Shape:
        return Shape(B, S, math.prod(self.reader.features), N, self.block_size)

    def __len__(self) -> int:
        return self.plan.steps

    def __getitem__(self, step: int) -> list[MicroBatch]:
        return [self.micro_batch(step, index) for index in range(self.passes.per_step)]

    def micro_batch(self, step: int, index: int) -> MicroBatch:
        """The rank's `index`-th micro-batch of a step, in memory of its own. Raises like `fill`."""
        rows = self.passes.rows(step, index, self.rank)
        S = _longest(rows)
        memory = torch.empty(self._shape(len(rows), S, S).nbytes, dtype=torch.uint8)
        return self.fill(step, index, memory).batch(memory)

    def fill(self, step: int, index: int, memory: Tensor) -> Filled:
        """Reads the rank's `index`-th micro-batch of a step, without its damaged samples, into `memory`, uint8, of at
        most `largest_bytes` bytes. UserError where a shard cannot be read at all.

        Rows without a document stay: all ranks take every pass. They have one unused block, whose loss and gradient
        are 0.
        """
        rows = self.passes.rows(step, index, self.rank)
        B, S, K = len(rows), _longest(rows), self.block_size
        features_BSE = self._shape(B, S, 1).tensors(memory)["features_BSE"]
        documents, damaged, ends = [], [], [0] * B
        for b, items in enumerate(rows):
            for item in items:
                hidden_SE = features_BSE[b, ends[b]:ends[b] + item.entry.tokens]
                try:
                    documents.append(self._document(item, hidden_SE, b, ends[b]))
                    ends[b] += item.entry.tokens
                except DamagedSample as error:  # the next one takes its place
                    damaged.append(str(error))
            features_BSE[b, ends[b]:] = 0
        blocks = [sum(len(document.anchors) for document in documents if document.b == b) for b in range(B)]
        shape = self._shape(B, S, max(1, *blocks))
        self._write_blocks(documents, shape, shape.tensors(memory), [shape.N - count for count in blocks])
        keys = [document.key for document in documents]
        return Filled(shape, keys, sum(ends), self.passes.pack_tokens is not None, tuple(damaged))

    def _document(self, item: Item, hidden_SE: Tensor, b: int, start: int) -> _Document:
        """Reads the sample's states into `hidden_SE`, which begins at row b's token `start`."""
        input_ids, loss_mask = self.reader.fill(item.entry, hidden_SE)
        anchors = draw_anchors(loss_mask, self.max_anchors, seed=self.plan.seed, epoch=item.epoch, key=item.entry.key)
        ids, anchors_1N = input_ids.long()[None], anchors[None]
        used = torch.ones_like(anchors_1N, dtype=torch.bool)
        labels, mask = block_labels(ids, loss_mask[None], anchors_1N, used, self.block_size)
        block_ids = block_input_ids(ids, anchors_1N, self.block_size, self.mask_token_id)
        return _Document(item.entry.key, b, start, anchors, labels[0], mask[0], block_ids[0])

    def _write_blocks(self, documents: list[_Document], shape: Shape, tensors: dict[str, Tensor], first: list[int]):
        """first: of the used blocks of each row. Unused ones come before them: ascending order keeps the context
        prefixes of attention groups short."""
        block_ids_BNK = tensors["block_ids_BT"].view(shape.B, shape.N, shape.K).fill_(self.mask_token_id)
        for name in ("anchors_BN", "starts_BN", "labels_BNJ", "mask_BNJ"):
            tensors[name].zero_()
        for document in documents:
            b, n = document.b, len(document.anchors)
            blocks = slice(first[b], first[b] + n)
            block_ids_BNK[b, blocks] = document.block_ids.view(n, shape.K)
            tensors["anchors_BN"][b, blocks] = document.start + document.anchors
            tensors["starts_BN"][b, blocks] = document.start
            tensors["labels_BNJ"][b, blocks], tensors["mask_BNJ"][b, blocks] = document.labels, document.mask
            first[b] += n


def _longest(rows: list[list[Item]]) -> int:
    return max(1, *(sum(item.entry.tokens for item in row) for row in rows))
