"""Result of a search: all trials, the best one, and its scores on held-out text; in sentences, and as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from weightsmith._base.report.blocks import Block, Code, Column, Curves, Facts, Report, Reported, Table, Value
from weightsmith._base.text import count, duration
from weightsmith._planning.recipe import Scalar
from weightsmith._reports.evaluate.values import Change, Score, mean_score, of_change, perplexity
from weightsmith._reports.look.models import json_of
from weightsmith._reports.tuning.journal import Trial

NOT_BETTER = (
    "It is not proven better than the plain mean of the models, so use the mean: merge_method: linear, with weight 1 for each. "
    "weightsmith auto looks for a method that beats it."
)
"""The conclusion of a search that did not beat the mean by two standard errors, as `auto` requires."""


@dataclass(frozen=True)
class Judged:
    """How the result was judged: the fields of `Tuning` with the same names."""

    texts: tuple[str, ...]
    report_texts: tuple[str, ...] = ()
    judged: Mapping[str, tuple[Score, ...]] = field(default_factory=dict)
    against: Mapping[str, tuple[Score, ...]] = field(default_factory=dict)
    rows: tuple[int, int] = (0, 0)
    few_rows: int = 0
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Tuning(Reported):
    """`weightsmith.tune` makes it.

    out         the recipe that was written
    recipe      its text, without the comments that the search adds
    names       key paths of the values that were tuned
    start       the values that the search started from
    best        number of the trial that was written
    trials      in order
    resumed     trials that an earlier call had made
    objective   `mean`, `worst` or `kl`; `command` for a number that a command prints
    texts       that were tuned on, or the command
    losses      of each trial that was scored on all rows, by its number: of each text, in nats for a token; or of the command
    report_texts  of the report
    judged      `tuned`, `start`, the plain `mean` of the fine-tunes, and `base`, if the recipe has them: the score on each text
                of the report
    against     of the tuned recipe, with its change from the others
    rows        that were tuned on, and of the report
    few_rows    that every candidate was scored on
    measured    by the command of the report, or else by that of the search: `tuned`, `start` and `mean`; empty for texts
    seconds     of this call
    journal     the trials as a file
    """

    out: Path
    recipe: str
    names: tuple[str, ...]
    start: tuple[Scalar, ...]
    best: int
    trials: tuple[Trial, ...]
    resumed: int
    objective: str
    texts: tuple[str, ...]
    losses: Mapping[int, list[float]]
    report_texts: tuple[str, ...]
    judged: Mapping[str, tuple[Score, ...]]
    against: Mapping[str, tuple[Score, ...]]
    rows: tuple[int, int]
    few_rows: int
    measured: Mapping[str, float]
    seconds: float
    journal: Path

    @property
    def values(self) -> tuple[Scalar, ...]:
        """The values of the recipe that was written."""
        return next(trial.values for trial in self.trials if trial.number == self.best)

    @property
    def totals(self) -> Mapping[str, Score]:
        """The scores of `judged`, on all texts of the report together."""
        return {name: total(scores) for name, scores in self.judged.items()}

    @cached_property
    def changes(self) -> Mapping[str, Change]:
        """How much better the tuned recipe is on the text of the report, by what it is compared with."""
        changes = {name: total(scores).change for name, scores in self.against.items()}
        return {name: change for name, change in changes.items() if change is not None}

    @property
    def beats_mean(self) -> bool:
        """False if the tuned recipe is not better than the plain mean: on texts, by two standard errors."""
        if "mean" in self.measured:
            return self.measured["tuned"] < self.measured["mean"]
        change = self.changes.get("mean")
        return change is None or change.told_apart is None or (change.told_apart and change.value > 0)

    @property
    def reading(self) -> tuple[str, ...]:
        """The conclusions, in sentences."""
        lines = [_compared(self, name, change) for name, change in self.changes.items()]
        if self.measured:
            by = f"by {self.report_texts[0]}" if self.report_texts else "by the command that chose it, and by no other"
            others = [f"the {name} {number:g}" for name, number in self.measured.items() if name != "tuned"]
            lines = [f"The tuned recipe has {self.measured['tuned']:g}, {', '.join(others)}, {by}."]
        if not self.beats_mean:
            lines.append(NOT_BETTER)
        if self.trials and self.values == self.start:
            lines[:1] = ["No candidate was better than the start, whose values were written."]
        failed = sum(bool(trial.error) for trial in self.trials)
        if failed:
            first = next(trial for trial in self.trials if trial.error)
            lines.append(f"{count(failed, 'candidate')} could not be scored; trial {first.number}: {first.error}")
        return tuple(lines)

    @property
    def front(self) -> tuple[int, ...]:
        """Trials for which no other is at least as good on each text and better on one."""
        return tuple(
            number
            for number, losses in self.losses.items()
            if not any(
                other != losses and all(b <= a for a, b in zip(losses, other, strict=True)) for other in self.losses.values()
            )
        )

    def objective_of(self, number: int) -> float:
        """The loss of a trial that was scored on all rows."""
        return combined(self.losses[number], self.objective)

    def table(self) -> list[dict[str, Any]]:
        """A row for each trial, for pandas: `pandas.DataFrame(tuning.table())`.

        Columns: trial; the value of each key path in `names`; objective, and loss of each text as `loss TEXT`, which are None
        unless the trial was scored on all rows; best; error.
        """
        rows = []
        for trial in self.trials:
            losses = self.losses.get(trial.number, [None] * len(self.texts))
            rows.append(
                {
                    "trial": trial.number,
                    **dict(zip(self.names, trial.values, strict=True)),
                    "objective": self.objective_of(trial.number) if trial.number in self.losses else None,
                    **{f"loss {text}": loss for text, loss in zip(self.texts, losses, strict=False)},
                    "best": trial.number == self.best,
                    "error": trial.error,
                }
            )
        return rows

    def report(self) -> Report:
        from weightsmith._reports.tuning.result import tuning_report

        return tuning_report(self)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; null for what is undefined."""
        names = (
            "out values start best objective texts report_texts reading rows few_rows measured resumed seconds journal front"
        )
        values, start = (dict(zip(self.names, numbers, strict=True)) for numbers in (self.values, self.start))
        trials = [
            {"trial": trial.number, "values": trial.values, "losses": self.losses.get(trial.number)}
            | ({"error": trial.error} if trial.error else {})
            for trial in self.trials
        ]
        return json_of(self, f"{names} front trials judged changes", values=values, start=start, trials=trials)


def combined(losses: Sequence[float], objective: str) -> float:
    """The number that a search minimises, from the loss of each text.

    >>> combined([2.0, 4.0], "mean"), combined([2.0, 4.0], "worst")
    (3.0, 4.0)
    """
    return max(losses) if objective == "worst" else sum(losses) / len(losses)


def total(scores: tuple[Score, ...]) -> Score:
    """The score on all texts together."""
    return scores[0] if len(scores) == 1 else mean_score(scores)


def _compared(tuning: Tuning, name: str, change: Change) -> str:
    tuned, other = total(tuning.judged["tuned"]).perplexity, total(tuning.judged[name]).perplexity
    numbers = f"perplexity {perplexity(tuned)} against {perplexity(other)}"
    if math.isnan(change.error):
        what = f"The tuned recipe is {of_change(change)} than the {name}, {numbers}."
        return f"{what} One row does not tell how much of it is noise."
    if not change.told_apart:
        return f"On the report text, the tuned recipe is {of_change(change)} than the {name}: that may be noise ({numbers})."
    rows = f"better on {change.better:,} of {count(change.rows, 'row')}"
    return f"On the report text, the tuned recipe is {of_change(change)} than the {name}: {numbers}, {rows}."


def tuning_report(tuning: Tuning) -> Report:
    """Result of a search."""
    failed = sum(bool(trial.error) for trial in tuning.trials)
    facts: list[tuple[str, Value]] = [
        ("recipe written", str(tuning.out)),
        ("trials", f"{len(tuning.trials):,}, {len(tuning.losses):,} of them on all rows, {failed:,} invalid"),
        ("of an earlier run", f"{tuning.resumed:,}"),
        ("objective", tuning.objective),
        ("rows to tune on", f"{tuning.rows[0]:,}; {tuning.few_rows:,} of them for every candidate"),
        ("rows of the report", f"{tuning.rows[1]:,}"),
        ("time", duration(tuning.seconds)),
    ]
    blocks: list[Block] = [Facts("Search", tuple(facts)), _judged(tuning)]
    blocks += [_values(tuning), *_curve(tuning), _front(tuning), _trials(tuning), Code("The recipe", tuning.recipe)]
    return Report(
        f"{Path(tuning.out).name}: tuned on {', '.join(tuning.texts[:3])}", tuning.reading, tuple(blocks), tuning.to_json()
    )


def _judged(tuning: Tuning) -> Table:
    """On the text of the report, against the tuned recipe."""
    columns = (
        Column("text"),
        Column("recipe"),
        Column("perplexity", "number", "exp of the mean loss of a token"),
        Column("bits per byte", "number"),
        Column(
            "the tuned recipe", "text", "its perplexity against this one, with the standard error of the differences row by row"
        ),
        Column("rows", "count"),
    )
    rows: list[tuple[Value, ...]] = []
    for i, text in [*enumerate(tuning.report_texts), *([] if len(tuning.report_texts) == 1 else [(-1, "all texts")])]:
        for name, scores in tuning.judged.items():
            score = total(scores) if i < 0 else scores[i]
            change = None if name == "tuned" else tuning.against[name]
            rows.append((text, name, score.perplexity, score.bits_per_byte, _change(change, i), score.rows))
    return Table("On the report text", columns, tuple(rows), "Text that no candidate was chosen by, read once, at the end.")


def _change(scores: tuple[Score, ...] | None, i: int) -> Value:
    if scores is None:
        return None
    change = (total(scores) if i < 0 else scores[i]).change
    return None if change is None else of_change(change)


def _values(tuning: Tuning) -> Table:
    rows = tuple(
        (name, str(first) if isinstance(first, str | bool) else first, str(best) if isinstance(best, str | bool) else best)
        for name, first, best in zip(tuning.names, tuning.start, tuning.values, strict=True)
    )
    return Table("Values", (Column("value"), Column("start", "number"), Column("tuned", "number")), rows)


def _curve(tuning: Tuning) -> list[Block]:
    best, now = list[float | None](), math.inf
    for trial in tuning.trials:
        if trial.number in tuning.losses:
            now = min(now, tuning.objective_of(trial.number))
        best.append(now if math.isfinite(now) else None)
    if len(best) < 2:
        return []
    what = "KL" if tuning.objective == "kl" else "nats"
    about = "The objective of the best candidate so far, on the rows to tune on."
    return [Curves("Best so far", (("best", tuple(best)),), "trial", f"{what} for each token", about=about)]


def _front(tuning: Tuning) -> Table:
    columns = (Column("trial", "count"), Column("objective", "number"), *(Column(text, "number") for text in tuning.texts))
    rows = tuple((number, tuning.objective_of(number), *tuning.losses[number]) for number in tuning.front)
    about = "Candidates that no other beats on one text without losing on another: losses on the rows to tune on."
    return Table("Pareto front over the texts", columns, rows, about)


def _trials(tuning: Tuning) -> Table:
    columns = (Column("trial", "count"), Column("objective", "number"), Column("outcome"), Column("values"))
    rows: list[tuple[Value, ...]] = []
    for trial in tuning.trials:
        on_all = trial.number in tuning.losses
        outcome = trial.error or ("all rows" if on_all else "few rows")
        values = ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in trial.values)
        rows.append((trial.number, tuning.objective_of(trial.number) if on_all else None, outcome, values))
    return Table("Trials", columns, tuple(rows), "Candidates that were not among the best on few rows were not scored on all.")
