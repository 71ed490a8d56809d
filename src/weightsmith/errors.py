"""Every error weightsmith raises, and the shape of every message.

    WeightsmithError
    ├── PlanError            the recipe and the inputs do not fit; holds every problem found, not the first
    ├── RecipeError          what the user wrote
    │   ├── SyntaxProblem    not YAML, duplicate keys, alias bombs, values of the wrong type
    │   ├── UnknownName      a key, method, parameter, module or tensor that does not exist
    │   ├── ParameterError   a missing, misplaced or out-of-range parameter
    │   └── MethodError      a merge method of the user's own that may not be run, cannot be used, or failed
    ├── CheckpointError      what the inputs are
    │   ├── NotFound         no such folder, file, hub id or tensor
    │   ├── FormatError      bytes that break the file format (never trusted, never executed)
    │   └── Unsupported      a format, dtype or quantisation that this version does not read
    ├── NonFinite            a NaN or an infinity among the inputs, or in the result
    ├── MismatchError        inputs that do not go together
    │   ├── ShapeError       unequal shapes
    │   ├── LayerError       layer ranges and stacks that cannot be made
    │   └── TensorLost       a tensor that would be lost silently
    └── StoreError           what happens to the output
        ├── OutputExists     the target is there already
        ├── Busy             another process is building the output
        ├── NoSpace          the file system cannot hold the output
        ├── CannotResume     a staging folder of another plan
        └── Corrupt          verify found bytes that differ from the manifest

Catch a branch, log a leaf. A message says what, where, both values, what is on disk now, and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NOTHING_WRITTEN = "Nothing was written."

MAX_TEXT = 1000
"""Characters of one text of a message; a path may have four times as many."""
MAX_LINES = 40
"""Details that a message shows. All of them are in `Finding.details`."""
MAX_MESSAGE = 16_000
"""Characters after which a message shows no further problem of a plan. All of them are in `PlanError.problems`."""


_MANY = 2000  # names, of which all are compared with one that is unknown


def legible(text: str, most: int = MAX_TEXT) -> str:
    r"""Text that holds what a stranger wrote, for a message: without control characters, and cut where it is long.

    >>> legible("layers.\x1b[2J\n0"), len(legible("x" * 10**6))
    ('layers.\\x1b[2J\\n0', 1000)
    """
    text = _cut(text, most)
    return text if text.isprintable() else _cut("".join(c if c.isprintable() else repr(c)[1:-1] for c in text), most)


def _cut(text: str, most: int) -> str:
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[half - most + 5 :]}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to tell the user: the content of an error, or of a warning. Its texts are made `legible`.

    what     one sentence that holds the values concerned
    where    `file:line:column` for a recipe; the tensor, file or key otherwise
    details  further lines, one per model or value, shown indented
    fix      the next step, as a sentence
    """

    what: str
    where: str = ""
    details: tuple[str, ...] = ()
    fix: str = ""

    def __post_init__(self) -> None:
        for name in ("what", "fix"):
            object.__setattr__(self, name, legible(getattr(self, name)))
        object.__setattr__(self, "where", legible(self.where, 4 * MAX_TEXT))
        object.__setattr__(self, "details", tuple(map(legible, self.details)))

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

    >>> print(WeightsmithError("t is missing", where="a.yml:3:1", fix="add parameters: {t: 0.5}", state=NOTHING_WRITTEN))
    a.yml:3:1: t is missing
      -> add parameters: {t: 0.5}
    Nothing was written.
    """

    def __init__(self, what: str, *, where: str = "", details: Iterable[str] = (), fix: str = "", state: str = "") -> None:
        self.finding = Finding(what, where, tuple(details), fix)
        self.state = state
        self.product = ""  # of a plan, when computing it raised this
        super().__init__(self.finding.what)

    def __str__(self) -> str:
        return f"{self.finding}\n{legible(self.state, 4 * MAX_TEXT)}" if self.state else str(self.finding)


class PlanError(WeightsmithError):
    """All the problems of one recipe, found before any tensor data was read."""

    def __init__(self, problems: Sequence[WeightsmithError]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{len(self.problems)} problem(s)", state=NOTHING_WRITTEN)

    def __str__(self) -> str:
        parts, n, length = list[str](), len(self.problems), 0
        for problem in self.problems:
            parts.append(f"{type(problem).__name__}: {problem.finding}")
            length += len(parts[-1])
            if length > MAX_MESSAGE and len(parts) < n:
                parts.append(f"... and {n - len(parts):,} more")
                break
        return "\n".join([*parts, f"{NOTHING_WRITTEN} ({n} problem{'s' if n != 1 else ''})"])


class RecipeError(WeightsmithError):
    """What the user wrote cannot be accepted."""


class SyntaxProblem(RecipeError):
    """Not the YAML, or not the grammar, of a recipe."""


class UnknownName(RecipeError):
    """A key, method, parameter, module or tensor that does not exist."""


class ParameterError(RecipeError):
    """A parameter that is missing, misplaced or out of range."""


class MethodError(RecipeError):
    """A merge method of the user's own that may not be run, cannot be used, or failed."""


class CheckpointError(WeightsmithError):
    """An input checkpoint cannot be used."""


class NotFound(CheckpointError):
    """No such folder, file, hub id or tensor."""


class FormatError(CheckpointError):
    """Bytes that break the file format."""


class Unsupported(CheckpointError):
    """A format, dtype or quantisation that this version does not read."""


class NonFinite(CheckpointError):
    """A NaN or infinity in an input, or a result that the output's dtype cannot hold."""


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
    """The target is there already."""


class NoSpace(StoreError):
    """The file system cannot hold the output."""


class Busy(StoreError):
    """Another process is building this output."""


class CannotResume(StoreError):
    """A staging folder made by another plan."""


class Corrupt(StoreError):
    """Bytes that differ from the manifest."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'ties'?)` for the nearest known name, or an empty string.

    >>> nearest("tise", ["ties", "linear"])
    " (did you mean 'ties'?)"
    """
    candidates = list(known)
    if len(candidates) > _MANY:  # the names of a model's tensors: a comparison takes 20 microseconds and more
        candidates = [one for one in candidates if abs(len(one) - len(name)) < 3][:_MANY]
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
