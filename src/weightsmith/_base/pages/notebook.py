"""A page in a notebook: its sentences, heat maps, facts and short tables, as one piece of HTML."""

from __future__ import annotations

from importlib import import_module
from itertools import islice
from typing import Any, ClassVar

from weightsmith._base.pages.svg import heat_map
from weightsmith._base.pages.values import Facts, HeatMap, Page, Table, safe, written

ROWS = 20
"""The most rows of a table that are shown."""
CELLS = 2000
"""Larger heat maps are not drawn: about 150 kB."""


class Shown:
    """A result that notebooks show as its page.

    page_function  "module:name" below `weightsmith`, of the function that makes the page. Named as text, because pages import
                   results
    """

    page_function: ClassVar[str]

    def _repr_html_(self) -> str:
        module, _, name = self.page_function.partition(":")
        found: Any = getattr(import_module(f"weightsmith.{module}"), name)(self)
        return to_fragment(found)


def to_fragment(page: Page) -> str:
    """A page as HTML for a cell: without scripts and styles, its heat maps as SVG, with at most `ROWS` rows of each table.

    >>> to_fragment(Page("a and <b>", ("They are equal.",), (Facts("", (("changed", 0.5),)),)))
    '<p><b>a and &lt;b&gt;</b></p><p>They are equal.</p><table><tr><th>changed</th><td>0.5000</td></tr></table>'
    """
    parts = [f"<p><b>{safe(page.title)}</b></p>", *(f"<p>{safe(sentence)}</p>" for sentence in page.summary)]
    if page.numbers:
        numbers = ("".join(f"<{tag}>{safe(pair[i])}</{tag}>" for pair in page.numbers) for i, tag in ((0, "th"), (1, "td")))
        parts.append(f"<table>{''.join(f'<tr>{row}</tr>' for row in numbers)}</table>")
    for block in page.blocks:
        if isinstance(block, HeatMap) and len(block.rows) * len(block.columns) <= CELLS:
            parts.append(f"<p>{safe(block.title)}</p>{heat_map(block)}")
        elif isinstance(block, Facts):
            rows = "".join(f"<tr><th>{safe(name)}</th><td>{safe(written(value))}</td></tr>" for name, value in block.facts)
            parts.append(f"<table>{rows}</table>")
        elif isinstance(block, Table) and not block.name:
            parts.append(_table(block))
    return "".join(parts)


def _table(table: Table) -> str:
    heads = "".join(f"<th>{safe(column.name)}</th>" for column in table.columns)
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{safe(written(value, column.unit))}</td>" for value, column in zip(row, table.columns, strict=True))
        + "</tr>"
        for row in islice(table.rows, ROWS)
    )
    more = f"<p>and {len(table.rows) - ROWS:,} more rows</p>" if len(table.rows) > ROWS else ""
    return f"<p>{safe(table.title)}</p><table><tr>{heads}</tr>{rows}</table>{more}"
