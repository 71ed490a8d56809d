"""The largest magnitude of each input feature of a linear layer, over the tokens that reach it: float32 [K].

Static scales of activations come from it. Zeros, if no token reaches the layer.
"""

from __future__ import annotations

from typing import Any

from weightsmith.abc.product import Statistic


def _add(total: Any, part: slice, x: Any) -> None:
    if len(x):
        total.copy_(total.maximum(x.abs().amax(0)))


def _finish(total: Any, reached: int, tokens: int) -> Any:
    return total


STATISTIC = Statistic(lambda _n, k: (k,), _add, _finish)
