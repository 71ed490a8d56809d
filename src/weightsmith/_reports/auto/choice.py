"""Which candidate is written: strengths by a parabola, paired differences with their errors, and the guard of the mean.

All scores are in nats for a token, lower is better: the cross entropy of a text, or the KL divergence from the fine-tune that
wrote it. A difference of fewer than two standard errors counts as noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsmith._reports.evaluate.values import TOLD_APART, Mean
from weightsmith._reports.tuning.parabola import lowest

Numbers = npt.NDArray[np.float64]

MOST_STRENGTH = 1.5
"""The largest strength that a parabola may give: farther out it is a guess."""

FAR_NATS = 1.0
"""Without texts, fine-tunes whose predictions are farther than this from their base's get the mean: their own text cannot tell
a fine-tune that is too strong from a good one."""


@dataclass(frozen=True, eq=False)
class RowScores:
    """Sums over the scored tokens of each row of one fine-tune's held-back text: float64 [rows].

    nats         cross entropy
    divergences  KL(fine-tune, candidate)
    tokens       number of scored tokens
    """

    nats: Numbers
    divergences: Numbers
    tokens: Numbers


Scores = Sequence[RowScores]
"""Of a candidate: those of each fine-tune, in order."""


def score(scores: Scores, measure: str) -> float:
    """The mean over the fine-tunes. measure: `nats` or `divergences`.

    >>> rows = RowScores(np.array([2.0, 4.0]), np.array([1.0, 1.0]), np.array([2.0, 2.0]))
    >>> score([rows, rows], "nats")
    1.5
    """
    return float(np.mean([getattr(own, measure).sum() / own.tokens.sum() for own in scores]))


def difference(scores: Scores, other: Scores, measure: str) -> Mean:
    """How much higher a candidate's score is than another's, with the standard error of the paired differences.

    The mean over fine-tunes of the means over their rows, so its error is √(Σ eᵢ²) / N.
    """
    parts = [Mean.of(getattr(a, measure) - getattr(b, measure), a.tokens) for a, b in zip(scores, other, strict=True)]
    error = math.sqrt(sum(part.error**2 for part in parts)) / len(parts)
    return Mean(sum(part.value for part in parts) / len(parts), error)


def is_better(scores: Scores, other: Scores, measure: str) -> bool:
    """Whether a candidate has a lower score by more than noise."""
    found = difference(scores, other, measure)
    return found.value < -TOLD_APART * found.error


def strength(points: Mapping[float, float]) -> float:
    """The best strength by a parabola, between 0 and `MOST_STRENGTH`, with four digits. points: score by strength."""
    return float(f"{lowest(points, 0.0, MOST_STRENGTH):.4g}")


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate that is written, and why: a sentence."""

    name: str
    why: str


def choose(scored: Mapping[str, Scores], usual: str, mean: str, *, with_texts: bool) -> Choice:
    """The usual candidate, another that is better than it by more than noise, or the mean if the winner does not beat it.

    scored      by name
    usual, mean their names in `scored`
    with_texts  cross entropy chooses, and KL divergence may confirm it; without, KL divergence does both
    """
    measure = "nats" if with_texts else "divergences"
    rivals = [name for name in scored if name != mean]
    best = min(rivals, key=lambda name: score(scored[name], measure))
    winner = best if is_better(scored[best], scored[usual], measure) else usual
    gain = difference(scored[winner], scored[mean], measure)
    told = f"{abs(gain.value):.4f} ± {gain.error:.4f} nats a token {'better' if gain.value < 0 else 'worse'} than the mean"
    if is_better(scored[winner], scored[mean], measure):
        return Choice(winner, told)
    if with_texts and gain.value < 0 and is_better(scored[winner], scored[mean], "divergences"):
        return Choice(winner, f"{told}, and closer to the fine-tunes by more than two standard errors")
    return Choice(mean, f"no candidate is better by two standard errors ({winner}: {told})")


def too_far(distance: float, mean: str) -> Choice | None:
    """The mean, if fine-tunes are too far from their base for a choice without texts; else None.

    distance  mean KL divergence of the base from the fine-tunes on their own text
    """
    if distance <= FAR_NATS:
        return None
    return Choice(mean, f"the fine-tunes are far from their base, {distance:.2f} nats a token on their own text")
