"""One Plan from the tensors of several models and inline merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from weightsmith._base.errors import FormatError, ParameterError, ShapeError, Unsupported, WeightsmithError
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._base.text import some
from weightsmith._features.mixture.layouts.dense_config import semantics
from weightsmith._files.hf_folder import natural_key
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import Structure, analyse
from weightsmith._models.structure.projections import fused_parts
from weightsmith._planning.planner.match import is_buffer
from weightsmith._planning.planner.prepared import Prepared, model_input
from weightsmith._planning.planner.steps import main_dtype
from weightsmith._planning.recipe import Expert, Recipe, Upcycling
from weightsmith._plans import (
    CAST,
    COPY,
    FILL,
    JOIN,
    PERTURB,
    PRODUCTS,
    Block,
    Gather,
    Parameters,
    PlanDraft,
    Provenance,
    Read,
    Settings,
    Step,
)
from weightsmith.abc.layout import ExpertLayout, Facts


@dataclass(frozen=True)
class Donor:
    """A model that supplies tensors: a checkpoint, or the result of an inline merge.

    label      as the user named it
    checkpoint supplies config, tokenizer and other files: itself, or the merge's donor
    config     its config.json
    steps      the step that produces each tensor, by name, in model order
    structure  of its tensors
    """

    label: str
    checkpoint: Checkpoint
    config: Mapping[str, Any]
    steps: Mapping[str, Step]
    structure: Structure


class Assembly:
    """A draft that is made of several models and inline merges.

    draft   has the models, settings and products that steps refer to
    inputs  the open models, by index
    """

    def __init__(self, provenance: Provenance) -> None:
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
        number, specs = self.add(checkpoint), checkpoint.specs
        steps = {n: Step.copy(kept, Read(number, n), specs[n].dtype) for n, kept in checkpoint.kept_specs.items()}
        structure = analyse([step.out for step in steps.values()], checkpoint.config)
        return Donor(label, checkpoint, checkpoint.config or {}, steps, structure)

    def merge(self, assembled: Prepared) -> Donor:
        """The donor for an inline merge: its models, settings and products are added to the draft."""
        plan = assembled.draft
        numbers = [self.add(checkpoint) for checkpoint in assembled.inputs]
        first = len(self.draft.settings)
        self.draft.settings += plan.settings
        self.draft.copies += [replace(copy, model=numbers[copy.model]) for copy in plan.copies]
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
        label = f"the merge of {' and '.join(m.ref for m in plan.models)} by {plan.provenance.name}"
        # `assembled.structure` is the donor's, and slices change the depth.
        structure = analyse([step.out for step in steps.values()], plan.config)
        return Donor(label, assembled.inputs[plan.donor], plan.config or {}, steps, structure)


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
class DenseLayer:
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
    layers: tuple[DenseLayer, ...]
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
            fix = "name a model whose MLPs have these three"
            return ShapeError(what, where=donor.label, details=[f"it has {some(sorted(places), MOST) or 'nothing'}"], fix=fix)
        layers.append(DenseLayer(whole, places))
    if not layers:
        return ShapeError("it has no decoder layers", where=donor.label, fix=_DECODER)
    return _uneven(donor, layers) or Dense(donor, stack.prefix, tuple(layers), tuple(outside), tuple(dropped))


def _uneven(donor: Donor, layers: Sequence[DenseLayer]) -> ShapeError | None:
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


# ---- The steps of a mixture: experts come from their donors, routers from a product, everything else from the base


# ---- Experts that differ from their donor's MLP: split into smaller ones, noised, partly reinitialised or scaled.


def sharded(donor: Dense, groups: int) -> list[Dense]:
    """Split a dense model by neurons: the same rows of gate and up, and columns of down. `groups` must divide I.

    The shards' outputs sum to the model's: down @ (act(gate x) * (up x)) is a sum over the neurons.
    """
    if groups == 1:
        return [donor]
    return [
        replace(
            donor,
            layers=tuple(
                replace(layer, mlp={part: _shard(part, place, g, groups) for part, place in layer.mlp.items()})
                for layer in donor.layers
            ),
        )
        for g in range(groups)
    ]


def _shard(part: str, place: MatrixPlace, g: int, groups: int) -> MatrixPlace:
    rows, cols = place.shape
    whole = place.block or Block(0, rows, cols, cols)
    if part == "down":
        cols //= groups
        return MatrixPlace(place.tensor, (rows, cols), Block(whole.offset + g * cols, rows, cols, whole.stride))
    rows //= groups
    return MatrixPlace(place.tensor, (rows, cols), Block(whole.offset + g * rows * whole.stride, rows, cols, whole.stride))


def check_transforms(recipe: Upcycling, intermediate: int | None) -> list[WeightsmithError]:
    """Problems with these keys. intermediate: I of the experts, if known."""
    problems: list[WeightsmithError] = []
    entries = {id(expert.section): expert for expert in (*recipe.experts, *recipe.shared_experts)}
    for expert in entries.values():
        if "noise_fraction" in expert.section.values and not expert.noise_scale:
            what = "noise_fraction has no effect without noise_scale"
            problems.append(ParameterError(what, where=expert.section.at("noise_fraction"), fix="write noise_scale: 0.02"))
    groups, where = recipe.virtual_groups, recipe.section.at("virtual_groups")
    for expert in entries.values():
        changed = expert.noise_scale or expert.drop_fraction or expert.residual_scale != 1 or groups > 1
        if changed and isinstance(expert.model, Recipe):
            what = "an expert that is an inline merge cannot be noised, scaled, reinitialised or split"
            fix = "run that merge first and use its output folder here"
            problems.append(ParameterError(what, where=expert.section.at("source_model"), fix=fix))
    if groups == 1:
        return problems
    if recipe.shared_experts:
        what = "virtual_groups splits the routed experts, so a shared expert would differ in size"
        problems.append(ParameterError(what, where=where, fix="remove shared_experts or virtual_groups"))
    if recipe.experts_per_token % groups:
        what = f"experts_per_token is {recipe.experts_per_token}, not a multiple of virtual_groups, {groups}"
        fix = f"write experts_per_token: {groups}, or a multiple of it"
        problems.append(ParameterError(what, where=recipe.section.at("experts_per_token"), fix=fix))
    if intermediate is not None and intermediate % groups:
        what = f"an MLP of {intermediate} neurons cannot be split into {groups} equal parts"
        problems.append(ParameterError(what, where=where, fix=f"choose a divisor of {intermediate}"))
    return problems


@dataclass(frozen=True, slots=True)
class Steps:
    """Builds the steps. asked: the dtype of the output; None: the base's."""

    recipe: Upcycling
    base: Dense
    layout: ExpertLayout
    facts: Facts
    assembly: Assembly
    asked: DType | None
    _transforms: dict[tuple[float | str, ...], int] = field(default_factory=dict)  # → index of the settings

    def _dtype(self, stored: DType) -> DType:
        return self.asked if self.asked is not None and stored.floating else stored

    @property
    def router_dtype(self) -> DType:
        """The dtype of router weights and of constants without their own."""
        return self._dtype(main_dtype(step.out for step in self.base.donor.steps.values()) or DTYPES["F32"])

    def routers(self, i: int) -> list[TensorSpec]:
        """The router weights of layer i: the routed experts', then the shared expert's if the layout has them."""
        prefix, layout, facts = f"{self.base.prefix}{i}.", self.layout, self.facts
        routers = [TensorSpec(prefix + layout.router, self.router_dtype, (facts.experts, facts.hidden))]
        if layout.shared_router:
            routers.append(TensorSpec(prefix + layout.shared_router, self.router_dtype, (facts.shared, facts.hidden)))
        return routers

    def make(self, donors: Sequence[Dense]) -> list[Step]:
        """The steps, in model order. donors: one for each expert, shared ones last."""
        base, layout, facts = self.base, self.layout, self.facts
        steps = []
        for name in base.outside:
            step = base.donor.steps[name]
            steps.append(take(step, TensorSpec(name, self._dtype(step.out.dtype), step.out.shape)))
        dtype = self.router_dtype
        for i, layer in enumerate(base.layers):
            prefix = f"{base.prefix}{i}."
            for suffix, place in layer.rest.items():
                step = base.donor.steps[place.tensor]
                steps.append(take(step, TensorSpec(prefix + suffix, self._dtype(step.out.dtype), place.shape), place.block))
            routed, shared = donors[: facts.experts], donors[facts.experts :]
            experts = [expert for expert in self.recipe.experts for _ in range(self.recipe.virtual_groups)]
            steps += self._expert_steps(layout.tensors, i, routed, experts)
            steps += self._expert_steps(layout.shared, i, shared, self.recipe.shared_experts, alone=True)
            steps += [Step(spec, COPY, (Read(PRODUCTS, spec.name),)) for spec in self.routers(i)]
            for fixed in layout.fixed(facts):
                spec = TensorSpec(prefix + fixed.suffix, dtype if fixed.dtype is None else DTYPES[fixed.dtype], fixed.shape)
                steps.append(Step(spec, FILL, (), settings=self.assembly.setting({"value": float(fixed.value)}, inputs=0)))
        return sorted(steps, key=lambda step: natural_key(step.out.name))

    def _expert_steps(
        self,
        tensors: Sequence[tuple[str, tuple[str, ...]]],
        i: int,
        donors: Sequence[Dense],
        experts: Sequence[Expert],
        alone: bool = False,
    ) -> list[Step]:
        """The tensors of all experts of layer i. alone: at most one expert, stored as plain matrices."""
        steps: list[Step] = []
        label = "shared {e}" if alone else "{e}"
        for template, parts in tensors if donors else ():
            name = f"{self.base.prefix}{i}.{template}"
            pieces = [
                [self._part_step(f"{name.format(e=e)}[{part}]", part, i, donor, expert, label.format(e=e)) for part in parts]
                for e, (donor, expert) in enumerate(zip(donors, experts, strict=True))
            ]
            if alone or "{e}" in template:
                steps += [_joined(name.format(e=e), pieces_of_expert) for e, pieces_of_expert in enumerate(pieces)]
            else:
                steps.append(_joined(name, [piece for pieces_of_expert in pieces for piece in pieces_of_expert], len(donors)))
        return steps

    def _part_step(self, name: str, part: str, i: int, donor: Dense, expert: Expert, label: str) -> Step:
        """One part of one expert: the donor's values in the base's dtype, transformed if the recipe asks for it."""
        place = donor.layers[i].mlp[part]
        stored = self.base.donor.steps[self.base.layers[i].mlp[part].tensor].out.dtype
        plain = take(donor.donor.steps[place.tensor], TensorSpec(name, self._dtype(stored), place.shape), place.block)
        return self._transformed(plain, expert, label, part, f"{self.base.prefix}{i}.")

    def _transformed(self, plain: Step, expert: Expert, label: str, part: str, layer: str) -> Step:
        """The step of one part of one expert, with the transforms that its recipe keys ask for.

        plain  copies the part from the donor
        label  the expert's number, prefixed with "shared " for a shared one
        part   gate, up or down
        layer  prefix of its layer

        Virtual groups (He et al. 2024, arXiv 2410.07524) are scaled so that the mixture starts as the dense model. In every
        layout here the weights of a token's experts sum to 1, and shards of one group have equal router rows. So each of
        the G shards has 1/G of the group's weight, and scaling down by G restores it, exactly if G is a power of two.
        (The paper's factor is for weights that do not sum to 1.)
        """
        noise = expert.noise_scale if expert.noise_fraction else 0.0
        factor = expert.residual_scale * self.recipe.virtual_groups if part == "down" else 1.0
        if noise == 0 and expert.drop_fraction == 0 and factor == 1:
            return plain
        key = (label, part, noise, expert.noise_fraction, expert.drop_fraction, factor)
        if key not in self._transforms:
            names = ("expert", "part", "noise_scale", "noise_fraction", "drop_fraction", "factor")
            self._transforms[key] = self.assembly.setting(dict(zip(names, key, strict=True)))
        return replace(plain, op=PERTURB, settings=self._transforms[key], layer=layer)


def _joined(name: str, pieces: Sequence[Step], experts: int = 0) -> Step:
    """Parts stacked along the rows into one matrix; with several experts, [experts, rows, cols]."""
    first = pieces[0].out
    if len(pieces) == 1 and not experts:
        return replace(pieces[0], out=TensorSpec(name, first.dtype, first.shape))
    rows = sum(piece.out.shape[0] for piece in pieces)
    leaves = tuple(leaf for piece in pieces for leaf in piece.leaves)
    shape = (experts, rows // experts, first.shape[1]) if experts else (rows, first.shape[1])
    return Step(TensorSpec(name, first.dtype, shape), JOIN, (), pieces=leaves)
