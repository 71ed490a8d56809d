"""A report as a page: one HTML file with its style, its script and its data, which loads nothing and sends nothing.

`in_cell` shows the same page in a cell of a notebook.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from weightsmith._base.errors import NOTHING_WRITTEN, OutputExists, StoreError, printable
from weightsmith._base.files import expand_user, real_path, write_whole
from weightsmith._base.redaction import redacted
from weightsmith._base.report.blocks import (
    Block,
    Code,
    Curves,
    Facts,
    HeatMap,
    Mark,
    Report,
    Table,
    Unit,
    Value,
    cell_json,
    rounded,
    safe,
    written,
)
from weightsmith._base.report.charts import curves, grid, legend, style
from weightsmith._base.text import count, json_text
from weightsmith._version import __version__

GENERATOR = '<meta name="generator" content="weightsmith '
"""In the first lines of every page."""
STATIC_ROWS = 50
"""The rows of a table that are in the document without its script, which shows all of them."""
SEARCHED_ROWS = 12
"""Tables with more rows have a search field."""
_TALL, _SHORT = 640, 360
"""Heights of a page in a notebook, with charts and without, in pixels."""
_DIGITS = 6
"""Significant digits of the numbers in a table; of a cosine nine, as it may be near 1."""

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "script-src 'unsafe-inline'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    )
)


def to_html(report: Report) -> str:
    """A report as one HTML document: the verdict, three numbers, charts; the rest is folded.

    What it shows is escaped: names of tensors, tokens and files are hostile until then. Readable without its script; with it,
    the cells of a heat map say their numbers and open their tensors, and tables have all rows and can be sorted, searched and
    saved.

    >>> from weightsmith._base.report.blocks import Facts, Report
    >>> report = Report("a and <b>", ("They are equal.",), (Facts("", (("changed", 0.5),)),))
    >>> "a and &lt;b&gt;" in to_html(report), "http-equiv=\\"Content-Security-Policy\\"" in to_html(report)
    (True, True)
    """
    title = safe(report.title)
    charts = [block for block in report.blocks if isinstance(block, HeatMap | Curves)]
    tables = [(i, block) for i, block in enumerate(report.blocks) if isinstance(block, Table)]
    content = {
        "title": _plain(report.title),
        "summary": [*map(_plain, report.summary)],
        "numbers": {_plain(name): _plain(number) for name, number in report.numbers},
        "models": {_plain(letter): _plain(name) for letter, name in report.models},
        "charts": [_plain_values(chart.to_json()) for chart in charts],
        "tables": [_packed(table, _identifier(table, i)) for i, table in tables],
    }
    data = json_text(content, allow_nan=False, separators=(",", ":"))
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8">{GENERATOR}{__version__}">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_asset('page.css')}{chart_files()['charts.css']}</style></head><body><main>",
            *_head(report),
            *_charts(report.blocks, charts),
            *(
                part
                for i, block in enumerate(report.blocks)
                if not isinstance(block, HeatMap | Curves)
                for part in _section(block, i, opened=not charts)
            ),
            "</main><footer>",
            '<p class="tools"><button class="json" type="button">Save the data (JSON)</button></p>',
            f"<p>Made by weightsmith {__version__}. This page loads nothing from the network.</p></footer>",
            # In JSON these escapes mean the same characters; `</script>` cannot appear.
            f'<script type="application/json" id="content">{data.replace("<", chr(92) + "u003c")}</script>',
            f"<script>{_asset('charts.js')}{_asset('page.js')}</script></body></html>",
            "",
        ]
    )


def charts_html(report: Report) -> tuple[str, list[dict[str, Any]]]:
    """The heat maps and curves of a report as HTML, and the JSON of each, in order."""
    charts = [block for block in report.blocks if isinstance(block, HeatMap | Curves)]
    return "".join(_charts(report.blocks, charts)), [_plain_values(chart.to_json()) for chart in charts]


def in_cell(report: Report) -> str:
    """The page in a frame, for a cell of a notebook: as interactive as the file, and as much shut off.

    >>> from weightsmith._base.report.blocks import Facts, Report
    >>> in_cell(Report("a and <b>", (), (Facts("", (("changed", 0.5),)),)))[:67]
    '<iframe sandbox="allow-scripts allow-downloads" title="a and &lt;b&'
    """
    height = _TALL if any(isinstance(block, HeatMap | Curves) for block in report.blocks) else _SHORT
    look = f"width:100%;height:{height}px;border:1px solid #8884;border-radius:4px;resize:vertical"
    kept_apart = 'sandbox="allow-scripts allow-downloads"'
    return f'<iframe {kept_apart} title="{safe(report.title)}" style="{look}" srcdoc="{escape(to_html(report))}"></iframe>'


def chart_files() -> dict[str, str]:
    """The style and the script of `Report.charts`: `charts.css` and `charts.js`."""
    return {"charts.css": _asset("charts.css") + style(), "charts.js": _asset("charts.js")}


@cache
def _asset(name: str) -> str:
    return (files("weightsmith._base.report") / name).read_text(encoding="utf-8")


def _plain(text: str) -> str:
    """A text as the page shows it, before it is escaped."""
    return printable(redacted(text))


def _plain_values(value: Any) -> Any:
    """JSON values with all texts as the page shows them."""
    if isinstance(value, dict):
        return {key: _plain_values(item) for key, item in value.items()}
    return [*map(_plain_values, value)] if isinstance(value, list) else _plain(value) if isinstance(value, str) else value


def _identifier(block: Block, i: int) -> str:
    name = block.name if isinstance(block, Table) and block.name else block.title
    return f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-') or 'part'}-{i + 1}"


def _head(report: Report) -> Iterator[str]:
    yield f"<h1>{safe(report.title)}</h1>"
    if report.summary:
        yield f'<p class="verdict">{safe(report.summary[0])}</p>'
    if report.numbers:
        pairs = (f"<div><dt>{safe(name)}</dt><dd>{safe(number)}</dd></div>" for name, number in report.numbers)
        yield f'<dl class="numbers">{"".join(pairs)}</dl>'
    if report.models:
        names = (f"<span><b>{safe(letter)}</b>{safe(name)}</span>" for letter, name in report.models)
        yield f'<p class="models">{"".join(names)}</p>'
    if report.summary[1:]:
        yield f'<ul class="about">{"".join(f"<li>{safe(sentence)}</li>" for sentence in report.summary[1:])}</ul>'


def _charts(blocks: Sequence[Block], charts: Sequence[HeatMap | Curves]) -> Iterator[str]:
    """Maps that are compared stand together, under one title and one scale."""
    drawn: set[str] = set()
    for number, chart in enumerate(charts):
        identifier = _identifier(chart, blocks.index(chart))
        if isinstance(chart, Curves):
            yield f'<section class="curves" id="{identifier}" data-chart={number}>'
            yield f"<h2>{safe(chart.title)}</h2>{_about(chart.about)}"
            said = '<p class="said" aria-hidden="true"></p>'  # a slider says its own value
            yield f'<div class="scroll">{curves(chart)}</div>{said}</section>'
        elif not chart.group:
            yield f'<section class="maps" id="{identifier}"><h2>{safe(chart.title)}</h2>{_about(chart.about)}{legend([chart])}'
            yield f"{grid(chart, number, titled=False)}</section>"
        elif chart.group not in drawn:
            drawn.add(chart.group)
            maps = [(i, heat) for i, heat in enumerate(charts) if isinstance(heat, HeatMap) and heat.group == chart.group]
            yield f'<section class="maps" id="{identifier}"><h2>{safe(chart.group)}</h2>{_about(chart.about)}'
            yield f"{legend([heat for _, heat in maps])}{''.join(grid(heat, i) for i, heat in maps)}</section>"


def _about(text: str) -> str:
    return f'<p class="about">{safe(text)}</p>' if text else ""


def _section(block: Facts | Table | Code, i: int, *, opened: bool) -> Iterator[str]:
    """opened: not folded, if it is short."""
    kind = {Table: "table", Facts: "facts", Code: "code"}[type(block)]
    short = not isinstance(block, Table) or len(block.rows) <= STATIC_ROWS
    rows = f" <small>{count(len(block.rows), 'row')}</small>" if isinstance(block, Table) else ""
    title = safe(block.title or "Facts")
    yield f'<section class="{kind}" id="{_identifier(block, i)}"><details{" open" if opened and short else ""}>'
    yield f"<summary>{title}{rows}</summary>{'' if isinstance(block, Facts) else _about(block.about)}"
    if isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Facts):
        yield f"<dl>{''.join(f'<dt>{safe(name)}</dt><dd>{safe(written(value))}</dd>' for name, value in block.facts)}</dl>"
    else:
        yield f"<pre>{safe(block.text)}</pre>"
    yield "</details></section>"


def _table(table: Table) -> Iterator[str]:
    search = '<input type="search" placeholder="search" aria-label="search this table">'
    yield f'<p class="tools">{search if len(table.rows) > SEARCHED_ROWS else ""}'
    yield '<button class="csv" type="button">Save as CSV</button></p><p class="status" role="status" aria-live="polite"></p>'
    kinds = ["" if column.unit == "text" else " class=n" for column in table.columns]
    heads = (
        f'<th scope="col"{kind} title="{safe(column.about)}"><button type="button">{safe(column.name)}</button></th>'
        for column, kind in zip(table.columns, kinds, strict=True)
    )
    yield f'<div class="scroll tall rows" tabindex="0" role="region" aria-label="{safe(table.title)}">'
    yield f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>"
    for row in table.rows[:STATIC_ROWS]:
        cells = (
            f"<td{kind}>{safe(written(value, column.unit))}</td>"
            for value, column, kind in zip(row, table.columns, kinds, strict=True)
        )
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


# ---- The data of a page: what its script shows and saves.


def _packed(table: Table, identifier: str) -> dict[str, Any]:
    """A table as columns: the names of 10,000 tensors differ little from one to the next, and their shapes are few."""
    packed: dict[str, Any] = {
        "id": identifier,
        "title": _plain(table.title),
        "name": table.name,
        "rows": len(table.rows),
        "columns": [[_plain(column.name), column.unit] for column in table.columns],
        "data": [_column([row[i] for row in table.rows], column.unit) for i, column in enumerate(table.columns)],
    }
    if table.places:
        packed["places"] = _column([f"{_plain(group)}\n{_plain(part)}" for group, part in table.places], "text", lines=True)
    if any(one.values or one.histogram for one in table.pictures):
        packed["pictures"] = _pictures(table)
    return packed


def _column(values: Sequence[Value], unit: Unit, *, lines: bool = False) -> Any:
    """The values as a list; or packed.

    {same}        all are equal
    {of, at}      few distinct texts, and the number of each row's
    {kept, ends}  how many characters a text keeps of the one before, and its end

    >>> _column(["x.0.a"] * 30 + ["x.0.b"] * 30, "text")["of"], _column([2, 2], "count"), _column([0.1234567, None], "share")
    (['x.0.a', 'x.0.b'], {'same': 2}, [0.123457, None])
    """
    cells = [(value if lines else _plain(value)) if isinstance(value, str) else _cell(value, unit) for value in values]
    if len(cells) > 1 and all(cell == cells[0] for cell in cells):
        return {"same": cells[0]}
    if not all(isinstance(cell, str) for cell in cells) or len(cells) < STATIC_ROWS:
        return cells
    distinct = {text: i for i, text in enumerate(dict.fromkeys(cells))}
    if 4 * len(distinct) < len(cells):
        return {"of": [*distinct], "at": [distinct[text] for text in cells]}
    kept = [_common(before, text) for before, text in zip(["", *cells[:-1]], cells, strict=True)]
    return {"kept": kept, "ends": [text[n:] for n, text in zip(kept, cells, strict=True)]}


def _common(a: str, b: str) -> int:
    """Characters that two texts begin with. Beyond the basic plane scripts count two; those end it."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n] and ord(a[n]) < 0x10000:
        n += 1
    return n


def _cell(value: Value, unit: Unit) -> Any:
    if isinstance(value, Mark) and unit == "text":
        return value.word
    return value if isinstance(value, str) else cell_json(value, 9 if unit == "cosine" else _DIGITS)


_BASE = 90
_FIRST = 35
"""Packed numbers are written with 90 characters, from `#` on."""


def _pictures(table: Table) -> dict[str, Any]:
    firsts = [one.values[0] if one.values else 0.0 for one in table.pictures]
    ratios = [[v / first for v in one.values[1:] if v > 0] for one, first in zip(table.pictures, firsts, strict=True)]
    highest = [max(one.histogram, default=1.0) for one in table.pictures]
    bars = [[share / most for share in one.histogram] for one, most in zip(table.pictures, highest, strict=True)]
    return {
        "what": table.pictures[0].what,
        "first": [rounded(first, _DIGITS) for first in firsts],
        "values": ["".join(map(_logarithm, values)) for values in ratios],
        "lowest": [one.lowest for one in table.pictures],
        "histograms": ["".join(map(_bar, shares)) for shares in bars],
    }


def _logarithm(ratio: float) -> str:
    """A ratio from 1e-8 to 1 in three characters, within 0.002%."""
    n = min(_BASE**3 - 1, max(0, round(-math.log(max(ratio, 1e-9)) / math.log(1e8) * (_BASE**3 - 1))))
    return "".join(chr(_FIRST + n // _BASE**k % _BASE) for k in (2, 1, 0))


def _bar(share: float) -> str:
    return chr(_FIRST + math.ceil(share * (_BASE - 1)))


# ---- The file of a page.

_FIRST_BYTES = 500


def check_page(path: str | os.PathLike[str]) -> Path:
    """The path of a page that is to be written, before hours of work.

    Raises OutputExists for a file that is no page of weightsmith, which is not replaced; StoreError for a folder, and for a
    path below a file.
    """
    file = real_path(expand_user(os.fspath(path)))
    where = os.fspath(path)
    try:
        link = expand_user(where).absolute()
        if any(folder.is_symlink() and not folder.exists() for folder in link.parents) or (
            link.is_symlink() and not file.parent.is_dir()
        ):
            raise _refused("there is a link to nowhere", where)
        above = next(folder for folder in file.parents if os.path.lexists(folder))
        if not above.is_dir():
            raise _refused(f"{above} is no folder", where)
        if os.path.lexists(file) and not file.is_file():
            raise _refused("it is a folder or a device", where)
        if file.exists():
            with file.open("rb") as opened:
                ours = GENERATOR.encode() in opened.read(_FIRST_BYTES)
            if not ours:
                what, fix = "the file exists, and is no report of weightsmith", "name another file, or remove this one"
                raise OutputExists(what, where=where, fix=fix, state=NOTHING_WRITTEN)
    except (OSError, ValueError) as error:
        raise _refused(str(error), where) from error
    return file


def write_html(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write a page, whole or not at all; an earlier page of that name is replaced. Missing parent folders are created.

    Raises as `check_page`.
    """
    file = check_page(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, data)
    except OSError as error:
        raise _refused(str(error), os.fspath(path), state="") from error
    return file


def _refused(why: str, where: str, state: str = NOTHING_WRITTEN) -> StoreError:
    return StoreError(f"the report cannot be written: {why}", where=where, fix="name another file", state=state)
