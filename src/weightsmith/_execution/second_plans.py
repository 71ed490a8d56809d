"""Plans in two runs: the first computes products, a calibration or a decomposition, and the second follows from these.

The second may have a target, such as `--target kl=0.02`: it then has the smallest size whose divergence from the unquantised
model is at most the target.

A size is tried by writing the result beside the output, and evaluating it on the text of `--evaluate`. The divergence falls
about fourfold with each bit of a weight, which gives the second size; later ones lie on the line through two results. The
smallest that meets the target is then written as the output, and evaluated once more. Until then, divergences are kept beside
the measurement, as products are, so that an interrupted search goes on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith._activations.rows import TOKENS, text_source
from weightsmith._activations.work import TextRowsWork
from weightsmith._base.errors import (
    NOTHING_WRITTEN,
    Finding,
    OutputExists,
    ParameterError,
    PlanError,
    StoreError,
    Unsupported,
    WeightsmithError,
)
from weightsmith._base.options import named, option_error
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._base.text import size, status
from weightsmith._engine.resources import Workload
from weightsmith._execution.identity import work_identity
from weightsmith._execution.options import RunOptions
from weightsmith._execution.output import check_options, check_output, sibling
from weightsmith._execution.run import (
    EVALUATION,
    MEASUREMENT,
    PlanRun,
    RunRequest,
    kept_products,
    protected_paths,
    run_plan,
    staged,
)
from weightsmith._outputs.area import left_behind, staging_folder
from weightsmith._outputs.journal import read_journal
from weightsmith._outputs.local import remove_checkpoint
from weightsmith._outputs.locks import JOURNAL
from weightsmith._outputs.manifest import read_manifest
from weightsmith._outputs.places import remove_work
from weightsmith._planning.follow_ups import FollowUpKind, SecondPlan, follow_up_kind
from weightsmith._planning.planner.loading import Began, Beside
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._plans import PlanDraft, Product, Provenance

if TYPE_CHECKING:
    from weightsmith._outputs.staging import Staging
    from weightsmith.abc.product import Arrays


@contextmanager
def second_run(run: PlanRun, warnings: list[Finding]) -> Iterator[PlanRun]:
    """Compute the products of the first plan, and yield the run of the second.

    warnings  receives one for a measurement that cannot be removed once the output is published
    """
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
        staged(prepared.with_plan(plan), replace(request, out=folder)) as opened,
    ):
        staging = opened.staging
        results = opened.compute(Workload(results=kept_products(plan, staging))).results
        arrays = {product.name: results.arrays(product.name) for product in plan.products if not product.transient}
        try:
            if target is None:
                following = run.following(kind.follow(prepared, arrays, answer(), None))
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


# ---- the search for a size that meets a target

MOST_TRIALS = 8
CLOSE = 0.95
"""A divergence of at least this share of the target is close enough to it."""
STEP = 0.005
"""Sizes that differ by less, relative to each other, are not told apart."""
_DIVERGENCE = (TensorSpec("divergence", DTYPES["F64"], (1,)),)
FALL = math.log(4)
"""How much the logarithm of the divergence falls with each bit of a weight: errors are halved, and their squares count."""


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """A size that was tried.

    asked       bytes
    nbytes      of the weight files
    divergence  from the unquantised model, in nats per token
    """

    asked: int
    nbytes: int
    divergence: float


def check_target(prepared: Prepared, target: float | None, options: RunOptions) -> float | None:
    """The target itself; None if there is none.

    Raises ParameterError without a text to evaluate on, or if the settings are chosen by the same text.
    """
    if target is None:
        return None
    if options.evaluate is None:
        fix = f"name a text that is not the calibration text: {named('evaluate')}"
        raise option_error("target", "the divergence is measured on a text, and none is named", fix)
    text = text_source(options.evaluate, None, TOKENS, 0, "evaluate").sha256
    if text in {TextRowsWork.of(product).text.sha256 for product in prepared.plan.products if product.op == "text_rows"}:
        fix = "name another text, which no setting was chosen by"
        raise option_error("evaluate", "the settings are chosen by this text, so a divergence on it is too low", fix)
    return target


def search_target(target: float, run: PlanRun, kind: FollowUpKind, arrays: Mapping[str, Arrays], staging: Staging) -> PlanRun:
    """The run of the smallest size that meets a target.

    run      of the plan that was measured
    arrays   of the measurement
    staging  of the measurement: divergences are kept there for a run that resumes this one

    Raises Unsupported if no size meets it, with the divergence of the largest one.
    """
    options, evaluating = run.request.options, run.request.callbacks.evaluating
    assert evaluating is not None
    plain = kind.reference(run.prepared)
    compared = replace(run.request.callbacks, evaluating=lambda plan, folder, _: evaluating(plan, folder, plain))
    text = text_source(str(options.evaluate), None, TOKENS, 0, "evaluate").sha256
    alone = replace(options, push=None, commit_message=None, report=None, card=False, keep_stages=False, ray=None, processes=1)
    trying = replace(alone, fsync=False, overwrite=True)

    def sized(max_bytes: int) -> SecondPlan:
        return kind.follow(run.prepared, arrays, None, max_bytes)

    def evaluated(max_bytes: int) -> SizeTrial:
        second = sized(max_bytes)
        prepared = second.prepared
        key = hashlib.sha256(f"{work_identity(prepared.plan, prepared.inputs, options.device)} {text}".encode()).hexdigest()
        trial = Product(f"trial {key}", "trial", _DIVERGENCE, {})
        kept = staging.product(trial)
        if kept is None:
            status(f"trying {size(_nbytes(prepared))}")
            folder = sibling(run.request.out, f".trial-{key[:8]}")
            trial_request = RunRequest(folder, trying, compared, run.request.began)
            merged = run_plan(PlanRun(prepared, trial_request, arrays=second.arrays, files=second.files))
            kept = staging.keep(trial, [np.array([_divergence(merged.reports[EVALUATION])])])
            remove_checkpoint(folder)
        return SizeTrial(max_bytes, _nbytes(prepared), float(kept[0][0]))

    trials = search(target, _nbytes(sized(1).prepared), evaluated, lambda: _most(sized(1 << 62).prepared))
    second = sized(_smallest(trials, target, str(options.evaluate)).asked)
    manifest = {**run.manifest, "target": {"kl": target, "trials": [asdict(trial) for trial in trials]}}
    return replace(run.following(second), manifest=manifest, reference=plain)


def _smallest(trials: Sequence[SizeTrial], target: float, text: str) -> SizeTrial:
    """The smallest size that meets the target. text: the sizes were evaluated on it. Raises Unsupported."""
    meeting = [trial for trial in trials if trial.divergence <= target]
    if not meeting:
        last = max(trials, key=lambda trial: trial.nbytes)
        what = f"KL is {last.divergence:.3g} on {text} at the largest size, {size(last.nbytes)}, not {target:g}"
        fix = "ask for a larger KL, or choose a format with more bits, such as gguf-q8_0 or w8a16"
        raise Unsupported(what, where="target", fix=fix, state="Nothing was published; the measurement is kept.")
    return min(meeting, key=lambda trial: trial.nbytes)


def search(
    target: float, least: int, evaluated: Callable[[int], SizeTrial], most: Callable[[], tuple[int, int]]
) -> list[SizeTrial]:
    """Find the smallest size that meets the target. Returns all trials in order.

    least      bytes of the smallest size
    evaluated  (bytes asked for) → what came out
    most       bytes of the largest size, and the number of weights

    >>> halving = lambda asked: SizeTrial(asked, asked, 4.0 ** -(asked / 1000))
    >>> trials = search(0.02, 1000, halving, lambda: (8000, 8000))
    >>> [trial.asked for trial in trials]
    [4500, 2840]
    """
    largest, weights = most()
    low, high = least, largest  # the sizes that remain
    trials: list[SizeTrial] = []
    asked = (low + high) // 2
    while len(trials) < MOST_TRIALS:
        trial = evaluated(asked)
        trials.append(trial)
        met = trial.divergence <= target
        low, high = (low, min(high, trial.nbytes)) if met else (max(low, asked), high)
        at_end = asked <= least if met else asked >= largest
        if at_end or (met and trial.divergence >= CLOSE * target):
            break
        best = max((t.nbytes for t in trials if t.divergence <= target), default=None)
        if best is not None and high - low <= STEP * high:
            break
        asked = _next(target, trials, weights)
        if not low < asked < high:
            asked = (
                (low + high) // 2 if best is not None and any(t.divergence > target for t in trials) else low if met else high
            )
    return trials


def _next(target: float, trials: list[SizeTrial], weights: int) -> int:
    """The size of a divergence a little below the target, on the line of its logarithm through the two nearest trials."""
    goal = math.log(target * (1 + CLOSE) / 2)
    near = sorted(trials, key=lambda trial: abs(_log(trial) - goal))[:2]
    slope = -FALL * 8 / max(1, weights)
    if len(near) == 2 and near[0].nbytes != near[1].nbytes:
        measured_slope = (_log(near[0]) - _log(near[1])) / (near[0].nbytes - near[1].nbytes)
        slope = measured_slope if measured_slope < 0 else slope
    return round(near[0].nbytes + (goal - _log(near[0])) / slope)


def _log(trial: SizeTrial) -> float:
    return math.log(max(trial.divergence, 1e-9))


def _most(prepared: Prepared) -> tuple[int, int]:
    """Bytes of the tensors, and the number of their weights, at the largest size."""
    return prepared.plan.nbytes, sum(step.out.size for step in prepared.plan.steps)


def _nbytes(prepared: Prepared) -> int:
    """Size of the weight files, headers included."""
    return prepared.plan.layout.total_bytes


def _divergence(report: object) -> float:
    divergence = getattr(report, "divergence", None)
    if divergence is None:
        what = "the result has no divergence: its tokens are not those of the model that it was made from"
        raise ParameterError(what, where="target", state=NOTHING_WRITTEN)
    return float(divergence)
