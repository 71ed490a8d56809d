"""The result of `weightsmith auto`: the candidates' scores, the choice, and the reasons for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith._base.report.blocks import Block, Code, Column, Facts, Report, Reported, Table, Value
from weightsmith._base.text import duration
from weightsmith._reports.auto.pool import FAR_NATS, Choice
from weightsmith._reports.evaluate.values import TOLD_APART, Mean
from weightsmith._reports.look.models import json_of

NEAR_NATS = 0.05
"""A fine-tune that differs less than this from its base writes the base's text."""


@dataclass(frozen=True, slots=True)
class CandidateScore:
    """A candidate on the held-back rows of all fine-tunes, in nats a token.

    strength    of a sum or of tsv_m, by the parabola; None for others
    nats        cross entropy of the rows
    divergence  mean KL divergence from the fine-tunes
    nats_change, divergence_change   how much higher than the mean's, with standard errors; None for the mean itself
    """

    name: str
    strength: float | None
    nats: float
    divergence: float
    nats_change: Mean | None
    divergence_change: Mean | None


@dataclass(frozen=True, slots=True)
class FineTune:
    """A fine-tune on its own held-back rows, in nats a token.

    text      the file that was given; "" for text of its own
    change    how much higher its cross entropy is than the base's
    distance  KL divergence of the base from it
    """

    name: str
    text: str
    change: Mean
    distance: float


@dataclass(frozen=True)
class Auto(Reported):
    """`weightsmith.auto` makes it.

    out         the folder that was written
    work        the folder of texts, scores and the page
    recipe      that was merged; OUT/recipe.yml
    choice      the candidate that was written, and why
    with_texts  whether texts were given; otherwise the fine-tunes wrote their own
    candidates  in the order in which they were scored; the first is the mean
    rows        held back, of each fine-tune
    failed      candidates whose numbers are not finite, by name, and where: they were left out
    stopped     whether number or time ended the search before all candidates were scored
    seconds     of this call
    """

    out: Path
    work: Path
    recipe: str
    choice: Choice
    with_texts: bool
    candidates: tuple[CandidateScore, ...]
    fine_tunes: tuple[FineTune, ...]
    rows: tuple[int, ...]
    failed: Mapping[str, str]
    stopped: bool
    seconds: float

    @property
    def reading(self) -> tuple[str, ...]:
        """The conclusions, in sentences."""
        lines = [f"{self.out.name} is {self.choice.name}: {self.choice.why}."]
        if not self.with_texts:
            lines.append(
                "No text was given: each fine-tune wrote its own, and candidates were scored by their distance from it."
            )
            if sum(tune.distance for tune in self.fine_tunes) / len(self.fine_tunes) > FAR_NATS:
                lines.append("Give a text for each fine-tune, --text NAME=FILE, to find a strength for them.")
        for tune in self.fine_tunes:
            if self.with_texts and tune.change.value > -TOLD_APART * tune.change.error:
                lines.append(f"{tune.name} is not better than the base on its own text: check the fine-tune, or its text.")
            if not self.with_texts and tune.distance < NEAR_NATS:
                what = f"{tune.name} hardly differs from the base ({tune.distance:.3f} nats a token)"
                lines.append(f"{what}, so what it wrote is the base's text.")
        lines += [f"{name} was left out: {why}." for name, why in self.failed.items()]
        if self.stopped:
            lines.append("--budget or --time ended the search before all candidates were scored.")
        return tuple(lines)

    def report(self) -> Report:
        from weightsmith._reports.auto.result import auto_report

        return auto_report(self)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; null for what is undefined."""
        names = "out work choice with_texts candidates fine_tunes rows failed stopped reading recipe seconds"
        return json_of(self, names)


def auto_report(result: Auto) -> Report:
    """What was measured, what was chosen and why."""
    source = "given" if result.with_texts else "written by the fine-tunes"
    facts: tuple[tuple[str, Value], ...] = (
        ("written", str(result.out)),
        ("chosen", result.choice.name),
        ("texts", f"{source}; kept in {result.work}"),
        (
            "held-back rows",
            ", ".join(f"{tune.name} {rows:,}" for tune, rows in zip(result.fine_tunes, result.rows, strict=True)),
        ),
        ("time", duration(result.seconds)),
    )
    blocks: tuple[Block, ...] = (Facts("Result", facts), _candidates(result), _fine_tunes(result))
    if result.recipe:
        about = "weightsmith merge repeats the merge with it, to the byte."
        blocks = (*blocks, Code("The recipe", result.recipe, about))
    return Report(
        f"{result.out.name}: a merge of {', '.join(tune.name for tune in result.fine_tunes)}",
        result.reading,
        blocks,
        result.to_json(),
    )


def _candidates(result: Auto) -> Table:
    columns = (
        Column("candidate"),
        Column("strength", "number", "found by a parabola"),
        Column("cross entropy", "number", "nats a token on the held-back rows, mean over the fine-tunes"),
        Column("against the mean", "text", "with the standard error of the differences row by row"),
        Column("KL divergence", "number", "from each fine-tune on its own rows, nats a token, mean over the fine-tunes"),
        Column("against the mean ", "text", "with the standard error of the differences row by row"),
        Column("chosen"),
    )
    rows = tuple(
        (
            candidate.name,
            candidate.strength,
            candidate.nats,
            _change(candidate.nats_change),
            candidate.divergence,
            _change(candidate.divergence_change),
            "yes" if candidate.name == result.choice.name else "",
        )
        for candidate in result.candidates
    )
    measure = "the cross entropy" if result.with_texts else "the KL divergence"
    return Table("Candidates", columns, rows, f"Lower is better. {measure.capitalize()} chooses.")


def _fine_tunes(result: Auto) -> Table:
    columns = (
        Column("fine-tune"),
        Column("text"),
        Column("against the base", "text", "its cross entropy on its own held-back rows, with the standard error"),
        Column("distance", "number", "KL divergence of the base from it on these rows, nats a token"),
    )
    rows = tuple((tune.name, tune.text or "its own", _change(tune.change), tune.distance) for tune in result.fine_tunes)
    return Table("Each fine-tune against the base, on its own text", columns, rows, "Negative is better than the base.")


def _change(change: Mean | None) -> Value:
    return None if change is None else f"{change.value:+.4f} ± {change.error:.4f}"
