"""A report on the terminal: facts, as much of the tables as fits, heat maps as rows of blocks, and the verdict last."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from weightsmith._base.errors import printable
from weightsmith._base.report.blocks import Cell, Curves, Facts, HeatMap, Mark, Report, Table, written
from weightsmith._base.report.charts import limits_text, marks_of, scaled
from weightsmith._base.text import BOLD, colour, columns, result, say, section, show_fact, show_table

WIDTH = 80
"""Width of tables in a pipe or on a narrower terminal. Columns that do not fit appear on pages only."""
COLUMNS = 5
"""The first columns are always shown, even if a terminal must wrap them."""
ROWS = 200
"""The most rows of a table that are shown."""
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "12345678"
_MARKS = {Mark.SAME: "=", Mark.NOTHING: "·", Mark.FULL: "F", Mark.HIGH: "H", Mark.NAN: "N", Mark.INFINITE: "I", Mark.BOTH: "X"}
_MARKS |= {Mark.NEW: "+", Mark.UNDEFINED: "?"}
_LOW, _MIDDLE, _HIGH, _BAD = "34", "36", "33", "31"


def show_report(report: Report, *, details: bool = False) -> None:
    """Print a report to stdout, nothing wider than the terminal, but for words that are.

    details  with the tables that heat maps lead to, of which each tensor has a row
    """
    first = True
    for block in report.blocks:
        if isinstance(block, Facts):
            if not first:
                section(block.title)
            _show_facts(block)
            first = False
    for block in report.blocks:
        if isinstance(block, Table) and len(block.columns) > 1 and (details or not block.name):
            _show_table(block, first=first)
            first = False
    for heat in _maps(report):
        _show_map(heat)
        first = False
    if report.summary and not first:
        result()
    for i, sentence in enumerate(report.summary):
        say(colour(printable(sentence), BOLD, sys.stdout) if i == 0 and _short(sentence) else printable(sentence))


def _maps(report: Report) -> Iterator[HeatMap]:
    """The heat maps of a report; of maps that are compared the lines by layer, a row for each."""
    compared = any(isinstance(block, HeatMap) and block.group for block in report.blocks)
    for block in report.blocks:
        if isinstance(block, HeatMap) and not block.group:
            yield block
        elif isinstance(block, Curves) and compared and block.series:
            names, values = zip(*block.series, strict=True)
            columns = tuple(str(block.first + i) for i in range(max(map(len, values))))
            yield HeatMap(block.title, names, columns, values, block.unit, axis=block.x)


def _short(sentence: str) -> bool:
    """It needs one line: a colour does not go around a break."""
    return len(sentence) <= (columns(sys.stdout) or WIDTH)


def _lower(title: str) -> str:
    """A title as a heading; letters that stand for models stay."""
    return title[:1].lower() + title[1:]


def _show_facts(block: Facts) -> None:
    width = max(len(name) for name, _ in block.facts)
    for name, value in block.facts:
        show_fact(name, printable(written(value)), width)


def _show_table(table: Table, *, first: bool) -> None:
    if first:
        result(colour(printable(_lower(table.title)), BOLD, sys.stdout))
    else:
        section(_lower(table.title))
    rows = [
        tuple(printable(written(value, column.unit)) for value, column in zip(row, table.columns, strict=True))
        for row in table.rows[:ROWS]
    ]
    heads = tuple(column.name for column in table.columns)
    room, shown = max(WIDTH, columns(sys.stdout) or 0) + 2, 0
    for i, cells in enumerate(zip(heads, *rows, strict=True)):
        room -= max(map(len, cells)) + 2
        if room >= 0 or i < COLUMNS:
            shown = i + 1
    right = {i for i, column in enumerate(table.columns) if column.unit != "text"}
    show_table(heads[:shown], [row[:shown] for row in rows], right=right)
    if len(table.rows) > ROWS:
        say(f"and {len(table.rows) - ROWS:,} more")


# ---- Heat maps: a character for each layer.


def _show_map(heat: HeatMap) -> None:
    """A row of blocks for each part; layers that do not fit follow below."""
    section(_lower(heat.title))
    wide = _encodes()
    names = [printable(name) for name in heat.rows]
    width = max(columns(sys.stdout) or WIDTH, 20)
    label = min(max(map(len, names)), width // 2 - 2)
    room = width - label - 2
    colours = [scaled(row, heat.scale, heat.limits) for row in heat.values]
    for start in range(0, len(heat.columns), room):
        end = min(len(heat.columns), start + room)
        for name, values, shares in zip(names, heat.values, colours, strict=True):
            text = "".join(_block(v, share, wide=wide) for v, share in zip(values[start:end], shares[start:end], strict=True))
            result(f"{_cut(name, label):<{label}}  {text}")
        first, last = heat.columns[start], heat.columns[end - 1]
        result(f"{'':<{label}}  {heat.axis} {first}{f' to {last}' if last != first else ''}")
    for line in _legend(heat, wide=wide):
        say(line)


def _cut(name: str, width: int) -> str:
    """The end of a name tells it from the others."""
    return name if len(name) <= width else f"...{name[len(name) - width + 3 :]}"


def _encodes() -> bool:
    try:
        _BLOCKS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def _block(value: Cell, share: float | None, *, wide: bool) -> str:
    if value is None:
        return " "
    if share is None:
        mark = value if isinstance(value, Mark) else Mark.UNDEFINED
        bad = mark in (Mark.NAN, Mark.INFINITE, Mark.BOTH)
        sign = _MARKS[mark] if wide or mark is not Mark.NOTHING else "."
        return colour(sign, _BAD, sys.stdout) if bad else sign
    level = min(7, int(share * 8))
    code = _LOW if level < 3 else _MIDDLE if level < 5 else _HIGH
    return colour((_BLOCKS if wide else _ASCII)[level], code, sys.stdout)


def _legend(heat: HeatMap, *, wide: bool) -> Iterator[str]:
    blocks = _BLOCKS if wide else _ASCII
    if heat.limits is not None:
        yield f"{blocks[0]} to {blocks[-1]}: {limits_text(heat)}"
    signs = [f"{_MARKS[m] if wide or m is not Mark.NOTHING else '.'} {m.meaning}" for m in marks_of(heat)]
    if signs:
        yield ", ".join(signs)
