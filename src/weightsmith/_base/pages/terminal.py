"""A page on the terminal: its facts, its sentences, and what fits of its tables."""

from __future__ import annotations

import sys

from weightsmith._base.errors import printable
from weightsmith._base.pages.values import Facts, Page, Table, written
from weightsmith._base.text import columns, result, say, section, show_fact, show_table

WIDTH = 80
"""Width of tables in a pipe or on a narrower terminal. Columns that do not fit appear on pages only."""
COLUMNS = 5
"""The first columns are always shown, even if a terminal must wrap them."""
ROWS = 200
"""The most rows of a table that are shown."""


def show_page(page: Page, *, details: bool = False) -> None:
    """Print a page to stdout.

    details  with the tables that heat maps lead to, of which each tensor has a row
    """
    first = page.blocks[0]
    if isinstance(first, Facts):
        _show_facts(first)
        result()
    for sentence in page.summary:
        say(printable(sentence))
    for block in page.blocks:
        if isinstance(block, Facts) and block is not first:
            section(block.title)
            _show_facts(block)
        elif isinstance(block, Table) and len(block.columns) > 1 and (details or not block.name):
            _show_table(block)


def _show_facts(block: Facts) -> None:
    width = max(len(name) for name, _ in block.facts)
    for name, value in block.facts:
        show_fact(name, printable(written(value)), width)


def _show_table(table: Table) -> None:
    section(table.title.lower())
    rows = [
        tuple(printable(written(value, column.unit)) for value, column in zip(row, table.columns, strict=True))
        for row in table.rows[:ROWS]
    ]
    heads = tuple(column.name for column in table.columns)
    left, shown = max(WIDTH, columns(sys.stdout) or 0) + 2, 0
    for i, cells in enumerate(zip(heads, *rows, strict=True)):
        left -= max(map(len, cells)) + 2
        if left >= 0 or i < COLUMNS:
            shown = i + 1
    right = {i for i, column in enumerate(table.columns) if column.unit != "text"}
    show_table(heads[:shown], [row[:shown] for row in rows], right=right)
    if len(table.rows) > ROWS:
        say(f"and {len(table.rows) - ROWS:,} more")
