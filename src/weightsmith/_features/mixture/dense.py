"""The parts of a dense decoder: gate, up and down of every layer's MLP, and the rest. Fused matrices are split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weightsmith._base.errors import FormatError, ShapeError, WeightsmithError
from weightsmith._features.mixture.assembly import Donor
from weightsmith._features.mixture.layouts.dense_config import semantics
from weightsmith._models.structure.fused import fused_parts
from weightsmith._planning.planner.match import is_buffer
from weightsmith._plans import Block

PARTS = ("gate", "up", "down")

_DECODER = "name a decoder-only language model"
MOST = 12
"""Maximum number of names in an error."""


@dataclass(frozen=True, slots=True)
class MatrixPlace:
    """Where a matrix or vector is stored: the tensor, its shape, and the block of the tensor (None: all of it)."""

    tensor: str
    shape: tuple[int, ...]
    block: Block | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    mlp   `gate` [I, H], `up` [I, H], `down` [H, I]; I: intermediate size, H: hidden size
    rest  everything else, by its unfused name inside the layer
    """

    mlp: Mapping[str, MatrixPlace]
    rest: Mapping[str, MatrixPlace]


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense model.

    prefix   before the layer number: `model.layers.`
    outside  tensors outside the layers
    dropped  buffers that models compute themselves
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
        """Names of the tensors that hold the MLPs, the rest, or both."""
        names = {p.tensor for layer in self.layers for p in layer.mlp.values()} if mlp else set()
        if rest:
            names |= {p.tensor for layer in self.layers for p in layer.rest.values()} | set(self.outside)
        return names


def dense_parts(donor: Donor) -> Dense | WeightsmithError:
    """The parts of a donor, or an error that says what is missing or which value of config.json is invalid."""
    try:
        semantics(donor.config, donor.label)
    except FormatError as error:
        return error
    stack = donor.structure.main
    if stack is None:
        return ShapeError("it does not have exactly one stack of decoder layers", where=donor.label, fix=_DECODER)
    found: list[dict[str, MatrixPlace]] = [{} for _ in range(stack.n_layers)]
    outside, dropped = [], []
    specs = {name: step.out for name, step in donor.steps.items()}
    for name, step in donor.steps.items():
        place = donor.structure.locate(name)
        if is_buffer(step.out):
            dropped.append(name)
        elif place is not None and place[0] == stack:
            parts = fused_parts(step.out, specs, donor.structure, donor.config)
            whole = {name: MatrixPlace(name, step.out.shape)}
            for inner, part in {p.name: MatrixPlace(name, p.shape, p.block) for p in parts}.items() or whole.items():
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
                what = f"layer {i} already has experts, and a mixture is built from dense models"
                fix = "name a dense model; for mixtures use prune_experts, merge_experts or weightsmith merge"
                return ShapeError(what, where=donor.label, fix=fix)
            what = f"layer {i} has no {missing}; an expert needs a dense MLP with gate, up and down projections"
            there = ", ".join(sorted(places)[:MOST]) or "nothing"
            more = f" and {len(places) - MOST:,} more" if len(places) > MOST else ""
            fix = "name a model whose MLPs have these three"
            return ShapeError(what, where=donor.label, details=[f"it has {there}{more}"], fix=fix)
        layers.append(Layer(whole, places))
    if not layers:
        return ShapeError("it has no decoder layers", where=donor.label, fix=_DECODER)
    return _uneven(donor, layers) or Dense(donor, stack.prefix, tuple(layers), tuple(outside), tuple(dropped))


def _uneven(donor: Donor, layers: Sequence[Layer]) -> ShapeError | None:
    """An error if MLPs differ in width: config.json has one number for all experts of all layers."""
    shape = layers[0].mlp["gate"].shape
    if len(shape) != 2:
        what = f"{layers[0].mlp['gate'].tensor} is {list(shape)}, not a matrix"
        return ShapeError(what, where=donor.label, fix="use an unquantised checkpoint of the same model")
    wanted = {"gate": shape, "up": shape, "down": shape[::-1]}
    for i, layer in enumerate(layers):
        for part, place in layer.mlp.items():
            if place.shape != wanted[part]:
                what = f"the {part} projection of layer {i}, {place.tensor}, is {list(place.shape)}, not {list(wanted[part])}"
                return ShapeError(what, where=donor.label, fix="use a model whose MLPs have the same width in all layers")
    return None
