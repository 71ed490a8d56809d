"""The colours of heat maps: one scale for amounts, one around zero, for light and for dark pages.

Lightness falls or rises all along a scale (on both sides of zero, where it is neutral), so that it reads in grey, in print and
with every kind of colour blindness. On a light page more is darker, on a dark page more is lighter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weightsmith._base.pages.values import Cell, Scale

Rgb = tuple[int, int, int]

STEPS = 25
"""Colours of a scale. Odd: zero has one of its own."""

_AMOUNT: tuple[Rgb, ...] = ((250, 241, 203), (172, 219, 181), (77, 170, 184), (44, 102, 168), (36, 28, 92))
_AMOUNT_DARK: tuple[Rgb, ...] = ((44, 40, 104), (44, 102, 168), (77, 170, 184), (172, 219, 181), (250, 241, 203))
_AROUND: tuple[Rgb, ...] = ((24, 66, 148), (120, 170, 222), (242, 240, 236), (232, 160, 92), (140, 60, 0))
_AROUND_DARK: tuple[Rgb, ...] = ((176, 212, 255), (62, 122, 190), (42, 45, 50), (176, 98, 34), (255, 206, 158))


def scaled(values: Sequence[Cell], scale: Scale, span: tuple[float, float] | None) -> list[float | None]:
    """Numbers from 0 to 1 for colours; None for values without a colour: marks, NaN, infinity.

    span  the numbers at 0 and at 1

    >>> scaled([0.0, 5.0, 10.0, None, math.inf], "linear", (0.0, 10.0)), scaled([0.0, 0.01, 1.0], "log", (0.01, 1.0))
    ([0.0, 0.5, 1.0, None, None], [0.0, 0.0, 1.0])
    """
    transform = math.log if scale == "log" else float
    low, high = map(transform, span or (1.0, 1.0))

    def one(value: Cell) -> float | None:
        if not isinstance(value, float | int) or not math.isfinite(value):
            return None
        if scale == "log" and value <= 0:
            return 0.0
        return min(1.0, max(0.0, (transform(value) - low) / (high - low))) if high > low else 0.0

    return [one(value) for value in values]


def step_of(share: float) -> int:
    """The number of the colour of a number from 0 to 1.

    >>> step_of(0.0), step_of(0.5), step_of(1.0)
    (0, 12, 24)
    """
    return round(share * (STEPS - 1))


def colour(step: int, scale: Scale, *, dark: bool = False) -> str:
    """A colour of a scale.

    >>> colour(0, "log"), colour(12, "diverging"), colour(24, "linear", dark=True)
    ('#faf1cb', '#f2f0ec', '#faf1cb')
    """
    stops = (_AROUND_DARK if dark else _AROUND) if scale == "diverging" else _AMOUNT_DARK if dark else _AMOUNT
    at = step / (STEPS - 1) * (len(stops) - 1)
    i = min(int(at), len(stops) - 2)
    return "#" + "".join(f"{round(a + (b - a) * (at - i)):02x}" for a, b in zip(stops[i], stops[i + 1], strict=True))


def style() -> str:
    """The classes of cells: `s0` to `s24` for amounts, `d0` to `d24` around zero; on dark pages too, but not on paper."""

    def rules(*, dark: bool) -> str:
        kinds: tuple[tuple[str, Scale], ...] = (("s", "linear"), ("d", "diverging"))
        return "".join(f".{k}{i}{{background:{colour(i, scale, dark=dark)}}}" for k, scale in kinds for i in range(STEPS))

    return f"{rules(dark=False)}@media screen and (prefers-color-scheme:dark){{{rules(dark=True)}}}"
