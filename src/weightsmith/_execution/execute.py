"""Runs a prepared plan, whole or in part, after what must run before it; or computes from it, and writes nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from weightsmith._base.errors import Finding, ParameterError
from weightsmith._execution.distance import Moved, distance_by_layer
from weightsmith._execution.history import past_run, remember
from weightsmith._execution.options import RunOptions, resources_of
from weightsmith._execution.output import check_options
from weightsmith._execution.run import (
    NO_CALLBACKS,
    Callbacks,
    Helped,
    Helpers,
    Merged,
    Run,
    RunRequest,
    finished_steps,
    kept_products,
    reports_of,
    run_plan,
    staged,
)
from weightsmith._execution.stages import check_computable, measured, stages_written, without_stages
from weightsmith._planning.planner.loading import Check
from weightsmith._planning.planner.prepared import Prepared, download, missing_files, stream
from weightsmith._plans import Product, Step
from weightsmith._plans.parts import label, part_of

if TYPE_CHECKING:
    from weightsmith._engine.local import Outcome, Progress
    from weightsmith._engine.memory import JobMemory
    from weightsmith._engine.products import ProductReport
    from weightsmith.abc.output import Built

PRODUCTS_LABEL = "products-alone"
"""Of the process that computes the products of all parts; `lock-products` is held by any process that computes some."""


def execute(
    prepared: Prepared,
    out: str | os.PathLike[str],
    options: RunOptions,
    callbacks: Callbacks = NO_CALLBACKS,
    *,
    began: float | None = None,
    helpers: Helpers | None = None,
    memory: JobMemory | None = None,
) -> Merged:
    """Run a prepared plan and publish its output; see `merge`.

    began    time.monotonic() at the start of the timed work
    helpers  has other processes do the parts of each plan that is run
    memory   of the jobs of merges of the same inputs in this process; None: there were none

    If another plan follows from the products, this process computes them first, in a staging folder of their own, which remains
    until the output is published. So are the results of other recipes that cannot be computed when they are read.

    Whether transformers could load the output is asked meanwhile; before anything else, if there is a download or more than
    one run to spare.
    """
    request = RunRequest(out, options, callbacks, time.monotonic() if began is None else began, memory)
    found = list[Finding]()
    with ExitStack() as stack:
        check = stack.enter_context(Check(prepared.loading, prepared.source))
        if helpers is not None or prepared.plan.then is not None or prepared.stages or missing_files(prepared.inputs):
            check.wait()
        ready, stages = stack.enter_context(stages_written(prepared, request, helpers))
        run = Run(ready, request, helpers=helpers, check=check)
        if ready.plan.then is not None:
            run = stack.enter_context(measured(run, found))
        merged = run_plan(run)
    found += [finding for stage in stages for finding in stage.warnings[len(stage.plan.warnings) :]]
    found += [] if options.keep_stages else without_stages(stages)
    kept = tuple(Path(str(stage.out)) for stage in stages) if options.keep_stages else ()
    if helpers is None and not stages and not merged.resumed and merged.plan is prepared.plan:
        remember(past_run(merged.plan, options, merged.read_bytes + merged.written_bytes, merged.seconds))
    return replace(merged, warnings=(*merged.warnings, *found), stages=kept)


@dataclass(frozen=True, slots=True)
class PartDone:
    """The finished work of a process that did a part, and its cost."""

    built: Built
    helped: Helped


def execute_part(
    prepared: Prepared,
    out: str | os.PathLike[str],
    part: tuple[int, int],
    options: RunOptions,
    callbacks: Callbacks = NO_CALLBACKS,
    *,
    helping: str = "",
    products: Mapping[str, str] = MappingProxyType({}),
) -> PartDone:
    """Run one part of a prepared plan, in parallel with other processes; see `run`.

    helping   label of the part if it is done for a driver: not `label(part)` for a second process that does the same part
    products  checksums of those that the driver has
    """
    from weightsmith._engine.results import Results

    _check_part(prepared, out, options, bool(helping))
    plan = prepared.plan
    steps = part_of(plan, *part)
    request = RunRequest(out, options, callbacks)
    with staged(prepared, request, helping or label(part), steps, products if helping else None) as (staging, run):
        if needed := plan.products_for(steps):
            with staging.only_process(callbacks.waiting):  # other processes reuse these products
                results = kept_products(plan, staging, wanted=needed)
                run(steps=(), products=needed, results=results)
        else:
            results = Results(plan)
        done = finished_steps(plan, staging, results, options.allow_nonfinite, steps)
        outcome = run(steps=steps, products=(), skip=done, results=results)
        for model in prepared.inputs:
            model.check_unchanged()
        helped = Helped(len(done), outcome.read_bytes, outcome.written_bytes, outcome.fetched_bytes)
        return PartDone(staging.hand_over(), helped)


def execute_products(
    prepared: Prepared, out: str | os.PathLike[str], options: RunOptions, products: Mapping[str, str]
) -> PartDone:
    """Compute the products of a prepared plan for a driver, before other processes do its parts."""
    _check_part(prepared, out, options, helping=True)
    with staged(prepared, RunRequest(out, options), PRODUCTS_LABEL, (), products) as (staging, run):
        with staging.only_process():
            outcome = run(steps=(), results=kept_products(prepared.plan, staging))
        for model in prepared.inputs:
            model.check_unchanged()
        helped = Helped(read_bytes=outcome.read_bytes, fetched_bytes=outcome.fetched_bytes)
        return PartDone(staging.hand_over(), helped)


def _check_part(prepared: Prepared, out: str | os.PathLike[str], options: RunOptions, helping: bool) -> None:
    check_options(out, options, part=not helping)
    if not options.resume:
        fix = "run once without a part and with --no-resume (resume=False), or remove the staging folder"
        raise ParameterError("a part cannot discard the work of other parts", fix=fix)
    if options.ray is not None:
        raise ParameterError("a cluster does all parts", where="ray", fix="leave out the part")
    if prepared.plan.then is not None:
        raise ParameterError("a plan that begins with a measurement has no parts", fix="run the whole plan")
    check_computable(prepared)


# ---- computations that write nothing


def make_product(
    prepared: Prepared, name: str, options: RunOptions, progress: Callable[[Progress], None] | None = None
) -> ProductReport | None:
    """Compute one product of a plan and its dependencies in memory. Returns its report; writes nothing."""
    products = prepared.plan.products_for((), {name})
    return reports_of(products, _run_unwritten(prepared, (), products, options, progress).results).get(name)


def measure_distance(prepared: Prepared, options: RunOptions) -> tuple[Moved, ...]:
    """The distance of the merge from its base: in total, then per layer; () without a base.

    Computes like `execute`, without writing anything. Cost: that of the merge without writing.
    """
    plan = prepared.plan
    steps = [step for step in plan.steps if any(leaf.base and leaf.merges for leaf in step.leaves)]
    outcome = _run_unwritten(prepared, steps, plan.products_for(steps), options)
    return distance_by_layer(plan, outcome.distances)


def _run_unwritten(
    prepared: Prepared,
    steps: Sequence[Step],
    products: Sequence[Product],
    options: RunOptions,
    progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    from weightsmith._engine.local import DiscardedOutput, run
    from weightsmith._engine.resources import Workload

    check_computable(prepared)
    if options.stream:
        stream(prepared.inputs)
    download(prepared.inputs)
    folders = [model.folder for model in prepared.inputs]
    workload = Workload(steps=steps, products=products, folders=folders, release=bool(steps))
    resources = resources_of(prepared.plan, options)
    return run(prepared.plan, prepared.inputs, DiscardedOutput(), resources, workload, progress=progress)
