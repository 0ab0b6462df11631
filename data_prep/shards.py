"""Samples and the webdataset shards they lie in.

A shard is an uncompressed tar that plain `webdataset` reads. A sample is two members: `KEY.json` (where it came from,
its turns, probes and the CRC-32 of the other member) and `KEY.safetensors` with input_ids int32 [S], loss_mask uint8
[S] and hidden bf16 [S, F, D]. The same samples always give the same bytes: fixed times, owners and member order.
"""

import hashlib
import json
import os
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from webdataset.writer import TarWriter

from .errors import UserError
from .files import canonical_json

BLOCK = 512  # bytes; tar members start and end on multiples of it
UNFINISHED = ".tmp"  # suffix of a shard that is being written
DTYPES = {"input_ids": ("I32", torch.int32), "loss_mask": ("U8", torch.uint8), "hidden": ("BF16", torch.bfloat16)}


def shard_name(number: int) -> str:
    """File name of shard `number`."""
    return f"{number:06d}.tar"


def padded(nbytes: int) -> int:
    """Bytes that a tar member of `nbytes` bytes occupies, without its header."""
    return -(-nbytes // BLOCK) * BLOCK


def sample_bytes(tokens: int, features: int, hidden_size: int) -> int:
    """Bytes that a sample adds to its shard: states, ids and mask of `tokens` positions, two headers, about 1 KiB of
    JSON.
    """
    return padded(tokens * (features * hidden_size * 2 + 5) + 256) + 4 * BLOCK


def anchor_positions(loss_mask_S: torch.Tensor) -> torch.Tensor:
    """Positions (int64 [A], ascending) whose token and next token are both supervised: the valid anchors (spec 2)."""
    return (loss_mask_S[:-1].bool() & loss_mask_S[1:].bool()).nonzero().flatten()


def encode_sample(input_ids_S: torch.Tensor, loss_mask_S: torch.Tensor, hidden_SFD: torch.Tensor) -> bytes:
    """The bytes of KEY.safetensors. UserError for states that are not bfloat16: other types lose range or precision."""
    if hidden_SFD.dtype != torch.bfloat16:
        raise UserError(
            f"states are {hidden_SFD.dtype}, shards store bfloat16: float16 overflows at 65504, which hidden states "
            "exceed; convert with .to(torch.bfloat16)."
        )
    return save(
        {
            "input_ids": input_ids_S.to(torch.int32).contiguous(),
            "loss_mask": loss_mask_S.to(torch.uint8).contiguous(),
            "hidden": hidden_SFD.contiguous(),
        }
    )


def decode_sample(buffer: bytearray | memoryview) -> dict[str, torch.Tensor]:
    """The tensors of a KEY.safetensors payload, sharing memory with `buffer` (nothing is copied).

    Returns input_ids int32 [S], loss_mask uint8 [S], hidden bf16 [S, F, D]. UserError when the payload is anything
    else.
    """
    view = memoryview(buffer)
    if len(view) < 8:
        raise UserError(
            f"a sample of {len(view)} bytes is no safetensors payload; run `python -m data_prep verify` on the dataset."
        )
    (header_size,) = struct.unpack("<Q", view[:8])
    try:
        header = json.loads(bytes(view[8 : 8 + header_size]))
        start = 8 + header_size
        tensors = {}
        for name, (code, dtype) in DTYPES.items():
            entry = header[name]
            begin, end = entry["data_offsets"]
            if entry["dtype"] != code:
                raise ValueError(f"{name} is {entry['dtype']}, expected {code}")
            if start + end > len(view):
                raise ValueError(f"{name} ends at byte {start + end} of {len(view)}")
            count = (end - begin) // dtype.itemsize
            tensors[name] = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start + begin).view(
                entry["shape"]
            )
    except (ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:  # whatever damaged bytes decode to
        raise UserError(
            f"a sample's payload is damaged ({error}); run `python -m data_prep verify` on the dataset."
        ) from error
    rows = {name: tensor.shape[0] if tensor.dim() else 0 for name, tensor in tensors.items()}
    if len(set(rows.values())) > 1 or tensors["input_ids"].dim() != 1 or tensors["hidden"].dim() != 3:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise UserError(
            f"a sample has shapes {shapes}, expected [S], [S] and [S, F, D]; run `python -m data_prep verify`."
        )
    return tensors


def read_sample(path: str | Path, offset: int, nbytes: int) -> dict[str, torch.Tensor]:
    """The tensors of the sample at byte `offset` of the shard `path`: one read straight into the tensors' memory."""
    buffer = bytearray(nbytes)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < nbytes:  # Linux returns at most 2 GiB a call
            count = os.preadv(descriptor, [memoryview(buffer)[done:]], offset + done)
            if count == 0:
                raise UserError(
                    f"shard {path} ends after {done} of the {nbytes} bytes of the sample at {offset}: it is cut short; "
                    "run `python -m data_prep verify` on the dataset."
                )
            done += count
    finally:
        os.close(descriptor)
    return decode_sample(buffer)


def read_metas(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, contents of KEY.json) of every sample of the shard `path`, in order."""
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            key, _, kind = member.name.partition(".")
            if kind == "json":
                yield key, json.load(tar.extractfile(member))


def read_meta(path: str | Path, key: str) -> dict[str, Any]:
    """The contents of KEY.json in the shard `path`."""
    return next(meta for name, meta in read_metas(path) if name == key)


class Written(NamedTuple):
    """A row of index.jsonl: the sample's key, the byte range of its safetensors payload in the tar, and its counts."""

    key: str
    offset: int
    nbytes: int
    tokens: int
    supervised: int
    anchors: int


class _HashingFile:
    """Write-only file that hashes and counts what goes through, so a finished shard is not read again."""

    def __init__(self, path: Path):
        self.file = open(path, "wb")
        self.sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, content: bytes) -> int:
        self.sha256.update(content)
        self.bytes += len(content)
        return self.file.write(content)


class ShardWriter:
    """Writes one shard to `NAME.tmp`; `finish()` makes the file durable, `publish()` gives it its final name."""

    def __init__(self, folder: Path, name: str):
        self.path = folder / name
        self.temporary = folder / (name + UNFINISHED)
        self.stream = _HashingFile(self.temporary)
        self.tar = TarWriter(self.stream, user="data", group="data", mode=0o644, encoder=False, mtime=0)
        self.samples: list[Written] = []

    def add(
        self,
        key: str,
        meta: dict[str, Any],
        input_ids_S: torch.Tensor,
        loss_mask_S: torch.Tensor,
        hidden_SFD: torch.Tensor,
    ) -> None:
        """Append a sample; `meta` becomes KEY.json, with the payload's CRC-32 added (verify names a damaged sample by
        it).
        """
        payload = encode_sample(input_ids_S, loss_mask_S, hidden_SFD)
        meta = {**meta, "crc32": zlib.crc32(payload)}
        # webdataset writes the members of a sample in the order of their extensions: json, then safetensors
        self.tar.write({"__key__": key, "json": canonical_json(meta), "safetensors": payload})
        offset = self.tar.tarstream.offset - padded(len(payload))
        anchors = len(anchor_positions(loss_mask_S))
        self.samples.append(Written(key, offset, len(payload), len(input_ids_S), int(loss_mask_S.sum()), anchors))

    def finish(self) -> tuple[int, str]:
        """Close the tar and fsync it. Returns its size in bytes and its SHA-256."""
        self.tar.close()
        self.stream.file.flush()
        os.fsync(self.stream.file.fileno())
        self.stream.file.close()
        return self.stream.bytes, self.stream.sha256.hexdigest()

    def publish(self) -> None:
        """Rename the finished file to its final name: a shard under its final name is complete."""
        os.replace(self.temporary, self.path)
