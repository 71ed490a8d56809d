"""`weightsmith moe`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, cast

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.mergekit_flags import answer
from weightsmith._app.cli.plan import show_plan
from weightsmith._app.cli.work import Work, show_warnings, working
from weightsmith._base.text import result, show_json, show_table, warn
from weightsmith._execution.options import RunOptions
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions

if TYPE_CHECKING:
    from weightsmith._features.mixture.routing.report import RoutingReport
    from weightsmith._planning.planner import Prepared

ROUTER = "router"
"""The product whose report says where tokens go."""


@options.expand
def moe(
    context: typer.Context,
    recipe: options.Recipe,
    planning: RecipeOptions,
    settings: QuantizeSettings,
    running: RunOptions,
    out: options.OutOrPlan = "",
    plan_only: options.PlanOnly = False,
    routing_only: Annotated[bool, typer.Option("--routing", help="Show the routing of the prompts; write nothing.")] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Make a mixture of experts as RECIPE describes.

    OUT is created only when complete. If interrupted, run the same command again to resume.

    Examples:
        weightsmith moe experts.yml mixture
        weightsmith moe experts.yml --routing
    """
    options.check_out(out, plan=plan_only, routing=routing_only)
    options.check_order(recipe, out)
    with working("reading the recipe and the models' headers", out=out, quiet=quiet, as_json=as_json) as work:
        answer(context, quiet=quiet)
        from weightsmith._features.any_recipe import prepare_any

        source = options.recipe_source(recipe)
        planning = replace(planning, routing_report=True) if routing_only else planning
        with prepare_any(source, planning, settings, command="moe", check=plan_only) as prepared:
            show_warnings(prepared)
            if plan_only:
                show_plan(prepared, running, as_json=as_json)
            elif routing_only:
                _route(prepared, recipe, running, work)
            else:
                merged = work.make(prepared, running, "copying")
                report = cast("RoutingReport | None", merged.reports.get(ROUTER))
                if report is not None and report.routing is not None and work.shows:
                    show_table(*report.routing.table(), right=set(range(1, len(report.routing.experts) + 3)))


def _route(prepared: Prepared, recipe: str, running: RunOptions, work: Work) -> None:
    """Compute the router weights alone, and show the routing."""
    if all(product.name != ROUTER for product in prepared.plan.products):
        raise typer.BadParameter("this recipe makes no router weights.", param_hint="--routing")
    from weightsmith._execution.execute import make_product

    with work.running("computing") as watching:
        report = cast("RoutingReport | None", make_product(prepared, ROUTER, running, watching.progress))
    for finding in () if report is None else report.warnings(recipe):
        warn(finding)
    _show_routing(report, as_json=work.as_json)


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
