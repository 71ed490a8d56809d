"""`weightsmith merge`."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import typer

from weightsmith.cli import options
from weightsmith.cli.failures import failures, wrote
from weightsmith.cli.mergekit_flags import answer
from weightsmith.errors import printable
from weightsmith.options import QuantizeSettings, RecipeOptions, RunOptions
from weightsmith.progress import callbacks, meter, no_bars_in_logs
from weightsmith.text import count, duration, say, show_json, size, status, status_line, warn

if TYPE_CHECKING:
    from weightsmith.execution import Merged
    from weightsmith.planner import Prepared
    from weightsmith.plans import Plan


@options.expand("routing_report")
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
    """Merge checkpoints as RECIPE says, into OUT.

    OUT is created only when complete. If interrupted, run the same command again to resume.
    """
    began = time.monotonic()
    with failures(as_json=as_json, interrupted=lambda: interrupted(out)), ExitStack() as stack:
        stack.enter_context(status_line("reading the recipe and the models' headers", quiet=quiet or as_json))
        no_bars_in_logs(quiet=quiet)
        answer(context, quiet=quiet)
        from weightsmith.adapters.recipes import prepare_merge
        from weightsmith.quantisation import quantised

        source = options.recipe_source(recipe)
        prepared = stack.enter_context(quantised(lambda: prepare_merge(source, planning), planning.quantize, settings))
        show_warnings(prepared)
        make(prepared, out, running, "merging", quiet=quiet, as_json=as_json, began=began)


def show_warnings(prepared: Prepared) -> None:
    """Show the warnings of a plan."""
    for finding in prepared.plan.warnings:
        warn(finding, prepared.source)


def make(prepared: Prepared, out: str, running: RunOptions, doing: str, *, quiet: bool, as_json: bool, began: float) -> Merged:
    """Run a plan with a progress bar and report the result. doing: the verb of the progress bar."""
    from weightsmith.distributed import execute
    from weightsmith.execution import Callbacks

    with failures(merging=True, as_json=as_json, interrupted=lambda: interrupted(out)), meter(quiet=quiet) as shown:
        status("preparing the output")
        merged = execute(prepared, out, running, Callbacks(*callbacks(shown, doing)), began=began)
        wrote(f"The output is complete: {printable(merged.url or str(merged.out))}")
        shown.close()
        report(merged, quiet=quiet, as_json=as_json)
        return merged


def report(merged: Merged, *, quiet: bool, as_json: bool) -> None:
    """Show the warnings about the data, and the result."""
    for finding in merged.warnings[len(merged.plan.warnings) :]:
        warn(finding)
    if as_json:
        show_json(_to_json(merged))
    elif not quiet:
        say(_summary(merged))


def _summary(merged: Merged) -> str:
    steps, weights = len(merged.plan.steps), _weights(merged.plan)
    nbytes = sum(out.nbytes for step in merged.plan.steps for out in step.outs)
    moved = merged.read_bytes + merged.written_bytes
    them = "them" if weights == steps else f"the {steps:,} stored arrays"
    resumed = f", {merged.resumed:,} of {them} by an earlier run" if merged.resumed else ""
    speed = f" ({size(moved / merged.seconds)}/s read and written)" if merged.seconds > 0 else ""
    tensors = count(weights, "tensor")
    done = f"{printable(str(merged.out))}: {tensors}{resumed}, {size(nbytes)} in {duration(merged.seconds)}{speed}"
    if merged.fetched_bytes:
        done += f"\n{size(merged.fetched_bytes)} streamed"
    if merged.url:
        done += f"\nuploaded to {printable(merged.url)}"
    for model, files in merged.plan.lacking.items():
        done += f"\nnot in the output, files of {printable(model)}: {printable(', '.join(files))}"
    if not merged.distance:
        return done
    whole = merged.distance[0]
    return f"{done}\ndistance from the base: {whole.percent()} of its norm (for each layer: weightsmith.json)"


def _weights(plan: Plan) -> int:
    """The number of tensors of a plan; a calibrated weight is one."""
    from weightsmith.quantisation.calibration.weights import by_weight

    return len(by_weight(plan).steps)


def _to_json(merged: Merged) -> dict[str, Any]:
    from weightsmith.distance import to_json

    plan = merged.plan
    return {
        "out": str(merged.out),
        "url": merged.url,
        "method": plan.made.name,
        "tensors": _weights(plan),
        "resumed": merged.resumed,
        "bytes": sum(out.nbytes for step in plan.steps for out in step.outs),
        "files": [{"name": s.name, "bytes": s.nbytes} for s in plan.layout.shards],
        "read_bytes": merged.read_bytes,
        "written_bytes": merged.written_bytes,
        "fetched_bytes": merged.fetched_bytes,
        "seconds": round(merged.seconds, 3),
        "dropped": len(plan.dropped),
        "lacking": {model: list(files) for model, files in plan.lacking.items()},
        "distance_from_base": to_json(merged.distance),
        "warnings": [{"what": w.what, "where": w.where, "details": list(w.details), "fix": w.fix} for w in merged.warnings],
    }


def interrupted(out: str) -> str:
    """The message after Ctrl-C: where finished tensors are, and the command that resumes."""
    import glob
    import shlex

    from weightsmith.outputs.local.area import staging_folder
    from weightsmith.outputs.places import place_of

    # --no-resume on this run discarded an earlier one's work; on the next it would discard this one's.
    command = shlex.join(["weightsmith", *(a for a in sys.argv[1:] if a != "--no-resume")])
    place = place_of(out)
    if place.capabilities.publication == "requests":
        return f"Interrupted. Uploaded parts are kept at {out}\n  -> Resume with the same command: {command}"
    target = place.local
    folder = staging_folder(target)
    if not folder.exists():  # the result of another recipe, that this one uses, may be there
        pattern = f"{glob.escape(target.name)}.stage-*"
        folder = next((path for start in (".", "") for path in target.parent.glob(start + pattern)), folder)
    if not folder.exists():
        return "Interrupted. No unfinished work was left."
    return f"Interrupted. Finished tensors are kept in {folder}\n  -> Resume with the same command: {command}"
