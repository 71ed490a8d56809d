"""The charts of a report: colours, and heat maps and curves as SVG or as tables of a page.

SVG (`heat_map`, `curves`) stands beside model cards; its lines and text have the page's colour. On a page a heat map is a table
(`grid`), as wide as the page, readable without its script, and with it by pointer, tap and keyboard. Its cells have the classes
of `style()`, or `m-` and the key of a mark, whose patterns are in charts.css. charts.js says the value of a cell, unfolds
experts and moves with the arrow keys; it takes names and numbers from `HeatMap.to_json()`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from weightsmith._base.report.blocks import Cell, Curves, HeatMap, Mark, Scale, Unit, safe, written
from weightsmith._base.text import count

# ---- Colours: one scale for amounts, one around zero, for light and for dark pages.
#
# Lightness falls or rises all along a scale (on both sides of zero, where it is neutral), so that it reads in grey, in print
# and with every kind of colour blindness. On a light page more is darker, on a dark page more is lighter.

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


# ---- SVG

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


def heat_map(heat: HeatMap) -> str:
    """A heat map: a row for each part, a column for each layer, then the scale and the marks."""
    first_x = 12 + _CHARACTER * max((len(name) for name in heat.rows), default=0)
    cell = max(6, min(26, 720 // max(1, len(heat.columns))))
    height = _CELL_HEIGHT * len(heat.rows)
    marks = marks_of(heat)
    width = max(first_x + cell * len(heat.columns) + 12, first_x + 300)
    below = height + 34
    limits, parts = heat.limits, [_opening(width, below + 16 + _CELL_HEIGHT * len(marks), f"{heat.title}: {extremes(heat)}")]
    tiles = "".join(
        f'<pattern id="wm-{mark.key}" width="6" height="6" patternUnits="userSpaceOnUse">{PATTERNS[mark]}</pattern>'
        for mark in marks
    )
    parts.append(f"<defs>{tiles}</defs>" if tiles else "")
    for i, name in enumerate(heat.rows):
        y = _CELL_HEIGHT * i
        parts.append(f'<text x="{first_x - 6:.0f}" y="{y + 11}" text-anchor="end">{safe(name)}</text>')
        for j, (value, share) in enumerate(zip(heat.values[i], scaled(heat.values[i], heat.scale, limits), strict=True)):
            if value is not None:
                parts.append(
                    _cell(first_x + cell * j, y, cell, share, value, heat, f"{cell_name(heat, i, j)}: {said(value, heat)}")
                )
    for j in ticks(len(heat.columns)):
        x = first_x + cell * (j + 0.5)
        parts.append(f'<text x="{x:.0f}" y="{height + 12}" text-anchor="middle">{safe(heat.columns[j])}</text>')
    parts.append(f'<text x="{first_x - 6:.0f}" y="{height + 12}" text-anchor="end">{safe(heat.axis)}</text>')
    parts.append(_legend(heat, marks, first_x, below))
    return "".join([*parts, "</svg>"])


def said(value: Cell, heat: HeatMap) -> str:
    """A cell in words."""
    if isinstance(value, float | int) and math.isfinite(value):
        return written(value, heat.unit)
    return (value if isinstance(value, Mark) else Mark.UNDEFINED).meaning


def cell_name(heat: HeatMap, row: int, column: int) -> str:
    """The place of a cell in words: `layer 3, self_attn.q_proj`."""
    return f"{heat.axis} {heat.columns[column]}, {heat.rows[row]}"


def ticks(columns: int) -> list[int]:
    """Columns that have a label: about twelve.

    >>> ticks(5), ticks(30), ticks(126)[-2:]
    ([0, 1, 2, 3, 4], [0, 5, 10, 15, 20, 25], [100, 120])
    """
    return list(range(0, columns, max(1, round(_step(max(1, columns) / 12)))))


def _cell(x: float, y: float, width: float, share: float | None, value: Cell, heat: HeatMap, title: str = "") -> str:
    about = f"<title>{safe(title)}</title>" if title else ""
    box = f'<rect x="{x:.0f}" y="{y:.0f}" width="{width - 1:.0f}" height="{_CELL_HEIGHT - 1}"'
    if share is not None:
        return f'{box} fill="{colour(step_of(share), heat.scale)}">{about}</rect>'
    mark = value if isinstance(value, Mark) else Mark.UNDEFINED
    return f'{box} fill="url(#wm-{mark.key})" stroke="#999" stroke-width=".5">{about}</rect>'


def marks_of(heat: HeatMap) -> dict[Mark, int]:
    """The marks of a map, in their order, and how many cells have each."""
    numbers = Counter(
        value if isinstance(value, Mark) else Mark.UNDEFINED
        for row in heat.values
        for value in row
        if value is not None and (isinstance(value, Mark) or not math.isfinite(value))
    )
    return {mark: numbers[mark] for mark in Mark if numbers[mark]}


def extremes(heat: HeatMap) -> str:
    """The smallest and the largest number, with their places, and the marks, for those who do not see the cells."""
    cells = [
        (value, cell_name(heat, i, j))
        for i, row in enumerate(heat.values)
        for j, value in enumerate(row)
        if isinstance(value, float | int) and math.isfinite(value)
    ]
    text = "no numbers"
    if cells:
        low, high = min(cells), max(cells)
        text = f"from {written(low[0], heat.unit)} ({low[1]}) to {written(high[0], heat.unit)} ({high[1]})"
    return "; ".join([text, *(f"{mark.meaning}: {count(cells, 'cell')}" for mark, cells in marks_of(heat).items())])


def _legend(heat: HeatMap, marks: Iterable[Mark], x: float, y: float) -> str:
    """The scale, and a line for each mark."""
    parts = []
    if heat.limits is not None:
        parts += [
            f'<rect x="{x + 5 * i:.0f}" y="{y:.0f}" width="5" height="9" fill="{colour(i, heat.scale)}"/>' for i in range(STEPS)
        ]
        parts.append(f'<text x="{x + 5 * STEPS + 8:.0f}" y="{y + 8:.0f}">{safe(limits_text(heat))}</text>')
    for i, mark in enumerate(marks):
        below = y + _CELL_HEIGHT * (i + 1)
        parts.append(_cell(x, below, 26, None, mark, heat))
        parts.append(f'<text x="{x + 34:.0f}" y="{below + 10:.0f}">{safe(mark.meaning)}</text>')
    return "".join(parts)


def limits_text(heat: HeatMap) -> str:
    """Labels of the scale's ends."""
    low, high = (written(value, heat.unit) for value in heat.limits or ())
    return f"{low} to {high}{' (logarithmic)' if heat.scale == 'log' else ''}"


def picture(svg: str) -> bytes:
    """An SVG as a file of its own: black on white, whatever is behind it."""
    at = svg.index(">") + 1
    return (svg[:at].replace("currentColor", "#1d2126") + '<rect width="100%" height="100%" fill="#fff"/>' + svg[at:]).encode()


def curves(chart: Curves) -> str:
    """Lines with axes and a legend."""
    points = [value for _, values in chart.series for run in _runs(values, log=chart.log) for _, value in run]
    length = max((len(values) for _, values in chart.series), default=0)
    height = _HEIGHT + 16 * len(chart.series)
    about = ", ".join(name for name, _ in chart.series)
    left, right, top, bottom = 70.0, _WIDTH - 12.0, 12.0, _HEIGHT - 44.0
    plot = f"{left:.0f} {right:.0f} {top:.0f} {bottom:.0f}"
    parts = [_opening(_WIDTH, height, f"{chart.title}: {chart.y} by {chart.x} of {about}", plot)]
    if not points or not length:
        return "".join([*parts, '<text x="60" y="40">no numbers</text></svg>'])
    low, high = min(points), max(points)
    low, high = (low, high) if chart.log else (min(0.0, low), max(0.0, high))

    def y_of(value: float) -> float:
        low_, high_, at = (math.log(low), math.log(high), math.log(value)) if chart.log else (low, high, value)
        return bottom - (bottom - top) * ((at - low_) / (high_ - low_) if high_ > low_ else 0.5)

    def x_of(i: int) -> float:
        return left + (right - left) * (i / (length - 1) if length > 1 else 0.5)

    for tick in _ticks(low, high, log=chart.log):
        y = y_of(tick)
        parts.append(f'<path class="grid" stroke="#c8ced6" d="M{left:.0f} {y:.1f}H{right:.0f}"/>')
        parts.append(f'<text x="{left - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{_tick(tick, chart.unit)}</text>')
    step = max(1, round(_step(length / 10)))
    for i in range(-chart.first % step, length, step):
        label = f'<text x="{x_of(i):.1f}" y="{bottom + 16:.0f}" text-anchor="middle">{i + chart.first}</text>'
        parts.append(label)
    parts.append(f'<text x="{(left + right) / 2:.0f}" y="{bottom + 34:.0f}" text-anchor="middle">{safe(chart.x)}</text>')
    for number, (name, values) in enumerate(chart.series):
        line = _LINES[number % len(_LINES)]
        for run in _runs(values, log=chart.log):
            path = "L".join(f"{x_of(i):.1f} {y_of(value):.1f}" for i, value in run)
            parts.append(f'<path fill="none" stroke="{line}" stroke-width="1.6" d="M{path}"/>')
            parts += [
                f'<circle cx="{x_of(i):.1f}" cy="{y_of(value):.1f}" r="2.4" fill="{line}">'
                f"<title>{safe(f'{name}, {i + chart.first}: {written(value, chart.unit)}')}</title></circle>"
                for i, value in run
            ]
        y = _HEIGHT + 16 * number
        parts.append(f'<path stroke="{line}" stroke-width="3" d="M{left:.0f} {y:.0f}h18"/>')
        parts.append(f'<text x="{left + 26:.0f}" y="{y + 4:.0f}">{safe(name)}</text>')
    return "".join([*parts, "</svg>"])


def _tick(value: float, unit: Unit) -> str:
    """A round number at an axis.

    >>> _tick(0.05, "number"), _tick(0.2, "share")
    ('0.05', '20%')
    """
    return f"{100 * value:.6g}%" if unit == "share" else f"{value:.6g}"


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


# ---- Heat maps as tables of a page

_SYMBOLS = 24
"""With more columns than this, a map has no room for words in its cells."""


def grid(heat: HeatMap, number: int, *, titled: bool = True) -> str:
    """A heat map as a figure. number: of its JSON on the page; titled: with its title."""
    narrow = " narrow" if len(heat.columns) > _SYMBOLS else ""
    label = safe(f"{heat.title}: {extremes(heat)}")
    caption = f"<figcaption>{safe(heat.title)}</figcaption>" if titled else ""
    rows = "".join(_row(heat, i) for i in range(len(heat.rows)))
    axis = safe(f"{heat.axis} ({heat.prefix.rstrip('.')})" if heat.prefix else heat.axis)
    shown = ticks(len(heat.columns))
    cells = "".join(
        f"<td colspan={end - start}>{safe(heat.columns[start])}</td>" for start, end in pairwise([*shown, len(heat.columns)])
    )
    longest = max((len(name) + 6 * any(fold.row == name for fold in heat.folds) for name in heat.rows), default=0)
    foot = f'<tfoot aria-hidden="true"><tr><th>{axis}</th>{cells}</tr></tfoot>'
    return (
        f'<figure class="heat{narrow}" data-chart={number}>{caption}<div class="scroll">'
        f'<table role="grid" aria-label="{label}" style="--n:{len(heat.columns)};--w:{longest}">'
        f'<tbody>{rows}</tbody>{foot}</table></div><p class="said" role="status" aria-live="polite"></p></figure>'
    )


def _row(heat: HeatMap, row: int) -> str:
    name = safe(heat.rows[row])
    fold = next((fold for fold in heat.folds if fold.row == heat.rows[row]), None)
    head = f'<span title="{name}"><bdi>{name}</bdi></span>'
    if fold is not None:
        head += f'<button type="button" class="fold" aria-expanded="false" title="show each expert">{len(fold.rows)}</button>'
    return f"<tr><th scope=row>{head}</th>{''.join(_cells(heat, heat.values[row]))}</tr>"


def _cells(heat: HeatMap, values: Sequence[Cell]) -> Iterator[str]:
    kind = "d" if heat.scale == "diverging" else "s"
    for value, share in zip(values, scaled(values, heat.scale, heat.limits), strict=True):
        if share is not None:
            yield f"<td class={kind}{step_of(share)}></td>"
        elif value is None:
            yield "<td></td>"
        else:
            mark = value if isinstance(value, Mark) else Mark.UNDEFINED
            yield f"<td class=m-{mark.key}>{safe(mark.symbol) if len(heat.columns) <= _SYMBOLS else ''}</td>"


def legend(maps: Sequence[HeatMap]) -> str:
    """The scale of one map, or of several with one, and the meaning of their marks."""
    first = next((heat for heat in maps if heat.limits is not None), None)
    parts = []
    if first is not None:
        kind = "d" if first.scale == "diverging" else "s"
        bar = "".join(f"<i class={kind}{step}></i>" for step in range(STEPS))
        low, high = limits_text(first).split(" to ")
        ends = f'<span>{safe(low)}</span><span class="bar" aria-hidden="true">{bar}</span><span>{safe(high)}</span>'
        parts.append(f'<span class="scale">{ends}</span>')
    for mark in dict.fromkeys(mark for heat in maps for mark in marks_of(heat)):
        parts.append(f'<span class="mark"><i class=m-{mark.key}></i>{safe(mark.meaning)}</span>')
    return f'<p class="legend">{"".join(parts)}</p>' if parts else ""
