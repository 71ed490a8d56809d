"""What is wrong with a recipe, by line and column, before anything is read but headers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Literal

from weightsmith._activations.rows import BUILT_IN
from weightsmith._app.studio.draft import MAX_CHARACTERS, NO_BASE, NO_MODEL, as_text
from weightsmith._app.studio.places import Places
from weightsmith._app.studio.words import Mend, PageError, said
from weightsmith._base.errors import (
    CheckpointError,
    Finding,
    MethodError,
    NotFound,
    PlanError,
    SyntaxProblem,
    WeightsmithError,
    excerpt,
)
from weightsmith._base.files import expand_user
from weightsmith._base.text import count
from weightsmith._execution.options import RunOptions
from weightsmith._execution.summary import summarise
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._methods.user_files import names_file
from weightsmith._models.tokenizers.files import TEMPLATES
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.recipe import Input, ModelRef, Recipe, load
from weightsmith._planning.recipe.references import parse_reference
from weightsmith._plans import Plan

_NAME = "<text>"
"""Under which the planner names the recipe in positions."""
_NAMED = frozenset({"auto", *TEMPLATES})


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
        wanted = [*(["a base"] if any(waiting) else []), *([count(models, "more model")] if models else [])]
        return f"Choose {' and '.join(wanted)}." if wanted else ""


def check(text: str, places: Places) -> Checked:
    """Plan a recipe if it reads only what it may. Cost: reading headers; what takes longer, the merge checks."""
    try:
        with prepare_any(allowed(text, places), RecipeOptions(check_loading=False), QuantizeSettings(), check=True) as prepared:
            found, summary = prepared.plan, summarise(prepared, RunOptions())
    except WeightsmithError as error:
        return Checked(notes_of(error, text))
    return Checked(
        tuple(_note("warning", "", finding, as_text(text)) for finding in found.warnings),
        found,
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
    loaded = load(text, "merge")
    recipe, refs, refused = loaded.recipe, list(loaded.models), list[WeightsmithError]()
    if isinstance(recipe, Recipe):
        every = [recipe, *(stage for stage in recipe.stages.values() if stage is not None)]
        refused += [problem for each in every for problem in _other_files(each, places)]
        used = [ref for each in every for ref in each.references]
        made = [
            ref for ref in used if ref.path in recipe.stages
        ]  # by other recipes of the text; adapters may be applied to them
        refs += [*(ref for ref in used if ref not in made), *(ref.lora for ref in made if ref.lora is not None)]
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
        if text is not None and text.path != BUILT_IN and not _inside(text.path, places):
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
    own = said(finding)
    return Note(level, code, line, column, own.finding, tuple(excerpt(finding.where, _NAME, text)), own.mends)


def first_finding(error: WeightsmithError) -> Finding:
    """What an error says, or the first of its problems."""
    return error.problems[0].finding if isinstance(error, PlanError) else error.finding


def model_allowed(name: str, places: Places) -> str:
    """A single model that may be read. Raises PlanError."""
    found = parse_reference(name, "")
    problem = places.check(found) if isinstance(found, ModelRef) else found
    if problem is not None:
        raise PlanError([problem])
    return name
