"""Where the bytes of a dataset folder come from: a local folder, or a URL read through fsspec with a bounded cache.

A source reads byte ranges, so a sample costs its own bytes and not its shard's. Whatever `fsspec` speaks works as a URL:
`https://`, `s3://` (with s3fs), `gs://` (with gcsfs) and so on; `pip install .[remote]` brings what http needs.
"""
import fcntl
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from data_prep.errors import UserError
from data_prep.samples import read_into

ATTEMPTS = 4  # of one remote read, the waits between them 1, 2 and 4 s


class ByteRange(Protocol):
    """An open range of bytes; several threads may read it."""

    nbytes: int  # fewer than were asked for where the file ends before

    def read_into(self, at: int, view: memoryview) -> None:
        """Fills `view` with the bytes from `at` on. UserError where they cannot be read."""


class Source(Protocol):
    def sizes(self, names: list[str]) -> list[int | None]:
        """Bytes of each file; None where there is no such file."""

    def read(self, name: str) -> bytes:
        """A whole file. UserError where it cannot be read."""

    def open_range(self, name: str, begin: int, nbytes: int) -> AbstractContextManager[ByteRange]:
        """Bytes begin..begin+nbytes-1 of a file. UserError where it cannot be read."""

    def forget(self, name: str, begin: int, nbytes: int) -> bool:
        """Called when a range turned out damaged. True where reading it again may give other bytes."""


def is_url(path: str | Path) -> bool:
    return "://" in str(path)


def open_source(path: str | Path) -> "Source":
    return RemoteFolder(str(path)) if is_url(path) else LocalFolder(Path(path))


class FileRange:
    """Bytes of a file that is open until the end of the `with` block, read straight into where they shall be."""

    def __init__(self, path: Path, begin: int, nbytes: int):
        """FileNotFoundError, or another OSError, where it cannot be opened."""
        self.path, self.begin, self.descriptor = path, begin, os.open(path, os.O_RDONLY)
        self.nbytes = max(0, min(nbytes, os.fstat(self.descriptor).st_size - begin))

    def __enter__(self) -> "FileRange":
        return self

    def __exit__(self, *_) -> None:
        os.close(self.descriptor)

    def read_into(self, at: int, view: memoryview) -> None:
        try:
            count = read_into(self.descriptor, self.begin + at, view)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if count < len(view):
            raise UserError(f"{self.path} was cut to {self.begin + at + count} bytes while it was read; restore it from a "
                            "copy, then continue with --resume auto")


class FetchedRange:
    """Bytes that came over a network."""

    def __init__(self, content: bytes):
        self.content, self.nbytes = memoryview(content), len(content)

    def read_into(self, at: int, view: memoryview) -> None:
        view[:] = self.content[at:at + len(view)]


class LocalFolder:
    def __init__(self, folder: Path):
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def sizes(self, names: list[str]) -> list[int | None]:
        paths = [self.folder / name for name in names]
        return [path.stat().st_size if path.is_file() else None for path in paths]

    def read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise _unreadable(self.folder / name, error) from error

    def open_range(self, name: str, begin: int, nbytes: int) -> FileRange:
        try:
            return FileRange(self.folder / name, begin, nbytes)
        except OSError as error:
            raise _unreadable(self.folder / name, error) from error

    def forget(self, name: str, begin: int, nbytes: int) -> bool:
        return False


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error}; is {path.parent} mounted?")


class RemoteFolder:
    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._pid, self._fs = None, None

    def __str__(self) -> str:
        return self.url

    def _filesystem(self):
        """One a process: connections must not be shared with forked workers."""
        if self._pid != os.getpid():
            try:
                import fsspec

                self._fs, _ = fsspec.core.url_to_fs(self.url)
            except (ImportError, ValueError) as error:  # no library for the protocol; unknown protocol
                raise UserError(f"{self.url} cannot be opened: {error}; `pip install '.[remote]'` brings what https:// "
                                "needs, s3:// needs s3fs and gs:// gcsfs") from error
            self._pid = os.getpid()
        return self._fs

    def _attempt(self, name: str, read):
        """read(), again after a while where it fails: networks do."""
        for attempt in range(ATTEMPTS):
            try:
                return read()
            except Exception as error:  # every protocol's library has exceptions of its own
                if isinstance(error, FileNotFoundError) and not _passing(error.__cause__):
                    raise UserError(f"{self.url}/{name} does not exist; correct data.path or upload the dataset again"
                                    ) from error
                if attempt + 1 == ATTEMPTS:
                    raise UserError(f"{self.url}/{name} cannot be read after {ATTEMPTS} attempts: {type(error).__name__} "
                                    f"{error}; check the server and the credentials, then continue with --resume auto"
                                    ) from error
                time.sleep(2**attempt)

    def sizes(self, names: list[str]) -> list[int | None]:
        fs = self._filesystem()

        def size(name: str) -> int | None:
            try:
                return self._attempt(name, lambda: fs.info(f"{self.url}/{name}"))["size"]
            except UserError as error:
                if isinstance(error.__cause__, FileNotFoundError) and not _passing(error.__cause__.__cause__):
                    return None
                raise

        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(size, names))

    def read(self, name: str) -> bytes:
        fs = self._filesystem()
        return self._attempt(name, lambda: fs.cat_file(f"{self.url}/{name}"))

    def fetch(self, name: str, begin: int, nbytes: int) -> bytes:
        """Bytes begin..begin+nbytes-1 of a file, fewer where it ends before."""
        fs = self._filesystem()
        content = self._attempt(name, lambda: fs.cat_file(f"{self.url}/{name}", start=begin, end=begin + nbytes))
        if len(content) > nbytes:
            raise UserError(f"{self.url}: the server answered a request for {nbytes} bytes with {len(content)}: it knows "
                            "no byte ranges; use one that does, or copy the dataset and set data.path to the copy")
        return content

    def open_range(self, name: str, begin: int, nbytes: int) -> AbstractContextManager[FetchedRange]:
        return nullcontext(FetchedRange(self.fetch(name, begin, nbytes)))

    def forget(self, name: str, begin: int, nbytes: int) -> bool:
        return True


def _passing(cause: BaseException | None) -> bool:
    """Whether what fsspec calls a missing file was a server or a network that failed: it does so for any failed HEAD."""
    return getattr(cause, "status", 0) >= 500 or isinstance(cause, (TimeoutError, OSError))


class CachedSource:
    """A URL whose ranges are kept in a local folder, the least recently used going first. All processes of a machine
    share PLACE/byte_ranges; the files in it, and there are no others, never take more than `limit` bytes together.

    content: names the dataset's content, so that the ranges of another one under the same URL are never taken for it.
    """

    def __init__(self, source: RemoteFolder, place: Path, content: str, limit: int):
        self.root = place / "byte_ranges"
        self.source, self.folder, self.limit = source, self.root / content, limit
        self.folder.mkdir(parents=True, exist_ok=True)

    def __str__(self) -> str:
        return str(self.source)

    def sizes(self, names: list[str]) -> list[int | None]:
        return self.source.sizes(names)

    def read(self, name: str) -> bytes:
        return self.source.read(name)

    def _path(self, name: str, begin: int, nbytes: int) -> Path:
        return self.folder / f"{name}.{begin}.{nbytes}"

    def open_range(self, name: str, begin: int, nbytes: int) -> AbstractContextManager[ByteRange]:
        path = self._path(name, begin, nbytes)
        try:
            kept = FileRange(path, 0, nbytes)
            os.utime(kept.descriptor)
            return kept
        except FileNotFoundError:
            content = self.source.fetch(name, begin, nbytes)
        if len(content) == nbytes <= self.limit:
            self._keep(path, content)
        return nullcontext(FetchedRange(content))

    def _keep(self, path: Path, content: bytes) -> None:
        with open(self.root / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = sorted((file.stat().st_mtime_ns, file.stat().st_size, file) for file in self.root.glob("*/*"))
            room = self.limit - sum(size for _, size, _ in kept) - len(content)
            for _, size, file in kept:
                if room >= 0:
                    break
                file.unlink()
                room += size
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
            temporary.write_bytes(content)
            temporary.rename(path)

    def forget(self, name: str, begin: int, nbytes: int) -> bool:
        self._path(name, begin, nbytes).unlink(missing_ok=True)
        return True
