"""Runs a prepared plan, after what must run before it; or computes from it, and writes nothing.

Results of other recipes that must be written, and plans that the plan follows from, are run first.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith._base.errors import NOTHING_WRITTEN, Finding, ParameterError, WeightsmithError
from weightsmith._engine.resources import processors
from weightsmith._execution.identity import work_identity
from weightsmith._execution.options import RunOptions, resources_of
from weightsmith._execution.output import check_options, check_output, sibling
from weightsmith._execution.progress import past_run, remember
from weightsmith._execution.report import Moved, distance_by_layer
from weightsmith._execution.run import (
    NO_CALLBACKS,
    Callbacks,
    Helpers,
    Merged,
    PlanRun,
    RunRequest,
    protected_paths,
    reports_of,
    run_plan,
)
from weightsmith._features.any_recipe import assemble_request, replan
from weightsmith._outputs.local import remove_checkpoint
from weightsmith._outputs.manifest import read_manifest
from weightsmith._outputs.places import remove_published, verify
from weightsmith._planning.planner.loading import Check
from weightsmith._planning.planner.prepared import Prepared, download, make_readable, missing_files, stream
from weightsmith._planning.planner.tensor_data import check_copies
from weightsmith._plans import Product, Step

if TYPE_CHECKING:
    from weightsmith._engine.local import Outcome, Progress
    from weightsmith._engine.results import JobMemory
    from weightsmith.abc.product import ProductReport


STAGE = "stage"
"""Key of the manifest: whether a result was written only for another recipe."""


@contextmanager
def stages_written(
    prepared: Prepared, request: RunRequest, helpers: Helpers | None = None
) -> Iterator[tuple[Prepared, list[Merged]]]:
    """Write the results of other recipes that must be written, or all that are to be kept: the plan that reads them, and they.

    Each is a run of its own, which resumes; its folder remains until the output is published. One that an earlier run has
    finished, from the same plan and the same files, is verified and used again.
    """
    out, options = request.out, request.options
    place = check_options(out, options)
    stages = list({stage.path: stage for stage in prepared.stages if stage.why or options.keep_stages}.values())
    if not stages:
        yield prepared, []
        return
    if prepared.request is None or any(stage.request is None for stage in stages):
        raise ParameterError("a plan that was made before has no results of stages to keep", fix="merge the recipe itself")
    if helpers is not None and place.publication != "rename":
        what = f"the result of {stages[0].label} must be written first, to a folder that other machines do not see"
        fix = "merge it alone into the bucket, and name its address in the recipe; or leave --ray out"
        raise ParameterError(what, where="--ray", fix=fix, state=NOTHING_WRITTEN)
    check_output(out, prepared.plan, options, protected_paths(prepared))
    make_readable(prepared.inputs, streamed=options.stream)
    check_copies(prepared)
    written: dict[str, Path] = {}
    results: list[Merged] = []
    try:
        for stage in stages:
            assert stage.request is not None
            with assemble_request(stage.request, written).finish() as stage_plan:
                folder = stage_folder(out, stage.path)
                results.append(_stage(stage_plan, folder, request, helpers))
            written[stage.path] = folder
        with replan(prepared, written) as last:
            yield last, results
    except WeightsmithError as error:
        if written and error.state == NOTHING_WRITTEN:
            folders = " and ".join(map(str, written.values()))
            error.state = f"Nothing was published. Results of other recipes are kept in {folders}, and used by the next run."
        raise


def without_stages(stages: Sequence[Merged]) -> list[Finding]:
    """Remove results that were written only to be read; a warning for each that stays."""
    warnings = []
    for stage in stages:
        folder = Path(str(stage.out))  # of a local output, always
        try:
            if read_manifest(folder).data.get(STAGE) is True:  # one of an earlier run may be there to be kept
                remove_checkpoint(folder)
        except WeightsmithError as error:
            warnings.append(
                Finding(f"not removed: {error.finding.what}", str(stage.out), error.finding.details, "remove it yourself")
            )
    return warnings


def _stage(prepared: Prepared, folder: Path, request: RunRequest, helpers: Helpers | None) -> Merged:
    """Write the result of one recipe for others, unless it is there."""
    began, plan = time.monotonic(), prepared.plan
    marks = {STAGE: not request.options.keep_stages}
    options = replace(request.options, push=None, commit_message=None)
    callbacks = replace(request.callbacks, evaluating=None)
    with suppress(WeightsmithError):  # not there, or damaged: it is made
        manifest = read_manifest(folder)
        if manifest.data.get(STAGE) is True:
            options = replace(options, overwrite=True)
        if manifest.plan == work_identity(plan, prepared.inputs, options.device):
            verify(folder, threads=options.threads or processors(), progress=callbacks.rechecking)
            remove_published(folder)
            return Merged(folder, plan, len(plan.steps), 0, 0, time.monotonic() - began, (), plan.warnings)
    return run_plan(PlanRun(prepared, RunRequest(folder, options, callbacks, began), manifest=marks, helpers=helpers))


def stage_folder(out: str | os.PathLike[str], path: str) -> Path:
    """Where the result of another recipe is written for an output. path: `Stage.path`.

    >>> stage_folder("out", "first").name, stage_folder("out", "a/b").name
    ('out.stage-first', 'out.stage-a_b-c14cdd')
    """
    name = re.sub(r"[^\w.-]", "_", path)[:80]
    if name != path:
        name += f"-{hashlib.sha256(path.encode()).hexdigest()[:6]}"
    return sibling(out, f".stage-{name}")


def check_computable(prepared: Prepared) -> None:
    """Raise ParameterError if a result must be written before the plan can be run."""
    for stage in prepared.stages:
        if stage.why:
            what = f"the result of {stage.label} must be written first: {stage.why}"
            fix = "run weightsmith merge (weightsmith.merge), which does that; or merge it alone, and name its folder"
            raise ParameterError(what, fix=fix, state=NOTHING_WRITTEN)


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
    warnings = list[Finding]()
    with ExitStack() as stack:
        check = stack.enter_context(Check(prepared.loading, prepared.source))
        if options.ray is not None or prepared.plan.then is not None or prepared.stages or missing_files(prepared.inputs):
            check.wait()
        ready, stages = stack.enter_context(stages_written(prepared, request, helpers))
        run = PlanRun(ready, request, helpers=helpers, check=check)
        if ready.plan.then is not None:
            from weightsmith._execution.second_plans import second_run

            run = stack.enter_context(second_run(run, warnings))
        merged = run_plan(run)
    warnings += [finding for stage in stages for finding in stage.warnings[len(stage.plan.warnings) :]]
    warnings += [] if options.keep_stages else without_stages(stages)
    kept = tuple(Path(str(stage.out)) for stage in stages) if options.keep_stages else ()
    if options.ray is None and not stages and not merged.resumed and merged.plan is prepared.plan:
        remember(past_run(merged.plan, options, merged.read_bytes + merged.written_bytes, merged.seconds))
    return replace(merged, warnings=(*merged.warnings, *warnings), stages=kept)


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
    resources = resources_of(prepared, options)
    return run(prepared.plan, prepared.inputs, DiscardedOutput(), resources, workload, progress=progress)
