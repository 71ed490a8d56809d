"""Approximations on tables with known answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from weightsmith._features.transplant.approximations import find_approximation
from weightsmith.abc.approximation import Choices, Floats, Problem, Side

pytest.importorskip("torch")

N, DONOR, MODEL = 300, 24, 32


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Arrays:
    """`Tables` of two arrays."""

    def __init__(self, model: Floats, donor: Floats) -> None:
        self.sides = {"model": model, "donor": donor}

    def rows(self, side: Side, numbers: Sequence[int] | np.ndarray) -> Floats:
        return self.sides[side][np.asarray(numbers)]

    def chunks(self, side: Side) -> Iterator[tuple[int, Floats]]:
        for first in range(0, len(self.sides[side]), 70):
            yield first, self.sides[side][first : first + 70]


def problem(
    model: Floats, donor: Floats, missing: Sequence[int], head: bool = False, pieces: Any = None, **choices: Any
) -> Problem:
    """The last rows of the donor are missing; the others are shared, in reverse order."""
    shared = np.array([i for i in range(len(donor)) if i not in missing])
    return Problem(
        missing=np.array(missing),
        shared=np.stack([shared, len(model) - 1 - shared], 1),
        pieces=pieces or [()] * len(missing),
        head=head,
        tables=Arrays(model, donor),
        choices=Choices(**choices),
        threads=2,
    )


def in_reverse(rows: Floats) -> Floats:
    return np.ascontiguousarray(rows[::-1])


def test_sparse_sums_are_found_again() -> None:
    donor, values = normal(N, 200), normal(N, MODEL, seed=1)
    weights = {280: 2.0, 284: -3.0, 288: 1.5}
    for i in (0, 1):
        donor[i] = sum(w * donor[k + i] for k, w in weights.items())
    approximated = find_approximation("omp").make(problem(in_reverse(values), donor, [0, 1], k=3))
    expected = np.stack([sum(w * values[k + i] for k, w in weights.items()) for i in (0, 1)])
    np.testing.assert_allclose(approximated.rows, expected, atol=1e-4)
    np.testing.assert_allclose(approximated.errors, 0, atol=1e-5)


@pytest.mark.parametrize("name", ["omp", "hybrid", "landmark_pca", "mp_rope"])
def test_a_rotated_table_is_found_again(name: str) -> None:
    turn = np.linalg.qr(normal(DONOR, DONOR, seed=3))[0].astype(np.float32)
    donor = normal(N, DONOR)
    model = in_reverse(donor if name == "mp_rope" else donor @ turn)
    missing = list(range(20))
    approximated = find_approximation(name).make(problem(model, donor, missing, k=48, heads=(3, 3)))
    expected = donor[missing] if name == "mp_rope" else donor[missing] @ turn
    np.testing.assert_allclose(approximated.rows, expected, atol=0.2 if name == "hybrid" else 0.02)
    assert approximated.errors.max() < (1 if name == "hybrid" else 0.02)


def test_pursuit_takes_the_same_atoms_as_a_plain_one() -> None:
    from weightsmith._features.transplant.approximations.pursuit import pursue

    atoms, targets = normal(60, DONOR), normal(5, DONOR, seed=2)
    asked = problem(normal(60, 4), atoms, [])
    pursuit = pursue(targets, atoms, 7, asked)
    for target, indices, coefficients, error in zip(
        targets, pursuit.indices, pursuit.coefficients, pursuit.errors, strict=True
    ):
        rest, chosen = target.astype(np.float64), list[int]()
        for _ in range(7):
            scores = np.abs(atoms @ rest)
            scores[chosen] = -1
            chosen.append(int(scores.argmax()))
            best = np.linalg.lstsq(atoms[chosen].T.astype(np.float64), target.astype(np.float64))[0]
            rest = target - best @ atoms[chosen]
        assert indices.tolist() == chosen
        np.testing.assert_allclose(coefficients, best, atol=1e-4)
        assert error == pytest.approx(np.linalg.norm(rest) / np.linalg.norm(target), abs=1e-5)


@pytest.mark.parametrize("name", ["omp", "mp_rope"])
def test_all_atoms_take_part_in_a_small_vocabulary(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 1,200 tokens, and k = 16: 128 candidates would do worse."""
    from weightsmith._features.transplant.approximations import pursuit

    width = np.linspace(1, 0.05, 48).astype(np.float32)
    donor = normal(1200, 48) * width
    asked = problem(normal(1200, 48), donor, list(range(40)), k=16, heads=(3, 3))
    whole = find_approximation(name).make(asked).errors.mean()
    monkeypatch.setattr(pursuit, "FEW", 1)
    assert find_approximation(name).make(asked).errors.mean() == pytest.approx(whole)  # few operations: no screening either
    monkeypatch.setattr(pursuit, "OPERATIONS", 0)
    assert find_approximation(name).make(asked).errors.mean() > 1.15 * whole


def test_equal_atoms_and_targets_of_zeros_are_no_problem() -> None:
    from weightsmith._features.transplant.approximations.pursuit import pursue

    atoms = np.repeat(normal(3, DONOR), 5, 0)
    targets = np.stack([np.zeros(DONOR, np.float32), atoms[0] + atoms[5]])
    pursuit = pursue(targets, atoms, 8, problem(normal(15, 4), atoms, []))
    assert np.isfinite(pursuit.coefficients).all()
    np.testing.assert_allclose(pursuit.errors, 0, atol=1e-5)


@pytest.mark.parametrize("scheme", ["distance_proportional", "barycentric", "least_squares"])
@pytest.mark.parametrize("cosine", [False, True])
def test_interpolation_is_between_the_nearest_tokens(scheme: str, cosine: bool) -> None:
    donor, values = 5 * normal(N, 200), normal(N, MODEL, seed=1)
    donor[0] = (donor[200] + donor[201]) / 2
    asked = problem(in_reverse(values), donor, [0], k=2, weight_scheme=scheme, cosine_similarity=cosine)
    approximated = find_approximation("common_interpolation").make(asked)
    tolerance = 0.2 if cosine and scheme == "distance_proportional" else 1e-3
    np.testing.assert_allclose(approximated.rows[0], (values[200] + values[201]) / 2, atol=tolerance)


@pytest.mark.parametrize(
    ("method", "head", "weights"),
    [
        ("mean", False, [1 / 3] * 3),
        ("sum", False, [1, 1, 1]),
        ("weighted_mean", False, [1 / 6, 2 / 6, 3 / 6]),
        ("weighted_mean", True, [3 / 6, 2 / 6, 1 / 6]),
        ("first_last", False, [0, 0, 1]),
        ("first_last", True, [1, 0, 0]),
    ],
)
def test_pieces_are_put_together(method: str, head: bool, weights: list[float]) -> None:
    model = normal(10, 4)
    asked = problem(model, normal(10, 4), [0, 1], head, [(7, 2, 7), ()], subword_method=method)
    approximated = find_approximation("subword").make(asked)
    np.testing.assert_allclose(approximated.rows[0], np.array(weights) @ model[[7, 2, 7]], atol=1e-6)
    np.testing.assert_allclose(approximated.rows[1], approximated.rows[0])  # the mean of all others


def test_the_mean_row_is_that_of_all_chunks() -> None:
    model = normal(N, 6) + 3
    rows = find_approximation("mean").make(problem(model, normal(N, 3), [0, 1])).rows
    np.testing.assert_allclose(rows, np.repeat(model.mean(0, dtype=np.float64)[None], 2, 0), rtol=1e-6)


def test_the_hybrid_takes_pieces_where_they_are_nearer_than_any_token() -> None:
    donor, values = normal(N, 200), normal(N, MODEL, seed=1)
    donor[0] = donor[200] + donor[201]
    model = in_reverse(values)
    pieces = [(N - 1 - 200, N - 1 - 201), (N - 1 - 202, N - 1 - 203), ()]
    approximated = find_approximation("hybrid").make(problem(model, donor, [0, 1, 2], pieces=pieces))
    assert approximated.composed is not None
    assert approximated.composed.tolist() == [True, False, False]
    np.testing.assert_allclose(approximated.rows[0], (values[200] + values[201]) / 2, atol=1e-5)
    assert approximated.errors[0] < 0.1 < approximated.errors[1]
