"""Methods of sd-mecha, beside numbers that its own functions return."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import pytest

import weightsmith


def model(shape: tuple[int, ...], k: int) -> np.ndarray:
    i = np.arange(1, prod(shape) + 1)
    return (np.sin(1.7 * i * (1 + 0.1 * k)) + 0.3 * np.cos(0.11 * k * i)).reshape(shape)


def merged(method: str, models: list[np.ndarray], base: np.ndarray | None, **parameters: Any) -> np.ndarray:
    named = [{"w": array} for array in models]
    return np.asarray(
        weightsmith.merge_state_dicts(method, named, base=None if base is None else {"w": base}, **parameters)["w"]
    )


AUTHORS = (
    (
        "crossover",
        (9, 14),
        {"alpha": 0.4, "tilt": 0.3},
        [1.7958238705, 0.3329891292, -0.2598471616, -0.4697362624, 0.0464451497],
    ),
    (
        "crossover",
        (9, 14),
        {"alpha": 0.4, "tilt": 0.0},
        [1.998043516, 0.4715025293, -0.4188831121, -0.406658638, -0.0073131686],
    ),
    (
        "crossover",
        (6, 5, 3, 3),
        {"alpha": 0.4, "tilt": 0.3},
        [1.102274234, 0.5551150769, -0.4358179021, -0.1596416473, 0.7476267144],
    ),
    (
        "distribution_crossover",
        (9, 14),
        {"alpha": 0.4, "tilt": 1.4},
        [1.521240019, 0.2286867763, -0.2086003726, -0.3882598427, 0.6197680756],
    ),
    (
        "distribution_crossover",
        (6, 5, 3, 3),
        {"alpha": 0.4, "tilt": 1.4},
        [1.24930663, 0.8435246499, 0.2506453223, 0.5186156257, 0.6436735094],
    ),
    ("rotate", (9, 14), {"alpha": 0.2}, [1.1268948996, -0.5865910362, 0.3778189854, 0.4372394196, -0.9635454785]),
    ("rotate", (6, 5, 3, 3), {"alpha": 0.2}, [1.2184191171, -0.4056463666, -0.2452705494, 0.7217157897, -0.3239521301]),
)
"""Five elements, evenly apart, of what sd-mecha's functions make of the models 1 and 2 (and 0) of this shape in float64.

crossover is that of version 0.1, and the others are those of the last version before it.
"""


@pytest.mark.parametrize(("method", "shape", "parameters", "expected"), AUTHORS)
def test_the_numbers_are_the_authors(
    method: str, shape: tuple[int, ...], parameters: Mapping[str, Any], expected: list[float]
) -> None:
    c, a, b = (model(shape, k) for k in range(3))
    models, base = ([a, b], c) if method == "distribution_crossover" else ([b], a)
    got = merged(method, models, base, **parameters).reshape(-1)
    np.testing.assert_allclose(got[:: got.size // 4][:5], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", ["crossover", "distribution_crossover"])
def test_the_ends_of_alpha_are_the_two_models(method: str) -> None:
    c, a, b = (model((9, 14), k) for k in range(3))
    models, base = ([a, b], c) if method == "distribution_crossover" else ([b], a)
    for tilt in (0.0, 0.5, 1.0, 2.0):
        assert (merged(method, models, base, alpha=0.0, tilt=tilt) == a).all()
        assert (merged(method, models, base, alpha=1.0, tilt=tilt) == b).all()


def test_a_tilt_of_two_is_the_limit_of_softer_ones() -> None:
    """And takes the low frequencies, the mean among them, from the other model."""
    a, b = model((9, 14), 1), model((9, 14), 2) + 3
    cut = merged("crossover", [b], a, alpha=0.3, tilt=2.0)
    np.testing.assert_allclose(cut, merged("crossover", [b], a, alpha=0.3, tilt=2 - 1e-12), atol=1e-12)
    assert abs(cut.mean() - b.mean()) < 1e-12 < abs(a.mean() - b.mean())


def test_a_turned_matrix_keeps_the_lengths_and_angles_of_its_rows() -> None:
    for shape in ((9, 14), (14, 9)):
        a, b = model(shape, 1), model(shape, 2)
        got = merged("rotate", [b], a, centralization=0.0)
        np.testing.assert_allclose(got @ got.T, a @ a.T, atol=1e-12)
        assert np.linalg.norm(got - b) < np.linalg.norm(a - b)


def test_a_matrix_that_was_only_turned_is_turned_back() -> None:
    a = model((14, 9), 1)
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(9, 9)))[0]
    np.testing.assert_allclose(merged("rotate", [a @ turn + 0.5], a), a @ turn + 0.5, atol=1e-12)


@pytest.mark.long
def test_noise_is_normal_and_depends_on_the_seed_and_the_name() -> None:
    zeros = np.zeros((300, 400))

    def noise(name: str = "a.weight", seed: int = 0) -> np.ndarray:
        return np.asarray(weightsmith.merge_state_dicts("add_noise", [{name: zeros}], seed=seed, deviation=0.5)[name])

    first = noise()
    assert abs(first.mean()) < 4 * 0.5 / np.sqrt(first.size)
    assert abs(first.std() / 0.5 - 1) < 4 / np.sqrt(2 * first.size)
    assert abs((np.abs(first) < 0.5).mean() - 0.6827) < 0.006
    for other in (noise(seed=1), noise("b.bias")):
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 4 / np.sqrt(first.size)
    assert (noise() == first).all()


@pytest.mark.parametrize("name", ["alphas_cumprod", "betas", "model_ema.num_updates", "logit_scale"])
def test_tensors_that_are_neither_weights_nor_biases_get_no_noise(name: str) -> None:
    given = np.array([-0.0, 0.5, 1.0])
    got = np.asarray(weightsmith.merge_state_dicts("add_noise", [{name: given}], deviation=0.5)[name])
    assert got.tobytes() == given.tobytes()


def test_a_change_stays_where_there_is_nothing_to_turn_towards() -> None:
    for shape in ((4, 9), (9, 4), (6, 6)):
        base = model(shape, 0)
        change = 0.1 * model(shape, 1)
        got = merged("rotate", [base + change, base], base)
        np.testing.assert_allclose(got, base + change - change.mean(0), atol=1e-12)


@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (30, 30)])
def test_a_change_of_low_rank_turns_only_what_it_must(shape: tuple[int, int]) -> None:
    """B says how two directions turn: A's lengths and angles stay, and it changes by a matrix of rank four at most."""
    rng = np.random.default_rng(0)
    a, few = rng.normal(size=shape), rng.normal(size=(shape[0], 2)) @ rng.normal(size=(2, shape[1]))
    got = merged("rotate", [few], a, centralization=0.0)
    np.testing.assert_allclose(got @ got.T, a @ a.T, atol=1e-9)
    singular = np.linalg.svd(a.T @ few, compute_uv=False)
    np.testing.assert_allclose((got * few).sum(), singular.sum(), rtol=1e-9)  # no turn brings it nearer
    assert np.linalg.matrix_rank(got - a, tol=1e-9) <= 4


@pytest.mark.parametrize("alpha", [0.9, 0.8])
def test_a_height_equal_to_the_cut_in_float32_is_not_above_it(alpha: float) -> None:
    """In float64 it is: 1 - 0.9 is less than 0.1 there."""
    place = round((1 - alpha) * 10)
    wave = np.cos(2 * np.pi * place * np.arange(20) / 20)
    got = merged("crossover", [wave], np.zeros(20), alpha=alpha, tilt=0.0)
    np.testing.assert_allclose(got, 0, atol=1e-12)
