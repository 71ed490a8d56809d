"""Which candidate is tried next. A searcher is asked for values and told how good they were; with one seed it is one sequence.

    cma     numbers by CMA-ES (Hansen and Ostermeier 2001, https://doi.org/10.1162/106365601750190398), of the package `cmaes`
    random  every value at random, within its range
    grid    all combinations of evenly spaced numbers and of choices

CMA-ES is for numbers. Choices are tried before it, with the numbers at their start: all combinations if they take no more than
a quarter of the budget, else one choice at a time; the best are kept. `random` and `grid` treat choices as they treat numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from weightsmith._activations.packages import missing
from weightsmith._base.errors import PlanError
from weightsmith._base.options import assignment, option_error
from weightsmith._planning.recipe import Scalar, Tunable

Values = tuple[Scalar, ...]

SEARCHERS = ("cma", "random", "grid")

STEP = 0.2
"""Standard deviation of CMA-ES's first candidates, as a share of each range."""

SEPARABLE = 20
"""With more numbers than this, CMA-ES learns a scale for each and no correlations: 200 trials are too few for them."""


class Searcher(Protocol):
    """Chooses the next candidate."""

    def ask(self) -> Values | None:
        """Values to try; None: there is nothing left to try."""

    def tell(self, values: Values, loss: float) -> None:
        """How good the values are that were asked for last; inf for an invalid candidate."""


def searcher(name: str, tunables: Sequence[Tunable], start: Values, budget: int, seed: int) -> Searcher:
    """A searcher by its name. The first candidate of `cma` and `random` is the start.

    Raises PlanError without the package; ParameterError for a grid that the budget is too small for.
    """
    if name == "grid":
        return _Listed(_grid(tunables, budget))
    if name == "random":
        return _Listed(_random(tunables, start, seed))
    if problems := missing(("cmaes",), "searches by CMA-ES", "tune"):
        raise PlanError(problems)
    return _Cma(tunables, start, budget, seed)


class _Listed:
    """Candidates that do not depend on losses."""

    def __init__(self, candidates: Iterator[Values]) -> None:
        self._candidates = candidates

    def ask(self) -> Values | None:
        return next(self._candidates, None)

    def tell(self, values: Values, loss: float) -> None:
        pass


def _random(tunables: Sequence[Tunable], start: Values, seed: int) -> Iterator[Values]:
    rng = np.random.default_rng(seed)
    yield start
    while True:
        yield tuple(_drawn(each, rng) for each in tunables)


def _drawn(each: Tunable, rng: np.random.Generator) -> Scalar:
    if each.low is None or each.high is None:
        return each.choices[int(rng.integers(len(each.choices)))]
    return float(rng.uniform(each.low, each.high))


def _grid(tunables: Sequence[Tunable], budget: int) -> Iterator[Values]:
    """As many values of each number as the budget allows."""
    choices = math.prod(len(each.choices) for each in tunables if each.is_choice)
    numbers = sum(not each.is_choice for each in tunables)
    points = 2
    if choices * 2**numbers > budget:
        what = f"a grid of two values of each number takes {choices * 2**numbers:,} candidates, and the budget is {budget:,}"
        raise option_error("search", what, f"tune fewer values, or use {assignment('search', 'cma')}")
    while numbers and choices * (points + 1) ** numbers <= budget:
        points += 1
    axes = [
        each.choices if each.low is None or each.high is None else [float(x) for x in np.linspace(each.low, each.high, points)]
        for each in tunables
    ]
    return itertools.product(*axes)


class _Cma:
    def __init__(self, tunables: Sequence[Tunable], start: Values, budget: int, seed: int) -> None:
        self._tunables, self._budget, self._seed = tunables, budget, seed
        self._best = start, math.inf
        self._candidates = self._sequence()
        self._told = math.inf

    def ask(self) -> Values | None:
        return next(self._candidates, None)

    def tell(self, values: Values, loss: float) -> None:
        self._told = loss
        if loss < self._best[1]:
            self._best = values, loss

    def _sequence(self) -> Iterator[Values]:
        """Each candidate is told before the next is asked for."""
        yield self._best[0]
        yield from self._chosen(self._best[0])
        places = [i for i, each in enumerate(self._tunables) if not each.is_choice]
        if not places:
            return
        first = self._best[0]
        optimizer = self._optimizer([_unit(self._tunables[i], first[i]) for i in places])
        while True:
            solutions = []
            for _ in range(optimizer.population_size):
                point = optimizer.ask()
                values = list(first)
                for i, x in zip(places, point, strict=True):
                    values[i] = _in_range(self._tunables[i], float(x))
                yield tuple(values)
                solutions.append((point, min(self._told, 1e300)))
            optimizer.tell(solutions)
            if optimizer.should_stop():
                return

    def _chosen(self, start: Values) -> Iterator[Values]:
        """Choices, with the numbers at their start."""
        places = [i for i, each in enumerate(self._tunables) if each.is_choice]
        combinations = math.prod(len(self._tunables[i].choices) for i in places)
        if not places:
            return
        if combinations <= max(2, self._budget // 4):
            for chosen in itertools.product(*(self._tunables[i].choices for i in places)):
                values = list(start)
                for i, choice in zip(places, chosen, strict=True):
                    values[i] = choice
                if tuple(values) != start:
                    yield tuple(values)
            return
        for i in places:
            now = self._best[0]
            for choice in self._tunables[i].choices:
                if choice != now[i]:
                    yield (*now[:i], choice, *now[i + 1 :])

    def _optimizer(self, mean: Sequence[float]) -> Any:
        import cmaes

        bounds = np.tile([0.0, 1.0], (len(mean), 1))
        make = cmaes.SepCMA if len(mean) > SEPARABLE else cmaes.CMA
        return make(mean=np.array(mean), sigma=STEP, bounds=bounds, seed=self._seed)


def _unit(each: Tunable, value: Scalar) -> float:
    assert each.low is not None
    assert each.high is not None
    return (float(value) - each.low) / (each.high - each.low)


def _in_range(each: Tunable, share: float) -> float:
    assert each.low is not None
    assert each.high is not None
    return each.low + share * (each.high - each.low)
