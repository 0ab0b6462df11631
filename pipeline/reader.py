"""One sample out of its shard: one byte range, checked before anything is trained on it.

The range begins where the sample before it ends, so it holds the sample's KEY.json as well: the key must be the
index's, the CRC-32 the one that was recorded when the shard was written, the shapes those of the manifest. The states
are read straight into the batch's memory; nothing of their size is allocated or copied.
"""
import io
import json
import struct
import tarfile

import numpy as np
import torch
from torch import Tensor

from data_prep.errors import UserError
from data_prep.fp8 import dequantise
from data_prep.manifest import Manifest, SampleEntry
from data_prep.samples import anchor_positions, tensor_places
from data_prep.shards import padded
from pipeline.checksum import CheckedStream, SecondThread
from pipeline.sources import Source

DEQUANTISED_AT_ONCE = 1 << 18  # values: their float32 copies stay in the cache


class DamagedSample(UserError):
    """The bytes of one sample are not those that were written. data.on_error says whether it stops the run."""


class _Unlike(Exception):
    """The payload is not what index and manifest say."""


class SampleReader:
    """Reads samples of one dataset. entries: all samples of the dataset, also those that are not trained on."""

    def __init__(self, source: Source, manifest: Manifest, entries: list[SampleEntry]):
        self.source = source
        self.features = (len(manifest.features.layer_ids), manifest.target.hidden_size)
        ends: dict[str, list[int]] = {}
        for entry in entries:
            ends.setdefault(entry.shard, [0]).append(entry.offset + padded(entry.nbytes))
        self._ends = {shard: np.sort(np.array(at)) for shard, at in ends.items()}
        self._second = SecondThread()
        self._codes = torch.empty(0, dtype=torch.uint8)  # where fp8 states are read into, as long as the longest so far

    def read(self, entry: SampleEntry) -> dict[str, Tensor]:
        """input_ids int32 [S], loss_mask uint8 [S], hidden bf16 [S, F, D], in memory of their own; raises as `fill`."""
        hidden = torch.empty(entry.tokens, *self.features, dtype=torch.bfloat16)
        ids, mask = self.fill(entry, hidden.flatten(1))
        return {"input_ids": ids, "loss_mask": mask, "hidden": hidden}

    def fill(self, entry: SampleEntry, hidden_SE: Tensor) -> tuple[Tensor, Tensor]:
        """Reads the states into `hidden_SE`, bf16, contiguous; returns input_ids int32 [S] and loss_mask uint8 [S].

        DamagedSample names the shard, the key and what is wrong; UserError where the shard cannot be read at all. Then
        `hidden_SE` may hold anything.
        """
        ends = self._ends[entry.shard]
        begin = int(ends[np.searchsorted(ends, entry.offset, side="right") - 1])
        span = entry.shard, begin, entry.offset + entry.nbytes - begin
        try:
            return self._fill(entry, hidden_SE, span)
        except DamagedSample:
            if not self.source.forget(*span):
                raise
        return self._fill(entry, hidden_SE, span)

    def _fill(self, entry: SampleEntry, hidden_SE: Tensor, span: tuple[str, int, int]) -> tuple[Tensor, Tensor]:
        assert hidden_SE.is_contiguous(), "bytes are read into it as it lies"
        nbytes, wrong = span[2], None
        with self.source.open_range(*span) as source:
            if source.nbytes < nbytes:
                raise self._damaged(entry, f"the shard ends {nbytes - source.nbytes} bytes too early")
            head = bytearray(nbytes - entry.nbytes)
            source.read_into(0, memoryview(head))
            key, crc32 = _meta(bytes(head))
            if key != entry.key:
                raise self._damaged(entry, f"the shard has sample {key!r} there, the index says {entry.key!r}")
            payload = CheckedStream(source, len(head), nbytes, self._second)
            try:
                tensors = self._tensors(entry, payload, hidden_SE)
            except _Unlike as error:
                wrong = str(error)
            payload.skip(payload.left)
        if payload.crc32 != crc32:
            raise self._damaged(entry, "its tensors do not have the CRC-32 that was recorded with them")
        if wrong:
            raise self._damaged(entry, wrong)
        if (anchors := len(anchor_positions(tensors["loss_mask"]))) != entry.anchors:
            raise self._damaged(entry, f"it has {anchors} valid anchors, the index says {entry.anchors}")
        if "hidden_scale" in tensors:
            _dequantise(tensors["hidden"], tensors["hidden_scale"], hidden_SE)
        return tensors["input_ids"], tensors["loss_mask"]

    def _tensors(self, entry: SampleEntry, payload: CheckedStream, hidden_SE: Tensor) -> dict[str, Tensor]:
        """The tensors of a payload, read but not yet checked by their sum. _Unlike where its header says other things
        than index and manifest."""
        (size,) = struct.unpack("<Q", payload.take(8))
        if size > payload.left:
            raise _Unlike(f"its header of {size} bytes is longer than the sample")
        try:
            places = tensor_places(payload.take(size))
        except UserError as error:
            raise _Unlike(str(error)) from error
        if (found := tuple(places["hidden"].shape)) != (expected := (entry.tokens, *self.features)):
            raise _Unlike(f"its (tokens, features, hidden) are {found}, index and manifest say {expected}")
        tensors, start = {}, payload.at
        for name, place in sorted(places.items(), key=lambda item: item[1].begin):
            nbytes = place.end - place.begin
            if payload.at != start + place.begin or nbytes > payload.left:
                raise _Unlike(f"{name} takes bytes {place.begin} to {place.end} of {payload.end - start}")
            if name == "last_hidden":  # an option of the shards that training has no use for
                payload.skip(nbytes)
                continue
            if name != "hidden":
                tensor = torch.empty(place.shape, dtype=place.dtype)
            elif place.dtype == hidden_SE.dtype:
                tensor = hidden_SE
            else:
                tensor = self._scratch(nbytes).view(place.dtype).view(place.shape)
            payload.fill(memoryview(tensor.view(torch.uint8).numpy().reshape(-1)))
            tensors[name] = tensor
        return tensors

    def _scratch(self, nbytes: int) -> Tensor:
        if len(self._codes) < nbytes:
            self._codes = torch.empty(nbytes, dtype=torch.uint8)
        return self._codes[:nbytes]

    def _damaged(self, entry: SampleEntry, what: str) -> DamagedSample:
        return DamagedSample(
            f"shard {self.source}/{entry.shard}, sample {entry.key}: {what}; restore the shard from a copy (its sha256 is in "
            "manifest.json, `python -m data_prep verify` compares it), or set data.on_error: skip to train without such "
            "samples")


def _dequantise(codes_SFD: Tensor, scale_SF: Tensor, hidden_SE: Tensor) -> None:
    step = max(1, DEQUANTISED_AT_ONCE // hidden_SE.shape[1])
    for codes, scale, hidden in zip(codes_SFD.split(step), scale_SF.split(step), hidden_SE.split(step)):
        hidden.copy_(dequantise(codes, scale).flatten(1))


def _meta(head: bytes) -> tuple[str | None, int | None]:
    """(key, crc32) out of the members before a payload; None where they are damaged."""
    try:
        with tarfile.open(fileobj=io.BytesIO(head), mode="r:") as tar:
            member = tar.next()
            key, _, kind = member.name.partition(".")
            payload = tar.next()
            meta = json.loads(tar.extractfile(member).read())
        whole = kind == "json" and payload is not None and payload.name == f"{key}.safetensors"
        return (key, meta["crc32"]) if whole else (None, None)
    except (tarfile.TarError, ValueError, KeyError, TypeError, AttributeError):  # whatever damaged bytes give
        return None, None
