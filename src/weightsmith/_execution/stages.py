"""What is run before a plan: the results of other recipes that must be written first, and plans that the plan follows from."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import (
    NOTHING_WRITTEN,
    Finding,
    OutputExists,
    ParameterError,
    PlanError,
    StoreError,
    WeightsmithError,
)
from weightsmith._execution.identity import work_identity
from weightsmith._execution.options import resources_of
from weightsmith._execution.output import check_options, check_output, sibling
from weightsmith._execution.run import (
    MEASUREMENT,
    Helpers,
    Merged,
    Run,
    RunRequest,
    kept_products,
    protected_paths,
    run_plan,
    staged,
)
from weightsmith._features.any_recipe import assemble_request, replan
from weightsmith._outputs.area import left_behind, staging_folder
from weightsmith._outputs.journal import read_journal
from weightsmith._outputs.local import remove_checkpoint
from weightsmith._outputs.locks import JOURNAL
from weightsmith._outputs.manifest import read_manifest
from weightsmith._outputs.places import remove_published, remove_work, verify
from weightsmith._planning.follow_ups import follow_up_kind
from weightsmith._planning.planner import Prepared
from weightsmith._planning.planner.loading import Began, Beside
from weightsmith._plans import PlanDraft, Provenance

if TYPE_CHECKING:
    pass

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
    written: dict[str, Path] = {}
    results: list[Merged] = []
    for stage in stages:
        assert stage.request is not None
        with assemble_request(stage.request, written).finish() as stage_plan:
            folder = stage_folder(out, stage.path)
            results.append(_stage(stage_plan, folder, request, helpers))
        written[stage.path] = folder
    with replan(prepared, written) as last:
        yield last, results


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
            verify(folder, threads=resources_of(plan, options).workers, progress=callbacks.rechecking)
            remove_published(folder)
            return Merged(folder, plan, len(plan.steps), 0, 0, time.monotonic() - began, (), plan.warnings)
    return run_plan(Run(prepared, RunRequest(folder, options, callbacks, began), manifest=marks, helpers=helpers))


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


# ---- plans that follow from the products of another one: a calibration, a decomposition


@contextmanager
def measured(run: Run, warnings: list[Finding]) -> Iterator[Run]:
    """Compute the products of a plan from which another one follows: the run of that one.

    warnings  gets those of what could not be removed at the end, when the output is published
    """
    from weightsmith._execution.targets import check_target, search_target

    prepared, request, kind = run.prepared, run.request, follow_up_kind(run.prepared)
    place, folder = check_options(request.out, request.options), sibling(request.out, ".measurement")
    target = check_target(prepared, kind.target(prepared), request.options)
    try:
        check_output(request.out, prepared.plan, request.options, protected_paths(prepared))
    except OutputExists:
        _remove_used(folder, place.local)
        raise
    draft = PlanDraft.of(prepared.plan)
    draft.provenance, draft.steps, draft.then = Provenance("measurement"), [], None  # it serves any number of bits, any mixture
    plan = draft.finish()
    with (
        _asking(kind.question(prepared)) as answer,
        staged(prepared.with_plan(plan), replace(request, out=folder)) as (staging, engine),
    ):
        results = engine(results=kept_products(plan, staging)).results
        arrays = {product.name: results.arrays(product.name) for product in plan.products if not product.transient}
        try:
            if target is None:
                second = kind.follow(prepared, arrays, answer(), None)
                following = replace(
                    run, prepared=second.prepared, arrays=second.arrays, files=second.files, reports=second.reports
                )
            else:
                following = search_target(target, run, kind, arrays, staging)
        except PlanError as error:
            if error.state == NOTHING_WRITTEN:
                staging.discard()
            raise
        yield replace(following, manifest={**following.manifest, MEASUREMENT: staging.plan_hash})
        try:
            staging.discard()
        except (OSError, StoreError) as error:
            warnings.append(left_behind(error, staging.folder))


def _remove_used(measurement: Path, out: Path) -> None:
    """Remove the measurement of a run that died after its output, a local folder, was published."""
    with suppress(WeightsmithError, OSError):
        folder, used = staging_folder(measurement), read_manifest(out).data.get(MEASUREMENT)
        entries = read_journal(folder / JOURNAL)
        if used is not None and folder.is_dir() and (entries.lines == 0 or entries.plan == used):  # the journal is removed last
            remove_work(measurement)


@contextmanager
def _asking(question: Callable[[Began], Any] | None) -> Iterator[Callable[[], Any]]:
    """Ask another process while products are computed. None: there is nothing to ask."""
    if question is None:
        yield lambda: None
        return
    with Beside(question) as asked:
        yield asked.answer
