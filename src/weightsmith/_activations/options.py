"""The options of `statistics`."""

from __future__ import annotations

from dataclasses import dataclass

from weightsmith._base.options import option, option_record


@option_record("statistics", group="Texts")
@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsSettings:
    """Options of `statistics`: kinds to measure, rows of the text."""

    kind: tuple[str, ...] = option(
        ("second_moments", "magnitudes"),
        "--kind NAME",
        "Statistic: second_moments for regmean, magnitudes for aim, fisher (repeatable)",
        unset="second_moments and magnitudes",
        details="The merge methods and their statistics: [merges that look at text](statistics.md).",
    )
    rows: int | None = option(None, "--rows N", "Number of rows of the text", unset="all, at most 128; own text: 20", least=1)
    tokens: int | None = option(None, "--tokens N", "Number of tokens in each row", unset="512; own text: 128", least=1)
    seed: int = option(0, "--seed N", "Seed for sampling rows, and the labels of fisher")
