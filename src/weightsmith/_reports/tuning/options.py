"""The options of `tune`."""

from __future__ import annotations

from dataclasses import dataclass

from weightsmith._base.options import option, option_record


@option_record("tune", group="Search")
@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """How `tune` searches."""

    report_text: tuple[str, ...] = option(
        (),
        "--report-text FILE",
        "Text to judge the result on, once, at the end (repeatable)",
        unset="the last third of the rows of each text",
        path=True,
    )
    report_command: str | None = option(
        None,
        "--report-command COMMAND",
        "Program that judges the result, once, at the end",
        unset="that of --command",
        brief=(),
    )
    budget: int = option(100, "--budget N", "Number of candidates to try", least=1)
    time: str | None = option(
        None,
        "--time TIME",
        "Start no candidate after this time, such as 90s, 30m or 2h",
        unset="no limit",
        details="The time includes the start. The last candidate and the report come on top.",
    )
    search: str = option(
        "cma",
        "--search NAME",
        "How candidates are chosen",
        choices=("cma", "line", "gradient", "random", "grid"),
        details="`cma` is CMA-ES, and needs the extra `tune`. `line` is for one number. `gradient` moves all numbers at once.",
    )
    objective: str = option(
        "mean",
        "--objective NAME",
        "Measure to minimise: mean loss, worst text, KL divergence from `reference`",
        choices=("mean", "worst", "kl"),
    )
    reference: tuple[str, ...] = option(
        (), "--reference MODEL", "Model to stay close to, for kl: one, or one for each text (repeatable)"
    )
    scoring_dtype: str | None = option(
        None,
        "--scoring-dtype DTYPE",
        "Dtype in which linear layers multiply when candidates are scored",
        unset="bfloat16 on processors that multiply it, else float32",
        choices=("float32", "bfloat16"),
        details="[`gradient`](tune.md#what-it-costs) uses float32 by default. The result is always judged in float32.",
        brief=(),
    )
