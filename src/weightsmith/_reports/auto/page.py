"""The result of `weightsmith auto` as a page."""

from __future__ import annotations

from weightsmith._base.report import Code, Column, Facts, Report, Table
from weightsmith._base.report.blocks import Block, Value
from weightsmith._base.text import duration
from weightsmith._reports.auto.result import Auto
from weightsmith._reports.evaluate.values import Mean


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
            each.name,
            each.strength,
            each.nats,
            _change(each.nats_change),
            each.divergence,
            _change(each.divergence_change),
            "yes" if each.name == result.choice.name else "",
        )
        for each in result.candidates
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
    rows = tuple((each.name, each.text or "its own", _change(each.change), each.distance) for each in result.fine_tunes)
    return Table("Each fine-tune against the base, on its own text", columns, rows, "Negative is better than the base.")


def _change(change: Mean | None) -> Value:
    return None if change is None else f"{change.value:+.4f} ± {change.error:.4f}"
