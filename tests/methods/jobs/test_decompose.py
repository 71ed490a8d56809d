"""Singular vectors whose signs and zeros do not depend on the library that computed them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from weightsmith._methods.jobs.decompose import column_basis, signs, thin_svd  # noqa: E402


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_sign_is_that_of_the_first_of_the_largest_elements() -> None:
    columns = torch.tensor([[1.0, -1.0, 0.0, -1.0 + 1e-9], [-3.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    assert signs(columns).tolist() == [-1.0, -1.0, 1.0, -1.0]  # in the last both are as large, but for rounding


@pytest.mark.parametrize("shape", [(9, 5), (5, 9)])
def test_singular_vectors_have_these_signs(shape: tuple[int, int]) -> None:
    a = normal(*shape, seed=1)
    u, s, vt = thin_svd(a)
    torch.testing.assert_close((u * s) @ vt, a)
    assert signs(u).tolist() == [1.0] * 5
    basis = column_basis(a)
    torch.testing.assert_close(basis, u)


def test_a_basis_does_not_depend_on_the_order_of_the_columns() -> None:
    a = normal(30, 8, seed=2)
    torch.testing.assert_close(column_basis(a), column_basis(a[:, [5, 1, 0, 7, 3, 2, 6, 4]]), rtol=0, atol=1e-13)


def test_a_basis_has_columns_of_zeros_beyond_the_rank() -> None:
    a = normal(30, 4, seed=3)
    basis = column_basis(torch.cat([a, -2 * a, torch.zeros(30, 1, dtype=torch.float64)], 1))
    assert basis.shape == (30, 9)
    assert int((basis != 0).any(0).sum()) == 4
    torch.testing.assert_close(basis @ (basis.T @ a), a)
    assert not column_basis(torch.zeros(4, 3, dtype=torch.float64)).any()
