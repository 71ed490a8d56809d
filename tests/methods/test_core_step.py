"""The closed form of core_step, on small matrices."""

from __future__ import annotations

import torch

from weightsmith._methods.core_step import step_of

ROWS, COLS = 5, 4


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moments(size: int, seed: int) -> torch.Tensor:
    x = random(20, size, seed=seed)
    return x.T @ x / 20


MODELS = [random(ROWS, COLS, seed=i) for i in range(3)]
SLOPES, OUTPUTS, INPUTS = random(ROWS, COLS, seed=7), moments(ROWS, 8), moments(COLS, 9)


def test_with_all_directions_and_no_damping_it_is_a_newton_step() -> None:
    step = step_of([*MODELS, random(ROWS, COLS, seed=5)], SLOPES, OUTPUTS, INPUTS, directions=4, damping=0.0)
    torch.testing.assert_close(step, OUTPUTS.inverse() @ SLOPES @ INPUTS.inverse())


def test_it_stays_within_the_directions_of_the_differences_from_the_first_model() -> None:
    one = random(ROWS, 1, seed=3) @ random(1, COLS, seed=4)
    step = step_of([MODELS[0], MODELS[0] + one], SLOPES, OUTPUTS, INPUTS, directions=3, damping=1.0)
    share = float((step * one).sum() / (step.norm() * one.norm()))
    torch.testing.assert_close(abs(share), 1.0)
    ascent = float((step * SLOPES).sum())
    assert ascent > 0
    fewer = step_of([MODELS[0], MODELS[0] + one], SLOPES, OUTPUTS, INPUTS, directions=1, damping=1.0)
    torch.testing.assert_close(step, fewer)


def test_strong_damping_leaves_the_slope_within_the_core() -> None:
    u, _, vt = torch.linalg.svd(MODELS[1] - MODELS[0])
    u, v = u[:, :1], vt[:1].T
    damping = 1e6
    step = step_of(MODELS[:2], SLOPES, OUTPUTS, INPUTS, directions=1, damping=damping)
    size = (u.T @ OUTPUTS @ u).diagonal().mean() * (v.T @ INPUTS @ v).diagonal().mean() * damping**2
    torch.testing.assert_close(step * size, u @ (u.T @ SLOPES @ v) @ v.T, rtol=1e-5, atol=1e-5)


def test_where_nothing_passes_nothing_changes() -> None:
    step = step_of(MODELS, SLOPES, OUTPUTS, torch.zeros_like(INPUTS), directions=2, damping=3.0)
    assert not step.any()


def test_models_that_do_not_differ_give_no_step() -> None:
    step = step_of([MODELS[0]] * 3, SLOPES, OUTPUTS, INPUTS, directions=2, damping=3.0)
    assert step.shape == (ROWS, COLS)
    assert not step.any()
