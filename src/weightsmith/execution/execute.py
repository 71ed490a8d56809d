"""Runs a prepared plan, whole or in part: first what it needs to have been run before."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from weightsmith.errors import ParameterError
from weightsmith.execution.measured import measured
from weightsmith.execution.run import (
    NO_CALLBACKS,
    Callbacks,
    Following,
    Merged,
    finished_steps,
    kept_products,
    run_plan,
    staged,
)
from weightsmith.execution.stages import check_computable, stages_written, without_stages
from weightsmith.options import RunOptions
from weightsmith.planner.build import Prepared
from weightsmith.plans.parts import part_of


def execute(
    prepared: Prepared,
    out: str | os.PathLike[str],
    options: RunOptions,
    callbacks: Callbacks = NO_CALLBACKS,
    *,
    began: float | None = None,
) -> Merged:
    """Run a prepared plan and publish its output; see `merge`. began: time.monotonic() at the start of the timed work.

    If another plan follows from the products, these are computed first, in a staging folder of their own, which remains until
    the output is published. So are the results of other recipes that cannot be computed when they are read.
    """
    began = time.monotonic() if began is None else began
    with stages_written(prepared, out, options, callbacks) as (ready, stages):
        if ready.plan.then is not None:
            with measured(ready, out, options, callbacks) as following:
                merged = run_plan(following, out, options, callbacks, began)
        else:
            merged = run_plan(Following(ready), out, options, callbacks, began)
    found = [finding for stage in stages for finding in stage.warnings[len(stage.plan.warnings) :]]
    found += [] if options.keep_stages else without_stages(stages)
    kept = tuple(stage.out for stage in stages if isinstance(stage.out, Path)) if options.keep_stages else ()
    return replace(merged, warnings=(*merged.warnings, *found), stages=kept)


def execute_part(
    prepared: Prepared,
    out: str | os.PathLike[str],
    part: tuple[int, int],
    options: RunOptions,
    callbacks: Callbacks = NO_CALLBACKS,
) -> None:
    """Run one part of a prepared plan, in parallel with other processes; see `run`."""
    if not options.resume:
        fix = "run once without a part and with --no-resume (resume=False), or remove the staging folder"
        raise ParameterError("a part cannot discard the work of other parts", fix=fix)
    plan = prepared.plan
    if plan.then is not None:
        raise ParameterError("a plan that begins with a measurement has no parts", fix="run the whole plan")
    check_computable(prepared)
    steps = part_of(plan, *part)
    with staged(prepared, out, options, callbacks, part, steps) as (staging, run):
        with staging.only_process(callbacks.waiting):  # other processes reuse these products
            results = kept_products(plan, staging)
            if products := plan.products_for(steps):
                run(steps=(), products=products, results=results)
        run(steps=steps, products=(), skip=finished_steps(plan, staging, results, options.allow_nonfinite), results=results)
        for model in prepared.inputs:
            model.check_unchanged()
