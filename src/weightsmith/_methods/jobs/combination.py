"""Linear combinations of the inputs, with given coefficients or with a function of the Gram matrix.

slerp, karcher, model_stock and similar methods compute Σ cᵢ xᵢ, where the cᵢ depend only on the inputs' inner products: one
statistics pass, a small float64 function from the Gram matrix to coefficients, one linear pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._kernels.combine import LANES, combine, gram
from weightsmith.abc.job import Bytes, Job, Matrix, Tile

Vector = npt.NDArray[np.float64]


def symmetric(products: Vector, k: int) -> Vector:
    """Gram matrices [..., k, k] from products [..., pairs], pairs (i, j) with i <= j in row order.

    >>> symmetric(np.array([1.0, 2.0, 3.0]), 2)
    array([[1., 2.],
           [2., 3.]])
    """
    gram = np.empty((*products.shape[:-1], k, k))
    i, j = np.triu_indices(k)
    gram[..., i, j] = products
    gram[..., j, i] = products
    return gram


class CombinationJob(Job):
    """Σ coefficients[i] · input[i], with given coefficients (float64 [inputs])."""

    def __init__(self, matrix: Matrix, coefficients: Vector) -> None:
        super().__init__(matrix)
        self.coefficients = np.asarray(coefficients, np.float64)

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        rows = tile.scratch.rows(1, m.codes, m.out_code)
        combine(tile.raw, m.codes, self.coefficients, tile.size, out, m.out_code, rows, tile.scratch.sums(1))


def sum_of_deltas(matrix: Matrix, shares: Vector) -> CombinationJob:
    """base + Σ shares[i] · (input i - base)."""
    return CombinationJob(matrix, np.concatenate([[1.0 - shares.sum()], shares]))


class GramJob(CombinationJob):
    """Coefficients from inner products: `solve` maps the Gram matrix (float64 [k, k]) to coefficients (float64 [inputs]).

    With `deltas`, the vectors are the inputs minus the first one, the base, and k = inputs - 1.
    """

    def __init__(self, matrix: Matrix, solve: Callable[[Vector], Vector], *, deltas: bool = False) -> None:
        super().__init__(matrix, np.zeros(len(matrix.codes)))
        self.solve = solve
        self.deltas = deltas
        self.vectors = len(matrix.codes) - deltas

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, tile: Tile) -> Vector:
        m = self.matrix
        pairs = self.vectors * (self.vectors + 1) // 2
        out = np.empty((tile.grains(m.grain), pairs))
        rows = tile.scratch.rows(len(m.codes), m.codes, m.out_code)
        gram(tile.raw, m.codes, tile.size, m.grain, self.deltas, out, rows, np.empty((pairs, LANES)))
        return out

    def finish_pass(self, number: int, results: list[Any]) -> None:
        # cumsum adds sequentially; sum would add pairwise, in an order that depends on the tiles.
        totals = np.zeros(self.vectors * (self.vectors + 1) // 2)
        for result in results:
            totals = np.cumsum(np.concatenate([totals[None], result]), axis=0)[-1]
        with np.errstate(all="ignore"):  # NaN and infinity are reported by the tiles, or allowed
            self.coefficients = self.solve(symmetric(totals, self.vectors))
