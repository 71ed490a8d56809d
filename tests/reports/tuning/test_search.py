"""Searchers: one sequence for a seed, within ranges, choices handled as said, and better than chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from weightsmith._base.errors import ParameterError
from weightsmith._planning.recipe import Scalar, Tunable
from weightsmith._reports.tuning.search import Values, searcher


def number(name: str, low: float = 0.0, high: float = 1.0) -> Tunable:
    return Tunable(name, name, name, low, high, (), (low + high) / 2)


def choice(name: str, *choices: Scalar) -> Tunable:
    return Tunable(name, name, name, None, None, choices, choices[0])


def run(name: str, tunables: list[Tunable], budget: int, seed: int = 0, loss=lambda values: 0.0) -> list[Values]:  # type: ignore[no-untyped-def]
    tried: list[Values] = []
    search = searcher(name, tunables, tuple(tunable.start for tunable in tunables), budget, seed)
    while len(tried) < budget and (asked := search.ask()) is not None:
        tried += asked
        losses = [loss(values) for values in asked]
        pairs = zip(asked, losses, strict=True)
        search.tell(losses, [slopes(values, search.numbers, loss) if math.isfinite(value) else () for values, value in pairs])
    return tried[:budget]


def slopes(values: Values, numbers: Sequence[int], loss: Callable[[Values], float]) -> list[float]:
    def near(i: int, step: float) -> float:
        return loss((*values[:i], float(values[i]) + step, *values[i + 1 :]))

    return [(near(i, 1e-6) - near(i, -1e-6)) / 2e-6 for i in numbers]


def distance(values: Values) -> float:
    return sum((float(value) - 0.8) ** 2 for value in values if not isinstance(value, str))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cma", "random"])
def test_one_seed_is_one_sequence_from_the_start_within_the_ranges(name: str) -> None:
    tunables = [number("a", -1, 2), choice("m", "x", "y"), number("b", 3, 4)]
    first = run(name, tunables, 40, 1, distance)
    assert first == run(name, tunables, 40, 1, distance)
    assert first != run(name, tunables, 40, 2, distance)
    assert first[0] == (0.5, "x", 3.5)
    assert all(-1 <= values[0] <= 2 and values[1] in ("x", "y") and 3 <= values[2] <= 4 for values in first)


@pytest.mark.parametrize("curve", [lambda x: (x - 0.73) ** 2, lambda x: math.exp(x) - 2.2 * x, lambda x: abs(x - 0.6) ** 1.5])
def test_a_line_finds_the_minimum_of_one_number_in_few_candidates(curve: Callable[[float], float]) -> None:
    tried = run("line", [number("a", -1, 2)], 40, 0, lambda values: curve(float(values[0])))
    assert tried[0] == (0.5,)
    assert len(tried) <= 8
    best = min(curve(float(values[0])) for values in tried)
    assert best - min(curve(x) for x in np.linspace(-1, 2, 3001)) < 5e-3
    assert all(-1 <= float(values[0]) <= 2 for values in tried)


def test_a_line_stops_at_an_end_where_the_loss_falls_towards_it_and_after_an_end_that_cannot_be_scored() -> None:
    tried = run("line", [number("a")], 40, 0, lambda values: -float(values[0]))
    assert tried == [(0.5,), (0.0,), (1.0,)]
    broken = run("line", [number("a")], 40, 0, lambda values: math.inf if values[0] == 1 else float(values[0]))
    assert broken == [(0.5,), (0.0,), (1.0,)]


def test_a_line_takes_choices_first_and_refuses_two_numbers() -> None:
    loss = lambda values: (float(values[0]) - 0.3) ** 2 + (values[1] == "x")  # noqa: E731
    tried = run("line", [number("a"), choice("m", "x", "y")], 40, 0, loss)
    assert tried[:2] == [(0.5, "x"), (0.5, "y")]
    assert all(values[1] == "y" for values in tried[2:])
    assert min(tried, key=loss)[0] == pytest.approx(0.3, abs=0.01)
    with pytest.raises(ParameterError, match="a line is for one number, and the recipe has 2 to tune"):
        run("line", [number("a"), number("b")], 4)


@pytest.mark.parametrize("n", [1, 2, 12, 60])
def test_cma_finds_a_minimum_that_random_values_miss(n: int) -> None:
    tunables = [number(str(i)) for i in range(n)]
    budget = 60 if n == 1 else 300
    best = {name: min(map(distance, run(name, tunables, budget, 0, distance))) for name in ("cma", "random")}
    assert best["cma"] < best["random"] / (1 if n == 1 else 3)


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 2, 60])
def test_the_gradient_leads_to_a_minimum_in_few_steps(n: int) -> None:
    tunables = [number(str(i), 0, 1 + i % 3) for i in range(n)]
    rng = np.random.default_rng(0)
    shares, best = rng.uniform(0.1, 10, n), rng.uniform(-0.2, 0.9, n)  # some lie outside the ranges

    def loss(values: Values) -> float:
        away = np.array([float(value) for value in values]) - best
        return float(np.sum(shares * away**2) + np.sum(away) ** 2 / 4)

    tried = run("gradient", tunables, 40, 0, loss)
    many = run("gradient", tunables, 400, 0, loss)
    start, end, least = (loss(values) for values in (tried[0], tried[-1], min(many, key=loss)))
    assert end - least < 0.001 * (start - least)
    assert all(0 <= float(value) <= 1 + i % 3 for values in tried for i, value in enumerate(values))


def test_the_gradient_of_a_rough_loss_ends_no_worse_than_it_began() -> None:
    tunables = [choice("m", "x", "y"), number("a"), number("b")]

    def loss(values: Values) -> float:
        if float(values[1]) > 0.8:
            return math.inf
        return (values[0] == "x") + (float(values[1]) - 1) ** 2 + 0.01 * math.sin(300 * float(values[2]))

    tried = run("gradient", tunables, 60, 0, loss)
    assert tried[:2] == [("x", 0.5, 0.5), ("y", 0.5, 0.5)]
    best = min(tried, key=loss)
    assert best[0] == "y"
    assert 0.7 < float(best[1]) <= 0.8


def test_an_invalid_candidate_does_not_end_the_search() -> None:
    tried = run("cma", [number("a"), number("b")], 80, 0, lambda v: math.inf if v[0] < 0.5 else distance(v))
    assert len(tried) == 80
    assert min(map(distance, tried)) < 0.001
    assert len(run("cma", [number("a"), number("b")], 80, 0, lambda v: math.inf)) == 80


def test_choices_are_tried_before_numbers_and_the_best_is_kept() -> None:
    tunables = [choice("m", "x", "y"), number("a"), choice("k", 1, 2, 3)]

    def loss(values: Values) -> float:
        return abs(float(values[1]) - 0.3) + (0 if values[0] == "y" else 5) + (0 if values[2] == 2 else 9)

    tried = run("cma", tunables, 100, 0, loss)
    assert len({values[::2] for values in tried[:6]}) == 6
    assert {values[1] for values in tried[:6]} == {0.5}
    assert {values[::2] for values in tried[6:]} == {("y", 2)}
    alone = run("cma", tunables, 12, 0, loss)
    assert [values[::2] for values in alone[:4]] == [("x", 1), ("y", 1), ("y", 2), ("y", 3)]
    assert {values[::2] for values in alone[4:]} == {("y", 2)}
    assert len(run("cma", [choice("m", "x", "y")], 100, 0, lambda v: 0.0)) == 2


def test_a_grid_has_all_combinations_within_the_budget() -> None:
    tried = run("grid", [number("a"), choice("m", "x", "y"), number("b", 0, 2)], 20)
    assert len(tried) == len(set(tried)) == 18
    assert {values[0] for values in tried} == {0.0, 0.5, 1.0}
    assert {values[2] for values in tried} == {0.0, 1.0, 2.0}
    with pytest.raises(ParameterError, match="two values of each number takes 1,024 candidates, and the budget is 100"):
        run("grid", [number(str(i)) for i in range(10)], 100)
