"""A report: what a command found out, for people. Made once from a result, and rendered in four ways."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightsmith._base.report import html, terminal
from weightsmith._base.report.blocks import Block


@dataclass(frozen=True, slots=True)
class Report:
    """What a result says. `report()` of each result makes one.

    title    what it is about
    summary  sentences; the first is the verdict, the others are notes
    blocks   facts, tables, heat maps and curves, in the order in which they are shown
    data     the result as JSON values
    numbers  the three numbers that matter most: a name, and the number as it is written
    models   the letters that stand for models, and their names

    Notebooks show a report as its page.
    """

    title: str
    summary: tuple[str, ...]
    blocks: tuple[Block, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    numbers: tuple[tuple[str, str], ...] = ()
    models: tuple[tuple[str, str], ...] = ()

    @property
    def verdict(self) -> str:
        """The conclusion, in a sentence; "" without one."""
        return self.summary[0] if self.summary else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Whatever else is to be said, in sentences."""
        return self.summary[1:]

    def show(self, *, details: bool = False) -> None:
        """Print it on the terminal: facts, tables, heat maps as blocks, the verdict last.

        details  with the tables that have a row for each tensor
        """
        terminal.show_report(self, details=details)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values: what `--json` prints."""
        return dict(self.data)

    def to_html(self) -> str:
        """One HTML document, which needs no network, no other file and no server."""
        return html.to_html(self)

    def charts(self) -> tuple[str, list[dict[str, Any]]]:
        """The heat maps and curves as HTML, for a page that has the `chart_files`; and the JSON of each, in order."""
        return html.charts_html(self)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_html`, whole or not at all. An earlier report of that name is replaced.

        Raises OutputExists for another file, and StoreError where none can be written.
        """
        return html.write_html(path, self.to_html().encode(errors="replace"))

    def _repr_html_(self) -> str:
        return html.in_cell(self)


class Reported(ABC):
    """A result that notebooks show as its report."""

    @abstractmethod
    def report(self) -> Report:
        """The result as a report: `report().write("page.html")`, `report().show()`, `report().to_html()`."""

    def _repr_html_(self) -> str:
        return html.in_cell(self.report())
