"""Factors of fused experts: which parameter each belongs to, and which way round it is.

PEFT's `target_parameters` train factors of a parameter [E, rows, cols] that holds a matrix of each of E experts. They are
stored together: A [E · rank, inputs], expert after expert, and B [outputs, rank · E], in which the expert changes fastest
(`layouts.py` has the exceptions). Each parameter of one module has a wrapper around the last, so the file's names tell them
apart by depth, and not by name: which parameter is which follows from their shapes, or from the order in which models have
them.

Until PEFT had seen which models store [E, outputs, inputs], it took all for [E, inputs, outputs]. An adapter of either layout
fits one way round where rows and columns differ. In one adapter all factors are the same way round, so one matrix that is not
square decides for those that are. Where all are square, or up and down are each other's transpose, both ways fit, and the
version of PEFT decides. Without one, the adapter is refused.

The base may have its experts fused too, or one by one, as most models on the Hub have them (Mixtral, Qwen): then gate and up
share the factors of `gate_up_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, permutations, takewhile

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show
from weightsmith._base.idioms import grouped
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.lora.adapter import Adapter, ExpertParameter, Stacked
from weightsmith._models.lora.config import transposed_of
from weightsmith._models.sources.adapted import Update
from weightsmith._models.structure.projections import GATED, MIXTRAL

Specs = Mapping[str, TensorSpec]

WRAPPED = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
"""Parameters of experts in the order in which models have them, and PEFT wraps them: the factors of the first are the inner."""

_GRANITE = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Where the base has a parameter [experts, rows, cols].

    tensors  (name, first row) of each expert's matrices, where these are tensors of their own; () where the parameter is one
    """

    name: str
    experts: int
    rows: int
    cols: int
    tensors: tuple[tuple[tuple[str, int], ...], ...] = ()

    def fits(self, specs: Specs, factors: Stacked, rank: int, *, transposed: bool) -> bool:
        """Whether factors have the shapes for it."""
        inputs, outputs = (self.rows, self.cols) if transposed else (self.cols, self.rows)
        shapes = (self.experts * rank, inputs), (outputs, rank * self.experts)
        return (specs[factors.a].shape, specs[factors.b].shape) == shapes

    def updates(
        self, base: Specs, factors: Stacked, parameter: ExpertParameter, *, transposed: bool
    ) -> Iterator[tuple[str, Update]]:
        """What is added to which tensor."""
        for e in range(self.experts):
            one = Update(
                factors.a, factors.b, parameter.scaling, transposed, expert=(e, self.experts), grouped=parameter.grouped
            )
            if not self.tensors:
                yield self.name, replace(one, rows=(e * self.rows, self.rows))
            for name, first in self.tensors[e] if self.tensors else ():
                yield name, replace(one, part=(first, base[name].shape[0]))


def names_of(module: str, parameter: str) -> tuple[str, ...]:
    """Names of tensors of which a base with this parameter has one: for the search of the beginnings of its names."""
    return (*_stored(module, parameter), *(names[0] for names in _apart(module, parameter, 0)))


def find_place(specs: Specs, module: str, parameter: str) -> ExpertPlace | None:
    """Where the base has a parameter; None for one that it does not have."""
    for name in _stored(module, parameter):
        if name in specs and len(shape := specs[name].shape) == 3 and specs[name].dtype.floating:
            experts, rows, cols = shape
            return ExpertPlace(name, experts, rows, cols)
    ways = list(_apart(module, parameter, 0))
    way = next((i for i, names in enumerate(ways) if all(name in specs for name in names)), None)
    if way is None:
        return None
    every = (list(_apart(module, parameter, expert))[way] for expert in count())
    there = takewhile(lambda names: all(name in specs for name in names), every)
    return _joined(specs, f"{module}.{parameter}", list(there))


def _made_of(specs: Specs, name: str, sources: Sequence[str]) -> ExpertPlace | None:
    """Where the base has a parameter that transformers makes of others: of each expert gate above up."""
    if len(sources) == 1 and len(specs[sources[0]].shape) == 3:
        n_experts, rows, cols = specs[sources[0]].shape
        return ExpertPlace(sources[0], n_experts, rows, cols)
    numbered = ((re.search(r"\.experts\.(\d+)\.", source), source) for source in sorted(sources))
    experts = grouped((int(number[1]), source) for number, source in numbered if number)
    if sorted(experts) != list(range(len(experts))):
        return None
    return _joined(specs, name, [experts[e] for e in range(len(experts))])


def _joined(specs: Specs, name: str, experts: Sequence[Sequence[str]]) -> ExpertPlace | None:
    """A parameter of which the base has matrices for each expert, one above the other; None if they do not fit together."""
    shapes = {tuple(specs[tensor].shape for tensor in tensors_of_expert) for tensors_of_expert in experts}
    if len(shapes) != 1 or not all(
        specs[tensor].dtype.floating for tensors_of_expert in experts for tensor in tensors_of_expert
    ):
        return None
    (parts,) = shapes
    if any(len(shape) != 2 for shape in parts) or len({cols for _, cols in parts}) != 1:
        return None
    firsts = [sum(rows for rows, _ in parts[:i]) for i in range(len(parts))]
    tensors = tuple(tuple(zip(tensors_of_expert, firsts, strict=True)) for tensors_of_expert in experts)
    return ExpertPlace(name, len(tensors), sum(rows for rows, _ in parts), parts[0][1], tensors)


def _stored(module: str, parameter: str) -> Iterator[str]:
    """Names of the parameter in models that fuse their experts."""
    yield f"{module}.{parameter}"
    if module.endswith(".experts") and parameter in _GRANITE:
        yield f"{module.removesuffix('experts')}{_GRANITE[parameter]}.weight"


def _apart(module: str, parameter: str, expert: int) -> Iterator[tuple[str, ...]]:
    """Names of an expert's matrices in models that do not fuse them: one tuple for each way to name them."""
    *halves, _ = GATED.get(parameter, (parameter, ""))
    yield tuple(f"{module}.{expert}.{name}.weight" for name in halves)
    if module.endswith("mlp.experts") and all(name in MIXTRAL for name in halves):
        mixtral = module.removesuffix("mlp.experts") + "block_sparse_moe.experts"
        yield tuple(f"{mixtral}.{expert}.{MIXTRAL[name]}.weight" for name in halves)


Assignment = list[tuple[ExpertPlace, ExpertParameter, Stacked]]


@dataclass(frozen=True, slots=True)
class StackedPlaces:
    """Which parameter of the base each factors of experts belong to.

    assigned    the parameters, with their factors
    transposed  the factors are of [experts, inputs, outputs]
    problems    what has no place in the base
    """

    assigned: Assignment
    transposed: bool = False
    problems: Sequence[str] = ()

    def updates(self, tensors: Specs) -> dict[str, list[Update]]:
        """Tensor of the base → the updates of the matrices in it."""
        updates: dict[str, list[Update]] = {}
        for place, parameter, factors in self.assigned:
            for name, update in place.updates(tensors, factors, parameter, transposed=self.transposed):
                updates.setdefault(name, []).append(update)
        return updates


def match_stacked(
    adapter: Adapter, base: Checkpoint, modules: Mapping[str, str], sources: Mapping[str, Sequence[str]]
) -> StackedPlaces:
    """Find the parameters of the base that an adapter's factors of experts belong to.

    modules  name of a module in the adapter → in the base
    sources  parameter of the adapter's model → tensors of the base that it is made of, where known

    Raises Unsupported if nothing tells which of PEFT's layouts the adapter has.
    """
    specs, problems, tensors = adapter.checkpoint.specs, list[str](), base.specs

    def find(module: str, parameter: str) -> ExpertPlace | None:
        sources_of_parameter = sources.get(name := f"{module}.{parameter}", ())
        return (_made_of(tensors, name, sources_of_parameter) if sources_of_parameter else None) or find_place(
            tensors, modules[module], parameter
        )

    ways: dict[str, dict[bool, list[Assignment]]] = {}
    for module, levels in adapter.stacked.items():
        places = [(find(module, parameter.name), parameter) for parameter in adapter.parameters[module]]
        known = [(place, parameter) for place, parameter in places if place is not None]
        ways[module] = {transposed: list(_ways(specs, levels, known, transposed=transposed)) for transposed in (False, True)}
        if any(ways[module].values()):
            continue
        shapes = ", ".join(f"{list(specs[level.a].shape)} and {list(specs[level.b].shape)}" for level in levels)
        there = ", ".join(f"{place.name} {[place.experts, place.rows, place.cols]}" for place, _ in known)
        names = ", ".join(parameter.name for _, parameter in places)
        missing = f"the base has there {there}" if there else f"{modules[module]} has in the base no {names} of several experts"
        problems.append(f"{module}: A and B {shapes}; {missing}")
    if problems or not ways:
        return StackedPlaces([], problems=problems)
    fitting = [transposed for transposed in (False, True) if all(fits[transposed] for fits in ways.values())]
    if not fitting:
        turned = [f"{module}: the other way round than other experts" for module, fits in ways.items() if not fits[False]]
        return StackedPlaces([], problems=turned)
    if len(fitting) > 1:
        version = (adapter.checkpoint.config or {}).get("peft_version")
        known_way = transposed_of(version, (base.config or {}).get("model_type"))
        if known_way is None:
            raise _undecided(adapter, next(iter(ways)), version)
        fitting = [known_way]
    chosen_ways = {module: _first(fits[fitting[0]]) for module, fits in ways.items()}
    if several := [module for module, fits in chosen_ways.items() if not fits]:
        return StackedPlaces([], problems=[f"{module}: its factors fit more than one parameter" for module in several])
    return StackedPlaces([assigned for fits in chosen_ways.values() for assigned in fits], fitting[0])


def _undecided(adapter: Adapter, module: str, version: object) -> Unsupported:
    """The error for experts whose layout neither shapes nor the version of PEFT tell."""
    what = f"{module}: both of PEFT's layouts of experts fit its matrices"
    if version is None:
        what += ", and adapter_config.json has no peft_version"
        fix = "write the version of PEFT that saved the adapter into its adapter_config.json as peft_version"
    else:
        what += f", and peft_version {show(version)} does not tell them apart"
        fix = "merge it with the versions of PEFT and transformers that trained it"
    return Unsupported(what, where=adapter.checkpoint.ref, fix=fix)


def _first(ways: Sequence[Assignment]) -> Assignment:
    """The only way; of several that in which models have the parameters in this order; else []."""
    if len(ways) == 1:
        return ways[0]
    names = [[parameter.name for _, parameter, _ in way] for way in ways]
    ordered = sorted(names[0], key=lambda name: WRAPPED.index(name) if name in WRAPPED else -1)
    return ways[names.index(ordered)] if set(ordered) <= set(WRAPPED) and len(set(map(tuple, names))) == len(names) else []


def _ways(
    specs: Specs, levels: Sequence[Stacked], places: Sequence[tuple[ExpertPlace, ExpertParameter]], *, transposed: bool
) -> Iterator[Assignment]:
    """The ways to give each of a module's factors a parameter of its own, of the right shape."""
    for chosen in permutations(places, len(levels)):
        assignment = [(place, parameter, factors) for (place, parameter), factors in zip(chosen, levels, strict=True)]
        if all(place.fits(specs, factors, parameter.rank, transposed=transposed) for place, parameter, factors in assignment):
            yield assignment
