"""Results that the processes in a staging folder make for each other: each of them is made by one process.

A result is a file, which a process locks while it makes the result. So the results of a process that is killed are free at
once, without a clock. The file has the result and its checksum. What is damaged or cut off is made again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.files import FULL, read_all, write_all
from weightsmith._outputs import disk
from weightsmith._outputs.checksum import hash_bytes

if TYPE_CHECKING:
    from weightsmith._outputs.area import Arrays

CHECKSUM_BYTES = 32


class SharedResults:
    """Results by key.

    folder  in which all processes are
    """

    def __init__(self, folder: Path) -> None:
        """Change nothing on disk."""
        self.folder = folder

    def take(self, key: str, make: Callable[[], Arrays]) -> Arrays | None:
        """The result of a key: that of the process that has made it, or of `make`; None if another process makes it now.

        key  of hex digits, dashes and underscores; its result is the same in each process

        Raises what `make` raises; OSError. A result for which the disk has no room is kept by nobody: each process makes it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileIO(disk.open_own(self.folder / key, os.O_RDWR), "r+") as file:
            try:
                disk.lock(file.fileno())
            except BlockingIOError:
                return None
            arrays = _read(file)
            if arrays is None:
                arrays = make()
                _write(file, arrays)
            return arrays


def _read(file: FileIO) -> Arrays | None:
    """The arrays of a whole file, else None."""
    data = bytearray(os.fstat(file.fileno()).st_size)
    if len(data) < CHECKSUM_BYTES or read_all(file.fileno(), memoryview(data), 0) < len(data):
        return None
    content = memoryview(data)[CHECKSUM_BYTES:]
    if hash_bytes(content) != data[:CHECKSUM_BYTES].decode(errors="replace"):
        return None
    stream, arrays = BytesIO(content), list[npt.NDArray[Any]]()
    try:
        while stream.tell() < len(content):
            arrays.append(np.load(stream, allow_pickle=False))
    except (ValueError, EOFError):
        return None
    return arrays


def _write(file: FileIO, arrays: Arrays) -> None:
    stream = BytesIO()
    for array in arrays:
        np.save(stream, array, allow_pickle=False)
    content = stream.getbuffer()
    os.ftruncate(file.fileno(), 0)
    try:
        write_all(file.fileno(), content, CHECKSUM_BYTES)
        write_all(file.fileno(), memoryview(hash_bytes(content).encode()), 0)
    except OSError as error:
        if error.errno not in FULL:
            raise
        os.ftruncate(file.fileno(), 0)
