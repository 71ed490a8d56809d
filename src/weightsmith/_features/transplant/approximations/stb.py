"""stb: a sparse token basis."""

from __future__ import annotations

import numpy as np

from weightsmith._features.transplant.pursuit import pursue
from weightsmith.abc.approximation import Approximated, Approximation, Problem


def _make(problem: Problem) -> Approximated:
    """Principal axes as sums of `k` shared tokens; the sums are a basis in both tables, and coordinates are carried over."""
    atoms, values = problem.atoms(), problem.values()
    centre, middle = atoms.mean(0, dtype=np.float64), values.mean(0, dtype=np.float64)
    narrow = (atoms - centre if atoms.shape[1] < values.shape[1] else values - middle).astype(np.float32)
    axes = np.linalg.eigh(narrow.astype(np.float64).T @ narrow)[1][:, ::-1].T
    basis = pursue(np.ascontiguousarray(axes, np.float32), narrow, problem.choices.k, problem)
    theirs = basis.of((atoms - centre).astype(np.float32)).astype(np.float64)
    ours = basis.of((values - middle).astype(np.float32)).astype(np.float64)
    targets = problem.targets()
    problem.check()
    wanted = targets - centre
    coordinates = wanted @ np.linalg.pinv(theirs, rcond=1e-6)
    lost = np.linalg.norm(wanted - coordinates @ theirs, axis=1)
    sizes = np.maximum(np.linalg.norm(targets, axis=1), 1e-30)
    return Approximated((coordinates @ ours + middle).astype(np.float32), (lost / sizes).astype(np.float32))


stb = Approximation(
    "stb",
    "Coordinates in a basis of sums of `k` shared tokens each, which exists in both tables.",
    "mergekit's sparse token basis",
    _make,
    donor=True,
    torch=True,
    reads=("k",),
)
