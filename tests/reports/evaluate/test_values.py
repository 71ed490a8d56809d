"""Means over tokens, and differences between models, with their standard errors over rows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from weightsmith._reports.evaluate.values import Change, Evaluation, Mean, RowLosses, Score, mean_score, of_change, score_of

RNG = np.random.default_rng(0)


def losses(nats: list[float], tokens: float = 4, tokenized: str = "t") -> RowLosses:
    sums = np.array(nats)
    return RowLosses(sums, np.full(len(sums), tokens), np.full(len(sums), 2 * tokens), None, None, tokenized)


def test_the_error_of_a_mean_is_that_of_many_samples() -> None:
    """Rows of different lengths: the spread of the quotient over samples of rows."""
    tokens = RNG.integers(5, 50, 60).astype(float)
    per_token = RNG.normal(3, 0.4, 60)
    mean = Mean.of(per_token * tokens, tokens)
    assert mean.value == pytest.approx(np.average(per_token, weights=tokens))
    chosen = RNG.integers(0, 60, (4000, 60))
    spread = ((per_token * tokens)[chosen].sum(1) / tokens[chosen].sum(1)).std()
    assert mean.error == pytest.approx(spread, rel=0.05)
    assert math.isnan(Mean.of(np.array([2.0]), np.array([1.0])).error)


def test_a_difference_is_of_rows_in_pairs() -> None:
    """Rows differ by far more than the models do."""
    base = [4.0, 12.0, 30.0, 8.0]
    score = score_of(losses([x - 0.4 for x in base]), losses(base))
    assert score.change is not None
    assert score.change.value == pytest.approx(1 - math.exp(-0.1))
    assert score.change.error == pytest.approx(0, abs=1e-12)
    assert (score.change.better, score.change.rows) == (4, 4)
    assert score.bits_per_byte == pytest.approx(sum(x - 0.4 for x in base) / math.log(2) / 32)
    assert score.perplexity == pytest.approx(math.exp((54 - 1.6) / 16))
    assert score.loss.error > 0.5


def test_models_with_other_tokens_are_compared_by_bits_per_byte_alone() -> None:
    first, other = score_of(losses([4.0, 8.0]), None), score_of(losses([4.0, 8.0], 3, "other"), losses([4.0, 8.0]))
    assert other.change is None
    evaluation = Evaluation(("a", "b"), ("t",), None, ((first,), (other,)), 8, ())
    assert evaluation.reading == (
        "b and a cut the text into different tokens, so only bits per byte are compared: 1.4427 bits per byte against 1.0820.",
    )


def test_texts_count_the_same_whatever_their_length() -> None:
    scores = [score_of(losses([x - d for x in base]), losses(base)) for base, d in (([4.0, 9.0], 1.0), ([8.0] * 50, 0.0))]
    total = mean_score(scores)
    assert total.perplexity == pytest.approx(math.sqrt(scores[0].perplexity * scores[1].perplexity))
    assert total.change is not None
    assert total.change.value == pytest.approx(1 - math.exp(-0.125))
    assert (total.change.rows, total.tokens) == (52, 208)


def said(change: Change) -> str:
    def score(change: Change | None) -> Score:
        return Score(16, 100, 400, Mean(2.0, 0.1), 7.389, 0.7, None, None, change)

    return Evaluation(("a", "b"), ("t",), None, ((score(None),), (score(change),)), 8, ()).reading[0]


def test_what_is_noise_is_said_to_be_noise() -> None:
    assert said(Change(0.031, 0.007, 14, 16)) == (
        "b is 3.1 ± 0.7% better than a: perplexity 7.389 against 7.389, lower on 14 of 16 rows."
    )
    assert said(Change(-0.01, 0.007, 7, 16)).startswith("b and a cannot be told apart on this text: b is 1.0 ± 0.7% worse")
    assert said(Change(0.2, math.nan, 1, 1)).endswith("One row does not tell how much of it is noise.")
    assert said(Change(0.0, 0.0, 0, 16)) == "b and a predict this text equally well."
    assert of_change(Change(0.00012, 0.00003, 9, 16)) == "0.012 ± 0.003% better"
