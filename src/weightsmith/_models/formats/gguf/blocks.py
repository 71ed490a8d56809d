"""ggml's blocks of numbers, and llama.cpp's order of rows: encoded and decoded."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Unsupported
from weightsmith._base.tensors import DType
from weightsmith._models.formats.gguf.layout import TYPE_IDS
from weightsmith.abc.stored import Bytes, Rows

if TYPE_CHECKING:
    from types import ModuleType

_ready: set[str] = set()
_lock = threading.Lock()


def libgguf(where: str = "") -> ModuleType:
    """The package that knows ggml's blocks. Raises Unsupported where it is not installed."""
    try:
        import libgguf as found
    except ImportError:
        what = "the package libgguf, which encodes and decodes ggml's types of blocks, is not installed"
        raise Unsupported(what, where=where, fix="install it: pip install 'weightsmith[gguf]'") from None
    module: ModuleType = found
    return module


def quantise(dtype: DType, rows: Rows, out: Bytes, importances: Rows | None) -> None:
    """Blocks of some rows [n, cols]. The package's tables are made once, by one thread."""
    found, number = libgguf(), TYPE_IDS[dtype.name]
    if dtype.name not in _ready:
        with _lock:
            ones = np.ones(dtype.block, np.float32)
            found.quantize_rows_into_raw(number, ones, bytearray(dtype.itemsize), 1, dtype.block, ones)
            _ready.add(dtype.name)
    found.quantize_rows_into_raw(number, rows, out, len(rows), rows.shape[1], importances)


def dequantise(dtype: DType, blocks: Bytes, count: int) -> Rows:
    """The numbers of some blocks: float32 [count]."""
    values = np.empty(count, np.float32)
    libgguf().dequantize_rows_into_raw(TYPE_IDS[dtype.name], blocks, values, 1, count)
    return values


def to_llama_order(rows: Rows, head_rows: int) -> Rows:
    """Rows of whole heads as llama.cpp stores them: row 2·i + j of a head there is row j·head_rows/2 + i of the Hub's.

    head_rows  rows of a head; 0: they stay

    >>> to_llama_order(np.arange(4, dtype=np.float32)[:, None], 4).ravel().tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    if not head_rows:
        return rows
    heads = rows.reshape(-1, 2, head_rows // 2, rows.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def from_llama_order(values: npt.NDArray[Any], head_rows: int, cols: int) -> npt.NDArray[Any]:
    """The inverse, of rows of `cols` numbers of any type that follow one another.

    >>> from_llama_order(np.array([0, 2, 1, 3]), 4, 1).tolist()
    [0, 1, 2, 3]
    """
    if not head_rows:
        return values
    return np.ascontiguousarray(values.reshape(-1, head_rows // 2, 2, cols).swapaxes(1, 2)).reshape(-1)
