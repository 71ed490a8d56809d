"""Slopes of the loss by the numbers of a recipe are those of its differences, whatever is kept in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.reports.tuning.test_evaluator import STAGES, rows_of
from weightsmith._base.tensors import DTYPES
from weightsmith._engine.resources import Resources
from weightsmith._planning.options import RecipeOptions
from weightsmith._reports.evaluate.opening import opened
from weightsmith._reports.tuning.candidates import Candidates
from weightsmith._reports.tuning.evaluator import MEMORY_BYTES, Candidate, Evaluator
from weightsmith._reports.tuning.measure import Slopes

LAYERS = """merge_method: task_arithmetic
base_model: a
models:
  - model: b
    parameters: {weight: [{filter: o_proj, value: [{tune: [0, 1]}, {tune: [0, 1]}]}, {value: {tune: [0, 2]}}]}
  - model: c
    parameters: {weight: {tune: [-1, 1]}}
parameters: {lambda: {tune: [0.5, 1]}}
"""
MASKS = """merge_method: dare_linear
base_model: a
models:
  - model: b
    parameters: {weight: {tune: [0, 1]}, density: 0.5}
  - model: c
    parameters: {weight: {tune: [0, 1]}, density: 0.7}
"""
CASES = {"layers": (LAYERS, (0.3, 0.7, 0.4, 0.5, 1.0)), "masks": (MASKS, (0.5, 0.4)), "stages": (STAGES, (0.5, 0.3))}


def slopes(
    text: str, values: tuple[float, ...], budget: int, threads: int, kl: bool = False
) -> tuple[list[float], list[float]]:
    """The slopes, and the differences of the losses."""
    Path("s.yml").write_text(text)
    with Candidates("s.yml", RecipeOptions(out_dtype=DTYPES["F32"])) as recipe:
        prepared = recipe.prepare(values)
        evaluator = Evaluator(one := opened("s.yml", prepared), Resources(threads=threads), budget)
        rows, shares = rows_of(one), np.array([1.0, 0.0, 0.5, 2.0]) / 31
        first = recipe.prepare(recipe.start)
        other = evaluator.reference(Candidate.of(first.plan, first.inputs), [rows]) if kl else None

        def loss(values: tuple[float, ...]) -> float:
            prepared = recipe.prepare(values)
            nats, divergences = evaluator.losses(Candidate.of(prepared.plan, prepared.inputs), rows, other)
            return float(shares @ (nats if divergences is None else divergences))

        loss(values)  # its states are kept
        candidate = Candidate.of(prepared.plan, prepared.inputs)
        estimator = Slopes(recipe, evaluator, range(len(values)))
        analytic = estimator.of(values, evaluator.gradients(candidate, rows, shares, other))
        differences = []
        for i, value in enumerate(values):
            near = [loss((*values[:i], value + step, *values[i + 1 :])) for step in (-0.004, 0.004)]
            differences.append((near[1] - near[0]) / 0.008)
        return analytic, differences


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_slopes_are_those_of_the_differences_of_losses(work: Path, name: str) -> None:
    text, values = CASES[name]
    analytic, differences = slopes(text, values, MEMORY_BYTES, 2)
    rough = 0.1 if name == "stages" else 0.02  # slerp is curved between two merges
    assert max(map(abs, differences)) > 0.01
    np.testing.assert_allclose(analytic, differences, rtol=rough, atol=rough * max(map(abs, differences)))


@pytest.mark.slow
def test_slopes_of_a_divergence(work: Path) -> None:
    analytic, differences = slopes(LAYERS, CASES["layers"][1], MEMORY_BYTES, 2, kl=True)
    np.testing.assert_allclose(analytic, differences, rtol=0.02, atol=0.02 * max(map(abs, differences)))


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("budget", [60_000, 0])
def test_slopes_depend_neither_on_threads_nor_on_memory(work: Path, budget: int) -> None:
    text, values = CASES["layers"]
    assert slopes(text, values, budget, 1)[0] == slopes(text, values, MEMORY_BYTES, 2)[0]
