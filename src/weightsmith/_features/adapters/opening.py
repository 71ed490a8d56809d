"""Adapters, and the model that they were trained on, opened for a merge: the planner sees models of their differences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from weightsmith._base.errors import MismatchError, ShapeError, Unsupported, WeightsmithError, noting
from weightsmith._base.idioms import grouped
from weightsmith._base.tensors import DTYPES, MAX_STACKED, TensorSpec
from weightsmith._features.adapters.built import WEIGHT, BuiltModel, is_expert
from weightsmith._features.adapters.cores import ZERO, AdaptedModule, Space
from weightsmith._features.adapters.factors import FactorTarget, Form
from weightsmith._features.adapters.placing import AdapterPlaces, check_files
from weightsmith._methods.method import BaseRole
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.lora import Adapter, find_places, open_adapter
from weightsmith._models.lora.adapter import ExpertParameter, Stacked
from weightsmith._models.lora.apply import find_shapes
from weightsmith._models.lora.exact import as_lora, needs_base
from weightsmith._models.lora.experts import WRAPPED
from weightsmith._models.lora.forms import as_matrix
from weightsmith._models.sources.composed import StateDict
from weightsmith._models.structure.vocabulary import vocabulary_modules
from weightsmith._planning.planner.inputs import asking, at, is_adapter, open_models
from weightsmith._planning.recipe import ModelRef
from weightsmith._plans import Read, Step

ZERO_ADAPTER = ModelRef("the zero adapter", text="the zero adapter")
"""The base of methods that need one, unless the recipe names one."""

ONE_BASE = "merge adapters of one base"
MERGE_MODELS = "merge models: BASE+ADAPTER"
NAME_BASE = "base_model: the model that the adapters were trained on"

_QUANTISED = re.compile(r"(-unsloth)?-bnb-4bit$")


class OpenedAdapters:
    """Opens adapters for the planner, as models of the differences: it sees names and shapes alone.

    space, rank  of the merge; see `AdaptedModule`
    combination  of PEFT's, as the recipe names it; ""
    name_base    what to do if the base is needed. To some methods it would be one more input
    adapters     in the planner's order, without the base
    base         the model that the adapters were trained on, if the recipe names it; `base_name` is what it calls it
    places       what the adapters have factors of, or save whole → the base's tensor
    modules      that any of them has factors of
    matrices     of the modules → their modules
    whole        tensors that any of them saves whole, as models have them
    ties         the adapters train embedding and head as one tensor (`ensure_weight_tying`)
    zeros        1 if a base, the zero adapter or a model, comes before the adapters, else 0
    """

    def __init__(self, space: Space, rank: int, combination: str, role: BaseRole) -> None:
        self.space, self.rank, self.combination = space, rank, combination
        self.name_base = f"write {NAME_BASE}" if role != "input" else f"write merge_method: task_arithmetic, and {NAME_BASE}"
        self.adapters: list[Adapter] = []
        self.base: Checkpoint | None = None
        self.base_name = ""
        self.places: dict[str, str] = {}
        self.modules: Mapping[str, AdaptedModule] = {}
        self.matrices: dict[str, AdaptedModule] = {}
        self.whole: dict[str, TensorSpec] = {}
        self.ties = False
        self.zeros = 0

    def __call__(
        self, refs: Sequence[ModelRef], stack: ExitStack, results: Mapping[str, Checkpoint | None], plain: bool
    ) -> tuple[list[Checkpoint | None], list[WeightsmithError]]:
        problems: list[WeightsmithError] = []
        for ref in refs:
            if ref == ZERO_ADAPTER:
                self.zeros = 1
            elif ref.path in results or not is_adapter(ref):
                self.zeros = 1
                (self.base,), unopened = open_models([ref], stack, results, plain)
                self.base_name = "" if ref.path in results else ref.path
                problems += unopened
            else:
                try:
                    adapter = open_adapter(ref.path, revision=ref.revision or None)
                    stack.callback(adapter.checkpoint.close)
                    self.adapters.append(self._as_lora(adapter))
                except WeightsmithError as error:
                    problems.append(at(error, ref.where))
        if not problems:
            with noting(problems):
                check_files(self.adapters)
                self.ties = ties_vocabulary(self.adapters)
                self._match()
        if problems:
            return [None for _ in refs], problems
        specs = [TensorSpec(f"{name}{WEIGHT}", DTYPES["F32"], module.shape) for name, module in self.matrices.items()]
        owners = [None] * self.zeros + list(self.adapters)
        return [
            Checkpoint(str(ref), _Specs([*specs, *self._whole_specs(owner)], str(ref)))
            for ref, owner in zip(refs, owners, strict=True)
        ], []

    def _as_lora(self, adapter: Adapter) -> Adapter:
        """The adapter with factors to merge.

        Raises Unsupported for kinds that have none, and for rows in an order, or shapes, that the base alone tells.
        """
        where = adapter.checkpoint.ref
        if adapter.turned:
            what = "its rows of q and k are in llama.cpp's order, which depends on the number of heads of the base"
            fix = f"convert it first: weightsmith convert-lora {where} OUT --for peft --base BASE"
            raise Unsupported(what, where=where, fix=fix)
        shapes: Mapping[str, tuple[int, ...]] = {}
        if needs_base(adapter):
            if self.base is None:
                what = f"it is {adapter.title}, whose tensors do not tell how many inputs its modules have"
                raise Unsupported(what, where=where, fix=self.name_base)
            shapes = asking(self.base, partial(find_shapes, self.base, adapter))
        try:
            return with_one_vocabulary(as_lora(adapter, shapes))
        except Unsupported as error:
            fix = f"{MERGE_MODELS}; or make a LoRA of it first: weightsmith extract-lora BASE+{where} BASE OUT"
            raise Unsupported(error.finding.what, where=error.finding.where, details=error.finding.details, fix=fix) from None

    def _match(self) -> None:
        if self.base is not None:
            for adapter in self.adapters:
                self.places |= asking(self.base, partial(find_places, self.base, adapter))
        elif error := different_bases(self.adapters):
            raise error
        modules = find_modules(self.adapters)
        self.whole = whole_tensors(self.adapters, modules)
        scaled = any(module.normed for module in modules.values())
        stacked = any(module.experts for module in modules.values())
        if self.combination and (scaled or stacked or self.whole):
            kind = "DoRA" if scaled else "factors of all experts of a parameter" if stacked else "tensors that are saved whole"
            fix = f"write another merge_method, such as task_arithmetic, or {MERGE_MODELS}"
            raise Unsupported(f"PEFT's add_weighted_adapter has no {self.combination} of {kind}", where="merge_method", fix=fix)
        if scaled:
            self._check_norms(modules)
        self.modules = {
            name: replace(module, space=self.space, rank=self.rank, scaled=scaled) for name, module in modules.items()
        }
        self.matrices = {matrix: module for module in self.modules.values() for matrix in module.matrices}

    def _check_norms(self, modules: Mapping[str, AdaptedModule]) -> None:
        """Whether the norms of DoRA can be computed."""
        normed = next(module for module in modules.values() if module.normed)
        where = self.adapters[normed.normed[0]].checkpoint.ref
        if self.adapters[0].file is not None:
            raise Unsupported("it is DoRA, and DoRA in single files is not merged", where=where, fix=MERGE_MODELS)
        if self.base is None:
            what = "DoRA scales the rows of the base's matrices, so the merge needs the base model"
            raise Unsupported(what, where=where, fix=self.name_base)
        for name, module in modules.items():
            owners = [self.adapters[i] for i in module.owners]
            embedding = any(adapter.updates[name].embedding for adapter in owners if not module.experts)
            kernel = not module.experts and len(owners[0].checkpoint.specs[owners[0].updates[name].a].shape) > 2
            if module.experts or embedding or kernel or name not in self.places or self.adapters[0].transposed:
                kind = "all experts of a parameter" if module.experts else "an embedding" if embedding else "a part of a tensor"
                kind = "a weight stored [inputs, outputs]" if self.adapters[0].transposed else kind
                kind = "a convolution" if kernel else kind
                what = f"an adapter is DoRA, and DoRA of {kind} is not merged: {name}"
                raise Unsupported(what, where=where, fix=MERGE_MODELS)

    def _whole_specs(self, owner: Adapter | None) -> Iterator[TensorSpec]:
        """Specs of the tensors that are saved whole, as a model has them. owner: the adapter; None: the base."""
        for name, spec in self.whole.items():
            kept = owner.replacements.get(name) if owner is not None else None
            if owner is not None and kept is not None:
                yield replace(owner.checkpoint.specs[kept], name=name)
            elif self.base is not None and name in self.places:
                yield replace(self.base.specs[self.places[name]], name=name)
            else:
                yield spec

    @property
    def experts(self) -> list[str]:
        """The modules that are experts, or parameters of all experts."""
        return [name for name, module in self.modules.items() if module.experts or is_expert(f"{name}{WEIGHT}")]

    @property
    def inputs(self) -> tuple[Checkpoint, ...]:
        """The models of the plan: the adapters, and the base if the recipe names it."""
        return (*(adapter.checkpoint for adapter in self.adapters), *([] if self.base is None else [self.base]))

    def find_places(self, ranks: Mapping[str, int]) -> AdapterPlaces:
        """Where the result has everything: where the adapters have it. ranks: of the modules"""
        weights = frozenset[str]().union(*(adapter.weights for adapter in self.adapters))
        forms: dict[str, Form] = {}
        for name, module in self.modules.items():
            embedding = not module.experts and self.adapters[module.owners[0]].updates[name].embedding
            forms[name] = "embedding" if embedding else "linear"

        def order(name: str) -> int:
            """PEFT wraps parameters in the model's order, in which `down_proj` is the last."""
            last = name.rpartition(".")[2]
            return WRAPPED[:-1].index(last) if self.modules[name].experts and last in WRAPPED[:-1] else len(WRAPPED)

        tensors = {name if self.modules[name].experts else f"{name}{WEIGHT}": name for name in sorted(forms, key=order)}
        places = AdapterPlaces(BuiltModel.of_names(forms, {**dict.fromkeys(tensors, ()), **dict.fromkeys(self.whole, ())}))
        for key, name in tensors.items():
            target = FactorTarget(name, forms[name], ranks[name], exact=True, experts=self.modules[name].experts)
            if target.experts or name in weights:
                places.put_parameter(key, target)
            else:
                places.modules[name] = target
        saved = frozenset[str]().union(*(adapter.saved for adapter in self.adapters))
        places.put_whole(self.whole, saved)
        return places

    def leave_base(self, steps: Iterable[Step]) -> None:
        """Close the base if no step of the plan reads it: one on the Hub is not downloaded then."""
        number = len(self.adapters)
        if self.base is not None and all(
            read.model != number for step in steps for leaf in step.leaves for read in leaf.inputs
        ):
            self.base.close()
            self.base = None

    def owner_of(self, read: Read) -> int:
        """The adapter that a read of the planner's is of; `ZERO` for the base."""
        return read.model - self.zeros if read.model >= self.zeros else ZERO

    def whole_read(self, read: Read, method: str) -> Read:
        """Where a tensor of a merge of models is that adapters save whole. Raises Unsupported if it is only in the base."""
        number = self.owner_of(read)
        adapter = self.adapters[number] if number != ZERO else None
        if adapter is not None and read.tensor in adapter.replacements:
            return replace(read, model=number, tensor=adapter.replacements[read.tensor])
        if self.base is None or read.tensor not in self.places:
            missing = f"and {method} needs the base's" if adapter is None else f"which {adapter.checkpoint.ref} does not have"
            missing += "" if self.base is None else f": {self.base_name or 'the base'} has no such tensor"
            owner = next(saver for saver in self.adapters if read.tensor in saver.replacements)
            what = f"it saves {read.tensor} whole, {missing}"
            raise Unsupported(what, where=owner.checkpoint.ref, fix=self.name_base if self.base is None else MERGE_MODELS)
        return replace(read, model=len(self.adapters), tensor=self.places[read.tensor])


class _Specs(StateDict):
    """A source of names and shapes, which is never read."""

    def __init__(self, specs: Sequence[TensorSpec], where: str) -> None:
        super().__init__({}, where)
        self.specs = {spec.name: spec for spec in specs}


# ---- Embedding and head that were trained as one.


def _vocabulary(adapter: Adapter) -> tuple[list[str], list[str]]:
    """The embeddings and the heads that an adapter trains, as modules."""
    saved = (name.removesuffix(WEIGHT) for name in adapter.replacements if name.endswith(WEIGHT))
    return vocabulary_modules(dict.fromkeys([*adapter.updates, *saved]))


def with_one_vocabulary(adapter: Adapter) -> Adapter:
    """The adapter without factors of a tied head that repeat those of the embedding: PEFT saves them twice.

    If both were merged, the results would differ. Cost: reads both.
    """
    if not adapter.as_one:
        return adapter
    embeddings, heads = vocabulary_modules(adapter.updates)
    if not embeddings:
        return adapter
    one, updates = adapter.updates[embeddings[0]], adapter.updates
    plain = [head for head in heads if not (one.magnitude or updates[head].magnitude)]
    shared = [head for head in plain if adapter.ties_factors(one, updates[head])]
    return replace(adapter, updates={name: factors for name, factors in updates.items() if name not in shared})


def ties_vocabulary(adapters: Sequence[Adapter]) -> bool:
    """Whether the adapters train embedding and head as one tensor. Raises Unsupported if they disagree."""
    trained = [adapter for adapter in adapters if any(_vocabulary(adapter))]
    tied = [adapter for adapter in trained if adapter.as_one]
    if tied and len(tied) < len(trained):
        other = next(adapter for adapter in trained if adapter not in tied)
        what = "embedding and head were trained as one here (ensure_weight_tying), and apart in another adapter"
        raise Unsupported(what, where=tied[0].checkpoint.ref, details=[other.checkpoint.ref], fix=MERGE_MODELS)
    if tied and (alone := next((adapter for adapter in tied if adapter.updates and not _vocabulary(adapter)[0]), None)):
        what = "it has the head alone, and ensure_weight_tying ties that to the embedding"
        raise Unsupported(what, where=alone.checkpoint.ref, fix=MERGE_MODELS)
    return bool(tied)


# ---- What the adapters have factors of, and what they save whole.


def find_modules(adapters: Sequence[Adapter]) -> dict[str, AdaptedModule]:
    """The modules, and parameters of experts, that the adapters have factors of.

    Raises MismatchError and ShapeError for adapters of bases of different shapes, Unsupported for experts in an unknown order.
    """
    _check_layouts(adapters)
    every = (module for i, adapter in enumerate(adapters) for module in (*_of_linears(adapter, i), *_of_parameters(adapter, i)))
    owners = grouped((module.name, module) for module in every)
    modules = {}
    for name, known in owners.items():
        if len({(module.shape, module.experts) for module in known}) > 1:
            shapes = [([module.experts] if module.experts else []) + list(module.shape) for module in known]
            refs = [adapters[module.owners[0]].checkpoint.ref for module in known]
            details = [f"{ref}: {shape}" for ref, shape in zip(refs, shapes, strict=True)]
            if any(module.experts and module.shape == known[0].shape[::-1] for module in known):
                what = "adapters in PEFT's two layouts of experts, inputs and outputs exchanged"
                raise ShapeError(what, where=name, details=details, fix=f"{MERGE_MODELS}; it reads both")
            raise ShapeError("adapters of different bases", where=name, details=details, fix=ONE_BASE)
        modules[name] = replace(
            known[0],
            owners=tuple(module.owners[0] for module in known),
            ranks=tuple(module.ranks[0] for module in known),
            scalings=tuple(module.scalings[0] for module in known),
            normed=tuple(i for module in known for i in module.normed),
            grouped=tuple(i for module in known for i in module.grouped),
        )
    if not modules:
        where = adapters[0].checkpoint.ref
        fix = "name folders that PEFT has written, or files of factors"
        raise MismatchError("the adapters have no factors", where=where, fix=fix)
    return modules


def whole_tensors(adapters: Sequence[Adapter], modules: Mapping[str, AdaptedModule]) -> dict[str, TensorSpec]:
    """The tensors that any adapter saves whole, as the first of them has them, by the names that models have for them.

    Raises ShapeError for different shapes, Unsupported for a tensor that another adapter has factors of.
    """
    specs: dict[str, TensorSpec] = {}
    first: dict[str, Adapter] = {}
    for adapter in adapters:
        for name, stored in adapter.replacements.items():
            spec = replace(adapter.checkpoint.specs[stored], name=name)
            known = specs.setdefault(name, spec)
            other = first.setdefault(name, adapter)
            if known.shape != spec.shape:
                pairs = (other, known.shape), (adapter, spec.shape)
                details = [f"{owner.checkpoint.ref}: {list(shape)}" for owner, shape in pairs]
                what = "adapters of different bases, or with different numbers of tokens"
                raise ShapeError(what, where=name, details=details, fix=ONE_BASE)
            if (module := modules.get(name.removesuffix(".weight"))) is not None:
                details = [f"{adapters[module.owners[0]].checkpoint.ref} has factors of it"]
                raise Unsupported(f"it saves {name} whole", where=adapter.checkpoint.ref, details=details, fix=MERGE_MODELS)
    return specs


def different_bases(adapters: Sequence[Adapter]) -> MismatchError | None:
    """The error for adapters that name different bases. One base may have several names."""
    first = adapters[0].checkpoint.ref
    bases = [str((adapter.checkpoint.config or {}).get("base_model_name_or_path") or "") for adapter in adapters]
    for adapter, base in zip(adapters, bases, strict=True):
        if base and bases[0] and _last(base) != _last(bases[0]):
            details = [f"{first}: {bases[0]}", f"{adapter.checkpoint.ref}: {base}"]
            fix = f"{ONE_BASE}; if it is one under two names, name it as base_model"
            return MismatchError("adapters of different bases", where=adapter.checkpoint.ref, details=details, fix=fix)
    return None


def _check_layouts(adapters: Sequence[Adapter]) -> None:
    """Two adapters whose experts are square may be in different layouts, which nothing shows."""
    first = adapters[0]
    for adapter in adapters:
        specs, where = adapter.checkpoint.specs, adapter.checkpoint.ref
        if adapter.transposed != first.transposed:
            what = "fan_in_fan_out differs: the adapters are of different bases"
            raise MismatchError(what, where=where, details=[first.checkpoint.ref], fix=ONE_BASE)
        levels = [level for levels_of_module in adapter.stacked.values() for level in levels_of_module]
        if levels and all(specs[level.a].shape[1] == specs[level.b].shape[0] for level in levels):
            what = "all matrices of experts are square, and both of PEFT's layouts of experts fit"
            raise Unsupported(what, where=where, fix="merge them with the version of PEFT that has written them")


def _last(name: str) -> str:
    """The last part of a path or Hub id, as one base may be named by both; without what Unsloth adds for a quantised copy.

    >>> _last("unsloth/Llama-3.2-1B-unsloth-bnb-4bit") == _last("./models/Llama-3.2-1B/")
    True
    """
    return _QUANTISED.sub("", name.rstrip("/").rpartition("/")[2].casefold())


def _of_linears(adapter: Adapter, number: int) -> Iterator[AdaptedModule]:
    specs = adapter.checkpoint.specs
    for module, factors in adapter.updates.items():
        rank, inputs = as_matrix(specs[factors.a].shape)
        normed = (number,) if factors.magnitude else ()
        yield AdaptedModule(module, (specs[factors.b].shape[0], inputs), (number,), (rank,), (factors.scaling,), normed=normed)


def _of_parameters(adapter: Adapter, number: int) -> Iterator[AdaptedModule]:
    specs = adapter.checkpoint.specs
    for name, (parameter, level) in parameters_of(adapter).items():
        (stacked, inputs), outputs = specs[level.a].shape, specs[level.b].shape[0]
        experts, rest = divmod(stacked, parameter.rank)
        if rest or not 0 < experts <= MAX_STACKED:
            what = f"A is {[stacked, inputs]}, not factors of rank {parameter.rank} of some experts"
            raise ShapeError(what, where=f"{adapter.checkpoint.ref}: {name}", fix="save it again with PEFT")
        grouped_by = (number,) if parameter.grouped else ()
        scaling = (parameter.scaling,)
        yield AdaptedModule(name, (outputs, inputs), (number,), (parameter.rank,), scaling, experts=experts, grouped=grouped_by)


def parameters_of(adapter: Adapter) -> dict[str, tuple[ExpertParameter, Stacked]]:
    """The parameters of experts that an adapter has factors of, in full, and these. Raises Unsupported if it is not known."""
    parameters: dict[str, tuple[ExpertParameter, Stacked]] = {}
    for module, levels in adapter.stacked.items():
        known = {parameter.name: parameter for parameter in adapter.parameters[module]}
        names = [name for name in WRAPPED if name in known] if len(known) > 1 else list(known)
        if len(levels) != len(names) or len(names) != len(known):
            what = f"cannot assign the factors of {module} to {', '.join(known)} without the base"
            raise Unsupported(what, where=adapter.checkpoint.ref, fix=MERGE_MODELS)
        parameters |= {f"{module}.{name}": (known[name], level) for name, level in zip(names, levels, strict=True)}
    return parameters
