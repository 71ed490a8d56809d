"""The mean square of each input feature of a linear layer, over the tokens that reach it: float32 [K].

llama.cpp's importances of columns.
"""

from __future__ import annotations

from typing import Any

from weightsmith.abc.product import Statistic


def _add(total: Any, part: slice, x: Any) -> None:
    total.add_(x.double().square_().sum(0))


def _finish(total: Any, reached: int, tokens: int) -> Any:
    return total / reached


STATISTIC = Statistic(lambda _n, k: (k,), _add, _finish, precise=True)
