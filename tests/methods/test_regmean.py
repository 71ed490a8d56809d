"""The closed form of regmean, on small matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weightsmith._base.errors import ParameterError
from weightsmith._methods.regmean import solve

ROWS, COLS = 5, 4


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def merged(inputs: list[torch.Tensor], deltas: list[torch.Tensor], **how: Any) -> torch.Tensor:
    settings = {"alpha": 1.0, "ridge": 0.0, "mu": 0.3, "prior": None} | how
    return solve(deltas, lambda i, _: inputs[i].T @ inputs[i] / len(inputs[i]), where="w", **settings)


DELTAS = [random(ROWS, COLS, seed=i) for i in range(2)]
INPUTS = [random(20, COLS, seed=9 + i) for i in range(2)]


def test_it_is_least_squares_on_the_inputs_of_each_model() -> None:
    solution = merged(INPUTS, DELTAS)
    x = torch.cat(INPUTS)
    y = torch.cat([inputs @ delta.T for inputs, delta in zip(INPUTS, DELTAS, strict=True)])
    torch.testing.assert_close(solution, torch.linalg.lstsq(x, y).solution.T)


def test_without_products_of_different_inputs_each_column_is_a_mean_by_energy() -> None:
    energy = torch.stack([inputs.square().mean(0) for inputs in INPUTS])
    expected = (DELTAS[0] * energy[0] + DELTAS[1] * energy[1]) / energy.sum(0)
    torch.testing.assert_close(merged(INPUTS, DELTAS, alpha=0.0), expected)


def test_the_prior_is_one_more_model_with_white_inputs() -> None:
    prior = random(ROWS, COLS, seed=5)
    m = sum(inputs.square().mean(0).mean() for inputs in INPUTS)
    white = torch.eye(COLS, dtype=torch.float64) * (0.3 * m * COLS).sqrt()
    torch.testing.assert_close(merged(INPUTS, DELTAS, prior=prior), merged([*INPUTS, white], [*DELTAS, prior]))
    torch.testing.assert_close(merged(INPUTS, DELTAS, prior=prior, mu=1e9), prior)


def test_directions_that_nothing_enters_take_the_prior_or_nothing() -> None:
    blind = [inputs.clone() for inputs in INPUTS]
    for inputs in blind:
        inputs[:, 1] = 0
    prior = random(ROWS, COLS, seed=5)
    torch.testing.assert_close(merged(blind, DELTAS, prior=prior)[:, 1], prior[:, 1])
    assert not merged(blind, DELTAS, ridge=0.01)[:, 1].any()
    with pytest.raises(ParameterError, match="the texts do not determine this matrix"):
        merged(blind, DELTAS)


def test_a_layer_that_no_token_reaches_takes_the_prior_or_the_mean() -> None:
    nothing = [torch.zeros_like(inputs) for inputs in INPUTS]
    prior = random(ROWS, COLS, seed=5)
    assert merged(nothing, DELTAS, prior=prior) is prior
    torch.testing.assert_close(merged(nothing, DELTAS), (DELTAS[0] + DELTAS[1]) / 2)
