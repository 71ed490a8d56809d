"""A page as HTML: one file with its style, its script and its data, which loads nothing and sends nothing."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from weightsmith._base.errors import NOTHING_WRITTEN, OutputExists, StoreError
from weightsmith._base.files import expand_user, real_path
from weightsmith._base.pages.svg import curves, heat_map
from weightsmith._base.pages.values import Block, Code, Curves, Facts, HeatMap, Mark, Page, Table, Value, safe, written
from weightsmith._base.redaction import redacted_values
from weightsmith._base.text import json_text
from weightsmith._version import __version__

GENERATOR = '<meta name="generator" content="weightsmith '
"""In the first lines of every page."""
MAX_ROWS = 2000
"""The most rows of a table that a page shows; the data have all of them."""
MAX_DATA_CHARACTERS = 400_000
"""The most characters of JSON in a page. With --json, the commands print all of it."""

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


def to_html(page: Page) -> str:
    """A page as one HTML document.

    What it shows is escaped: names of tensors, tokens and files are hostile until then. Readable without its script; with it,
    tables can be sorted, searched and saved, and the cells of a heat map lead to their tensors.

    >>> page = Page("a and <b>", ("They are equal.",), (Facts("", (("changed", 0.5),)),))
    >>> "a and &lt;b&gt;" in to_html(page), "http-equiv=\\"Content-Security-Policy\\"" in to_html(page)
    (True, True)
    """
    title = safe(page.title)
    maps = [block for block in page.blocks if isinstance(block, HeatMap)]
    cells = dict.fromkeys((row, column) for found in maps for row in found.rows for column in found.columns)
    places = {place: number for number, place in enumerate(cells)}
    data = json_text(redacted_values(page.data), allow_nan=False) if page.data else ""
    held = bool(data) and len(data) <= MAX_DATA_CHARACTERS
    note = "" if held or not data else "<p class=about>The data are too large for this page; --json prints them.</p>"
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8">{GENERATOR}{__version__}">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_asset('page.css')}</style></head><body><main>",
            f"<h1>{title}</h1>",
            *(f"<p>{safe(sentence)}</p>" for sentence in page.summary),
            *(section for i, block in enumerate(page.blocks) for section in _section(block, i, places)),
            "</main><footer>",
            '<p class="tools"><button class="json" type="button">Save the data (JSON)</button></p>' if held else note,
            f"<p>Made by weightsmith {__version__}. This page loads nothing from the network.</p></footer>",
            # In JSON these escapes mean the same characters; `</script>` cannot appear.
            f'<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}</script>' if held else "",
            f"<script>{_asset('page.js')}</script></body></html>",
            "",
        ]
    )


@cache
def _asset(name: str) -> str:
    return (files("weightsmith._base.pages") / name).read_text(encoding="utf-8")


def _identifier(block: Block, i: int) -> str:
    name = block.name if isinstance(block, Table) and block.name else block.title
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or f"part-{i + 1}"


def _section(block: Block, i: int, places: Mapping[tuple[str, str], int]) -> Iterator[str]:
    kind = {Table: "table", HeatMap: "heat", Curves: "curves", Facts: "facts", Code: "code"}[type(block)]
    yield f'<section class="{kind}" id="{_identifier(block, i)}">'
    if block.title:
        yield f"<h2>{safe(block.title)}</h2>"
    if not isinstance(block, Facts) and block.about:
        yield f'<p class="about">{safe(block.about)}</p>'
    if isinstance(block, Table):
        yield from _table(block, places)
    elif isinstance(block, HeatMap):
        yield f'<div class="scroll">{heat_map(block, places)}</div><p class="status" aria-live="polite"></p>'
    elif isinstance(block, Curves):
        yield f'<div class="scroll">{curves(block)}</div>'
    elif isinstance(block, Facts):
        rows = (f"<dt>{safe(name)}</dt><dd>{safe(written(value))}</dd>" for name, value in block.facts)
        yield f"<dl>{''.join(rows)}</dl>"
    else:
        yield f"<pre>{safe(block.text)}</pre>"
    yield "</section>"


def _table(table: Table, places: Mapping[tuple[str, str], int]) -> Iterator[str]:
    yield '<p class="tools"><input type="search" placeholder="search" aria-label="search this table">'
    yield '<button class="csv" type="button">Save as CSV</button></p><p class="status" aria-live="polite"></p>'
    numbers = [column.unit != "text" for column in table.columns]
    heads = (
        f'<th scope="col" data-name="{safe(column.name)}"{" class=n" if number else ""} title="{safe(column.about)}">'
        f'<button type="button">{safe(column.name)}</button></th>'
        for column, number in zip(table.columns, numbers, strict=True)
    )
    yield f'<div class="scroll tall" tabindex="0" role="region" aria-label="{safe(table.title)}">'
    yield f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>"
    for i, row in enumerate(table.rows[:MAX_ROWS]):
        place = f' data-p="{places[table.places[i]]}"' if table.places and table.places[i] in places else ""
        cells = (
            f"<td class=n{_exact(value)}>{safe(written(value, column.unit))}</td>"
            if number
            else f"<td>{safe(written(value))}</td>"
            for value, column, number in zip(row, table.columns, numbers, strict=True)
        )
        yield f"<tr{place}>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    if len(table.rows) > MAX_ROWS:
        yield f'<p class="about">The first {MAX_ROWS:,} of {len(table.rows):,} rows.</p>'


def _exact(value: Value) -> str:
    """The attribute with a number for sorting and for CSV, with nine digits; "" for what is no number: its text serves."""
    if value is None or isinstance(value, str | Mark) or not math.isfinite(value):
        return ""
    return f' data-v="{value if isinstance(value, int) else f"{value:.9g}"}"'


# ---- The file of a page.

_FIRST_BYTES = 500


def check_page(path: str | os.PathLike[str]) -> Path:
    """The path of a page that is to be written, before hours of work.

    Raises OutputExists for a file that is no page of weightsmith, which is not replaced; StoreError for a folder, and for a
    path below a file.
    """
    found = real_path(expand_user(os.fspath(path)))
    where = os.fspath(path)
    try:
        given = expand_user(where).absolute()
        if any(each.is_symlink() and not each.exists() for each in given.parents) or (
            given.is_symlink() and not found.parent.is_dir()
        ):
            raise _refused("there is a link to nowhere", where)
        above = next(each for each in found.parents if os.path.lexists(each))
        if not above.is_dir():
            raise _refused(f"{above} is no folder", where)
        if os.path.lexists(found) and not found.is_file():
            raise _refused("it is a folder, or no regular file", where)
        if found.exists():
            with found.open("rb") as file:
                ours = GENERATOR.encode() in file.read(_FIRST_BYTES)
            if not ours:
                what, fix = "the file exists, and is no report of weightsmith", "name another file, or remove this one"
                raise OutputExists(what, where=where, fix=fix, state=NOTHING_WRITTEN)
    except (OSError, ValueError) as error:
        raise _refused(str(error), where) from error
    return found


def write_page(path: str | os.PathLike[str], page: Page) -> Path:
    """Write a page, whole or not at all; an earlier page of that name is replaced. Raises as `check_page`."""
    return write_html(path, to_html(page).encode(errors="replace"))


def write_html(path: str | os.PathLike[str], data: bytes) -> Path:
    """`write_page`, of a page that is HTML already. Missing parent folders are created."""
    found = check_page(path)
    try:
        found.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=found.parent, prefix=f".{found.name[:80]}.")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            mask = os.umask(0)
            os.umask(mask)
            Path(name).chmod(0o666 & ~mask)
            Path(name).replace(found)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _refused(str(error), os.fspath(path), state="") from error
    return found


def _refused(why: str, where: str, state: str = NOTHING_WRITTEN) -> StoreError:
    return StoreError(f"the report cannot be written: {why}", where=where, fix="name another file", state=state)
