"""Weights over the checkpoints of one run, by a rule: EMA, LAWA, WSM.

A rule replaces a number: `weight: {ema: 0.9}`. It applies to all models in that place, oldest first, and its
weights sum to 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

Rule = Literal["ema", "lawa", "wsm"]

SCHEDULED = "weight"
"""The parameter of each model that may be a schedule."""

DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: (1.0 + math.cos(math.pi * x)) / 2.0,
    "1-sqrt": lambda x: 1.0 - math.sqrt(x),
}
"""Learning rate curves: from 1 at 0 to 0 at 1."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A rule for the weights of n models, oldest first.

    ema   mᵢ = β mᵢ₋₁ + (1 - β) Wᵢ, from m₁ = W₁, with 0 <= β < 1: as an averager in the training loop would have it
    lawa  the mean of the last k, and nothing of the others (Kaddour 2022, https://arxiv.org/abs/2209.14981)
    wsm   checkpoint j (0 … n - 1) weighs d(j / n) - d((j + 1) / n): to first order the model that the learning rate curve d
          would have led to from the oldest of them on (Tian et al. 2025, section 3, https://arxiv.org/abs/2507.17634).
          `linear` is the plain mean
    """

    rule: Rule
    setting: float | int | str

    def __str__(self) -> str:
        return f"{{{self.rule}: {self.setting}}}"

    def weights(self, n: int) -> tuple[float, ...]:
        """The weights of n models; they sum to 1. ValueError when the rule needs more of them.

        >>> Schedule("ema", 0.5).weights(3), Schedule("lawa", 2).weights(3), Schedule("wsm", "1-sqrt").weights(4)[:2]
        ((0.25, 0.25, 0.5), (0.0, 0.5, 0.5), (0.5, 0.20710678118654757))
        """
        return _weights(self, n)


@cache
def _weights(schedule: Schedule, n: int) -> tuple[float, ...]:
    if schedule.rule == "ema":
        beta = float(schedule.setting)
        return (beta ** (n - 1), *((1.0 - beta) * beta ** (n - 1 - i) for i in range(1, n)))
    if schedule.rule == "lawa":
        last = int(schedule.setting)
        if n < last:
            raise ValueError(f"lawa: {last} is the mean of the last {last} models, and here {'is' if n == 1 else 'are'} {n}")
        return tuple(1.0 / last if i >= n - last else 0.0 for i in range(n))
    curve = [DECAYS[str(schedule.setting)](j / n) for j in range(n)] + [0.0]
    return tuple(now - later for now, later in itertools.pairwise(curve))
