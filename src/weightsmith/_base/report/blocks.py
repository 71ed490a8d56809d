"""A report, and what it shows, as values: facts, tables, heat maps, curves; and how numbers and names are written in it.

A run that shows no report imports none of the modules that render one.
"""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from weightsmith._base.errors import printable
from weightsmith._base.redaction import redacted
from weightsmith._base.text import size


class Mark(Enum):
    """Shown instead of a number: a word for tables, a symbol for map cells, an explanation, and a key for JSON."""

    SAME = "same", "=", "no element differs", "unchanged"
    NOTHING = "-", "-", "not applicable", "none"
    FULL = "full", "full", "full rank", "full"
    HIGH = "high", "high", "rank above 64, or not told from the rounding", "high"
    NAN = "NaN", "NaN", "contains NaN", "nan"
    INFINITE = "inf", "∞", "contains infinities", "inf"
    BOTH = "NaN+inf", "N∞", "contains NaN and infinities", "nan-inf"
    NEW = "new", "new", "zero before, nonzero after", "new"
    UNDEFINED = "?", "?", "undefined", "undefined"

    def __init__(self, word: str, symbol: str, meaning: str, key: str) -> None:
        self.word, self.symbol, self.meaning, self.key = word, symbol, meaning, key


Unit = Literal["text", "number", "count", "share", "cosine", "bytes"]
Value = str | float | int | Mark | None
"""nan: undefined; None: not applicable."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. about: what its numbers are, in a sentence."""

    name: str
    unit: Unit = "text"
    about: str = ""


@dataclass(frozen=True, slots=True)
class Pictures:
    """The data drawn for one tensor.

    values     singular values, descending; () where they are not computed
    histogram  shares of its elements by magnitude, each of the powers of two from `lowest` on; () where it is not computed
    lowest     the exponent of the first
    what       kind of numbers in the histogram
    """

    values: tuple[float, ...] = ()
    histogram: tuple[float, ...] = ()
    lowest: int = 0
    what: str = "elements"


@dataclass(frozen=True, slots=True)
class Table:
    """A table that readers can sort, filter and download.

    name    short, for links and file names: `tensors`
    places  the layer and part of each row, by which cells of heat maps lead to it; () without heat maps
    pictures  the data drawn for each row in a cell's drawer; () for none
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    about: str = ""
    name: str = ""
    places: tuple[tuple[str, str], ...] = ()
    pictures: tuple[Pictures, ...] = ()


Scale = Literal["linear", "log", "diverging"]
"""How numbers become colours. log: of shares of very different sizes; diverging: around zero, which is neutral."""

Cell = float | Mark | None
"""The value of a heat map cell; None if the cell is empty."""


@dataclass(frozen=True, slots=True)
class Fold:
    """The rows that one row of a heat map sums up: the experts of a part.

    row     name of the row that sums them up
    rows    names of those that it sums up
    values  [row][column], as in the map
    """

    row: str
    rows: tuple[str, ...]
    values: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Numbers by part and layer, as colours.

    rows     parts, from top to bottom
    columns  layers, as their numbers, from left to right
    values   [row][column]; a mark where there is something without a number
    prefix   common start of all column names, shown once: `model.layers.`
    axis     name of a column's unit
    detail   name of the table that a cell leads to
    span     numbers that have the first and the last colour: the same in maps that are compared; None: the smallest and the
             largest
    group    title of the maps that are compared, which share one drawn scale; "": the map is alone
    folds    rows that can be unfolded
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[Cell, ...], ...]
    unit: Unit = "number"
    about: str = ""
    scale: Scale = "linear"
    detail: str = ""
    span: tuple[float, float] | None = None
    prefix: str = ""
    axis: str = "layer"
    group: str = ""
    folds: tuple[Fold, ...] = ()

    @property
    def limits(self) -> tuple[float, float] | None:
        """Numbers of the first and the last colour; None without a number."""
        return self.span or span_of((value for row in self.values for value in row), self.scale)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for pages that draw it themselves.

        `kind` is "heat". `values` is [row][column]: a number with six digits, the key of a mark ("unchanged", "none", "full",
        "high", "nan", "inf", "nan-inf", "new", "undefined"), or null where there is nothing. `scale` has `kind` ("linear",
        "log", "diverging"), `low` and `high`, the numbers of the first and the last colour; null without a number. `unit` is
        that of the numbers: "share" is shown as a percentage. Maps with the same `group` share a scale. `folds` has the rows
        (experts) that a row sums up.

        >>> HeatMap("Moved", ("q",), ("0", "1"), ((0.5, Mark.SAME),), "share", prefix="layers.").to_json()["values"]
        [[0.5, 'unchanged']]
        """
        low, high = self.limits or (None, None)
        return {
            "kind": "heat",
            "title": self.title,
            "about": self.about,
            "rows": list(self.rows),
            "columns": list(self.columns),
            "prefix": self.prefix,
            "axis": self.axis,
            "values": _cells_json(self.values),
            "unit": self.unit,
            "scale": {"kind": self.scale, "low": low, "high": high},
            "group": self.group,
            "detail": self.detail,
            "folds": [{"row": f.row, "rows": list(f.rows), "values": _cells_json(f.values)} for f in self.folds],
        }


def span_of(values: Iterable[Cell], scale: Scale) -> tuple[float, float] | None:
    """The smallest and the largest number that a scale can have; None if there is none.

    >>> span_of([0.0, 0.1, 2.0, Mark.NAN], "log"), span_of([-0.1, 0.4], "diverging"), span_of([None], "linear")
    ((0.1, 2.0), (-0.4, 0.4), None)
    """
    known = [v for v in values if isinstance(v, float | int) and math.isfinite(v) and (v > 0 or scale != "log")]
    if not known:
        return None
    if scale == "diverging":
        most = max(map(abs, known))
        return -most, most
    return min(known), max(known)


def _cells_json(values: Iterable[Iterable[Cell]]) -> list[list[float | str | None]]:
    return [[cell_json(value) for value in row] for row in values]


def cell_json(value: Cell, digits: int = 6) -> float | str | None:
    """A cell in JSON: a mark by its key."""
    if value is None or isinstance(value, Mark):
        return None if value is None else value.key
    if math.isfinite(value):
        return rounded(value, digits)
    return Mark.UNDEFINED.key if math.isnan(value) else Mark.INFINITE.key


def rounded(value: float, digits: int) -> float:
    """A number with so many significant digits; an integer without a fraction.

    >>> rounded(1.23456789, 4), rounded(2.0, 4), rounded(123456, 3)
    (1.235, 2, 123456)
    """
    if isinstance(value, int):
        return value
    number = float(f"{value:.{digits}g}")
    return int(number) if number.is_integer() and abs(number) < 1e15 else number


@dataclass(frozen=True, slots=True)
class Curves:
    """Lines over numbers that follow each other: spectra, distances by layer.

    series  name and values of each line
    x, y    what the axes are
    first   the number of the first value
    """

    title: str
    series: tuple[tuple[str, tuple[float | None, ...]], ...]
    x: str
    y: str
    unit: Unit = "number"
    about: str = ""
    log: bool = False
    first: int = 1

    def to_json(self) -> dict[str, Any]:
        """As JSON values: `kind` is "curves"; `series` has the `name` and `values` of each line, null where it has a hole;
        `first` is the x of the first value, `log` says that the y axis is logarithmic.

        >>> Curves("Moved", (("A", (0.5, None)),), "layer", "share").to_json()["series"]
        [{'name': 'A', 'values': [0.5, None]}]
        """
        lines = [
            {"name": name, "values": [rounded(v, 6) if v is not None and math.isfinite(v) else None for v in values]}
            for name, values in self.series
        ]
        return {
            "kind": "curves",
            "title": self.title,
            "about": self.about,
            "series": lines,
            "x": self.x,
            "y": self.y,
            "unit": self.unit,
            "log": self.log,
            "first": self.first,
        }


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, a line each."""

    title: str
    facts: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Code:
    """Text as it is: a recipe, a command."""

    title: str
    text: str
    about: str = ""


Block = Table | HeatMap | Curves | Facts | Code


# ---- How numbers and names are written on pages.


def written(value: Value, unit: Unit = "text") -> str:
    """A value for people.

    Shares have three digits, other numbers four, cosines five places.

    >>> written(0.01234, "share"), written(0.25, "share"), written(1234567, "count"), written(2.5e-7), written(32.7)
    ('1.23%', '25.0%', '1,234,567', '2.500e-07', '32.70')
    >>> written(0.9999, "cosine"), written(1 - 1e-7, "cosine"), written(1.0, "cosine")
    ('0.99990', '> 0.99999', '1')
    >>> written(None), written(math.nan), written(Mark.NAN, "share")
    ('-', '?', 'NaN')
    """
    if value is None:
        return Mark.NOTHING.word
    if isinstance(value, str):
        return value
    if isinstance(value, Mark):
        return value.word
    if math.isnan(value):
        return Mark.UNDEFINED.word
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if unit == "count":
        return f"{value:,.0f}"
    if unit == "bytes":
        return size(int(value))
    if unit == "share":
        return f"{_digits(100 * value, 3)}%"
    if unit == "cosine":
        if abs(value) > 1 - 5e-6:
            return ("1" if value > 0 else "-1") if abs(value) > 1 - 1e-12 else "> 0.99999" if value > 0 else "< -0.99999"
        return f"{value:.5f}"
    return _digits(value, 4)


def _digits(value: float, digits: int) -> str:
    """A number with so many digits; 0, 1, 100 and others that need none have no fraction.

    >>> _digits(0.5, 3), _digits(100.0, 3), _digits(0, 3), _digits(1234567, 4), _digits(1e-9, 3), _digits(1234.5, 3)
    ('0.500', '100', '0', '1.235e+06', '1.00e-09', '1234')
    """
    if value == 0:
        return "0"
    if 10 ** (digits - 1) <= abs(value) < 1e5:
        return f"{value:.0f}"
    return f"{value:#.{digits}g}".rstrip(".") if abs(value) < 1e5 else f"{value:.{digits - 1}e}"


def many(n: int) -> str:
    """A large number for people.

    >>> many(134_515_008), many(7_241_732_096), many(512)
    ('134.5 M', '7.24 B', '512')
    """
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.1f} M" if n >= 1e6 else f"{n:,}"


def finite_or_mark(share: float) -> float | Mark:
    """A quotient; the mark of one that is not finite.

    >>> finite_or_mark(0.5), finite_or_mark(math.inf) is Mark.NEW, finite_or_mark(math.nan) is Mark.UNDEFINED
    (0.5, True, True)
    """
    return share if math.isfinite(share) else Mark.NEW if math.isinf(share) else Mark.UNDEFINED


def safe(text: str) -> str:
    r"""A text as HTML: names of tensors, tokens and files may hold markup, control characters and secrets.

    >>> print(safe("<b>\x1b"))
    &lt;b&gt;\x1b
    """
    return escape(printable(redacted(text)))


# ---- Heat maps of numbers that belong to places in a model.

T = TypeVar("T")
_NUMBERS = re.compile(r"\d+")


class Placed(Protocol):
    """Where something is: prefix of its stack ("" outside the layers), number of its layer, and what it is in the layer."""

    @property
    def stack(self) -> str: ...
    @property
    def layer(self) -> int: ...
    @property
    def part(self) -> str: ...


def heat_maps(
    title: str,
    items: Iterable[tuple[Placed, T]],
    value: Callable[[Sequence[T]], float | Mark],
    unit: Unit,
    about: str,
    *,
    scale: Scale = "linear",
    detail: str = "",
    span: tuple[float, float] | None = None,
    group: str = "",
    name: Callable[[T], str] | None = None,
) -> list[HeatMap]:
    """One heat map for each stack of layers, all with one scale; without those where nothing differs or nothing applies.

    items  what is where; of what is outside the layers nothing is shown
    value  one number for all items of a part in a layer, or a mark; nan: `Mark.UNDEFINED`
    span, group  see `HeatMap`
    name   of an item's tensor; with it, parts that have several tensors in a layer (experts) can be unfolded
    """
    stacks: dict[str, dict[tuple[str, int], list[T]]] = {}
    for place, item in items:
        if place.stack:
            stacks.setdefault(place.stack, {}).setdefault((place.part, place.layer), []).append(item)
    maps: list[HeatMap] = []
    for stack, cells in stacks.items():
        layers, parts = sorted({layer for _, layer in cells}), tuple(dict.fromkeys(part for part, _ in cells))
        values = tuple(
            tuple(_defined(value(cells[part, at])) if (part, at) in cells else None for at in layers) for part in parts
        )
        if any(value not in (None, Mark.SAME, Mark.NOTHING) for row in values for value in row):
            titled = f"{title} ({stack})" if len(stacks) > 1 else title
            folds = () if name is None else tuple(_folds(stack, parts, layers, cells, value, name))
            columns = tuple(map(str, layers))
            maps.append(
                HeatMap(titled, parts, columns, values, unit, about, scale, detail, span, stack, group=group, folds=folds)
            )
    common = span or span_of((v for heat in maps for row in heat.values for v in row), scale)
    return [replace(heat, span=common) for heat in maps]


def _folds(
    stack: str,
    parts: Sequence[str],
    layers: Sequence[int],
    cells: Mapping[tuple[str, int], Sequence[T]],
    value: Callable[[Sequence[T]], float | Mark],
    name: Callable[[T], str],
) -> Iterator[Fold]:
    """The rows of the experts of each part that has some."""
    for part in parts:
        rows: dict[str, dict[int, T]] = {}
        for at in layers:
            for item in cells.get((part, at), ()):
                rows.setdefault(_expert(name(item), f"{stack}{at}."), {})[at] = item
        if len(rows) > 1 and sum(map(len, rows.values())) == sum(len(cells.get((part, at), ())) for at in layers):
            ordered = sorted(rows, key=lambda row: [int(n) for n in _NUMBERS.findall(row)])
            values = tuple(
                tuple(_defined(value([rows[row][at]])) if at in rows[row] else None for at in layers) for row in ordered
            )
            if any(value not in (None, Mark.SAME, Mark.NOTHING) for row in values for value in row):
                yield Fold(part, tuple(ordered), values)


def _expert(name: str, layer: str) -> str:
    """The numbers in a tensor's name, which tell it from the others of its part.

    >>> _expert("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3.")
    'expert 7'
    """
    return f"expert {'.'.join(_NUMBERS.findall(name.removeprefix(layer)))}"


def _defined(value: float | Mark) -> float | Mark:
    return value if isinstance(value, Mark) or not math.isnan(value) else Mark.UNDEFINED


@dataclass(frozen=True, slots=True)
class Report:
    """What a command found out, for people: made once from a result, and rendered in four ways. Notebooks show it as its page.

    title    what it is about
    summary  sentences; the first is the verdict, the others are notes
    blocks   facts, tables, heat maps and curves, in the order in which they are shown
    data     the result as JSON values, or a function that makes them: those of 100,000 tensors take 300 MB
    numbers  the three numbers that matter most: a name, and the number as it is written
    models   the letters that stand for models, and their names
    """

    title: str
    summary: tuple[str, ...]
    blocks: tuple[Block, ...]
    data: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
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
        _renderer("terminal").show_report(self, details=details)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values: what `--json` prints."""
        return dict(self.data() if callable(self.data) else self.data)

    def to_html(self) -> str:
        """One HTML document, which needs no network, no other file and no server."""
        return _renderer("html").to_html(self)

    def charts(self) -> tuple[str, list[dict[str, Any]]]:
        """The heat maps and curves as HTML, for a page that has the `chart_files`; and the JSON of each, in order."""
        return _renderer("html").charts_html(self)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_html`, whole or not at all. An earlier report of that name is replaced.

        Raises OutputExists for another file, and StoreError where none can be written.
        """
        return _renderer("html").write_html(path, self.to_html().encode(errors="replace"))

    def _repr_html_(self) -> str:
        return _renderer("html").in_cell(self)


def _renderer(name: str) -> Any:
    """The module `html` or `terminal`. Named as text, because it imports the reports that it renders."""
    return import_module(f"weightsmith._base.report.{name}")


def report_by(place: str, *arguments: Any) -> Report:
    """What a function makes of a result. place: its module, below `weightsmith`, and its name.

    Named as text, because it imports the results that name it.
    """
    module, _, name = place.partition(":")
    return getattr(import_module(f"weightsmith.{module}"), name)(*arguments)


class Reported(ABC):
    """A result that notebooks show as its report."""

    @abstractmethod
    def report(self) -> Report:
        """The result as a report: `report().write("page.html")`, `report().show()`, `report().to_html()`."""

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()
