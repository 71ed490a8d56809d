"""A recipe's `models`, `slices` and `modules` in one form, and their problems before any model is opened.

Which modules of the output they make, and what they leave out: no tensor of a model is lost without a reason.

A `Segment` is a run of output layers made from the same inputs; `models` is one segment as long as the model is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from weightsmith._base.errors import (
    Finding,
    LayerError,
    MismatchError,
    ParameterError,
    TensorLost,
    UnknownName,
    WeightsmithError,
)
from weightsmith._base.text import count
from weightsmith._methods.method import Method
from weightsmith._models.structure import Stack, Structure
from weightsmith._models.structure.parts import VAE
from weightsmith._models.structure.vocabulary import comes_first
from weightsmith._planning.planner.inputs import at
from weightsmith._planning.planner.match import ModelNames, home_module
from weightsmith._planning.recipe import Input, ModelRef, Module, Parameters, Recipe, Slice
from weightsmith._plans import Dropped, Read


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


def wanted_models(method: Method, count: int) -> str:
    """The number of inputs that a method takes besides the base, "at least 2"; "" if it takes `count`."""
    low, high = method.min_models, method.max_models
    if low <= count and (high is None or count <= high):
        return ""
    return f"exactly {low}" if low == high else f"at least {low}" if count < low else f"at most {high}"


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
        if not recipe.modules:
            return [self._region(None, recipe, (recipe.parameters,), recipe.at("models"))]
        return [self._region(module, module, (module.parameters, recipe.parameters), module.where) for module in recipe.modules]

    def _region(self, module: Module | None, part: Recipe | Module, levels: tuple[Parameters, ...], where: str) -> Region:
        """The region of a recipe or a module. where: of its `models`."""
        if part.slices:
            return Region(module, tuple(self._slice(part_slice, levels) for part_slice in part.slices), sliced=True)
        return Region(module, (self._whole(part.models, levels, where),), sliced=False)

    def _whole(self, inputs: Sequence[Input], levels: tuple[Parameters, ...], where: str) -> Segment:
        base = self.recipe.base_model
        feeds = [SegmentInput(self.models[i.model], 0, None, i.parameters, i.where, matched=i.matched) for i in inputs]
        if base is not None and all(f.model != self.models[base] for f in feeds):
            feeds.append(SegmentInput(self.models[base], 0, None, {}, base.where, appended=True))
        return self._segment(feeds, base, None, levels, where)

    def _slice(self, s: Slice, levels: tuple[Parameters, ...]) -> Segment:
        feeds, lengths = [], []
        for source in s.sources:
            start, end = source.layer_range or (0, 0)
            feed = SegmentInput(self.models[source.model], start, end, source.parameters, source.where, source.range_where)
            feeds.append(replace(feed, matched=source.matched))
            lengths.append(end - start)
        before = len(self.problems)
        if len(set(lengths)) > 1:
            what = "the sources of a slice have different numbers of layers"
            pairs = zip(s.sources, lengths, strict=True)
            details = [f"{i.model} {list(i.layer_range or ())}: {n} layers" for i, n in pairs]
            self.problems.append(LayerError(what, where=s.where, details=details, fix="give ranges of equal length"))
        if s.base_model is not None and self.method.base == "input":
            what = f"base_model of a slice has no effect: merge_method {self.method.name} knows no base"
            self.warnings.append(Finding(what, s.base_model.where, fix="remove it"))
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
                what, fix = f"{self.labels[feed.model]} is listed twice", "list each input once, with the sum of the weights"
                self.problems.append(MismatchError(what, where=feed.where, fix=fix))
        if method.base == "input" or (method.base == "optional" and base is None):
            self._check_count(feeds, where, "")
        elif base is None:
            self.problems.append(self._no_base(feeds))
        else:
            bases = [f for f in feeds if f.model == self.models[base]]
            others = [f for f in feeds if not bases or f is not bases[0]]
            if not bases:
                fix = "add it to the sources, with the layer_range to take from it"
                self.problems.append(MismatchError(f"the slice does not list the base model {base}", where=where, fix=fix))
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
        needed = wanted_models(method, count)
        if not needed:
            return
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
        what = f"merge_method {method.name} takes {needed} model{'s' if bound != 1 else ''}{besides}, and {here}"
        self.problems.append(MismatchError(what, where=where, details=details, fix=fix))


# ---- Which segments make which module of the output, and whether the layers they ask for exist.


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
    taken  entries of `modules` that have no place: parts that another model gives as they are
    """

    def __init__(
        self,
        recipe: Recipe,
        labels: Sequence[str],
        names: Sequence[ModelNames | None],
        donor: Structure,
        taken: Collection[str] = (),
    ) -> None:
        self.taken = taken
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
        what, fix = "the model has no stack of layers that 'slices' could cut", "use 'models'"
        if stacks:
            what = "the model has several stacks of layers, and 'slices' does not say which is meant"
            fix = f"write modules: {{{example}}}"
        details = [f"{s.module}: {s.n_layers} layers ({s.prefix}N)" for s in stacks]
        self.problems.append(LayerError(what, where=self.recipe.at("slices"), details=details, fix=fix))

    def _module(self, region: Region, placed: dict[str, Placement]) -> Placement | None:
        module = region.module
        assert module is not None
        if module.name in self.taken:
            return None
        try:
            name = self.donor.find_module(module.name)
        except UnknownName as error:
            self.problems.append(at(error, module.where))
            return None
        if name in placed:
            self.problems.append(UnknownName(f"module '{name}' is given twice", where=module.where))
            return None
        if not region.sliced:
            problems = self._part_problems(name, region.segments[0])
            self.problems += problems
            return Placement(name, tuple(replace(s, broken=True) for s in region.segments) if problems else region.segments)
        stacks = [s for s in self.donor.stacks_of(name) if s.kind != "other"]
        if self.donor.main in stacks:
            stacks = [s for s in stacks if s == self.donor.main]
        if len(stacks) != 1:
            what = f"module '{name}' has {len(stacks) or 'no'} stacks of layers, and 'slices' needs one"
            details = [f"{s.n_layers} layers ({s.prefix}N)" for s in stacks]
            self.problems.append(LayerError(what, where=module.where, details=details, fix="use 'models' for this module"))
            return None
        return Placement(name, self._in_range(region.segments, stacks[0].prefix), self._counted_together(stacks[0]))

    def _part_problems(self, module: str, segment: Segment) -> list[WeightsmithError]:
        """The models that have nothing of a part that they are given for, or not all of a VAE: the donor's would fill it."""
        problems: list[WeightsmithError] = []
        if self.donor.parts is None:
            return problems
        expected = self.donor.modules[module]
        known = zip(self.labels, self.names, strict=True)
        donor = next(label for label, names in known if names is not None and names.structure is self.donor)
        for feed in segment.feeds:
            names = self.names[feed.model]
            if names is None or names.structure is self.donor:
                continue
            stored = names.all()
            missing = [name for name in expected if name not in stored]
            if not missing or (len(missing) < len(expected) and module != VAE):
                continue
            label = self.labels[feed.model]
            what = f"{label} has {len(expected) - len(missing):,} of the {len(expected):,} tensors of module '{module}'"
            taken = {stored[name] for name in expected if name in stored}
            candidates = names.structure.modules.get(module, ()) if names.structure.parts else tuple(names.specs)
            unlike = [name for name in candidates if name not in taken]
            details = [f"{donor}: {missing[0]}", *(f"{label}: {name}" for name in unlike[:1])]
            folder = missing[0].partition("/")[0] + "/"
            fix = f"name a model whose names of this part begin as those of {donor}, or leave it out of the module"
            if folder in self.donor.parts.prefixes:
                fix = f"name a pipeline, with its folder {folder}, or leave this model out of the module"
            problems.append(MismatchError(what, where=feed.where, details=details, fix=fix))
        return problems

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
        what = f"layer_range {[feed.first, feed.end]} of {label}, which has {n} layers"
        fix = f"write at most [0, {n}]: layers count from 0, and the end is not included"
        return LayerError(what, where=feed.range_where or feed.where, fix=fix)


# ---- The account of tensors: every tensor of every input is used, or left out for a stated reason, or the plan is refused.


UNREAD = "its weight is 0"
"""Why a tensor of a model that counts for nothing is left out."""


class Account:
    """What became of each input tensor.

    copied  for each model, output tensors that are its own alone
    unread  models that count for nothing in some segment: their weight is 0
    """

    def __init__(self, labels: Sequence[str], names: Sequence[ModelNames]) -> None:
        self.labels = labels
        self.names = names
        self.used: list[set[str]] = [set() for _ in labels]
        self.reasons: list[dict[str, str]] = [{} for _ in labels]
        self.copied: list[list[str]] = [[] for _ in labels]
        self.unread: set[int] = set()

    def use(self, source: Read) -> None:
        """A tensor feeds the output."""
        self.used[source.model].add(source.tensor)

    def drop(self, model: int, tensor: str, reason: str) -> None:
        """A tensor is left out; should something else use it, that counts."""
        self.reasons[model].setdefault(tensor, reason)

    def drop_everywhere(self, name: str, reason: str) -> None:
        """The same for all models that store the tensor, which is outside the layers; `name` is the donor's."""
        for model, names in enumerate(self.names):
            if name in names.rest:
                self.drop(model, names.rest[name], reason)

    def settle(
        self, structure: Structure, donor: int, placements: Sequence[Placement]
    ) -> tuple[tuple[Dropped, ...], list[WeightsmithError]]:
        """What is left out and why, in model order; one TensorLost for each model with tensors that have no reason.

        structure  the donor's
        """
        placed = {p.module: p for p in placements}
        feeding = {donor, *(f.model for p in placements for s in p.segments for f in s.feeds)}
        dropped: list[Dropped] = []
        problems: list[WeightsmithError] = []
        for model, names in enumerate(self.names):
            used, reasons, lost = self.used[model], self.reasons[model], []
            for tensor in names.specs if len(used) < len(names.specs) else ():
                if tensor in used:
                    continue
                reason = reasons.get(tensor, "")
                if not reason and model not in feeding:
                    reason = "the recipe takes no tensor of this model"
                reason = reason or self._reason(model, tensor, structure, donor, placed)
                if reason := reason or (UNREAD if model in self.unread else ""):
                    dropped.append(Dropped(model, tensor, reason))
                else:
                    lost.append(tensor)
            if lost:
                what = f"{count(len(lost), 'tensor')} of {self.labels[model]} would not be in the output"
                fix = "report this recipe: every tensor must be used, or be left out for a stated reason"
                problems.append(TensorLost(what, where=lost[0], fix=fix))
        return tuple(dropped), problems

    def _reason(self, model: int, tensor: str, structure: Structure, donor: int, placed: Mapping[str, Placement]) -> str:
        """Why the recipe itself leaves a tensor out: its layer is in no slice, its module is taken from other models; or ""."""
        names, outer = self.names[model], self.names[model].outer.get(tensor, "")
        place = names.place(tensor)
        module = structure.module_of(f"{place[0]}0.x" if place is not None else outer)
        if outer and outer not in self.names[donor].rest and not structure.extra(outer):
            module = home_module(structure)
        placement = placed.get(module) or placed[home_module(structure)]  # a module that the donor lacks
        if not placement.segments:
            return "" if model == donor else f"module {module} is copied from {self.labels[donor]}"
        feeding = list(dict.fromkeys(f.model for s in placement.segments for f in s.feeds))
        if model not in feeding:
            return f"module {module} is taken from {' and '.join(self.labels[m] for m in feeding)}"
        if not placement.sliced:
            return ""
        if place is not None and place[0] in placement.sliced:
            ranges = [(f.first, f.end or 0) for s in placement.segments for f in s.feeds if f.model == model]
            return "" if any(a <= place[1] < b for a, b in ranges) else "its layer is in no slice"
        first = bool(outer) and comes_first(outer)
        if any(f.model == model for f in placement.segments[0 if first else -1].feeds):
            return ""
        return f"it is taken from the {'first' if first else 'last'} slice, which has another model"

    def findings(self) -> list[Finding]:
        """One warning for each model that alone gave tensors."""
        findings = []
        for label, names in zip(self.labels, self.copied, strict=True):
            if names:
                are = "is" if len(names) == 1 else "are"
                findings.append(Finding(f"{count(len(names), 'tensor')} that only {label} has {are} copied from it", names[0]))
        return findings
