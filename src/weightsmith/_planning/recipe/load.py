"""A recipe from its source; or several, as stages of one."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from weightsmith._base.errors import (
    Finding,
    ParameterError,
    SyntaxProblem,
    UnknownName,
    Unsupported,
    WeightsmithError,
)
from weightsmith._base.process import allow_nesting
from weightsmith._base.redaction import redactor
from weightsmith._planning.recipe.grammar import SURGERY, read_moe, read_recipe
from weightsmith._planning.recipe.records import ModelRef, Recipe, Surgery, Upcycling
from weightsmith._planning.recipe.tuning import tunables
from weightsmith._planning.recipe.walk import Walker
from weightsmith._planning.recipe.written import Source, WrittenRecipe, name_of, read_source, with_settings
from weightsmith._planning.recipe.yaml import Document, Node, read_yaml

Command = Literal["merge", "moe"]

MAX_RECIPES = 500
"""In one file."""

_MERGE_KEYS = frozenset({"merge_method", "models", "slices", "modules"})

_MOE_KEYS = frozenset({"experts", *SURGERY.one_of})


@dataclass(frozen=True, slots=True)
class Loaded:
    """A recipe that was read, with its problems.

    recipe    None if its skeleton is broken; never None without problems. Of several recipes, the one without a name, else the
              last; the others are its `stages`
    problems  in the order of the text
    models    every reference that could be read, even in a broken recipe, but to recipes of the file
    methods   every merge method that could be read, even in a broken recipe, and its position
    source    name and text of the file for messages; ("", "") of a Python mapping, whose positions are key paths
    """

    recipe: Recipe | Upcycling | Surgery | None
    problems: tuple[WeightsmithError, ...]
    models: tuple[ModelRef, ...] = ()
    source: tuple[str, str] = ("", "")
    methods: tuple[tuple[str, str], ...] = ()


def load(
    source: Source,
    command: Command | None = "merge",
    *,
    settings: Mapping[str, Any] | None = None,
    lenient: bool = False,
    parameter_names: Collection[str] = (),
) -> Loaded:
    """The recipe of a command, and all its problems.

    source    a path to a YAML file; YAML text, known by its newline; or a mapping, whose positions are key paths like
              `models[0].parameters.weight`; or a list of such mappings, as a YAML file of several documents
    command   None: decided by the top-level keys (`merge` if they do not decide)
    settings  values to set in the recipe first, by key path: {"parameters.t": 0.3, "models[0].model": "a"}; of several recipes,
              in the one whose name the path begins with, `blend.parameters.t`, else in the one without a name (else the last)
    lenient, parameter_names   see `parse`

    Raises TypeError for a source of another type, nothing else.

    >>> soup = {"merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": 1}}]}
    >>> load(soup).problems
    ()
    >>> load(soup, settings={"dtype": "float61"}).problems[0].finding.where
    '--set dtype'
    >>> mixture = {"base_model": "a", "experts": [{"source_model": "b", "noise_scal": 1}]}
    >>> print(load(mixture, "moe").problems[0].finding.what)
    unknown key 'noise_scal' in an entry of 'experts' (did you mean 'noise_scale'?); mergekit silently ignored it
    >>> type(load(mixture | {"experts": [{"source_model": "b"}]}, None).recipe).__name__
    'Upcycling'
    """
    written = read_source(source, lenient=lenient)
    if isinstance(written, WeightsmithError):
        return Loaded(None, (written,))
    if settings:
        written = with_settings(written, settings)
    for document in written.documents:
        if document.root is not None and (problem := _of_another_kind(document.root, written.filename)):
            return Loaded(None, (problem,), source=written.shown)
    root = written.documents[written.last].root
    kind = _command(root)
    if root is not None and command and kind and kind != command:  # reporting its keys as unknown would not help
        what = f"this is a recipe of `weightsmith {kind}`, not of `weightsmith {command}`"
        fix = f"Run `weightsmith {kind}` (in Python: weightsmith.{kind})."
        return Loaded(None, (SyntaxProblem(what, where=root.where, fix=fix),), source=written.shown)
    return _build(written, command or kind or "merge", lenient, parameter_names)


def load_recipe(source: Source) -> Loaded:
    """A recipe of `merge` as values, and all its problems. Opens nothing that it names; see `load`.

    >>> soup = {"merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": 1}}]}
    >>> [str(model) for model in load_recipe(soup).models]
    ['a']
    """
    return load(source, "merge")


def parse(
    text: str, filename: str, *, lenient: bool = False, parameter_names: Collection[str] = ()
) -> tuple[Recipe | None, list[WeightsmithError]]:
    """The recipe of a merge in a YAML text (of several, see `load`), and all problems in the order of the text. Never raises.

    filename         for positions
    lenient          what mergekit ignores silently becomes a warning, and is ignored
    parameter_names  of all methods: to recognise a parameter outside `parameters:`
    The recipe is None if its skeleton is broken; never without problems.

    >>> recipe, problems = parse("merge_method: linear\\nmodels: [{modle: a}]\\n", "r.yml")
    >>> print(problems[0])
    r.yml:2:11: unknown key 'modle' in an entry of 'models' (did you mean 'model'?); mergekit silently ignored it
      -> Write 'model'.
    """
    written = WrittenRecipe(read_yaml(text, filename, lenient=lenient), text, filename, (filename, text))
    loaded = _build(written, "merge", lenient, parameter_names)
    return cast("Recipe | None", loaded.recipe), list(loaded.problems)


def _where(document: Document, filename: str, key: str = "") -> str:
    """Position of a document, or of the value of one of its keys."""
    root = document.root
    if root is not None and isinstance(root.value, dict) and key in root.value:
        return root.value[key].value.where
    return root.where if root is not None and root.where else filename


def _of_another_kind(root: Node, filename: str) -> SyntaxProblem | None:
    """The problem of a file that is not a recipe but a known other file; None otherwise."""
    keys = root.value if isinstance(root.value, dict) else {}
    if {"provenance", "steps", "weightsmith"} <= keys.keys():
        fix = "Run `weightsmith run` with it (in Python: weightsmith.run)."
        return SyntaxProblem("this is a plan, not a recipe", where=root.where, fix=fix)
    if {"architectures", "model_type"} & keys.keys() and not (_MERGE_KEYS | _MOE_KEYS) & keys.keys():
        folder = os.path.dirname(filename) or "."  # noqa: PTH120  `./a` stays `./a`
        fix = f"Write a recipe, a YAML file that names the model: - model: {folder}."
        return SyntaxProblem("this is the config.json of a model, not a recipe", where=root.where, fix=fix)
    return None


def _command(root: Node | None) -> Command | None:
    """The command of a recipe; None if it has the keys of both or of neither."""
    keys = root.value if root is not None and isinstance(root.value, dict) else {}
    merge, moe = not _MERGE_KEYS.isdisjoint(keys), not _MOE_KEYS.isdisjoint(keys)
    return None if merge == moe else "merge" if merge else "moe"


def _build(written: WrittenRecipe, command: Command, lenient: bool, parameter_names: Collection[str]) -> Loaded:
    documents, several = written.documents, len(written.documents) > 1
    if untuned := _has_tunables(written):
        return Loaded(None, (untuned,), source=written.shown)
    stages: dict[str, Recipe | None] = {}
    recipes: list[Recipe | Upcycling | Surgery | None] = []
    models: list[ModelRef] = []
    methods: list[tuple[str, str]] = []
    all_problems: list[WeightsmithError] = _name_problems(written) if several else []
    if len(documents) > MAX_RECIPES:
        where = _where(documents[MAX_RECIPES], written.filename)
        all_problems = [SyntaxProblem(f"more than {MAX_RECIPES} recipes", where=where, fix="Write them into several files.")]
        return Loaded(None, tuple(all_problems), source=written.shown)
    allow_nesting(len(documents))
    for i, document in enumerate(documents):
        walk = Walker(document, written.filename, lenient=lenient, parameter_names=parameter_names, stages=stages)
        read = read_moe if command == "moe" and i == written.last else read_recipe
        text = document.text if several else written.text
        recipes.append(read(document.root, text, walk) if document.root else None)
        all_problems += [*document.problems, *walk.problems]
        models += walk.models
        methods += walk.methods
    recipe = recipes[written.last]
    if several:
        named = {name_of(d): r for i, (d, r) in enumerate(zip(documents, recipes, strict=True)) if i != written.last}
        stages |= {name: r if isinstance(r, Recipe) else None for name, r in named.items() if name}
    # A document that could not be read may have the name of any model.
    models = [ref for ref in models if ref.path not in stages] if all(d.root is not None for d in documents) else []
    if stages:
        all_problems += _stage_problems(recipe, stages)
    all_problems += _secrets(written)
    if recipe is not None and several:
        findings = [*recipe.findings, *_unused(written, recipe, stages)]
        recipe = replace(recipe, text=written.text, findings=tuple(findings))
    if isinstance(recipe, Upcycling):
        recipe = _with_stages(recipe, stages)
    problems: dict[tuple[type, str], WeightsmithError] = {}  # each once: an aliased value is read at each of its uses
    for problem in all_problems:
        problems.setdefault((type(problem), str(problem)), problem)
    # Those of the text itself were found in a pass of their own.
    ordered = sorted(problems.values(), key=_position) if written.shown[0] else problems.values()
    return Loaded(recipe, tuple(ordered), tuple(dict.fromkeys(models)), written.shown, tuple(methods))


def _has_tunables(written: WrittenRecipe) -> SyntaxProblem | None:
    """The problem of a recipe with values that are still to be tuned."""
    places = [where for d in written.documents if d.root is not None for where in _tunable_wheres(d.root)]
    if not places:
        return None
    what = f"this recipe has {'a value' if len(places) == 1 else f'{len(places):,} values'} to tune"
    fix = "Run `weightsmith tune` with it (in Python: weightsmith.tune): it writes a recipe with numbers."
    return SyntaxProblem(what, where=places[0], fix=fix)


def _tunable_wheres(root: Node) -> list[str]:
    listed, problems = tunables(root)
    return [tunable.where for tunable in listed] or [problem.finding.where for problem in problems]


def _secrets(written: WrittenRecipe) -> list[WeightsmithError]:
    """A problem for each line with a secret, in a comment too: the recipe is stored with the model."""
    hide, problems = redactor(of_equal_length=True), list[WeightsmithError]()
    for number, line in enumerate(written.text.splitlines(), 1):
        if (hidden := hide(line)) != line:
            column = next(i for i, (a, b) in enumerate(zip(line, hidden, strict=True), 1) if a != b)
            where = f"{written.filename}:{number}:{column}" if written.shown[0] else written.filename
            what = "this looks like a password, a token or a key, and the recipe is stored with the model"
            fix = "Take it out. Keys are given by the environment: see docs/remote.md."
            problems.append(ParameterError(what, where=where, fix=fix))
    return problems


def _name_problems(written: WrittenRecipe) -> list[WeightsmithError]:
    """Every recipe but one has a name, and no two have the same."""
    problems: list[WeightsmithError] = []
    firsts: dict[str, str] = {}
    for document in written.documents:
        if document.root is None:
            continue
        name = name_of(document)
        where = _where(document, written.filename, "name")
        if name not in firsts:
            firsts[name] = where
        elif name:
            what, details = f"two recipes are called {name!r}", (f"first at {firsts[name]}",)
            problems.append(SyntaxProblem(what, where=where, details=details, fix="Give each a name of its own."))
        else:
            what, details = "a second recipe without a name", (f"the first is at {firsts[name]}",)
            fix = "Give all but one a name: name: first_stage. The one without is the result."
            problems.append(SyntaxProblem(what, where=where, details=details, fix=fix))
        if wrong := sorted(set(name) & set("*?[]+@")):
            what = f"a recipe cannot be called {name!r}: {' and '.join(map(repr, wrong))} cannot be in the name of a model"
            problems.append(SyntaxProblem(what, where=where, fix="Use letters, digits, '-', '_' and '.'."))
    return problems


def _uses(recipe: Recipe | Upcycling | Surgery | None, stages: Mapping[str, Recipe | None]) -> dict[str, ModelRef]:
    """The stages that a recipe uses as models, by path; those inside it count, and those inside these."""
    references: dict[str, ModelRef] = {}
    recipes = [recipe]
    while recipes:
        for ref in _models_of(recipes.pop()):
            if isinstance(ref, Recipe):
                recipes.append(ref)
            elif ref.path in stages and ref.path not in references:
                references[ref.path] = ref
    return references


def _models_of(recipe: Recipe | Upcycling | Surgery | None) -> Iterable[ModelRef | Recipe]:
    if isinstance(recipe, Recipe):
        return recipe.references
    if isinstance(recipe, Upcycling):
        return (recipe.base, *(expert.model for expert in (*recipe.experts, *recipe.shared_experts)))
    return () if recipe is None else (recipe.model,)


def _stage_problems(last: Recipe | Upcycling | Surgery | None, stages: Mapping[str, Recipe | None]) -> list[WeightsmithError]:
    """Results that cannot be used where they are named: by themselves, with a revision, as an adapter."""
    problems: list[WeightsmithError] = []
    uses = {name: _uses(recipe, stages) for name, recipe in stages.items()}
    for ref in (ref for references in (*uses.values(), _uses(last, stages)) for ref in references.values() if ref.revision):
        what = f"{ref.path!r} is a recipe of this file, and has no revisions"
        fix = f"Write {ref.path}; for a model of this name, rename the recipe."
        problems.append(UnknownName(what, where=ref.where, fix=fix))
    for ref in (ref for user in (last, *stages.values()) for ref in _models_of(user) if isinstance(ref, ModelRef)):
        what = ""
        if ref.lora is not None and ref.lora.path in stages:
            what = f"the result of the recipe {ref.lora.path!r} cannot be used as an adapter"
        elif isinstance(last, Surgery) and ref is last.model and ref.path in stages:
            what = f"the result of the recipe {ref.path!r} cannot be operated on"
        elif isinstance(last, Upcycling) and ref.lora is not None and ref.path in stages and ref in _models_of(last):
            what = f"no adapter can be applied to the result of the recipe {ref.path!r} in a mixture"
        if what:
            fix = "Run that recipe alone first, and use its output folder here."
            problems.append(Unsupported(what, where=ref.where, fix=fix))
    for circle in _circles(uses):
        what = f"recipes need each other's results: {' -> '.join(circle)}"
        if len(circle) == 2:
            what = f"the recipe {circle[0]!r} needs its own result"
        fix = "Name another model: each recipe can use the results of those that do not depend on it."
        problems.append(SyntaxProblem(what, where=uses[circle[-2]][circle[-1]].where, fix=fix))
    return problems


def _circles(uses: Mapping[str, Mapping[str, ModelRef]]) -> Iterator[list[str]]:
    """Recipes that depend on each other, the first again at the end."""
    done: set[str] = set()

    def follow(name: str, path: list[str]) -> Iterator[list[str]]:
        if name in path:
            yield [*path[path.index(name) :], name]
        elif name not in done:
            for other in uses[name]:
                yield from follow(other, [*path, name])
            done.add(name)

    for start in uses:
        yield from follow(start, [])


def _unused(written: WrittenRecipe, last: Recipe | Upcycling | Surgery, stages: Mapping[str, Recipe | None]) -> list[Finding]:
    """A warning for each recipe that the result does not depend on."""
    reached: set[str] = set()
    to_visit: list[Recipe | Upcycling | Surgery | None] = [last]
    while to_visit:
        new = [name for name in _uses(to_visit.pop(), stages) if name not in reached]
        reached.update(new)
        to_visit += [stages[name] for name in new]
    fix = "Use its name as a model, or put it into a file of its own."
    return [
        Finding(
            f"the recipe {name_of(document)!r} is not run: the result does not use it", _where(document, "", "name"), fix=fix
        )
        for i, document in enumerate(written.documents)
        if i != written.last and name_of(document) and name_of(document) not in reached
    ]


def _with_stages(recipe: Upcycling, stages: Mapping[str, Recipe | None]) -> Upcycling:
    """The recipes in place of their names, as if they were written there."""

    def resolved(model: ModelRef | Recipe) -> ModelRef | Recipe:
        return (stages.get(model.path) if isinstance(model, ModelRef) and model.lora is None else None) or model

    experts, shared = (
        tuple(replace(expert, model=resolved(expert.model)) for expert in group)
        for group in (recipe.experts, recipe.shared_experts)
    )
    return replace(recipe, base=resolved(recipe.base), experts=experts, shared_experts=shared)


def _position(problem: WeightsmithError) -> tuple[float, int]:
    match = re.search(r":(\d+):(\d+)$", problem.finding.where)
    return (int(match[1]), int(match[2])) if match else (math.inf, 0)
