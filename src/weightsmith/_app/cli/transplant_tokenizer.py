"""`weightsmith transplant-tokenizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.work import show_warnings, working
from weightsmith._base.text import result, say, show_json, show_table
from weightsmith._execution.options import RunOptions
from weightsmith._features.transplant.options import TransplantSettings

if TYPE_CHECKING:
    from weightsmith._features.transplant.report import Transplant
    from weightsmith._plans import Plan


@options.expand
def transplant_tokenizer(
    model: options.Model,
    donor: Annotated[
        str, typer.Argument(metavar="DONOR", help="Model with the new tokenizer, or a folder with a tokenizer alone.")
    ],
    settings: TransplantSettings,
    running: RunOptions,
    out: options.OutOrPlan = "",
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Show the sources of the token rows; compute and write nothing.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Give MODEL the tokenizer of DONOR, in OUT.

    Shared tokens keep the model's rows; rows of missing tokens are approximated. OUT is created only when complete. If
    interrupted, run the same command again to resume.

    Examples:
        weightsmith transplant-tokenizer ./model org/donor ./out
        weightsmith transplant-tokenizer ./model org/donor --plan
    """
    options.check_out(out, plan=plan_only)
    with working("reading the models' headers and tokenizers", out=out, quiet=quiet, as_json=as_json) as work:
        from weightsmith._features.transplant.plan import prepare_transplant
        from weightsmith._features.transplant.rows import NAME

        with prepare_transplant(model, donor, settings) as prepared:
            show_warnings(prepared)
            if plan_only:
                _show_plan(prepared.plan, as_json=as_json)
                return
            merged = work.make(prepared, running, "copying")
            if NAME in merged.reports and work.shows:
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
