"""`weightsmith run`."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.failures import wrote
from weightsmith._app.cli.work import show_warnings, working
from weightsmith._base.text import say
from weightsmith._execution.options import RunOptions


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
            help="Run part K of N and publish nothing; for several processes.",
        ),
    ] = "",
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Allow the plan's merge method to run a Python file.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Run PLAN, or one part of it, and write OUT.

    The output is identical to that of the recipe. The models must be those that the plan was made for. When all parts are
    done, run the same command without --part to finish.

    Examples:
        weightsmith run plan.json merged
        weightsmith run plan.json merged --part 2/4
    """
    chosen = parse_part(part) if part else None
    if chosen and running.push:
        raise typer.BadParameter("a part publishes nothing: give it to the run without --part.", param_hint="--push")
    if chosen and running.ray is not None:
        raise typer.BadParameter("a cluster does all parts: leave out --part.", param_hint="--ray")
    with working("reading the plan and the models' headers", out=out, quiet=quiet, as_json=as_json) as work:
        from weightsmith._execution.execute import execute_part
        from weightsmith._planning.planner.reopen import load_plan, reopen

        with reopen(load_plan(plan), allow_code=allow_code) as prepared:
            if chosen is None:
                show_warnings(prepared)
                work.make(prepared, running, "running")
                return
            with work.running("running") as watching:
                execute_part(prepared, out, chosen, running, watching)
            wrote(f"Part {chosen[0]} of {chosen[1]} is done.")
            if not quiet:
                say(f"part {chosen[0]} of {chosen[1]} is done; without --part the same command publishes when all are")
