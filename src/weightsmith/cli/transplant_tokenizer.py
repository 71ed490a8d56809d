"""`weightsmith transplant-tokenizer`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, cast

import typer

from weightsmith.cli import options
from weightsmith.cli.failures import failures
from weightsmith.cli.merge import interrupted, make, show_warnings
from weightsmith.options import RunOptions, TransplantSettings
from weightsmith.progress import no_bars_in_logs
from weightsmith.text import result, say, show_json, show_table, status_line

if TYPE_CHECKING:
    from weightsmith.plans import Plan
    from weightsmith.transplant.report import Transplant


@options.expand("keep_stages")
def transplant_tokenizer(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model: a folder, a hub id, or base+adapter.")],
    donor: Annotated[
        str, typer.Argument(metavar="DONOR", help="The model that gives the tokenizer; or a folder with a tokenizer alone.")
    ],
    settings: TransplantSettings,
    running: RunOptions,
    out: options.OutOrPlan = "",
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Show how the tokens would be found; compute and write nothing.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Give MODEL the tokenizer of DONOR, in OUT.

    Tokens that both have keep the model's rows; the rows of the others are approximated. OUT is created only when complete. If
    interrupted, run the same command again to resume.
    """
    began = time.monotonic()
    options.check_out(out, plan_only=plan_only)
    with (
        failures(as_json=as_json, interrupted=lambda: interrupted(out)),
        status_line("reading the models' headers and tokenizers", quiet=quiet or as_json),
    ):
        no_bars_in_logs(quiet=quiet)
        from weightsmith.transplant import prepare_transplant
        from weightsmith.transplant.rows import NAME

        with prepare_transplant(model, donor, settings) as prepared:
            show_warnings(prepared)
            if plan_only:
                _show_plan(prepared.plan, as_json=as_json)
                return
            merged = make(prepared, out, running, "copying", quiet=quiet, as_json=as_json, began=began)
            if NAME in merged.reports and not quiet and not as_json:
                report = cast("Transplant", merged.reports[NAME])
                say(report.summary())
                head, rows = report.table()
                if rows:
                    show_table(head, rows, right={1, 3})


def _show_plan(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        show_json(plan.to_json(), exact=True)
        return
    found = plan.vocabulary or {}
    show_table(("tokens", ""), [(how, f"{n:,}") for how, n in found.get("sources", {}).items()], right={1})
    result(f"{found.get('rows', 0):,} rows; the model has {found.get('rows_before', 0):,}")
