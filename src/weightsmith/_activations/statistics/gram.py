"""The Gram matrix of what enters a linear layer: Σ xxᵀ, float32 [K, K]. GPTQ's Hessian, and RegMean's inner products.

Only its lower triangle is summed; the upper one is its mirror image.
"""

from __future__ import annotations

from typing import Any

from weightsmith.abc.statistic import Statistic


def _add(total: Any, part: slice, x: Any) -> None:
    total[part.start :, part].addmm_(x[:, part.start :].T, x[:, part])


def _finish(total: Any, reached: int, tokens: int) -> Any:
    lower = total.tril(-1)
    return total.tril_().add_(lower.T)


STATISTIC = Statistic(lambda _n, k: (k, k), _add, _finish, tile=512)
