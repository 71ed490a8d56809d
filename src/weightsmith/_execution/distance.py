"""The distance of a merge from its base, per layer, which predicts the quality of merged language models.

In-the-wild fine-tunes merged by eight methods got worse with ‖merged - base‖ (https://arxiv.org/abs/2511.21437), so the card
and the manifest of every merge with a base contain it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightsmith._base.text import markdown_table
from weightsmith._models.structure import analyse
from weightsmith._plans import Plan


def share_of(delta: float, base: float) -> float:
    """The norm of a delta over that of what it is from.

    >>> share_of(1, 2), share_of(0, 0), share_of(0, math.nan), share_of(1, 0), share_of(1, math.inf)
    (0.5, 0.0, 0.0, inf, nan)
    """
    if delta == 0:
        return 0.0
    if base == 0:
        return math.inf if math.isfinite(delta) else math.nan
    return delta / base if math.isfinite(delta) and math.isfinite(base) else math.nan


@dataclass(frozen=True, slots=True)
class Moved:
    """Frobenius norms of merged - base and of the base, over one layer or all tensors. Infinite constants count as zeros."""

    name: str
    delta: float
    base: float

    @property
    def share(self) -> float:
        """The norm of the delta over that of the base."""
        return share_of(self.delta, self.base)

    def percent(self, digits: int = 2) -> str:
        """The share as text: "?" if it is not a number.

        >>> Moved("all", 1.0, 8.0).percent(), Moved("all", 1.0, 0.0).percent()
        ('12.50%', '?')
        """
        return f"{self.share:.{digits}%}" if math.isfinite(self.share) else "?"


def distance_by_layer(plan: Plan, squares: Mapping[str, tuple[float, float]]) -> tuple[Moved, ...]:
    """The distance in total, then of every layer in order, then outside the layers; () without a base.

    squares  tensor → squared norms of its delta and of its base, from the engine
    """
    if not squares:
        return ()
    structure = analyse([step.out for step in plan.steps], plan.config)
    rows: dict[str, list[tuple[float, float]]] = {}
    outside: list[tuple[float, float]] = []
    for step in plan.steps:
        pair = squares.get(step.out.name)
        if pair is not None:
            place = structure.locate(step.out.name)
            group = outside if place is None else rows.setdefault(f"{place[0].prefix}{place[1]}", [])
            group.append(pair)
    everything = [pair for group in [*rows.values(), outside] for pair in group]
    moved = [_sum("all", everything), *(_sum(name, group) for name, group in rows.items())]
    return (*moved, _sum("outside the layers", outside)) if outside else tuple(moved)


def _sum(name: str, pairs: list[tuple[float, float]]) -> Moved:
    return Moved(name, math.sqrt(sum(d for d, _ in pairs)), math.sqrt(sum(b for _, b in pairs)))


def to_json(moved: tuple[Moved, ...]) -> list[dict[str, Any]]:
    """For the manifest; None for a norm that is not finite."""
    return [{"name": m.name, "delta_norm": _finite(m.delta), "base_norm": _finite(m.base)} for m in moved]


def _finite(norm: float) -> float | None:
    return norm if math.isfinite(norm) else None


def to_markdown(moved: tuple[Moved, ...]) -> str:
    """A table for the card.

    >>> print(to_markdown((Moved("all", 1.0, 4.0),)))
    |  | delta | share of the base |
    | --- | ---: | ---: |
    | all | 1 | 25.000% |
    """
    rows = [(m.name, f"{m.delta:.4g}", m.percent(3)) for m in moved]
    return markdown_table(("", "delta", "share of the base"), rows, right={1, 2})
