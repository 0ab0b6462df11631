"""What is known of the finished shards of a dataset that is not sealed yet: a record beside each, `NNNNNN.tar.json`.

A record follows from its shard alone, so it can be made again from the tar whenever a process died between publishing
the one and writing the other, and it does not matter which process writes it.
"""

import json
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from .errors import UserError
from .files import canonical_json, file_sha256, write_atomic
from .manifest import Manifest, SampleEntry, Shard, read_index
from .samples import anchor_positions, decode_sample
from .shards import shard_name

SUFFIX = ".json"


class Record(NamedTuple):
    """The manifest's entry of a shard and the index rows of its samples."""

    shard: Shard
    samples: list[SampleEntry]


def make_record(samples: list[SampleEntry], metas: list[dict[str, Any]], nbytes: int, sha256: str) -> Record:
    """The record of a shard of `nbytes` bytes from its index rows and the contents of its KEY.json members."""
    totals = {name: sum(getattr(row, name) for row in samples) for name in ("tokens", "supervised", "anchors")}
    error = None
    if "fp8_error" in metas[0]:
        weighted = [[row.tokens * value for value in meta["fp8_error"]] for row, meta in zip(samples, metas)]
        error = [round(sum(layer) / totals["tokens"], 6) for layer in zip(*weighted)]
    matches = sum(meta["argmax_matches"] for meta in metas)
    shard = Shard(
        name=samples[0].shard,
        samples=len(samples),
        **totals,
        bytes=nbytes,
        sha256=sha256,
        argmax_matches=matches,
        fp8_error=error,
    )
    return Record(shard, samples)


def scan_shard(path: Path) -> Record:
    """The record of the shard `path`, from its bytes. UserError when it is no shard of this format."""
    samples: list[SampleEntry] = []
    metas: list[dict[str, Any]] = []
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                key, _, kind = member.name.partition(".")
                content = bytearray(tar.extractfile(member).read())
                if kind == "json":
                    metas.append(json.loads(content))
                    continue
                mask = decode_sample(content)["loss_mask"]
                counts = (len(mask), int(mask.sum()), len(anchor_positions(mask)))
                samples.append(SampleEntry(path.name, key, member.offset_data, member.size, *counts))
        return make_record(samples, metas, path.stat().st_size, file_sha256(path))
    except (tarfile.ReadError, UserError, ValueError, KeyError, IndexError) as error:  # whatever foreign bytes give
        raise UserError(f"{path} is no finished shard of this dataset ({error}); remove it.") from error


def write_record(folder: Path, record: Record) -> None:
    """Write the record beside its shard, atomically."""
    content = {"shard": record.shard.model_dump(), "samples": [list(row[1:]) for row in record.samples]}
    write_atomic(folder / (record.shard.name + SUFFIX), canonical_json(content) + b"\n")


def read_record(folder: Path, name: str) -> Record | None:
    """The record of the shard `name`, or None. UserError when it is damaged or its shard is not as long as it says."""
    path = folder / (name + SUFFIX)
    try:
        content = json.loads(path.read_bytes())
        record = Record(Shard(**content["shard"]), [SampleEntry(name, *row) for row in content["samples"]])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise UserError(f"{path} is damaged ({error}); remove it: it is made again from its shard.") from error
    size = (folder / name).stat().st_size
    if size != record.shard.bytes:
        raise UserError(
            f"{folder / name} has {size} bytes, its record says {record.shard.bytes}: it was cut short or replaced; remove "
            f"both it and {path.name}, and extract makes it again."
        )
    return record


def finished(folder: Path, manifest: Manifest) -> list[Record]:
    """The finished shards of `folder`, sealed or not, in order."""
    if manifest.sealed:
        rows: dict[str, list[SampleEntry]] = {}
        for entry in read_index(folder, manifest):
            rows.setdefault(entry.shard, []).append(entry)
        return [Record(shard, rows[shard.name]) for shard in manifest.shards]
    names = map(shard_name, range(manifest.plan.shards))
    return [read_record(folder, name) or scan_shard(folder / name) for name in names if (folder / name).is_file()]
