"""Files that are either the old version or the new one, whatever happens in between and whoever else writes.

What is being written is called NAME.tmp-HOST-PROCESS-N and locked by its writer, so that processes do not disturb each
other and what dead ones left can be told from what is alive.
"""

import fcntl
import hashlib
import itertools
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

UNFINISHED = ".tmp-"


_numbers = itertools.count()


def unfinished_path(path: Path) -> Path:
    """A name that nobody else uses, for `path` while it is being written."""
    return path.with_name(f"{path.name}{UNFINISHED}{socket.gethostname()}-{os.getpid()}-{next(_numbers)}")


def open_locked(path: Path) -> BinaryIO:
    """`path`, opened for writing and locked until it is closed."""
    while True:
        file = open(path, "wb")
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # remove_unfinished came between opening and locking


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Remove what dead processes left of the file `name` (all files): what no process of this machine has locked."""
    for path in folder.glob(f"{name}{UNFINISHED}*"):
        try:
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except (BlockingIOError, FileNotFoundError):  # alive, or just finished
            continue


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut (fsync of the directory itself)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes, publish: Callable[[Path, Path], None]) -> None:
    temporary = unfinished_path(path)
    with open_locked(temporary) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)  # still there unless it was renamed
    sync_folder(path.parent)


def write_atomic(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step: a neighbour is written, fsynced and renamed over it."""
    _write(path, content, os.replace)


def create_atomic(path: Path, content: bytes) -> bool:
    """Make `path` with `content` in one step, if it does not exist; False if it does."""
    try:
        _write(path, content, os.link)
    except FileExistsError:
        return False
    return True


def canonical_json(value: Any) -> bytes:
    """The one spelling of `value` that hashes are taken over: sorted keys, no blanks, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def sha256_hex(content: bytes) -> str:
    """Hex SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of the file `path`, which need not fit into memory."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
