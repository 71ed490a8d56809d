"""omp: orthogonal matching pursuit."""

from __future__ import annotations

from weightsmith._features.transplant.pursuit import pursue
from weightsmith.abc.approximation import Approximated, Approximation, Problem


def _make(problem: Problem) -> Approximated:
    sums = pursue(problem.targets(), problem.atoms(), problem.choices.k, problem)
    return Approximated(sums.of(problem.values()), sums.errors)


omp = Approximation(
    "omp",
    "A sum of `k` shared tokens that approximates the donor's row; the same sum of the model's rows.",
    "Training-free tokenizer transplantation by OMP: https://arxiv.org/abs/2506.06607",
    _make,
    donor=True,
    torch=True,
    reads=("k",),
)
