"""One Plan from the tensors of several models and inline merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from weightsmith._base.errors import FormatError, ShapeError, Unsupported, WeightsmithError
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._features.mixture.layouts.dense_config import semantics
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import Structure, analyse
from weightsmith._models.structure.fused import fused_parts
from weightsmith._planning.planner.match import is_buffer
from weightsmith._planning.planner.prepared import Prepared, model_input
from weightsmith._plans import CAST, COPY, JOIN, PRODUCTS, Block, Gather, Made, Parameters, PlanDraft, Read, Settings, Step


@dataclass(frozen=True)
class Donor:
    """A model that supplies tensors: a checkpoint, or the result of an inline merge.

    label      as the user named it
    checkpoint supplies config, tokenizer and other files: itself, or the merge's donor
    config     its config.json
    steps      the step that produces each tensor, by name, in model order
    structure  of its tensors
    merged     whether it is an inline merge
    """

    label: str
    checkpoint: Checkpoint
    config: Mapping[str, Any]
    steps: Mapping[str, Step]
    structure: Structure
    merged: bool = False


class Assembly:
    """A draft that is made of several models and inline merges.

    draft   has the models, settings and products that steps refer to
    inputs  the open models, by index
    """

    def __init__(self, provenance: Made) -> None:
        self.draft = PlanDraft(provenance, settings=[Settings({}, ({},))])
        self.inputs: list[Checkpoint] = []
        self._merges = 0
        self._numbers: dict[tuple[tuple[str, ...], str, str], int] = {}

    def add(self, checkpoint: Checkpoint) -> int:
        """The model's index in the plan; equal files share one."""
        key = tuple(map(str, checkpoint.paths)), checkpoint.revision, checkpoint.identity
        if key not in self._numbers:
            self._numbers[key] = len(self.inputs)
            self.inputs.append(checkpoint)
            self.draft.models.append(model_input(checkpoint))
        return self._numbers[key]

    def setting(self, shared: Parameters, inputs: int = 1) -> int:
        """The index of the settings; `inputs` is the step's number of inputs."""
        return self.draft.add_settings(Settings(shared, ({},) * inputs))

    def checkpoint(self, checkpoint: Checkpoint, label: str) -> Donor:
        """The donor for a checkpoint."""
        number = self.add(checkpoint)
        steps = {}
        for name, kept in checkpoint.kept_specs.items():
            op = COPY if kept.dtype is checkpoint.specs[name].dtype else CAST
            steps[name] = Step(kept, op, (Read(number, name),))
        structure = analyse([step.out for step in steps.values()], checkpoint.config)
        return Donor(label, checkpoint, checkpoint.config or {}, steps, structure)

    def merge(self, assembled: Prepared) -> Donor:
        """The donor for an inline merge: its models, settings and products are added to the draft."""
        plan = assembled.draft
        numbers = [self.add(checkpoint) for checkpoint in assembled.inputs]
        first = len(self.draft.settings)
        self.draft.settings += plan.settings
        self._merges += 1
        names = {
            name: f"merge {self._merges}, {name}" for p in plan.products for name in (p.name, *(out.name for out in p.outs))
        }

        def renamed(read: Read) -> Read:
            view = read.view
            if isinstance(view, Gather) and isinstance(view.table, str):
                view = replace(view, table=names[view.table])
            if read.model == PRODUCTS:
                return Read(PRODUCTS, names[read.tensor], view)
            return Read(numbers[read.model], read.tensor, view)

        def moved(step: Step) -> Step:
            return replace(
                step,
                inputs=tuple(map(renamed, step.inputs)),
                pieces=tuple(map(moved, step.pieces)),
                settings=first + step.settings,
                needs=tuple(names[name] for name in step.needs),
            )

        steps = {step.out.name: moved(step) for step in plan.steps}
        for product in plan.products:
            moved_product = replace(
                product,
                name=names[product.name],
                outs=tuple(replace(out, name=names[out.name]) for out in product.outs),
                steps=tuple(map(moved, product.steps))
                or tuple(leaf for step in steps.values() for leaf in step.leaves if names[product.name] in leaf.needs),
                models=tuple(numbers[model] for model in product.models),
                needs=tuple(names[name] for name in product.needs),
                files=tuple(replace(file, model=numbers[file.model]) for file in product.files),
            )
            self.draft.products.append(moved_product)
        label = f"the merge of {' and '.join(m.ref for m in plan.models)} by {plan.made.name}"
        # `assembled.structure` is the donor's, and slices change the depth.
        structure = analyse([step.out for step in steps.values()], plan.config)
        return Donor(label, assembled.inputs[plan.donor], plan.config or {}, steps, structure, merged=True)


def take(step: Step, out: TensorSpec, block: Block | None = None) -> Step:
    """The step that writes a donor's tensor, or a block of it, as `out`. Copies the bytes if the dtype is unchanged.

    Raises Unsupported for a block of an inline merge's tensor.
    """
    if step.op in (COPY, CAST):
        plain = step.op == COPY and step.out.dtype is out.dtype
        source = step.inputs[0]
        return Step(out, COPY if plain else CAST, (Read(source.model, source.tensor, block),))
    if step.pieces and block is not None:
        for piece, start in zip(step.pieces, accumulate((p.out.size for p in step.pieces), initial=0), strict=False):
            if block.whole_rows and (start, piece.out.size) == (block.offset, block.rows * block.cols):
                return replace(piece, out=out)
    if block is not None:
        raise Unsupported(
            "a fused tensor of an inline merge cannot be split",
            where=step.out.name,
            fix="run that merge first and use its output folder here",
        )
    if step.out.name != out.name and not step.pieces:
        # Random masks depend on the tensor's name. A piece keeps the name it has in the merge.
        return Step(out, JOIN, (), pieces=(_with_dtype(step, out.dtype),))
    return replace(step, out=out, pieces=tuple(_with_dtype(piece, out.dtype) for piece in step.pieces))


def _with_dtype(step: Step, dtype: DType) -> Step:
    return replace(step, out=TensorSpec(step.out.name, dtype, step.out.shape))


# ---- The parts of a dense decoder: gate, up and down of every layer's MLP, and the rest. Fused matrices are split.

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


def dense_parts(donor: Donor) -> Dense | WeightsmithError:
    """The parts of a donor, or an error that says what is missing or which value of config.json is invalid."""
    try:
        semantics(donor.config, donor.label)
    except FormatError as error:
        return error
    stack = donor.structure.main
    if stack is None:
        return ShapeError("it does not have exactly one stack of decoder layers", where=donor.label, fix=_DECODER)
    places_of_layer: list[dict[str, MatrixPlace]] = [{} for _ in range(stack.n_layers)]
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
                places_of_layer[place[1]][donor.structure.suffix(inner) or ""] = part
        else:
            outside.append(name)
    layers = []
    for i, places in enumerate(places_of_layer):
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
            others = f" and {len(places) - MOST:,} more" if len(places) > MOST else ""
            fix = "name a model whose MLPs have these three"
            return ShapeError(what, where=donor.label, details=[f"it has {there}{others}"], fix=fix)
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
    expected = {"gate": shape, "up": shape, "down": shape[::-1]}
    for i, layer in enumerate(layers):
        for part, place in layer.mlp.items():
            if place.shape != expected[part]:
                what = f"the {part} projection of layer {i}, {place.tensor}, is {list(place.shape)}, not {list(expected[part])}"
                return ShapeError(what, where=donor.label, fix="use a model whose MLPs have the same width in all layers")
    return None
