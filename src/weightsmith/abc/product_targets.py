"""Receivers of a tensor's bytes, for products that compute."""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weightsmith._base.tensors import TensorSpec
from weightsmith._kernels.codecs import BLOCK, decode
from weightsmith._kernels.codes import block_maxima
from weightsmith.abc.job import Bytes

Floats = npt.NDArray[np.float32]


class Target(Protocol):
    """Takes the numbers of one tensor."""

    def take(self, start_byte: int, data: Bytes) -> None:
        """Some of its bytes as they are stored: whole elements. Called from many threads."""


class WholeTensor:
    """All numbers of a tensor, in an array of its shape."""

    def __init__(self, spec: TensorSpec, array: Floats) -> None:
        assert array.shape == spec.shape, (spec, array.shape)
        self._spec = spec
        self._flat = array.reshape(-1)
        assert not self._flat.size or np.shares_memory(self._flat, array)

    def take(self, start_byte: int, data: Bytes) -> None:
        width = self._spec.dtype.itemsize
        first, count = start_byte // width, len(data) // width
        _decode(self._spec, data, 0, count, self._flat[first : first + count])


class SomeRows:
    """Some rows of a matrix, by ascending numbers: float32 [len(numbers), cols]."""

    def __init__(self, spec: TensorSpec, numbers: npt.NDArray[np.int64], values: Floats) -> None:
        self._spec = spec
        self._numbers = numbers
        self._values = values

    def take(self, start_byte: int, data: Bytes) -> None:
        cols, width = self._spec.shape[1], self._spec.dtype.itemsize
        first, end = start_byte // width, (start_byte + len(data)) // width
        for k in range(*np.searchsorted(self._numbers, [first // cols, -(-end // cols)])):
            row = int(self._numbers[k]) * cols
            start, stop = max(first, row), min(end, row + cols)
            _decode(self._spec, data, start - first, stop - start, self._values[k, start - row : stop - row])


class Largest:
    """The largest magnitude of a tensor so far, `largest`; NaN does not count."""

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self.largest = 0.0

    def take(self, start_byte: int, data: Bytes) -> None:
        count, row, top = len(data) // self._spec.dtype.itemsize, np.empty(BLOCK, np.float32), np.empty(1, np.float32)
        largest = 0.0
        for start in range(0, count, BLOCK):
            n = min(BLOCK, count - start)
            _decode(self._spec, data, start, n, row[:n])
            block_maxima(row[:n], n, 1, n, top)
            largest = max(largest, float(top[0]))
        with self._lock:
            self.largest = max(self.largest, largest)


def _decode(spec: TensorSpec, data: Bytes, start: int, count: int, out: Floats) -> None:
    """out = elements start … start + count of the bytes of a tensor."""
    if spec.dtype.code >= 0:
        decode(data, spec.dtype.code, start, count, out)
    else:
        out[:] = data.view(spec.dtype.numpy)[start : start + count]
