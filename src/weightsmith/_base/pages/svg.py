"""Heat maps and curves as SVG: files beside a model card, and notebooks. Lines and text have the page's colour."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from weightsmith._base.pages.colours import STEPS, colour, scaled, step_of
from weightsmith._base.pages.values import Cell, Curves, Fold, HeatMap, Mark, Scale, Unit, safe, span_of, written
from weightsmith._base.text import count

_LINES = ("#3b6fb6", "#c05a2b", "#3f8f4f", "#8a56a8", "#b8860b", "#4a9aa8", "#a83e5d", "#6b6b6b")
_CELL_HEIGHT = 15
_WIDTH, _HEIGHT = 640, 260
_CHARACTER = 6.2
"""Width of a character of a label."""

PATTERNS: Mapping[Mark, str] = {
    Mark.SAME: '<path d="M0 2.5h6M0 4.5h6" stroke="#888" stroke-width=".8"/>',
    Mark.NOTHING: '<circle cx="3" cy="3" r=".8" fill="#999"/>',
    Mark.FULL: '<path d="M-1 7L7-1M-1 1l2-2M5 7l2-2" stroke="#555"/>',
    Mark.HIGH: '<path d="M1.5 0v6M4.5 0v6" stroke="#555" stroke-width=".8"/>',
    Mark.NAN: '<path d="M0 0l6 6M6 0L0 6" stroke="#c02222"/>',
    Mark.INFINITE: '<path d="M-1-1l8 8M-1 5l2 2M5-1l2 2" stroke="#c02222" stroke-width="2"/>',
    Mark.BOTH: '<path d="M0 0l6 6M6 0L0 6M3 0v6M0 3h6" stroke="#c02222"/>',
    Mark.NEW: '<path d="M3 1v4M1 3h4" stroke="#555" stroke-width=".9"/>',
    Mark.UNDEFINED: '<circle cx="1.5" cy="1.5" r="1" fill="#555"/><circle cx="4.5" cy="4.5" r="1" fill="#555"/>',
}
"""A tile of 6 x 6 for each mark: marks differ in print and to colour-blind eyes."""


def heat_map(found: HeatMap) -> str:
    """A heat map: a row for each part, a column for each layer, then the scale and the marks."""
    left = 12 + _CHARACTER * max((len(name) for name in found.rows), default=0)
    cell = max(6, min(26, 720 // max(1, len(found.columns))))
    height = _CELL_HEIGHT * len(found.rows)
    marks = marks_of(found)
    width = max(left + cell * len(found.columns) + 12, left + 300)
    below = height + 34
    limits, parts = found.limits, [_opening(width, below + 16 + _CELL_HEIGHT * len(marks), f"{found.title}: {extremes(found)}")]
    tiles = "".join(
        f'<pattern id="wm-{mark.key}" width="6" height="6" patternUnits="userSpaceOnUse">{PATTERNS[mark]}</pattern>'
        for mark in marks
    )
    parts.append(f"<defs>{tiles}</defs>" if tiles else "")
    for i, name in enumerate(found.rows):
        y = _CELL_HEIGHT * i
        parts.append(f'<text x="{left - 6:.0f}" y="{y + 11}" text-anchor="end">{safe(name)}</text>')
        for j, (value, share) in enumerate(zip(found.values[i], scaled(found.values[i], found.scale, limits), strict=True)):
            if value is not None:
                parts.append(
                    _cell(left + cell * j, y, cell, share, value, found, f"{cell_name(found, i, j)}: {said(value, found)}")
                )
    for j in ticks(len(found.columns)):
        x = left + cell * (j + 0.5)
        parts.append(f'<text x="{x:.0f}" y="{height + 12}" text-anchor="middle">{safe(found.columns[j])}</text>')
    parts.append(f'<text x="{left - 6:.0f}" y="{height + 12}" text-anchor="end">{safe(found.axis)}</text>')
    parts.append(_legend(found, marks, left, below))
    return "".join([*parts, "</svg>"])


def said(value: Cell, found: HeatMap) -> str:
    """A cell in words."""
    if isinstance(value, float | int) and math.isfinite(value):
        return written(value, found.unit)
    return (value if isinstance(value, Mark) else Mark.UNDEFINED).meaning


def cell_name(found: HeatMap, row: int, column: int) -> str:
    """The place of a cell in words: `layer 3, self_attn.q_proj`."""
    return f"{found.axis} {found.columns[column]}, {found.rows[row]}"


def ticks(columns: int) -> list[int]:
    """Columns that have a label: about twelve.

    >>> ticks(5), ticks(30), ticks(126)[-2:]
    ([0, 1, 2, 3, 4], [0, 5, 10, 15, 20, 25], [100, 120])
    """
    return list(range(0, columns, max(1, round(_step(max(1, columns) / 12)))))


def _cell(x: float, y: float, width: float, share: float | None, value: Cell, found: HeatMap, title: str = "") -> str:
    about = f"<title>{safe(title)}</title>" if title else ""
    box = f'<rect x="{x:.0f}" y="{y:.0f}" width="{width - 1:.0f}" height="{_CELL_HEIGHT - 1}"'
    if share is not None:
        return f'{box} fill="{colour(step_of(share), found.scale)}">{about}</rect>'
    mark = value if isinstance(value, Mark) else Mark.UNDEFINED
    return f'{box} fill="url(#wm-{mark.key})" stroke="#999" stroke-width=".5">{about}</rect>'


def marks_of(found: HeatMap) -> dict[Mark, int]:
    """The marks of a map, in their order, and how many cells have each."""
    numbers = Counter(
        value if isinstance(value, Mark) else Mark.UNDEFINED
        for row in found.values
        for value in row
        if value is not None and (isinstance(value, Mark) or not math.isfinite(value))
    )
    return {mark: numbers[mark] for mark in Mark if numbers[mark]}


def extremes(found: HeatMap) -> str:
    """The smallest and the largest number, with their places, and the marks, for those who do not see the cells."""
    cells = [
        (value, cell_name(found, i, j))
        for i, row in enumerate(found.values)
        for j, value in enumerate(row)
        if isinstance(value, float | int) and math.isfinite(value)
    ]
    text = "no numbers"
    if cells:
        low, high = min(cells), max(cells)
        text = f"from {written(low[0], found.unit)} ({low[1]}) to {written(high[0], found.unit)} ({high[1]})"
    return "; ".join([text, *(f"{mark.meaning}: {count(cells, 'cell')}" for mark, cells in marks_of(found).items())])


def _legend(found: HeatMap, marks: Iterable[Mark], x: float, y: float) -> str:
    """The scale, and a line for each mark."""
    parts = []
    if found.limits is not None:
        parts += [
            f'<rect x="{x + 5 * i:.0f}" y="{y:.0f}" width="5" height="9" fill="{colour(i, found.scale)}"/>'
            for i in range(STEPS)
        ]
        parts.append(f'<text x="{x + 5 * STEPS + 8:.0f}" y="{y + 8:.0f}">{safe(limits_text(found))}</text>')
    for i, mark in enumerate(marks):
        below = y + _CELL_HEIGHT * (i + 1)
        parts.append(_cell(x, below, 26, None, mark, found))
        parts.append(f'<text x="{x + 34:.0f}" y="{below + 10:.0f}">{safe(mark.meaning)}</text>')
    return "".join(parts)


def limits_text(found: HeatMap) -> str:
    """Labels of the scale's ends."""
    low, high = (written(value, found.unit) for value in found.limits or ())
    return f"{low} to {high}{' (logarithmic)' if found.scale == 'log' else ''}"


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
    left, right, top, bottom = 70.0, _WIDTH - 12.0, 12.0, _HEIGHT - 44.0
    plot = f"{left:.0f} {right:.0f} {top:.0f} {bottom:.0f}"
    parts = [_opening(_WIDTH, height, f"{found.title}: {found.y} by {found.x} of {about}", plot)]
    if not points or not length:
        return "".join([*parts, '<text x="60" y="40">no numbers</text></svg>'])
    low, high = min(points), max(points)
    low, high = (low, high) if found.log else (min(0.0, low), max(0.0, high))

    def y_of(value: float) -> float:
        low_, high_, at = (math.log(low), math.log(high), math.log(value)) if found.log else (low, high, value)
        return bottom - (bottom - top) * ((at - low_) / (high_ - low_) if high_ > low_ else 0.5)

    def x_of(i: int) -> float:
        return left + (right - left) * (i / (length - 1) if length > 1 else 0.5)

    for tick in _ticks(low, high, log=found.log):
        y = y_of(tick)
        parts.append(f'<path class="grid" stroke="#c8ced6" d="M{left:.0f} {y:.1f}H{right:.0f}"/>')
        parts.append(f'<text x="{left - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{_tick(tick, found.unit)}</text>')
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


def _tick(value: float, unit: Unit) -> str:
    """A round number at an axis.

    >>> _tick(0.05, "number"), _tick(0.2, "share")
    ('0.05', '20 %')
    """
    return f"{100 * value:.6g} %" if unit == "share" else f"{value:.6g}"


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


def _opening(width: float, height: float, label: str, plot: str = "") -> str:
    """plot: where a script finds the lines: x of the first and last values, top and bottom."""
    where = f'data-plot="{plot}" ' if plot else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{safe(label)}" {where}'
        f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="currentColor">'
    )


# ---- Heat maps of numbers that belong to places in a model.

T = TypeVar("T")
_NUMBERS = re.compile(r"\d+")


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
    scale: Scale = "linear",
    detail: str = "",
    span: tuple[float, float] | None = None,
    group: str = "",
    name: Callable[[T], str] | None = None,
) -> list[HeatMap]:
    """One heat map for each stack of layers, all with one scale; without those where nothing differs or nothing applies.

    items  what is where; of what is outside the layers nothing is shown
    value  one number for all items of a part in a layer, or a mark; nan: `Mark.UNDEFINED`
    span, group  see `HeatMap`
    name   of an item's tensor; with it, parts that have several tensors in a layer (experts) can be unfolded
    """
    stacks: dict[str, dict[tuple[str, int], list[T]]] = {}
    for place, item in items:
        if place.stack:
            stacks.setdefault(place.stack, {}).setdefault((place.part, place.layer), []).append(item)
    found: list[HeatMap] = []
    for stack, own in stacks.items():
        layers, parts = sorted({layer for _, layer in own}), tuple(dict.fromkeys(part for part, _ in own))
        values = tuple(tuple(_defined(value(own[part, at])) if (part, at) in own else None for at in layers) for part in parts)
        if any(value not in (None, Mark.SAME, Mark.NOTHING) for row in values for value in row):
            titled = f"{title} ({stack})" if len(stacks) > 1 else title
            folds = () if name is None else tuple(_folds(stack, parts, layers, own, value, name))
            columns = tuple(map(str, layers))
            found.append(
                HeatMap(titled, parts, columns, values, unit, about, scale, detail, span, stack, group=group, folds=folds)
            )
    common = span or span_of((v for one in found for row in one.values for v in row), scale)
    return [replace(one, span=common) for one in found]


def _folds(
    stack: str,
    parts: Sequence[str],
    layers: Sequence[int],
    own: Mapping[tuple[str, int], Sequence[T]],
    value: Callable[[Sequence[T]], float | Mark],
    name: Callable[[T], str],
) -> Iterator[Fold]:
    """The rows of the experts of each part that has some."""
    for part in parts:
        rows: dict[str, dict[int, T]] = {}
        for at in layers:
            for item in own.get((part, at), ()):
                rows.setdefault(_expert(name(item), f"{stack}{at}."), {})[at] = item
        if len(rows) > 1 and sum(map(len, rows.values())) == sum(len(own.get((part, at), ())) for at in layers):
            ordered = sorted(rows, key=lambda row: [int(n) for n in _NUMBERS.findall(row)])
            values = tuple(
                tuple(_defined(value([rows[row][at]])) if at in rows[row] else None for at in layers) for row in ordered
            )
            if any(value not in (None, Mark.SAME, Mark.NOTHING) for row in values for value in row):
                yield Fold(part, tuple(ordered), values)


def _expert(name: str, layer: str) -> str:
    """The numbers in a tensor's name, which tell it from the others of its part.

    >>> _expert("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3.")
    'expert 7'
    """
    return f"expert {'.'.join(_NUMBERS.findall(name.removeprefix(layer)))}"


def _defined(value: float | Mark) -> float | Mark:
    return value if isinstance(value, Mark) or not math.isnan(value) else Mark.UNDEFINED
