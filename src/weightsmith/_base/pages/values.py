"""What a page shows, as values, and how numbers and names are written on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from html import escape
from typing import Any, Literal

from weightsmith._base.errors import printable
from weightsmith._base.redaction import redacted
from weightsmith._base.text import size


class Mark(Enum):
    """What stands in the place of a number: a word for tables, a symbol for cells of maps, and its meaning."""

    SAME = "same", "=", "no element differs"
    NOTHING = "-", "-", "not applicable"
    FULL = "full", "full", "full rank"
    HIGH = "high", "high", "rank above 64, or not told from the rounding"
    NAN = "NaN", "NaN", "contains NaN"
    INFINITE = "inf", "∞", "contains infinities"
    BOTH = "NaN+inf", "N∞", "contains NaN and infinities"
    NEW = "new", "new", "zero before, and not after"
    UNDEFINED = "?", "?", "undefined"

    def __init__(self, word: str, symbol: str, meaning: str) -> None:
        self.word, self.symbol, self.meaning = word, symbol, meaning


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
class Table:
    """A table that readers can sort, filter and download.

    name    short, for links and file names: `tensors`
    places  of each row, the row and column of the heat maps whose cells lead to it; () without heat maps
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    about: str = ""
    name: str = ""
    places: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Numbers by layer and part, as colours.

    values   [row][column]; a mark where there is something without a number; None: there is nothing at this place
    log      colours by the logarithm: for shares of very different sizes
    detail   name of the table that a cell leads to
    span     numbers that have the first and the last colour: the same in maps that are compared; None: the smallest and the
             largest
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | Mark | None, ...], ...]
    unit: Unit = "number"
    about: str = ""
    log: bool = False
    detail: str = ""
    span: tuple[float, float] | None = None


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


@dataclass(frozen=True, slots=True)
class Page:
    """A report.

    title    what it is about
    summary  what matters, in sentences
    blocks   in the order in which they are shown
    data     all of it as JSON values, for readers to download
    """

    title: str
    summary: tuple[str, ...]
    blocks: tuple[Block, ...]
    data: Mapping[str, Any] = field(default_factory=dict)


# ---- How numbers and names are written on pages.


def written(value: Value, unit: Unit = "text") -> str:
    """A value for people.

    >>> written(0.01234, "share"), written(1234567, "count"), written(0.99999, "cosine"), written(2.5e-7)
    ('1.23 %', '1,234,567', '1 - 1e-05', '2.5e-07')
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
        return f"{100 * value:.3g} %" if value == 0 or abs(value) >= 1e-5 else f"{100 * value:.2e} %"
    if unit == "cosine" and 0.9995 < value <= 1:
        return "1" if value > 1 - 1e-12 else f"1 - {1 - value:.1g}"
    return f"{value:.4g}"


def finite_or_mark(share: float) -> float | Mark:
    """A quotient; the mark of one that is not finite.

    >>> finite_or_mark(0.5), finite_or_mark(math.inf), finite_or_mark(math.nan)
    (0.5, <Mark.NEW: ('new', 'new', 'zero before, and not after')>, <Mark.UNDEFINED: ('?', '?', 'undefined')>)
    """
    return share if math.isfinite(share) else Mark.NEW if math.isinf(share) else Mark.UNDEFINED


def safe(text: str) -> str:
    r"""A text as HTML: names of tensors, tokens and files may hold markup, control characters and secrets.

    >>> print(safe("<b>\x1b"))
    &lt;b&gt;\x1b
    """
    return escape(printable(redacted(text)))
