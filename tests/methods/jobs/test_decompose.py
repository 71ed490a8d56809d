"""Singular vectors whose signs and zeros do not depend on the library that computed them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from weightsmith._methods.jobs.decompose import column_basis, leading, products_of_columns, signs, thin_svd  # noqa: E402


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


@pytest.mark.parametrize("shape", [(300, 500), (70, 192), (40, 7), (0, 3)])
def test_products_of_columns_are_those_of_the_whole_matrices(shape: tuple[int, int]) -> None:
    a = normal(*shape, seed=1)
    torch.testing.assert_close(products_of_columns(a), a.T @ a)


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


def low_rank(rows: int, cols: int, rank: int, noise: float) -> torch.Tensor:
    values = torch.linspace(3.0, 1.0, rank, dtype=torch.float64)
    return normal(rows, rank, seed=4) * values @ normal(rank, cols, seed=5) / rows + noise * normal(rows, cols, seed=6) / rows


@pytest.mark.parametrize("shape", [(200, 150), (150, 200)])
@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_a_few_clear_directions_are_found_without_all_eigenvectors(
    shape: tuple[int, int], noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, sides, eigh = low_rank(*shape, 4, noise), [], torch.linalg.eigh

    def counted(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sides.append(len(matrix))
        values, vectors = eigh(matrix)
        return values, vectors

    monkeypatch.setattr(torch.linalg, "eigh", counted)
    u, s, vt = thin_svd(a, 4)
    assert max(sides) < 20
    monkeypatch.undo()
    whole_u, whole_s, whole_vt = thin_svd(a)
    torch.testing.assert_close(s, whole_s[:4], rtol=1e-12, atol=0)
    torch.testing.assert_close((u * s) @ vt, (whole_u[:, :4] * whole_s[:4]) @ whole_vt[:4], rtol=0, atol=1e-12)


@pytest.mark.parametrize("a", [normal(200, 150, seed=7), torch.zeros(200, 150, dtype=torch.float64)])
def test_directions_that_are_not_clear_are_those_of_all_eigenvectors(a: torch.Tensor) -> None:
    assert leading(a.T @ a, 4) is None
    u, s, vt = thin_svd(a, 4)
    whole_u, whole_s, whole_vt = thin_svd(a)
    torch.testing.assert_close(u, whole_u[:, :4], rtol=0, atol=1e-13)
    torch.testing.assert_close(s, whole_s[:4], rtol=1e-13, atol=0)
    torch.testing.assert_close(vt, whole_vt[:4], rtol=0, atol=1e-13)


def test_a_direction_that_only_zeros_follow_counts() -> None:
    """Fewer directions than are wanted: the others are zero, as without subspace iteration."""
    u, s, vt = thin_svd(low_rank(200, 150, 2, 0.0), 4)
    assert (s > 0).tolist() == [True, True, False, False]
    assert not u[:, 2:].any()
    assert not vt[2:].any()
    torch.testing.assert_close((u * s) @ vt, low_rank(200, 150, 2, 0.0), rtol=0, atol=1e-12)
