"""The steps of a mixture: experts come from their donors, routers from a product, everything else from the base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weightsmith._base.errors import ParameterError, WeightsmithError
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._features.mixture.assembly import Assembly, Dense, MatrixPlace, take
from weightsmith._files.hf_folder import natural_key
from weightsmith._planning.planner.config import main_dtype
from weightsmith._planning.recipe import Expert, Recipe, Upcycling
from weightsmith._plans import COPY, FILL, JOIN, PERTURB, PRODUCTS, Block, Read, Step
from weightsmith.abc.layout import ExpertLayout, Facts

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
