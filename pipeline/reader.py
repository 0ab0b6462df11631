"""One sample out of its shard: one byte range, checked before anything is trained on it.

The range begins where the sample before it ends, so it holds the sample's KEY.json as well: the key must be the index's,
the CRC-32 the one that was recorded when the shard was written, the shapes those of the manifest.
"""
import io
import json
import tarfile
import zlib

import numpy as np
from torch import Tensor

from data_prep.errors import UserError
from data_prep.manifest import Manifest, SampleEntry
from data_prep.samples import anchor_positions, decode_sample
from data_prep.shards import padded
from pipeline.sources import Source


class DamagedSample(UserError):
    """The bytes of one sample are not those that were written. data.on_error says whether it stops the run."""


class SampleReader:
    """Reads samples of one dataset. entries: all samples of the dataset, also those that are not trained on."""

    def __init__(self, source: Source, manifest: Manifest, entries: list[SampleEntry]):
        self.source = source
        self.features = (len(manifest.features.layer_ids), manifest.target.hidden_size)
        ends: dict[str, list[int]] = {}
        for entry in entries:
            ends.setdefault(entry.shard, [0]).append(entry.offset + padded(entry.nbytes))
        self._ends = {shard: np.sort(np.array(at)) for shard, at in ends.items()}

    def read(self, entry: SampleEntry) -> dict[str, Tensor]:
        """input_ids int32 [S], loss_mask uint8 [S], hidden bf16 [S, F, D], sharing the memory that was read into.
        DamagedSample names the shard, the key and what is wrong; UserError where the shard cannot be read at all."""
        ends = self._ends[entry.shard]
        begin = int(ends[np.searchsorted(ends, entry.offset, side="right") - 1])
        nbytes = entry.offset + entry.nbytes - begin
        try:
            return self._check(entry, self.source.read_range(entry.shard, begin, nbytes), entry.offset - begin)
        except DamagedSample:
            if not self.source.forget(entry.shard, begin, nbytes):
                raise
        return self._check(entry, self.source.read_range(entry.shard, begin, nbytes), entry.offset - begin)

    def _check(self, entry: SampleEntry, buffer: bytearray, payload_at: int) -> dict[str, Tensor]:
        if len(buffer) < payload_at + entry.nbytes:
            raise self._damaged(entry, f"the shard ends {payload_at + entry.nbytes - len(buffer)} bytes too early")
        key, crc32 = _meta(bytes(buffer[:payload_at]))
        if key != entry.key:
            raise self._damaged(entry, f"the shard has sample {key!r} there, the index says {entry.key!r}")
        payload = memoryview(buffer)[payload_at:]
        if zlib.crc32(payload) != crc32:
            raise self._damaged(entry, "its tensors do not have the CRC-32 that was recorded with them")
        try:
            tensors = decode_sample(payload)
        except UserError as error:
            raise self._damaged(entry, str(error)) from error
        found = (len(tensors["input_ids"]), len(anchor_positions(tensors["loss_mask"])), *tensors["hidden"].shape[1:])
        if found != (expected := (entry.tokens, entry.anchors, *self.features)):
            raise self._damaged(entry, f"its (tokens, anchors, features, hidden) are {found}, index and manifest say {expected}")
        return tensors

    def _damaged(self, entry: SampleEntry, what: str) -> DamagedSample:
        return DamagedSample(
            f"shard {self.source}/{entry.shard}, sample {entry.key}: {what}; restore the shard from a copy (its sha256 is in "
            "manifest.json, `python -m data_prep verify` compares it), or set data.on_error: skip to train without such "
            "samples")


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
