"""`weightsmith run`."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from typing import Annotated

import typer

from weightsmith.cli import options
from weightsmith.cli.failures import failures, wrote
from weightsmith.cli.merge import interrupted, make, show_warnings
from weightsmith.options import RunOptions
from weightsmith.progress import callbacks, meter, no_bars_in_logs
from weightsmith.text import say, status_line


def parse_part(text: str) -> tuple[int, int]:
    """Which part of how many, from `2/4`.

    >>> parse_part("2/4")
    (2, 4)
    """
    match = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", text.strip(), re.ASCII)
    if match is None or int(match[1]) > int(match[2]):
        raise typer.BadParameter(f"{text!r} is not a part: write 2/4 for the second of four.")
    return int(match[1]), int(match[2])


@options.expand("keep_stages")
def run(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan, as `weightsmith plan RECIPE --json` prints it.")],
    out: options.Out,
    running: RunOptions,
    part: Annotated[
        str,
        typer.Option(
            "--part",
            metavar="K/N",
            show_default=False,
            help="Run part K of N without publishing. Several processes may run different parts at once; when all are done, "
            "the same command without --part publishes.",
        ),
    ] = "",
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run the Python file that the plan's merge method comes from, if there is one.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Run PLAN, or one part of it, and write OUT.

    The output is identical to that of the recipe. The models must be the ones that the plan was created for.
    """
    began = time.monotonic()
    chosen = parse_part(part) if part else None
    if chosen and running.push:
        raise typer.BadParameter("a part publishes nothing: give it to the run without --part.", param_hint="--push")
    if chosen and running.ray is not None:
        raise typer.BadParameter("a cluster does all parts: leave out --part.", param_hint="--ray")
    with failures(as_json=as_json, interrupted=lambda: interrupted(out)), ExitStack() as stack:
        stack.enter_context(status_line("reading the plan and the models' headers", quiet=quiet or as_json))
        no_bars_in_logs(quiet=quiet)
        from weightsmith.execution import Callbacks, execute_part
        from weightsmith.planner.reopen import load_plan, reopen

        prepared = stack.enter_context(reopen(load_plan(plan), allow_code=allow_code))
        if chosen is None:
            show_warnings(prepared)
            make(prepared, out, running, "running", quiet=quiet, as_json=as_json, began=began)
            return
        stack.enter_context(failures(merging=True, as_json=as_json, interrupted=lambda: interrupted(out)))
        with meter(quiet=quiet) as shown:
            execute_part(prepared, out, chosen, running, Callbacks(*callbacks(shown, "running")))
        wrote(f"Part {chosen[0]} of {chosen[1]} is done.")
        if not quiet:
            say(f"part {chosen[0]} of {chosen[1]} is done; without --part the same command publishes when all are")
