"""Arrays that are mapped from files: a model's worth of them needs no memory of its own."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.tensors import TensorSpec


def map_arrays(fd: int, specs: Sequence[TensorSpec], access: int = mmap.ACCESS_READ) -> list[npt.NDArray[Any]]:
    """Arrays that lie one after another in a file from its start. access: `mmap.ACCESS_READ` or `ACCESS_WRITE`."""
    nbytes = sum(spec.nbytes for spec in specs)
    data = mmap.mmap(fd, nbytes, access=access) if nbytes else b""
    arrays, at = [], 0
    for spec in specs:
        arrays.append(_array(data, spec, at))
        at += spec.nbytes
    return arrays


def map_array(fd: int, spec: TensorSpec, start_byte: int) -> npt.NDArray[Any]:
    """An array of a file, read-only. The file may be closed. Raises OSError or ValueError if the file is too short."""
    first = start_byte // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    nbytes = start_byte - first + spec.nbytes
    data = mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ, offset=first) if spec.nbytes else b""
    return _array(data, spec, start_byte - first if spec.nbytes else 0)


def _array(data: mmap.mmap | bytes, spec: TensorSpec, start_byte: int) -> npt.NDArray[Any]:
    return np.frombuffer(data, spec.dtype.numpy, spec.size, start_byte).reshape(spec.shape)


def release_pages(array: npt.NDArray[Any]) -> None:
    """Let the system take back the memory that shows a mapped array; its file keeps the numbers. Others are left alone."""
    map_ = _map_of(array)
    if map_ is not None and hasattr(mmap, "MADV_DONTNEED"):
        map_.madvise(mmap.MADV_DONTNEED)


def is_mapped(array: npt.NDArray[Any]) -> bool:
    """Whether an array is mapped from a file."""
    return _map_of(array) is not None


def _map_of(array: npt.NDArray[Any]) -> mmap.mmap | None:
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, mmap.mmap) else None
