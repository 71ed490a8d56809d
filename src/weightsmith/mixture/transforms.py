"""Experts that are not their donor's MLP as it is: cut into smaller ones, with noise, partly drawn anew, scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weightsmith.errors import ParameterError, WeightsmithError
from weightsmith.mixture.assembly import Assembly
from weightsmith.mixture.dense import Dense, Place
from weightsmith.plans import PERTURB, Block, Step
from weightsmith.recipe import Expert, Recipe, Upcycling


def sharded(donor: Dense, groups: int) -> list[Dense]:
    """A dense model cut into `groups`: the same rows of gate and up, and columns of down, of every layer. I must divide.

    The sum of what the shards put out is what the whole does: down @ (act(gate x) * (up x)) is a sum over the neurons.
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


def _shard(part: str, place: Place, g: int, groups: int) -> Place:
    rows, cols = place.shape
    whole = place.block or Block(0, rows, cols, cols)
    if part == "down":
        cols //= groups
        return Place(place.tensor, (rows, cols), Block(whole.offset + g * cols, rows, cols, whole.stride))
    rows //= groups
    return Place(place.tensor, (rows, cols), Block(whole.offset + g * rows * whole.stride, rows, cols, whole.stride))


class Transforms:
    """Makes the steps of an expert's tensors what its keys in the recipe ask for."""

    def __init__(self, assembly: Assembly, groups: int) -> None:
        self._assembly = assembly
        self._groups = groups
        self._known: dict[tuple[float | str, ...], int] = {}

    def step(self, plain: Step, expert: Expert, label: str, part: str, layer: str) -> Step:
        """The step of one part of one expert, from the one that takes it from its donor.

        label  the expert's number, of a shared one with "shared " before it
        part   gate, up or down
        layer  prefix of its layer

        Virtual groups (He et al. 2024, arXiv 2410.07524) are scaled so that the mixture begins as the dense model. In every
        layout here the weights of a token's experts sum to 1, and those of one group are equal, as their router rows are. So
        each of a group's G shards has 1/G of the group's weight, and down times G gives the sum of the shards all of it. That
        is exact where G is a power of two. (The paper's factor is for weights that are not made to sum to 1.)
        """
        noise = expert.noise_scale if expert.noise_fraction else 0.0
        factor = expert.residual_scale * self._groups if part == "down" else 1.0
        if noise == 0 and expert.drop_fraction == 0 and factor == 1:
            return plain
        key = (label, part, noise, expert.noise_fraction, expert.drop_fraction, factor)
        if key not in self._known:
            names = ("expert", "part", "noise_scale", "noise_fraction", "drop_fraction", "factor")
            self._known[key] = self._assembly.setting(dict(zip(names, key, strict=True)))
        return replace(plain, op=PERTURB, settings=self._known[key], layer=layer)


def check_transforms(recipe: Upcycling, intermediate: int | None) -> list[WeightsmithError]:
    """What of these keys cannot be. intermediate: I of the experts, where it is known."""
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
            what = "an expert that is merged on the way can have no noise, be scaled, redrawn or cut"
            fix = "make that merge first, and name its folder here"
            problems.append(ParameterError(what, where=expert.section.at("source_model"), fix=fix))
    if groups == 1:
        return problems
    if recipe.shared_experts:
        what = "virtual_groups cuts the routed experts, and a shared expert would not have their size"
        problems.append(ParameterError(what, where=where, fix="leave shared_experts or virtual_groups out"))
    if recipe.experts_per_token % groups:
        what = f"experts_per_token is {recipe.experts_per_token}, and virtual_groups {groups} are chosen together"
        fix = f"write experts_per_token: {groups}, or a multiple of it"
        problems.append(ParameterError(what, where=recipe.section.at("experts_per_token"), fix=fix))
    if intermediate is not None and intermediate % groups:
        what = f"an MLP of {intermediate} neurons cannot be cut into {groups} of one size"
        problems.append(ParameterError(what, where=where, fix=f"choose a divisor of {intermediate}"))
    return problems


def spread(experts: Sequence[Expert], groups: int) -> list[Expert]:
    """The recipe's entry of each expert of the output."""
    return [expert for expert in experts for _ in range(groups)]
