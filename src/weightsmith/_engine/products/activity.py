"""Counts of where models are active, over all tensors of a merge, for RAM+."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightsmith._methods.jobs.elementwise import Counts, count_tile
from weightsmith._plans import Product
from weightsmith.abc.job import Matrix, Tile
from weightsmith.abc.product import Arrays, ProductKind, StreamingReduction


class Activity(StreamingReduction):
    """For each of `Product.models`, the number of positions where only it is active, and where others are too.

    int64 [models, 2]. Each tensor has its own `epsilon`.
    """

    divisible = True

    def __init__(self, product: Product) -> None:
        self._rows = {model: k for k, model in enumerate(product.models)}
        self._counts: npt.NDArray[np.int64] = np.zeros((len(product.models), 2), np.int64)

    def passes(self) -> int:
        return 1

    def begin(self, number: int) -> None:
        self._counts[:] = 0

    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> tuple[tuple[int, ...], Counts]:
        return matrix.inputs[1:], count_tile(matrix, tile, matrix.number("epsilon"))

    def take(self, number: int, result: tuple[tuple[int, ...], Counts]) -> None:
        for model, count in zip(*result, strict=True):
            self._counts[self._rows[model]] += count

    def partial(self, number: int) -> Arrays:
        return [self._counts.copy()]

    def add(self, number: int, partial: Arrays) -> None:
        self._counts += partial[0]

    def arrays(self) -> Arrays:
        return [self._counts]


def _check(product: Product) -> str:
    if len(set(product.models)) < len(product.models):
        return "it has a model twice"
    fits = [(out.dtype.name, out.shape) for out in product.outs] == [("I64", (len(product.models), 2))]
    return "" if fits else "its array is not [models, 2] of int64"


KIND = ProductKind("counting where models are active", reduce=Activity, check=_check)
