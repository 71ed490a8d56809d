"""`weightsmith moe`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, cast

import typer

from weightsmith.cli import options
from weightsmith.cli.failures import failures
from weightsmith.cli.merge import interrupted, make, show_warnings
from weightsmith.cli.mergekit_flags import answer
from weightsmith.options import QuantizeSettings, RecipeOptions, RunOptions
from weightsmith.progress import callbacks, meter, no_bars_in_logs
from weightsmith.text import result, show_json, show_table, status_line, warn

if TYPE_CHECKING:
    from weightsmith.mixture.routing.product import RoutingReport

ROUTER = "router"
"""The product whose report says where tokens go."""


@options.expand("adapter_rank", "adapter_space")
def moe(
    context: typer.Context,
    recipe: options.Recipe,
    planning: RecipeOptions,
    settings: QuantizeSettings,
    running: RunOptions,
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="The new folder, or s3://BUCKET/PREFIX, gs://, az://, hf://ORG/NAME[@BRANCH]; not with --plan, --routing.",
            show_default=False,
        ),
    ] = "",
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Show what would be made, as `weightsmith plan` does; compute and write nothing.")
    ] = False,
    routing_only: Annotated[
        bool, typer.Option("--routing", help="Compute the router weights and show where they send the prompts; write nothing.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Make a mixture of experts as RECIPE says.

    OUT is created only when complete. If interrupted, run the same command again to resume.
    """
    began = time.monotonic()
    if bool(out) == (plan_only or routing_only):
        raise typer.BadParameter(
            "with --plan or --routing nothing is written." if out else "name the folder to create.", param_hint="OUT"
        )
    with failures(as_json=as_json, interrupted=lambda: interrupted(out)), ExitStack() as stack:
        stack.enter_context(status_line("reading the recipe and the models' headers", quiet=quiet or as_json))
        no_bars_in_logs(quiet=quiet)
        answer(context, quiet=quiet)
        from weightsmith.mixture.build import assemble_moe
        from weightsmith.quantisation import quantised

        source = options.recipe_source(recipe)
        planning = replace(planning, routing_report=True) if routing_only else planning
        assembled = quantised(lambda: assemble_moe(source, planning), planning.quantize, settings)
        prepared = stack.enter_context(assembled.finish(check=plan_only))
        show_warnings(prepared)
        if plan_only:
            from weightsmith.cli.plan import show_plan

            show_plan(prepared, running, as_json=as_json)
            return
        if not routing_only:
            merged = make(prepared, out, running, "copying", quiet=quiet, as_json=as_json, began=began)
            report = cast("RoutingReport | None", merged.reports.get(ROUTER))
            if report is not None and report.routing is not None and not quiet and not as_json:
                show_table(*report.routing.table(), right=set(range(1, len(report.routing.experts) + 3)))
            return
        if all(product.name != ROUTER for product in prepared.plan.products):
            raise typer.BadParameter("this recipe makes no router weights.", param_hint="--routing")
        from weightsmith.execution import make_product

        with meter(quiet=quiet) as shown:
            report = cast("RoutingReport | None", make_product(prepared, ROUTER, running, callbacks(shown, "computing")[0]))
        for finding in () if report is None else report.warnings(recipe):
            warn(finding)
        _show_routing(report, as_json=as_json)


def _show_routing(report: RoutingReport | None, *, as_json: bool) -> None:
    if as_json:
        routing = None if report is None or report.routing is None else report.routing.to_json()
        show_json(routing)
    elif report is None or report.routing is None:
        result("the recipe has no prompts, so there is nothing to route")
    else:
        show_table(*report.routing.table(), right=set(range(1, len(report.routing.experts) + 3)))
        result()
        show_table(*report.routing.by_layer(), right=set(range(len(report.routing.groups) + 1)))
