"""Decompositions of differences: what the factors keep, and what is said of it, for matrices of all kinds."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.models.lora.test_lora import normal
from weightsmith._features.adapters.factors import _blocks, _krylov, decompose, prefers_exact

torch = pytest.importorskip("torch")

RANK = 8


@cache
def matrices() -> dict[str, np.ndarray]:
    u, v = (np.linalg.qr(normal(n, 400, seed=n))[0] for n in (600, 400))
    spectra = {
        "falling": np.exp2(-np.arange(400.0)),
        "a low rank and noise": np.where(np.arange(400) < 5, 1.0, 1e-3),
        "all equal": np.ones(400),
    }
    by_name = {name: (u * values) @ v.T for name, values in spectra.items()}
    by_name |= {"noise": normal(600, 400), "exactly of rank 3": normal(600, 3) @ normal(3, 400), "zero": np.zeros((600, 400))}
    by_name["one row"] = np.zeros((600, 400))
    by_name["one row"][7] = normal(400)
    return {name: np.ascontiguousarray(array, np.float32) for name, array in by_name.items()}


@pytest.mark.parametrize("name", list(matrices()))
@pytest.mark.parametrize("tall", [True, False])
def test_randomised_factors_keep_nearly_what_the_best_do(name: str, tall: bool) -> None:
    delta = matrices()[name] if tall else np.ascontiguousarray(matrices()[name].T)
    assert not prefers_exact(RANK, *delta.shape)
    decomposed = decompose(delta, RANK, 1, exact=False)
    values = np.linalg.svd(delta.astype(np.float64), compute_uv=False)
    energy, best = np.square(values).sum(), np.square(values[:RANK]).sum()
    kept = np.square(decomposed.values).sum()
    rest = np.square(delta - decomposed.left.astype(np.float64) @ decomposed.right).sum()
    assert decomposed.energy == pytest.approx(energy, rel=1e-5)
    assert kept == pytest.approx(energy - rest, abs=2e-5 * energy)  # B @ A is a projection of the difference
    assert kept >= 0.985 * best
    assert kept <= best * (1 + 1e-5)
    assert best <= (kept + RANK * decomposed.bound) * (1 + 1e-5)
    assert kept >= 0.9999 * best or name == "noise"


@pytest.mark.parametrize("name", list(matrices()))
@pytest.mark.parametrize("rank", [RANK, 60, 150])
def test_the_basis_is_orthonormal_whatever_the_matrix(name: str, rank: int) -> None:
    """Also where blocks vanish: those of a matrix of low rank, after the first."""
    delta = torch.from_numpy(matrices()[name])
    basis, projected = _krylov(delta, rank, 3)
    most = _blocks(rank, *delta.shape)[1] * (rank + 16)
    assert len(basis) == most if name == "noise" else len(basis) <= most
    off = (basis.double() @ basis.double().T - torch.eye(len(basis))).abs().max()
    assert float(off) < 1e-5
    torch.testing.assert_close(projected, basis @ delta, atol=1e-5 * float(delta.abs().max() + 1e-9), rtol=1e-4)


def test_more_blocks_keep_more_of_noise() -> None:
    """The last of several blocks alone keeps less than all of them."""
    delta = matrices()["noise"]
    values = np.linalg.svd(delta.astype(np.float64), compute_uv=False)
    share = np.square(decompose(delta, RANK, 1, exact=False).values).sum() / np.square(values[:RANK]).sum()
    single = np.square(decompose(delta, 150, 1, exact=False).values[:RANK]).sum() / np.square(values[:RANK]).sum()
    assert _blocks(RANK, *delta.shape) == (5, 6)
    assert _blocks(150, *delta.shape) == (2, 1)
    assert share > 0.985
    assert single > 0.985


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("spread", [False, True])
def test_the_factors_of_zeros_are_zeros_without_a_decomposition(
    exact: bool, spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("thin_svd", "_krylov"):
        monkeypatch.setattr(f"weightsmith._features.adapters.factors.{name}", None)
    decomposed = decompose(np.zeros((40, 24), np.float32), 3, 0, exact=exact, spread=spread)
    assert (decomposed.left.shape, decomposed.right.shape, decomposed.values.shape) == ((40, 3), (3, 24), (3,))
    assert not any(array.any() for array in (decomposed.left, decomposed.right, decomposed.values))
    assert (decomposed.left.dtype, decomposed.values.dtype, decomposed.energy, decomposed.bound) == (
        np.float32,
        np.float64,
        0,
        0,
    )


def test_small_matrices_are_decomposed_exactly_where_that_keeps_more() -> None:
    assert prefers_exact(32, 256, 2048)
    assert not prefers_exact(32, 512, 2048)
    assert not prefers_exact(1000, 4096, 4096)
    assert prefers_exact(2040, 4096, 4096)
