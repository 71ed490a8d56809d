"""Products of a plan in the staging folder: one file each, its checksum in the journal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith.errors import StoreError
from weightsmith.store import disk
from weightsmith.store.checksum import hash_bytes
from weightsmith.store.target import create_file
from weightsmith.tensors import TensorSpec

Arrays = Sequence[npt.NDArray[Any]]


def product_path(folder: Path, name: str) -> Path:
    """The file of a product. A name may hold anything, so the file is called by its hash."""
    return folder / hash_bytes(name.encode())


def write_product(folder: Path, name: str, arrays: Arrays) -> str:
    """Write the arrays of a product one after another, and return their checksum; "" where the disk cannot take them.

    The file has its name only once it is whole: another process may be reading it.
    """
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    path = product_path(folder, name)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        folder.mkdir(exist_ok=True)
        with os.fdopen(create_file(folder, PurePosixPath(part.name)), "wb") as file:
            file.write(data)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        return ""
    return hash_bytes(data)


def read_product(folder: Path, name: str, outs: Sequence[TensorSpec], checksum: str) -> Arrays | None:
    """The arrays that `write_product` wrote; None where the file is missing or its checksum differs."""
    nbytes = sum(out.nbytes for out in outs)
    try:
        data = disk.read_own(product_path(folder, name), nbytes)
    except (StoreError, OSError):
        return None
    if data is None or len(data) != nbytes or hash_bytes(data) != checksum:
        return None
    arrays, at = [], 0
    for out in outs:
        arrays.append(np.frombuffer(data, out.dtype.numpy, out.size, at).reshape(out.shape))
        at += out.nbytes
    return arrays
