"""A recipe with values to tune: the plan of each candidate, from models that are opened and matched once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from weightsmith import _methods as methods
from weightsmith._base.errors import PlanError, WeightsmithError
from weightsmith._base.idioms import Closing
from weightsmith._base.tensors import DTYPES
from weightsmith._execution.execute import check_computable
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.build import Bound, bind, parameter_problems
from weightsmith._planning.planner.inputs import pinned_names
from weightsmith._planning.planner.prepared import Prepared, make_readable
from weightsmith._planning.recipe import Scalar, Source, Tunable, WrittenRecipe, read_template

Values = tuple[Scalar, ...]
"""One value for each tunable, in the order of the recipe's text."""

DIGITS = 6
"""Significant digits of a number: what the recipe holds is what was tried."""

OPEN = 4
"""Sets of models that stay open, where models are choices."""


class Candidates(Closing):
    """Fills a recipe and plans it. Close it, or use it as a context manager.

    tunables  the values to tune
    whole     for each of them, whether it takes whole numbers alone
    """

    def __init__(self, source: Source, options: RecipeOptions, *, streamed: bool = False) -> None:
        """
        streamed  weights of Hub models are read over the network; otherwise they are downloaded

        Raises PlanError with all problems of the recipe, and of ranges that a parameter does not allow.
        """
        self._asked, self._streamed = (source, options), streamed
        self._template = read_template(source, settings=options.settings, lenient=options.lenient)
        self._options = replace(options, settings={})
        self.tunables = self._template.tunables
        names = {tunable.parameter for tunable in self.tunables}
        kinds = {name: {p.kind for m in methods.all_methods() for p in m.parameters if p.name == name} for name in names}
        self.whole = tuple(kinds[tunable.parameter] == {"int"} for tunable in self.tunables)
        self._bounds: list[Bound] = []
        self._check_ranges()

    def in_float32(self) -> Candidates:
        """The same, with float32 as the dtype of the output."""
        source, options = self._asked
        return Candidates(source, replace(options, out_dtype=DTYPES["F32"]), streamed=self._streamed)

    @property
    def start(self) -> Values:
        """The values that the search starts from."""
        return self.rounded(self._template.start)

    @property
    def base(self) -> str | None:
        """The base of the recipe that was prepared last, if it is a model and not a recipe: on the Hub, with its commit."""
        recipe = self._bounds[-1].request.recipe
        ref = recipe.base_model
        return None if ref is None or ref.path in recipe.stages else self._pinned[str(ref)]

    @property
    def _pinned(self) -> dict[str, str]:
        last = self._bounds[-1]
        return pinned_names(last.request.models, last.opened.checkpoints)

    @property
    def text(self) -> str:
        """The recipe as it was written."""
        return self._template.written.text

    @property
    def source(self) -> tuple[str, str]:
        """Name and text of the recipe, for messages."""
        return self._template.written.shown

    def rounded(self, values: Sequence[Scalar]) -> Values:
        """Numbers with few digits, and within their ranges."""
        return tuple(_rounded(*parts) for parts in zip(self.tunables, self.whole, values, strict=True))

    def fill(self, values: Sequence[Scalar]) -> WrittenRecipe:
        """The recipe with these values."""
        return self._template.fill(values)

    def prepare(self, values: Sequence[Scalar]) -> Prepared:
        """The plan of a candidate; its models stay open, and can be read. Raises PlanError, CheckpointError."""
        written = self._template.fill(values, layout=False)
        for bound in reversed(self._bounds):
            prepared = bound.replan(written)
            if prepared is not None:
                self._bounds.remove(bound)
                self._bounds.append(bound)
                return prepared
        with ExitStack() as stack:
            new = stack.enter_context(bind(written, self._options))
            prepared = new.replan(written)
            assert prepared is not None
            check_computable(prepared)
            make_readable(prepared.inputs, streamed=self._streamed)
            stack.pop_all()
        self._bounds.append(new)
        if len(self._bounds) > OPEN:
            self._bounds.pop(0).close()
        return prepared

    def prepare_mean(self) -> Prepared | None:
        """The plain mean of the fine-tunes of the recipe that was prepared last, in its dtypes. Its models can be read.

        None unless the recipe lists at least two, and they can be merged so: models of unequal vocabularies cannot.
        """
        recipe = self._bounds[-1].request.recipe
        refs = dict.fromkeys(entry.model for entry in recipe.models if entry.model != recipe.base_model)
        if len(refs) < 2 or any(ref.path in recipe.stages for ref in refs):
            return None
        names = self._pinned
        models = [{"model": names[str(ref)], "parameters": {"weight": 1}} for ref in refs]
        mean: dict[str, Any] = {"merge_method": "linear", "models": models}
        mean |= {key: dtype.torch for key in ("dtype", "out_dtype") if (dtype := getattr(recipe, key)) is not None}
        with suppress(PlanError), ExitStack() as stack:
            prepared = stack.enter_context(prepare_any(mean, self._options, QuantizeSettings()))
            make_readable(prepared.inputs, streamed=self._streamed)
            stack.pop_all()
            return prepared
        return None

    def _check_ranges(self) -> None:
        """Raise PlanError for an end of a range, or a choice, that its parameter does not allow."""
        start, problems = self._template.start, dict[str, WeightsmithError]()
        places = {tunable.where for tunable in self.tunables}
        for ends in ([tunable.low for tunable in self.tunables], [tunable.high for tunable in self.tunables]):
            values = [first if end is None else end for end, first in zip(ends, start, strict=True)]
            of_values = parameter_problems(self.fill(values), self._options)
            problems |= {str(problem): problem for problem in of_values if problem.finding.where in places}
        for i, tunable in enumerate(self.tunables):
            for choice in tunable.choices:
                of_values = parameter_problems(self.fill([*start[:i], choice, *start[i + 1 :]]), self._options)
                problems |= {str(problem): problem for problem in of_values}
        if problems:
            raise PlanError([*problems.values()], self.source)

    def close(self) -> None:
        """Close the models."""
        for bound in self._bounds:
            bound.close()
        self._bounds.clear()


def _rounded(tunable: Tunable, whole: bool, value: Scalar) -> Scalar:
    if tunable.low is None or tunable.high is None:
        return value
    number = float(value)
    if whole:
        return int(min(max(round(number), math.ceil(tunable.low)), math.floor(tunable.high)))
    return min(max(float(f"{number:.{DIGITS}g}"), tunable.low), tunable.high)
