"""The parts of a dense decoder: gate, up and down of every layer's MLP, and the rest. Fused matrices are taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weightsmith.errors import FormatError, ShapeError, WeightsmithError
from weightsmith.mixture.assembly import Donor
from weightsmith.mixture.layouts.dense_config import semantics
from weightsmith.planner.match import is_buffer
from weightsmith.plans import Block
from weightsmith.structure.fused import fused_parts

PARTS = ("gate", "up", "down")

MOST = 12
"""Names that an error lists."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a matrix or vector is: the tensor that has it, its shape, and which block of the tensor (None: the whole)."""

    tensor: str
    shape: tuple[int, ...]
    block: Block | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    mlp   `gate` [I, H], `up` [I, H], `down` [H, I]; I: intermediate size, H: hidden size
    rest  everything else, by its name inside the layer in the unfused form
    """

    mlp: Mapping[str, Place]
    rest: Mapping[str, Place]


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense model.

    prefix   before the layer number: `model.layers.`
    outside  tensors outside the layers
    dropped  buffers that models compute for themselves
    """

    donor: Donor
    prefix: str
    layers: tuple[Layer, ...]
    outside: tuple[str, ...]
    dropped: tuple[str, ...]

    @property
    def hidden(self) -> int:
        """H."""
        return self.layers[0].mlp["gate"].shape[1]

    @property
    def intermediate(self) -> int:
        """I."""
        return self.layers[0].mlp["gate"].shape[0]

    def used(self, *, mlp: bool, rest: bool) -> set[str]:
        """Names of the tensors that the MLPs, or the rest, are made of."""
        names = {p.tensor for layer in self.layers for p in layer.mlp.values()} if mlp else set()
        if rest:
            names |= {p.tensor for layer in self.layers for p in layer.rest.values()} | set(self.outside)
        return names


def dense_parts(donor: Donor) -> Dense | WeightsmithError:
    """The parts of a donor, or why it has them not: among the reasons are values of config.json that cannot be."""
    try:
        semantics(donor.config, donor.label)
    except FormatError as error:
        return error
    stack = donor.structure.main
    if stack is None:
        return ShapeError("it has no single stack of decoder layers", where=donor.label)
    found: list[dict[str, Place]] = [{} for _ in range(stack.n_layers)]
    outside, dropped = [], []
    specs = {name: step.out for name, step in donor.steps.items()}
    for name, step in donor.steps.items():
        place = donor.structure.locate(name)
        if is_buffer(step.out):
            dropped.append(name)
        elif place is not None and place[0] == stack:
            parts = fused_parts(step.out, specs, donor.structure, donor.config)
            whole = {name: Place(name, step.out.shape)}
            for inner, part in {p.name: Place(name, p.shape, p.block) for p in parts}.items() or whole.items():
                found[place[1]][donor.structure.suffix(inner) or ""] = part
        else:
            outside.append(name)
    layers = []
    for i, places in enumerate(found):
        mlp = {part: places.pop(f"mlp.{part}_proj.weight", None) for part in PARTS}
        whole = {part: place for part, place in mlp.items() if place is not None}
        if len(whole) < len(PARTS):
            missing = ", ".join(f"mlp.{part}_proj.weight" for part in PARTS if part not in whole)
            if any("experts" in name.split(".") for name in places):
                what = f"layer {i} has experts: it is a mixture already, and experts are made of dense models"
                fix = "name a dense model; prune_experts and merge_experts work on mixtures, and so does weightsmith merge"
                return ShapeError(what, where=donor.label, fix=fix)
            what = f"layer {i} has no {missing}: an expert is made of a dense MLP of gate, up and down"
            there = ", ".join(sorted(places)[:MOST]) or "nothing"
            more = f" and {len(places) - MOST:,} more" if len(places) > MOST else ""
            fix = "name a model whose MLPs have these three"
            return ShapeError(what, where=donor.label, details=[f"it has {there}{more}"], fix=fix)
        layers.append(Layer(whole, places))
    if not layers:
        return ShapeError("it has no decoder layers", where=donor.label)
    return _uneven(donor, layers) or Dense(donor, stack.prefix, tuple(layers), tuple(outside), tuple(dropped))


def _uneven(donor: Donor, layers: Sequence[Layer]) -> ShapeError | None:
    """MLPs that are not all of one width: config.json has one number for all experts of all layers."""
    shape = layers[0].mlp["gate"].shape
    if len(shape) != 2:
        what = f"{layers[0].mlp['gate'].tensor} is {list(shape)} and no matrix"
        return ShapeError(what, where=donor.label, fix="name its checkpoint from before it was quantised")
    wanted = {"gate": shape, "up": shape, "down": shape[::-1]}
    for i, layer in enumerate(layers):
        for part, place in layer.mlp.items():
            if place.shape != wanted[part]:
                what = f"{place.tensor} of layer {i} has the {part} projection {list(place.shape)}, not {list(wanted[part])}"
                return ShapeError(what, where=donor.label, fix="take an expert with MLPs of one width in all layers")
    return None
