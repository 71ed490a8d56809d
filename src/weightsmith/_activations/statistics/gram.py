"""The Gram matrix of what enters a linear layer: Σ xxᵀ, float32 [K, K]. GPTQ's Hessian, and RegMean's inner products.

Only its lower triangle is summed; the upper one is its mirror image.
"""

from __future__ import annotations

from typing import Any

from weightsmith.abc.product import Statistic

TILE = 128
"""Columns that one thread sums."""


def _add(total: Any, part: slice, x: Any) -> None:
    total[part.start :, part].addmm_(x[:, part.start :].T, x[:, part])


def _finish(total: Any, reached: int, tokens: int) -> Any:
    for start in range(0, len(total), TILE):
        part, rest = slice(start, start + TILE), slice(start + TILE, None)
        lower = total[part, part].tril(-1)
        total[part, part].tril_().add_(lower.T)
        total[part, rest] = total[rest, part].T
    return total


STATISTIC = Statistic(lambda _n, k: (k, k), _add, _finish, tile=TILE)
