"""The mean magnitude of each input feature of a linear layer, over the tokens that reach it: float32 [K].

AIM's importances of columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weightsmith._activations.statistics.moments import STATISTIC as MOMENTS


def _add(total: Any, part: slice, x: Any) -> None:
    total.add_(x.double().abs_().sum(0))


STATISTIC = replace(MOMENTS, add=_add)
