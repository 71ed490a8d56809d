"""Which candidates are tried next. A searcher is asked for a round of them, none of which depends on the loss of another, and
told how good they were. With one seed it is one sequence, whoever tries them and in whatever order within a round.

    line      one number, by parabolas through the losses: few candidates, each on all rows
    gradient  numbers along the gradient of the loss: L-BFGS (Liu and Nocedal 1989, https://doi.org/10.1007/BF01589116) within
              the ranges
    cma       numbers by CMA-ES (Hansen and Ostermeier 2001, https://doi.org/10.1162/106365601750190398), of the package `cmaes`
    random    every value at random, within its range
    grid      all combinations of evenly spaced numbers and of choices

`line`, `cma` and `gradient` are for numbers. Choices are tried before, with the numbers at their start: all combinations if
they take no more than a quarter of the budget, else one choice at a time; the best are kept. `random` and `grid` treat choices
as they treat numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import PlanError
from weightsmith._base.installation import absent_packages
from weightsmith._base.options import assignment, option_error
from weightsmith._planning.recipe import Scalar, Tunable
from weightsmith._reports.tuning.candidates import Values

Round = list[Values]
"""Candidates that are tried together."""

Point = npt.NDArray[np.float64]

STEP = 0.2
"""Standard deviation of CMA-ES's first candidates, as a share of each range."""

FIRST, FARTHEST = 0.1, 0.3
"""The largest change of a number by the first step along the gradient, and by any other, as a share of its range."""

MOST_POINTS, SAME = 8, 0.01
"""A line ends after so many candidates, or where the next one is nearer than this share of the range to one before."""

REMEMBERED = 10
"""Steps from which L-BFGS learns the curvature."""

DECREASE, SHORTER = 1e-4, 8
"""A step is taken if the loss falls by this share of the predicted decrease; otherwise it is halved, up to this many times."""

ROUND = 16
"""Candidates of a round, where none depends on a loss."""

SEPARABLE = 20
"""With more numbers than this, CMA-ES learns a scale for each and no correlations: 200 trials are too few for them."""


class Searcher(Protocol):
    """Chooses the next candidates.

    numbers  positions of the values whose slopes `tell` must include; () for none
    """

    @property
    def numbers(self) -> Sequence[int]: ...

    def ask(self) -> Round | None:
        """The next round; None: there is nothing left to try."""

    def tell(self, losses: Sequence[float], slopes: Sequence[Sequence[float]]) -> None:
        """How good the candidates of the last round are; inf for an invalid one.

        slopes  of each loss, by one unit of each of `numbers`; () for an invalid candidate
        """


def searcher(name: str, tunables: Sequence[Tunable], start: Values, budget: int, seed: int) -> Searcher:
    """A searcher by its name. The first candidate is the start, except of `grid`.

    Raises PlanError without the package; ParameterError for a grid that the budget is too small for, and for a line through
    several numbers.
    """
    if name == "line":
        return _Line(tunables, start, budget)
    if name == "gradient":
        return _Gradient(tunables, start, budget)
    if name == "grid":
        return _Listed(_grid(tunables, budget))
    if name == "random":
        return _Listed(_random(tunables, start, seed))
    if problems := absent_packages(("cmaes",), "searches by CMA-ES", "tune"):
        raise PlanError(problems)
    return _Cma(tunables, start, budget, seed)


class _Listed:
    """Candidates that do not depend on losses."""

    numbers = ()

    def __init__(self, candidates: Iterator[Values]) -> None:
        self._candidates, self._begun = candidates, False

    def ask(self) -> Round | None:
        size = ROUND if self._begun else 1
        self._begun = True
        return [*itertools.islice(self._candidates, size)] or None

    def tell(self, losses: Sequence[float], slopes: Sequence[Sequence[float]]) -> None:
        pass


def _random(tunables: Sequence[Tunable], start: Values, seed: int) -> Iterator[Values]:
    rng = np.random.default_rng(seed)
    yield start
    while True:
        yield tuple(_drawn(tunable, rng) for tunable in tunables)


def _drawn(tunable: Tunable, rng: np.random.Generator) -> Scalar:
    if tunable.low is None or tunable.high is None:
        return tunable.choices[int(rng.integers(len(tunable.choices)))]
    return float(rng.uniform(tunable.low, tunable.high))


def _grid(tunables: Sequence[Tunable], budget: int) -> Iterator[Values]:
    """As many values of each number as the budget allows."""
    choices = math.prod(len(tunable.choices) for tunable in tunables if tunable.is_choice)
    numbers = sum(not tunable.is_choice for tunable in tunables)
    points = 2
    if choices * 2**numbers > budget:
        what = f"a grid of two values of each number takes {choices * 2**numbers:,} candidates, and the budget is {budget:,}"
        raise option_error("search", what, f"tune fewer values, or use {assignment('search', 'cma')}")
    while numbers and choices * (points + 1) ** numbers <= budget:
        points += 1
    axes = [
        tunable.choices
        if tunable.low is None or tunable.high is None
        else [float(x) for x in np.linspace(tunable.low, tunable.high, points)]
        for tunable in tunables
    ]
    return itertools.product(*axes)


class _Numbers:
    """Searches for numbers, after the choices. places: of the numbers."""

    def __init__(self, tunables: Sequence[Tunable], start: Values, budget: int) -> None:
        self.numbers: Sequence[int] = ()
        self._tunables, self._budget = tunables, budget
        self._places = [i for i, tunable in enumerate(tunables) if not tunable.is_choice]
        self._best = start, math.inf
        self._rounds = self._sequence()
        self._asked: Round = []
        self._told: Sequence[float] = ()
        self._slopes: Sequence[Sequence[float]] = ()

    def ask(self) -> Round | None:
        self._asked = next(self._rounds, [])
        return self._asked or None

    def tell(self, losses: Sequence[float], slopes: Sequence[Sequence[float]]) -> None:
        self._told, self._slopes = losses, slopes
        for values, loss in zip(self._asked, losses, strict=True):
            if loss < self._best[1]:
                self._best = values, loss

    def _sequence(self) -> Iterator[Round]:
        """Each round is told before the next is asked for."""
        yield [self._best[0]]
        yield from self._chosen(self._best[0])
        if self._places:
            yield from self._moved(self._best[0])

    def _moved(self, first: Values) -> Iterator[Round]:
        """Candidates with other numbers than the first."""
        raise NotImplementedError

    def _point(self, values: Values) -> Point:
        """The numbers as a point of the unit cube."""
        return np.array([_unit(self._tunables[i], values[i]) for i in self._places])

    def _at(self, first: Values, point: Iterable[float]) -> Values:
        """The values with the numbers of a point."""
        values = list(first)
        for i, x in zip(self._places, point, strict=True):
            values[i] = _in_range(self._tunables[i], float(x))
        return tuple(values)

    def _chosen(self, start: Values) -> Iterator[Round]:
        """Choices, with the numbers at their start."""
        places = [i for i, tunable in enumerate(self._tunables) if tunable.is_choice]
        combinations = math.prod(len(self._tunables[i].choices) for i in places)
        if not places:
            return
        if combinations <= max(2, self._budget // 4):
            vectors = []
            for chosen in itertools.product(*(self._tunables[i].choices for i in places)):
                values = list(start)
                for i, choice in zip(places, chosen, strict=True):
                    values[i] = choice
                if tuple(values) != start:
                    vectors.append(tuple(values))
            yield vectors
            return
        for i in places:
            now = self._best[0]
            yield [(*now[:i], choice, *now[i + 1 :]) for choice in self._tunables[i].choices if choice != now[i]]


class _Line(_Numbers):
    def __init__(self, tunables: Sequence[Tunable], start: Values, budget: int) -> None:
        super().__init__(tunables, start, budget)
        if len(self._places) != 1:
            what = f"a line is for one number, and the recipe has {len(self._places):,} to tune"
            raise option_error("search", what, f"use {assignment('search', 'cma')}")

    def _moved(self, first: Values) -> Iterator[Round]:
        points = {float(self._point(first)[0]): self._best[1]}
        while (missing := [x for x in (0.0, 0.5, 1.0) if x not in points]) or len(points) < MOST_POINTS:
            asked = missing or [float(f"{lowest(points, 0.0, 1.0):.4g}")]
            if not missing and min(abs(asked[0] - x) for x in points) < SAME:
                return
            yield [self._at(first, (x,)) for x in asked]
            points |= {x: told for x, told in zip(asked, self._told, strict=True) if math.isfinite(told)}
            if missing and any(x not in points for x in missing):
                return  # an end of the range cannot be scored


class _Cma(_Numbers):
    def __init__(self, tunables: Sequence[Tunable], start: Values, budget: int, seed: int) -> None:
        super().__init__(tunables, start, budget)
        self._seed = seed

    def _moved(self, first: Values) -> Iterator[Round]:
        optimizer = self._optimizer(self._point(first))
        while True:
            points = [optimizer.ask() for _ in range(optimizer.population_size)]
            yield [self._at(first, point) for point in points]
            optimizer.tell([(point, min(loss, 1e300)) for point, loss in zip(points, self._told, strict=True)])
            if optimizer.should_stop():
                return

    def _optimizer(self, mean: Point) -> Any:
        import cmaes

        bounds = np.tile([0.0, 1.0], (len(mean), 1))
        make = cmaes.SepCMA if len(mean) > SEPARABLE else cmaes.CMA
        return make(mean=mean, sigma=STEP, bounds=bounds, seed=self._seed)


class _Gradient(_Numbers):
    def __init__(self, tunables: Sequence[Tunable], start: Values, budget: int) -> None:
        super().__init__(tunables, start, budget)
        if len(self._places) == len(tunables):
            self.numbers = self._places

    def _moved(self, first: Values) -> Iterator[Round]:
        spans = np.array([_in_range(self._tunables[i], 1.0) - _in_range(self._tunables[i], 0.0) for i in self._places])
        now = self._point(first)
        if not self.numbers:  # the best choices, now with slopes
            self.numbers = self._places
            yield [first]
        loss, slope = self._told[0], np.array(self._slopes[0]) * spans
        steps: list[tuple[Point, Point]] = []
        while math.isfinite(loss):
            free = ~(((now <= 0) & (slope > 0)) | ((now >= 1) & (slope < 0)))
            towards = np.where(free, -_by_curvature(steps, np.where(free, slope, 0)), 0)
            if towards @ slope > -1e-12:
                return
            most = FARTHEST if steps else FIRST
            towards *= min(1 if steps else math.inf, most / np.abs(towards).max())
            for halved in range(SHORTER):
                point = np.clip(now + towards / 2**halved, 0, 1)
                yield [self._at(first, point)]
                [told], [slopes] = self._told, self._slopes
                if told <= loss + DECREASE * slope @ (point - now):
                    break
            else:
                if not steps:
                    return
                steps.clear()  # the curvature misleads: try the slope alone
                continue
            other = np.array(slopes) * spans
            if (other - slope) @ (point - now) > 1e-12:
                steps = [*steps[1 - REMEMBERED :], (point - now, other - slope)]
            now, loss, slope = point, told, other


def _by_curvature(steps: Sequence[tuple[Point, Point]], slope: Point) -> Point:
    """The slope times the inverse of the curvature that the last steps have shown.

    steps  changes of the point, and of the slope
    """
    direction, shares = slope.copy(), list[float]()
    for moved, changed in reversed(steps):
        shares.append(float(moved @ direction / (moved @ changed)))
        direction -= shares[-1] * changed
    if steps:
        moved, changed = steps[-1]
        direction *= moved @ changed / (changed @ changed)
    for (moved, changed), share in zip(steps, reversed(shares), strict=True):
        direction += moved * (share - changed @ direction / (moved @ changed))
    return direction


def _unit(number: Tunable, value: Scalar) -> float:
    assert number.low is not None
    assert number.high is not None
    return (float(value) - number.low) / (number.high - number.low)


def _in_range(number: Tunable, share: float) -> float:
    assert number.low is not None
    assert number.high is not None
    return number.low + share * (number.high - number.low)


def lowest(points: Mapping[float, float], low: float, high: float) -> float:
    """The lowest point of the parabola through the three points around the lowest one, between two bounds.

    points  value by place, one or more

    Where there are fewer than three, or they do not curve upwards, the place of the lowest point.

    >>> lowest({0.0: 1.25, 1.0: 0.25, 2.0: 1.25}, 0.0, 1.5)
    1.0
    >>> lowest({0.0: 3.0, 0.5: 2.0, 1.0: 1.0}, 0.0, 1.5)
    1.0
    """
    places = sorted(points)
    at = min(range(len(places)), key=lambda i: points[places[i]])
    if len(places) < 3:
        return places[at]
    first = min(max(at - 1, 0), len(places) - 3)
    x = np.array(places[first : first + 3])
    y = np.array([points[place] for place in x])
    slopes = np.diff(y) / np.diff(x)
    curve = (slopes[1] - slopes[0]) / (x[2] - x[0])
    if not curve > 1e-12:
        return places[at]
    return float(np.clip((x[0] + x[1]) / 2 - slopes[0] / (2 * curve), low, high))
