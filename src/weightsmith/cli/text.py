"""Words on the two streams: results to stdout, everything said about the work to stderr.

Text from recipes, paths and tensor names goes out as it is: no markup is interpreted, nothing is cut or wrapped, and control
characters are shown as escapes, so that a file from the internet cannot paint over the terminal.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from weightsmith.errors import Finding

_ESCAPES = {c: f"\\x{c:02x}" for c in (*range(32), 127, *range(128, 160)) if c not in (9, 10)}

BOLD, RED, YELLOW = "1", "1;31", "33"


def prepare_streams() -> None:
    """Show what a stream's encoding lacks as escapes, and Python's own warnings like ours."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *_args, **_kwargs: note(f"{colour('warning:', YELLOW, sys.stderr)} {message}")


def is_terminal(stream: TextIO) -> bool:
    """True when someone watches: a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def colour(text: str, code: str, stream: TextIO) -> str:
    """The text in a colour, on terminals whose user has not set NO_COLOR."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{code}m{text}\033[0m"


def printable(text: str) -> str:
    r"""The text with control characters as escapes; newlines and tabs stay.

    >>> print(printable("model\x1b[2Jlayers"))
    model\x1b[2Jlayers
    """
    return text.translate(_ESCAPES)


def result(text: str = "") -> None:
    """A line of the result, to stdout. The text is printable already, or is JSON."""
    print(text)


def note(text: str) -> None:
    """A line about the work, to stderr."""
    print(text, file=sys.stderr, flush=True)


def warn(finding: Finding) -> None:
    """A warning in full."""
    note(f"{colour('warning:', YELLOW, sys.stderr)} {printable(str(finding))}")


def heading(text: str) -> str:
    """A heading of the result."""
    return colour(text, BOLD, sys.stdout)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Lines of aligned columns, however long they become; columns in `right` are aligned right.

    >>> for line in table(("op", "tensors"), [("ties", "199"), ("copy", "2")], right={1}):
    ...     print(line)
    op    tensors
    ties      199
    copy        2
    """
    cells = [[printable(c).replace("\n", " ") for c in row] for row in (headers, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = []
    for row in cells:
        aligned = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(aligned).rstrip())
    return [heading(lines[0]), *lines[1:]]


def show_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: str = "") -> None:
    """`table`, as a part of the result."""
    for line in table(headers, rows, right=right):
        result(indent + line)


def size(nbytes: float) -> str:
    """Bytes for people, in the decimal units that file sizes and disks have.

    >>> size(999), size(2_200_000_000), size(1_300_000_000_000)
    ('999 bytes', '2.20 GB', '1.30 TB')
    """
    if nbytes < 1000:
        return f"{nbytes:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        nbytes /= 1000
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}" if nbytes >= 100 else f"{nbytes:.{1 if nbytes >= 10 else 2}f} {unit}"
    return f"{nbytes / 1000:.2f} TB"


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(3.14), duration(75), duration(3725)
    ('3.1 s', '1:15', '1:02:05')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count(n: int, what: str) -> str:
    """A number and its noun.

    >>> count(1, "tensor"), count(1200, "tensor")
    ('1 tensor', '1,200 tensors')
    """
    return f"{n:,} {what}{'' if n == 1 else 's'}"
