"""Heat maps of numbers that belong to places in a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from weightsmith.pages.svg import span_of
from weightsmith.pages.values import HeatMap, Mark, Unit

T = TypeVar("T")


class Placed(Protocol):
    """Where something is: prefix of its stack ("" outside the layers), number of its layer, and what it is in the layer."""

    @property
    def stack(self) -> str: ...
    @property
    def layer(self) -> int: ...
    @property
    def part(self) -> str: ...


def heat_maps(
    title: str,
    items: Iterable[tuple[Placed, T]],
    value: Callable[[Sequence[T]], float | Mark],
    unit: Unit,
    about: str,
    *,
    log: bool = False,
    detail: str = "",
    span: tuple[float, float] | None = None,
) -> list[HeatMap]:
    """One heat map for each stack of layers, all with one scale; without those where nothing differs or nothing applies.

    items  what is where; of what is outside the layers nothing is shown
    value  one number for all items of a part in a layer, or a mark; nan: `Mark.UNDEFINED`
    span   see `HeatMap`
    """
    stacks: dict[str, dict[tuple[int, str], list[T]]] = {}
    for place, item in items:
        if place.stack:
            stacks.setdefault(place.stack, {}).setdefault((place.layer, place.part), []).append(item)
    found: list[HeatMap] = []
    for stack, own in stacks.items():
        layers, parts = sorted({layer for layer, _ in own}), tuple(dict.fromkeys(part for _, part in own))
        values = tuple(tuple(_cell(value(own[at, part])) if (at, part) in own else None for part in parts) for at in layers)
        if any(value not in (None, Mark.SAME, Mark.NOTHING) for row in values for value in row):
            name = f"{title} ({stack})" if len(stacks) > 1 else title
            rows = tuple(f"{stack}{layer}" for layer in layers)
            found.append(HeatMap(name, rows, parts, values, unit, about, log, detail, span))
    common = span or span_of([v for one in found for row in one.values for v in row], log=log)
    return [replace(one, span=common) for one in found]


def _cell(value: float | Mark) -> float | Mark:
    return value if isinstance(value, Mark) or not math.isnan(value) else Mark.UNDEFINED
