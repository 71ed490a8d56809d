"""Runs one plan: its products and steps, into a staging folder, which is published at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from weightsmith._base.errors import NOTHING_WRITTEN, Finding, PlanError, WeightsmithError
from weightsmith._base.files import expand_user
from weightsmith._base.report.blocks import Report, Reported
from weightsmith._base.tensors import NamedTensors, TensorSpec
from weightsmith._base.text import duration, size
from weightsmith._base.torch_use import usable_device
from weightsmith._engine.resources import Workload
from weightsmith._execution.identity import facts, merges_on_device, work_identity
from weightsmith._execution.options import RunOptions, resources_of
from weightsmith._execution.output import (
    RECIPE_NAME,
    check_options,
    check_output,
    models_read,
    other_bytes,
    other_files,
    page_beside,
    provenance,
)
from weightsmith._execution.report import Moved, Squares, distance_by_layer, merge_report
from weightsmith._files.hf_folder import CARD_NAME
from weightsmith._models.checkpoint import Checkpoint, open_checkpoint
from weightsmith._outputs.locks import CONTENT
from weightsmith._outputs.places import place_of
from weightsmith._outputs.staging import Staging
from weightsmith._planning.planner.loading import Check
from weightsmith._planning.planner.prepared import Prepared, download, missing_files, stream
from weightsmith._planning.planner.tensor_data import check_copies
from weightsmith._plans import Plan, Product, Step
from weightsmith.abc.output import OutputSpec, Target
from weightsmith.abc.product import ProductReport

if TYPE_CHECKING:
    import numpy as np

    from weightsmith._engine.local import Outcome, Progress
    from weightsmith._engine.resources import Resources
    from weightsmith._engine.results import JobMemory, Results
    from weightsmith._planning.follow_ups import SecondPlan
    from weightsmith.abc.output import Finished, Output
    from weightsmith.abc.product import Arrays


@dataclass(frozen=True)
class Merged(NamedTensors, Reported):
    """The result of `merge` and of every other function that writes a model.

    Use it in place of the model's path: `weightsmith.diff("base", merged)`. Use it like a read-only dict of tensors:
    `merged["lm_head.weight"]`, `name in merged`, `for name in merged`, `len(merged)`. The output is opened when you first ask
    for a name, and a tensor is read when you ask for it.

    out            the finished folder, or its address in a bucket or on the Hub
    plan           the plan that was run
    resumed        number of tensors that an interrupted run had finished
    read_bytes, written_bytes   of tensor data, in this run
    fetched_bytes  of tensor data over the network, if models were streamed
    copied_bytes   of the tensor data that was read: from local copies of inputs
    seconds        of this run, including planning
    distance       distance from the base: in total, then per layer; () without a base
    warnings       the plan's and those found in the data
    reports        reports of products, by name: where a router routes the prompts
    url            of the model's page on the Hub, or ""
    stages         folders with the results of other recipes, if they are kept
    distances      tensor → squared norms of its delta and of its base, for those that have one
    """

    out: Path | Target
    plan: Plan
    resumed: int
    read_bytes: int
    written_bytes: int
    seconds: float
    distance: tuple[Moved, ...]
    warnings: tuple[Finding, ...]
    reports: Mapping[str, ProductReport] = field(default_factory=dict)
    url: str = ""
    stages: tuple[Path, ...] = ()
    fetched_bytes: int = 0
    copied_bytes: int = 0
    distances: Squares = field(default_factory=dict)

    def __fspath__(self) -> str:
        return os.fspath(self.out)

    def __repr__(self) -> str:
        return f"<Merged {self.out}: {len(self.plan.steps):,} tensors, {size(self.nbytes)} in {duration(self.seconds)}>"

    def report(self) -> Report:
        name = PurePosixPath(str(self.out)).name
        return merge_report(self.plan, name, self.distances, self.distance, self.reports.values(), self.warnings)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the output."""
        return self.plan.nbytes

    def open(self) -> Checkpoint:
        """The output as a checkpoint of its own, for a `with` statement.

        Raises Unsupported for the result of `extract_lora`: an adapter is not a model.
        """
        return open_checkpoint(self)

    @cached_property
    def _opened(self) -> Checkpoint:
        return self.open()

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name → dtype and shape, in model order."""
        return self._opened.specs

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor, or some of its rows. Raises CheckpointError if the output was replaced since it was opened."""
        return self._opened.read(name, rows)


class Evaluated(ProductReport, Protocol):
    """The numbers of an evaluation of the output."""

    @property
    def divergence(self) -> float | None:
        """From the model that it was made from, in nats per token; None if their tokens differ."""

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""


EVALUATION = "evaluation"
"""Key of the manifest, and name of the report."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Callbacks during a run, from the calling thread.

    progress    called about ten times per second
    rechecking  called with (bytes done, total bytes) while the finished tensors of an interrupted run are verified
    waiting     called when another process computes the products that this part of a plan needs
    uploading   called with (bytes done, total bytes) while the last weight files are uploaded to the hub
    evaluating  makes a report of the output before it is published, from its plan, a folder with all but the card, and the plan
                of what it is compared with; None: the model that it was made from
    """

    progress: Callable[[Progress], None] | None = None
    rechecking: Callable[[int, int], None] | None = None
    waiting: Callable[[], None] | None = None
    uploading: Callable[[int, int], None] | None = None
    evaluating: Callable[[Plan, Path, Prepared | None], Evaluated] | None = None


NO_CALLBACKS = Callbacks()


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The request for a run: its output, options and callbacks.

    began   `time.monotonic()` at its start
    memory  of the jobs of merges of the same inputs in this process; None: there were none
    """

    out: str | os.PathLike[str]
    options: RunOptions
    callbacks: Callbacks = NO_CALLBACKS
    began: float = field(default_factory=time.monotonic)
    memory: JobMemory | None = None


OWN_TEXTS = "own_texts"
"""Key of the manifest: texts that models wrote for the run, with the sha256 of their tokens."""

MEASUREMENT = "measurement"
"""Key of the manifest: the identity of the measurement that the output follows from."""


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Work for a run, in this process or in others. resumed: steps that an earlier run had finished; bytes as in `Merged`."""

    resumed: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    fetched_bytes: int = 0
    copied_bytes: int = 0
    warnings: tuple[Finding, ...] = ()

    @classmethod
    def of(cls, outcome: Outcome, resumed: int = 0) -> WorkDone:
        """The work of one run of the engine. resumed: number of its steps that an earlier run had finished."""
        return cls(resumed, outcome.read_bytes, outcome.written_bytes, outcome.fetched_bytes, outcome.copied_bytes)

    def __add__(self, other: WorkDone) -> WorkDone:
        return WorkDone(*(getattr(self, field_.name) + getattr(other, field_.name) for field_ in fields(self)))


class Helpers(Protocol):
    """Other processes, which do the parts of a plan."""

    def __call__(self, prepared: Prepared, staging: Staging, request: RunRequest) -> WorkDone:
        """Have all parts done, in the staging folder that is open here. What remains undone, the caller does."""


@dataclass(frozen=True, slots=True)
class PlanRun:
    """A plan to run: where to and how, and what was computed or found before it.

    arrays    of products that the plan that it follows from has too, by name
    files     to add to the output
    reports   besides those of the products
    manifest  entries to add
    reference  plan of the model that an evaluation compares the output with; None: the model that it was made from
    helpers   other processes that do the parts; None: this one does all
    check     of the output: nothing is published before it is done, and if it fails, the run ends at once
    """

    prepared: Prepared
    request: RunRequest
    arrays: Mapping[str, Arrays] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    reports: Mapping[str, ProductReport] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    reference: Prepared | None = None
    helpers: Helpers | None = None
    check: Check = field(default_factory=lambda: Check(None))

    @property
    def plan(self) -> Plan:
        return self.prepared.plan

    def following(self, second: SecondPlan) -> PlanRun:
        """The run of the plan that follows from this one."""
        return replace(self, prepared=second.prepared, arrays=second.arrays, files=second.files, reports=second.reports)


def run_plan(run: PlanRun) -> Merged:
    """Run a plan and publish its output: compute, describe, publish. See `execute`."""
    options, callbacks = run.request.options, run.request.callbacks
    place = check_options(run.request.out, options)
    if options.push is not None:
        from weightsmith._outputs.hub import check_push, push

    hub = None if options.push is None else check_push(options.push)
    watched = _Watched(run.check, callbacks.progress)
    run = replace(run, request=replace(run.request, callbacks=replace(callbacks, progress=watched)))
    # With helpers, the process that does a part checks what an earlier run has finished of it.
    with staged(run.prepared, run.request, steps=None if run.helpers is None else ()) as opened:
        computed = _compute(run, opened, watched)
        described = _describe(run, opened.staging, computed, place.name, place.spec if hub is None else hub.address.spec)
        published, late = _publish(run, opened.staging, computed, described)
    outcome, reports = computed.outcome, described.reports
    work = computed.helped + WorkDone.of(outcome, computed.resumed if run.helpers is None else 0)
    if described.page is not None:
        page = merge_report(run.plan, place.name, outcome.distances, computed.distance, reports.values(), described.warnings)
        page.write(described.page)
    url = place.url
    if hub is not None:
        url = push(hub, place.local, public=options.public, message=options.commit_message or run.plan.provenance.title)
    return Merged(
        out=published,
        plan=run.plan,
        resumed=work.resumed,
        read_bytes=work.read_bytes,
        written_bytes=work.written_bytes,
        seconds=time.monotonic() - run.request.began,
        distance=computed.distance,
        warnings=(*described.warnings, *late),
        reports=reports,
        url=url,
        fetched_bytes=work.fetched_bytes,
        copied_bytes=work.copied_bytes,
        distances=outcome.distances,
    )


# ---- compute


@dataclass(frozen=True, slots=True)
class _Computed:
    """All tensors of an output, in its staging folder.

    resumed  number of steps that an earlier run had finished
    warnings of the check, and of the data
    """

    outcome: Outcome
    results: Results
    helped: WorkDone
    resumed: int
    distance: tuple[Moved, ...]
    warnings: tuple[Finding, ...]


def _compute(run: PlanRun, opened: StagedRun, watched: _Watched) -> _Computed:
    """Make all products and tensors, or take over what an earlier run or other processes have made."""
    from weightsmith._engine.tile_work import copied

    plan, staging, earlier, helped = run.plan, opened.staging, opened.staging.holds_work, WorkDone()
    try:
        if run.helpers is not None:
            for product in plan.products:
                if product.name in run.arrays:
                    staging.keep(product, run.arrays[product.name])
            helped = run.helpers(run.prepared, staging, run.request)
        results = kept_products(plan, staging, run.arrays)
        done = finished_steps(plan, staging, results, run.request.options.allow_nonfinite)
        outcome = opened.compute(Workload(skip=done, results=results, release=True))
        unknown = watched.wait()
    except WeightsmithError as error:
        _leave(error, run.check, staging, earlier=earlier)
        raise
    differing = [_disagreement(plan, step) for step in plan.steps if outcome.finished[step.out.name].differing]
    warnings = (*unknown, *staging.warnings, *helped.warnings, *differing, *copied(outcome.finished))
    distance = distance_by_layer(plan, outcome.distances)
    return _Computed(outcome, results, helped, len(done), distance, warnings)


def _leave(error: WeightsmithError, check: Check, staging: Staging, *, earlier: bool) -> None:
    """Discard what a run that failed has made, unless it can be resumed, and say so in the error. earlier: an earlier run's."""
    resumable = earlier or (not isinstance(error, PlanError) and bool(staging.products))
    if (error.product or error is check.error) and not resumable:  # what fails first leaves nothing behind
        staging.discard()
        error.state = NOTHING_WRITTEN
    elif error is check.error:
        error.state = "Nothing was published; what an earlier run has finished is kept."


class _Watched:
    """The progress of a run with a check beside it, which each call looks at first: if it has failed, the run ends."""

    def __init__(self, check: Check, progress: Callable[[Progress], None] | None) -> None:
        self._check, self._progress = check, progress
        self._last: Progress | None = None

    def __call__(self, reached: Progress) -> None:
        self._check.poll()
        self._last = reached
        if self._progress is not None:
            self._progress(reached)

    def wait(self) -> tuple[Finding, ...]:
        """The warnings of the check. The last progress is repeated meanwhile."""
        while not self._check.done(0.1):
            if self._last is not None:
                self(replace(self._last, checking=True))
        return self._check.wait()


# ---- describe


@dataclass(frozen=True, slots=True)
class _Described:
    """What is said of an output.

    warnings  the plan's, and those found since
    manifest  entries besides the provenance
    page      where a report is written outside the output
    """

    reports: Mapping[str, ProductReport]
    warnings: tuple[Finding, ...]
    manifest: Mapping[str, Any]
    page: str | None


def _describe(run: PlanRun, staging: Staging, computed: _Computed, name: str, repo: str) -> _Described:
    """Evaluate the output, and add its files besides the weights. name, repo: see `other_files`."""
    plan, options = run.plan, run.request.options
    reports = {**reports_of(plan.products, computed.results), **run.reports}
    warnings = (*plan.warnings, *computed.warnings, *(w for report in reports.values() for w in report.warnings(RECIPE_NAME)))
    page = None if options.report is None else page_beside(run.request.out, options.report)
    inside = options if page is None else replace(options, report=None)
    files = partial(other_files, run.prepared, name, repo, computed.outcome.distances, computed.distance, warnings=warnings)
    manifest, first = dict(run.manifest), dict[str, bytes | Path]()
    if run.request.callbacks.evaluating is not None:  # it loads the model: all but the card and the reports must be there
        first = {**files(reports={}, options=replace(inside, card=False, report=None)), **run.files}
        first.pop(CARD_NAME, None)
        for file, data in first.items():
            staging.add_file(file, data)
        evaluated = run.request.callbacks.evaluating(plan, Path(staging.folder) / CONTENT, run.reference)
        reports[EVALUATION], manifest[EVALUATION] = evaluated, evaluated.to_json()
    if run.reports or any(product.op == "own_text" for product in plan.products):
        manifest |= _own_texts(reports)
    for file, data in {**files(reports=reports, options=inside), **run.files}.items():
        if file not in first:
            staging.add_file(file, data)
    return _Described(reports, warnings, manifest, page)


def _own_texts(reports: Mapping[str, ProductReport]) -> dict[str, Any]:
    """The entry of the manifest for texts that models wrote; none if there is no such text."""
    from weightsmith._activations.own_text import OwnTextReport

    texts = [report.to_json() for report in reports.values() if isinstance(report, OwnTextReport)]
    return {OWN_TEXTS: texts} if texts else {}


# ---- publish


def _publish(run: PlanRun, staging: Staging, computed: _Computed, described: _Described) -> tuple[Path | Target, list[Finding]]:
    """Publish the output: where it is, and warnings of what could not be cleaned up.

    Raises CheckpointError if an input has changed.
    """
    for model in run.prepared.inputs:
        model.check_unchanged()
    manifest = {**provenance(run.plan, computed.distance), **described.manifest}
    published = staging.publish(manifest, fsync=run.request.options.fsync)
    return published, [finding for finding in staging.warnings if finding not in described.warnings]


@dataclass(frozen=True, slots=True)
class StagedRun:
    """A run, downloaded, whose output is open."""

    prepared: Prepared
    request: RunRequest
    resources: Resources
    staging: Staging

    def compute(self, work: Workload, output: Output | None = None) -> Outcome:
        """Compute a part of the plan, as `engine.local.run` does. output: None: the staging."""
        from weightsmith._engine.local import run

        folders, options = [model.folder for model in self.prepared.inputs], self.request.options
        work = replace(work, folders=folders, allow_nonfinite=options.allow_nonfinite, memory=self.request.memory)
        return run(
            self.prepared.plan,
            self.prepared.inputs,
            self.staging if output is None else output,
            self.resources,
            work,
            progress=self.request.callbacks.progress,
            in_order=self.staging.target.streams,
            abandon=self.staging.abandon,
        )


@contextmanager
def staged(
    prepared: Prepared,
    request: RunRequest,
    part: str = "",
    steps: Iterable[Step] | None = None,
    helping: Mapping[str, str] | None = None,
) -> Iterator[StagedRun]:
    """Download, then open the output.

    part     its label
    steps    of the part: what an earlier run has finished of them is taken over; None: of all
    helping  the part is done for a driver, which has these checksums of products
    """
    options = request.options
    if options.device != "cpu" and merges_on_device(prepared.plan):
        usable_device(options.device, "float64")
    resources = resources_of(prepared, options)
    _download(prepared, request)
    check_copies(prepared)
    spec = _spec_of(prepared, request, part, steps, helping)
    if options.local_copy is not None:
        from weightsmith._execution.local_copies import use_local_copies

        alone = helping is None and options.ray is None  # else some of the machines may have no copies
        copies = use_local_copies(prepared, options.local_copy, required=alone)
        spec = replace(spec, protected=(*spec.protected, *copies))
    for stage in prepared.stages:
        stage.source.set_run(resources, allow_nonfinite=options.allow_nonfinite)
    with Staging.open(place_of(request.out), spec) as staging:
        yield StagedRun(prepared, request, resources, staging)


def _spec_of(
    prepared: Prepared, request: RunRequest, part: str, steps: Iterable[Step] | None, helping: Mapping[str, str] | None
) -> OutputSpec:
    """What the staging of a run must know. Arguments as for `staged`."""
    plan, inputs, options = prepared.plan, prepared.inputs, request.options
    return OutputSpec(
        plan.layout,
        work_identity(plan, inputs, options.device),
        part=part,
        names=None if steps is None else {out.name for step in steps for out in step.outs},
        helping=helping is not None,
        products=helping or {},
        facts=facts(plan, inputs, options.device),
        resume=options.resume,
        folder=None if options.staging is None else expand_user(options.staging).absolute(),
        overwrite=options.overwrite,
        protected=protected_paths(prepared),
        reads=models_read(plan),
        other_bytes=other_bytes(plan, inputs[plan.donor], options),
        threads=resources_of(prepared, options).workers,
        progress=request.callbacks.rechecking,
        uploading=request.callbacks.uploading,
        public=options.public,
        message=options.commit_message or plan.provenance.title,
    )


def _download(prepared: Prepared, request: RunRequest) -> None:
    """Download missing files of Hub models, after checking that the output can be written."""
    if request.options.stream:
        stream(prepared.inputs)
    if missing_files(prepared.inputs):
        check_output(request.out, prepared.plan, request.options, protected_paths(prepared))
        download(prepared.inputs)


def protected_paths(prepared: Prepared) -> tuple[Path, ...]:
    """Every folder and file that a run reads: the inputs, their adapters, and other files the recipe names."""
    paths = [path for model in prepared.inputs for path in (*(() if model.alone else (model.folder,)), *model.paths)]
    return tuple(dict.fromkeys([*paths, *prepared.named]))


def kept_products(
    plan: Plan,
    staging: Staging,
    known: Mapping[str, Arrays] = MappingProxyType({}),
    products: Sequence[Product] | None = None,
) -> Results:
    """The products that an earlier run or another process has finished. known: the arrays of some; products: None: all."""
    from weightsmith._engine.products import find_kind
    from weightsmith._engine.results import Results

    results = Results(plan)
    for product in plan.products if products is None else products:
        arrays = known[product.name] if product.name in known else staging.product(product)
        if arrays is not None:
            results.put(product, arrays)
        elif find_kind(product.op).released and product.name in staging.products:
            results.recall(product.name, staging.products[product.name])
    return results


def finished_steps(
    plan: Plan, staging: Staging, results: Results, allow_nonfinite: bool, steps: Sequence[Step] | None = None
) -> dict[str, Finished]:
    """The output tensors (`Step.out`) that an earlier run or another process has finished. steps: of the plan; None: all.

    A tensor counts only if the products it was computed from still exist (recomputed, they might differ) or were released, and
    if it was checked for NaN in the same way as in this run. The staging is told which others are computed again.
    """
    steps, finished = plan.steps if steps is None else steps, staging.records

    def counts(step: Step) -> bool:
        needed = plan.needs(step)
        if not all(out.name in finished for out in step.outs) or not all(map(results.known, needed)):
            return False
        digests = {results.digest(needed), results.digest(needed, allow_nonfinite=allow_nonfinite)}
        return all(finished[out.name].made_from in digests for out in step.outs)

    done = {step.out.name: finished[step.outs[0].name] for step in steps if counts(step)}
    again = {out.name for step in steps if step.out.name not in done for out in step.outs if out.name in finished}
    return finished_steps(plan, staging, results, allow_nonfinite, steps) if again and staging.redo(again) else done


def reports_of(products: Iterable[Product], results: Results) -> dict[str, ProductReport]:
    from weightsmith._engine.products import find_kind

    reports = {}
    for product in products:
        kind = find_kind(product.op)
        if product.transient or kind.released:
            continue
        report = kind.report(product, [results.array(out.name) for out in product.outs])
        if report is not None:
            reports[product.name] = report
    return reports


def _disagreement(plan: Plan, step: Step) -> Finding:
    taken = plan.models[step.inputs[0].model].ref
    return Finding(f"the models differ in this {step.out.dtype.torch} tensor; taken from {taken}", step.out.name)
