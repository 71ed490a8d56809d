"""A search as a page: trials, the best so far, the front over the texts, and the report text."""

from __future__ import annotations

import math
from pathlib import Path

from weightsmith._base.report import Code, Column, Curves, Facts, Report, Table
from weightsmith._base.report.blocks import Block, Value
from weightsmith._base.text import duration
from weightsmith._reports.evaluate.values import Score, of_change
from weightsmith._reports.tuning.result import Tuning, total


def tuning_report(found: Tuning) -> Report:
    """Result of a search."""
    failed = sum(bool(trial.error) for trial in found.trials)
    facts: list[tuple[str, Value]] = [
        ("recipe written", str(found.out)),
        ("trials", f"{len(found.trials):,}, {len(found.losses):,} of them on all rows, {failed:,} invalid"),
        ("of an earlier run", f"{found.resumed:,}"),
        ("objective", found.objective),
        ("rows to tune on", f"{found.rows[0]:,}; {found.few_rows:,} of them for every candidate"),
        ("rows of the report", f"{found.rows[1]:,}"),
        ("time", duration(found.seconds)),
    ]
    blocks: list[Block] = [Facts("Search", tuple(facts)), _judged(found)]
    blocks += [_values(found), *_curve(found), _front(found), _trials(found), Code("The recipe", found.recipe)]
    return Report(
        f"{Path(found.out).name}: tuned on {', '.join(found.texts[:3])}", found.reading, tuple(blocks), found.to_json()
    )


def _judged(found: Tuning) -> Table:
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
    for i, text in [*enumerate(found.report_texts), *([] if len(found.report_texts) == 1 else [(-1, "all texts")])]:
        for name, scores in found.judged.items():
            score = total(scores) if i < 0 else scores[i]
            own = None if name == "tuned" else found.against[name]
            rows.append((text, name, score.perplexity, score.bits_per_byte, _change(own, i), score.rows))
    return Table("On the report text", columns, tuple(rows), "Text that no candidate was chosen by, read once, at the end.")


def _change(scores: tuple[Score, ...] | None, i: int) -> Value:
    if scores is None:
        return None
    change = (total(scores) if i < 0 else scores[i]).change
    return None if change is None else of_change(change)


def _values(found: Tuning) -> Table:
    rows = tuple(
        (name, str(first) if isinstance(first, str | bool) else first, str(own) if isinstance(own, str | bool) else own)
        for name, first, own in zip(found.names, found.start, found.values, strict=True)
    )
    return Table("Values", (Column("value"), Column("start", "number"), Column("tuned", "number")), rows)


def _curve(found: Tuning) -> list[Block]:
    best, now = list[float | None](), math.inf
    for trial in found.trials:
        if trial.number in found.losses:
            now = min(now, found.objective_of(trial.number))
        best.append(now if math.isfinite(now) else None)
    if len(best) < 2:
        return []
    what = "KL" if found.objective == "kl" else "nats"
    about = "The objective of the best candidate so far, on the rows to tune on."
    return [Curves("Best so far", (("best", tuple(best)),), "trial", f"{what} for each token", about=about)]


def _front(found: Tuning) -> Table:
    columns = (Column("trial", "count"), Column("objective", "number"), *(Column(text, "number") for text in found.texts))
    rows = tuple((number, found.objective_of(number), *found.losses[number]) for number in found.front)
    about = "Candidates that no other beats on one text without losing on another: losses on the rows to tune on."
    return Table("Pareto front over the texts", columns, rows, about)


def _trials(found: Tuning) -> Table:
    columns = (Column("trial", "count"), Column("objective", "number"), Column("outcome"), Column("values"))
    rows: list[tuple[Value, ...]] = []
    for trial in found.trials:
        on_all = trial.number in found.losses
        outcome = trial.error or ("all rows" if on_all else "few rows")
        values = ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in trial.values)
        rows.append((trial.number, found.objective_of(trial.number) if on_all else None, outcome, values))
    return Table("Trials", columns, tuple(rows), "Candidates that were not among the best on few rows were not scored on all.")
