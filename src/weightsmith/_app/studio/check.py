"""What is wrong with a recipe, by line and column, before anything is read but headers; errors as the page says them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Literal

import weightsmith
from weightsmith import (
    CheckpointError,
    Finding,
    MethodError,
    NotFound,
    ParameterError,
    Plan,
    PlanError,
    SyntaxProblem,
    WeightsmithError,
)
from weightsmith._app.studio.draft import MAX_CHARACTERS, NO_BASE, NO_MODEL, as_text
from weightsmith._app.studio.places import Places, expand_user
from weightsmith.plugin import (
    CHAT_TEMPLATES,
    Input,
    ModelRef,
    Recipe,
    count,
    excerpt,
    load_recipe,
    names_file,
    parse_reference,
)

_NAME = "<text>"
"""Under which the planner names the recipe in positions."""
BUILT_IN, OWN = "built-in", "own"
"""The text that weightsmith has."""
_NAMED = frozenset({"auto", *CHAT_TEMPLATES})


Level = Literal["error", "warning", "open"]
"""open: nothing is wrong, something is not chosen yet."""


@dataclass(frozen=True, slots=True)
class Note:
    """A problem or a warning.

    code        of the error; "" of a warning
    line, column  in the recipe, from 1 on; 0: elsewhere
    excerpt     the line, and carets under the word
    mends       controls of the page that mend it
    """

    level: Level
    code: str
    line: int
    column: int
    finding: Finding
    excerpt: tuple[str, ...] = ()
    mends: tuple[Mend, ...] = ()

    @property
    def where(self) -> str:
        """The place for people."""
        return f"line {self.line}, column {self.column}" if self.line else self.finding.where


@dataclass(frozen=True, slots=True)
class Checked:
    """A recipe that was checked.

    plan   None if something is wrong with it
    file_bytes, memory_bytes   of the result on disk, and of the merge at its peak
    """

    notes: tuple[Note, ...]
    plan: Plan | None = None
    file_bytes: int = 0
    memory_bytes: int = 0

    @property
    def errors(self) -> int:
        """Number of problems, without what is not chosen yet."""
        return sum(note.level == "error" for note in self.notes)

    @property
    def reason(self) -> str:
        """Why it cannot be merged, in a few words; "" if it can."""
        if self.plan is not None:
            return ""
        if self.errors:
            return f"The recipe has {count(self.errors, 'problem')}."
        waiting = [note.finding.what == _NO_BASE_YET for note in self.notes if note.level == "open"]
        models = len(waiting) - sum(waiting)
        missing = [*(["a base"] if any(waiting) else []), *([count(models, "more model")] if models else [])]
        return f"Choose {' and '.join(missing)}." if missing else ""


def check(text: str, places: Places) -> Checked:
    """Plan a recipe if it reads only what it may. Cost: reading headers; what takes longer, the merge checks."""
    try:
        plan = weightsmith.plan(allowed(text, places), check_loading=False)
        summary = plan.summary()
    except WeightsmithError as error:
        return Checked(notes_of(error, text))
    return Checked(
        tuple(_note("warning", "", finding, as_text(text)) for finding in plan.warnings),
        plan,
        summary.write_bytes,
        summary.memory.peak_bytes,
    )


def notes_of(error: WeightsmithError, text: str = "") -> tuple[Note, ...]:
    """The problems of an error. text: the recipe that it is about; "" for none."""
    problems = error.problems if isinstance(error, PlanError) else (error,)
    source = as_text(text or (error.source[1] if isinstance(error, PlanError) else ""))
    notes = (_note("open" if isinstance(one, _Unchosen) else "error", one.code, one.finding, source) for one in problems)
    return tuple(replace(note, mends=(error.mend, *note.mends)) if isinstance(error, PageError) else note for note in notes)


def allowed(text: str, places: Places) -> str:
    """The recipe, as YAML text that no function takes for a path.

    Raises PlanError with every problem of the text, and everything in it that may not be read. Every function that reads what a
    recipe names calls this first.
    """
    text = as_text(text)
    if len(text) > MAX_CHARACTERS:
        what = f"the recipe has more than {MAX_CHARACTERS:,} characters"
        raise PlanError([SyntaxProblem(what, where=f"{_NAME}:1:1", fix="save the recipe, and merge it in a terminal")])
    loaded = load_recipe(text)
    recipe, refs, refused = loaded.recipe, list(loaded.models), list[WeightsmithError]()
    if isinstance(recipe, Recipe):
        every = [recipe, *(stage for stage in recipe.stages.values() if stage is not None)]
        refused += [problem for one in every for problem in _other_files(one, places)]
        used = [ref for one in every for ref in one.references]
        results = [
            ref for ref in used if ref.path in recipe.stages
        ]  # by other recipes of the text; adapters may be applied to them
        refs += [*(ref for ref in used if ref not in results), *(ref.lora for ref in results if ref.lora is not None)]
    open_places = {ref.where: problem for ref in refs if (problem := _unchosen(ref))}
    refused += [*open_places.values()]
    refused += [problem for ref in dict.fromkeys(refs) if _unchosen(ref) is None and (problem := places.check(ref))]
    # A recipe that was not parsed was not checked. Mixtures are not checked here either, though `plan` would accept them.
    if refused or not isinstance(recipe, Recipe) or (loaded.problems and not loaded.models):
        raise PlanError([*loaded.problems, *refused], (_NAME, text))
    return text


_NO_BASE_YET, _NO_MODEL_YET = "no base is chosen yet", "no model is chosen here yet"


class _Unchosen(NotFound):
    """A place of the recipe that waits for a model."""


def _unchosen(ref: ModelRef) -> WeightsmithError | None:
    if ref.path not in (NO_MODEL, NO_BASE):
        return None
    return _Unchosen(_NO_BASE_YET if ref.path == NO_BASE else _NO_MODEL_YET, where=ref.where, fix="choose one from the list")


def _other_files(recipe: Recipe, places: Places) -> Iterator[WeightsmithError]:
    """Files that a recipe names besides models."""
    if names_file(recipe.merge_method):
        what = "the studio runs no code: merge_method names a Python file"
        yield MethodError(what, where=recipe.at("merge_method"), fix="save the recipe, and merge it in a terminal")
    asked = recipe.chat_template
    if asked and asked not in _NAMED and "{" not in asked and "\n" not in asked:
        if not _inside(asked, places):
            what = "the chat template is a file outside the folders that the studio was started with"
            yield SyntaxProblem(what, where=recipe.at("chat_template"), fix="write the template itself, or auto")
    for text in (recipe.measured, *(entry.measured for entry in _entries(recipe))):
        if text is not None and text.path not in (BUILT_IN, OWN) and not _inside(text.path, places):
            what = f"{text.path} is outside the folders that the studio was started with"
            yield CheckpointError(what, where=text.where, fix=f"start it with this folder too, or write {BUILT_IN}")


def _inside(path: str, places: Places) -> bool:
    try:
        return places.holds(expand_user(path))
    except (OSError, ValueError, RuntimeError):
        return False


def _entries(recipe: Recipe) -> Iterator[Input]:
    """All model entries: of the recipe, its slices and its modules."""
    waiting: list[object] = [recipe.models, recipe.slices, recipe.modules]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Input):
            yield value
        elif isinstance(value, tuple):
            waiting += value
        elif is_dataclass(value) and not isinstance(value, type):
            waiting += [getattr(value, one.name) for one in fields(value)]


def _note(level: Level, code: str, finding: Finding, text: str) -> Note:
    match = re.match(r"<text>:(\d+):(\d+)", finding.where)
    line, column = (int(match[1]), int(match[2])) if match else (0, 0)
    words = said(finding)
    return Note(level, code, line, column, words.finding, tuple(excerpt(finding.where, _NAME, text)), words.mends)


def first_finding(error: WeightsmithError) -> Finding:
    """What an error says, or the first of its problems."""
    return error.problems[0].finding if isinstance(error, PlanError) else error.finding


def model_allowed(name: str, places: Places) -> str:
    """A single model that may be read. Raises PlanError."""
    reference = parse_reference(name, "")
    problem = places.check(reference) if isinstance(reference, ModelRef) else reference
    if problem is not None:
        raise PlanError([problem])
    return name


# ---- Errors as the page says them: with its own controls in place of the command line's options.

TEXT_FILE = "text.txt"
"""The file that a text of the page is written to, in a folder that begins with `TEXT_FOLDER`."""
TEXT_FOLDER = "tune-"
NOTHING_WRITTEN = "Nothing was written."


@dataclass(frozen=True, slots=True)
class Mend:
    """A control of the page that mends a problem.

    control  its name: a key of MENDS in studio.js
    label    of the button
    value    that the control is given; "" for none
    """

    control: str
    label: str
    value: str = ""


class PageError(ParameterError):
    """A problem that a control of the page mends."""

    def __init__(self, what: str, mend: Mend, *, where: str = "", fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix, state=NOTHING_WRITTEN)
        self.mend = mend


@dataclass(frozen=True, slots=True)
class Said:
    """A finding in the page's words, and the controls that mend it."""

    finding: Finding
    mends: tuple[Mend, ...] = ()


_IN_PLACE: Mapping[str, tuple[str, Mend]] = {
    "--overwrite": ("tick `replace it` beside the name", Mend("overwrite", "Replace it")),
    "--no-resume": ("tick `start over` beside the name", Mend("again", "Start over")),
    "--tokens": ("use shorter rows", Mend("tokens", "Use rows of {} tokens")),
    "weightsmith init": ("choose a base and models", Mend("models", "Choose models")),
}
"""What the page says for an option or a command, and the control that it has for it."""

COMMANDS = frozenset(
    (
        *(
            "auto",
            "clean",
            "convert-lora",
            "demo",
            "dequantize",
            "diff",
            "doctor",
            "eval",
            "extract-lora",
            "help",
            "init",
            "inspect",
        ),
        *("merge", "methods", "moe", "plan", "preview", "quantize", "run", "schema", "statistics", "status", "studio"),
        *("transplant-tokenizer", "tune", "verify", "write"),
    )
)
"""Commands of the command line."""

_OPTION = re.compile(r"--[a-z][a-z-]*")
_COMMAND = re.compile(r"`?weightsmith ([a-z-]+)")
_SPELT = re.compile(r"(--[a-z][a-z-]*)((?: \S+)?) \((\w+)(?:=[^)]*)?\)|--([a-z][a-z-]*)")
_OWN_FILE = re.compile(rf"[^\s'\"]*{TEXT_FOLDER}\w+/{TEXT_FILE}")
_BETWEEN = re.compile(r"(?:[,;]? or |; |, and |\. )(?=\S)")


def said(finding: Finding) -> Said:
    """A finding in the page's words.

    >>> said(Finding("the text has 2 rows", "/out/.studio/tune-ab/text.txt", fix="use shorter rows: --tokens 128 (tokens=128)"))
    ... # doctest: +NORMALIZE_WHITESPACE
    Said(finding=Finding(what='the text has 2 rows', where='your text', details=(), fix='Use shorter rows.'),
         mends=(Mend(control='tokens', label='Use rows of 128 tokens', value='128'),))
    >>> said(Finding("it exists", "out", fix="name another folder, or replace this one with --overwrite (overwrite=True)"))
    ... # doctest: +NORMALIZE_WHITESPACE
    Said(finding=Finding(what='it exists', where='out', details=(),
                         fix='Name another folder, or tick `replace it` beside the name.'),
         mends=(Mend(control='overwrite', label='Replace it', value=''),))
    """
    where = "" if _OPTION.match(finding.where) else _without_options(finding.where)
    plain = replace(
        finding,
        what=_without_options(finding.what),
        where=where,
        details=tuple(map(_without_options, finding.details)),
        fix="",
    )
    fix = _OWN_FILE.sub("your text", finding.fix)
    if not is_for_terminals(fix):
        return Said(replace(plain, fix=fix))
    parts, mends = list[str](), list[Mend]()
    for clause in _BETWEEN.split(fix.rstrip(".")):
        if not is_for_terminals(clause):
            parts.append(clause)
            continue
        name = next((name for name in _IN_PLACE if name in clause), None)
        if name is not None:
            words, mend = _IN_PLACE[name]
            value = re.search(rf"{name} (\d+)", clause)
            if "{}" not in mend.label or value is not None:
                parts.append(words)
                number = value[1] if value else ""
                mends.append(Mend(mend.control, mend.label.format(number), number))
    return Said(replace(plain, fix=", or ".join(parts)), tuple(mends))


def is_for_terminals(text: str) -> bool:
    """Whether a text names options or commands of the command line.

    >>> is_for_terminals("use --rows 4"), is_for_terminals("run `weightsmith init`"), is_for_terminals("what weightsmith wrote")
    (True, True, False)
    """
    return bool(_OPTION.search(text)) or any(name in COMMANDS for name in _COMMAND.findall(text))


def _without_options(text: str) -> str:
    """A sentence that names options by their words, and a file of ours as what it is.

    >>> _without_options("--report-text (report_text) is for texts")
    'report text is for texts'
    """
    named = _SPELT.sub(lambda match: (match[3] or match[4]).replace("_", " ").replace("-", " ") + (match[2] or ""), text)
    return _OWN_FILE.sub("your text", named)
