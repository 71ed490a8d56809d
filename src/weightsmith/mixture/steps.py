"""The steps of a mixture: experts come from their donors, routers from a product, everything else from the base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weightsmith.formats.hf_folder import natural_key
from weightsmith.mixture.assembly import Assembly, take
from weightsmith.mixture.dense import Dense
from weightsmith.mixture.layouts.base import ExpertLayout, Facts
from weightsmith.mixture.transforms import Transforms, spread
from weightsmith.planner.dtypes import main_dtype
from weightsmith.plans import COPY, FILL, JOIN, PRODUCTS, Read, Step
from weightsmith.recipe import Expert, Upcycling
from weightsmith.tensors import DTYPES, DType, TensorSpec


@dataclass(frozen=True, slots=True)
class Steps:
    """Builds the steps. asked: the dtype of the output; None: the base's."""

    recipe: Upcycling
    base: Dense
    layout: ExpertLayout
    facts: Facts
    assembly: Assembly
    transforms: Transforms
    asked: DType | None

    def _dtype(self, stored: DType) -> DType:
        return self.asked if self.asked is not None and stored.floating else stored

    @property
    def router_dtype(self) -> DType:
        """The dtype of router weights and of constants without their own."""
        return self._dtype(main_dtype(step.out for step in self.base.donor.steps.values()) or DTYPES["F32"])

    def routers(self, i: int) -> list[TensorSpec]:
        """The router weights of layer i: the routed experts', then the shared expert's if the layout has them."""
        prefix, layout, facts = f"{self.base.prefix}{i}.", self.layout, self.facts
        made = [TensorSpec(prefix + layout.router, self.router_dtype, (facts.experts, facts.hidden))]
        if layout.shared_router:
            made.append(TensorSpec(prefix + layout.shared_router, self.router_dtype, (facts.shared, facts.hidden)))
        return made

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
            experts = spread(self.recipe.experts, self.recipe.virtual_groups)
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
                steps += [_joined(name.format(e=e), own) for e, own in enumerate(pieces)]
            else:
                steps.append(_joined(name, [piece for own in pieces for piece in own], len(donors)))
        return steps

    def _part_step(self, name: str, part: str, i: int, donor: Dense, expert: Expert, label: str) -> Step:
        """One part of one expert: the donor's values in the base's dtype, transformed if the recipe asks for it."""
        place = donor.layers[i].mlp[part]
        stored = self.base.donor.steps[self.base.layers[i].mlp[part].tensor].out.dtype
        plain = take(donor.donor.steps[place.tensor], TensorSpec(name, self._dtype(stored), place.shape), place.block)
        return self.transforms.step(plain, expert, label, part, f"{self.base.prefix}{i}.")


def _joined(name: str, pieces: Sequence[Step], experts: int = 0) -> Step:
    """Parts stacked along the rows into one matrix; with several experts, [experts, rows, cols]."""
    first = pieces[0].out
    if len(pieces) == 1 and not experts:
        return _named(pieces[0], name)
    rows = sum(piece.out.shape[0] for piece in pieces)
    leaves = tuple(leaf for piece in pieces for leaf in piece.leaves)
    shape = (experts, rows // experts, first.shape[1]) if experts else (rows, first.shape[1])
    return Step(TensorSpec(name, first.dtype, shape), JOIN, (), pieces=leaves)


def _named(step: Step, name: str) -> Step:
    return replace(step, out=TensorSpec(name, step.out.dtype, step.out.shape))
