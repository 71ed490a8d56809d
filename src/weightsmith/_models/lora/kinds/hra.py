"""HRA: the inputs are reflected at r hyperplanes, one after the other (Yuan et al. 2024, arXiv 2405.17484).

W' = W (I - 2 u₁ u₁ᵀ) (I - 2 u₂ u₂ᵀ) …, with unit vectors u. Their product is I - U T Uᵀ, with an upper triangular T [r, r]:
the WY form of Schreiber and Van Loan (1989).
"""

from __future__ import annotations

import numpy as np

from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, Rows, Shapes


def shapes(module: AdapterModule) -> Shapes:
    """u [inputs, r]."""
    return {"hra_u": (module.inputs, module.whole("r"))}


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """U, and -T Uᵀ."""
    units = arrays["hra_u"]
    if module.flag("apply_GS"):
        units = _orthonormal(units)
        return np.ascontiguousarray(units), np.ascontiguousarray(-2.0 * units.T)
    norms = np.sqrt((units * units).sum(axis=0))
    if not norms.all():
        raise ValueError("hra_u has a column of zeros, which is no direction")
    units = units / norms
    triangle = np.zeros((units.shape[1], units.shape[1]))
    for i in range(len(triangle)):
        triangle[:i, i] = -2.0 * (triangle[:i, :i] @ (units[:, :i].T @ units[:, i]))
        triangle[i, i] = 2.0
    return np.ascontiguousarray(units), np.ascontiguousarray(-triangle @ units.T)


def _orthonormal(columns: Rows) -> Rows:
    """Each column without its parts along the earlier ones, of norm 1 (Gram and Schmidt)."""
    units = columns.copy()
    for i in range(units.shape[1]):
        for j in range(i):
            units[:, i] -= (units[:, j] @ units[:, i]) * units[:, j]
        if not (norm := float(np.sqrt((units[:, i] ** 2).sum()))):
            raise ValueError("hra_u has a column that depends on the others")
        units[:, i] /= norm
    return units


def change(module: AdapterModule, arrays: tuple[Rows, ...], rows: Rows, first: int) -> None:
    """Reflect rows."""
    from weightsmith._kernels.combine import add_matrix_product

    units, back = arrays
    along = np.zeros((len(rows), units.shape[1]))
    add_matrix_product(rows, units, along)
    add_matrix_product(along, back, rows)


KIND = AdapterKind(
    title="HRA",
    types=("HRA",),
    parts=("hra_u",),
    shapes=shapes,
    prepare=prepare,
    change=change,
    used=frozenset({"r", "apply_GS"}),
)
