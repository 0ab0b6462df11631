"""Sealing: nothing is missing, nothing is double, and the manifest lists every shard.

    python -m data_prep merge dataset/

`extract` does it itself where one task does all the work. It can be repeated, also by two processes at once: what it
writes follows from the shards alone.
"""

import json
from pathlib import Path

from .errors import UserError
from .files import remove_unfinished, sha256_hex, write_atomic
from .manifest import INDEX_NAME, Manifest
from .records import SUFFIX, Record, finished
from .shards import shard_name


def merge(folder: Path) -> Manifest:
    """Seal the dataset `folder` and return its manifest. UserError names the shards that are missing or wrong."""
    manifest = Manifest.read(folder)
    names = [shard_name(number) for number in range(manifest.plan.shards)]
    if not manifest.sealed:
        foreign = sorted({path.name for path in folder.glob("*.tar")} - set(names))
        if foreign:
            raise UserError(
                f"{folder} holds {', '.join(foreign)}, but its plan has {len(names)} shards: foreign shards; remove them."
            )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"{len(missing)} of {len(names)} shards are missing ({', '.join(missing[:8])}"
                f"{', ...' if len(missing) > 8 else ''}); run the extract command of their task again (with --num-tasks N, "
                "task I makes the shards I, I + N, I + 2N, ...), then merge."
            )
        _seal(folder, manifest, finished(folder, manifest))
    for name in names:
        (folder / (name + SUFFIX)).unlink(missing_ok=True)
    remove_unfinished(folder)
    return manifest


def _seal(folder: Path, manifest: Manifest, records: list[Record]) -> None:
    """Compare the records with the plan and write index and manifest."""
    keys = [row.key for record in records for row in record.samples]
    expected = [f"{number:06d}" for number in range(manifest.plan.samples)]
    if keys != expected:
        place = next((i for i, pair in enumerate(zip(keys, expected)) if pair[0] != pair[1]), min(len(keys), len(expected)))
        raise UserError(
            f"sample {place} of {len(expected)} is {keys[place] if place < len(keys) else 'missing'}: a sample is missing "
            f"or double, and shards of another extraction are in {folder}; remove them and extract again."
        )
    tokens = sum(record.shard.tokens for record in records)
    if tokens != manifest.plan.tokens:
        raise UserError(
            f"the shards hold {tokens} tokens, the plan {manifest.plan.tokens}: shards of another extraction are in "
            f"{folder}; remove them and extract again."
        )
    lines = [{"shard": record.shard.name, "samples": [row[1:] for row in record.samples]} for record in records]
    index = "".join(json.dumps(line) + "\n" for line in lines).encode()
    write_atomic(folder / INDEX_NAME, index)
    manifest.shards = [record.shard for record in records]
    manifest.argmax_share = sum(s.argmax_matches for s in manifest.shards) / sum(s.supervised for s in manifest.shards)
    manifest.sealed, manifest.index_sha256 = True, sha256_hex(index)
    manifest.write(folder)
