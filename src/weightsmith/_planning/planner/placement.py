"""Which segments make which module of the output, and whether the layers they ask for exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weightsmith._base.errors import LayerError, UnknownName, WeightsmithError
from weightsmith._models.structure import Stack, Structure
from weightsmith._planning.planner.inputs import at
from weightsmith._planning.planner.match import ModelNames
from weightsmith._planning.planner.segments import Region, Segment, SegmentInput
from weightsmith._planning.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Placement:
    """The segments that make up one module of the output; without segments it is copied from the donor.

    sliced  prefixes of the stacks that the segments cut; () when the segments take each stack whole
    """

    module: str
    segments: tuple[Segment, ...]
    sliced: tuple[str, ...] = ()


class Placer:
    """Puts the regions of a recipe in their places, collecting problems.

    names  of the models, None for one that could not be opened
    """

    def __init__(self, recipe: Recipe, labels: Sequence[str], names: Sequence[ModelNames | None], donor: Structure) -> None:
        self.recipe = recipe
        self.labels = labels
        self.names = names
        self.donor = donor
        self.problems: list[WeightsmithError] = []

    def place(self, regions: Sequence[Region]) -> list[Placement]:
        """The placements of every module of the donor, in its order."""
        if not self.recipe.modules:
            region = regions[0]
            if not region.sliced:
                return [Placement(name, region.segments) for name in self.donor.modules]
            main = self.donor.main
            if main is None:
                self._ambiguous()
                return []
            segments, stacks = self._in_range(region.segments, main.prefix), self._counted_together(main)
            return [Placement(n, segments, stacks) if n == main.module else Placement(n, ()) for n in self.donor.modules]
        placed: dict[str, Placement] = {}
        for region in regions:
            placement = self._module(region, placed)
            if placement is not None:
                placed[placement.module] = placement
        return [placed.get(name, Placement(name, ())) for name in self.donor.modules]

    def _ambiguous(self) -> None:
        stacks = [s for s in self.donor.stacks if s.kind != "other"]
        modules = list(dict.fromkeys(s.module for s in stacks))
        example = ", ".join(f"{name}: {{slices: [...]}}" for name in modules)
        self.problems.append(
            LayerError(
                "the model has several stacks of layers, and 'slices' does not say which is meant"
                if stacks
                else "the model has no stack of layers that 'slices' could cut",
                where=self.recipe.at("slices"),
                details=[f"{s.module}: {s.n_layers} layers ({s.prefix}N)" for s in stacks],
                fix=f"write modules: {{{example}}}" if stacks else "use 'models'",
            )
        )

    def _module(self, region: Region, placed: dict[str, Placement]) -> Placement | None:
        module = region.module
        assert module is not None
        try:
            name = self.donor.find_module(module.name)
        except UnknownName as error:
            self.problems.append(at(error, module.where))
            return None
        if name in placed:
            self.problems.append(UnknownName(f"module '{name}' is given twice", where=module.where))
            return None
        if not region.sliced:
            return Placement(name, region.segments)
        stacks = [s for s in self.donor.stacks_of(name) if s.kind != "other"]
        if self.donor.main in stacks:
            stacks = [s for s in stacks if s == self.donor.main]
        if len(stacks) != 1:
            self.problems.append(
                LayerError(
                    f"module '{name}' has {len(stacks) or 'no'} stacks of layers, and 'slices' needs one",
                    where=module.where,
                    details=[f"{s.n_layers} layers ({s.prefix}N)" for s in stacks],
                    fix="use 'models' for this module",
                )
            )
            return None
        return Placement(name, self._in_range(region.segments, stacks[0].prefix), self._counted_together(stacks[0]))

    def _counted_together(self, stack: Stack) -> tuple[str, ...]:
        """The stack, and those of the module that the same key of config.json counts (XLM's attentions and ffns)."""
        return tuple(
            s.prefix
            for s in self.donor.stacks_of(stack.module)
            if s == stack or (s.config_path and (s.config_path, s.n_layers) == (stack.config_path, stack.n_layers))
        )

    def _in_range(self, segments: Sequence[Segment], prefix: str) -> tuple[Segment, ...]:
        """The segments; those that ask for layers that do not exist are reported, and broken."""
        checked = []
        for segment in segments:
            wrong = [problem for feed in segment.feeds if (problem := self._out_of_range(feed, prefix)) is not None]
            self.problems += wrong
            checked.append(replace(segment, broken=True) if wrong else segment)
        return tuple(checked)

    def _out_of_range(self, feed: SegmentInput, prefix: str) -> LayerError | None:
        names = self.names[feed.model]
        if names is None or feed.end is None:
            return None
        n, label = names.depth.get(prefix, 0), self.labels[feed.model]
        if not n:
            return LayerError(f"{label} has no layers like {prefix}N", where=feed.where, fix="leave this source out")
        if feed.end <= n:
            return None
        return LayerError(
            f"layer_range {[feed.first, feed.end]} of {label}, which has {n} layers",
            where=feed.range_where or feed.where,
            fix=f"write at most [0, {n}]: layers count from 0, and the end is not included",
        )
