"""A recipe's `models`, `slices` and `modules` in one form, and their problems before any model is opened.

A `Segment` is a run of output layers made from the same inputs; `models` is one segment as long as the model is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weightsmith._base.errors import Finding, LayerError, MismatchError, ParameterError, WeightsmithError
from weightsmith._methods.base import Method
from weightsmith._planning.recipe import Input, ModelRef, Module, Parameters, Recipe, Slice


@dataclass(frozen=True, slots=True)
class SegmentInput:
    """One input of a segment.

    model       index of the model
    first       its layer that feeds the segment's first layer
    end         one past its last layer; None: as many as there are
    parameters  of its own
    where       position in the recipe
    range_where position of its layer_range, "" when it has none
    appended    not listed by the user: the base model, which counts as one of `models`
    matched     of an entry that a pattern stood for: the number of this match, oldest first, and how many there are
    """

    model: int
    first: int
    end: int | None
    parameters: Parameters
    where: str
    range_where: str = ""
    appended: bool = False
    matched: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of output layers and their sources.

    feeds   the base first if `base`, then the recipe's order
    length  number of layers; None: all the layers of each stack (`models`)
    levels  `parameters:` blocks that apply to all feeds, nearest first: slice, module, recipe
    broken  it has a problem (reported) and is not used
    """

    feeds: tuple[SegmentInput, ...]
    base: bool
    length: int | None
    levels: tuple[Parameters, ...]
    where: str
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Region:
    """The segments of the whole recipe, or of one entry of `modules`."""

    module: Module | None
    segments: tuple[Segment, ...]
    sliced: bool


class SegmentMaker:
    """Makes the regions of a recipe, collecting problems and warnings."""

    def __init__(self, recipe: Recipe, method: Method, models: Mapping[ModelRef, int], labels: Sequence[str]) -> None:
        self.recipe = recipe
        self.method = method
        self.models = models
        self.labels = labels
        self.problems: list[WeightsmithError] = []
        self.warnings: list[Finding] = []

    def regions(self) -> list[Region]:
        """One region for top-level `models` or `slices`; one for each entry of `modules`."""
        recipe = self.recipe
        levels = (recipe.parameters,)
        if recipe.models:
            return [Region(None, (self._whole(recipe.models, levels, recipe.at("models")),), sliced=False)]
        if recipe.slices:
            return [Region(None, self._sliced(recipe.slices, levels), sliced=True)]
        return [self._module(module) for module in recipe.modules]

    def _module(self, module: Module) -> Region:
        levels = (module.parameters, self.recipe.parameters)
        if module.slices:
            return Region(module, self._sliced(module.slices, levels), sliced=True)
        return Region(module, (self._whole(module.models, levels, module.where),), sliced=False)

    def _whole(self, inputs: Sequence[Input], levels: tuple[Parameters, ...], where: str) -> Segment:
        base = self.recipe.base_model
        feeds = [SegmentInput(self.models[i.model], 0, None, i.parameters, i.where, matched=i.matched) for i in inputs]
        if base is not None and all(f.model != self.models[base] for f in feeds):
            feeds.append(SegmentInput(self.models[base], 0, None, {}, base.where, appended=True))
        return self._segment(feeds, base, None, levels, where)

    def _sliced(self, slices: Sequence[Slice], levels: tuple[Parameters, ...]) -> tuple[Segment, ...]:
        return tuple(self._slice(s, levels) for s in slices)

    def _slice(self, s: Slice, levels: tuple[Parameters, ...]) -> Segment:
        feeds, lengths = [], []
        for source in s.sources:
            start, end = source.layer_range or (0, 0)
            feed = SegmentInput(self.models[source.model], start, end, source.parameters, source.where, source.range_where)
            feeds.append(replace(feed, matched=source.matched))
            lengths.append(end - start)
        before = len(self.problems)
        if len(set(lengths)) > 1:
            self.problems.append(
                LayerError(
                    "the sources of a slice have different numbers of layers",
                    where=s.where,
                    details=[
                        f"{i.model} {list(i.layer_range or ())}: {n} layers" for i, n in zip(s.sources, lengths, strict=True)
                    ],
                    fix="give ranges of equal length",
                )
            )
        if s.base_model is not None and self.method.base == "input":
            self.warnings.append(
                Finding(
                    f"base_model of a slice has no effect: merge_method {self.method.name} knows no base",
                    s.base_model.where,
                    fix="remove it",
                )
            )
        base = s.base_model or self.recipe.base_model
        mismatched = len(self.problems) > before
        return self._segment(feeds, base, max(lengths, default=0), (s.parameters, *levels), s.where, broken=mismatched)

    def _segment(
        self,
        feeds: list[SegmentInput],
        base: ModelRef | None,
        length: int | None,
        levels: tuple[Parameters, ...],
        where: str,
        *,
        broken: bool = False,
    ) -> Segment:
        """Put the base first if the method has one, and check the number of inputs."""
        method, before = self.method, len(self.problems)
        has_base = False
        for i, feed in enumerate(feeds):
            if any((f.model, f.first) == (feed.model, feed.first) for f in feeds[:i]):
                self.problems.append(
                    MismatchError(
                        f"{self.labels[feed.model]} is listed twice",
                        where=feed.where,
                        fix="list each input once, with the sum of the weights",
                    )
                )
        if method.base == "input" or (method.base == "optional" and base is None):
            self._check_count(feeds, where, "")
        elif base is None:
            self.problems.append(self._no_base(feeds))
        else:
            bases = [f for f in feeds if f.model == self.models[base]]
            others = [f for f in feeds if not bases or f is not bases[0]]
            if not bases:
                self.problems.append(
                    MismatchError(
                        f"the slice does not list the base model {base}",
                        where=where,
                        fix="add it to the sources, with the layer_range to take from it",
                    )
                )
            else:
                feeds, has_base = [bases[0], *others], True
            limits = method.base, method.min_models, method.max_models
            if bases and not others and limits == ("required", 1, None):  # mergekit then returns the base
                what = f"nothing is merged: {self.labels[bases[0].model]} is the base and the only model, and is copied"
                self.warnings.append(Finding(what, where, fix="write merge_method: passthrough, which says so"))
            else:
                self._check_count(others, where, " besides the base")
        return Segment(tuple(feeds), has_base, length, levels, where, broken or len(self.problems) > before)

    def _no_base(self, feeds: Sequence[SegmentInput]) -> ParameterError:
        method = self.method
        bare = [self.labels[feed.model] for feed in feeds if not feed.parameters]
        if method.max_models == 1:
            first = self.labels[feeds[0].model] if feeds else "one of the two"
            fix = f"write base_model: {first}: {method.name} starts there and goes towards the other model"
        elif len(bare) == 1 and len(feeds) > 1:  # listed first and without parameters, as many published recipes do
            fix = f"write base_model: {bare[0]} if the others were tuned from it"
        else:
            fix = "write base_model: and the model that the others were tuned from"
        what = f"merge_method {method.name} needs a base_model"
        return ParameterError(what, where=self.recipe.at("merge_method"), fix=fix)

    def _check_count(self, feeds: Sequence[SegmentInput], where: str, besides: str) -> None:
        method, count = self.method, len(feeds)
        low, high = method.min_models, method.max_models
        if low <= count and (high is None or count <= high):
            return
        wanted = f"exactly {low}" if low == high else f"at least {low}" if count < low else f"at most {high}"
        bound = low if count < low else high or low
        details = [self.labels[f.model] for f in feeds]
        if any(f.appended for f in feeds):
            details[-1] += f" (base_model, which counts as an input of {method.name})"
        if count == 0:
            fix = "write merge_method: passthrough to write the one model as it is, its adapter baked in"
        elif count < low:
            fix = f"write {low - count} more under 'models' or 'sources'"
        elif any(f.appended for f in feeds) and count - 1 == high:
            fix = "remove base_model"
        else:
            fix = f"remove {count - (high or low)} of them, or write a method that takes more"
        here = "there is one" if count == 1 else f"there are {count}" if count else "there is none"
        self.problems.append(
            MismatchError(
                f"merge_method {method.name} takes {wanted} model{'s' if bound != 1 else ''}{besides}, and {here}",
                where=where,
                details=details,
                fix=fix,
            )
        )
