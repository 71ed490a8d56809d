"""Merges of adapters: a recipe whose models are adapter folders gives an adapter.

The recipe is planned as one of models in which each matrix is the adapter's difference, scaling · B @ A, and the base is zero.
No such matrix is ever computed: each step of that plan becomes one of core matrices (`cores.py`), with the same method,
parameters and role. For PEFT's combinations (`combinations.py`) that plan, a weighted sum, has the weights alone.

Tensors that adapters save whole (`modules_to_save`) are merged as those of models are. Where an adapter does not have one, or
the method needs a base, that is the base model's, which `base_model` may name. It is also what the norms of DoRA are of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from weightsmith import _methods as methods
from weightsmith._base.errors import (
    Finding,
    ParameterError,
    PlanError,
    ShapeError,
    UnknownName,
    Unsupported,
    WeightsmithError,
    nearest,
)
from weightsmith._base.idioms import grouped
from weightsmith._base.options import assignment, named, option_error
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._base.torch_use import needs_torch
from weightsmith._features.adapters.built import WEIGHT
from weightsmith._features.adapters.combinations import MAJORITIES, NAMES, ON_FACTORS, PREFIX, CombinationWork, PeftCombination
from weightsmith._features.adapters.cores import AdaptedModule, CoreWork, MergedWork, Space, basis_steps, core_step, scales_step
from weightsmith._features.adapters.opening import NAME_BASE, ZERO_ADAPTER, OpenedAdapters, different_bases, parameters_of
from weightsmith._features.adapters.placing import AdapterPlaces, SingleFile, as_kernels, layer_of, norms_name, strangers
from weightsmith._features.adapters.report import with_layer
from weightsmith._files.containers import PEFT, Naming
from weightsmith._files.copied import adapter_metadata, merged_metadata
from weightsmith._methods.method import BaseRole
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.lora.beside import differing_files
from weightsmith._models.lora.config import tied_targets, transposed_of
from weightsmith._models.lora.forms import as_matrix
from weightsmith._models.structure.vocabulary import is_vocabulary
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.build import NOTHING, assemble_recipe
from weightsmith._planning.planner.prepared import PlanRequest, Prepared, Written, model_input
from weightsmith._planning.recipe import Entry, Recipe, Setting
from weightsmith._plans import COPY, PRODUCTS, PlanDraft, Product, Read, Step

_SOURCES: Mapping[Space, str] = {
    "core": "Core Space: Panariello et al. 2025, https://arxiv.org/abs/2509.17786.",
    "knots": "KnOTS: Stoica et al. 2024, https://arxiv.org/abs/2410.19735.",
    "compressed": "Compress-then-Merge: 2026, https://arxiv.org/abs/2606.03723.",
}
_PEFT = "PEFT's add_weighted_adapter, https://github.com/huggingface/peft."
_WEIGHTS_OFF = 1e-6
"""How far weights that add up to 1 may be off."""


def _combination(recipe: Recipe, problems: list[WeightsmithError]) -> tuple[Recipe, PeftCombination | None]:
    """PEFT's combination that a recipe names, and the recipe as a weighted sum."""
    name = recipe.merge_method.removeprefix(PREFIX)
    if name == recipe.merge_method:
        return recipe, None
    if name not in NAMES:
        fix = f"write one of {', '.join(PREFIX + known_name for known_name in NAMES)}"
        what = f"PEFT has no combination {name!r}{nearest(name, NAMES)}"
        problems.append(UnknownName(what, where=recipe.at("merge_method"), fix=fix))
        name = "svd"
    parameters, combination = dict(recipe.parameters), PeftCombination(name)
    if combination.prunes():
        density = _plain(parameters.pop("density", None))
        if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
            what = f"{recipe.merge_method} needs one density for all models, more than 0 and at most 1"
            fix = "write parameters: {density: 0.5} at the top level of the recipe"
            problems.append(ParameterError(what, where=recipe.at("merge_method"), fix=fix))
            density = 1.0
        combination = replace(combination, density=float(density))
    if "ties" in name:
        majority = _plain(parameters.pop("majority_sign_method", None)) or "total"
        if majority not in MAJORITIES:
            what = f"majority_sign_method is {majority!r}"
            problems.append(ParameterError(what, where=recipe.at("merge_method"), fix=f"write {' or '.join(MAJORITIES)}"))
            majority = "total"
        combination = replace(combination, majority=str(majority))
    for name, setting in [
        *parameters.items(),
        *(known_name for model in recipe.models for known_name in model.parameters.items()),
    ]:
        if name != "weight":
            what = f"{recipe.merge_method} has no parameter {name!r} here"
            fix = "write weight for each model, and for the recipe what PEFT's combination has: density, majority_sign_method"
            problems.append(ParameterError(what, where=setting.where, fix=fix))
    recipe = replace(
        recipe, models=tuple(replace(model, parameters=_weight_alone(model.parameters)) for model in recipe.models)
    )
    parameters, where = _weight_alone(parameters), recipe.at("merge_method")
    parameters["normalize"] = Setting((Entry(False, None, where),), where)
    return replace(recipe, merge_method="linear", parameters=parameters), combination


def _weight_alone(parameters: Mapping[str, Setting]) -> dict[str, Setting]:
    return {name: setting for name, setting in parameters.items() if name == "weight"}


def _plain(setting: Setting | None) -> object:
    """The value of a parameter without filters and gradients."""
    entries = setting.entries if setting is not None else ()
    return entries[0].value if len(entries) == 1 and entries[0].filter is None else None


def assemble_adapters(request: PlanRequest, written: Written = NOTHING) -> Prepared:
    """`planner.assemble_recipe` for a recipe whose models are adapters."""
    recipe, options = request.recipe, request.options
    assert isinstance(recipe, Recipe)
    all_problems = [*request.problems, *_refusals(recipe, options)]
    if missing := needs_torch():
        all_problems.append(ParameterError(missing.replace("this method", "a merge of adapters")))
    space = cast("Space", options.adapter_space)
    if space == "compressed" and options.adapter_rank is None:
        what = "adapters are compressed to a rank before they are merged"
        all_problems.append(option_error("adapter_space", what, f"write {assignment('adapter_rank', 16)} too"))
    method = recipe.merge_method
    recipe, combination = _combination(recipe, all_problems)
    if combination is not None and space != "core":
        what = "PEFT's combinations are not merged in another space"
        all_problems.append(option_error("adapter_space", what, f"leave out {named('adapter_space')}"))
    role = _base_role(recipe)
    if recipe.base_model is None and role == "required":
        recipe = replace(recipe, base_model=ZERO_ADAPTER)
    rank = options.adapter_rank or 0 if space == "compressed" else 0
    opened = OpenedAdapters(space, rank, method if combination is not None else "", role)
    assembled = assemble_recipe(replace(request, recipe=recipe, problems=tuple(all_problems)), written, opened)
    try:
        _rewrite(assembled.draft, opened, options.adapter_rank, combination)
    except WeightsmithError as error:
        for checkpoint in opened.inputs:
            checkpoint.close()
        raise error if isinstance(error, PlanError) else PlanError([error]) from error
    assembled.inputs = opened.inputs
    return assembled


def _base_role(recipe: Recipe) -> BaseRole:
    try:
        return methods.get(recipe.merge_method).base
    except UnknownName:
        return "input"


def _refusals(recipe: Recipe, options: RecipeOptions) -> Iterator[WeightsmithError]:
    for key in ("slices", "modules"):
        if getattr(recipe, key):
            yield Unsupported(f"adapters are merged as a whole, without {key}", where=recipe.at(key), fix="write models")
    if options.quantize is not None:
        yield Unsupported("an adapter is not quantised", where="quantize", fix="leave it out")


def _rewrite(draft: PlanDraft, opened: OpenedAdapters, rank: int | None, combination: PeftCombination | None) -> None:
    """The draft of a merge of differences, as one of factors. Raises PlanError."""
    if draft.products:
        what = f"{draft.provenance.name} looks at the whole model before it merges, which merges of adapters cannot do"
        raise PlanError([Unsupported(what, where="models", fix="write scope: tensor, or merge models: BASE+ADAPTER")])
    products: list[Product] = []
    steps: list[Step] = []
    ranks = _ranks(opened, rank, combination)
    places = opened.find_places(ranks)
    single = SingleFile(opened.adapters) if opened.adapters[0].file is not None else None
    whole = [step for step in draft.steps if step.out.name in opened.whole]
    _check_sums(draft, whole)
    layers = grouped((_layer(step.out.name), step) for step in draft.steps if step.out.name not in opened.whole)
    for layer, layer_steps in layers.items():
        step_of_matrix = {step.out.name.removesuffix(WEIGHT): step for step in layer_steps}
        modules = list(dict.fromkeys(opened.matrices[matrix] for matrix in step_of_matrix))
        firsts = [step_of_matrix[module.matrices[0]] for module in modules]
        factors = tuple(step for module in modules for step in _factors(opened, module))
        limits = tuple(ranks[module.name] for module in modules)
        if combination is None:
            products += _merged(opened, layer, modules, step_of_matrix, factors, limits)
        else:
            weights = tuple(_weights(draft, step, module) for step, module in zip(firsts, modules, strict=True))
            combined = CombinationWork(combination, tuple(modules), weights, limits, draft.seed)
            products.append(combined.product(f"combined factors of {layer}", factors))
        for step, module in zip(firsts, modules, strict=True):
            rank, dtype = ranks[module.name], step.out.dtype
            kernels = as_kernels(opened.adapters, module, rank)
            steps += _stored(places, module, kernels, dtype) if single is None else single.steps(draft, module, rank, dtype)
    steps += [_whole_step(opened, places, step, draft.provenance.name) for step in whole]
    opened.leave_base([*steps, *(step for product in products for step in product.steps)])
    title, source = draft.provenance.title.replace("Merged with", "LoRA adapters merged with"), _SOURCES[opened.space]
    name, cited = draft.provenance.name, draft.provenance.source
    if combination is not None:
        name, cited, source = f"{PREFIX}{combination.name}", "", _PEFT
        title = title.replace("linear", name)
    relation = "adapter" if single is None else "merge"
    draft.provenance = replace(
        draft.provenance, name=name, title=title, source=f"{cited}\n\n{source}".strip(), relation=relation
    )
    draft.models = [model_input(checkpoint) for checkpoint in opened.inputs]
    draft.steps, draft.products, draft.dropped = steps, products, []
    draft.config, draft.donor, draft.container = None, 0, PEFT
    if single is None:
        draft.config = _config(opened, places, ranks)
    else:
        draft.container = single.container
        files = [adapter.checkpoint for adapter in opened.adapters]
        metadata = adapter_metadata(files[0].metadata, ranks.values(), list(map(float, ranks.values())))
        metadata = merged_metadata(metadata, [file.ref for file in files], [file.metadata for file in files], alone=True)
        draft.naming = Naming(metadata=metadata)
    tokenizer = _tokenizer(opened) if single is None else None
    if tokenizer is not None:
        draft.donor, draft.carried = opened.inputs.index(tokenizer), list(tokenizer.files)
    draft.warnings = [w for w in draft.warnings if "no config.json" not in w.what] + list(_notes(opened))


def _merged(
    opened: OpenedAdapters,
    layer: str,
    modules: Sequence[AdaptedModule],
    step_of_matrix: Mapping[str, Step],
    factors: tuple[Step, ...],
    limits: tuple[int, ...],
) -> tuple[Product, Product]:
    """The products of a layer: the core matrices of its modules, and their merge as factors of these ranks."""
    scaled = modules[0].scaled
    base = tuple(_base_step(opened, module) for module in modules) if scaled else ()
    cores = CoreWork(tuple(modules)).product(f"bases of {layer}", (*factors, *base))
    merges = [core_step(_unfused(step), opened.matrices[name], name, opened.owner_of) for name, step in step_of_matrix.items()]
    firsts = [_unfused(step_of_matrix[module.matrices[0]]) for module in modules]
    scales = [scales_step(step, module, opened.owner_of) for step, module in zip(firsts, modules, strict=True) if scaled]
    bases = [step for module in modules for step in basis_steps(module)]
    work = MergedWork(cores.name, tuple(modules), limits)
    return cores, work.product(f"merged factors of {layer}", (*merges, *bases, *scales, *base))


def _ranks(opened: OpenedAdapters, rank: int | None, combination: PeftCombination | None) -> dict[str, int]:
    """The rank of each module's factors. All experts have the same, as PEFT and vLLM stack them."""
    ranks: dict[str, int] = {}
    for name, module in opened.modules.items():
        if combination is None:
            ranks[name] = min(*module.core, rank or min(module.core))
            continue
        if combination.name in ON_FACTORS and len(set(module.ranks)) > 1:
            what = f"{PREFIX}{combination.name} works on A and on B, and the ranks are {list(module.ranks)}"
            raise ShapeError(what, where=name, fix=f"write {PREFIX}cat or {PREFIX}svd")
        ranks[name] = combination.rank(module.ranks, rank)
    experts = opened.experts if combination is None else []
    return ranks | dict.fromkeys(experts, max((ranks[name] for name in experts), default=0))


def _check_sums(draft: PlanDraft, whole: Sequence[Step]) -> None:
    """Tensors that are saved whole are not differences: a sum of theirs whose weights do not add up to 1 is no such tensor."""
    for step in whole:
        summed = step.pieces[0] if step.pieces else step
        if summed.op == "linear" and not draft.settings[summed.settings].shared["normalize"]:
            total = sum(float(model["weight"] or 0) for model in draft.settings[summed.settings].models)
            if abs(total - 1) > _WEIGHTS_OFF:
                what = f"an adapter saves it whole, and linear without normalize makes {total:g} times such a tensor of it"
                fix = f"write merge_method: task_arithmetic, and {NAME_BASE}"
                raise ParameterError(what, where=step.out.name, fix=fix)


def _weights(draft: PlanDraft, step: Step, module: AdaptedModule) -> tuple[float, ...]:
    """The weights of the adapters that have factors for a module."""
    whole = step.pieces[0] if step.pieces else step
    settings = draft.settings[whole.settings].models
    known = {read.model: float(parameters["weight"] or 0) for read, parameters in zip(whole.inputs, settings, strict=True)}
    return tuple(known.get(owner, 0.0) for owner in module.owners)


def _tokenizer(opened: OpenedAdapters) -> Checkpoint | None:
    """The first adapter with a tokenizer beside it, whose files the merge has."""
    return next((adapter.checkpoint for adapter in opened.adapters if adapter.checkpoint.files), None)


def _notes(opened: OpenedAdapters) -> Iterator[Finding]:
    for checkpoint in opened.inputs:
        yield from checkpoint.notes
    yield from strangers(opened.adapters)
    if error := different_bases(opened.adapters):
        yield replace(
            error.finding, what="adapters that name different bases: all fit the base_model, by names and shapes", fix=""
        )
    first = _tokenizer(opened)
    if first is None:
        return
    for other in [adapter.checkpoint for adapter in opened.adapters if adapter.checkpoint is not first]:
        if names := {*differing_files(first, other), *differing_files(other, first)} if other.files else set[str]():
            what = f"tokenizer files differ from those beside {first.ref}, which are kept: {', '.join(sorted(names))}"
            fix = "check that both were trained with the same chat template"
            if any(map(is_vocabulary, opened.whole.values())):
                fix = "check that both number their tokens alike: rows are merged by number"
            yield Finding(what, other.ref, fix=fix)


def _layer(matrix: str) -> str:
    """The layer of a matrix, as names of products have it."""
    place = with_layer(matrix)
    return f"{place.stack}{place.layer}" if place.stack else layer_of(matrix) or "other modules"


def _factors(opened: OpenedAdapters, module: AdaptedModule) -> Iterator[Step]:
    """Steps of A and B, and of DoRA's norms, of all adapters that have them."""
    for owner in module.owners:
        adapter = opened.adapters[owner]
        if module.experts:
            _, stacked = parameters_of(adapter)[module.name]
            names = {"A": stacked.a, "B": stacked.b}
        else:
            factors = adapter.updates[module.name]
            names = {"A": factors.a, "B": factors.b} | ({"norms": factors.magnitude} if factors.magnitude else {})
        for part, name in names.items():
            spec = adapter.checkpoint.specs[name]
            yield Step(replace(spec, name=module.factor(part, owner), shape=as_matrix(spec.shape)), COPY, (Read(owner, name),))


def _base_step(opened: OpenedAdapters, module: AdaptedModule) -> Step:
    """The step of the base's matrix."""
    assert opened.base is not None
    name = opened.places[module.name]
    return Step(replace(opened.base.specs[name], name=module.base), COPY, (Read(len(opened.adapters), name),))


def _unfused(step: Step) -> Step:
    """A fused matrix as one, as its factors are."""
    return replace(step.pieces[0], out=step.out) if step.pieces else step


def _whole_step(opened: OpenedAdapters, places: AdapterPlaces, step: Step, method: str) -> Step:
    """The step of a tensor that is saved whole, which reads the adapters, and the base."""

    def moved(part: Step) -> Step:
        reads = tuple(opened.whole_read(read, method) for read in part.inputs)
        return replace(part, inputs=reads, pieces=tuple(map(moved, part.pieces)))

    return replace(moved(step), out=replace(step.out, name=places.saved(step.out.name)))


def _stored(places: AdapterPlaces, module: AdaptedModule, specs: Iterable[TensorSpec], dtype: DType) -> Iterator[Step]:
    """Steps of the factors, and of DoRA's norms, as PEFT names them."""
    names = [*places.factors(places.name_of(module.name)), norms_name(module.name)]
    for name, spec in zip(names, specs, strict=False):
        yield Step.copy(TensorSpec(name, dtype, spec.shape), Read(PRODUCTS, spec.name), spec.dtype)


def _config(opened: OpenedAdapters, places: AdapterPlaces, ranks: Mapping[str, int]) -> dict[str, Any]:
    configs = [adapter.checkpoint.config or {} for adapter in opened.adapters]
    named = next((config for config in configs if config.get("base_model_name_or_path")), configs[0])
    written = places.config(
        str(named.get("base_model_name_or_path") or opened.base_name),
        str(named.get("revision") or ""),
        {places.name_of(name): rank for name, rank in ranks.items()},
        sorted(places.modules),  # in full: the base's other modules are not known
        transposed=opened.adapters[0].transposed,
        causal=any(config.get("task_type") == "CAUSAL_LM" for config in configs),
        rank=next((ranks[name] for name in opened.experts), None),
        dora=any(module.scaled for module in opened.modules.values()),
    )
    if opened.ties:
        written |= {"ensure_weight_tying": True, "target_modules": tied_targets(written["target_modules"])}
    if len(tasks := {str(config.get("task_type") or "") for config in configs}) == 1:
        written["task_type"] = tasks.pop() or None
    # The experts of the merge have the layout of the inputs.
    versions = [config.get("peft_version") for config in configs]
    written.pop("peft_version", None)
    if places.parameters and versions[0] and len({transposed_of(version, "") for version in versions}) == 1:
        written["peft_version"] = versions[0]
    # Short names only where every adapter has these targets.
    every = all(len(module.owners) == len(configs) for module in opened.modules.values())
    for key, names in ("target_modules", places.modules), ("target_parameters", places.parameters):
        listed = [sorted(map(str, c[key])) for c in configs if isinstance(c.get(key), list)]
        alike = len(listed) == len(configs) and all(names_of_adapter == listed[0] for names_of_adapter in listed)
        if every and names and alike and all(f".{name}".endswith(tuple(f".{end}" for end in listed[0])) for name in names):
            written[key] = listed[0]
    return written
