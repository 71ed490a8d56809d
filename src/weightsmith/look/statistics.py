"""The `statistics` product: what some tensors of one model hold. It streams, in one pass; its steps have one input."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsmith.jobs.job import Matrix, Tile
from weightsmith.kernels.codecs import BLOCK
from weightsmith.kernels.combine import LANES
from weightsmith.kernels.differences import STATISTICS, statistics
from weightsmith.kernels.records import Encoded
from weightsmith.plans import Product, Step
from weightsmith.products.base import Arrays, ProductKind, StreamingReduction
from weightsmith.tensors import DTYPES, TensorSpec

OP = "statistics"

LARGEST = 4
"""Rows of a matrix that are listed: those with the largest norm."""


def statistics_product(name: str, steps: Sequence[Step]) -> Product:
    """The product. steps: each with one input, of floating numbers.

    Its arrays have a row for each step: `sums` float64 [steps, STATISTICS] (see `kernels.differences`), `rows` float64
    [steps, LARGEST, 2] (row number, or -1, and its squared norm), `spread` float64 [steps, 2]: Σ and Σ² of the norms of rows.
    """
    n, f64 = len(steps), DTYPES["F64"]
    shapes = {"sums": (n, STATISTICS), "rows": (n, LARGEST, 2), "spread": (n, 2)}
    return Product(
        name, OP, tuple(TensorSpec(f"{name}: {what}", f64, shape) for what, shape in shapes.items()), {}, tuple(steps)
    )


@dataclass(slots=True)
class _Part:
    name: str
    first_row: int
    sums: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]


class Statistics(StreamingReduction):
    """See `statistics_product`."""

    def __init__(self, product: Product) -> None:
        self._steps = {step.out.name: i for i, step in enumerate(product.steps)}
        n = len(product.steps)
        self._sums = np.zeros((n, STATISTICS))
        self._sums[:, 2], self._sums[:, 3] = np.inf, -np.inf
        self._spread = np.zeros((n, 2))
        self._rows: list[list[tuple[float, int]]] = [[] for _ in range(n)]

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> _Part:
        matrices = len(matrix.shape) == 2
        row = matrix.cols if matrices else BLOCK
        found, squares = np.empty((tile.grains(matrix.grain), STATISTICS)), np.zeros(-(-tile.size // row) + 1)
        rows = tile.scratch.rows(1, matrix.codes, matrix.out_code, row)
        data = Encoded(tile.raw[0], int(matrix.codes[0]))
        statistics(data, tile.size, row, matrix.grain, found, squares, rows, np.empty((2, LANES)))
        return _Part(matrix.name, tile.start // row, found, squares[: tile.size // row] if matrices else squares[:0])

    def take(self, number: int, result: _Part) -> None:
        i = self._steps[result.name]
        sums, more = self._sums[i], result.sums
        low, high = min(sums[2], more[:, 2].min()), max(sums[3], more[:, 3].max())
        # cumsum adds grain after grain; sum would add in an order that depends on the tiles.
        sums[:] = np.cumsum(np.concatenate([sums[None], more]), axis=0)[-1]
        sums[2], sums[3] = low, high
        if result.squares.size:
            norms = np.sqrt(result.squares)
            self._spread[i] += np.cumsum(np.stack([norms, result.squares], axis=1), axis=0)[-1]
            best = np.argsort(-result.squares, kind="stable")[:LARGEST].tolist()
            rows = [(float(result.squares[k]), -(result.first_row + k)) for k in best]
            self._rows[i] = heapq.nlargest(LARGEST, [*self._rows[i], *rows])

    def arrays(self) -> Arrays:
        rows = np.full((len(self._rows), LARGEST, 2), -1.0)
        for i, own in enumerate(self._rows):
            for k, (square, number) in enumerate(own):
                rows[i, k] = -number, square
        return [self._sums, rows, self._spread]


def outliers(rows: npt.NDArray[np.float64], spread: npt.NDArray[np.float64], count: int) -> list[tuple[int, float]]:
    """Rows whose norm is more than six standard deviations above the mean: number, and norm over the mean."""
    if count < 2:
        return []
    mean = float(spread[0]) / count
    deviation = math.sqrt(max(0.0, float(spread[1]) / count - mean**2))
    norms = [(int(row), math.sqrt(max(0.0, square))) for row, square in rows.tolist() if row >= 0]
    return [(row, norm / mean) for row, norm in norms if mean > 0 and norm > mean + 6 * deviation and norm > 2 * mean]


def _check(product: Product) -> str:
    if not product.steps or any(len(step.inputs) != 1 or not step.out.size for step in product.steps):
        return "its steps do not have one input each"
    return (
        "" if product.outs == statistics_product(product.name, product.steps).outs else "its arrays are not those of its steps"
    )


KIND = ProductKind("measuring", reduce=Statistics, check=_check)
