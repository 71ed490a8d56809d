"""A file elsewhere, as sources read it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from weightsmith._base.files import FileState, RandomAccess, open_local
from weightsmith._files.remote.retries import Ranges, fetch_into, retry_request

HEAD_BYTES = 128 << 10  # read at once from the start of a file: the header of most shards
RANGE_BYTES = 4 << 10  # read at least, elsewhere
_CONNECTIONS = 8


def read_starts(files: Iterable[RemoteFile]) -> None:
    """Read the start of each file, several at a time. Raises CheckpointError."""
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        for _ in pool.map(lambda file: file.read_at(0, 1), files):
            pass


@contextmanager
def opened(files: Mapping[str, RemoteFile], name: str, path: Path) -> Iterator[RandomAccess]:
    """Open a file to read parts of it: the remote one of its name, else the one on this disk."""
    if name in files:
        yield files[name]
        files[name].forget()
    else:
        with open_local(path) as file:
            yield file


class Ahead(Protocol):
    """What fetches bytes before they are read: `ahead.ReadAhead`."""

    def read_into(self, file: RemoteFile, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a file from `offset` on. Raises CheckpointError."""


class RemoteFile:
    """A file that is read by byte ranges: `base.files.RandomAccess` while its header is read, then `RemoteBytes`.

    streams  tensors may be read from here; else only headers
    ahead    fetches what the present run will read; None outside of a run
    """

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self.streams = False
        self.ahead: Ahead | None = None
        self._parts: list[tuple[int, bytes]] = []

    @property
    def key(self) -> tuple[str, str, int]:
        """Equal for the same content at the same place: a model may be opened twice."""
        return self.ranges.where, self.ranges.version, self.ranges.nbytes

    @property
    def nbytes(self) -> int:
        return self.ranges.nbytes

    @property
    def version(self) -> str:
        return self.ranges.version

    @property
    def state(self) -> FileState:
        return FileState.of_remote(self)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """See `RandomAccess`. What was read is remembered until `forget`."""
        end = min(offset + nbytes, self.nbytes)
        if end <= offset:
            return b""
        for start, part in self._parts:
            if start <= offset and end <= start + len(part):
                return part[offset - start : end - start]
        first = offset if offset + RANGE_BYTES <= self.nbytes else max(0, self.nbytes - RANGE_BYTES)
        last = min(max(end, first + (RANGE_BYTES if offset else HEAD_BYTES)), self.nbytes)
        if not offset and end < last == self.nbytes:
            last -= 1  # a part, even of a small file: the answer shows that there are ranges
        data = bytearray(last - first)
        fetch_into(self.ranges, first, memoryview(data))
        self._parts.append((first, bytes(data)))
        return self._parts[-1][1][offset - first : end - first]

    def stream(self) -> None:
        """Let tensors be read from here. Raises CheckpointError if the server has no byte ranges."""
        self.ranges.check_parts()
        self.streams = True

    def forget(self) -> None:
        """Drop what `read_at` remembers: the header was read."""
        self._parts.clear()

    def read_into(self, offset: int, out: memoryview) -> None:
        """See `RemoteBytes`."""
        if not len(out):
            return
        if self.ahead is None:
            fetch_into(self.ranges, offset, out)
        else:
            self.ahead.read_into(self, offset, out)

    def check_unchanged(self) -> None:
        """See `RemoteBytes`."""
        retry_request(self.ranges.check_unchanged, self.ranges.where)


class ModelFiles:
    """What models elsewhere have in common: the files that a plan needs, and where each of them is.

    folder  of the files that were brought here
    sizes   of all files, by name
    """

    folder: Path
    sizes: dict[str, int]
    _files: dict[str, RemoteFile]
    _requested: dict[str, None]

    def want(self, names: Iterable[str]) -> None:
        """Name files that are needed: `download` brings those that are not read where they are."""
        self._requested |= dict.fromkeys(name for name in names if name in self.sizes)

    @property
    def missing(self) -> dict[str, int]:
        """The files that are needed and are still to be brought, and their sizes."""
        unread = (name for name in self._requested if name not in self._files or not self._files[name].streams)
        return {name: self.sizes[name] for name in unread if not (self.folder / name).is_file()}

    def to_bring(self, patterns: Sequence[str] | None) -> list[str]:
        """The missing files; or those whose names match, and that are not here. For subfolders, a pattern has as many `/`."""
        if patterns is None:
            return list(self.missing)
        depths = [(pattern, pattern.count("/")) for pattern in patterns]
        absent = [(name, name.count("/")) for name in self.sizes if not (self.folder / name).is_file()]
        return [
            name for name, depth in absent if any(depth == n and fnmatch.fnmatchcase(name, pattern) for pattern, n in depths)
        ]

    def open(self, path: Path) -> AbstractContextManager[RandomAccess]:
        """Open a file of `folder` to read parts of it: the one that is here, else the one elsewhere."""
        return opened(self._files, path.relative_to(self.folder).as_posix(), path)
