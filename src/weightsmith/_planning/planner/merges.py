"""A recipe of one merge, step by step: what it asks for, its models opened, their tensors matched, the draft of its output.

Each step sees as far as it can, and passes on the problems and warnings that it finds: the recipe alone (`MergeRequest`), the
models alone (`OpenedModels`), which tensors of which models belong together (`MatchedModels`), and then layers, tensors and
config.json. Only the first and the last depend on the values of parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from weightsmith._base.errors import Finding, LayerError, MethodError, PlanError, RecipeError, WeightsmithError
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._base.text import some_lines, status
from weightsmith._files.containers import Naming
from weightsmith._files.copied import left_out_findings, merged_metadata, metadata_findings
from weightsmith._files.hf_folder import natural_key
from weightsmith._methods import any_method, code_of
from weightsmith._methods.method import Method
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import Structure
from weightsmith._models.structure.incomplete import seems_to_lack
from weightsmith._models.structure.parts import find_parts
from weightsmith._models.structure.resize import LAYERS_UNSPECIFIED
from weightsmith._models.tokenizers.files import json_bytes, settings_in, settings_of
from weightsmith._models.tokenizers.vocabulary import FILES
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.agreement import (
    ComparedModel,
    compared,
    disagreements,
    of_different_architectures,
    of_vocabularies,
)
from weightsmith._planning.planner.files import (
    GENERATION,
    NO_CONFIG,
    carried,
    held_files,
    lacking,
    move_alignment_heads,
    output_config,
)
from weightsmith._planning.planner.inputs import (
    analyse_all,
    at,
    choose_classifier,
    choose_donor,
    match_patterns,
    missing_models,
    names_ema,
    number_models,
    open_models,
)
from weightsmith._planning.planner.loading import Question, question_of, with_lacking
from weightsmith._planning.planner.match import InputModels, ModelNames
from weightsmith._planning.planner.outputs import StepMaker, takes_head
from weightsmith._planning.planner.parameters import Audit, Resolver
from weightsmith._planning.planner.pipelines import Pipeline, taken_parts, without_foreign
from weightsmith._planning.planner.prepared import Prepared, code_files, model_input
from weightsmith._planning.planner.segments import Account, Placement, Placer, Region, SegmentMaker
from weightsmith._planning.planner.steps import DTypes, MeasuredSteps, factor_problems, with_needs, with_statistics
from weightsmith._planning.planner.tensor_data import copy_problem
from weightsmith._planning.planner.vocabulary import Aligned, VocabularyPlanner, lost_tokens
from weightsmith._planning.recipe import ModelRef, Recipe
from weightsmith._plans import PlanDraft, Product, Provenance, Settings, Step, TakenForCopy
from weightsmith._version import __version__

Opening = Callable[
    [Sequence[ModelRef], ExitStack, Mapping[str, Checkpoint | None], bool],
    tuple[list[Checkpoint | None], list[WeightsmithError]],
]
"""Opens models, as `open_models` does."""

_ONE_MODEL = "take them from one model: give the others weight 0 there, with `filter: lora_`"
"""What to do with factors of adapters that belong to the models themselves."""


@dataclass(frozen=True, slots=True)
class MergeRequest:
    """What a recipe asks for, known before a model is opened.

    recipe   with models in place of patterns
    folder   that its paths start from
    models   index of each reference
    refs     the models, by index
    method   None: unknown, which is one of the problems
    regions  the segments of the output
    audit    of their parameters
    """

    recipe: Recipe
    options: RecipeOptions
    folder: Path
    models: Mapping[ModelRef, int]
    refs: Sequence[ModelRef]
    method: Method | None
    regions: Sequence[Region]
    audit: Audit | None
    problems: tuple[WeightsmithError, ...]
    warnings: tuple[Finding, ...]

    @property
    def labels(self) -> list[str]:
        """The models, as the user named them."""
        return [str(ref) for ref in self.refs]

    @property
    def dtype(self) -> DType | None:
        """The dtype of the output, if one is asked for."""
        return self.options.out_dtype or self.recipe.out_dtype or self.recipe.dtype

    @property
    def layers_key(self) -> str:
        """The key of the recipe that determines the layers of the output."""
        return "slices" if self.recipe.slices else "modules" if self.recipe.modules else "models"

    @property
    def matching(self) -> object:
        """Everything that `open_request` and `match` depend on."""
        recipe = self.recipe
        return self.models, recipe.base_model, recipe.tokenizer, recipe.chat_template, recipe.stages, self.folder

    def refusal(self, problems: Sequence[WeightsmithError]) -> PlanError:
        """The error with all problems: those with a line in the recipe first, in its order."""
        return PlanError(in_order({(type(p), str(p)): p for p in problems}.values(), self.recipe.filename))


def in_order(problems: Iterable[WeightsmithError], filename: str) -> list[WeightsmithError]:
    """The problems with a line in the recipe first, in its order. filename: of the recipe, which these lines begin with."""

    def line(problem: WeightsmithError) -> tuple[float, int]:
        match = re.match(r":(\d+):(\d+)", problem.finding.where.removeprefix(filename))
        return (int(match[1]), int(match[2])) if match else (float("inf"), 0)

    return sorted(problems, key=line)


_ALIKE = re.compile(r"'[^']*'|\d[\d,]*")
"""What differs in warnings of one kind: names in quotes, and numbers."""
_SHOWN_ALIKE = 5


def folded(findings: Iterable[Finding]) -> list[Finding]:
    """The first five warnings of each kind, with the number of the others.

    A recipe may hold thousands of filters that match nothing: each would be shown with its line.

    >>> [finding.what for finding in folded(Finding(f"'{name}' fits no tensor") for name in "abcdefg")][3:]
    ["'d' fits no tensor", "'e' fits no tensor; so for 2 more like it"]
    """
    shown: list[Finding] = []
    last: dict[tuple[str, str], int] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for finding in findings:
        kind = _ALIKE.sub("", finding.what), finding.fix
        counts[kind] += 1
        if counts[kind] <= _SHOWN_ALIKE:
            last[kind] = len(shown)
            shown.append(finding)
    for kind, n in counts.items():
        if n > _SHOWN_ALIKE:
            finding = shown[last[kind]]
            shown[last[kind]] = replace(finding, what=f"{finding.what}; so for {n - _SHOWN_ALIKE:,} more like it")
    return shown


def missing_methods(methods: Iterable[tuple[str, str]], find_method: Callable[[str], Method]) -> list[WeightsmithError]:
    """Problems of the methods of a broken recipe. methods: names, and where they are written."""
    problems: list[WeightsmithError] = []
    for name, where in methods:
        try:
            find_method(name)
        except RecipeError as error:
            problems.append(at(error, where))
    return problems


def read_request(
    recipe: Recipe,
    options: RecipeOptions,
    problems: Sequence[WeightsmithError],
    find_method: Callable[[str], Method],
    folder: Path,
) -> MergeRequest:
    """What a recipe asks for. problems: found while it was read. Raises PlanError for patterns that match nothing."""
    problems, method = list(problems), None
    try:
        method = checked = find_method(recipe.merge_method)
    except RecipeError as error:
        problems.append(at(error, recipe.at("merge_method")))
        checked = any_method()
        if isinstance(error, MethodError):  # a method of the user's own: its parameters are not known
            checked = replace(checked, parameters=())
    base = recipe.base_model if method is not None and method.base != "input" else None
    recipe, unmatched, findings = match_patterns(recipe, base)
    models, refs = number_models(recipe)
    request = MergeRequest(
        recipe, options, folder, models, refs, method, (), None, tuple(problems), (*recipe.findings, *findings)
    )
    maker = SegmentMaker(recipe, checked, models, request.labels)
    regions = maker.regions()
    audit = Audit(checked, recipe.at("merge_method"), lenient=options.lenient)
    segments = [segment for region in regions for segment in region.segments]
    known = method is not None or bool(checked.parameters)
    if unmatched:  # how many models there are is not known
        if known:
            audit.look(segments)
        raise request.refusal([*problems, *unmatched, *audit.problems, *missing_models(refs)])
    if known:
        audit.run(segments)
    return replace(
        request,
        regions=regions,
        audit=audit,
        problems=(*problems, *maker.problems, *audit.problems),
        warnings=(*request.warnings, *maker.warnings, *audit.warnings),
    )


@dataclass(frozen=True, slots=True)
class OpenedModels:
    """The models of a recipe.

    checkpoints  None for one that cannot be used
    structures   of each
    donor        index of the model that gives names, config.json and other files
    """

    checkpoints: Sequence[Checkpoint | None]
    structures: Sequence[Structure | None]
    donor: int
    problems: tuple[WeightsmithError, ...]
    warnings: tuple[Finding, ...]

    @property
    def inputs(self) -> list[Checkpoint]:
        """The models that could be opened."""
        return [checkpoint for checkpoint in self.checkpoints if checkpoint is not None]


def open_request(
    request: MergeRequest, stack: ExitStack, results: Mapping[str, Checkpoint | None], opening: Opening = open_models
) -> OpenedModels:
    """The models, opened; `stack` closes them. results: of other recipes, see `open_models`.

    Raises PlanError if nothing more can be said, without a donor.
    """
    opened, problems = opening(request.refs, stack, results, request.options.ignore_quantization_config)
    status("planning")
    structures = analyse_all(opened)
    is_pipeline = bool(opened) and opened[0] is not None and bool(opened[0].parts)
    donor, findings = choose_donor(structures[:1] if is_pipeline else structures, request.labels)
    specs = [{} if checkpoint is None else checkpoint.specs for checkpoint in opened]
    base = None if request.recipe.base_model is None else request.models[request.recipe.base_model]
    if request.method is not None and donor == base and takes_head(request.method, specs, base):
        donor, findings = choose_classifier(specs, donor, request.labels)
    if structures[donor] is None:
        raise request.refusal([*request.problems, *problems])
    return OpenedModels(opened, structures, donor, tuple(problems), tuple(findings))


@dataclass(frozen=True, slots=True)
class MatchedModels:
    """Which tensors of the models belong together.

    aligned  the vocabulary of the output; None if a model is missing
    specs    the tensors of each model, with the output's rows
    names    of each model under the donor's; None for one that is missing
    alike    what is compared of the models
    differences  warnings for what differs in it: files are read by the first call
    """

    aligned: Aligned | None
    specs: Sequence[Mapping[str, TensorSpec]]
    names: Sequence[ModelNames | None]
    problems: tuple[WeightsmithError, ...] = ()
    warnings: tuple[Finding, ...] = ()
    alike: Sequence[ComparedModel] = ()
    differences: Callable[[], Sequence[Finding]] = tuple


def match(request: MergeRequest, opened: OpenedModels, stack: ExitStack) -> MatchedModels:
    """Match the models' tensors by name, and their vocabularies. stack: closes what is opened for that."""
    if None in opened.checkpoints:
        specs: Sequence[Mapping[str, TensorSpec]] = [{} if c is None else c.specs for c in opened.checkpoints]
        return MatchedModels(None, specs, _match_all(opened, specs))
    asked = request.recipe, request.labels, request.models, request.folder
    planner = VocabularyPlanner(*asked, opened.inputs, opened.donor, stack)
    aligned, problems = planner.plan()
    specs = without_foreign(aligned.specs, opened.inputs, opened.inputs[opened.donor])
    names = _match_all(opened, specs)
    structures = [structure for structure in opened.structures if structure is not None]
    alike = [compared(*model) for model in zip(request.labels, opened.inputs, structures, strict=True)]
    taken = {"tokenizer": aligned.tokenizer, "template": aligned.template}
    differ = cache(partial(disagreements, alike, opened.donor, seen=planner.seen, **taken))
    return MatchedModels(aligned, specs, names, tuple(problems), tuple(aligned.findings), alike, differ)


def _match_all(opened: OpenedModels, specs: Sequence[Mapping[str, TensorSpec]]) -> list[ModelNames | None]:
    """The names of each model under the donor's; models that share a structure share the work."""
    donor = opened.donor
    shape = opened.structures[donor]
    assert shape is not None
    types = [None if c is None else (c.config or {}).get("model_type") for c in opened.checkpoints]
    known: dict[tuple[int, bool], ModelNames] = {}
    matched: list[ModelNames | None] = []
    for structure, tensors, kind in zip(opened.structures, specs, types, strict=True):
        one_class = isinstance(kind, str) and kind == types[donor]
        if structure is None:
            matched.append(None)
        elif (id(structure), one_class) in known:
            matched.append(known[id(structure), one_class].of_twin(tensors))
        else:
            names = ModelNames(structure, tensors, shape, specs[donor], one_class=one_class)
            known[id(structure), one_class] = names
            matched.append(names)
    return matched


def _merged_paths(refs: Iterable[ModelRef], stages: Mapping[str, Recipe | None]) -> list[str]:
    """Paths of models and their adapters, of several revisions with these.

    stages  the recipes whose results are models: these stand for their own models
    """
    paths: dict[str, dict[str, None]] = {}  # to revisions
    walked: set[str] = set()  # results use each other: walking one again for each way to it is exponential work

    def walk(ref: ModelRef) -> None:
        recipe = stages.get(ref.path)
        if recipe is None:
            paths.setdefault(ref.path, {})[ref.revision] = None
        elif ref.path not in walked:
            walked.add(ref.path)
            for inner in match_patterns(recipe, recipe.base_model)[0].references:
                walk(inner)
        if ref.lora is not None and not names_ema(ref.lora.path):
            paths.setdefault(ref.lora.path, {})[ref.lora.revision] = None

    for ref in refs:
        walk(ref)
    return [
        f"{path}@{revision}" if revision and len(revisions) > 1 else path
        for path, revisions in paths.items()
        for revision in revisions
    ]


def _in_model_order(steps: Sequence[Step], stored: Mapping[str, TensorSpec]) -> list[Step]:
    """The steps as a checkpoint's tensors are ordered. stored: the donor's tensors, in this order."""
    place = {name: i for i, name in enumerate(stored)}
    if all(step.out.name in place for step in steps):
        return sorted(steps, key=lambda step: place[step.out.name])
    return sorted(steps, key=lambda step: natural_key(step.out.name))


def assemble_matched(request: MergeRequest, opened: OpenedModels, matched: MatchedModels) -> Prepared:
    """The draft of the output. Raises PlanError with all problems of the recipe, the models and their tensors."""
    return _Assembler(request, opened, matched).assemble()


class _Assembler:
    """Collects problems and warnings of the output, and its parts."""

    def __init__(self, request: MergeRequest, opened: OpenedModels, matched: MatchedModels) -> None:
        self.request, self.opened, self.matched = request, opened, matched
        self.recipe, self.labels, self.inputs = request.recipe, request.labels, opened.inputs
        shape = opened.structures[opened.donor]
        assert shape is not None
        self.shape = shape
        self.problems = [*request.problems, *opened.problems, *matched.problems]
        self.warnings = [*request.warnings, *opened.warnings, *matched.warnings]
        self.warnings += [note for checkpoint in self.inputs for note in checkpoint.notes]

    def assemble(self) -> Prepared:
        request, opened, aligned, method = self.request, self.opened, self.matched.aligned, self.request.method
        taken = self._taken()
        placer = Placer(self.recipe, self.labels, self.matched.names, self.shape, taken)
        placements = placer.place(request.regions)
        self.problems += placer.problems
        if aligned is None or method is None or request.audit is None or not placements:
            raise self._refusal()
        donor, label = self.inputs[opened.donor], self.labels[opened.donor]
        resolver = Resolver(method, self.labels, request.audit.wrong)
        outputs = self._outputs(method, resolver, placements)
        problems, idle = resolver.finish()
        self.problems += problems
        if outputs.problems or placer.problems or any(segment.broken for r in request.regions for segment in r.segments):
            raise self._refusal()
        dropped, lost = outputs.account.settle(self.shape, opened.donor, placements)
        self.problems += lost
        copies = self._copies(outputs)
        pipeline = Pipeline(self.inputs, self.labels, opened.donor, taken)
        ordered = _in_model_order([*outputs.steps, *pipeline.copies(outputs.dtypes)], self.matched.specs[opened.donor])
        try:
            ordered, tables, dropped = aligned.place(ordered, outputs.counterpart, dropped)
        except PlanError as error:
            raise self._refusal(error.problems) from error
        steps, products = with_needs(ordered, resolver.settings, method)
        self.problems += factor_problems(steps, label, _ONE_MODEL)
        measured = self._measured(method, steps, resolver)
        config = self._config(donor, outputs, steps)
        self._add_files(aligned, pipeline, steps)
        aligned = self._with_generation(aligned, donor, outputs)
        if config is not None and aligned.move is not None:
            config, lost_ids = aligned.move(config)
            self.warnings += lost_tokens(lost_ids, "config.json")
        if self.problems:
            raise self._refusal()
        self.warnings += [*self._lacking(donor, label), *self.matched.differences(), *pipeline.findings()]
        self.warnings += [*self._untouched(placements, label), *outputs.warnings, *outputs.account.findings()]
        self.warnings += [*outputs.dtypes.findings(), *idle, *left_out_findings(donor.left_out, label)]
        self.warnings += metadata_findings(self.labels, [c.naming.metadata for c in self.inputs], self.opened.donor)
        draft = self._draft(method, aligned, [*products, *measured.products], config, resolver.settings)
        draft.naming = self._named(pipeline.naming(), measured.steps, draft.products)
        draft.dropped, draft.copies = [*dropped, *pipeline.dropped()], copies
        draft.steps, draft.tables = measured.steps, list(tables)
        named = [*code_files(draft), *aligned.named, *measured.files]
        loading = self._loading(draft, donor, outputs)
        return Prepared(draft, self.inputs, self.shape, outputs.origins, resolver, named, loading=loading)

    def _refusal(self, further: Sequence[WeightsmithError] = ()) -> PlanError:
        """The error with all problems. Those of layers name what models seem to lack, which may be their reason."""
        problems = [*self.problems, *further]
        lacking = self._incomplete() if any(isinstance(problem, LayerError) for problem in problems) else []
        return self.request.refusal([with_lacking(p, lacking) if isinstance(p, LayerError) else p for p in problems])

    def _incomplete(self) -> list[str]:
        """What each input seems to lack, a line each."""
        lines = []
        for label, checkpoint, structure in zip(self.labels, self.opened.checkpoints, self.opened.structures, strict=True):
            if checkpoint is not None and structure is not None and checkpoint.plan is None:
                lines += [f"{label} has no {one}" for one in seems_to_lack(structure, checkpoint.specs, checkpoint.config)]
        return lines

    def _named(self, naming: Naming, steps: Sequence[Step], products: Sequence[Product]) -> Naming:
        """With the names of the models that are read in the metadata of image models, in place of the donor's list."""
        refs, stages = self.request.refs, self.recipe.stages
        if len(refs) == 1 and len(_merged_paths(refs, stages)) == 1:
            return naming
        made_of = (*steps, *(step for product in products for step in product.steps))
        used = {read.model for step in made_of for read in step.reads}
        used |= {model for product in products for model in product.models}
        paths = _merged_paths((ref for i, ref in enumerate(refs) if i in used), stages)
        others = [self.inputs[i].metadata for i in sorted(used) if i >= 0]
        metadata = merged_metadata(naming.metadata, paths, others, alone=self.inputs[self.opened.donor].alone)
        return replace(naming, metadata=metadata)

    def _outputs(self, method: Method, resolver: Resolver, placements: Sequence[Placement]) -> StepMaker:
        """The output tensors, and their problems."""
        names = [n for n in self.matched.names if n is not None]
        base = None if self.recipe.base_model is None else self.request.models[self.recipe.base_model]
        models = InputModels(
            self.labels,
            [c.config for c in self.inputs],
            names,
            self.opened.donor,
            base,
            tokenizes=not {*FILES}.isdisjoint(self.inputs[self.opened.donor].files),
            as_stored=lambda model, tensor: self.inputs[model].location(tensor) is not None,
        )
        dtypes = DTypes(self.request.dtype, [c.kept_specs for c in self.inputs])
        outputs = StepMaker(models, method, resolver, Account(self.labels, names), dtypes)
        outputs.make(placements)
        self._add_mismatches(outputs)
        return outputs

    def _copies(self, outputs: StepMaker) -> list[TakenForCopy]:
        """What is left out as a copy and cannot be read yet. The others are compared: those that are no copies are problems."""
        readable = [not checkpoint.missing for checkpoint in self.inputs]
        for model, tensor, other in outputs.copies:
            if readable[model] and (problem := copy_problem(self.inputs[model], self.labels[model], tensor, other)) is not None:
                self.problems.append(problem)
        return [TakenForCopy(*copy) for copy in outputs.copies if not readable[copy[0]]]

    def _add_files(self, aligned: Aligned, pipeline: Pipeline, steps: Sequence[Step]) -> None:
        """Add the files of the parts of a pipeline; they replace the donor's."""
        pipeline.settle(steps)
        aligned.files.update(pipeline.configs(steps, self.shape, self.request.dtype))
        files, replaced = pipeline.files()
        aligned.files.update(files)
        aligned.removed |= replaced - aligned.files.keys()

    def _with_generation(self, aligned: Aligned, donor: Checkpoint, outputs: StepMaker) -> Aligned:
        """With a generation_config.json that fits the layers of the output; a copy, because other plans share `aligned`."""
        if not outputs.layers or GENERATION not in {*donor.files, *aligned.files}:
            return aligned
        donor.fetch([GENERATION] if GENERATION in donor.files else [])
        data = aligned.files.get(GENERATION)
        generation = settings_of(donor.folder, donor.files, GENERATION) if data is None else settings_in(data)
        moved = move_alignment_heads(generation, self.shape, outputs.layers)
        return aligned if moved == generation else replace(aligned, files={**aligned.files, GENERATION: json_bytes(moved)})

    def _taken(self) -> Mapping[str, int]:
        """Parts of a pipeline that come from another model as they are."""
        if self.matched.aligned is None:
            return {}
        taken, problems = taken_parts(self.recipe.modules, self.request.models, self.inputs, self.labels, self.opened.donor)
        self.problems += problems
        return taken

    def _draft(
        self,
        method: Method,
        aligned: Aligned,
        products: list[Product],
        config: dict[str, Any] | None,
        settings: Sequence[Settings],
    ) -> PlanDraft:
        """The draft without its steps."""
        options, donor = self.request.options, self.inputs[self.opened.donor]
        draft = PlanDraft(
            provenance=made_by(method),
            models=[replace(model_input(c), ref=label) for label, c in zip(self.labels, self.inputs, strict=True)],
            settings=list(settings),
            products=products,
            config=config,
            donor=self.opened.donor,
            carried=list(carried(donor.files, aligned.files, aligned.removed)),
            files=dict(aligned.files),
            vocabulary=aligned.summary,
            naming=donor.naming,
            max_shard_bytes=options.shard_bytes,
            seed=options.seed,
            warnings=folded(self.warnings),
            recipe=self.recipe.text,
        )
        draft.lacking = lacking(zip(self.labels, (c.files for c in self.inputs), strict=True), held_files(draft, donor.folder))
        return draft

    def _measured(self, method: Method, steps: Sequence[Step], resolver: Resolver) -> MeasuredSteps:
        """The steps with what the method knows of the models from a text."""
        request = self.request
        measured = with_statistics(
            method, self.recipe, request.models, self.inputs, self.labels, steps, resolver.settings, request.options.seed
        )
        self.problems += measured.problems
        self.warnings += measured.findings
        return measured

    def _add_mismatches(self, outputs: StepMaker) -> None:
        """The problems of the tensors, without those that follow from vocabularies that could not be aligned."""
        unaligned, where = bool(self.matched.problems), self.recipe.at(self.request.layers_key)
        problems = [p for p in outputs.problems if not (unaligned and of_vocabularies(p))]
        self.problems += of_different_architectures(problems, self.matched.alike, self.opened.donor, where)

    def _loading(self, draft: PlanDraft, donor: Checkpoint, outputs: StepMaker) -> Question | None:
        """What transformers is to be asked, if the output has other layers than the donor."""
        if not outputs.layers or not self.request.options.check_loading:
            return None
        where, specs = self.recipe.at(self.request.layers_key), donor.specs.values()
        question = question_of(draft, donor.config, specs, self.shape, donor.ref, where=where, layers=outputs.layers)
        return None if question is None else replace(question, lacking=tuple(self._incomplete()))

    def _config(self, donor: Checkpoint, outputs: StepMaker, steps: Sequence[Step]) -> dict[str, Any] | None:
        """config.json of the output; None when the donor has none."""
        if donor.parts or (donor.config is None and find_parts(list(donor.specs))):  # a single file of diffusion models
            return None
        if donor.config is None:
            from weightsmith._models.formats.gguf.diffusion.families import find_family

            if find_family(donor.specs):  # programs recognise it by the names of its tensors
                return None
            alone = any(donor.ref.endswith(name) for name in donor.weights)
            fix = "name its folder, not the file" if alone else "put a config.json into its folder"
            self.warnings.append(Finding(f"{NO_CONFIG}: {donor.ref} has none", fix=fix))
            return None
        try:
            config, notes = output_config(
                donor.config,
                self.shape,
                outputs.layers,
                [step.out for step in steps],
                stored=donor.specs,
                asked=self.request.dtype,
                untie=outputs.untie,
            )
        except WeightsmithError as error:
            self.problems.append(at(error, self.recipe.at(self.request.layers_key)))
            return None
        self.warnings += [
            Finding(note, "config.json") for note in notes if LAYERS_UNSPECIFIED in note
        ]  # the others are seen in the plan
        return config

    def _lacking(self, donor: Checkpoint, label: str) -> list[Finding]:
        """What the donor seems to lack. What another model lacks is an error: the models are compared."""
        missing = list(seems_to_lack(self.shape, donor.specs, donor.config)) if donor.plan is None else []
        if not missing:
            return []
        what = f"the model has no {missing[0]}" + (f" ({len(missing) - 1:,} more)" if missing[1:] else "")
        fix = "download or save the model again, if it should have that; loaders fail, or give such weights random values"
        details = tuple(some_lines(missing, 20)) if missing[1:] else ()
        return [Finding(what, donor.ref, details, fix=fix)]

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


def made_by(method: Method) -> Provenance:
    """What the card and the manifest say of a merge by this method."""
    title = f"Merged with weightsmith {__version__}, method `{method.name}` ({method.title})."
    return Provenance(method.name, title, method.source, code=code_of(method.name))
