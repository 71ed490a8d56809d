"""Processes that share a staging folder make results and do tasks for each other.

A result is a file, which a process locks while it makes the result. The lock of a killed process is free at once, without a
timeout. Each file has a checksum; a damaged or truncated file is made again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith._base.errors import StoreError
from weightsmith._base.files import FULL, read_all, write_all
from weightsmith._base.strict_json import JsonError, parse
from weightsmith._base.tensors import TensorSpec
from weightsmith._outputs import disk
from weightsmith._outputs.checksum import hash_bytes
from weightsmith._outputs.locks import HELPERS, PARTS, PRODUCTS

if TYPE_CHECKING:
    from weightsmith._outputs.staging import Staging

Arrays = Sequence[npt.NDArray[Any]]
ArrayKinds = Sequence[tuple[np.dtype[Any], tuple[int, ...]]]
"""Dtype and shape of each array."""


class SharedResults:
    """Results by key.

    folder  shared by all processes
    """

    def __init__(self, folder: Path) -> None:
        """Change nothing on disk."""
        self.folder = folder

    @classmethod
    def of(cls, staging: Staging) -> SharedResults:
        """Those of the processes in a staging folder, which measure products."""
        return cls(staging.folder / PRODUCTS / "shared")

    def take(
        self, key: str, make: Callable[[], Arrays], fits: Callable[[ArrayKinds], bool] = lambda _kinds: True
    ) -> Arrays | None:
        """The result of a key: that of the process that has made it, or of `make`; None if another process makes it now.

        key   of hex digits and dashes; its result is the same in each process
        fits  whether a result can have such arrays. A kept result with others is damaged, and not read

        Raises what `make` raises; OSError. A result for which the disk has no room is kept by nobody: each process makes it.
        """
        disk.make_own_folder(self.folder)
        with FileIO(disk.open_own(self.folder / key, os.O_RDWR), "r+") as file:
            try:
                disk.lock(file.fileno())
            except BlockingIOError:
                return None
            arrays = _read(file.fileno(), fits=fits)
            if arrays is None:
                arrays = make()
                try:
                    _write(file.fileno(), _pieces(arrays))
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    os.ftruncate(file.fileno(), 0)
            return arrays


class TaskBoard:
    """Tasks of one process, the leader, which other processes do while they wait for it.

    A task is JSON, and names arrays by the hash of their dtype, shape and bytes. Equal tasks have equal keys, so results that
    helpers made for a leader that was killed serve the next one.

    folder     shared by all processes
    lock       file that helpers lock
    processes  that share the threads of the leader while there are tasks
    """

    def __init__(self, folder: Path, lock: Path, processes: int = 1) -> None:
        """Change nothing on disk."""
        self._folder, self._lock, self._processes = folder, lock, processes
        self._results = SharedResults(folder / "results")

    @classmethod
    def of(cls, staging: Staging, processes: int = 1) -> TaskBoard | None:
        """That of the processes in a staging folder; None if each process has a folder of its own."""
        if staging.target.streams:
            return None
        return cls(staging.folder / PRODUCTS / "tasks", staging.folder / PARTS / HELPERS, processes)

    # ---- the leader

    def threads(self, most: int) -> int:
        """How many of its threads the leader uses for a task; helpers on the same machine use the others."""
        return max(1, most // self._processes)

    def has_helpers(self) -> bool:
        """Whether another process waits for tasks now."""
        with FileIO(disk.open_own(self._lock, os.O_RDWR), "r+") as file:
            try:
                disk.lock(file.fileno())
            except BlockingIOError:
                return True
        return False

    def put(self, array: npt.NDArray[Any]) -> str:
        """Keep an array for tasks, and return its name there: the checksum of its file. Raises OSError."""
        pieces = _pieces([array])
        name = bytes(pieces[0]).decode()
        self._publish(f"{name}.array", lambda fd: _write(fd, pieces))
        return name

    def offer(self, task: Mapping[str, Any]) -> str:
        """Let others do a task, and return its key. Raises OSError."""
        text = json.dumps(task, sort_keys=True, separators=(",", ":")).encode()
        key = hash_bytes(text)
        self._publish(f"{key}.task", lambda fd: write_all(fd, memoryview(text), 0))
        return key

    def _publish(self, name: str, write: Callable[[int], None]) -> None:
        """Write a file, and give it its name once it is complete."""
        disk.make_own_folder(self._folder)
        part = self._folder / f"{name}.{os.getpid()}.part"
        fd = disk.open_own(part, os.O_RDWR)
        try:
            os.ftruncate(fd, 0)
            write(fd)
        except OSError:
            part.unlink()
            raise
        finally:
            os.close(fd)
        part.replace(self._folder / name)

    def clear(self) -> None:
        """Remove all tasks, arrays and results. A result that a helper is making stays until the next call, or the end."""
        with suppress(StoreError, FileNotFoundError):
            for kind in ("*.task", "*.array"):  # in this order: see `is_open`
                for path in self._folder.glob(kind):
                    with suppress(IsADirectoryError, PermissionError):  # a folder (PermissionError on macOS) goes with the rest
                        path.unlink(missing_ok=True)
            disk.remove_tree(self._folder)

    # ---- all

    def take(self, key: str, make: Callable[[], Arrays], specs: Sequence[TensorSpec] | None = None) -> Arrays | None:
        """The result of a task: see `SharedResults.take`. specs: dtypes and shapes that its arrays must have; None: any"""
        kinds = None if specs is None else [(spec.dtype.numpy, spec.shape) for spec in specs]
        return self._results.take(key, make, lambda kept: kinds in (None, kept))

    def array(self, name: str) -> npt.NDArray[Any]:
        """An array of a task. Raises OSError, also if it is damaged or does not have this name."""
        fd = os.open(self._folder / f"{name}.array", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            arrays = _read(fd, name)
        finally:
            os.close(fd)
        if arrays is None or len(arrays) != 1:
            raise OSError(f"array {name} is damaged")
        return arrays[0]

    # ---- helpers

    def is_open(self, key: str) -> bool:
        """Whether a task is still there. Ask with its result locked: the leader may have removed both."""
        return (self._folder / f"{key}.task").exists()

    def task_bytes(self, task: Mapping[str, Any]) -> int:
        """The bytes of all arrays that a task reads, at most."""
        text = json.dumps(task)
        return sum(path.stat().st_size for path in self._folder.glob("*.array") if path.stem in text)

    @contextmanager
    def helping(self) -> Iterator[bool]:
        """Show the leader that this process waits for tasks. Yields False if that failed: try again."""
        with FileIO(disk.open_own(self._lock, os.O_RDWR), "r+") as file:
            try:
                disk.lock(file.fileno(), shared=True)
            except BlockingIOError:  # the leader is looking at the lock
                yield False
            else:
                yield True

    def tasks(self) -> list[tuple[str, dict[str, Any]]]:
        """The tasks on the board, by key; some may be done. Anything else, such as a link or a folder, is skipped."""
        tasks: list[tuple[str, dict[str, Any]]] = []
        if self._folder.is_symlink():  # results would be written behind it
            return tasks
        with suppress(FileNotFoundError):
            for path in sorted(self._folder.glob("*.task")):
                with suppress(JsonError, StoreError):
                    data = disk.read_own(path, MAX_TASK_BYTES) or b""
                    task = parse(data)
                    if isinstance(task, dict) and hash_bytes(data) == path.stem:
                        tasks.append((path.stem, task))
        return tasks


MAX_TASK_BYTES = MAX_HEADER_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
_CHECKSUM_BYTES, _LENGTH_BYTES = 32, 8


def _pieces(arrays: Arrays) -> list[memoryview]:
    """A file of arrays: the hash of the rest, the length of the header, the header, the arrays."""
    header = json.dumps([[array.dtype.name, array.shape] for array in arrays]).encode()
    pieces = [memoryview(len(header).to_bytes(_LENGTH_BYTES, "little")), memoryview(header)]
    pieces += [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    return [memoryview(hasher.hexdigest().encode()), *pieces]


def _write(fd: int, pieces: Sequence[memoryview]) -> None:
    """Write a file of arrays. Its checksum comes last: without it, the file is damaged."""
    os.ftruncate(fd, 0)
    at = _CHECKSUM_BYTES
    for piece in pieces[1:]:
        write_all(fd, piece, at)
        at += piece.nbytes
    write_all(fd, pieces[0], 0)


def _read(fd: int, name: str = "", fits: Callable[[ArrayKinds], bool] = lambda _kinds: True) -> Arrays | None:
    """The arrays of a whole file, else None. No memory is taken for arrays that the file does not hold.

    A large file is read twice: a sparse one, such as a crash of the machine leaves, has a size and holds no arrays.

    name  the checksum that it must have; "": any
    fits  whether it may hold such arrays
    """
    nbytes, at = os.fstat(fd).st_size, _CHECKSUM_BYTES + _LENGTH_BYTES
    if nbytes < at:
        return None
    checksum, length = _bytes_at(fd, 0, _CHECKSUM_BYTES), _bytes_at(fd, _CHECKSUM_BYTES, _LENGTH_BYTES)
    if name and name.encode() != checksum:
        return None
    header = _bytes_at(fd, at, min(int.from_bytes(length, "little"), nbytes - at, MAX_HEADER_BYTES))
    at += len(header)
    hasher, arrays = xxhash.xxh3_128(length + header), list[npt.NDArray[Any]]()
    try:
        kinds = [(_dtype(dtype), _shape(shape)) for dtype, shape in parse(header)]
        if at + sum(math.prod(shape) * dtype.itemsize for dtype, shape in kinds) != nbytes or not fits(kinds):
            return None
        if nbytes > PIECE_BYTES and _checksum(fd, hasher.copy(), at) != checksum:
            return None
        for dtype, shape in kinds:
            arrays.append(np.empty(shape, dtype))
            data = arrays[-1].reshape(-1).view(np.uint8).data
            read_all(fd, data, at)
            hasher.update(data)
            at += data.nbytes
    except (JsonError, TypeError, ValueError, OverflowError, MemoryError):  # the header is damaged
        return None
    return arrays if hasher.hexdigest().encode() == checksum else None


def _checksum(fd: int, hasher: xxhash.xxh3_128, at: int) -> bytes:
    """The checksum of a file whose bytes before `at` are hashed. Its end is where it ends now."""
    piece = memoryview(bytearray(PIECE_BYTES))
    while n := read_all(fd, piece, at):
        hasher.update(piece[:n])
        at += n
    return hasher.hexdigest().encode()


def _dtype(name: Any) -> np.dtype[Any]:
    """A dtype of numbers by its name in a header: numpy takes texts for structures and objects too. Raises TypeError."""
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(name)
    dtype = np.dtype(name)
    if dtype.name != name or dtype.hasobject or not dtype.itemsize:
        raise TypeError(name)
    return dtype


def _shape(shape: Any) -> tuple[int, ...]:
    """A shape in a header. Raises TypeError."""
    if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
        raise TypeError(shape)
    return tuple(shape)


def _bytes_at(fd: int, start: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    return bytes(data[: read_all(fd, memoryview(data), start)])
