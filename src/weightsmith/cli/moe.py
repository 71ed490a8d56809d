"""`weightsmith moe`."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from weightsmith.cli import options
from weightsmith.cli.failures import failures
from weightsmith.cli.merge import interrupted, report, show_progress
from weightsmith.cli.mergekit_flags import answer
from weightsmith.cli.progress import Reading, meter, no_bars_in_logs
from weightsmith.cli.text import result, show_table, warn

if TYPE_CHECKING:
    from weightsmith.engine.local import Progress
    from weightsmith.mixture.routing.report import Report

COMPUTING = "computing what the plan needs"
"""Hidden states and router weights, or which neurons go together."""


def moe(
    context: typer.Context,
    recipe: options.Recipe,
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="The folder to make; not with --plan and --routing.", show_default=False)
    ] = "",
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Show what would be made, as `weightsmith plan` does; compute and write nothing.")
    ] = False,
    routing_only: Annotated[
        bool, typer.Option("--routing", help="Compute the router weights and show where they send the prompts; write nothing.")
    ] = False,
    routing_report: Annotated[
        bool | None,
        typer.Option(
            "--report/--no-report",
            show_default=False,
            help="Write where the router sends the prompts, or not; by default if the gate mode runs the base on them anyway.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Where hidden states are computed: cpu, cuda, cuda:1 or auto.")
    ] = "cpu",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
    max_shard_size: options.MaxShardSize = options.DEFAULT_MAX_SHARD_BYTES,
    seed: options.Seed = 0,
    out_dtype: options.OutDtype = None,
    overwrite: options.Overwrite = False,
    resume: options.Resume = True,
    fsync: options.Fsync = True,
    card: options.Card = True,
    mergekit_lenient: options.Lenient = False,
    allow_nonfinite: options.AllowNonfinite = False,
    allow_code: options.AllowCode = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Make a mixture of experts as RECIPE says, in the new folder OUT.

    OUT appears when all of it is finished. Interrupted work is kept beside it, and the same command goes on with it.
    """
    began = time.monotonic()
    if bool(out) == (plan_only or routing_only):
        raise typer.BadParameter(
            "with --plan or --routing nothing is written." if out else "name the folder to make.", param_hint="OUT"
        )
    with failures(interrupted=lambda: interrupted(out)), ExitStack() as stack:
        no_bars_in_logs(quiet=quiet)
        answer(context, quiet=quiet)
        from weightsmith.api import execute_mixture
        from weightsmith.mixture import PreparedMoe, prepare_moe

        prepared = stack.enter_context(
            prepare_moe(
                recipe,
                out_dtype=out_dtype,
                max_shard_bytes=max_shard_size,
                seed=seed,
                lenient=mergekit_lenient,
                allow_code=allow_code,
            )
        )
        for finding in prepared.prepared.plan.warnings:
            warn(finding)
        if plan_only:
            from weightsmith.cli.plan import show_plan

            show_plan(prepared.prepared, threads=threads, max_memory=max_memory, as_json=as_json)
            return
        shown = stack.enter_context(meter(quiet=quiet))

        if routing_only:
            if not isinstance(prepared, PreparedMoe):
                raise typer.BadParameter("this recipe makes no router weights.", param_hint="--routing")

            def filled_so_far(done: int, total: int) -> None:
                if total:
                    shown.show(Reading(COMPUTING, done, total, done))

            told = prepared.fill(report=True, device=device, progress=filled_so_far)
            _warn(told, recipe)
            shown.close()
            _show_routing(told, as_json=as_json)
            return
        reports: list[Report | None] = []
        computing = Reading(COMPUTING, 0, 0, 0)

        def filling(done: int, total: int) -> None:
            nonlocal computing
            computing = Reading(COMPUTING, done, total, done)

        def progress(now: Progress) -> None:
            if now.waiting and computing.total_bytes:  # else it has not begun: torch and transformers are being imported
                shown.show(computing)
            else:
                show_progress(shown, now, "copying")

        def filled(told: Report | None) -> None:
            _warn(told, recipe)
            reports.append(told)

        stack.enter_context(failures(merging=True, interrupted=lambda: interrupted(out)))
        merged = execute_mixture(
            prepared,
            out,
            report=routing_report,
            device=device,
            filling=filling,
            filled=filled,
            threads=threads,
            max_memory_bytes=max_memory,
            overwrite=overwrite,
            resume=resume,
            fsync=fsync,
            card=card,
            allow_nonfinite=allow_nonfinite,
            progress=progress,
            rechecking=lambda done, total: shown.show(Reading("checking what is there", done, total, done)),
            began=began,
        )
        shown.close()
        report(merged, quiet=quiet, as_json=as_json)
        (told,) = reports
        if told is not None and not quiet and not as_json:
            show_table(*told.table(), right=set(range(1, len(told.experts) + 3)))


def _warn(told: Report | None, recipe: str) -> None:
    """Warn of routers that do not route."""
    for finding in () if told is None else told.warnings(recipe):
        warn(finding)


def _show_routing(told: Report | None, *, as_json: bool) -> None:
    if as_json:
        result(json.dumps(None if told is None else told.to_json(), ensure_ascii=False))
    elif told is None:
        result("the recipe has no prompts, so there is nothing to route")
    else:
        show_table(*told.table(), right=set(range(1, len(told.experts) + 3)))
        result()
        show_table(*told.by_layer(), right=set(range(len(told.groups) + 1)))
