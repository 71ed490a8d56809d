"""Experts that differ from their donor's MLP: split into smaller ones, noised, partly reinitialised or scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weightsmith.errors import ParameterError, WeightsmithError
from weightsmith.mixture.assembly import Assembly
from weightsmith.mixture.dense import Dense, MatrixPlace
from weightsmith.plans import PERTURB, Block, Step
from weightsmith.recipe import Expert, Recipe, Upcycling


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


class Transforms:
    """Adds the transforms that an expert's recipe keys ask for to its steps."""

    def __init__(self, assembly: Assembly, groups: int) -> None:
        self._assembly = assembly
        self._groups = groups
        self._known: dict[tuple[float | str, ...], int] = {}

    def step(self, plain: Step, expert: Expert, label: str, part: str, layer: str) -> Step:
        """The step of one part of one expert. plain: the step that copies it from the donor.

        label  the expert's number, prefixed with "shared " for a shared one
        part   gate, up or down
        layer  prefix of its layer

        Virtual groups (He et al. 2024, arXiv 2410.07524) are scaled so that the mixture starts as the dense model. In every
        layout here the weights of a token's experts sum to 1, and shards of one group have equal router rows. So each of
        the G shards has 1/G of the group's weight, and scaling down by G restores it, exactly if G is a power of two.
        (The paper's factor is for weights that do not sum to 1.)
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


def spread(experts: Sequence[Expert], groups: int) -> list[Expert]:
    """The recipe's entry of each expert of the output."""
    return [expert for expert in experts for _ in range(groups)]
