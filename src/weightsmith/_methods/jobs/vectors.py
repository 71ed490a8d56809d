"""Linear combinations of the inputs, with separate coefficients for each row or column of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._kernels.combine import LANES, combine_columns, combine_rows, gram_columns, gram_rows
from weightsmith._kernels.records import Encoded, Inputs
from weightsmith._methods.jobs.combination import symmetric
from weightsmith.abc.job import Bytes, Job, Matrix, Tile

Vector = npt.NDArray[np.float64]
Solve = Callable[[Vector], Vector]
"""Gram matrices, float64 [vectors, k, k] → coefficients, float64 [vectors, inputs], for each vector separately."""

AT_ONCE = 1 << 17
"""Maximum number of Gram matrix elements in memory, 1 MiB, for any width of rows and number of models."""


class RowJob(Job):
    """Separate coefficients for each row, computed and used within a tile, in one pass.

    deltas  the vectors are the inputs minus the first one, the base
    """

    def __init__(self, matrix: Matrix, solve: Solve, *, deltas: bool) -> None:
        super().__init__(matrix)
        self.solve = solve
        self.deltas = deltas

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        k = len(m.codes) - self.deltas
        pairs, height = k * (k + 1) // 2, max(1, AT_ONCE // (k * k))
        rows, sums = tile.scratch.rows(len(m.codes), m.codes, m.out_code), tile.scratch.sums(1)
        lanes = np.empty((pairs, LANES))
        end = tile.size // m.cols
        for first in range(0, end, height):
            products = np.empty((min(height, end - first), pairs))
            gram_rows(tile.raw, m.codes, first, m.cols, self.deltas, products, rows, lanes)
            with np.errstate(all="ignore"):
                coefficients = np.ascontiguousarray(self.solve(symmetric(products, k)))
            combine_rows(Inputs(tile.raw, m.codes), coefficients, first, m.cols, Encoded(out, m.out_code), rows, sums)


class ColumnJob(Job):
    """Separate coefficients for each column. A first pass sums the products along the columns, row by row.

    deltas  the vectors are the inputs minus the first one, the base
    """

    # Sequential, because sums in varying tile order would round differently from run to run.
    sequential = True

    def __init__(self, matrix: Matrix, solve: Solve, *, deltas: bool) -> None:
        super().__init__(matrix)
        self.solve = solve
        self.deltas = deltas
        self.vectors = len(matrix.codes) - deltas
        self.totals = np.zeros((self.vectors * (self.vectors + 1) // 2, matrix.cols))
        self.coefficients = np.zeros((len(matrix.codes), matrix.cols))

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, tile: Tile) -> None:
        m = self.matrix
        rows = tile.scratch.rows(len(m.codes), m.codes, m.out_code)
        gram_columns(tile.raw, m.codes, tile.size, m.cols, self.deltas, self.totals, rows)

    def finish_pass(self, number: int, results: list[Any]) -> None:
        with np.errstate(all="ignore"):
            coefficients = self.solve(symmetric(np.ascontiguousarray(self.totals.T), self.vectors))
        self.coefficients = np.ascontiguousarray(coefficients.T)

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        rows, sums = tile.scratch.rows(1, m.codes, m.out_code), tile.scratch.sums(1)
        inputs, encoded = Inputs(tile.raw, m.codes), Encoded(out, m.out_code)
        combine_columns(inputs, self.coefficients, tile.size, m.cols, encoded, rows, sums)
