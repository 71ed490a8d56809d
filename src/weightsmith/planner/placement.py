"""Which models feed which part of the output: `models`, `slices` and `modules` brought into one form.

A `Block` is a run of output layers made from the same sources. A `Placement` gives the blocks of one module of the donor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weightsmith.errors import LayerError, MismatchError, ParameterError, UnknownName, WeightsmithError
from weightsmith.methods.base import Method
from weightsmith.recipe import Input, ModelRef, Module, Recipe, Setting, Slice
from weightsmith.structure import Stack, Structure

Settings = Mapping[str, Setting]
NONE: Settings = {}


@dataclass(frozen=True, slots=True)
class Feed:
    """One input of a block.

    model       index of the model
    first       its layer that feeds the block's first layer
    parameters  of its own
    where       position in the recipe
    """

    model: int
    first: int
    parameters: Settings
    where: str


@dataclass(frozen=True, slots=True)
class Block:
    """A run of output layers and what they are made of.

    feeds   the base first if `base`, then the recipe's order
    length  number of layers; None: all the layers of each stack (`models`)
    levels  parameter blocks that apply to all feeds, nearest first: slice, module, recipe
    """

    feeds: tuple[Feed, ...]
    base: bool
    length: int | None
    levels: tuple[Settings, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The blocks that make up one module of the output; without blocks it is copied from the donor."""

    module: str
    blocks: tuple[Block, ...]
    sliced: bool


class Placer:
    """Turns a recipe into placements, collecting problems."""

    def __init__(
        self, recipe: Recipe, method: Method, models: Mapping[ModelRef, int], structures: Sequence[Structure], donor: int
    ) -> None:
        self.recipe = recipe
        self.method = method
        self.models = models
        self.structures = structures
        self.donor = structures[donor]
        self.problems: list[WeightsmithError] = []

    def place(self) -> list[Placement]:
        """The placements of every module of the donor, in its order."""
        recipe = self.recipe
        if recipe.models:
            block = self._whole(recipe.models, (recipe.parameters,), recipe.at("models"))
            return [Placement(name, (block,), sliced=False) for name in self.donor.modules]
        if recipe.slices:
            main = self.donor.main
            if main is None:
                self._ambiguous()
                return []
            blocks = self._blocks(recipe.slices, (recipe.parameters,))
            self._check_ranges(recipe.slices, main.module)
            return [
                Placement(name, blocks if name == main.module else (), sliced=True) for name in self.donor.modules
            ]
        return self._modules(recipe.modules)

    def _ambiguous(self) -> None:
        stacks = [f"{s.module}: {s.n_layers} layers ({s.prefix}N)" for s in self.donor.stacks]
        self.problems.append(
            LayerError(
                "the model has several stacks of layers, and 'slices' does not say which is meant"
                if stacks
                else "the model has no stack of layers that 'slices' could cut",
                where=self.recipe.at("slices"),
                details=stacks,
                fix="write them under 'modules', for instance "
                + ", ".join(f"modules: {{{s.module}: {{slices: [...]}}}}" for s in self.donor.stacks[:2])
                if stacks
                else "use 'models'",
            )
        )

    def _modules(self, modules: Sequence[Module]) -> list[Placement]:
        placed: dict[str, Placement] = {}
        for module in modules:
            try:
                name = self.donor.find_module(module.name)
            except UnknownName as error:
                finding = error.finding
                self.problems.append(UnknownName(finding.what, where=module.where, details=finding.details))
                continue
            if name in placed:
                self.problems.append(UnknownName(f"module '{name}' is given twice", where=module.where))
                continue
            levels = (module.parameters, self.recipe.parameters)
            if module.slices:
                if len(self.donor.stacks_of(name)) != 1:
                    self.problems.append(
                        LayerError(
                            f"module '{name}' has {len(self.donor.stacks_of(name))} stacks of layers, and slices need one",
                            where=module.where,
                            fix="use 'models' for this module",
                        )
                    )
                    continue
                placed[name] = Placement(name, self._blocks(module.slices, levels), sliced=True)
                self._check_ranges(module.slices, name)
            else:
                placed[name] = Placement(name, (self._whole(module.models, levels, module.where),), sliced=False)
        return [placed.get(name, Placement(name, (), sliced=False)) for name in self.donor.modules]

    def _whole(self, inputs: Sequence[Input], levels: tuple[Settings, ...], where: str) -> Block:
        base = self.recipe.base_model
        feeds = [Feed(self.models[i.model], 0, i.parameters, i.where) for i in inputs]
        if base is not None and all(i.model != base for i in inputs):
            feeds.append(Feed(self.models[base], 0, NONE, base.where))
        return self._block(feeds, base, None, (NONE, *levels), where)

    def _blocks(self, slices: Sequence[Slice], levels: tuple[Settings, ...]) -> tuple[Block, ...]:
        blocks = []
        for s in slices:
            feeds, lengths = [], []
            for source in s.sources:
                start, end = source.layer_range or (0, 0)
                feeds.append(Feed(self.models[source.model], start, source.parameters, source.where))
                lengths.append(end - start)
            if len(set(lengths)) > 1:
                self.problems.append(
                    LayerError(
                        "the sources of a slice have different numbers of layers",
                        where=s.where,
                        details=[f"{i.model} {list(i.layer_range or ())}: {n} layers" for i, n in zip(s.sources, lengths, strict=True)],
                        fix="give ranges of equal length",
                    )
                )
                continue
            base = s.base_model or self.recipe.base_model
            blocks.append(self._block(feeds, base, lengths[0], (s.parameters, *levels), s.where))
        return tuple(blocks)

    def _block(
        self, feeds: list[Feed], base: ModelRef | None, length: int | None, levels: tuple[Settings, ...], where: str
    ) -> Block:
        """Put the base first if the method has one, and check the number of inputs."""
        method = self.method
        names = {index: str(ref) for ref, index in self.models.items()}
        for i, feed in enumerate(feeds):
            if any((f.model, f.first) == (feed.model, feed.first) for f in feeds[:i]):
                self.problems.append(
                    MismatchError(
                        f"{names[feed.model]} is listed twice", where=feed.where, fix="list each input once; weights do the rest"
                    )
                )
        if method.base == "input" or (method.base == "optional" and base is None):
            self._check_count(len(feeds), where)
            return Block(tuple(feeds), False, length, levels, where)
        if base is None:
            self.problems.append(
                ParameterError(
                    f"merge_method {method.name} needs a base_model",
                    where=self.recipe.at("merge_method"),
                    fix="add 'base_model:' with the model that the others were tuned from",
                )
            )
            return Block(tuple(feeds), False, length, levels, where)
        index = self.models[base]
        bases = [f for f in feeds if f.model == index]
        if not bases:
            self.problems.append(
                MismatchError(
                    f"the slice does not list the base model {base}",
                    where=where,
                    fix="add it to the sources, with the layer_range to take from it",
                )
            )
            return Block(tuple(feeds), False, length, levels, where)
        others = [f for f in feeds if f is not bases[0]]
        self._check_count(len(others), where)
        return Block((bases[0], *others), True, length, levels, where)

    def _check_count(self, count: int, where: str) -> None:
        method = self.method
        low, high = method.min_models, method.max_models
        if low <= count and (high is None or count <= high):
            return
        wanted = f"exactly {low}" if low == high else f"at least {low}"
        besides = "" if method.base == "input" else " besides the base"
        unlisted = self.recipe.base_model is not None and method.base == "input" and self.recipe.models
        self.problems.append(
            MismatchError(
                f"merge_method {method.name} takes {wanted} model{'s' if low != 1 else ''}{besides}, and here are {count}",
                where=where,
                details=["base_model counts as an input of this method"] if unlisted else (),
            )
        )

    def _check_ranges(self, slices: Sequence[Slice], module: str) -> None:
        """Every layer asked for exists."""
        for s in slices:
            for source in s.sources:
                if source.layer_range is None:
                    continue
                structure = self.structures[self.models[source.model]]
                stack = stack_for(structure, self.donor, module)
                n = stack.n_layers if stack else 0
                if source.layer_range[1] > n:
                    self.problems.append(
                        LayerError(
                            f"layer_range {list(source.layer_range)} of {source.model}, which has {n} layers",
                            where=source.range_where or source.where,
                            fix=f"layers count from 0 and the end is not included: at most [0, {n}]",
                        )
                    )


def stack_for(structure: Structure, donor: Structure, module: str) -> Stack | None:
    """The stack of `structure` that plays the part of the donor's one stack of `module`, or None."""
    wanted = donor.stacks_of(module)
    if len(wanted) != 1:
        return None
    for stack in structure.stacks:
        if stack.prefix == wanted[0].prefix:
            return stack
    if wanted[0] == donor.main:
        return structure.main
    same = [s for s in structure.stacks if s.kind == wanted[0].kind]
    return same[0] if len(same) == 1 else None
