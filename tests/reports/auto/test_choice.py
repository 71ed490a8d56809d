"""Strengths by a parabola, paired differences with their errors, and the choice."""

from __future__ import annotations

import numpy as np
import pytest

from weightsmith._reports.auto.pool import RowScores, choose, difference, is_better, score, too_far

TOKENS = np.full(12, 100.0)
NOISE = np.random.default_rng(0).standard_normal((3, 12))


def candidate(nats: float, divergence: float, spread: float = 0.0) -> list[RowScores]:
    """Three fine-tunes whose rows have these means for a token; spread: of what differs from row to row by candidate."""
    return [RowScores(100 * (nats + spread * noise), 100 * (divergence + spread * noise), TOKENS) for noise in NOISE]


def test_the_score_is_the_mean_over_fine_tunes_of_the_mean_over_tokens() -> None:
    one = RowScores(np.array([10.0, 50.0]), np.zeros(2), np.array([10.0, 30.0]))  # 1.5
    two = RowScores(np.array([20.0, 40.0]), np.zeros(2), np.array([10.0, 10.0]))  # 3
    assert score([one, two], "nats") == pytest.approx(2.25)


def test_a_difference_is_paired_row_by_row() -> None:
    """What makes rows hard for all candidates is no error of a difference."""
    hard = 5 * NOISE
    a = [RowScores(100 * (3 + row), TOKENS, TOKENS) for row in hard]
    b = [RowScores(100 * (2.9 + row), TOKENS, TOKENS) for row in hard]
    gain = difference(b, a, "nats")
    assert gain.value == pytest.approx(-0.1)
    assert gain.error < 1e-6


def test_the_error_of_a_difference_is_that_of_independent_means() -> None:
    gain = difference(candidate(3, 0, spread=1), candidate(3, 0), "nats")
    by_hand = np.sqrt(sum(noise.std(ddof=1) ** 2 / 12 for noise in NOISE)) / 3
    assert gain.error == pytest.approx(by_hand)
    assert gain.value == pytest.approx(NOISE.mean())


def test_better_means_two_standard_errors() -> None:
    noisy, error = candidate(3, 0, spread=0.1), 0.1 * float(np.sqrt(sum(noise.std(ddof=1) ** 2 / 12 for noise in NOISE)) / 3)
    shift = 0.1 * float(NOISE.mean())
    assert is_better(noisy, candidate(3 + shift + 2.1 * error, 0), "nats")
    assert not is_better(noisy, candidate(3 + shift + 1.9 * error, 0), "nats")


def test_the_usual_candidate_wins_unless_another_is_better_by_more_than_noise() -> None:
    scored = {"mean": candidate(3, 0.5), "usual": candidate(2.9, 0.4), "other": candidate(2.8999, 0.3999, spread=0.01)}
    assert choose(scored, "usual", "mean", with_texts=True).name == "usual"
    assert choose(scored, "usual", "mean", with_texts=False).name == "usual"
    scored["other"] = candidate(2.8, 0.3)
    assert choose(scored, "usual", "mean", with_texts=True).name == "other"
    scored["other"] = candidate(2.8, 0.45)
    assert choose(scored, "usual", "mean", with_texts=False).name == "usual"  # cross entropy does not count


def test_the_mean_is_written_where_nothing_beats_it() -> None:
    scored = {"mean": candidate(3, 0.5), "usual": candidate(2.999, 0.4999, spread=0.05)}
    choice = choose(scored, "usual", "mean", with_texts=False)
    assert choice.name == "mean"
    assert "no candidate is better by two standard errors (usual: " in choice.why
    assert (
        "worse than the mean"
        in choose({"mean": candidate(3, 0.5), "usual": candidate(3.2, 0.6)}, "usual", "mean", with_texts=True).why
    )


def test_with_texts_the_divergence_may_confirm_a_gain_but_never_makes_one() -> None:
    rows = [RowScores(100 * (2.99 + 0.1 * noise), 100 * np.full(12, 0.3), TOKENS) for noise in NOISE - NOISE.mean()]
    choice = choose({"mean": candidate(3, 0.5), "usual": rows}, "usual", "mean", with_texts=True)
    assert choice.name == "usual"
    assert "closer to the fine-tunes" in choice.why
    worse = [RowScores(row_scores.nats + 2, row_scores.divergences, TOKENS) for row_scores in rows]
    assert choose({"mean": candidate(3, 0.5), "usual": worse}, "usual", "mean", with_texts=True).name == "mean"


def test_without_texts_fine_tunes_far_from_their_base_get_the_mean() -> None:
    assert too_far(0.99, "mean") is None
    choice = too_far(2.15, "mean")
    assert choice is not None
    assert (choice.name, "2.15 nats" in choice.why) == ("mean", True)
