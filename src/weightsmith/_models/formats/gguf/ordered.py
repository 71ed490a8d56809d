"""Tensors whose rows or columns a GGUF file has in another order: those of value heads that share a key head.

The Hub has those of the first key head first, then those of the second, and so on; llama.cpp has the first of every key head
first, then the second of every one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import FormatError
from weightsmith._base.files import DAMAGED, show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._models.formats.decoded import Weight, bands, read_all
from weightsmith.abc.tensors import Tensors


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Rows (axis 0) or columns (axis 1) of a tensor: `before` that stay, then `width` for each value head."""

    axis: Literal[0, 1]
    before: int
    keys: int
    values: int
    width: int

    @property
    def size(self) -> int:
        """Rows or columns of the tensor."""
        return self.before + self.values * self.width

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """int64 [size]: where each of llama.cpp's is in the Hub's."""
        heads = np.arange(self.values * self.width).reshape(self.keys, self.values // self.keys, self.width)
        return np.concatenate([np.arange(self.before), self.before + heads.swapaxes(0, 1).reshape(-1)])


@dataclass(frozen=True, slots=True)
class OrderedWeight(Weight):
    """A tensor whose rows or columns the file has in another order."""

    order: HeadOrder

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        stored_at, rows = np.argsort(self.order.places), self.spec.shape[0]
        cols = self.spec.size // rows
        for row, end, skip, target in bands(first, values, cols):
            if self.order.axis == 1:
                whole = self._read(stored, row * cols, end * cols).reshape(-1, cols)[:, stored_at]
            else:
                places = stored_at[row:end]
                starts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
                runs = [(int(places[a]) * cols, (int(places[b - 1]) + 1) * cols) for a, b in pairwise(starts)]
                whole = np.concatenate([self._read(stored, a, b) for a, b in runs])
            target[:] = whole.reshape(-1)[skip : skip + target.size]

    def _read(self, stored: Tensors, start: int, end: int) -> npt.NDArray[np.float32]:
        return read_all(stored, self.stored[0], start, end).astype(np.float32)


def ordered_weight(spec: TensorSpec, name: str, order: HeadOrder, natural_dtype: DType, where: str) -> OrderedWeight:
    """A tensor under the Hub's name, from one of the file. Raises FormatError for one of another size than the keys say."""
    matrix = order.axis == 0 or len(spec.shape) == 2
    if not matrix or not spec.shape or spec.shape[order.axis] != order.size:
        heads = f"{order.size:,} for {order.values:,} value heads"
        what = f"tensor {show(spec.name)} has the shape {list(spec.shape)}, and not {heads}"
        raise FormatError(what, where=where, fix=DAMAGED)
    return OrderedWeight(TensorSpec(name, DTYPES["F32"], spec.shape), (spec.name,), natural_dtype, order)
