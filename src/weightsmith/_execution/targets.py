"""The search for the smallest result whose divergence from the unquantised model is at most a target: `--target kl=0.02`.

A size is tried by writing the result beside the output, and evaluating it on the text of `--evaluate`. The divergence falls
about fourfold with each bit of a weight, which gives the second size; later ones lie on the line through two results. The
smallest that meets the target is then written as the output, and evaluated once more. Until then, divergences are kept beside
the measurement, as products are, so that an interrupted search goes on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from weightsmith._activations.rows import TOKENS, text_source
from weightsmith._activations.work import TextRowsWork
from weightsmith._base.errors import NOTHING_WRITTEN, ParameterError, Unsupported
from weightsmith._base.options import named, option_error
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._base.text import size, status
from weightsmith._execution.identity import work_identity
from weightsmith._execution.options import RunOptions
from weightsmith._execution.output import sibling
from weightsmith._execution.run import EVALUATION, PlanRun, RunRequest, run_plan
from weightsmith._outputs.local import remove_checkpoint
from weightsmith._planning.follow_ups import FollowUpKind, SecondPlan
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._plans import Product

if TYPE_CHECKING:
    from weightsmith._outputs.staging import Staging
    from weightsmith.abc.product import Arrays

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
    best = min((trial for trial in trials if trial.divergence <= target), key=lambda trial: trial.nbytes, default=None)
    if best is None:
        last = max(trials, key=lambda trial: trial.nbytes)
        what = f"KL is {last.divergence:.3g} on {options.evaluate} at the largest size, {size(last.nbytes)}, not {target:g}"
        fix = "ask for a larger KL, or choose a format with more bits, such as gguf-q8_0 or w8a16"
        raise Unsupported(what, where="target", fix=fix, state="Nothing was published; the measurement is kept.")
    second = sized(best.asked)
    manifest = {**run.manifest, "target": {"kl": target, "trials": [asdict(trial) for trial in trials]}}
    return replace(
        run,
        prepared=second.prepared,
        arrays=second.arrays,
        files=second.files,
        reports=second.reports,
        manifest=manifest,
        reference=plain,
    )


def search(
    target: float, least: int, evaluated: Callable[[int], SizeTrial], most: Callable[[], tuple[int, int]]
) -> list[SizeTrial]:
    """Find the smallest size that meets the target. Returns all trials in order.

    least      bytes of the smallest size
    evaluated  (bytes asked for) → what came out
    most       bytes of the largest size, and the number of weights

    >>> halving = lambda asked: SizeTrial(asked, asked, 4.0 ** -(asked / 1000))
    >>> found = search(0.02, 1000, halving, lambda: (8000, 8000))
    >>> [each.asked for each in found]
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
