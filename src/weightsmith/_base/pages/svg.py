"""Heat maps and curves as SVG. Colours of lines and text follow the page; those of cells are the same on light and dark."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from weightsmith._base.pages.values import Curves, HeatMap, Mark, Unit, safe, written
from weightsmith._base.text import count

# Dark to light through blue and green; adjacent steps differ in lightness, so that it reads in grey and to colour-blind eyes.
_SCALE = ((48, 18, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_LINES = ("#3b6fb6", "#c05a2b", "#3f8f4f", "#8a56a8", "#b8860b", "#4a9aa8", "#a83e5d", "#6b6b6b")
_CELL_WIDTH, _CELL_HEIGHT = 26, 13
_WIDTH, _HEIGHT = 640, 260
_CHARACTER = 6.2
"""Width of a character of a label."""


def span_of(values: Iterable[float | Mark | None], *, log: bool) -> tuple[float, float] | None:
    """The smallest and the largest number that a scale can have; None if there is none."""
    known = [v for v in values if isinstance(v, float | int) and math.isfinite(v) and (v > 0 or not log)]
    return (min(known), max(known)) if known else None


def scaled(values: Sequence[float | Mark | None], *, log: bool, span: tuple[float, float] | None = None) -> list[float | None]:
    """Numbers from 0 to 1 for colours: the smallest is 0, the largest 1. None for what has no colour: a mark, nan, infinity.

    span  instead of the smallest and the largest

    >>> scaled([0.0, 5.0, 10.0, None, math.inf], log=False), scaled([0.0, 0.01, 1.0, Mark.NAN], log=True)
    ([0.0, 0.5, 1.0, None, None], [0.0, 0.0, 1.0, None])
    """
    transform = math.log if log else float
    low, high = map(transform, span or span_of(values, log=log) or (1.0, 1.0))

    def one(value: float | Mark | None) -> float | None:
        if not isinstance(value, float | int) or not math.isfinite(value):
            return None
        if log and value <= 0:
            return 0.0
        return (transform(value) - low) / (high - low) if high > low else 0.0

    return [one(value) for value in values]


def colour(share: float) -> str:
    """The colour of a number from 0 to 1.

    >>> colour(0.0), colour(1.0)
    ('#301254', '#fde725')
    """
    at = min(max(share, 0.0), 1.0) * (len(_SCALE) - 1)
    i = min(int(at), len(_SCALE) - 2)
    return "#" + "".join(f"{round(a + (b - a) * (at - i)):02x}" for a, b in zip(_SCALE[i], _SCALE[i + 1], strict=True))


def heat_map(found: HeatMap, places: Mapping[tuple[str, str], int] | None = None) -> str:
    """A heat map. places: numbers of (row, column), by which each cell leads to the rows of its table; None: no links."""
    left = 12 + _CHARACTER * max((len(name) for name in found.rows), default=0)
    top = 14 + _CHARACTER * 0.72 * max((len(name) for name in found.columns), default=0)  # labels are turned by 45 degrees
    reach = _CHARACTER * 0.72 * len(found.columns[-1]) if found.columns else 0
    marks = _marks(found)
    width = max(left + _CELL_WIDTH * len(found.columns) + reach + 8, left + 300 if marks else 0)
    height = top + _CELL_HEIGHT * (len(found.rows) + len(marks)) + 34
    every = max(1, -(-len(found.rows) // 48))
    shares = scaled([value for row in found.values for value in row], log=found.log, span=found.span)
    parts = [_opening(width, height, f"{found.title}: {_extremes(found)}")]
    for j, name in enumerate(found.columns):
        x, y = left + _CELL_WIDTH * (j + 0.55), top - 5
        parts.append(f'<text x="{x:.0f}" y="{y:.0f}" transform="rotate(-45 {x:.0f} {y:.0f})">{safe(name)}</text>')
    for i, name in enumerate(found.rows):
        y = top + _CELL_HEIGHT * i
        if i % every == 0 or i == len(found.rows) - 1:
            parts.append(f'<text x="{left - 5:.0f}" y="{y + 10:.0f}" text-anchor="end">{safe(name)}</text>')
        for j, column in enumerate(found.columns):
            value, share, x = found.values[i][j], shares[i * len(found.columns) + j], left + _CELL_WIDTH * j
            if value is not None:
                mark = value if isinstance(value, Mark) else Mark.UNDEFINED
                said = written(value, found.unit) if share is not None else mark.meaning
                cell = _cell(x, y, share, mark, f"{name}, {column}: {said}")
                if places is not None and found.detail:
                    cell = f'<a href="#{safe(found.detail)}" data-p="{places[name, column]}">{cell}</a>'
                parts.append(cell)
    parts.append(_legend(found, marks, left, top + _CELL_HEIGHT * len(found.rows) + 14))
    return "".join([*parts, "</svg>"])


def _cell(x: float, y: float, share: float | None, mark: Mark, title: str = "") -> str:
    """A colour; or, for what has none, an outlined box with the word of a mark."""
    about = f"<title>{safe(title)}</title>" if title else ""
    box = f'<rect x="{x:.0f}" y="{y:.0f}" width="{_CELL_WIDTH - 1}" height="{_CELL_HEIGHT - 1}"'
    if share is not None:
        return f'{box} fill="{colour(share)}">{about}</rect>'
    word = f'<text x="{x + _CELL_WIDTH / 2:.0f}" y="{y + 9:.0f}" text-anchor="middle" font-size="9">{safe(mark.symbol)}</text>'
    return f'{box} fill="#888" fill-opacity=".12">{about}</rect>{word}'


def _marks(found: HeatMap) -> dict[Mark, int]:
    """The marks of a map, in their order, and how many cells have each."""
    numbers = Counter(
        value if isinstance(value, Mark) else Mark.UNDEFINED
        for row in found.values
        for value in row
        if value is not None and (isinstance(value, Mark) or not math.isfinite(value))
    )
    return {mark: numbers[mark] for mark in Mark if numbers[mark]}


def _extremes(found: HeatMap) -> str:
    """The smallest and the largest number, with their places, and the marks, for those who do not see the cells."""
    cells = [
        (value, f"{found.rows[i]}, {found.columns[j]}")
        for i, row in enumerate(found.values)
        for j, value in enumerate(row)
        if isinstance(value, float | int) and math.isfinite(value)
    ]
    said = "no numbers"
    if cells:
        low, high = min(cells), max(cells)
        said = f"from {written(low[0], found.unit)} ({low[1]}) to {written(high[0], found.unit)} ({high[1]})"
    return "; ".join([said, *(f"{mark.meaning}: {count(cells, 'cell')}" for mark, cells in _marks(found).items())])


def _legend(found: HeatMap, marks: Iterable[Mark], x: float, y: float) -> str:
    """The scale, and a line for each mark."""
    span = found.span or span_of([value for row in found.values for value in row], log=found.log)
    parts = []
    if span is not None:
        parts += [f'<rect x="{x + 6 * i:.0f}" y="{y:.0f}" width="6" height="9" fill="{colour(i / 19)}"/>' for i in range(20)]
        low, high = (written(value, found.unit) for value in span)
        scale = " (logarithmic)" if found.log else ""
        parts.append(f'<text x="{x + 126:.0f}" y="{y + 8:.0f}">{safe(f"{low} to {high}{scale}")}</text>')
    for i, mark in enumerate(marks):
        below = y + _CELL_HEIGHT * (i + 1)
        parts += [_cell(x, below, None, mark), f'<text x="{x + 34:.0f}" y="{below + 9:.0f}">{safe(mark.meaning)}</text>']
    return "".join(parts)


def picture(svg: str) -> bytes:
    """An SVG as a file of its own: black on white, whatever is behind it."""
    at = svg.index(">") + 1
    return (svg[:at].replace("currentColor", "#1d2126") + '<rect width="100%" height="100%" fill="#fff"/>' + svg[at:]).encode()


def curves(found: Curves) -> str:
    """Lines with axes and a legend."""
    points = [value for _, values in found.series for run in _runs(values, log=found.log) for _, value in run]
    length = max((len(values) for _, values in found.series), default=0)
    height = _HEIGHT + 16 * len(found.series)
    about = ", ".join(name for name, _ in found.series)
    parts = [_opening(_WIDTH, height, f"{found.title}: {found.y} by {found.x} of {about}")]
    if not points or not length:
        return "".join([*parts, '<text x="60" y="40">no numbers</text></svg>'])
    low, high = min(points), max(points)
    low, high = (low, high) if found.log else (min(0.0, low), max(0.0, high))
    left, right, top, bottom = 70.0, _WIDTH - 12.0, 12.0, _HEIGHT - 44.0

    def y_of(value: float) -> float:
        low_, high_, at = (math.log(low), math.log(high), math.log(value)) if found.log else (low, high, value)
        return bottom - (bottom - top) * ((at - low_) / (high_ - low_) if high_ > low_ else 0.5)

    def x_of(i: int) -> float:
        return left + (right - left) * (i / (length - 1) if length > 1 else 0.5)

    for tick in _ticks(low, high, log=found.log):
        y = y_of(tick)
        parts.append(f'<path class="grid" stroke="#c8ced6" d="M{left:.0f} {y:.1f}H{right:.0f}"/>')
        parts.append(f'<text x="{left - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{safe(written(tick, found.unit))}</text>')
    step = max(1, round(_step(length / 10)))
    for i in range(-found.first % step, length, step):
        label = f'<text x="{x_of(i):.1f}" y="{bottom + 16:.0f}" text-anchor="middle">{i + found.first}</text>'
        parts.append(label)
    parts.append(f'<text x="{(left + right) / 2:.0f}" y="{bottom + 34:.0f}" text-anchor="middle">{safe(found.x)}</text>')
    for number, (name, values) in enumerate(found.series):
        line = _LINES[number % len(_LINES)]
        for run in _runs(values, log=found.log):
            path = "L".join(f"{x_of(i):.1f} {y_of(value):.1f}" for i, value in run)
            parts.append(f'<path fill="none" stroke="{line}" stroke-width="1.6" d="M{path}"/>')
            parts += [
                f'<circle cx="{x_of(i):.1f}" cy="{y_of(value):.1f}" r="2.4" fill="{line}">'
                f"<title>{safe(f'{name}, {i + found.first}: {written(value, found.unit)}')}</title></circle>"
                for i, value in run
            ]
        y = _HEIGHT + 16 * number
        parts.append(f'<path stroke="{line}" stroke-width="3" d="M{left:.0f} {y:.0f}h18"/>')
        parts.append(f'<text x="{left + 26:.0f}" y="{y + 4:.0f}">{safe(name)}</text>')
    return "".join([*parts, "</svg>"])


def _runs(values: Sequence[float | None], *, log: bool) -> Iterator[list[tuple[int, float]]]:
    """Stretches of a line without holes."""
    run: list[tuple[int, float]] = []
    for i, value in enumerate(values):
        if value is not None and math.isfinite(value) and (value > 0 or not log):
            run.append((i, value))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _ticks(low: float, high: float, *, log: bool) -> list[float]:
    """Round numbers between two."""
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        step = max(1, (last - first) // 5)
        powers = [10.0**power for power in range(first, last + 1, step)]
        return [power for power in powers if low <= power <= high] or [low, high]
    if high <= low:
        return [low]
    apart = _step((high - low) / 5)
    return [apart * k for k in range(math.ceil(low / apart), math.floor(high / apart) + 1)]


def _step(least: float) -> float:
    """The smallest of … 0.5, 1, 2, 5, 10, 20 … that is not less.

    >>> _step(0.4), _step(3.1), _step(12)
    (0.5, 5.0, 20.0)
    """
    unit = 10.0 ** math.floor(math.log10(least))
    return next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= least)


def _opening(width: float, height: float, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{safe(label)}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="currentColor">'
    )


# ---- Heat maps of numbers that belong to places in a model.

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
        values = tuple(tuple(_defined(value(own[at, part])) if (at, part) in own else None for part in parts) for at in layers)
        if any(value not in (None, Mark.SAME, Mark.NOTHING) for row in values for value in row):
            name = f"{title} ({stack})" if len(stacks) > 1 else title
            rows = tuple(f"{stack}{layer}" for layer in layers)
            found.append(HeatMap(name, rows, parts, values, unit, about, log, detail, span))
    common = span or span_of([v for one in found for row in one.values for v in row], log=log)
    return [replace(one, span=common) for one in found]


def _defined(value: float | Mark) -> float | Mark:
    return value if isinstance(value, Mark) or not math.isnan(value) else Mark.UNDEFINED
