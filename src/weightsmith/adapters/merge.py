"""Merges of adapters: a recipe whose models are adapter folders gives an adapter.

The recipe is planned as one of models in which each matrix is the adapter's difference, scaling · B @ A, and the base is zero.
No such matrix is ever computed: each step of that plan becomes one of core matrices (`cores.py`), with the same method,
parameters and role. For PEFT's combinations (`combinations.py`) that plan, a weighted sum, has the weights alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightsmith import methods
from weightsmith.adapters.combinations import MAJORITIES, NAMES, ON_FACTORS, PREFIX, Combination, CombinationWork
from weightsmith.adapters.cores import SPACES, ZERO, Adapted, CoreWork, Space, basis_steps, core_step
from weightsmith.adapters.merged_factors import MergedWork
from weightsmith.adapters.peft import adapter_config, factor_names, targets
from weightsmith.checkpoint import Checkpoint, locate
from weightsmith.containers import PEFT
from weightsmith.errors import (
    Finding,
    MismatchError,
    ParameterError,
    PlanError,
    ShapeError,
    UnknownName,
    Unsupported,
    WeightsmithError,
    nearest,
)
from weightsmith.jobs.requires import needs_torch
from weightsmith.lora import Adapter, open_adapter
from weightsmith.lora.records import CONFIG_NAME
from weightsmith.options import RecipeOptions
from weightsmith.planner import Plan, Prepared
from weightsmith.planner.build import prepare_recipe, prepare_source
from weightsmith.planner.inputs import at
from weightsmith.plans import CAST, COPY, PRODUCTS, Block, ModelInput, Product, Read, Step
from weightsmith.recipe import ModelRef, Recipe, Source
from weightsmith.recipe.values import Entry, Setting
from weightsmith.sources.memory import StateDict
from weightsmith.tensors import DTYPES, DType, TensorSpec

ZERO_ADAPTER = ModelRef("the zero adapter", text="the zero adapter")
"""The base of methods that need one, unless the recipe names another adapter."""
_SOURCES: Mapping[Space, str] = {
    "core": "Core Space: Panariello et al. 2025, https://arxiv.org/abs/2509.17786.",
    "knots": "KnOTS: Stoica et al. 2024, https://arxiv.org/abs/2410.19735.",
    "compressed": "Compress-then-Merge: 2026, https://arxiv.org/abs/2606.03723.",
}
_PEFT = "PEFT's add_weighted_adapter, https://github.com/huggingface/peft."
_WEIGHT = ".weight"


def prepare_merge(source: Source, options: RecipeOptions) -> Prepared:
    """Plan a recipe of `merge`, of models or of adapters. Raises PlanError with all problems."""
    return prepare_source(source, "merge", options, prepare_models)


def prepare_models(
    recipe: Recipe, options: RecipeOptions, problems: Sequence[WeightsmithError] = (), **places: Any
) -> Prepared:
    """`planner.prepare_recipe`, also for a recipe whose models are adapters."""
    if are_adapters(recipe):
        return _prepare_adapters(recipe, options, problems, **places)
    for name, changed in (("rank", options.adapter_rank is not None), ("space", options.adapter_space != "core")):
        if changed:
            what = f"adapter_{name} is the {name} of a merge of adapters, and the models of this recipe are none"
            problems = [*problems, ParameterError(what, where=f"adapter_{name}", fix="leave it out")]
    return prepare_recipe(recipe, options, problems, **places)


def are_adapters(recipe: Recipe) -> bool:
    """Whether every model of the recipe is a local folder with an adapter in it."""
    refs = [each.model for each in recipe.models] + ([] if recipe.base_model is None else [recipe.base_model])
    return bool(recipe.models) and all(ref.lora is None and _is_adapter(ref) for ref in refs)


def _combination(recipe: Recipe, problems: list[WeightsmithError]) -> tuple[Recipe, Combination | None]:
    """PEFT's combination that a recipe names, and the recipe as a weighted sum."""
    name = recipe.merge_method.removeprefix(PREFIX)
    if name == recipe.merge_method:
        return recipe, None
    if name not in NAMES:
        fix = f"write one of {', '.join(PREFIX + each for each in NAMES)}"
        what = f"PEFT has no combination {name!r}{nearest(name, NAMES)}"
        problems.append(UnknownName(what, where=recipe.at("merge_method"), fix=fix))
        name = "svd"
    parameters, found = dict(recipe.parameters), Combination(name)
    if found.prunes():
        density = _plain(parameters.pop("density", None))
        if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
            what = f"{recipe.merge_method} needs one density for all models, more than 0 and at most 1"
            fix = "write parameters: {density: 0.5} at the top level of the recipe"
            problems.append(ParameterError(what, where=recipe.at("merge_method"), fix=fix))
            density = 1.0
        found = replace(found, density=float(density))
    if "ties" in name:
        majority = _plain(parameters.pop("majority_sign_method", None)) or "total"
        if majority not in MAJORITIES:
            what = f"majority_sign_method is {majority!r}"
            problems.append(ParameterError(what, where=recipe.at("merge_method"), fix=f"write {' or '.join(MAJORITIES)}"))
            majority = "total"
        found = replace(found, majority=str(majority))
    for name, setting in [*parameters.items(), *(each for own in recipe.models for each in own.parameters.items())]:
        if name != "weight":
            what = f"{recipe.merge_method} has no parameter {name!r} here"
            fix = "write weight for each model, and for the recipe what PEFT's combination has: density, majority_sign_method"
            problems.append(ParameterError(what, where=setting.where, fix=fix))
    recipe = replace(recipe, models=tuple(replace(own, parameters=_weight_alone(own.parameters)) for own in recipe.models))
    parameters, where = _weight_alone(parameters), recipe.at("merge_method")
    parameters["normalize"] = Setting((Entry(False, None, where),), where)
    return replace(recipe, merge_method="linear", parameters=parameters), found


def _weight_alone(parameters: Mapping[str, Setting]) -> dict[str, Setting]:
    return {name: setting for name, setting in parameters.items() if name == "weight"}


def _plain(setting: Setting | None) -> object:
    """The value of a parameter without filters and gradients."""
    entries = setting.entries if setting is not None else ()
    return entries[0].value if len(entries) == 1 and entries[0].filter is None else None


def _is_adapter(ref: ModelRef) -> bool:
    try:
        place = locate(ref.path, ref.revision or None)
    except WeightsmithError:
        return False
    return isinstance(place, Path) and (place / CONFIG_NAME).is_file() and not (place / "config.json").exists()


class _Opened:
    """Opens adapters for the planner, as models of the differences: it sees names and shapes alone.

    space, rank  of the merge; see `Adapted`
    adapters     in the planner's order, without the zero adapter
    modules      that any of them has factors of
    zeros        1 if the zero adapter comes before them, else 0
    """

    def __init__(self, space: Space, rank: int) -> None:
        self.space, self.rank = space, rank
        self.adapters: list[Adapter] = []
        self.modules: Mapping[str, Adapted] = {}
        self.zeros = 0

    def __call__(
        self, refs: Sequence[ModelRef], stack: ExitStack, results: Mapping[str, Checkpoint | None]
    ) -> tuple[list[Checkpoint | None], list[WeightsmithError]]:
        """See `planner.build.Opening`."""
        problems: list[WeightsmithError] = []
        for ref in refs:
            if ref == ZERO_ADAPTER:
                self.zeros = 1
                continue
            try:
                adapter = open_adapter(ref.path, revision=ref.revision or None)
                stack.callback(adapter.checkpoint.close)
                self.adapters.append(adapter)
            except WeightsmithError as error:
                problems.append(at(error, ref.where))
        if not problems:
            try:
                found = _modules(self.adapters)
                self.modules = {name: replace(each, space=self.space, rank=self.rank) for name, each in found.items()}
            except WeightsmithError as error:
                problems.append(error)
        if problems:
            return [None for _ in refs], problems
        specs = [TensorSpec(f"{module.name}{_WEIGHT}", DTYPES["F32"], module.shape) for module in self.modules.values()]
        return [Checkpoint(str(ref), Path(), _Specs(specs, str(ref))) for ref in refs], []


def _prepare_adapters(
    recipe: Recipe, options: RecipeOptions, problems: Sequence[WeightsmithError] = (), **places: Any
) -> Prepared:
    found = [*problems, *_refusals(recipe, options)]
    if missing := needs_torch():
        found.append(ParameterError(missing.replace("this method", "a merge of adapters")))
    space = next((each for each in SPACES if each == options.adapter_space), None)
    if space is None:
        what = f"adapter_space is {options.adapter_space!r}, not one of {', '.join(SPACES)}"
        found.append(ParameterError(what, where="adapter_space", fix="write --adapter-space core (adapter_space='core')"))
    if space == "compressed" and options.adapter_rank is None:
        what = "adapters are compressed to a rank before they are merged"
        found.append(ParameterError(what, where="adapter_space", fix="write --adapter-rank 16 (adapter_rank=16) too"))
    recipe, combination = _combination(recipe, found)
    if combination is not None and space != "core":
        what = "PEFT's combinations are not merged in another space"
        found.append(ParameterError(what, where="adapter_space", fix="leave it out"))
    if recipe.base_model is None and _needs_base(recipe):
        recipe = replace(recipe, base_model=ZERO_ADAPTER)
    opened = _Opened(space or "core", options.adapter_rank or 0 if space == "compressed" else 0)
    prepared = prepare_recipe(recipe, options, found, opening=opened, **places)
    try:
        plan = _planned(prepared.plan, opened, options.adapter_rank, combination)
    except WeightsmithError:
        for adapter in opened.adapters:
            adapter.checkpoint.close()
        raise
    return replace(prepared, plan=plan, inputs=tuple(adapter.checkpoint for adapter in opened.adapters))


def _needs_base(recipe: Recipe) -> bool:
    try:
        return methods.get(recipe.merge_method).base == "required"
    except UnknownName:
        return False


def _refusals(recipe: Recipe, options: RecipeOptions) -> Iterator[WeightsmithError]:
    for key in ("slices", "modules"):
        if getattr(recipe, key):
            yield Unsupported(f"adapters are merged as a whole, without {key}", where=recipe.at(key), fix="write models")
    if options.quantize is not None:
        yield Unsupported("an adapter is not quantised", where="quantize", fix="leave it out")


def _modules(adapters: Sequence[Adapter]) -> dict[str, Adapted]:
    """What the adapters have factors of. Raises MismatchError and ShapeError for adapters that do not go together."""
    configs = [adapter.checkpoint.config or {} for adapter in adapters]
    first = adapters[0].checkpoint.ref
    bases = [str(config.get("base_model_name_or_path") or "") for config in configs]
    for adapter, base in zip(adapters, bases, strict=True):
        if adapter.replacements:
            what = (
                f"it saves {len(adapter.replacements):,} tensors whole (modules_to_save), which only models can be merged with"
            )
            fix = "merge models: BASE+ADAPTER"
            raise Unsupported(what, where=adapter.checkpoint.ref, details=[next(iter(adapter.replacements))], fix=fix)
        if adapter.stacked:
            what = "factors of all experts of a parameter (target_parameters), which only models can be merged with"
            raise Unsupported(what, where=adapter.checkpoint.ref, fix="merge models: BASE+ADAPTER")
        if any(factors.magnitude for factors in adapter.updates.values()):
            what = "DoRA, whose difference has no low rank"
            raise Unsupported(what, where=adapter.checkpoint.ref, fix="merge models: BASE+ADAPTER")
        if base and bases[0] and _last(base) != _last(bases[0]):
            details = [f"{first}: {bases[0]}", f"{adapter.checkpoint.ref}: {base}"]
            fix = f"merge adapters of one base; if it is one under two names, edit {CONFIG_NAME}"
            raise MismatchError("adapters of different bases", where=adapter.checkpoint.ref, details=details, fix=fix)
        if adapter.transposed != adapters[0].transposed:
            what = "fan_in_fan_out differs: the adapters are of different bases"
            raise MismatchError(what, where=adapter.checkpoint.ref, details=[first], fix="merge adapters of one base")
    owners: dict[str, list[int]] = {}
    for i, adapter in enumerate(adapters):
        for module in adapter.updates:
            owners.setdefault(module, []).append(i)
    found = {}
    for module, own in owners.items():
        shapes = [_shape(adapters[i], module) for i in own]
        if len(set(shapes)) > 1:
            details = [f"{adapters[i].checkpoint.ref}: {list(shape)}" for i, shape in zip(own, shapes, strict=True)]
            raise ShapeError("adapters of different bases", where=module, details=details, fix="merge adapters of one base")
        updates = [adapters[i].updates[module] for i in own]
        ranks = tuple(adapters[i].checkpoint.specs[f.a].shape[0] for i, f in zip(own, updates, strict=True))
        found[module] = Adapted(module, shapes[0], tuple(own), ranks, tuple(f.scaling for f in updates))
    if not found:
        raise MismatchError("the adapters have no factors", where=first, fix="name folders that PEFT has written")
    return found


def _last(name: str) -> str:
    """The last part of a path or hub id: one base may be named by both."""
    return name.rstrip("/").rpartition("/")[2].casefold()


def _shape(adapter: Adapter, module: str) -> tuple[int, int]:
    factors, specs = adapter.updates[module], adapter.checkpoint.specs
    return specs[factors.b].shape[0], specs[factors.a].shape[1]


class _Specs(StateDict):
    """A source of names and shapes, which is never read."""

    def __init__(self, specs: Sequence[TensorSpec], where: str) -> None:
        super().__init__({}, where)
        self.specs = {spec.name: spec for spec in specs}


def _planned(plan: Plan, opened: _Opened, rank: int | None, combination: Combination | None) -> Plan:
    if plan.products:
        what = f"{plan.made.name} looks at the whole model before it merges, which merges of adapters cannot do"
        raise PlanError([Unsupported(what, where="models", fix="write scope: tensor, or merge models: BASE+ADAPTER")])
    products: list[Product] = []
    steps: list[Step] = []
    ranks: dict[str, int] = {}
    layers: dict[str, list[Step]] = {}
    for step in plan.steps:
        module = step.out.name.removesuffix(_WEIGHT)
        layers.setdefault(_layer(module), []).append(step)
    for layer, own in layers.items():
        names = [step.out.name.removesuffix(_WEIGHT) for step in own]
        modules = [opened.modules[name] for name in names]
        factors = tuple(_factors(opened, modules))
        if combination is None:
            cores = CoreWork(tuple(modules)).product(f"bases of {layer}", factors)
            limits = tuple(min(*module.core, rank or min(module.core)) for module in modules)
            work = MergedWork(cores.name, tuple(names), tuple(module.shape for module in modules), limits)
            merges = [_core_step(step, opened.modules[name], opened.zeros) for step, name in zip(own, names, strict=True)]
            bases = [step for module in modules for step in basis_steps(module)]
            products += [cores, work.product(f"merged factors of {layer}", (*merges, *bases))]
        else:
            for each in modules if combination.name in ON_FACTORS else ():
                if len(set(each.ranks)) > 1:
                    what = f"{PREFIX}{combination.name} works on A and on B, and the ranks are {list(each.ranks)}"
                    fix = f"write {PREFIX}cat or {PREFIX}svd"
                    raise PlanError([ShapeError(what, where=each.name, fix=fix)])
            limits = tuple(combination.rank(module.ranks, rank) for module in modules)
            weights = tuple(_weights(plan, step, module) for step, module in zip(own, modules, strict=True))
            combined = CombinationWork(combination, tuple(modules), weights, limits, plan.seed)
            products.append(combined.product(f"combined factors of {layer}", factors))
        ranks |= dict(zip(names, limits, strict=True))
        for step, name in zip(own, names, strict=True):
            steps += _stored(opened, opened.modules[name], ranks[name], step.out.dtype)
    first = opened.adapters[0].checkpoint
    title, source = plan.made.title.replace("Merged with", "LoRA adapters merged with"), _SOURCES[opened.space]
    name, cited = plan.made.name, plan.made.source
    if combination is not None:
        name, cited, source = f"{PREFIX}{combination.name}", "", _PEFT
        title = title.replace("linear", name)
    adapters = [adapter.checkpoint for adapter in opened.adapters]
    return replace(
        plan,
        made=replace(plan.made, name=name, title=title, source=f"{cited}\n\n{source}".strip(), relation="adapter"),
        models=tuple(ModelInput(each.ref, each.revision, each.identity) for each in adapters),
        steps=tuple(steps),
        products=tuple(products),
        config=_config(opened, ranks),
        donor=0,
        carried=(),
        dropped=(),
        container=PEFT,
        warnings=tuple(w for w in plan.warnings if "no config.json" not in w.what) + tuple(_notes(adapters, first)),
    )


def _weights(plan: Plan, step: Step, module: Adapted) -> tuple[float, ...]:
    """Of the adapters that have factors of a module."""
    whole = step.pieces[0] if step.pieces else step
    settings = plan.settings[whole.settings].models
    known = {read.model: float(own["weight"] or 0) for read, own in zip(whole.inputs, settings, strict=True)}
    return tuple(known.get(owner, 0.0) for owner in module.owners)


def _notes(adapters: Sequence[Checkpoint], first: Checkpoint) -> Iterator[Finding]:
    for adapter in adapters:
        yield from adapter.notes


def _layer(module: str) -> str:
    """The name of a module up to its first number, which is the layer's."""
    parts = module.split(".")
    last = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "other modules" if last is None else ".".join(parts[: last + 1])


def _factors(opened: _Opened, modules: Sequence[Adapted]) -> Iterator[Step]:
    """Steps of A and B of all adapters that have them."""
    for module in modules:
        for owner in module.owners:
            adapter = opened.adapters[owner]
            factors = adapter.updates[module.name]
            for part, name in (("A", factors.a), ("B", factors.b)):
                spec = adapter.checkpoint.specs[name]
                yield Step(replace(spec, name=module.factor(part, owner)), COPY, (Read(owner, name),))


def _core_step(step: Step, module: Adapted, zeros: int) -> Step:
    """The step of a merge as one of core matrices. zeros: how many models stand before the adapters: the zero base, or none."""
    whole = replace(step.pieces[0], out=step.out) if step.pieces else step  # a fused matrix is one, as its factors are
    return core_step(whole, module, lambda read: read.model - zeros if read.model >= zeros else ZERO)


def _stored(opened: _Opened, module: Adapted, rank: int, dtype: DType) -> Iterator[Step]:
    embedding = opened.adapters[module.owners[0]].updates[module.name].embedding
    names = factor_names(module.name, "embedding" if embedding else "linear")
    outputs, inputs = module.shape
    op = COPY if dtype.name == "F32" else CAST
    for name, part, shape in zip(names, "AB", ((rank, inputs), (outputs, rank)), strict=True):
        read = Read(PRODUCTS, f"{module.name}: {part}", Block(0, shape[0], shape[1], shape[1]))
        yield Step(TensorSpec(name, dtype, shape), op, (read,))


def _config(opened: _Opened, ranks: Mapping[str, int]) -> dict[str, Any]:
    configs = [adapter.checkpoint.config or {} for adapter in opened.adapters]
    named = next((config for config in configs if config.get("base_model_name_or_path")), configs[0])
    made = adapter_config(
        str(named.get("base_model_name_or_path") or ""),
        str(named.get("revision") or ""),
        ranks,
        [],
        [],
        transposed=opened.adapters[0].transposed,
        causal=any(config.get("task_type") == "CAUSAL_LM" for config in configs),
    )
    # The names of the base's other modules are not known: short names only where every adapter has these targets.
    alike = [sorted(map(str, c["target_modules"])) for c in configs if isinstance(c.get("target_modules"), list)]
    short = len(alike) == len(configs) and all(each == alike[0] for each in alike)
    every = all(set(adapter.updates) == set(ranks) for adapter in opened.adapters)
    return {**made, "target_modules": alike[0] if short and every else sorted(targets(ranks, [*ranks, *_siblings(ranks)]))}


def _siblings(modules: Mapping[str, int]) -> list[str]:
    """Names of modules that the base may have, too: one for each last component, so that targets are named in full."""
    return [f"?.{module.rpartition('.')[2]}" for module in modules]
