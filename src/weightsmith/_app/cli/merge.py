"""`weightsmith merge`, `moe` and `run`: what makes a model of several."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, cast

import typer

import weightsmith
from weightsmith._app.cli import options
from weightsmith._app.cli.failures import wrote
from weightsmith._app.cli.mergekit_flags import answer
from weightsmith._app.cli.plan import show_plan
from weightsmith._app.cli.work import CommandWork, show_warnings, working
from weightsmith._base.text import result, say, show_json, show_table, warn
from weightsmith._execution.options import RunOptions
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions

if TYPE_CHECKING:
    from weightsmith._features.mixture.router import RoutingReport
    from weightsmith._planning.planner import Prepared


@options.expand
def merge(
    context: typer.Context,
    recipe: options.Recipe,
    out: options.Out,
    planning: RecipeOptions,
    settings: QuantizeSettings,
    running: RunOptions,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Merge checkpoints into OUT as RECIPE describes.

    OUT is created only when complete. If interrupted, run the same command again to resume.

    Examples:
        weightsmith merge ties.yml merged
        weightsmith merge ties.yml merged-q4 --quantize gguf-q4_k_m --threads 8
    """
    options.check_order(recipe, out)
    with working("reading the recipe and the models' headers", out=out, quiet=quiet, as_json=as_json) as work:
        answer(context, quiet=quiet)
        work.make(weightsmith.merge, options.recipe_source(recipe), records=(planning, settings, running))


# ---- weightsmith moe


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
    """Build a mixture of experts as RECIPE describes.

    OUT is created only when complete. If interrupted, run the same command again to resume.

    Examples:
        weightsmith moe experts.yml mixture
        weightsmith moe experts.yml --routing
    """
    options.check_out(out, plan=plan_only, routing=routing_only)
    options.check_order(recipe, out)
    with working("reading the recipe and the models' headers", out=out, quiet=quiet, as_json=as_json) as work:
        answer(context, quiet=quiet)
        source = options.recipe_source(recipe)
        if not plan_only and not routing_only:
            merged = work.make(weightsmith.moe, source, records=(planning, settings, running))
            report = None if merged is None else cast("RoutingReport | None", merged.reports.get(ROUTER))
            if report is not None and report.routing is not None and work.shows:
                show_table(*report.routing.table(), right=set(range(1, len(report.routing.experts) + 3)))
            return
        from weightsmith._features.any_recipe import prepare_any

        planning = replace(planning, routing_report=True) if routing_only else planning
        with prepare_any(source, planning, settings, command="moe", check=plan_only) as prepared:
            show_warnings(prepared.plan, prepared.source)
            if plan_only:
                show_plan(prepared, running, out, as_json=as_json)
            else:
                _route(prepared, recipe, running, work)


def _route(prepared: Prepared, recipe: str, running: RunOptions, work: CommandWork) -> None:
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


# ---- weightsmith run


def parse_part(text: str) -> tuple[int, int]:
    """Part and number of parts, from `2/4`.

    >>> parse_part("2/4")
    (2, 4)
    """
    match = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", text.strip(), re.ASCII)
    if match is None or int(match[1]) > int(match[2]):
        raise typer.BadParameter(f"{text!r} is not a part: write 2/4 for the second of four.")
    return int(match[1]), int(match[2])


@options.expand
def run(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="Plan, as `weightsmith plan RECIPE --json` prints it.")],
    out: options.Out,
    running: RunOptions,
    part: Annotated[
        str,
        typer.Option(
            "--part",
            metavar="K/N",
            show_default=False,
            help="Run only part K of N, for several processes; OUT is not created yet.",
        ),
    ] = "",
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Allow the plan's merge method to run a Python file.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Run PLAN, or one part of it, and write OUT.

    The output is identical to that of the recipe. The models must not have changed since the plan was made. When all parts are
    done, run the same command without --part to finish.

    Examples:
        weightsmith run plan.json merged
        weightsmith run plan.json merged --part 2/4
    """
    options.check_plan(plan)
    chosen = parse_part(part) if part else None
    if chosen and running.push:
        raise typer.BadParameter("a part publishes nothing: give it to the run without --part.", param_hint="--push")
    if chosen and running.ray is not None:
        raise typer.BadParameter("a cluster does all parts: leave out --part.", param_hint="--ray")
    with working("reading the plan and the models' headers", out=out, quiet=quiet, as_json=as_json) as work:
        merged = work.make(weightsmith.run, plan, records=(running,), part=chosen, allow_code=allow_code)
        if merged is None and chosen is not None:
            wrote(f"Part {chosen[0]} of {chosen[1]} is done.")
            if not quiet:
                say(f"part {chosen[0]} of {chosen[1]} is done; without --part the same command publishes when all are")
