"""The webdataset shards that samples lie in.

A shard is an uncompressed tar that plain `webdataset` reads. A sample is two members: `KEY.json` (where it came from,
its turns, probes, measurements and the CRC-32 of the other member) and `KEY.safetensors` (see samples.py). The same
samples always give the same bytes: fixed times, owners and member order.
"""

import hashlib
import json
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from webdataset.writer import TarWriter

from .files import canonical_json, open_locked, sync_folder, unfinished_path
from .manifest import SampleEntry
from .samples import Storage, anchor_positions, encode_sample, token_bytes

BLOCK = 512  # bytes; tar members start and end on multiples of it


def shard_name(number: int) -> str:
    """File name of shard `number`."""
    return f"{number:06d}.tar"


def padded(nbytes: int) -> int:
    """Bytes that a tar member of `nbytes` bytes occupies, without its header."""
    return -(-nbytes // BLOCK) * BLOCK


def sample_bytes(
    tokens: int, features: int, hidden_size: int, storage: Storage = "bf16", last_hidden: bool = False
) -> int:
    """Bytes that a sample of `tokens` positions adds to its shard: its tensors, two headers, about 1 KiB of JSON."""
    return padded(tokens * token_bytes(features, hidden_size, storage, last_hidden) + 256) + 4 * BLOCK


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


class _HashingFile:
    """Write-only file that hashes and counts what goes through, so a finished shard is not read again."""

    def __init__(self, path: Path):
        self.file = open_locked(path)
        self.sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, content: bytes) -> int:
        self.sha256.update(content)
        self.bytes += len(content)
        return self.file.write(content)


class ShardWriter:
    """Writes one shard to a file of its own; `finish()` makes it durable, `publish()` gives it its final name."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.temporary = unfinished_path(folder / name)
        self.stream = _HashingFile(self.temporary)
        self.tar = TarWriter(self.stream, user="data", group="data", mode=0o644, encoder=False, mtime=0)
        self.samples: list[SampleEntry] = []

    def add(
        self,
        key: str,
        meta: dict[str, Any],
        input_ids_S: torch.Tensor,
        loss_mask_S: torch.Tensor,
        states: dict[str, torch.Tensor],
    ) -> None:
        """Append a sample (see encode_sample); `meta` becomes KEY.json, with the payload's CRC-32 added (verify names a
        damaged sample by it).
        """
        payload = encode_sample(input_ids_S, loss_mask_S, states)
        meta = {**meta, "crc32": zlib.crc32(payload)}
        # webdataset writes the members of a sample in the order of their extensions: json, then safetensors
        self.tar.write({"__key__": key, "json": canonical_json(meta), "safetensors": payload})
        offset = self.tar.tarstream.offset - padded(len(payload))
        counts = (len(input_ids_S), int(loss_mask_S.sum()), len(anchor_positions(loss_mask_S)))
        self.samples.append(SampleEntry(self.name, key, offset, len(payload), *counts))

    def finish(self) -> tuple[int, str]:
        """Close the tar and fsync it. Returns its size in bytes and its SHA-256."""
        self.tar.close()
        self.stream.file.flush()
        os.fsync(self.stream.file.fileno())
        return self.stream.bytes, self.stream.sha256.hexdigest()

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self.temporary.unlink(missing_ok=True)
        self.stream.file.close()

    def publish(self) -> bool:
        """Give the finished file its final name; a shard under its final name is complete and never replaced.

        Returns False, and drops the file, when another process of the same task was faster.
        """
        try:
            os.link(self.temporary, self.folder / self.name)  # unlike a rename it fails where the name exists
            first = True
        except FileExistsError:
            first = False
        except FileNotFoundError:  # a process on another machine, whose locks this one cannot see, cleaned it up
            first = False
        self.abandon()
        sync_folder(self.folder)
        return first
