"""`weightsmith merge`."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weightsmith.cli import options
from weightsmith.cli.failures import failures
from weightsmith.cli.mergekit_flags import answer
from weightsmith.cli.progress import Meter, Reading, meter, no_bars_in_logs
from weightsmith.cli.text import count, duration, printable, result, size, warn

if TYPE_CHECKING:
    from weightsmith.api import Merged
    from weightsmith.engine.local import Progress


def merge(
    context: typer.Context,
    recipe: options.Recipe,
    out: options.Out,
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
    """Merge checkpoints as RECIPE says, into the new folder OUT.

    OUT appears when all of it is finished. Interrupted work is kept beside it, and the same command goes on with it.
    """
    began = time.monotonic()
    with failures(interrupted=lambda: interrupted(out)), ExitStack() as stack:
        no_bars_in_logs(quiet=quiet)
        answer(context, quiet=quiet)
        from weightsmith.api import execute
        from weightsmith.planner import prepare

        prepared = stack.enter_context(
            prepare(
                recipe,
                out_dtype=out_dtype,
                max_shard_bytes=max_shard_size,
                seed=seed,
                lenient=mergekit_lenient,
                allow_code=allow_code,
            )
        )
        for finding in prepared.plan.warnings:
            warn(finding)
        stack.enter_context(failures(merging=True, interrupted=lambda: interrupted(out)))
        shown = stack.enter_context(meter(quiet=quiet))
        merged = execute(
            prepared,
            out,
            threads=threads,
            max_memory_bytes=max_memory,
            overwrite=overwrite,
            resume=resume,
            fsync=fsync,
            card=card,
            allow_nonfinite=allow_nonfinite,
            progress=lambda p: show_progress(shown, p, "merging"),
            rechecking=lambda done, total: shown.show(Reading("checking what is there", done, total, done)),
            began=began,
        )
        shown.close()
        report(merged, quiet=quiet, as_json=as_json)


def report(merged: Merged, *, quiet: bool, as_json: bool) -> None:
    """What was found in the data, and the result."""
    for finding in merged.warnings[len(merged.plan.warnings) :]:
        warn(finding)
    if as_json:
        result(json.dumps(_to_json(merged), ensure_ascii=False))
    elif not quiet:
        result(_summary(merged))


def show_progress(shown: Meter, progress: Progress, doing: str) -> None:
    """One line of the meter. doing: what the tensors are made by."""
    done, total = progress.written_bytes, progress.total_bytes
    label = doing if progress.tensors < progress.total_tensors else "saving to disk"
    detail = f"{progress.tensors:,} of {count(progress.total_tensors, 'tensor')}"
    shown.show(Reading(label, done, total, progress.read_bytes + done, detail))


def _summary(merged: Merged) -> str:
    tensors = count(len(merged.plan.steps), "tensor")
    nbytes = sum(s.out.nbytes for s in merged.plan.steps)
    moved = merged.read_bytes + merged.written_bytes
    resumed = f", {merged.resumed:,} of them by an earlier run" if merged.resumed else ""
    speed = f" ({size(moved / merged.seconds)}/s read and written)" if merged.seconds > 0 else ""
    done = f"{printable(str(merged.out))}: {tensors}{resumed}, {size(nbytes)} in {duration(merged.seconds)}{speed}"
    if not merged.distance:
        return done
    whole = merged.distance[0]
    return f"{done}\n‖merged - base‖ is {whole.delta:.4g}, {whole.share:.2%} of the base; the manifest has it by layer"


def _to_json(merged: Merged) -> dict[str, Any]:
    from weightsmith.distance import to_json

    plan = merged.plan
    return {
        "out": str(merged.out),
        "method": plan.method,
        "tensors": len(plan.steps),
        "resumed": merged.resumed,
        "bytes": sum(s.out.nbytes for s in plan.steps),
        "files": [{"name": s.name, "bytes": s.nbytes} for s in plan.layout.shards],
        "read_bytes": merged.read_bytes,
        "written_bytes": merged.written_bytes,
        "seconds": round(merged.seconds, 3),
        "dropped": len(plan.dropped),
        "distance_from_base": to_json(merged.distance),
        "warnings": [{"what": w.what, "where": w.where, "details": list(w.details), "fix": w.fix} for w in merged.warnings],
    }


def interrupted(out: str) -> str:
    """What to say after Ctrl-C: what is kept, and the command that goes on with it."""
    import shlex

    from weightsmith.store.staging import staging_folder

    folder = staging_folder(Path(os.path.abspath(out)))  # noqa: PTH100  as the store does: links are not followed
    if not folder.exists():
        return "Interrupted. No unfinished work was left."
    # --no-resume on this run discarded an earlier one's work; on the next it would discard this one's.
    command = shlex.join(["weightsmith", *(a for a in sys.argv[1:] if a != "--no-resume")])
    return f"Interrupted. Finished tensors are kept in {folder}\n  -> go on with the same command: {command}"
