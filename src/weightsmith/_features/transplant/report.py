"""How the tokens of a transplant were found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightsmith._base.errors import Finding
from weightsmith._base.report import Column, Table
from weightsmith._base.report.blocks import Block
from weightsmith._base.text import markdown_table

FILE_NAME = "transplant.json"

SHOWN = 20
"""Missing tokens that the table of a text lists."""


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row that was made.

    number  id of the token
    token   the text that it stands for; bytes that are not UTF-8 as `\\xc3`
    error   of the donor's row, relative; None if that is not approximated
    how     `approximated`, `composed`, `kept` or `unused`
    count   in the user's text; None without a text
    """

    number: int
    token: str
    error: float | None
    how: str
    count: int | None


@dataclass(frozen=True, slots=True)
class Transplant:
    """The report of a transplant.

    approximation  its name
    rows           the rows that were made, by id
    """

    approximation: str
    rows: tuple[NewRow, ...]

    @property
    def error(self) -> float | None:
        """The mean relative error of the donor's rows; None if none is approximated."""
        errors = [row.error for row in self.rows if row.error is not None]
        return sum(errors) / len(errors) if errors else None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "approximation": self.approximation,
            "tokens": len(self.rows),
            "how": dict(Counter(row.how for row in self.rows)),
            "mean_error": self.error,
            "rows": [
                {"id": row.number, "token": row.token, "how": row.how, "error": row.error}
                | ({} if row.count is None else {"count": row.count})
                for row in self.rows
            ],
        }

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows: the missing tokens that occur in the user's text most often; no rows without a text."""
        head = ("missing token", "in the text", "how", "error")
        frequent = sorted((row for row in self.rows if row.count), key=lambda row: (-(row.count or 0), row.number))
        return head, [
            (_shown(row.token), f"{row.count:,}", row.how, "" if row.error is None else f"{row.error:.2f}")
            for row in frequent[:SHOWN]
        ]

    def summary(self) -> str:
        """One line."""
        ways = ", ".join(f"{n:,} {how}" for how, n in Counter(row.how for row in self.rows).items())
        text = f"{len(self.rows):,} rows by {self.approximation}: {ways or 'none was missing'}"
        text += "" if self.error is None else f"; mean error {self.error:.3f}"
        counts = [row.count for row in self.rows if row.count]
        if any(row.count is not None for row in self.rows):
            text += f"; {len(counts):,} of these tokens occur in the text, {sum(counts):,} times"
        return text

    def files(self) -> Mapping[str, bytes]:
        """The report as JSON."""
        return {FILE_NAME: (json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n").encode()}

    def section(self) -> str:
        """A section for the model card."""
        head, rows = self.table()
        text = f"\n## Missing tokens\n\n{self.summary()}. `{FILE_NAME}` has each of them.\n"
        if rows:
            text += f"\n{markdown_table(head, rows)}\n"
        return text

    def blocks(self) -> list[Block]:
        """How the missing tokens were found, and each of them."""
        counted = any(row.count is not None for row in self.rows)
        counts = (Column("in the text", "count"),) if counted else ()
        columns = Column("id", "count"), Column("token"), Column("how"), Column("error", "number", "relative"), *counts
        rows = tuple(
            (
                row.number,
                json.dumps(row.token, ensure_ascii=False),
                row.how,
                row.error,
                *((row.count,) if counted else ()),
            )
            for row in self.rows
        )
        return [Table("Missing tokens", columns, rows, self.summary())]

    def warnings(self, where: str) -> list[Finding]:
        """None."""
        return []


def _shown(token: str) -> str:
    """A token in quotes; a long one is cut.

    >>> _shown("word"), _shown("-" * 90)
    ("'word'", "'------------------------'... (90)")
    """
    return repr(token) if len(token) <= 24 else f"{token[:24]!r}... ({len(token)})"
