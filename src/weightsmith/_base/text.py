"""Words on the two streams: results to stdout, everything said about the work to stderr.

Text from recipes, paths and tensor names goes out as it is: no markup is interpreted, and no name is cut. What does not print
is shown as escapes (`errors.printable`), so that a file from the internet can neither paint over the terminal nor forge a
line. Secrets are hidden (`redaction`). On a terminal, sentences and tables are wrapped at spaces to its width; in a pipe a
line stays a line.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from weightsmith._base.errors import Finding, printable, with_excerpt
from weightsmith._base.process import replace_streams
from weightsmith._base.redaction import redacted, redacted_values, redactor

BOLD, RED, YELLOW = "1", "1;31", "33"


def prepare_streams() -> None:
    """Make both streams ready for every text: ours, Python's warnings, and those of other libraries.

    Streams that cannot be written are replaced, what an encoding lacks is shown as escapes, and secrets are hidden.
    """
    replace_streams()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    if sys.stderr is not None and not isinstance(sys.stderr, _WithoutSecrets):
        sys.stderr = _WithoutSecrets(sys.stderr)
    warnings.showwarning = _show_warning


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: object = None, line: str | None = None
) -> None:
    """Show a warning of Python's. One of another library bears its name: it is not about the user's command."""
    whose = f" of {printable(name)}" if (name := _library(filename)) else ""
    diagnostic(f"warning{whose}: {printable(str(message))}", YELLOW)


def _library(filename: str) -> str:
    """The package that a file belongs to; "" for ours.

    >>> _library("/usr/lib/python3/site-packages/transformers/models/auto.py"), _library("/opt/own.py"), _library(__file__)
    ('transformers', 'own', '')
    """
    path = Path(filename)
    if Path(__file__).parents[1] in path.parents:
        return ""
    parts = path.with_suffix("").parts
    packages = max((i for i, part in enumerate(parts[:-1]) if part in ("site-packages", "dist-packages")), default=None)
    return (parts or ("Python",))[-1] if packages is None else parts[packages + 1]


class _WithoutSecrets:
    """A stream for the texts of other libraries: their logs, bars and tracebacks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redacted(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def is_terminal(stream: TextIO | None) -> bool:
    """True when someone watches: a terminal that can move its cursor. A process without streams has None."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def colour(text: str, code: str, stream: TextIO) -> str:
    """The text in a colour, on terminals whose user has not set NO_COLOR."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{code}m{text}\033[0m"


def columns(stream: TextIO) -> int | None:
    """The width of a terminal; None for anything else, which has none."""
    if not is_terminal(stream):
        return None
    try:
        return int(os.environ.get("COLUMNS", "")) or 80
    except ValueError:
        return os.get_terminal_size(stream.fileno()).columns or 80


def wrapped(text: str, width: int | None, indent: str = "    ") -> str:
    """The text with lines of at most `width` characters, broken at spaces; a longer word stays whole.

    indent  before each continued line, after the indentation of the line itself

    >>> print(wrapped("error: one two\\n  three four", 10))
    error: one
        two
      three
          four
    """
    if width is None:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        indentation = line[: len(line) - len(line.lstrip())]
        later = f"{indentation}{indent}"
        lines += (
            [line]
            if len(line) <= width
            else textwrap.wrap(line.strip(), width, initial_indent=indentation, subsequent_indent=later, **_AT_SPACES)
        )
    return "\n".join(lines)


_AT_SPACES: Mapping[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def _print(text: str, stream: TextIO) -> None:
    """The exit of every text but JSON. Names in it are `printable` already; only lines and colours of ours are left alone."""
    erase_status()
    parts = re.split(r"(\n|\t|\033\[[0-9;]*m)" if is_terminal(stream) else r"(\n|\t)", redacted(text))
    shown = "".join(part if i % 2 else printable(part) for i, part in enumerate(parts))
    if stream is sys.stderr:
        _aside(shown)
    else:
        print(shown, file=stream)


def result(text: str = "") -> None:
    """Lines of the result, to stdout."""
    _print(text, sys.stdout)


def show_json(value: Any, *, indent: int | None = None, exact: bool = False) -> None:
    """The result as JSON, to stdout. exact: it is read by a command again, so nothing in it is hidden."""
    erase_status()
    print(json_text(value if exact else redacted_values(value), indent=indent))


def json_text(
    value: Any, *, indent: int | None = None, allow_nan: bool = True, separators: tuple[str, str] | None = None
) -> str:
    r"""JSON in which what does not print is escaped, as JSON escapes it.

    >>> print(json_text({"é": "a\u202e\x7f"}))
    {"é": "a\u202e\u007f"}
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=allow_nan, indent=indent, separators=separators)
    return text if text.isprintable() else re.sub(r"[^\n -~]", _json_escape, text)


def _json_escape(match: re.Match[str]) -> str:
    if match[0].isprintable():
        return match[0]
    return f"\\u{ord(match[0]):04x}" if ord(match[0]) < 0x10000 else json.dumps(match[0])[1:-1]


def say(text: str) -> None:
    """A sentence of the result, to stdout, wrapped on a terminal."""
    _print(wrapped(text, columns(sys.stdout)), sys.stdout)


def note(text: str) -> None:
    """A line about the work, to stderr, wrapped on a terminal."""
    _print(wrapped(text, columns(sys.stderr)), sys.stderr)


def _aside(text: str, end: str = "\n") -> None:
    """Write to stderr, if there is one that takes it: what is said about the work never stops it."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # ValueError: a program that calls us has closed it
            print(text, end=end, file=sys.stderr, flush=True)


@dataclass(slots=True)
class _Status:
    """on: a command on a terminal says what it does. drawn: its line is there."""

    on: bool = False
    drawn: bool = False


_status = _Status()


def begin_status(text: str) -> None:
    """Show what the program does now, on a terminal; until `end_status`, `status` shows what it does next."""
    _status.on = is_terminal(sys.stderr)
    status(text)


@contextmanager
def status_line(text: str, *, quiet: bool) -> Iterator[None]:
    """Say what a command does from its first moment until a progress bar or its output takes over.

    On a terminal that is a line which `status` rewrites; in a log it is a line. quiet: nothing.
    """
    if quiet:
        end_status()
    elif is_terminal(sys.stderr):
        begin_status(text)
    else:
        note(text)
    try:
        yield
    finally:
        end_status()


def status(text: str) -> None:
    """Say what the program does now, where a command on a terminal shows that. Any room may call it."""
    if _status.on:
        width = columns(sys.stderr) or 80
        _status.drawn = True
        _aside(f"\r\033[2K{printable(redacted(text))[: width - 1]}", end="")


def erase_status() -> None:
    """Take the line away, for output in its place."""
    if _status.drawn:
        _status.drawn = False
        _aside("\r\033[2K", end="")


def end_status() -> None:
    """Take the line away; a progress bar takes over, and `status` says nothing from now on."""
    erase_status()
    _status.on = False


def warn(finding: Finding, source: tuple[str, str] = ("", "")) -> None:
    """A warning in full. source: name and text of the recipe, whose lines it may point at."""
    diagnostic(f"warning: {with_excerpt(finding, *source)}", YELLOW)


def diagnostic(text: str, code: str) -> None:
    """An error or a warning to stderr, wrapped to the terminal, its first word and the carets in a colour."""
    lines: list[str] = []
    for line in redacted(text).split("\n"):  # a line of the recipe and its carets belong together, however narrow the terminal
        lines += [line] if re.match(r" +\d* \| ", line) else wrapped(line, columns(sys.stderr)).split("\n")
    for i, line in enumerate(lines):
        head = re.match(r"error\[[a-z-]+\]:|warning:|     +\| *\^+$", line)
        if head:
            lines[i] = colour(head[0], code, sys.stderr) + line[head.end() :]
    _print("\n".join(lines), sys.stderr)


def heading(text: str) -> str:
    """A heading of the result."""
    return colour(text, BOLD, sys.stdout)


def section(title: str) -> None:
    """An empty line, and the heading of the next part of the result."""
    result()
    result(heading(printable(title)))


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = (), width: int | None = None
) -> list[str]:
    """Lines of aligned columns; columns in `right` are aligned right.

    width  of the lines; None: however long they become. A table that is wider is wrapped at spaces in its widest columns (in
           those aligned right, in the headers alone). If that is not enough, it is cut into tables one below the other, each
           with the first column. Words stay whole.

    >>> for line in table(("op", "tensors"), [("ties", "199"), ("copy", "2")], right={1}):
    ...     print(line)
    op    tensors
    ties      199
    copy        2
    """
    hide = redactor()
    cells = [[printable(hide(c)) for c in row] for row in (headers, *rows)]
    number = range(len(headers))
    widths = [max(len(row[i]) for row in cells) for i in number]
    if width is None or _width(widths) <= width:
        return _lines(cells, widths, right)
    least = [
        _longest([*cells[0][i].split(), *(w for row in cells[1:] for w in ([row[i]] if i in right else row[i].split()))])
        for i in number
    ]
    if _width(least) <= width:
        for i in sorted(number, key=lambda i: -widths[i]):
            widths[i] = max(least[i], widths[i] - max(0, _width(widths) - width))
        return _lines(cells, widths, right)
    if len(headers) < 3:  # a word is too long for any table
        return _records(cells, width)
    lines: list[str] = []
    for part in _parts(least, width):
        part_lines = table(
            [headers[i] for i in part],
            [[row[i] for i in part] for row in rows],
            right=[place for place, i in enumerate(part) if i in right],
            width=width,
        )
        lines += ["", *part_lines] if lines else part_lines
    return lines


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _longest(words: Sequence[str]) -> int:
    return max(map(len, words), default=0)


def _lines(cells: Sequence[Sequence[str]], widths: Sequence[int], right: Collection[int]) -> list[str]:
    lines: list[str] = []
    for number, row in enumerate(cells):
        parts = [textwrap.wrap(c, max(w, 1), **_AT_SPACES) if len(c) > w else [c] for c, w in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*parts, fillvalue=""):
            aligned = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
            lines.append(heading("  ".join(aligned).rstrip()) if number == 0 else "  ".join(aligned).rstrip())
    return lines


def _parts(least: Sequence[int], width: int) -> list[list[int]]:
    """The columns of the tables that one is cut into. least: what each column takes."""
    parts = [[0, 1]]
    for i in range(2, len(least)):
        if _width([least[k] for k in (*parts[-1], i)]) <= width:
            parts[-1].append(i)
        else:
            parts.append([0, i])
    return parts


def _records(cells: Sequence[Sequence[str]], width: int) -> list[str]:
    """The rows below each other, with a line for each cell."""
    head, *rows = cells
    lines = [wrapped(heading("  ".join(head)), width)]
    for first, *others in rows:
        lines += wrapped(first, width).split("\n")
        lines += [line for other in others if other for line in wrapped(f"    {other}", width, "").split("\n")]
    return lines


def show_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: str = "") -> None:
    """`table`, as a part of the result: as wide as the terminal, or as COLUMNS says if a pipe has that."""
    width = columns(sys.stdout) or _number(os.environ.get("COLUMNS", ""))
    lines = table(headers, rows, right=right, width=None if width is None else width - len(indent))
    result("\n".join(indent + line for line in lines))


def _number(text: str) -> int | None:
    return int(text) or None if text.isascii() and text.isdigit() else None


def markdown(text: str) -> str:
    r"""A name from a file as Markdown: one that could be markup becomes code, in which nothing is.

    >>> print(markdown("mlp.up_proj"), markdown("[a](http://b)"), markdown("<b>\n# c`"))
    mlp.up_proj `[a](http://b)` `` <b>\n# c` ``
    """
    text = printable(redacted(text))
    if re.fullmatch(r"[\w .,:;%()'/+=-]*", text) and "://" not in text and "www." not in text.lower():
        return text
    return code(text)


def code(text: str) -> str:
    """A text as code in Markdown."""
    text = printable(redacted(text))
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """A table in Markdown, whose cells are texts; columns in `right` are aligned right."""
    rule = ["---:" if i in right else "---" for i in range(len(headers))]
    cells = [[markdown(cell).replace("|", "\\|") for cell in row] for row in (headers, *rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (cells[0], rule, *cells[1:]))


def fact(label: str, text: str) -> None:
    """A labelled line of the result: `method   ties`."""
    show_fact(label, printable(text), 8)


def show_fact(label: str, text: str, width: int) -> None:
    """`fact` with a text that may have lines, and labels of another width."""
    lines = wrapped(f"{label:<{width}} {text}", columns(sys.stdout), " " * (width + 1))
    result(heading(lines[:width]) + lines[width:])


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


def some(names: Sequence[str], most: int) -> str:
    """The first names of a list, and how many more there are.

    >>> some(["a", "b", "c"], 2), some(["a", "b"], 2)
    ('a, b and 1 more', 'a, b')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def some_lines(lines: Sequence[str], most: int) -> list[str]:
    """The same as lines.

    >>> some_lines(["a", "b", "c"], 2)
    ['a', 'b', 'and 1 more']
    """
    return [*lines[:most], *([f"and {len(lines) - most:,} more"] if len(lines) > most else [])]
