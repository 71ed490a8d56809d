"""A recipe from its source; or several, as stages of one. Reads the tree by the grammar, and collects all problems.

A wrong value is reported and left out, and reading continues, so that the planner can add its own findings. There is no recipe
if its skeleton (method, models, layers) is broken, because the planner would report misspelled keys as missing.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from weightsmith._base.errors import (
    Finding,
    ParameterError,
    SyntaxProblem,
    UnknownKey,
    UnknownName,
    Unsupported,
    WeightsmithError,
)
from weightsmith._base.process import allow_nesting
from weightsmith._base.redaction import redactor
from weightsmith._methods import TO_MOE
from weightsmith._planning.recipe.grammar import INPUT, LEVELS, RECIPE, SOURCE, SURGERY, UPCYCLING, read_moe, read_recipe
from weightsmith._planning.recipe.kinds import NOT_IN_MIXTURES, Level, Walk
from weightsmith._planning.recipe.records import ModelRef, Recipe, Section, Setting, Surgery, Upcycling
from weightsmith._planning.recipe.tuning import tunables
from weightsmith._planning.recipe.written import Source, WrittenRecipe, name_of, read_source, with_settings
from weightsmith._planning.recipe.yaml import Document, Node, Pair, describe, short

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
    lenient   what mergekit ignores silently becomes a warning, and is ignored
    parameter_names  of all methods: to recognise a parameter outside `parameters:`

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


# ---- The mappings of a tree by the grammar, and what to say of keys that no mapping has


# ---- Keys that nothing reads: what mergekit did with each, and how to write what was meant


IGNORED = "mergekit silently ignored it"

RETIRED = {
    "embed_slerp": (
        "embed_slerp has had no effect in mergekit since its tokenizer code was rewritten",
        "Remove it; for spherical interpolation of all tensors, embeddings too, use merge_method: slerp.",
    ),
    "input_model_parameters": (
        "input_model_parameters is read by no version of mergekit, though its README named it",
        "Write 'parameters:' in each entry of 'models' or 'sources'.",
    ),
}
"""Settings that older pages recommend but nothing reads: the error and the next step."""

HARMLESS = {
    "int8_mask": "int8_mask never changes the result: it only chose the type of an intermediate in mergekit",
    "int_space": "int_space is read by no version of mergekit and has no effect",
}
"""Keys that never change the result: the warning."""

_NOTES = frozenset(
    "author authors comment comments date description license metadata name note notes tags title version".split()
)
_SYNONYMS = {
    "base": "base_model",
    "layers": "layer_range",
    "method": "merge_method",
    "model_path": "model",
    "modles": "models",  # by its letters closer to "modules"
    "output_dtype": "out_dtype",
    "params": "parameters",
    "range": "layer_range",
    "torch_dtype": "dtype",
}
OPTIONS = {
    "allow_crimes": "",
    "clone_tensors": "",
    "copy_tokenizer": "",
    "cuda": "",
    "lazy_unpickle": "",
    "low_cpu_memory": "",
    "max_shard_size": "--max-shard-size",
    "out_shard_size": "--max-shard-size",
    "random_seed": "--seed",
    "seed": "--seed",
    "trust_remote_code": "",
    "write_model_card": "",
}
"""Options of commands that recipes name as keys, and their flags; "" for those that nothing needs."""


_OF_TOKENS = frozenset({"source", "tokens", "token", "kind", "force"})
"""Keys inside `tokenizer` whose names are too common to guess that a stray one belongs there."""


@dataclass(frozen=True, slots=True)
class Misuse:
    """What is wrong with one key.

    harmless  it could not have changed the result: a warning, not an error
    meant     the key that was probably meant, "" when it is not clear
    """

    what: str
    fix: str
    error: type[WeightsmithError] = UnknownKey
    harmless: bool = False
    meant: str = ""


def explain(name: str, pair: Pair, level: Level, siblings: Mapping[str, Pair], parameter_names: Collection[str]) -> Misuse:
    """The message for a key that its level does not have. siblings: the mapping it is in."""
    shown = short(name)
    if name in HARMLESS:
        return Misuse(HARMLESS[name], "Remove it.", harmless=True)
    if name in RETIRED:
        return Misuse(*RETIRED[name], error=ParameterError)
    if name == "revision" and level in (INPUT, SOURCE):
        return _revision(pair.value, siblings)
    if name == "lora" and level in (INPUT, SOURCE):
        return _lora(pair.value, siblings)
    if name in parameter_names:
        return _misplaced(name, pair.value, level)
    if name in NOT_IN_MIXTURES and level in (UPCYCLING, SURGERY):
        return Misuse(*NOT_IN_MIXTURES[name], error=Unsupported)
    if level is RECIPE and any(other.key(name) for other in (UPCYCLING, SURGERY)):
        return Misuse(f"the key {name!r} is of a recipe of `weightsmith moe`", TO_MOE)
    option = OPTIONS.get(name.replace("-", "_")) if level is RECIPE else None
    if option is not None:
        what = f"{shown!r} is a command-line option, not a key of a recipe; {IGNORED}"
        fix = f"Remove it and pass {option} on the command line." if option else "Remove it: nothing needs it."
        return Misuse(what, fix, harmless=option != "--seed")
    if name in _NOTES:
        fix = "Remove it, or write it as a comment or as x-" + name + "."
        return Misuse(f"the key {shown!r} {level.place} has no effect", fix, harmless=True)
    return elsewhere(name, level) or _unknown(name, level, parameter_names)


def elsewhere(name: str, level: Level | None) -> Misuse | None:
    """The message for a key that only other levels have; None if none has it. Without a level: `parameters`."""
    homes = [other for other in LEVELS if other.key(name) and name not in _OF_TOKENS]
    if not homes:
        return None
    place = level.place if level else "inside 'parameters'"
    what = f"the key {name!r} has no meaning {place}; {IGNORED}"
    places = [other.place if level is None or other.place != level.place else "in a recipe of a merge" for other in homes]
    fix = f"Move it: it belongs {' or '.join(places)}."
    if name == "merge_method":
        what = f"one recipe has one merge_method, not one {place}; {IGNORED}"
        fix = "Write one recipe per method and name the output of the first as a model of the next."
    if name == "layer_range" and level is INPUT:
        what = f"'layer_range' {level.place}: mergekit ignored it and merged all layers"
        fix = "Write 'slices' with 'sources' instead of 'models', to merge some layers."
    return Misuse(what, fix)


def _revision(value: Node, siblings: Mapping[str, Pair]) -> Misuse:
    model = siblings["model"].value.value if "model" in siblings else None
    ref = short(model) if isinstance(model, str) else "org/name"
    revision = value.value if isinstance(value.value, str) else "revision"
    what = f"'revision' beside 'model': mergekit ignored it and used the main branch, not {short(revision)!r}"
    return Misuse(what, f"Write model: {ref}@{short(revision)}.")


def _lora(value: Node, siblings: Mapping[str, Pair]) -> Misuse:
    model = siblings["model"].value.value if "model" in siblings else None
    ref = short(model) if isinstance(model, str) else "org/name"
    adapter = short(value.value) if isinstance(value.value, str) else "adapter"
    return Misuse(
        "'lora' beside 'model': mergekit ignored it and used the model without its adapter", f"Write model: {ref}+{adapter}."
    )


def _misplaced(name: str, value: Node, level: Level) -> Misuse:
    what = f"the parameter {name!r} {level.place} must be inside 'parameters'; {IGNORED}"
    if not level.key("parameters"):
        return Misuse(what, "Write it under a 'parameters:' key.", ParameterError)
    scalar = isinstance(value.value, int | float)
    written = f"{name}: {str(value.value).lower()}" if scalar else f"{name}: ..."
    where = "at the top level" if level is RECIPE else "in the same mapping"
    return Misuse(what, f"Write parameters: {{{written}}} {where}.", ParameterError)


def _unknown(name: str, level: Level, parameter_names: Collection[str]) -> Misuse:
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    plain = _SYNONYMS.get(plain, plain)
    close = difflib.get_close_matches(plain, [*level.names, *parameter_names], n=1)
    if not close:
        fix = f"Write one of {', '.join(level.names)}; keys of your own start with x- or _."
        return Misuse(f"unknown key {short(name)!r} {level.place}; {IGNORED}", fix)
    (meant,) = close
    what = f"unknown key {short(name)!r} {level.place} (did you mean {meant!r}?); {IGNORED}"
    if meant in parameter_names:
        return Misuse(what, f"Write {meant!r} under a 'parameters:' key.", ParameterError, meant=meant)
    return Misuse(what, f"Write {meant!r}.", meant=meant)


# If one of these keys is misspelled or wrong, the planner must not mistake the gap for the user's intention.
_SKELETON = {"merge_method", "base_model", "models", "slices", "modules", "sources", "model", "layer_range", "path"}
_SKELETON |= {"experts", "source_model", "copies", "lora"}
_SKELETON |= {"prune_experts", "merge_experts", "keep", "keep_by_layer", "saliency", "groups", "groups_by_layer"}


class Walker(Walk):
    """One reading of a document.

    parameter_names  of all methods: to recognise a parameter outside `parameters:`
    models           every reference that was read
    methods          every merge method that was read, and its position
    """

    def __init__(
        self,
        document: Document,
        filename: str,
        *,
        lenient: bool,
        parameter_names: Collection[str],
        stages: dict[str, Recipe | None] | None = None,
    ) -> None:
        """stages: of the file, to be filled; all its documents share it."""
        super().__init__(filename, document.findings, stages, lenient=lenient)
        self.aliased = document.aliased
        self.parameter_names = parameter_names
        self.models: list[ModelRef] = []
        self.methods: list[tuple[str, str]] = []

    def _misuse(self, misuse: Misuse, where: str) -> bool:
        return self.misused(misuse.what, where, misuse.fix, misuse.error, harmless=misuse.harmless)

    # ---- mappings

    def mapping(self, node: Node, level: Level) -> Any:
        if not isinstance(node.value, dict):
            self.whole = False
            keys = ", ".join(key.name for key in level.keys if key.required) or " or ".join(level.one_of)
            is_model = isinstance(node.value, str) and keys == "model"
            fix = f"Write model: {short(str(node.value))}." if is_model else f"Write a mapping with {keys}."
            self.problem(f"expected a mapping {level.place}, not {describe(node)}", node.where, fix)
            return None
        where = node.where or self.filename  # a Python mapping itself has no key path
        values: dict[str, Any] = {}
        reported: dict[str, Setting] = {}
        meant: set[str] = set()
        for name, pair in node.value.items():
            key = level.key(name)
            if key is None:
                meant.add(self._unknown(name, pair, level, node.value, reported))
            elif pair.value.value is None:
                if key.required:
                    self._broken(name)
                    self.problem(f"the key {name!r} {level.place} has no value", pair.where, f"Write a value after '{name}:'.")
            else:
                value = key.kind.read(pair, key, self)
                if value is None:
                    self._broken(name)
                else:
                    values[name] = value
                    if isinstance(value, ModelRef):
                        self.models.append(value)
                    if name == "merge_method":
                        self.methods.append((value, pair.where))
        required = [key for key in level.keys if key.required]
        for key in required:
            if key.name not in node.value:
                self._broken(key.name)
                if key.name not in meant:  # else its misspelling is reported
                    self.problem(f"the key {key.name!r} is missing {level.place}", where, f"Add {key.name}. {key.doc}")
        self._one_of(level, node.value, where, meant)
        if reported and level.key("parameters"):
            values["parameters"] = {**reported, **values.get("parameters", {})}
        if any(key.name not in values for key in required):
            return None
        return level.make(Section(values, where, {name: pair.value.where for name, pair in node.value.items()}))

    def _broken(self, name: str) -> None:
        if name in _SKELETON:
            self.whole = False

    def _one_of(self, level: Level, pairs: Mapping[str, Pair], where: str, meant: set[str]) -> None:
        written = [name for name in level.one_of if name in pairs and pairs[name].value.value is not None]
        if not level.one_of or len(written) == 1 or (not written and meant & set(level.one_of)):
            return
        self.whole = False
        choice = " or ".join([", ".join(level.one_of[:-1]), level.one_of[-1]])
        if written:
            details = tuple(f"{name} at {pairs[name].where}" for name in written)
            what = f"exactly one of {choice} is allowed {level.place}, not {len(written)}"
            self.problem(what, pairs[written[1]].where, "Keep one of them.", details=details)
        else:
            self.problem(f"one of {choice} is needed {level.place}", where, f"Add {level.one_of[0]}: and a list below it.")

    # ---- keys that the level does not have

    def _unknown(self, name: str, pair: Pair, level: Level, siblings: Mapping[str, Pair], reported: dict[str, Setting]) -> str:
        """Report such a key; the key that was meant, if that is clear. Parameters reported here are added to `reported`."""
        if name.startswith(("x-", "_")):
            return ""
        used = any(anchor in self.aliased for anchor in pair.value.anchors)
        if used and name not in self.parameter_names and not elsewhere(name, level):
            return ""  # a key of the user's own, for values that are used elsewhere by alias
        misuse = explain(name, pair, level, siblings, self.parameter_names)
        if not self._misuse(misuse, pair.where):
            return ""
        if name in self.parameter_names or misuse.meant in self.parameter_names:
            reported[misuse.meant or name] = Setting((), pair.where)
        if misuse.meant == "parameters" and isinstance(pair.value.value, dict):
            reported.update({inner: Setting((), p.where) for inner, p in pair.value.value.items()})
        self._broken(misuse.meant)
        return misuse.meant

    def is_parameter(self, name: str, where: str) -> bool:
        misuse = elsewhere(name, None)
        if (name not in RETIRED and name not in HARMLESS and not misuse) or name in self.parameter_names:
            return True
        if name in RETIRED:
            what, fix = RETIRED[name]
            self.misused(what, where, fix, ParameterError)
        elif name in HARMLESS:
            self.warn(HARMLESS[name], where, "Remove it.")
        elif misuse:
            self._misuse(misuse, where)
        return False
