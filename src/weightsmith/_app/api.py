"""The Python API: `plan`, `merge`, `moe`, `quantize`, `dequantize`, their plans, and `run`. Commands of these names call it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from weightsmith._base.options import lists_options, read_options
from weightsmith._execution.options import RunOptions, check_processes
from weightsmith._features.any_recipe import prepare_any, prepare_copy
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.recipe import Source
from weightsmith._plans import Plan

if TYPE_CHECKING:
    from weightsmith._engine.local import Progress
    from weightsmith._execution.run import Callbacks, Evaluated, Merged
    from weightsmith._planning.planner.prepared import Prepared
    from weightsmith._reports.keywords import Keywords, PlanKeywords, RunKeywords
    from weightsmith._reports.look.surveys import Watching

_ALL = RecipeOptions, QuantizeSettings, RunOptions


@lists_options("plan", RecipeOptions, QuantizeSettings)
def plan(recipe: Source, **options: Unpack[PlanKeywords]) -> Plan:
    """Plan a recipe of `merge` or `moe`: every output tensor with its op, inputs and parameters.

    Reads only headers and writes nothing.

    Raises PlanError with all problems of the recipe and the models.
    """
    planning, settings = read_options("plan", options, RecipeOptions, QuantizeSettings, planner="plan")
    with prepare_any(recipe, planning, settings, check=True) as prepared:
        return prepared.plan


@lists_options("merge", *_ALL)
def merge(
    recipe: Source,
    out: str | os.PathLike[str],
    *,
    progress: Watching = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[Keywords],
) -> Merged:
    """Merge checkpoints into a new folder, as described by a recipe.

    recipe      path of a YAML file, YAML text, a mapping, or a list of mappings: recipes that use each other's results
    out         output folder, or an address: s3://, gs://, az://, hf://org/name[@branch]; created only when complete
    progress    called about ten times per second from this thread, or a `Meter`; True: a bar in terminals and notebooks, False:
                none
    rechecking  called with (bytes done, total bytes) while the finished tensors of an interrupted run are verified

    Raises PlanError for problems with the recipe, the models and the options; nothing of this run is then on disk. Raises
    StoreError for problems with the output, CheckpointError if an input changes or cannot be read, and PushFailed if the
    finished output cannot be uploaded. After KeyboardInterrupt or a crash, the same call resumes.
    """
    planning, settings, running = read_options("merge", options, *_ALL)
    prepare = partial(prepare_any, recipe, planning, settings, command="merge")
    return make(prepare, "merging", out, running, progress, rechecking, "--quantize")


@lists_options("moe", *_ALL)
def moe(
    recipe: Source,
    out: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | bool = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[Keywords],
) -> Merged:
    """Build a mixture-of-experts checkpoint in a new folder, as described by a recipe.

    Accepts mergekit-moe's recipes and weightsmith's own keys; see docs/moe.md. Arguments and errors are as for `merge`.

    Hidden states are computed on torch's threads while the engine copies. They need memory for one layer in float32, in
    addition to the engine's. A PlanError for the prompts or the base's config may be raised at that point. Nothing of this run
    is then left on disk; work of an earlier one is kept.
    """
    planning, settings, running = read_options("moe", options, *_ALL)
    prepare = partial(prepare_any, recipe, planning, settings, command="moe")
    return make(prepare, "copying", out, running, progress, rechecking, "--quantize")


@lists_options("quantize", *_ALL, besides=("format",))
def quantize(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: str,
    *,
    progress: Callable[[Progress], None] | bool = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[Keywords],
) -> Merged:
    """Store a model in a quantised format, in a new folder.

    model    folder, Hub id or `base+adapter`, as in a recipe; a quantised one is dequantised first
    format   such as `fp8-dynamic` or `gguf-q4_k_m`; `weightsmith quantize --list` lists all

    Everything else is as for `merge`. Raises PlanError for an unknown format, a setting that the format does not read, and a
    model that it cannot store.

    >>> weightsmith.quantize("base", "base-fp8", "fp8-dynamic").plan.encodings  # doctest: +SKIP
    ('fp8-dynamic',)
    """
    planning, settings, running = read_options("quantize", {"format": format, **options}, *_ALL)
    prepare = partial(prepare_copy, model, planning, settings)
    return make(prepare, "quantising", out, running, progress, rechecking, "--format")


@lists_options("dequantize", *_ALL)
def dequantize(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | bool = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[Keywords],
) -> Merged:
    """Copy a model of any stored format into a new folder with plain weights.

    All arguments are as for `quantize`, without the format.

    >>> weightsmith.dequantize("base-fp8", "plain").plan.config.get("quantization_config")  # doctest: +SKIP
    """
    planning, settings, running = read_options("dequantize", options, *_ALL)
    return make(lambda: prepare_copy(model, planning, settings), "dequantising", out, running, progress, rechecking)


@lists_options("quantize", RecipeOptions, QuantizeSettings, besides=("format",))
def plan_quantize(model: str | os.PathLike[str], format: str, **options: Unpack[PlanKeywords]) -> Plan:
    """Plan what `quantize` writes. Reads only headers and writes nothing. Raises PlanError as `quantize` does."""
    values = {"format": format, **options}
    planning, settings = read_options("quantize", values, RecipeOptions, QuantizeSettings, planner="plan_quantize")
    with prepare_copy(model, planning, settings) as prepared:
        return prepared.plan


@lists_options("dequantize", RecipeOptions, QuantizeSettings)
def plan_dequantize(model: str | os.PathLike[str], **options: Unpack[PlanKeywords]) -> Plan:
    """Plan what `dequantize` writes. Reads only headers and writes nothing. Raises PlanError as `dequantize` does."""
    planning, settings = read_options("dequantize", options, RecipeOptions, QuantizeSettings, planner="plan_dequantize")
    with prepare_copy(model, planning, settings) as prepared:
        return prepared.plan


@lists_options("run", RunOptions)
def run(
    plan: Plan | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    part: tuple[int, int] | None = None,
    allow_code: bool = False,
    progress: Callable[[Progress], None] | bool = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[RunKeywords],
) -> Merged | None:
    """Run an existing plan, possibly from another process.

    plan  a Plan, or the path of a JSON file with the output of `Plan.to_json`
    part  (k, n): run part k of n of the plan (k from 1) without publishing, and return None. Several processes on one machine
          may run different parts at once. When all parts are done, a run without `part` publishes

    Everything else is as for `merge`. Relative paths of models start at the current folder, as in the recipe. Raises PlanError
    if the models are not those of the plan.
    """
    from weightsmith._outputs.local import check_not_a_file
    from weightsmith._planning.planner.reopen import load_plan, reopen

    began = time.monotonic()
    (running,) = read_options("run", options, RunOptions)
    check_not_a_file(out)
    with reopen(plan if isinstance(plan, Plan) else load_plan(plan), allow_code=allow_code) as prepared:
        with _watched("running", prepared, progress, rechecking, out, running) as watching:
            if part is not None:
                from weightsmith._execution.together import execute_part

                execute_part(prepared, out, part, running, watching)
                return None
            return _execute(prepared, out, running, watching, began)


def make(
    prepare: Callable[[], Prepared],
    doing: str,
    out: str | os.PathLike[str],
    running: RunOptions,
    progress: Watching,
    rechecking: Callable[[int, int], None] | None,
    format_flag: str = "",
) -> Merged:
    """Plan, run and publish.

    doing        the verb of the work, for the progress bar
    format_flag  chooses the format of the output; "" if nothing does
    """
    from weightsmith._outputs.local import check_not_a_file

    began = time.monotonic()
    check_not_a_file(out, format_flag)
    with prepare() as prepared, _watched(doing, prepared, progress, rechecking, out, running) as watching:
        return _execute(prepared, out, running, watching, began)


def _execute(prepared: Prepared, out: str | os.PathLike[str], running: RunOptions, watching: Callbacks, began: float) -> Merged:
    """Run a plan here, in one process or in several, or on a Ray cluster. The bytes are the same."""
    from weightsmith._execution.execute import execute
    from weightsmith._execution.output import check_options
    from weightsmith._outputs.disk import has_locks
    from weightsmith._outputs.places import place_of

    place = place_of(out)
    n = check_processes(prepared, place, running)
    if running.ray is None and (n == 1 or not has_locks(place.local.parent)):
        return execute(prepared, out, running, watching, began=began)
    from weightsmith._execution.cluster import share_out
    from weightsmith._execution.on_ray import watched
    from weightsmith._execution.processes import LocalWorkers

    check_options(out, running)  # before a cluster is started
    with watched(running) if running.ray is not None else LocalWorkers(n, running) as workers:
        helpers = partial(share_out, workers=workers)
        return execute(prepared, out, running, watching, began=began, helpers=helpers)


@contextmanager
def _watched(
    doing: str,
    prepared: Prepared,
    progress: Watching,
    rechecking: Callable[[int, int], None] | None,
    out: str | os.PathLike[str],
    running: RunOptions,
) -> Iterator[Callbacks]:
    """The callbacks of a call: the user's, or a progress bar's in terminals and notebooks. out: whose result is evaluated."""
    from weightsmith._execution.progress import Meter, callbacks, shown_meter
    from weightsmith._execution.run import Callbacks

    if progress is True or isinstance(progress, Meter):
        with shown_meter(progress) as shown:
            showing = callbacks(shown, doing)
            evaluating = _evaluator(running, out, shown)
            if shown.announce is not None:
                shown.announce(prepared.plan, prepared.source)
            yield replace(showing, rechecking=rechecking or showing.rechecking, evaluating=evaluating)
    else:
        shows = None if progress is False else progress
        yield Callbacks(shows, rechecking, evaluating=_evaluator(running, out, progress))


def _evaluator(
    running: RunOptions, out: str | os.PathLike[str], progress: Watching
) -> Callable[[Plan, Path, Prepared | None], Evaluated] | None:
    if running.evaluate is None:
        return None
    from weightsmith._reports.evaluate.measure import evaluator

    evaluated = evaluator(running, out)
    return None if evaluated is None else replace(evaluated, progress=progress)
