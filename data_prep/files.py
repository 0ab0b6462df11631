"""Files that are either the old version or the new one, whatever happens in between."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut (fsync of the directory itself)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step: a `.tmp` neighbour is written, fsynced and renamed over it."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def canonical_json(value: Any) -> bytes:
    """The one spelling of `value` that hashes are taken over: sorted keys, no blanks, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def sha256_hex(content: bytes) -> str:
    """Hex SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()
