"""Heat maps as tables of a page: as wide as the page, readable without its script, and with it by pointer, tap and keyboard.

Cells have the classes of `colours.style()`, or `m-` and the key of a mark, whose patterns are in charts.css. charts.js says the
value of a cell, unfolds experts and moves with the arrow keys; it takes names and numbers from `HeatMap.to_json()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from weightsmith._base.pages.colours import STEPS, scaled, step_of
from weightsmith._base.pages.svg import extremes, limits_text, marks_of, ticks
from weightsmith._base.pages.values import Cell, HeatMap, Mark, safe

_SYMBOLS = 24
"""With more columns than this, a map has no room for words in its cells."""


def grid(found: HeatMap, number: int, *, titled: bool = True) -> str:
    """A heat map as a figure. number: of its JSON on the page; titled: with its title."""
    narrow = " narrow" if len(found.columns) > _SYMBOLS else ""
    label = safe(f"{found.title}: {extremes(found)}")
    caption = f"<figcaption>{safe(found.title)}</figcaption>" if titled else ""
    rows = "".join(_row(found, i) for i in range(len(found.rows)))
    axis = safe(f"{found.axis} ({found.prefix.rstrip('.')})" if found.prefix else found.axis)
    shown = ticks(len(found.columns))
    cells = "".join(
        f"<td colspan={end - start}>{safe(found.columns[start])}</td>" for start, end in pairwise([*shown, len(found.columns)])
    )
    longest = max((len(name) + 6 * any(fold.row == name for fold in found.folds) for name in found.rows), default=0)
    foot = f'<tfoot aria-hidden="true"><tr><th>{axis}</th>{cells}</tr></tfoot>'
    return (
        f'<figure class="heat{narrow}" data-chart={number}>{caption}<div class="scroll">'
        f'<table role="grid" aria-label="{label}" style="--n:{len(found.columns)};--w:{longest}">'
        f'<tbody>{rows}</tbody>{foot}</table></div><p class="said" role="status" aria-live="polite"></p></figure>'
    )


def _row(found: HeatMap, row: int) -> str:
    name = safe(found.rows[row])
    fold = next((fold for fold in found.folds if fold.row == found.rows[row]), None)
    head = f'<span title="{name}"><bdi>{name}</bdi></span>'
    if fold is not None:
        head += f'<button type="button" class="fold" aria-expanded="false" title="show each expert">{len(fold.rows)}</button>'
    return f"<tr><th scope=row>{head}</th>{''.join(_cells(found, found.values[row]))}</tr>"


def _cells(found: HeatMap, values: Sequence[Cell]) -> Iterator[str]:
    kind = "d" if found.scale == "diverging" else "s"
    for value, share in zip(values, scaled(values, found.scale, found.limits), strict=True):
        if share is not None:
            yield f"<td class={kind}{step_of(share)}></td>"
        elif value is None:
            yield "<td></td>"
        else:
            mark = value if isinstance(value, Mark) else Mark.UNDEFINED
            yield f"<td class=m-{mark.key}>{safe(mark.symbol) if len(found.columns) <= _SYMBOLS else ''}</td>"


def legend(maps: Sequence[HeatMap]) -> str:
    """The scale of one map, or of several with one, and the meaning of their marks."""
    first = next((found for found in maps if found.limits is not None), None)
    parts = []
    if first is not None:
        kind = "d" if first.scale == "diverging" else "s"
        bar = "".join(f"<i class={kind}{step}></i>" for step in range(STEPS))
        low, high = limits_text(first).split(" to ")
        parts.append(f'<span>{safe(low)}</span><span class="bar" aria-hidden="true">{bar}</span><span>{safe(high)}</span>')
    for mark in dict.fromkeys(mark for found in maps for mark in marks_of(found)):
        parts.append(f'<span class="mark"><i class=m-{mark.key}></i>{safe(mark.meaning)}</span>')
    return f'<p class="legend">{"".join(parts)}</p>' if parts else ""
