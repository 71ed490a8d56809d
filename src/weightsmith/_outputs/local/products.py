"""Products of a plan in the staging folder: one file each, its checksum in the journal.

Arrays of finished products are mapped from their files, so that a model's worth of them needs no memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.tensors import TensorSpec
from weightsmith._files.mapped import is_mapped, map_arrays
from weightsmith._outputs.checksum import hash_bytes
from weightsmith._outputs.local import disk
from weightsmith._outputs.local.target import create_file
from weightsmith._outputs.manifest import hash_file

Arrays = Sequence[npt.NDArray[Any]]

_PART = ".part"


def product_path(folder: Path, name: str) -> Path:
    """The file of a product, named by the hash of the product's name, which may contain any character."""
    return folder / hash_bytes(name.encode())


def create_product(folder: Path, name: str, outs: Sequence[TensorSpec]) -> Arrays | None:
    """Arrays of zeros, mapped from a new file that `write_product` will take over; None where the disk cannot take them."""
    try:
        folder.mkdir(exist_ok=True)
        fd = create_file(folder, PurePosixPath(_part(folder, name).name))
        try:
            disk.reserve(fd, sum(out.nbytes for out in outs))  # a full disk is an error now, and no SIGBUS later
            return map_arrays(fd, outs, mmap.ACCESS_WRITE)
        finally:
            os.close(fd)
    except OSError:
        _remove(_part(folder, name))
        return None


def write_product(folder: Path, name: str, arrays: Arrays) -> str:
    """Write the arrays of a product one after another, and return their checksum; "" if they cannot be written.

    arrays  those of `create_product` are in the file already; others may be mapped, read-only, from files of their own

    The file gets its name when it is complete, because another process may be reading it. Nobody waits until it is on the disk:
    the checksum tells a resumed run if it is.
    """
    part = _part(folder, name)
    try:
        if not any(is_mapped(array) and array.flags.writeable for array in arrays):  # else they are in the file
            folder.mkdir(exist_ok=True)
            with os.fdopen(create_file(folder, PurePosixPath(part.name)), "wb") as file:
                for array in arrays:
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        checksum = hash_file(part).xxh3_128
        part.replace(product_path(folder, name))
    except OSError:
        _remove(part)
        return ""
    return checksum


def read_product(folder: Path, name: str, outs: Sequence[TensorSpec], checksum: str) -> Arrays | None:
    """The arrays that `write_product` wrote, mapped; None if the file is missing or its checksum differs."""
    path = product_path(folder, name)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        about = os.fstat(fd)
        whole = stat.S_ISREG(about.st_mode) and about.st_size == sum(out.nbytes for out in outs)
        return map_arrays(fd, outs) if whole and hash_file(path).xxh3_128 == checksum else None
    except OSError:
        return None
    finally:
        os.close(fd)


def remove_product(folder: Path, name: str) -> None:
    """Remove the file of a product."""
    _remove(product_path(folder, name))


def remove_parts(folder: Path) -> None:
    """Remove the unfinished files that killed processes have left. Call while no other process works in the folder."""
    for path in folder.glob(f"*{_PART}"):
        _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _part(folder: Path, name: str) -> Path:
    path = product_path(folder, name)
    return path.with_name(f"{path.name}.{os.getpid()}{_PART}")
