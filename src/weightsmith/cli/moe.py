"""`weightsmith moe`."""

from __future__ import annotations

import time
from contextlib import ExitStack

from weightsmith.cli import options
from weightsmith.cli.failures import failures
from weightsmith.cli.merge import interrupted, report, show_progress
from weightsmith.cli.progress import Reading, meter, no_bars_in_logs
from weightsmith.cli.text import warn


def moe(
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
    """Make a mixture of experts as RECIPE says, in the new folder OUT.

    OUT appears when all of it is finished. Interrupted work is kept beside it, and the same command goes on with it.
    """
    began = time.monotonic()
    with failures(interrupted=lambda: interrupted(out)), ExitStack() as stack:
        no_bars_in_logs(quiet=quiet)
        from weightsmith.api import execute
        from weightsmith.mixture import prepare_moe

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
        stack.enter_context(failures(merging=True, interrupted=lambda: interrupted(out)))
        prepared.fill()
        shown = stack.enter_context(meter(quiet=quiet))
        merged = execute(
            prepared.prepared,
            out,
            threads=threads,
            max_memory_bytes=max_memory,
            overwrite=overwrite,
            resume=resume,
            fsync=fsync,
            card=card,
            allow_nonfinite=allow_nonfinite,
            progress=lambda p: show_progress(shown, p, "copying"),
            rechecking=lambda done, total: shown.show(Reading("checking what is there", done, total, done)),
            began=began,
        )
        shown.close()
        report(merged, quiet=quiet, as_json=as_json)
