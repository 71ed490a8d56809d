"""What the engine runs: a `Job` merges one logical matrix, tile by tile.

    statistics(0, every tile) → fold(0) → … → statistics(k-1, every tile) → fold(k-1) → apply(every tile)

`statistics` and `apply` are called from many threads in any order; `fold` once a pass, when all its tiles are in. What
`statistics` returns must depend on the grains of the tile alone, and `fold` gets the results in tile order, so that a job's
outcome is the same for any tile size and number of threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith.methods.base import Parameters

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One logical matrix of one output tensor, and all that is known before its bytes are read.

    name          of the output tensor
    index         flat index of its first element in the tensor
    size, cols    elements, and elements in a row
    grain         elements in a grain
    codes         int64 [inputs]: `DType.code` of each input
    out_code      of the output
    base          True when input 0 is the base
    shared        parameters of the tensor
    models        parameters of each input (of the base too: usually none)
    seed          of the random masks
    """

    name: str
    index: int
    size: int
    cols: int
    grain: int
    codes: npt.NDArray[np.int64]
    out_code: int
    base: bool
    shared: Parameters
    models: tuple[Parameters, ...]
    seed: int

    def weights(self, name: str = "weight") -> npt.NDArray[np.float64]:
        """float64: the parameter `name` of each input, the base left out."""
        return np.array([m[name] for m in self.models[1 if self.base else 0 :]], np.float64)


class Scratch:
    """The working memory of one thread, reused for every tile.

    rows   float32 or float64 [inputs + 1, BLOCK]
    sums   float64 [sums, BLOCK]
    words  uint32 [BLOCK + 512]; bits uint32 [BLOCK]
    """

    def __init__(self) -> None:
        self._rows: dict[type, np.ndarray] = {}
        self._sums = np.empty((0, 0))
        self._table: tuple[npt.NDArray[np.uint32], ...] = ()
        self._counts: dict[int, npt.NDArray[np.uint32]] = {}
        from weightsmith.kernels.codecs import BLOCK

        self._block = BLOCK
        self.words = np.empty(BLOCK + 512, np.uint32)
        self.bits = np.empty(BLOCK, np.uint32)

    def rows(self, count: int, codes: npt.NDArray[np.int64], out_code: int) -> np.ndarray:
        """At least `count` rows: float64 if the output is F32 or F64, or an input is F64; else float32."""
        from weightsmith.kernels.codecs import F32, F64

        kind = np.float64 if out_code in (F32, F64) or (codes == F64).any() else np.float32
        held = self._rows.get(kind)
        if held is None or len(held) < count:
            held = self._rows[kind] = np.empty((count, self._block), kind)
        return held

    def sums(self, count: int) -> npt.NDArray[np.float64]:
        """At least `count` rows of float64."""
        if len(self._sums) < count:
            self._sums = np.empty((count, self._block))
        return self._sums

    def table(self, slots: int, used: int) -> tuple[npt.NDArray[np.uint32], ...]:
        """A hash table of `slots`: patterns and numbers, and a list of `used` slots. Whoever uses it leaves numbers zero."""
        if not self._table:
            self._table = np.empty(slots, np.uint32), np.zeros(slots, np.uint32), np.empty(used, np.uint32)
        return self._table

    def counts(self, bins: int) -> npt.NDArray[np.uint32]:
        """`bins` zeroed counters."""
        held = self._counts.setdefault(bins, np.empty(bins, np.uint32))
        held.fill(0)
        return held


@dataclass(frozen=True, slots=True)
class Tile:
    """A run of whole grains of a matrix, its input bytes read.

    start    first element, counted from the start of the matrix
    size     elements
    raw      uint8 [inputs, bytes]
    scratch  of the thread that works on it
    """

    start: int
    size: int
    raw: Bytes
    scratch: Scratch

    def grains(self, grain: int) -> int:
        """Number of grains in the tile."""
        return -(-self.size // grain)


class Job(ABC):
    """The merge of one logical matrix.

    sequential  statistics tiles come one after the other, in order (a job whose sums cannot be split by grain)
    """

    sequential = False

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    def passes(self) -> int:
        """Number of statistics passes; asked again after each `fold`, so a pass may turn out not to be needed."""
        return 0

    def statistics(self, number: int, tile: Tile) -> Any:
        """Statistics of one tile in pass `number`."""
        raise NotImplementedError

    def fold(self, number: int, results: list[Any]) -> None:
        """Take in the statistics of all tiles, in tile order."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, tile: Tile, out: Bytes) -> None:
        """Write the tile's output, encoded, into `out`."""
