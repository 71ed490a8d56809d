"""Recipe and headers in, Plan out; or every problem at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weightsmith import _methods as methods
from weightsmith._base.errors import Finding, PlanError, WeightsmithError
from weightsmith._base.files import exists, expand_user, is_folder
from weightsmith._base.idioms import Closing
from weightsmith._files.safetensors import collector_paused
from weightsmith._methods.method import Method
from weightsmith._models.checkpoint import Checkpoint, open_checkpoint
from weightsmith._planning import recipe as recipes
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.files import held_files, joined
from weightsmith._planning.planner.inputs import missing_models, open_models
from weightsmith._planning.planner.merges import (
    MatchedModels,
    MergeRequest,
    OpenedModels,
    Opening,
    assemble_matched,
    folded,
    in_order,
    match,
    missing_methods,
    open_request,
    read_request,
)
from weightsmith._planning.planner.prepared import PlanRequest, Prepared, Stage, Written, code_files
from weightsmith._planning.recipe import ModelRef, Recipe

NOTHING: Written = MappingProxyType({})


def assemble(source: recipes.Source, options: RecipeOptions) -> Prepared:
    """The draft of a merge.

    source  path of a YAML file, YAML text (with a newline), a mapping, or a list of mappings

    Raises PlanError with all problems. No tensor data is read. Cost: headers, and about 20 µs a tensor.
    """
    request = read_plan_request(source, "merge", options)
    with in_recipe(request.source):
        return assemble_recipe(request)


def read_plan_request(
    source: recipes.Source, command: recipes.Command | None, options: RecipeOptions, settings: object = None
) -> PlanRequest:
    """Read a recipe. Raises PlanError, with all missing models even if nothing else of the recipe can be read."""
    loaded = _load(source, command, options)
    with in_recipe(loaded.source):
        recipe = _recipe_of(loaded, _finder(_folder_of(source), options))
    return PlanRequest(recipe, options, loaded.source, _folder_of(source), tuple(loaded.problems), settings)


@contextmanager
def in_recipe(source: tuple[str, str]) -> Iterator[None]:
    """Give errors of a plan the text of the recipe, whose lines they show."""
    try:
        yield
    except PlanError as error:
        error.source = source
        raise


def _load(source: recipes.Source, command: recipes.Command | None, options: RecipeOptions) -> recipes.Loaded:
    settings = dict(options.settings)
    return recipes.load(source, command, settings=settings, lenient=options.lenient, parameter_names=PARAMETER_NAMES)


def _recipe_of(loaded: recipes.Loaded, find_method: Callable[[str], Method]) -> Any:
    """The recipe. Raises PlanError if it cannot be read."""
    if loaded.recipe is None:
        problems = [*loaded.problems, *missing_methods(loaded.methods, find_method), *missing_models(loaded.models)]
        raise PlanError(in_order(problems, loaded.source[0]), loaded.source)
    return loaded.recipe


def _finder(folder: Path, options: RecipeOptions) -> Callable[[str], Method]:
    """Finds the methods that a recipe names. folder: that its paths start from."""
    return partial(methods.find, folder=folder, allow_code=options.allow_code)


def _folder_of(source: recipes.Source) -> Path:
    if isinstance(source, recipes.WrittenRecipe):
        return source.folder
    on_disk = isinstance(source, os.PathLike) or (isinstance(source, str) and "\n" not in source)
    return Path(str(source)).parent if on_disk else Path()


def assemble_recipe(request: PlanRequest, written: Written = NOTHING, opening: Opening = open_models) -> Prepared:
    """The draft of a merge whose recipe has been read; first, the plans of the recipes whose results it reads.

    written  folders with results of other recipes
    opening  opens the models
    """
    with ExitStack() as stack, collector_paused():
        bound = _bound(request, written, opening, stack)
        prepared = bound.assemble(bound.request)
        prepared.request, prepared.source = request, request.source
        stack.pop_all()
        return prepared


def bind(
    source: recipes.Source,
    options: RecipeOptions = RecipeOptions(),  # noqa: B008  frozen
) -> Bound:
    """Open and match the models of a recipe of `merge` once, to plan other recipes of the same models.

    source  as for `assemble`

    Raises PlanError. Close the result, or use it as a context manager.

    >>> with bind("ties.yml") as bound:  # doctest: +SKIP
    ...     other = bound.replan("ties-with-other-densities.yml")
    """
    asked = read_plan_request(source, "merge", options)
    with in_recipe(asked.source), ExitStack() as stack, collector_paused():
        bound = _bound(asked, NOTHING, open_models, stack)
        if bound.request.method is None:  # no value of a parameter mends that: this raises, with all problems
            bound.assemble(bound.request)
        return replace(bound, stack=stack.pop_all())


def parameter_problems(source: recipes.Source, options: RecipeOptions) -> tuple[WeightsmithError, ...]:
    """The problems that a recipe has before its models are opened: of the text, the method, and parameters."""
    loaded = _load(source, "merge", options)
    problems = list(loaded.problems)
    recipe, folder = loaded.recipe, _folder_of(source)
    find = _finder(folder, options)
    for entry in (recipe, *recipe.stages.values()) if isinstance(recipe, Recipe) else ():
        if entry is not None:
            try:
                problems += read_request(entry, options, (), find, folder).problems
            except PlanError as error:
                problems += error.problems
    return tuple(problems)


@dataclass(frozen=True, slots=True)
class Bound(Closing):
    """A recipe whose models are opened and matched."""

    request: MergeRequest
    opened: OpenedModels
    matched: MatchedModels
    stages: _Stages
    find_method: Callable[[str], Method]
    stack: ExitStack | None = None

    def replan(self, source: recipes.Source) -> Prepared | None:
        """The plan of a recipe of the same models, which stay open; None if it has other models or another vocabulary.

        Raises PlanError.
        """
        options, find = self.request.options, self.find_method
        loaded = _load(source, "merge", options)
        with in_recipe(loaded.source), collector_paused():
            problems = [*loaded.problems, *self.stages.problems]
            request = read_request(_recipe_of(loaded, find), options, problems, find, self.request.folder)
            if request.matching != self.request.matching:
                return None
            prepared = self.assemble(request)
            return prepared.with_plan(prepared.draft.finish())

    def assemble(self, request: MergeRequest) -> Prepared:
        """The draft of a request with the same models."""
        return self.stages.join(assemble_matched(request, self.opened, self.matched))

    def close(self) -> None:
        """Close the models."""
        if self.stack is not None:
            self.stack.close()


def _bound(asked: PlanRequest, written: Written, opening: Opening, stack: ExitStack) -> Bound:
    """A merge with its models; `stack` closes them."""
    recipe, options = asked.recipe, asked.options
    assert isinstance(recipe, Recipe)
    find = _finder(asked.folder, options)
    stages = _Stages(recipe, find, asked, written)
    stages.prepare(stack)
    request = read_request(recipe, options, [*asked.problems, *stages.problems], find, asked.folder)
    opened = open_request(request, stack, stages.results, opening)
    return Bound(request, opened, match(request, opened, stack), stages, find)


class _Stages:
    """Plans the recipes whose results a recipe reads.

    results   as models, by `ModelRef.path`; None: it has problems
    problems  of all of them
    """

    def __init__(self, recipe: Recipe, find_method: Callable[[str], Method], asked: PlanRequest, written: Written) -> None:
        self.problems: list[WeightsmithError] = []
        self.results: dict[str, Checkpoint | None] = dict.fromkeys(recipe.stages)
        self._recipe, self._find, self._folder, self._written = recipe, find_method, asked.folder, written
        self._options = replace(asked.options, out_dtype=None, quantize=None, check_loading=False)
        self._refs = _in_order(recipe)
        users = [recipe, *(recipe.stages[ref.path] for ref in self._refs)]
        self._adapted = {ref.path for user in users if user is not None for ref in user.references if ref.lora is not None}
        self._stages: list[Stage] = []
        self._warnings: list[Finding] = []
        self._lacking: list[Mapping[str, tuple[str, ...]]] = []

    def prepare(self, stack: ExitStack) -> None:
        """Plan them; `stack` closes their models."""
        for ref in self._refs:
            recipe = self._recipe.stages[ref.path]
            if ref.path in self._written:
                result = self.results[ref.path] = open_checkpoint(self._written[ref.path])
                stack.callback(result.close)
            elif recipe is not None:
                self._add(ref, recipe, stack)

    def _add(self, ref: ModelRef, recipe: Recipe, stack: ExitStack) -> None:
        try:
            with ExitStack() as opened_here:
                request = read_request(recipe, self._options, (), self._find, self._folder)
                opened = open_request(request, opened_here, self.results)
                assembled = assemble_matched(request, opened, match(request, opened, opened_here))
                draft = assembled.draft  # the other plan holds it, and has the warnings itself
                warnings, missing = draft.warnings, draft.lacking
                draft.warnings, draft.lacking, draft.recipe = [], {}, ""
                plan = draft.finish()
                opened_here.pop_all()
        except PlanError as error:
            self.problems += error.problems
            return
        self._warnings += warnings
        self._lacking.append(missing)
        path, label = ref.path, ref.path if ref.path == recipe.name else str(ref)
        stage = Stage.of(path, label, plan, assembled.inputs, self._stages)
        why = "an adapter is applied to it" if path in self._adapted else stage.why
        stage = replace(stage, why=why, request=PlanRequest(recipe, self._options, folder=self._folder))
        result = self.results[path] = stage.result()
        stack.callback(result.close)
        self._stages.append(stage)

    def join(self, assembled: Prepared) -> Prepared:
        """Add all that is known of these to the draft of the result."""
        if self._stages:
            draft = assembled.draft
            draft.warnings = folded([*self._warnings, *self._same_names(), *draft.warnings])
            draft.lacking = joined([*self._lacking, draft.lacking], held_files(draft, assembled.inputs[draft.donor].folder))
            assembled.named = [*(path for stage in self._stages for path in code_files(stage.plan)), *assembled.named]
            assembled.stages = [*self._stages]
        return assembled

    def _same_names(self) -> Iterator[Finding]:
        """A warning for each recipe whose name is also a folder."""
        for ref in self._refs:
            stage, path = self._recipe.stages[ref.path], expand_user(ref.path)
            if stage is not None and stage.name == ref.path and exists(path):
                what = f"{ref.path!r} is the recipe of this name, not the {'folder' if is_folder(path) else 'file'}"
                yield Finding(what, ref.where, fix=f"rename the recipe, or write ./{ref.path} for the other")


def _in_order(recipe: Recipe) -> list[ModelRef]:
    """The other recipes that a recipe depends on, by a reference to each, and each after those that it depends on itself."""
    ordered: dict[str, ModelRef] = {}
    seen: set[str] = set()

    def add(ref: ModelRef) -> None:
        if ref.path in recipe.stages and ref.path not in seen:
            seen.add(ref.path)
            inner = recipe.stages[ref.path]
            for other in inner.references if inner is not None else ():
                add(other)
            ordered[ref.path] = ref

    for ref in recipe.references:
        add(ref)
    return list(ordered.values())


class ParameterNames(Collection[str]):
    """The names of all methods' parameters. They import every method, so they are looked up when they are first needed."""

    @cached_property
    def _names(self) -> list[str]:
        return sorted({parameter.name for method in methods.all_methods() for parameter in method.parameters})

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


PARAMETER_NAMES = ParameterNames()
