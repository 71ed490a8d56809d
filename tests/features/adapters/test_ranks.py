"""Factors of a matrix, what of it is rounding noise, and how ranks are chosen."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from weightsmith._base.errors import ParameterError
from weightsmith._features.adapters.factors import Spectrum, choose_ranks, decompose, rounding_noise

pytest.importorskip("torch")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([*shape, seed]).standard_normal(shape).astype(np.float32)


def falling(rows: int, cols: int, *, seed: int = 0) -> np.ndarray:
    """A matrix whose singular values fall slowly: 1, 1/2, 1/3, …"""
    n = min(rows, cols)
    u, v = (np.linalg.qr(normal(side, n, seed=seed).astype(np.float64))[0] for side in (rows, cols))
    return ((u / np.arange(1, n + 1)) @ v.T).astype(np.float32)


@pytest.mark.parametrize("shape", [(96, 160), (160, 96)])
@pytest.mark.parametrize("exact", [True, False])
def test_factors_keep_what_the_best_ones_keep_and_the_bound_holds(shape: tuple[int, int], exact: bool) -> None:
    delta = falling(*shape)
    best = np.linalg.svd(delta.astype(np.float64), compute_uv=False)
    decomposed = decompose(delta, 8, 1, exact=exact)
    kept = float((decomposed.values**2).sum())
    assert decomposed.energy == pytest.approx(float((best**2).sum()), rel=1e-6)
    assert kept == pytest.approx(float((best[:8] ** 2).sum()), rel=1e-6 if exact else 1e-4)
    remainder = delta.astype(np.float64) - decomposed.left.astype(np.float64) @ decomposed.right
    assert float((remainder**2).sum()) == pytest.approx(decomposed.energy - kept, rel=1e-3)  # what is kept is known exactly
    if exact:
        assert decomposed.bound == 0
    else:  # the basis has 24 columns: the best it can leave is the 25th value
        assert best[24] ** 2 <= decomposed.bound <= 25 * best[24] ** 2


def test_the_singular_values_are_shared_or_all_in_a() -> None:
    delta = falling(40, 60)
    shared, alone = (decompose(delta, 5, 1, exact=True, spread=spread) for spread in (True, False))
    np.testing.assert_allclose(np.linalg.norm(shared.left, axis=0) ** 2, shared.values, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(alone.left, axis=0), 1, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(alone.right, axis=1), alone.values, rtol=1e-5)
    np.testing.assert_allclose(shared.left @ shared.right, alone.left @ alone.right, atol=1e-6)


def test_a_matrix_of_zeros_has_factors_of_zeros() -> None:
    for exact in (True, False):
        decomposed = decompose(np.zeros((40, 60), np.float32), 4, 1, exact=exact)
        assert (decomposed.energy, decomposed.bound, decomposed.left.any(), decomposed.right.any()) == (0, 0, False, False)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_the_noise_of_rounding_is_measured_from_the_values(dtype: type) -> None:
    exact = normal(200, 300) * np.float32(0.02)
    rounded = exact.astype(dtype).astype(np.float32)
    assert rounding_noise(rounded) == pytest.approx(float(np.square(rounded - exact).mean()), rel=0.03)
    assert rounding_noise(exact) < 1e-6 * rounding_noise(rounded)


def spectrum_of(before: np.ndarray, after: np.ndarray, rank: int) -> Spectrum:
    delta = after - before
    decomposed = decompose(delta, rank, 1, exact=False)
    return Spectrum(*delta.shape, decomposed.values, decomposed.energy, rounding_noise(after), decomposed.bound)


@pytest.mark.parametrize("size", [1.0, 0.3])
def test_rank_by_energy_does_not_chase_rounding_noise(size: float) -> None:
    """A change of rank 3, in a fine-tune that was rounded to bf16: other singular values are noise."""
    before = (normal(256, 384) * 0.05).astype(ml_dtypes.bfloat16).astype(np.float32)
    change = size * 1e-3 * normal(256, 3, seed=1) @ normal(3, 384, seed=2)
    after = (before + change).astype(ml_dtypes.bfloat16).astype(np.float32)
    spectrum = spectrum_of(before, after, 32)
    rounding = float(np.square(after - before - change).sum())
    assert spectrum.noise_share == pytest.approx(rounding / spectrum.energy, rel=0.1)
    assert spectrum.kept(32) < 0.999  # by energy alone, all 32 would be too few
    assert choose_ranks([spectrum], energy=0.999, max_parameters=None, sv_epsilon=0) == [3]
    assert spectrum.signal_kept(3) > 0.999 > spectrum.signal_kept(2)


def test_rank_by_energy_of_exact_values() -> None:
    values = np.array([4.0, 2.0, 1.0, 1.0])
    spectrum = Spectrum(9, 9, values, float((values**2).sum()) + 3.0, 0.0, 0.0)  # 3 of 25 are in unknown values
    for share, rank in [(0.6, 1), (16 / 25, 1), (0.65, 2), (0.8, 2), (0.81, 3), (0.88, 4), (1.0, 4)]:
        assert choose_ranks([spectrum], energy=share, max_parameters=None, sv_epsilon=0) == [rank], share
    assert choose_ranks([spectrum], energy=1.0, max_parameters=None, sv_epsilon=1.0) == [2]
    assert choose_ranks([spectrum], energy=None, max_parameters=None, sv_epsilon=1.5) == [2]
    assert (spectrum.kept(2), spectrum.signal_kept(2), spectrum.possible(2)) == (0.8, 0.8, 0.8)


def test_a_budget_is_spent_where_a_parameter_keeps_most() -> None:
    rng = np.random.default_rng(3)
    sides = [(4, 4), (10, 2), (3, 9)]
    spectra = []
    for rows, cols in sides:
        values = np.sort(rng.random(2) * 3)[::-1]
        spectra.append(Spectrum(rows, cols, values, float((values**2).sum()), 0.0, 0.0))
    for budget in (12, 24, 40, 64):
        ranks = choose_ranks(spectra, energy=None, max_parameters=budget, sv_epsilon=0)
        assert sum(r * s.size for r, s in zip(ranks, spectra, strict=True)) <= budget

        def gain(chosen: tuple[int, ...]) -> float:
            return sum(float((s.values[:r] ** 2).sum()) for r, s in zip(chosen, spectra, strict=True))

        fitting = [
            c
            for c in itertools.product(range(3), repeat=3)
            if sum(r * s.size for r, s in zip(c, spectra, strict=True)) <= budget
        ]
        assert gain(tuple(ranks)) >= 0.8 * max(map(gain, fitting))
    with pytest.raises(ParameterError, match="must be at least 8, which the smallest factors take, not 5"):
        choose_ranks(spectra, energy=None, max_parameters=5, sv_epsilon=0)


def test_nothing_and_noise_get_no_rank() -> None:
    nothing = Spectrum(64, 64, np.zeros(4), 0.0, 1e-6, 0.0)
    noise = normal(256, 256) * np.float32(1e-3)
    decomposed = decompose(noise, 16, 1, exact=False)
    of_noise = Spectrum(256, 256, decomposed.values, decomposed.energy, 1e-6 * 1.1, decomposed.bound)
    assert choose_ranks([nothing, of_noise], energy=0.9, max_parameters=None, sv_epsilon=0) == [0, 0]
    assert choose_ranks([nothing, of_noise], energy=None, max_parameters=None, sv_epsilon=0) == [0, 16]
    assert nothing.kept(0) == 1.0
    assert math.isclose(of_noise.noise_share, 1.0)
