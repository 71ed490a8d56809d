"""Recipe and headers in, Plan out; or every problem at once."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from weightsmith import methods
from weightsmith import recipe as recipes
from weightsmith._version import __version__
from weightsmith.checkpoint import Checkpoint, open_checkpoint
from weightsmith.errors import Finding, PlanError, RecipeError, UnknownName, WeightsmithError, nearest
from weightsmith.formats.copied import left_out_findings
from weightsmith.formats.files import expand_user
from weightsmith.formats.hf_folder import natural_key
from weightsmith.methods.base import Method
from weightsmith.methods.user_files import loaded
from weightsmith.options import RecipeOptions
from weightsmith.planner.account import Account
from weightsmith.planner.agreement import compared, disagreements, of_different_architectures
from weightsmith.planner.audit import Audit
from weightsmith.planner.companions import carried, joined, lacking
from weightsmith.planner.config import output_config
from weightsmith.planner.decide import decide
from weightsmith.planner.donor import choose_donor
from weightsmith.planner.dtypes import DTypes, kept_specs
from weightsmith.planner.inputs import analyse_all, at, missing_models, number_models, open_models
from weightsmith.planner.loading import Check, Question, question_of
from weightsmith.planner.match import ModelNames
from weightsmith.planner.mismatch import of_vocabularies
from weightsmith.planner.outputs import Models, Origins, Outputs
from weightsmith.planner.parameters import Origin, Resolver
from weightsmith.planner.patterns import match_patterns
from weightsmith.planner.placement import Placement, Placer
from weightsmith.planner.segments import Region, SegmentMaker
from weightsmith.planner.stages import adapted, count_reads, in_order, result_of, same_name, why_written
from weightsmith.planner.vocabulary import Aligned, VocabularyPlanner
from weightsmith.plans import Made, ModelInput, Plan, Step
from weightsmith.recipe import ModelRef, Recipe
from weightsmith.structure import Structure
from weightsmith.structure.resize import LAYERS_UNSPECIFIED
from weightsmith.tensors import TensorSpec
from weightsmith.text import status

if TYPE_CHECKING:
    from weightsmith.engine.computed import Computed

Opening = Callable[
    [Sequence[recipes.ModelRef], ExitStack, Mapping[str, Checkpoint | None]],
    tuple[list[Checkpoint | None], list[WeightsmithError]],
]
"""Opens models, as `open_models` does."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan and the open checkpoints it reads from; close it, or use it as a context manager.

    structure  of the donor
    named      other files that the recipe or the settings name: code of a merge method, prompts, saliency, a measurement
    source     name and text of the recipe, ("", "") if it has no lines
    stages     the other recipes whose results it reads, each after those whose results it reads itself
    again      makes the plan again, with the results of some stages in folders, by `Stage.path`
    loading    what transformers is to be asked of the output before it is published; None: nothing
    """

    plan: Plan
    inputs: tuple[Checkpoint, ...]
    structure: Structure
    origins: Origins = field(default_factory=dict)
    resolver: Resolver | None = None
    named: tuple[Path, ...] = ()
    source: tuple[str, str] = ("", "")
    stages: tuple[Stage, ...] = ()
    again: Callable[[Mapping[str, Path]], Prepared] | None = None
    loading: Question | None = None

    def checked(self) -> Prepared:
        """The same after `loading` was asked, with its warnings. Raises PlanError if transformers could not load the output."""
        if self.loading is None:
            return self
        with Check(self.loading, self.source) as check:
            plan = replace(self.plan, warnings=(*self.plan.warnings, *check.wait()))
        return replace(self, plan=plan, loading=None)

    def explain(self, tensor: str) -> list[Origin]:
        """The value of every parameter of one output tensor, and where the recipe says so; [] for one that is copied.

        Raises UnknownName.
        """
        if all(step.out.name != tensor for step in self.plan.steps):
            fix = "see the names with `weightsmith plan RECIPE --json`, or give a pattern such as '*.0.*'"
            names = [step.out.name for step in self.plan.steps]
            raise UnknownName(f"the output has no tensor '{tensor}'{nearest(tensor, names)}", fix=fix)
        if self.resolver is None or tensor not in self.origins:
            return []
        return self.resolver.explain(self.origins[tensor][0], tensor, *self.origins[tensor][1:])

    @property
    def missing(self) -> dict[Path, int]:
        """Files of hub models that must be downloaded before tensors are read, and their sizes."""
        return {path: nbytes for checkpoint in self.inputs for path, nbytes in checkpoint.missing.items()}

    def stream(self) -> None:
        """Read the weights of hub models where they are; `download` then brings the other files alone."""
        for checkpoint in self.inputs:
            checkpoint.stream()

    def download(self) -> None:
        """Download what is missing. Raises CheckpointError."""
        for checkpoint in self.inputs:
            checkpoint.download()

    def close(self) -> None:
        """Close the checkpoints."""
        for checkpoint in self.inputs:
            checkpoint.close()

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Stage:
    """A recipe whose result is a model of another.

    path    of references to it (`ModelRef.path`)
    label   its name; or where it is, if it is written inside another
    plan    of its result
    source  its result, computed when it is read
    reads   tiles that are read for one of its tiles
    depth   results that are computed for it, each for the next
    why     why it must be written before it can be read; "" if it need not be
    again   makes its plan again, with the results of other stages in folders
    """

    path: str
    label: str
    plan: Plan
    source: Computed
    reads: int
    depth: int
    why: str = ""
    again: Callable[[Mapping[str, Path]], Prepared] | None = None

    @classmethod
    def of(cls, path: str, label: str, plan: Plan, inputs: Sequence[Checkpoint], others: Sequence[Stage]) -> Stage:
        """The stage of a plan. others: that it may read."""
        from weightsmith.engine.computed import Computed

        source = Computed(replace(plan, warnings=(), lacking={}, recipe=""), inputs, label)
        known = {id(stage.source): stage for stage in others}
        used = {i: known[id(c.source)] for i, c in enumerate(inputs) if c.plan is not None}
        depth = 1 + max((stage.depth for stage in used.values()), default=0)
        made = cls(path, label, plan, source, count_reads(plan, {i: stage.reads for i, stage in used.items()}), depth)
        return replace(made, why=why_written(plan, source, made.reads, depth))

    def result(self) -> Checkpoint:
        """Its result, as a model of another."""
        return result_of(self.label, self.source, whole=not self.why)


def prepare(
    source: recipes.Source,
    options: RecipeOptions = RecipeOptions(),  # noqa: B008  frozen
) -> Prepared:
    """Read a recipe and its models' headers and plan the merge.

    source   path of a YAML file, YAML text (with a newline), a mapping, or a list of mappings

    Raises PlanError with all problems. No tensor data is read. Cost: headers, and about 20 µs a tensor.
    """
    return prepare_source(source, "merge", options, prepare_recipe)


def prepare_source(
    source: recipes.Source, command: recipes.Command | None, options: RecipeOptions, make: Callable[..., Prepared]
) -> Prepared:
    """Read a recipe and plan it. make: `prepare_recipe`, or a function with its parameters for other recipes.

    Raises PlanError. It holds the text of the recipe, and all missing models even if nothing else of the recipe can be read.
    """
    loaded = recipes.load(
        source,
        command,
        settings=dict(options.settings),
        lenient=options.lenient,
        parameter_names=parameter_names(),
    )
    try:
        if loaded.recipe is None:
            raise PlanError([*loaded.problems, *missing_models(loaded.models)])
        on_disk = isinstance(source, os.PathLike) or (isinstance(source, str) and "\n" not in source)
        again = partial(make, loaded.recipe, options, loaded.problems, folder=Path(str(source)).parent if on_disk else Path())
        return replace(again(), source=loaded.source, again=lambda written: again(written=written))
    except PlanError as error:
        error.source = loaded.source
        raise


def prepare_recipe(
    recipe: Recipe,
    options: RecipeOptions,
    problems: Sequence[WeightsmithError] = (),
    *,
    folder: Path = Path(),
    written: Mapping[str, Path] = MappingProxyType({}),
    opening: Opening = open_models,
) -> Prepared:
    """Plan a recipe that has been read, and before it those whose results it reads; see `prepare`.

    problems  found while it was read
    folder    that paths of the recipe's own code start from
    written   folders with results of other recipes, by `Stage.path`
    opening   opens the models
    """
    with ExitStack() as stack, _no_collection():
        find = partial(methods.find, folder=folder, allow_code=options.allow_code)
        stages = _Stages(recipe, find, folder, options, written)
        stages.prepare(stack)
        planner = _Planner(recipe, [*problems, *stages.problems], options, find, stages.results, folder, opening)
        prepared = planner.prepare(stack)
        stack.pop_all()
        return stages.joined(prepared)


class _Stages:
    """Plans the recipes whose results a recipe reads.

    results   as models, by `ModelRef.path`; None: it has problems
    problems  of all of them
    """

    def __init__(
        self,
        recipe: Recipe,
        find_method: Callable[[str], Method],
        folder: Path,
        options: RecipeOptions,
        written: Mapping[str, Path],
    ) -> None:
        self.problems: list[WeightsmithError] = []
        self.results: dict[str, Checkpoint | None] = dict.fromkeys(recipe.stages)
        self._recipe, self._find, self._folder, self._written = recipe, find_method, folder, written
        self._options = replace(options, out_dtype=None, quantize=None, check_loading=False)
        self._refs = in_order(recipe)
        self._adapted = adapted(recipe, self._refs)
        self._stages: list[Stage] = []

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
            with ExitStack() as own:
                prepared = _Planner(recipe, (), self._options, self._find, self.results, self._folder).prepare(own)
                own.pop_all()
        except PlanError as error:
            self.problems += error.problems
            return
        path, label = ref.path, ref.path if ref.path == recipe.name else str(ref)
        stage = Stage.of(path, label, prepared.plan, prepared.inputs, self._stages)
        again = partial(prepare_recipe, recipe, self._options, folder=self._folder)
        why = "an adapter is applied to it" if path in self._adapted else stage.why
        stage = replace(stage, why=why, again=lambda written: again(written=written))
        result = self.results[path] = stage.result()
        stack.callback(result.close)
        self._stages.append(stage)

    def joined(self, prepared: Prepared) -> Prepared:
        """The plan of the result with all that is known of these."""
        if not self._stages:
            return prepared
        warnings = [warning for stage in self._stages for warning in stage.plan.warnings]
        warnings += same_name([ref for ref in self._refs if ref.path == getattr(self._recipe.stages[ref.path], "name", "")])
        own = prepared.plan
        held = {*own.carried, *own.files, *([] if own.config is None else ["config.json"])}
        missed = joined([*(stage.plan.lacking for stage in self._stages), own.lacking], held)
        plan = replace(own, warnings=tuple(dict.fromkeys([*warnings, *own.warnings])), lacking=missed)
        named = [path for stage in self._stages for path in code_files(stage.plan)]
        return replace(prepared, plan=plan, named=(*named, *prepared.named), stages=tuple(self._stages))


def parameter_names() -> list[str]:
    """The names of all methods' parameters."""
    return sorted({p.name for m in methods.all_methods() for p in m.parameters})


def made_by(method: Method) -> Made:
    """What the card and the manifest say of a merge by this method."""
    own = loaded(method.name)
    title = f"Merged with weightsmith {__version__}, method `{method.name}` ({method.title})."
    return Made(method.name, title, method.source, code=None if own is None else own.code)


def code_files(plan: Plan) -> tuple[Path, ...]:
    """The user's own file that the merge method comes from, if there is one."""
    code = plan.made.code
    return () if code is None or not code.folder else (Path(code.folder) / expand_user(code.name.rpartition(":")[0]),)


def _match_all(
    structures: Sequence[Structure | None], specs: Sequence[Mapping[str, TensorSpec]], donor: int
) -> list[ModelNames | None]:
    """The names of each model under the donor's; models that share a structure share the work."""
    shape = structures[donor]
    assert shape is not None
    made: dict[int, ModelNames] = {}
    matched: list[ModelNames | None] = []
    for structure, own in zip(structures, specs, strict=True):
        if structure is None:
            matched.append(None)
        elif id(structure) in made:
            matched.append(made[id(structure)].of_twin(own))
        else:
            made[id(structure)] = ModelNames(structure, own, shape, specs[donor])
            matched.append(made[id(structure)])
    return matched


def _in_model_order(steps: Sequence[Step], stored: Mapping[str, TensorSpec]) -> list[Step]:
    """The steps as a checkpoint's tensors are ordered. stored: the donor's tensors, in this order."""
    place = {name: i for i, name in enumerate(stored)}
    if all(step.out.name in place for step in steps):
        return sorted(steps, key=lambda step: place[step.out.name])
    return sorted(steps, key=lambda step: natural_key(step.out.name))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: a plan is a million objects and no cycle; looking for one takes a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Planner:
    """The stages: the recipe alone, the models alone, layers, tensors, config.json. Each looks as far as it can see."""

    def __init__(
        self,
        recipe: Recipe,
        problems: Sequence[WeightsmithError],
        options: RecipeOptions,
        find_method: Callable[[str], Method],
        results: Mapping[str, Checkpoint | None],
        folder: Path,
        opening: Opening = open_models,
    ) -> None:
        """results: of other recipes, see `open_models`."""
        self.recipe = recipe
        self.folder = folder
        self.opening = opening
        self.options = options
        self.results = results
        self.problems = list(problems)
        self.method = self._method(find_method)
        base = recipe.base_model if self.method is not None and self.method.base != "input" else None
        self.recipe, self.unmatched, found = match_patterns(recipe, base)
        self.warnings = [*recipe.findings, *found]
        self.asked = options.out_dtype or recipe.out_dtype or recipe.dtype
        self.models, self.refs = number_models(self.recipe)
        self.labels = [str(ref) for ref in self.refs]

    def prepare(self, stack: ExitStack) -> Prepared:
        if self.unmatched:
            self.problems += self.unmatched
            raise self._refusal()
        method = self.method
        regions, audit = self._regions(method, lenient=self.options.lenient) if method is not None else ([], None)
        opened, found = self.opening(self.refs, stack, self.results)
        status("planning")
        self.problems += found
        structures = analyse_all(opened)
        donor, finding = choose_donor(structures, self.labels)
        self.warnings += finding
        shape = structures[donor]
        if method is None or audit is None or shape is None:
            raise self._refusal()
        present = [c for c in opened if c is not None]
        aligned: Aligned | None = None
        unknown = False
        if len(present) == len(opened):
            vocabularies = VocabularyPlanner(self.recipe, present, self.labels, self.models, donor, self.folder, stack)
            aligned, found = vocabularies.plan()
            unknown = bool(found)  # then the vocabularies are not aligned, and their tensors differ
            self.problems += found
            self.warnings += aligned.findings
        specs = [{} if c is None else c.specs for c in opened] if aligned is None else aligned.specs
        matched = _match_all(structures, specs, donor)
        placer = Placer(self.recipe, self.labels, matched, shape)
        placements = placer.place(regions)
        self.problems += placer.problems
        inputs = [c for c in opened if c is not None]
        self.warnings += [note for checkpoint in inputs for note in checkpoint.notes]
        names = [n for n in matched if n is not None]
        if aligned is None or not placements:
            raise self._refusal()
        facts = Models(
            labels=self.labels,
            specs=specs,
            configs=[c.config for c in inputs],
            structures=[n.structure for n in names],
            names=names,
            donor=donor,
            base=self.models[self.recipe.base_model] if self.recipe.base_model is not None else None,
        )
        account, dtypes = Account(self.labels, names), DTypes(self.asked, [kept_specs(c) for c in inputs])
        resolver = Resolver(method, self.labels, audit.wrong)
        outputs = Outputs(facts, method, resolver, account, dtypes)
        outputs.make(placements)
        found, idle = resolver.finish()
        alike = [compared(label, c, s) for label, c, s in zip(self.labels, inputs, facts.structures, strict=True)]
        where = self.recipe.at(self._layers_key)
        mismatches = [p for p in outputs.problems if not (unknown and of_vocabularies(p))]
        self.problems += [*of_different_architectures(mismatches, alike, donor, where), *found]
        if outputs.problems or placer.problems or any(segment.broken for region in regions for segment in region.segments):
            raise self._refusal()
        dropped, lost = account.settle(shape, donor, placements)
        self.problems += lost
        ordered, tables, dropped = aligned.place(_in_model_order(outputs.steps, specs[donor]), outputs.counterpart, dropped)
        steps, products = decide(ordered, resolver.settings, method)
        config = self._config(inputs[donor], shape, outputs, steps, inputs[donor].specs)
        if config is not None and aligned.move is not None:
            config, lost_ids = aligned.move(config)
            self.warnings += [Finding(f"{key} is null: the new tokenizer lacks its token", "config.json") for key in lost_ids]
        if self.problems:
            raise self._refusal()
        self.warnings += disagreements(alike, donor, tokenizer=aligned.tokenizer, template=aligned.template)
        self.warnings += [*self._untouched(placements, self.labels[donor]), *outputs.warnings]
        self.warnings += [*account.findings(), *dtypes.findings(), *idle]
        copied = carried(inputs[donor].files, aligned.files, aligned.removed)
        held = {*copied, *aligned.files, *([] if config is None else ["config.json"])}
        plan = Plan(
            made=made_by(method),
            models=tuple(
                ModelInput(label, c.revision, c.identity, c.plan) for label, c in zip(self.labels, inputs, strict=True)
            ),
            steps=tuple(steps),
            settings=tuple(resolver.settings),
            products=products,
            tables=tables,
            dropped=dropped,
            config=config,
            donor=donor,
            carried=copied,
            files=aligned.files,
            lacking=lacking(zip(self.labels, (c.files for c in inputs), strict=True), held),
            vocabulary=aligned.summary,
            max_shard_bytes=self.options.shard_bytes,
            seed=self.options.seed,
            warnings=tuple(dict.fromkeys([*self.warnings, *left_out_findings(inputs[donor].left_out, self.labels[donor])])),
            recipe=self.recipe.text,
        )
        plan.layout  # noqa: B018  names that cannot be stored show here
        named = *code_files(plan), *aligned.named
        loading = None
        if outputs.layers and self.options.check_loading:
            model, where = inputs[donor], self.recipe.at(self._layers_key)
            loading = question_of(
                plan, model.config, model.specs.values(), shape, model.ref, where=where, layers=outputs.layers
            )
        return Prepared(plan, tuple(inputs), shape, outputs.origins, resolver, named, loading=loading)

    def _method(self, find: Callable[[str], Method]) -> Method | None:
        try:
            return find(self.recipe.merge_method)
        except RecipeError as error:
            self.problems.append(at(error, self.recipe.at("merge_method")))
            return None

    def _regions(self, method: Method, *, lenient: bool) -> tuple[list[Region], Audit]:
        """The recipe's segments, and what can be said of them and their parameters before a model is opened."""
        maker = SegmentMaker(self.recipe, method, self.models, self.labels)
        regions = maker.regions()
        audit = Audit(method, self.labels, self.recipe.at("merge_method"), lenient=lenient)
        audit.run([segment for region in regions for segment in region.segments])
        self.problems += [*maker.problems, *audit.problems]
        self.warnings += [*maker.warnings, *audit.warnings]
        return regions, audit

    def _config(
        self,
        donor: Checkpoint,
        structure: Structure,
        outputs: Outputs,
        steps: Sequence[Step],
        stored: Mapping[str, TensorSpec],
    ) -> dict[str, Any] | None:
        """config.json of the output; None when the donor has none."""
        if donor.config is None:
            alone = any(donor.ref.endswith(name) for name in donor.weights)
            fix = "name its folder, not the file" if alone else "put a config.json into its folder"
            self.warnings.append(Finding(f"the output has no config.json: {donor.ref} has none", fix=fix))
            return None
        try:
            config, notes = output_config(
                donor.config,
                structure,
                outputs.layers,
                [step.out for step in steps],
                stored=stored,
                asked=self.asked,
                untie=outputs.untie,
            )
        except WeightsmithError as error:
            self.problems.append(at(error, self.recipe.at(self._layers_key)))
            return None
        self.warnings += [
            Finding(note, "config.json") for note in notes if LAYERS_UNSPECIFIED in note
        ]  # the others are seen in the plan
        return config

    @property
    def _layers_key(self) -> str:
        """The key of the recipe that says which layers the output has."""
        return "slices" if self.recipe.slices else "modules" if self.recipe.modules else "models"

    def _untouched(self, placements: Sequence[Placement], donor: str) -> list[Finding]:
        """A warning for the modules that the recipe does not mention."""
        names = [p.module for p in placements if not p.segments]
        if not names:
            return []
        what = f"modules {', '.join(names)} are" if len(names) > 1 else f"module {names[0]} is"
        if self.recipe.slices:
            why = f"{what} copied from {donor}: 'slices' is about the layers of one module"
            return [Finding(why, self.recipe.at("slices"))]
        fix = "write the module in the recipe, if that is not meant; mergekit leaves it out of the output"
        return [Finding(f"{what} not mentioned, and copied from {donor}", self.recipe.at("modules"), fix=fix)]

    def _refusal(self) -> PlanError:
        """The error with all problems: those with a line in the recipe first, in its order."""
        filename = self.recipe.filename

        def line(problem: WeightsmithError) -> tuple[float, int]:
            match = re.match(r":(\d+):(\d+)", problem.finding.where.removeprefix(filename))
            return (int(match[1]), int(match[2])) if match else (float("inf"), 0)

        unique = {(type(p), str(p)): p for p in self.problems}
        return PlanError(sorted(unique.values(), key=line))
