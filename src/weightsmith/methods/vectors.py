"""nuslerp over the rows, or over the columns, of a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith.kernels.combine import gram
from weightsmith.kernels.vectors import combine_columns, combine_rows, gram_columns
from weightsmith.methods.job import Bytes, Job, Matrix, Tile

Vector = npt.NDArray[np.float64]


def each_nuslerp(products: Vector, t: float, *, deltas: bool) -> Vector:
    """Coefficients [vectors, inputs] from inner products [vectors, 3] = (a·a, a·b, b·b); see `nuslerp_coefficients`."""
    norms = np.maximum(np.sqrt(products[:, [0, 2]]), 1e-7)
    cosine = np.clip(products[:, 1] / (norms[:, 0] * norms[:, 1]), -1.0, 1.0)
    collinear = 1.0 - cosine * cosine <= 1e-16
    theta = np.arccos(np.where(collinear, 0.0, cosine))
    a = np.where(collinear, 1.0 - t, np.sin((1.0 - t) * theta) / np.sin(theta))
    b = np.where(collinear, t, np.sin(t * theta) / np.sin(theta))
    return np.stack([1.0 - a - b, a, b] if deltas else [a, b], axis=1)


class RowJob(Job):
    """Each row has its own angle: found and used within a tile, in one pass."""

    def __init__(self, matrix: Matrix, t: float) -> None:
        super().__init__(matrix)
        self.t = t

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        products = np.empty((tile.size // m.cols, 3))
        rows, sums = tile.scratch.rows(len(m.codes), m.codes, m.out_code), tile.scratch.sums(3)
        gram(tile.raw, m.codes, tile.size, m.cols, m.base, products, rows, sums)
        coefficients = each_nuslerp(products, self.t, deltas=m.base)
        combine_rows(tile.raw, m.codes, coefficients, tile.size, m.cols, out, m.out_code, rows, sums)


class ColumnJob(Job):
    """Each column has its own angle: one pass sums the products down the columns, row after row."""

    # A sum over rows that tiles took in any order would round differently from run to run.
    sequential = True

    def __init__(self, matrix: Matrix, t: float) -> None:
        super().__init__(matrix)
        self.t = t
        self.totals = np.zeros((3, matrix.cols))
        self.coefficients = np.zeros((len(matrix.codes), matrix.cols))

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, tile: Tile) -> None:
        m = self.matrix
        rows = tile.scratch.rows(len(m.codes), m.codes, m.out_code)
        gram_columns(tile.raw, m.codes, tile.size, m.cols, m.base, self.totals, rows)

    def fold(self, number: int, results: list[Any]) -> None:
        coefficients = each_nuslerp(np.ascontiguousarray(self.totals.T), self.t, deltas=self.matrix.base)
        self.coefficients = np.ascontiguousarray(coefficients.T)

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        rows, sums = tile.scratch.rows(1, m.codes, m.out_code), tile.scratch.sums(1)
        combine_columns(tile.raw, m.codes, self.coefficients, tile.size, m.cols, out, m.out_code, rows, sums)
