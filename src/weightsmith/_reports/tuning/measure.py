"""The interface of what a search minimises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from weightsmith._planning.planner import Prepared
from weightsmith._reports.tuning.candidates import Values
from weightsmith._reports.tuning.journal import Trial
from weightsmith._reports.tuning.result import Judged


class Measure(Protocol):
    """Scores candidates, and judges the best.

    objective  its name
    counts     numbers that a trial has of each text
    seat       from 0: a number that no other process has that works on the search now
    identity   everything the scores depend on besides the candidate, as JSON values
    """

    objective: str
    counts: list[int]
    seat: int
    identity: Mapping[str, Any]

    def score(self, number: int, values: Values, prepared: Prepared, *, slopes: bool) -> Trial:
        """Score a candidate. slopes: also find the slope of the loss for each number.

        Raises NonFinite, MethodError, PlanError, ParameterError for a candidate that cannot be scored.
        """

    def told(self, trial: Trial) -> float:
        """The loss for the searcher, of each trial in order that has losses.

        What `score` does depends on the trials of earlier rounds alone: it is told those of a round when all are made.
        """

    def losses(self, trial: Trial) -> list[float]:
        """The loss of each text."""

    def written(self, loss: float) -> str:
        """A loss, for a line of progress."""

    def judge(self, best: Prepared) -> Judged:
        """Compare the best candidate with the start on held-out text, or with the report command."""
