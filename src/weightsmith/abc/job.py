"""The interface of a job, which merges one logical matrix, tile by tile.

    statistics(0, every tile) → finish_pass(0) → … → statistics(k-1, every tile) → finish_pass(k-1) → apply(every tile)

`statistics` and `apply` are called from many threads in any order; `finish_pass` once per pass, after all its tiles. The result
of `statistics` may depend only on the grains of the tile, and `finish_pass` receives the results in tile order, so the outcome
does not depend on tile size or number of threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._plans import Parameters, Role

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Result:
    """A finished product: its settings, the indices of the models they refer to, and its arrays in order."""

    settings: Mapping[str, Any]
    models: tuple[int, ...]
    arrays: tuple[npt.NDArray[Any], ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One logical matrix, an output tensor or a piece of one, and everything known before its bytes are read.

    name          of the tensor; a piece has its name as a separate tensor
    size, cols    elements, and elements per row
    grain         elements per grain
    codes         int64 [inputs]: `DType.code` of each input
    out_code      of the output
    base          whether input 0 is the base
    shared        parameters of the tensor
    models        parameters of each input (including the base, which usually has none)
    seed          of the random masks
    inputs        for each input, its model's index in the plan
    places        for each input, its position among the recipe's models
    results       of the products that its step needs, in that order
    shape         of the matrix
    role          how methods treat it
    layer         prefix of its layer; "" outside the layers
    device        where whole matrices are computed, as torch names it
    method        that merges it
    statistics    what is known of the inputs from a text: by kind, by the number of the input. Read-only, may be mapped from
                  a file; {} for a tensor of which a text tells nothing
    """

    name: str
    size: int
    cols: int
    grain: int
    codes: npt.NDArray[np.int64]
    out_code: int
    base: bool
    shared: Parameters
    models: tuple[Parameters, ...]
    seed: int
    inputs: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    results: tuple[Result, ...] = ()
    shape: tuple[int, ...] = ()
    role: Role = "other"
    layer: str = ""
    device: str = "cpu"
    method: str = ""
    statistics: Mapping[str, Mapping[int, npt.NDArray[Any]]] = field(default_factory=dict)

    @property
    def row(self) -> int:
        """Elements per row, for methods that work on whole rows. A vector is one row, up to the size of a grain."""
        return min(self.cols, self.grain)

    @property
    def wide(self) -> bool:
        """Whether rows are float64: if the output is F32 or F64, or an input is F64."""
        return needs_float64(self.codes, self.out_code)

    @property
    def model_parameters(self) -> tuple[Parameters, ...]:
        """The parameters of each input except the base."""
        return self.models[1 if self.base else 0 :]

    def number(self, name: str) -> float:
        """A numeric parameter of the tensor."""
        value = self.shared[name]
        assert isinstance(value, float | int), f"{name} is {value!r}"
        return float(value)


def needs_float64(codes: npt.NDArray[np.int64], out_code: int) -> bool:
    """Whether rows must be float64: if the output is F32 or F64, or an input is F64."""
    from weightsmith._kernels.codecs import F32, F64

    return out_code in (F32, F64) or bool((codes == F64).any())


class Scratch:
    """The working memory of one thread, reused for every tile.

    rows   float32 or float64 [count, BLOCK]
    sums   float64 [count, BLOCK]
    bits   uint32 [BLOCK]
    """

    def __init__(self) -> None:
        self._rows: dict[type, np.ndarray] = {}
        self._sums = np.empty((0, 0))
        self._table: tuple[npt.NDArray[np.uint32], ...] = ()
        self._counts: dict[int, npt.NDArray[np.uint32]] = {}
        self._sorting: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = {}
        from weightsmith._kernels.codecs import BLOCK

        self._block = BLOCK
        self.bits = np.empty(BLOCK, np.uint32)

    def rows(self, count: int, codes: npt.NDArray[np.int64], out_code: int, length: int = 0) -> np.ndarray:
        """At least `count` rows of max(BLOCK, length): float64 if `needs_float64`, else float32."""
        kind = np.float64 if needs_float64(codes, out_code) else np.float32
        held = self._rows.get(kind)
        if held is None or len(held) < count or held.shape[1] < length:
            held = self._rows[kind] = np.empty((count, max(self._block, length)), kind)
        return held

    def sums(self, count: int, length: int = 0) -> npt.NDArray[np.float64]:
        """At least `count` rows of max(BLOCK, length) float64."""
        if len(self._sums) < count or self._sums.shape[1] < length:
            self._sums = np.empty((count, max(self._block, length)))
        return self._sums

    def row_sorting(self, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """words uint32 [max(BLOCK, length) + 512]; bits uint32, order uint32 [4, length], taken uint8 for rows of `length`."""
        if length not in self._sorting:
            words = np.empty(max(self._block, length) + 512, np.uint32)
            bits, order, taken = np.empty(length, np.uint32), np.empty((4, length), np.uint32), np.empty(length, np.uint8)
            self._sorting = {length: (words, bits, order, taken)}
        return self._sorting[length]

    def table(self, slots: int, used: int) -> tuple[npt.NDArray[np.uint32], ...]:
        """A hash table of `slots`: patterns and numbers, and a list of `used` slots. Users must reset numbers to zero."""
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
    """A run of whole grains of a matrix, with its input bytes.

    start    index of the first element in the matrix
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

    def floats(self, matrix: Matrix, i: int) -> npt.NDArray[np.float32]:
        """The elements of input i: a new array, float32 [size]."""
        from weightsmith._kernels.codecs import decode

        out = np.empty(self.size, np.float32)
        decode(self.raw[i], int(matrix.codes[i]), 0, self.size, out)
        return out


class Job(ABC):
    """The merge of one logical matrix.

    sequential      pass statistics tiles one by one, in order (for sums that cannot be split by grain)
    resident_bytes  memory that it holds while it runs, if large: the scheduler starts jobs as memory allows
    portable    every machine computes the same bytes; torch's routines for whole matrices may round differently elsewhere
    """

    sequential = False
    resident_bytes = 0
    portable = True

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    def recall(self, memory: MutableMapping[object, Any]) -> None:  # noqa: B027  most jobs have nothing to remember
        """Called before the first pass, where merges of the same inputs follow each other with other parameters or methods.

        memory  what jobs of the same inputs have put there; this one may put there what the next need not compute again
        """

    def passes(self) -> int:
        """Number of statistics passes. Called again after each `finish_pass`, so it may change."""
        return 0

    def statistics(self, number: int, tile: Tile) -> Any:
        """Statistics of one tile in pass `number`."""
        raise NotImplementedError

    def finish_pass(self, number: int, results: list[Any]) -> None:
        """Process the statistics of all tiles, in tile order."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, tile: Tile, out: Bytes) -> None:
        """Write the tile's output, encoded, into `out`."""
