"""Results of other recipes that a plan reads: those that cannot be computed when they are read are written first."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from weightsmith._base.errors import NOTHING_WRITTEN, Finding, ParameterError, WeightsmithError
from weightsmith._base.options import RunOptions
from weightsmith._execution.identity import work_identity
from weightsmith._execution.output import check_options, check_output, sibling
from weightsmith._execution.run import Callbacks, Following, Helpers, Merged, protected_paths, resources_of, run_plan
from weightsmith._planning.planner import Prepared

STAGE = "stage"
"""Key of the manifest: whether a result was written only for another recipe."""


@contextmanager
def stages_written(
    prepared: Prepared,
    out: str | os.PathLike[str],
    options: RunOptions,
    callbacks: Callbacks,
    helpers: Helpers | None = None,
) -> Iterator[tuple[Prepared, list[Merged]]]:
    """Write the results of other recipes that must be written, or all that are to be kept: the plan that reads them, and they.

    Each is a run of its own, which resumes; its folder remains until the output is published. One that an earlier run has
    finished, from the same plan and the same files, is verified and used again.
    """
    place = check_options(out, options)
    wanted = list({stage.path: stage for stage in prepared.stages if stage.why or options.keep_stages}.values())
    if not wanted:
        yield prepared, []
        return
    if prepared.reopen is None or any(stage.reopen is None for stage in wanted):
        raise ParameterError("a plan that was made before has no results of stages to keep", fix="merge the recipe itself")
    if helpers is not None and place.capabilities.publication != "rename":
        raise ParameterError(
            f"the result of {wanted[0].label} must be written first, to a folder that other machines do not see",
            where="--ray",
            fix="merge it alone into the bucket, and name its address in the recipe; or leave --ray out",
            state=NOTHING_WRITTEN,
        )
    check_output(out, prepared.plan, options, protected_paths(prepared))
    written: dict[str, Path] = {}
    made: list[Merged] = []
    for stage in wanted:
        assert stage.reopen is not None
        with stage.reopen(written) as own:
            folder = stage_folder(out, stage.path)
            made.append(_stage(own, folder, options, callbacks, helpers))
        written[stage.path] = folder
    with prepared.reopen(written) as last:
        yield last, made


def without_stages(stages: Sequence[Merged]) -> list[Finding]:
    """Remove results that were written only to be read; a warning for each that stays."""
    from weightsmith._outputs.local.target import remove_checkpoint
    from weightsmith._outputs.manifest import read_manifest

    found = []
    for stage in stages:
        folder = Path(str(stage.out))  # of a local output, always
        try:
            if read_manifest(folder).data.get(STAGE) is True:  # one of an earlier run may be there to be kept
                remove_checkpoint(folder)
        except WeightsmithError as error:
            found.append(
                Finding(f"not removed: {error.finding.what}", str(stage.out), error.finding.details, "remove it yourself")
            )
    return found


def _stage(prepared: Prepared, folder: Path, options: RunOptions, callbacks: Callbacks, helpers: Helpers | None) -> Merged:
    """Write the result of one recipe for others, unless it is there."""
    from weightsmith._outputs.manifest import read_manifest
    from weightsmith._outputs.verify import verify

    began, plan = time.monotonic(), prepared.plan
    more = {STAGE: not options.keep_stages}
    options = replace(options, push=None, commit_message=None)
    callbacks = replace(callbacks, evaluating=None)
    with suppress(WeightsmithError):  # not there, or damaged: it is made
        found = read_manifest(folder)
        if found.data.get(STAGE) is True:
            options = replace(options, overwrite=True)
        if found.plan == work_identity(plan, prepared.inputs, options.device):
            verify(folder, threads=resources_of(plan, options).workers, progress=callbacks.rechecking)
            return Merged(folder, plan, len(plan.steps), 0, 0, time.monotonic() - began, (), plan.warnings)
    return run_plan(Following(prepared), folder, options, callbacks, began, more, helpers)


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
            raise ParameterError(
                f"the result of {stage.label} must be written first: {stage.why}",
                fix="run weightsmith merge (weightsmith.merge), which does that; or merge it alone, and name its folder",
                state=NOTHING_WRITTEN,
            )
