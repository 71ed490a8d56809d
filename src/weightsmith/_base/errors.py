"""Every error weightsmith raises, and the shape of every message.

    WeightsmithError
    ├── PlanError            the recipe and the inputs do not fit; holds every problem found, not the first
    ├── RecipeError          what the user wrote
    │   ├── SyntaxProblem    not YAML, duplicate keys, alias bombs, values of the wrong type
    │   ├── UnknownName      a module, tensor, dtype or choice that does not exist
    │   │   ├── UnknownKey         a key that its mapping does not have
    │   │   ├── UnknownMethod      no such merge method
    │   │   └── UnknownParameter   a parameter that the merge method does not have
    │   ├── ParameterError   a missing, misplaced or out-of-range parameter
    │   └── MethodError      a merge method of the user's own that may not be run, cannot be used, or failed
    ├── CheckpointError      what the inputs are
    │   ├── NotFound         no such folder, file, Hub id or tensor
    │   ├── FormatError      bytes that break the file format (never trusted, never executed)
    │   └── Unsupported      a format, dtype or quantisation that this version does not read
    ├── PluginError          a plug-in of an installed package that cannot be loaded or used
    ├── NonFinite            a NaN or an infinity among the inputs, or in the result
    ├── WorkerLost           the processes that do a part of a plan end without an answer, again and again
    ├── MismatchError        inputs that do not go together
    │   ├── ShapeError       unequal shapes
    │   ├── LayerError       layer ranges and stacks that cannot be made
    │   └── TensorLost       a tensor that would be lost silently
    └── StoreError           what happens to the output
        ├── OutputExists     the target is there already
        ├── Busy             another process is building the output
        ├── NoSpace          the file system cannot hold the output
        ├── CannotResume     a staging folder of another plan
        ├── PushFailed       the output is finished, and could not be uploaded; or may not be
        └── Corrupt          verify found bytes that differ from the manifest

Catch a branch, log a leaf. A message says what, where, both values, what is on disk now, and what to do next. `report` shows
it as a compiler does, with the line of the recipe:

    error[unknown-parameter]: recipe.yml:6:7: merge_method ties has no parameter 'densty' (did you mean 'density'?)
        6 |       densty: 0.5
          |       ^^^^^^
      -> Write 'density'.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from weightsmith._base.redaction import redacted, redactor

NOTHING_WRITTEN = "Nothing was written."

MAX_TEXT = 1000
"""Characters of one text of a message; a path may have four times as many."""
MAX_LINES = 40
"""Details that a message shows. All of them are in `Finding.details`."""
MAX_MESSAGE = 16_000
"""Characters after which a message shows no further problem of a plan. All of them are in `PlanError.problems`."""


_MANY = 2000  # names, of which all are compared with one that is unknown


def printable(text: str) -> str:
    r"""The text on one line. What does not print is escaped: newlines, control characters, marks of direction, zero-width
    characters, unpaired surrogates. The escape of everything that comes from a file, a server or a plug-in.

    >>> print(printable("model\x1b[2J\u202elayers\nerror: forged"))
    model\x1b[2J\u202elayers\nerror: forged
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def legible(text: str, most: int = MAX_TEXT, hide: Callable[[str], str] = redacted) -> str:
    r"""Untrusted text, made safe for a message: secrets hidden, long text shortened, and `printable`.

    >>> legible("layers.\x1b[2J\n0"), len(legible("x" * 10**6))
    ('layers.\\x1b[2J\\n0', 1000)
    """
    text = _cut(hide(text), most)  # a secret that is cut may not look like one
    return text if text.isprintable() else _cut(printable(text), most)


def _cut(text: str, most: int) -> str:
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[half - most + 5 :]}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to tell the user: the content of an error, or of a warning. Its texts are made `legible`.

    what     one sentence that holds the values concerned
    where    `file:line:column` for a recipe; the tensor, file or key otherwise
    details  further lines, one per model or value, shown indented
    fix      the next step; becomes a sentence: a capital at the start, a full stop at the end
    """

    what: str
    where: str = ""
    details: tuple[str, ...] = ()
    fix: str = ""

    def __post_init__(self) -> None:
        hide = redactor()
        object.__setattr__(self, "what", legible(self.what, hide=hide))
        object.__setattr__(self, "fix", _sentence(legible(self.fix, hide=hide)))
        object.__setattr__(self, "where", legible(self.where, 4 * MAX_TEXT, hide))
        object.__setattr__(self, "details", tuple(legible(text, hide=hide) for text in self.details))

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        lines += [f"  {line}" for line in self.details[:MAX_LINES]]
        if len(self.details) > MAX_LINES:
            lines.append(f"  ... and {len(self.details) - MAX_LINES:,} more")
        if self.fix:
            lines.append(f"  -> {self.fix}")
        return "\n".join(lines)


class WeightsmithError(Exception):
    """Base of all errors; one finding and the state of the disk.

    code  what the message begins with, `error[not-found]`: the name of the class

    >>> print(WeightsmithError("t is missing", where="a.yml:3:1", fix="write parameters: {t: 0.5}", state=NOTHING_WRITTEN))
    a.yml:3:1: t is missing
      -> Write parameters: {t: 0.5}.
    Nothing was written.
    """

    code: ClassVar[str] = "weightsmith"

    def __init_subclass__(cls) -> None:
        name = cls.__name__.removesuffix("Error").removesuffix("Problem")
        cls.code = re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()

    def __init__(self, what: str, *, where: str = "", details: Iterable[str] = (), fix: str = "", state: str = "") -> None:
        self.finding = Finding(what, where, tuple(details), fix)
        self.state = state
        self.product = ""  # of a plan, when computing it raised this
        super().__init__(self.finding.what)

    def __str__(self) -> str:
        return f"{self.finding}\n{legible(self.state, 4 * MAX_TEXT)}" if self.state else str(self.finding)


class PlanError(WeightsmithError):
    """All the problems of one recipe, found before any tensor data was read.

    source  name and text of the recipe, ("", "") if it has no lines
    """

    def __init__(self, problems: Sequence[WeightsmithError], source: tuple[str, str] = ("", "")) -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__(f"{len(self.problems)} problem(s)", state=NOTHING_WRITTEN)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.source), {"state": self.state, "product": self.product}

    def __str__(self) -> str:
        return report(self)


@contextmanager
def as_plan_error(kind: type[WeightsmithError] = WeightsmithError) -> Iterator[None]:
    """Raise an error of the block as a PlanError. One that is a PlanError stays as it is."""
    try:
        yield
    except PlanError:
        raise
    except kind as error:
        raise PlanError([error]) from error


@contextmanager
def noting(problems: list[WeightsmithError], kind: type[WeightsmithError] = WeightsmithError) -> Iterator[None]:
    """Add an error of the block to the problems; the block ends there."""
    try:
        yield
    except kind as error:
        problems.append(error)


@contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises, whatever it raises."""
    try:
        yield
    except BaseException:
        undo()
        raise


class RecipeError(WeightsmithError):
    """What the user wrote cannot be accepted."""


class SyntaxProblem(RecipeError):
    """Not the YAML, or not the grammar, of a recipe."""


class UnknownName(RecipeError):
    """A name that does not exist."""


class UnknownKey(UnknownName):
    """A key that its mapping does not have."""


class UnknownMethod(UnknownName):
    """No merge method has this name."""


class UnknownParameter(UnknownName):
    """A parameter that the merge method does not have."""


class ParameterError(RecipeError):
    """A parameter that is missing, misplaced or out of range."""


class MethodError(RecipeError):
    """A merge method of the user's own that may not be run, cannot be used, or failed."""


class PluginError(WeightsmithError):
    """A plug-in of an installed package that cannot be loaded or used."""


class CheckpointError(WeightsmithError):
    """An input checkpoint cannot be used."""


class NotFound(CheckpointError):
    """No such folder, file, Hub id or tensor."""


class FormatError(CheckpointError):
    """Bytes that break the file format."""


class Unsupported(CheckpointError):
    """A format, dtype or quantisation that this version does not read."""


class NonFinite(CheckpointError):
    """A NaN or infinity in an input, or a result that the output's dtype cannot hold."""


class WorkerLost(WeightsmithError):
    """The processes that do a part of a plan end without an answer, again and again."""


class MismatchError(WeightsmithError):
    """Inputs that do not go together."""


class ShapeError(MismatchError):
    """Unequal shapes."""


class LayerError(MismatchError):
    """Layer ranges or stacks that cannot be made."""


class TensorLost(MismatchError):
    """A tensor that would be lost silently."""


class StoreError(WeightsmithError):
    """The output cannot be written, published or trusted."""


class OutputExists(StoreError):
    """The output already exists."""


class NoSpace(StoreError):
    """The file system cannot hold the output."""


class Busy(StoreError):
    """Another process is building this output."""


class CannotResume(StoreError):
    """Unfinished work of another plan is in the staging folder."""


class PushFailed(StoreError):
    """A model that cannot be uploaded."""


class Corrupt(StoreError):
    """Bytes that differ from the manifest."""


@contextmanager
def raised_at(where: str) -> Iterator[None]:
    """Add this place to errors of the block that name none.

    >>> with raised_at("a.bin"):
    ...     raise FormatError("it is empty")
    Traceback (most recent call last):
    weightsmith._base.errors.FormatError: a.bin: it is empty
    """
    try:
        yield
    except WeightsmithError as error:
        error.finding = replace(error.finding, where=error.finding.where or where)
        raise


def without_queries(text: str) -> str:
    """Text of another library without secrets and the queries of addresses: with a signed one, anybody may read the file.

    >>> without_queries("GET 'https://host/a?X-Amz-Signature=1' failed. Again?")
    "GET 'https://host/a?...' failed. Again?"
    """
    return re.sub(r"\?[\w%&=][^\s'\"<>]*", "?...", redacted(text))


def first_line(error: BaseException) -> str:
    """The first line of what another library says of an error, or the error's class if it says nothing.

    >>> first_line(ValueError("no\\nreason")), first_line(MemoryError())
    ('no', 'MemoryError')
    """
    lines = without_queries(str(error)).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'ties'?)` for the nearest known name, or an empty string.

    >>> nearest("tise", ["ties", "linear"])
    " (did you mean 'ties'?)"
    """
    close = nearest_names(name, known)
    return f" (did you mean '{close[0]}'?)" if close else ""


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """The nearest known name, if one is near: the first that begins so, or one of similar spelling; case does not count.

    >>> nearest_names("FP8", ["int8", "fp8-dynamic"]), nearest_names("Q4_K_M", ["gguf-q4_k_s", "gguf-q4_k_m"])
    (['fp8-dynamic'], ['gguf-q4_k_m'])
    """
    candidates = list(known)
    if len(candidates) > _MANY:  # the names of a model's tensors: a comparison takes 20 microseconds and more
        candidates = [one for one in candidates if abs(len(one) - len(name)) < 3][:_MANY]
    folded = {one.casefold(): one for one in reversed(candidates)}
    asked = name.casefold()
    begin = [one for one in reversed(folded) if one.startswith(asked)] if len(asked) > 2 else []
    return [folded[one] for one in begin[:1] or difflib.get_close_matches(asked, folded, n=1, cutoff=0.6)]


# ---- as text


def report(error: WeightsmithError) -> str:
    """An error in full: every problem with its code and the line of the recipe, then what was written.

    Problems of one cause are one, counted: those that say the same, of several places.

    >>> problems = [NotFound("no such folder or file", where=f"r.yml:{line}:5: ./{line}") for line in (1, 2)]
    >>> print(report(PlanError(problems, ("r.yml", "a:  ./1\\nb:  ./2\\n"))))
    error[not-found]: r.yml:1:5: ./1: no such folder or file
        1 | a:  ./1
          |     ^^^
      also at r.yml:2:5: ./2
    Nothing was written. (2 problems)
    """
    if not isinstance(error, PlanError):
        return f"error[{error.code}]: {error}"
    alike: dict[object, list[WeightsmithError]] = {}
    for problem in error.problems:
        finding = problem.finding
        alike.setdefault((type(problem), finding.what, finding.details, finding.fix), []).append(problem)
    parts, length = list[str](), 0
    for problems in alike.values():
        if length > MAX_MESSAGE:
            parts.append(f"... and {len(alike) - len(parts):,} more")
            break
        parts.append(_folded(problems, *error.source))
        length += len(parts[-1])
    n = len(error.problems)
    end = f"{error.state} ({n} problem{'s' if n != 1 else ''})" if error.state or n > 1 else ""
    return "\n".join([*parts, *([end.lstrip()] if end else [])])


_SHOWN = 3
"""Places of one cause that are listed after the first."""


def _folded(problems: Sequence[WeightsmithError], filename: str, text: str) -> str:
    first, *others = problems
    finding = first.finding
    places = [problem.finding.where for problem in others[:_SHOWN]]
    places += [f"{len(others) - _SHOWN:,} more"] if len(others) > _SHOWN else []
    details = [f"also at {', '.join(places)}"] if others else []
    folded = Finding(finding.what, finding.where, (*finding.details, *details), finding.fix)
    return f"error[{first.code}]: {with_excerpt(folded, filename, text)}"


def with_excerpt(finding: Finding, filename: str, text: str) -> str:
    """A finding as text, with the line of the recipe it points at."""
    head, *rest = str(finding).split("\n")
    return "\n".join([head, *excerpt(finding.where, filename, text), *rest])


def excerpt(where: str, filename: str, text: str) -> Iterator[str]:
    """The line of a recipe that `where` names, and a caret under each character of the word there; nothing for another place.

    >>> print("\\n".join(excerpt("r.yml:2:4", "r.yml", "a: 1\\nb: [two, 3]\\n")))
        2 | b: [two, 3]
          |    ^
    """
    match = re.match(r":(\d+):(\d+)(?::|$)", where.removeprefix(filename)) if filename and where.startswith(filename) else None
    lines = re.split(r"\r\n|[\n\r\x85\u2028\u2029]", text.replace("\ufeff", ""))  # as YAML counts lines and columns
    if match is None or not 0 < int(match[1]) <= len(lines):
        return
    number, column = int(match[1]), int(match[2])
    line = "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in redactor(of_equal_length=True)(lines[number - 1]))
    start = 0
    if len(line) > _EXCERPT:  # the part around the place
        start = max(0, min(column - 1 - _EXCERPT // 2, len(line) - _EXCERPT))
    shown = line[start : start + _EXCERPT]
    before, rest = shown[: column - 1 - start], shown[column - 1 - start :]
    word = re.match(r"\"[^\"]*\"|'[^']*'|[\[{]|[^\s,:\]}]+", rest)
    gutter = max(4, len(str(number)))
    yield f" {number:>{gutter}} | {shown}"
    yield f" {'':{gutter}} | {''.join(_blank(c) for c in before)}{'^' * max(1, _width(word[0]) if word else 1)}"


_EXCERPT = 68
"""Characters of a line that are shown: with number and bar they fit 80 columns."""


def _blank(character: str) -> str:
    return "\t" if character == "\t" else " " * _width(character)


def _width(text: str) -> int:
    """Columns of a terminal."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _sentence(fix: str) -> str:
    """A fix with a capital and a full stop.

    >>> _sentence("write 'dtype'"), _sentence("t=0.5 is the middle."), _sentence("")
    ("Write 'dtype'.", 't=0.5 is the middle.', '')
    """
    if re.match(r"[a-z]+(?=[ ,:])", fix):
        fix = fix[0].upper() + fix[1:]
    return fix if not fix or fix[-1] in ".!?" else f"{fix}."
