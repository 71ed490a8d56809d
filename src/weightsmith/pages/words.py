"""How numbers and names are written on pages."""

from __future__ import annotations

import math
from html import escape

from weightsmith.errors import printable
from weightsmith.pages.values import Mark, Unit, Value
from weightsmith.redaction import redacted
from weightsmith.text import size


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
