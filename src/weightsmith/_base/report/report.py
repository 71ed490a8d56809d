"""A report: what a command found out, for people. Made once from a result, and rendered in four ways."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from weightsmith._base.report import html, terminal
from weightsmith._base.report.blocks import Content


@dataclass(frozen=True, slots=True)
class Report(Content):
    """What a result says, and its four renderings. `report()` of each result makes one. Notebooks show it as its page."""

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


def report_by(place: str, *arguments: Any) -> Report:
    """What a function makes of a result. place: its module, below `weightsmith`, and its name.

    Named as text, because it imports the results that name it.
    """
    module, _, name = place.partition(":")
    report: Report = getattr(import_module(f"weightsmith.{module}"), name)(*arguments)
    return report


class Reported(ABC):
    """A result that notebooks show as its report."""

    @abstractmethod
    def report(self) -> Report:
        """The result as a report: `report().write("page.html")`, `report().show()`, `report().to_html()`."""

    def _repr_html_(self) -> str:
        return html.in_cell(self.report())
