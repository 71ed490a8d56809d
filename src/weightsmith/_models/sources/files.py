"""The files of a source, and tensors stored in them as plain bytes, as in safetensors.

Positioned reads fill the caller's buffers. There is no memory map (no crash if a file shrinks, no resident gigabytes) and no
file position, so many threads can read at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import xxhash

from weightsmith._base.errors import CheckpointError, FormatError, undoing
from weightsmith._base.files import Extent, FileState, RemoteBytes, StoredTensor, open_local, raise_open_files, read_into, show
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._files.hf_folder import natural_key
from weightsmith.abc.tensors import byte_view, check_range, closed, digest, spec_of

if TYPE_CHECKING:
    from weightsmith.abc.tensors import Buffer, Tensors

_PAGE_BYTES = 4096
_SAMPLED_PAGES = 32
MAX_OPEN_FILES = 65_536  # the process's soft limit is raised up to this for models with very many shards


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source.

    path    path to open
    state   the file's state before its table of tensors was read
    digest  hash of that table, hex
    """

    path: Path
    state: FileState
    digest: str


class SourceFiles:
    """The files of a source. Opened on first use, then kept open; read from any thread; checked for changes.

    paths     of all files, as given
    identity  hash of names, sizes and tables; equal for a copy of the files
    """

    def __init__(self, files: Sequence[SourceFile], where: str) -> None:
        """
        files  in natural order
        where  the model as the user named it, for messages
        """
        self.paths = tuple(file.path for file in files)
        facts = [(file.path.name, file.state.nbytes, file.digest) for file in files]
        self.identity = digest(facts)
        self._where = where
        self._states = {file.path: file.state for file in files}
        self._digests = {file.path: file.digest for file in files}
        self._copies: dict[Path, Path] = {}
        self._lock = threading.Lock()
        self._closed = False
        # Never closed early, because `location` hands out descriptors.
        self._fds: dict[Path, int] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._fds)

    @property
    def state(self) -> str:
        """Hash of the identity and of each file's inode and change time."""
        states = [self._state(path) for path in self.paths]
        # Without the device number, which changes with each mount of a network file system.
        facts = [(s.inode, s.mtime_ns, s.ctime_ns) if s.elsewhere is None else s.elsewhere.version for s in states]
        return digest([self.identity, facts])

    @property
    def originals(self) -> tuple[SourceFile, ...]:
        """The files without a copy: path, state, and digest of the table of tensors."""
        uncopied = (path for path in self.paths if path not in self._copies)
        return tuple(SourceFile(path, self._state(path), self._digests[path]) for path in uncopied)

    def use_copy(self, path: Path, copy: Path, state: FileState) -> None:
        """Read a copy from now on instead of a file. `identity`, `state` and `paths` stay those of the file.

        state  of the copy, before it was found to be equal
        """
        self._states[copy] = state
        self._copies[path] = copy

    def copied_share(self, fd: int | None) -> float:
        """The share of bytes that is read from copies: of what a descriptor reads, 0 or 1; None: of all files."""
        if not self._copies:
            return 0.0
        if fd is not None:
            return float(any(self._fds.get(copy) == fd for copy in list(self._copies.values())))
        copied = sum(self._states[path].nbytes for path in list(self._copies))
        return copied / max(1, sum(self._states[path].nbytes for path in self.paths))

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self._states[path].nbytes for path in self.paths)

    def extents(self, path: Path, offset: int, nbytes: int) -> tuple[Extent, ...]:
        """A run of bytes of a file, if it is read where it is; () for a file on this disk."""
        remote = self._remote(self._copies.get(path, path))
        return () if remote is None else (Extent(remote, offset, nbytes),)

    def location(self, path: Path, offset: int) -> tuple[int, int] | None:
        """The descriptor of a file, and the offset; None for a file that is read elsewhere. Raises as `fd`."""
        return None if self._remote(self._copies.get(path, path)) is not None else (self.fd(path), offset)

    def fd(self, path: Path) -> int:
        """The descriptor of a file, open until `close`. Raises CheckpointError if the file has changed, or after `close`."""
        path = self._copies.get(path, path)
        fd = self._fds.get(path)
        return self._open(path) if fd is None else fd

    def read(self, path: Path, name: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a file from `offset` on. name: the tensor, for messages.

        Raises FormatError if the file ends early, CheckpointError for an I/O error, else as `fd`.
        """
        path = self._copies.get(path, path)
        remote = self._remote(path)
        if remote is not None:
            if self._closed:
                raise closed(self._where)
            remote.read_into(offset, out)
            return
        fd, done = self.fd(path), 0
        while done < len(out):  # one call reads at most 2 GiB, and may read less
            try:
                n = read_into(fd, out[done:], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"tensor {show(name)} cannot be read at byte {offset + done:,}: {error.strerror}", where=str(path)
                ) from error
            if n == 0:
                raise FormatError(
                    f"the file shrank while reading tensor {show(name)}: it ends at byte {offset + done:,}, "
                    f"{len(out) - done:,} bytes early",
                    where=str(path),
                    fix="Wait, then start again: another program is writing the file.",
                )
            done += n

    def check_unchanged(self) -> None:
        """As `Tensors.check_unchanged`."""
        for path in list(self._states):  # another thread may begin to use a copy
            remote = self._remote(path)
            if remote is not None:
                remote.check_unchanged()
                continue
            fd, opened = self._fds.get(path), self._state(path)
            try:
                now = [path.stat(), *([] if fd is None else [os.fstat(fd)])]
            except OSError as error:
                raise CheckpointError(
                    f"the file is no longer readable: {error.strerror}",
                    where=str(path),
                    fix="Restore the file, then start again.",
                ) from error
            for stat in now:
                _check_same(path, opened, stat)

    def close(self) -> None:
        """As `Tensors.close`."""
        with self._lock:
            self._closed = True
            _close_all(self._fds)

    def _state(self, path: Path) -> FileState:
        """The file's state when its table was read, or when it was downloaded if the table was read from the Hub."""
        state = self._states[path]
        if state.elsewhere is not None and not state.elsewhere.streams:
            with contextlib.suppress(OSError):  # not downloaded: opening it raises
                arrived = FileState.of(path.stat())
                if arrived.nbytes == state.nbytes:
                    self._states[path] = state = arrived
        return state

    def _remote(self, path: Path) -> RemoteBytes | None:
        """The file, if it is read where it is."""
        remote = self._states[path].elsewhere
        return remote if remote is not None and remote.streams else None

    def _open(self, path: Path) -> int:
        with self._lock:
            if self._closed:
                raise closed(self._where)
            if path in self._fds:  # another thread opened it first
                return self._fds[path]
            state = self._state(path)
            if state.elsewhere is not None:
                what = "not downloaded: only its header was read from the Hub"
                raise CheckpointError(what, where=str(path), fix="Call the checkpoint's download() first.")
            fd = _open_readonly(path)
            with undoing(lambda: os.close(fd)):
                _check_same(path, state, os.fstat(fd))
                if hasattr(os, "posix_fadvise"):
                    with contextlib.suppress(OSError):  # only a hint
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self._fds[path] = fd
            return fd


class InFile(Protocol):
    """A tensor of a file: `StoredTensor` or `StoredView`."""

    @property
    def spec(self) -> TensorSpec:
        """Name, dtype, shape."""

    @property
    def file(self) -> Path:
        """The file it is in."""


_InFile = TypeVar("_InFile", bound=InFile)


class FileTensors(ABC, Generic[_InFile]):
    """A source of tensors in files. Subclasses define how to read a tensor's bytes.

    stored  name → the stored tensor
    files   every file that `stored` names, in natural order
    where   the model as the user named it, for messages
    """

    def __init__(self, stored: Mapping[str, _InFile], files: Sequence[SourceFile], where: str) -> None:
        self.specs: Mapping[str, TensorSpec] = {name: stored[name].spec for name in sorted(stored, key=natural_key)}
        self._stored = stored
        self._where = where
        self._files = SourceFiles(files, where)
        self.paths, self.identity = self._files.paths, self._files.identity

    @property
    def files(self) -> SourceFiles:
        """Its files."""
        return self._files

    @property
    def state(self) -> str:
        return self._files.state

    def natural_dtype(self, name: str) -> DType:
        return self._find(name).spec.dtype

    def preferred_rows(self, name: str) -> int:
        self._find(name)
        return 1

    @abstractmethod
    def location(self, name: str) -> tuple[int, int] | None:
        """Descriptor and offset of a tensor that is stored as plain bytes on this disk; None for another."""

    @abstractmethod
    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        """The parts of remote files that are read for these bytes, at most; () if all of them are on this disk."""

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        tensor, view = self._find(name), byte_view(out)
        check_range(tensor.spec, start_byte, len(view), str(tensor.file))
        self._read(tensor, start_byte, view)

    @abstractmethod
    def _read(self, tensor: _InFile, start_byte: int, out: memoryview) -> None:
        """Fill `out` with the tensor's bytes from `start_byte` on. The range is already checked."""

    def _find(self, name: str) -> _InFile:
        """Raises as `spec_of`."""
        spec_of(self.specs, name, self._where)
        return self._stored[name]

    def check_unchanged(self) -> None:
        self._files.check_unchanged()

    def close(self) -> None:
        self._files.close()


class PlainFiles(FileTensors[StoredTensor]):
    """A source whose tensors are stored as contiguous, little-endian, row-major bytes."""

    def location(self, name: str) -> tuple[int, int] | None:
        tensor = self._find(name)
        return self._files.location(tensor.file, tensor.offset)

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        tensor = self._find(name)
        return self._files.extents(tensor.file, tensor.offset + start_byte, nbytes)

    def _read(self, tensor: StoredTensor, start_byte: int, out: memoryview) -> None:
        self._files.read(tensor.file, tensor.spec.name, tensor.offset + start_byte, out)


def unite(
    tables: Iterable[Iterable[_InFile]], folder: Path, index: tuple[Path, Mapping[str, str]] | None = None
) -> dict[str, _InFile]:
    """The tensors of all files of a model, by name. The files and the index must agree.

    tables  the tensors of each file
    folder  of the files, for messages
    index   its path, and its map of tensor name → file name

    Raises FormatError if there is no tensor, if one is in two files, or if files and index disagree.
    """
    united: dict[str, _InFile] = {}
    for tensors in tables:
        for tensor in tensors:
            other = united.setdefault(tensor.spec.name, tensor)
            if other is not tensor:
                raise FormatError(
                    f"tensor {show(tensor.spec.name)} is in two files",
                    where=str(folder),
                    details=tuple(f"{t.file.name}  {list(t.spec.shape)} {t.spec.dtype}" for t in (other, tensor)),
                    fix="Remove the file that does not belong to this model.",
                )
    if not united:
        raise FormatError("the weight files contain no tensors", where=str(folder))
    if index is not None:
        path, weight_map = index
        for name, file in weight_map.items():
            stored = united.get(name)
            if stored is None or stored.file.name != file:
                place = f"it is in {stored.file.name}" if stored is not None else "no file has it"
                raise FormatError(
                    f"the index says that tensor {show(name)} is in {file}, but {place}",
                    where=str(path),
                    fix="Download both again: the index and the weight files are of different versions.",
                )
        if len(united) > len(weight_map):
            extra = [t for name, t in united.items() if name not in weight_map]
            raise FormatError(
                f"{len(extra):,} tensor(s) that the index does not list, the first is {show(extra[0].spec.name)} in "
                f"{extra[0].file.name}",
                where=str(path),
                fix="Download both again, as the index and the weight files are of different versions; or remove the "
                "index to read all tensors in the files.",
            )
    return united


def sample_files(paths: Sequence[Path]) -> str:
    """Hash of 32 pages of 4 KiB in all, and of at least one of each file: at equal distances, the last bytes among them.

    Raises as `open_local`, and CheckpointError for an I/O error.
    """
    digest, count = xxhash.xxh3_128(), max(1, _SAMPLED_PAGES // len(paths))
    for path in paths:
        with open_local(path) as file:
            for page in _pages(file.read_at, file.state.nbytes, count):
                digest.update(page)
    return digest.hexdigest()


def sample_file(path: Path, state: FileState, places: Sequence[int] = ()) -> str:
    """Hash of pages of 4 KiB of a file, on this disk or elsewhere: 32 at equal distances, then one from each of `places` on.

    places  offsets in the file

    Raises as `open_local`, and CheckpointError for an I/O error.
    """
    digest, remote = xxhash.xxh3_128(), state.elsewhere

    def read_at(offset: int, nbytes: int) -> bytes:
        assert remote is not None
        page = bytearray(min(nbytes, state.nbytes - offset))
        remote.read_into(offset, memoryview(page))
        return bytes(page)

    def sample(read: Callable[[int, int], bytes]) -> str:
        for page in _pages(read, state.nbytes, _SAMPLED_PAGES):
            digest.update(page)
        for place in places:
            digest.update(read(place, _PAGE_BYTES))
        return digest.hexdigest()

    if remote is not None:
        return sample(read_at)
    with open_local(path) as file:
        return sample(file.read_at)


def _pages(read_at: Callable[[int, int], bytes], nbytes: int, count: int) -> Iterator[bytes]:
    """Pages of a file, at equal distances, the last bytes among them."""
    last = max(nbytes - _PAGE_BYTES, 0)
    for i in range(1, count + 1):
        yield read_at(last * i // count, _PAGE_BYTES)


# ---- the files behind a source


def files_behind(source: Tensors) -> Iterator[SourceFiles]:
    """The files of a source, and of the sources that it is composed of (their `sources`), each source once.

    Results that use each other share sources. Following every path to them would take exponential time.
    """
    seen: dict[int, Tensors] = {}
    waiting = [source]
    while waiting:
        nearest = waiting.pop()
        if id(nearest) in seen:
            continue
        seen[id(nearest)] = nearest  # kept alive, so that no other source gets its id
        if isinstance(nearest, FileTensors):
            yield nearest.files
        else:
            waiting += reversed(getattr(nearest, "sources", ()))  # tensors in memory and sources of plugins have none


def copied_share(source: Tensors, name: str) -> float:
    """The share of a tensor's bytes that is read from copies; for a tensor that is computed, of all the source's bytes."""
    files = list(files_behind(source))
    if not any(group.copied_share(None) for group in files):
        return 0.0
    place = source.location(name)
    if place is not None:
        return max(group.copied_share(place[0]) for group in files)
    return sum(group.copied_share(None) * group.nbytes for group in files) / max(1, sum(group.nbytes for group in files))


def _check_same(path: Path, opened: FileState, stat: os.stat_result) -> None:
    """Raise CheckpointError if a file has changed since it was opened."""
    if difference := opened.difference(FileState.of(stat)):
        raise CheckpointError(
            f"the file changed after it was opened: {difference}",
            where=str(path),
            fix="Wait, then start again: another program writes or replaces the file.",
        )


def _open_readonly(path: Path) -> int:
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno == errno.EMFILE and raise_open_files(MAX_OPEN_FILES):
            return os.open(path, flags)
        fix = "Raise the limit: `ulimit -n 65536`" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from error


def _close_all(fds: dict[Path, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])
