"""Heat maps of numbers that belong to places in a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from weightsmith.pages.values import HeatMap, Unit

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
    value: Callable[[Sequence[T]], float | None],
    unit: Unit,
    about: str,
    *,
    log: bool = False,
    detail: str = "",
    span: tuple[float, float] | None = None,
) -> list[HeatMap]:
    """One heat map for each stack of layers, without those that would be empty.

    items  what is where; of what is outside the layers nothing is shown
    value  one number for all items of a part in a layer; None: not known
    span   see `HeatMap`
    """
    stacks: dict[str, dict[tuple[int, str], list[T]]] = {}
    for place, item in items:
        if place.stack:
            stacks.setdefault(place.stack, {}).setdefault((place.layer, place.part), []).append(item)
    found = []
    for stack, own in stacks.items():
        layers, parts = sorted({layer for layer, _ in own}), tuple(dict.fromkeys(part for _, part in own))
        values = tuple(tuple(value(own[at, part]) if (at, part) in own else None for part in parts) for at in layers)
        if any(number is not None for row in values for number in row):
            name = f"{title} ({stack})" if len(stacks) > 1 else title
            rows = tuple(f"{stack}{layer}" for layer in layers)
            found.append(HeatMap(name, rows, parts, values, unit, about, log, detail, span))
    return found
