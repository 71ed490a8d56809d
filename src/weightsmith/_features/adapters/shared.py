"""What adapters that are merged have factors of, and what they save whole. Raises errors for those that do not go together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from weightsmith._base.errors import MismatchError, ShapeError, Unsupported
from weightsmith._base.tensors import MAX_STACKED, TensorSpec
from weightsmith._features.adapters.cores import Adapted
from weightsmith._models.lora import Adapter
from weightsmith._models.lora.adapter import Parameter, Stacked

_QUANTISED = re.compile(r"(-unsloth)?-bnb-4bit$")

ONE_BASE = "merge adapters of one base"
MERGE_MODELS = "merge models: BASE+ADAPTER"

_FIRST, _SECOND = "gate_up_proj", "down_proj"
"""Parameters of fused experts in the order in which PEFT wraps them: the factors of the first are the inner ones."""


def find_modules(adapters: Sequence[Adapter]) -> dict[str, Adapted]:
    """The modules, and parameters of experts, that the adapters have factors of.

    Raises MismatchError and ShapeError for adapters of bases of different shapes, Unsupported for experts in an unknown order.
    """
    _check_transposed(adapters)
    _check_layouts(adapters)
    owners: dict[str, list[tuple[int, Adapted]]] = {}
    for i, adapter in enumerate(adapters):
        for own in (*_of_linears(adapter, i), *_of_parameters(adapter, i)):
            owners.setdefault(own.name, []).append((i, own))
    found = {}
    for name, known in owners.items():
        alone = [own for _, own in known]
        if len({(own.shape, own.experts) for own in alone}) > 1:
            shapes = [([own.experts] if own.experts else []) + list(own.shape) for own in alone]
            details = [f"{adapters[i].checkpoint.ref}: {shape}" for (i, _), shape in zip(known, shapes, strict=True)]
            if any(own.experts and own.shape == alone[0].shape[::-1] for own in alone):
                what = "adapters in PEFT's two layouts of experts, inputs and outputs exchanged"
                raise ShapeError(what, where=name, details=details, fix=f"{MERGE_MODELS}; it reads both")
            raise ShapeError("adapters of different bases", where=name, details=details, fix=ONE_BASE)
        found[name] = replace(
            alone[0],
            owners=tuple(i for i, _ in known),
            ranks=tuple(own.ranks[0] for own in alone),
            scalings=tuple(own.scalings[0] for own in alone),
            normed=tuple(i for own in alone for i in own.normed),
        )
    if not found:
        where = adapters[0].checkpoint.ref
        raise MismatchError("the adapters have no factors", where=where, fix="name folders that PEFT has written")
    return found


def whole_tensors(adapters: Sequence[Adapter], modules: Mapping[str, Adapted]) -> dict[str, TensorSpec]:
    """The tensors that any adapter saves whole, as the first of them has them, by the names that models have for them.

    Raises ShapeError for different shapes, Unsupported for a tensor that another adapter has factors of.
    """
    found: dict[str, TensorSpec] = {}
    first: dict[str, Adapter] = {}
    for adapter in adapters:
        for name, stored in adapter.replacements.items():
            spec = replace(adapter.checkpoint.specs[stored], name=name)
            known = found.setdefault(name, spec)
            other = first.setdefault(name, adapter)
            if known.shape != spec.shape:
                pairs = (other, known.shape), (adapter, spec.shape)
                details = [f"{each.checkpoint.ref}: {list(shape)}" for each, shape in pairs]
                what = "adapters of different bases, or with different numbers of tokens"
                raise ShapeError(what, where=name, details=details, fix=ONE_BASE)
            if (module := modules.get(name.removesuffix(".weight"))) is not None:
                details = [f"{adapters[module.owners[0]].checkpoint.ref} has factors of it"]
                raise Unsupported(f"it saves {name} whole", where=adapter.checkpoint.ref, details=details, fix=MERGE_MODELS)
    return found


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


def _check_transposed(adapters: Sequence[Adapter]) -> None:
    first = adapters[0]
    for adapter in adapters:
        if adapter.transposed != first.transposed:
            what = "fan_in_fan_out differs: the adapters are of different bases"
            raise MismatchError(what, where=adapter.checkpoint.ref, details=[first.checkpoint.ref], fix=ONE_BASE)


def _check_layouts(adapters: Sequence[Adapter]) -> None:
    """Two adapters whose experts are square may be in different layouts, which nothing shows."""
    for adapter in adapters:
        specs = adapter.checkpoint.specs
        levels = [level for own in adapter.stacked.values() for level in own]
        if levels and all(specs[level.a].shape[1] == specs[level.b].shape[0] for level in levels):
            what = "all matrices of experts are square, and both of PEFT's layouts of experts fit"
            raise Unsupported(
                what, where=adapter.checkpoint.ref, fix="merge them with the version of PEFT that has written them"
            )


def _last(name: str) -> str:
    """The last part of a path or hub id, as one base may be named by both; without what Unsloth adds for a quantised copy.

    >>> _last("unsloth/Llama-3.2-1B-unsloth-bnb-4bit") == _last("./models/Llama-3.2-1B/")
    True
    """
    return _QUANTISED.sub("", name.rstrip("/").rpartition("/")[2].casefold())


def _of_linears(adapter: Adapter, number: int) -> Iterator[Adapted]:
    specs = adapter.checkpoint.specs
    for module, own in adapter.updates.items():
        rank, inputs = specs[own.a].shape
        normed = (number,) if own.magnitude else ()
        yield Adapted(module, (specs[own.b].shape[0], inputs), (number,), (rank,), (own.scaling,), normed=normed)


def _of_parameters(adapter: Adapter, number: int) -> Iterator[Adapted]:
    specs = adapter.checkpoint.specs
    for name, (parameter, level) in parameters_of(adapter).items():
        (stacked, inputs), outputs = specs[level.a].shape, specs[level.b].shape[0]
        experts, rest = divmod(stacked, parameter.rank)
        if rest or not 0 < experts <= MAX_STACKED:
            what = f"A is {[stacked, inputs]}, not factors of rank {parameter.rank} of some experts"
            raise ShapeError(what, where=f"{adapter.checkpoint.ref}: {name}", fix="save it again with PEFT")
        yield Adapted(name, (outputs, inputs), (number,), (parameter.rank,), (parameter.scaling,), experts=experts)


def parameters_of(adapter: Adapter) -> dict[str, tuple[Parameter, Stacked]]:
    """The parameters of experts that an adapter has factors of, in full, and these. Raises Unsupported if it is not known."""
    found: dict[str, tuple[Parameter, Stacked]] = {}
    for module, levels in adapter.stacked.items():
        known = {parameter.name: parameter for parameter in adapter.parameters[module]}
        names = [_FIRST, _SECOND] if known.keys() == {_FIRST, _SECOND} else list(known)
        if len(levels) != len(names) or (len(names) > 1 and names[0] != _FIRST):
            what = f"cannot assign the factors of {module} to {', '.join(known)} without the base"
            raise Unsupported(what, where=adapter.checkpoint.ref, fix=MERGE_MODELS)
        found |= {f"{module}.{name}": (known[name], level) for name, level in zip(names, levels, strict=True)}
    return found
