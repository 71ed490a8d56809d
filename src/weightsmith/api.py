"""The Python API: `plan`, `merge`, `moe`, `quantize`, `dequantize`, `extract_lora`, `transplant_tokenizer` and `run`."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack

from weightsmith._version import __version__
from weightsmith.adapters import COMMAND as EXTRACT
from weightsmith.adapters import prepare_merge, prepare_models
from weightsmith.checkpoint import CARD_NAME
from weightsmith.containers import PEFT, SAFETENSORS
from weightsmith.distance import Moved, distance_by_layer, to_json
from weightsmith.errors import NOTHING_WRITTEN, Finding, ParameterError, PlanError, WeightsmithError
from weightsmith.identity import facts, work_identity
from weightsmith.lora.adapter import CONFIG_NAME
from weightsmith.options import (
    ExtractKeywords,
    ExtractSettings,
    Keywords,
    PlanKeywords,
    QuantizeSettings,
    RecipeOptions,
    RunKeywords,
    RunOptions,
    TransplantKeywords,
    TransplantSettings,
    output_dtype,
    split,
    split_into,
)
from weightsmith.planner.build import Prepared, prepare_source
from weightsmith.plans import Made, Plan, Product, Step
from weightsmith.plans.parts import part_of
from weightsmith.progress import callbacks, watched_meter
from weightsmith.quantisation import prepare_copy, quantised
from weightsmith.recipe import Recipe, Surgery, Upcycling
from weightsmith.transplant import COMMAND as TRANSPLANT

if TYPE_CHECKING:
    from weightsmith.checkpoint import Checkpoint
    from weightsmith.engine.local import Outcome, Progress, Resources
    from weightsmith.engine.results import Results
    from weightsmith.products import Report
    from weightsmith.products.base import Arrays
    from weightsmith.store.journal import Finished
    from weightsmith.store.staging import Staging

RECIPE_NAME = "recipe.yml"
STAGE = "stage"
"""Key of the manifest: whether a result was written only for another recipe."""

_CONFIG_NAMES = {SAFETENSORS: "config.json", PEFT: CONFIG_NAME}
"""Container → the file of `Plan.config`, if it is one."""

RecipeSource = str | os.PathLike[str] | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Path of a YAML file, YAML text (with a newline), a mapping, or a list of mappings, as the documents of a YAML file."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a run.

    out            the finished folder
    plan           the plan that was run
    resumed        number of tensors that an interrupted run had finished
    read_bytes, written_bytes   of tensor data, in this run
    seconds        of this run, including planning
    distance       distance from the base: in total, then per layer; () without a base
    warnings       the plan's and those found in the data
    reports        reports of products, by name: where a router routes the prompts
    url            of the model on the hub, if pushed
    stages         folders with the results of other recipes, if they are kept
    """

    out: Path
    plan: Plan
    resumed: int
    read_bytes: int
    written_bytes: int
    seconds: float
    distance: tuple[Moved, ...]
    warnings: tuple[Finding, ...]
    reports: Mapping[str, Report] = field(default_factory=dict)
    url: str = ""
    stages: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Callbacks during a run, from the calling thread.

    progress    called about ten times per second
    rechecking  called with (bytes done, total bytes) while the finished tensors of an interrupted run are verified
    """

    progress: Callable[[Progress], None] | None = None
    rechecking: Callable[[int, int], None] | None = None


def plan(recipe: RecipeSource, **options: Unpack[PlanKeywords]) -> Plan:
    """Plan a recipe of `merge` or `moe`: every output tensor with its op, inputs and parameters.

    Reads only headers and writes nothing. options: see `RecipeOptions` and `QuantizeSettings` in
    `weightsmith.options`.

    Raises PlanError with all problems of the recipe and the models.
    """
    planning, settings, _ = split("plan", options)
    with prepare_any(recipe, planning, settings) as prepared:
        return prepared.plan


def prepare_any(recipe: RecipeSource, options: RecipeOptions, settings: QuantizeSettings) -> Prepared:
    """The plan and open checkpoints of a recipe, of `merge` or `moe` depending on its keys; see `plan`."""

    def make(loaded: Recipe | Upcycling | Surgery, *more: Any, **places: Any) -> Prepared:
        if isinstance(loaded, Recipe):
            return prepare_models(loaded, *more, **places)
        from weightsmith.mixture import prepare_mixture

        return prepare_mixture(loaded, *more, **places)

    return quantised(lambda: prepare_source(recipe, None, options, make), options.quantize, settings)


def merge(
    recipe: RecipeSource,
    out: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | bool = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[Keywords],
) -> Merged:
    """Merge checkpoints into a new folder, as described by a recipe.

    recipe      path of a YAML file, YAML text, a mapping, or a list of mappings: recipes that use each other's results
    out         output folder, created only when complete
    progress    called about ten times per second from this thread; True: a bar in terminals and notebooks, False: none
    rechecking  called with (bytes done, total bytes) while the finished tensors of an interrupted run are verified
    options     see `weightsmith.options`: RecipeOptions (seed, out_dtype, …), QuantizeSettings and RunOptions (threads, …)

    Raises PlanError before anything is written, StoreError for problems with the output, CheckpointError if an input
    changes or cannot be read, PushFailed if the finished output cannot be uploaded. After KeyboardInterrupt or a crash, the
    same call resumes.
    """
    began = time.monotonic()
    planning, settings, running = split("merge", options)
    with quantised(lambda: prepare_merge(recipe, planning), planning.quantize, settings) as prepared:
        with _watched("merging", progress, rechecking) as watching:
            return execute(prepared, out, running, watching, began=began)


def moe(
    recipe: RecipeSource,
    out: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | bool = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[Keywords],
) -> Merged:
    """Build a mixture-of-experts checkpoint in a new folder, as described by a recipe.

    Accepts mergekit-moe's recipes and weightsmith's own keys; see docs/moe.md. Arguments and errors are as for `merge`.

    Hidden states are computed while the engine copies, on torch's threads, and need memory for one layer in float32 besides
    the engine's. A PlanError for the prompts or the base's config may be raised at that point. Nothing of this run is then
    left on disk; work of an earlier one is kept.
    """
    from weightsmith.mixture import prepare_moe

    began = time.monotonic()
    planning, settings, running = split("moe", options)
    with quantised(lambda: prepare_moe(recipe, planning), planning.quantize, settings) as prepared:
        with _watched("copying", progress, rechecking) as watching:
            return execute(prepared, out, running, watching, began=began)


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

    model    folder, hub id or `base+adapter`, as in a recipe; a quantised one is dequantised first
    format   `fp8-dynamic`; `weightsmith.quantisation.formats.FORMATS` lists all
    options  see `weightsmith.options`: the format's `QuantizeSettings`, out_dtype, max_shard_bytes, seed, and RunOptions

    Everything else is as for `merge`. Raises PlanError for an unknown format, for a setting that the format does not read,
    and for a model that it cannot store.

    >>> weightsmith.quantize("base", "base-fp8", "fp8-dynamic").plan.encodings  # doctest: +SKIP
    ('fp8-dynamic',)
    """
    return _copy("quantize", model, out, {**options, "quantize": format}, "quantising", progress, rechecking)


def dequantize(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: Any = None,
    progress: Callable[[Progress], None] | bool = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[Keywords],
) -> Merged:
    """Copy a model into a new folder with plain weights, whatever they are stored as.

    dtype  of all floating-point tensors: a string, a numpy dtype or a torch dtype; None: the model's own

    Everything else is as for `quantize`.

    >>> weightsmith.dequantize("base-fp8", "plain").plan.config.get("quantization_config")  # doctest: +SKIP
    """
    return _copy("dequantize", model, out, {**options, "out_dtype": dtype}, "dequantising", progress, rechecking)


def _copy(
    function: str,
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: Mapping[str, Any],
    doing: str,
    progress: Callable[[Progress], None] | bool,
    rechecking: Callable[[int, int], None] | None,
) -> Merged:
    began = time.monotonic()
    planning, settings, running = split(function, options)
    with prepare_copy(model, planning, settings) as prepared:
        with _watched(doing, progress, rechecking) as watching:
            return execute(prepared, out, running, watching, began=began)


def extract_lora(
    finetuned: str | os.PathLike[str],
    base: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: Any = None,
    progress: Callable[[Progress], None] | bool = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[ExtractKeywords],
) -> Merged:
    """Make a LoRA adapter of the difference of a fine-tune and its base, in a new folder as PEFT reads it.

    finetuned, base  folders or hub ids, stored in any format that weightsmith reads; the fine-tune may be `base+adapter`
    dtype            of the factors: a string, a numpy dtype or a torch dtype; None: that of the fine-tune's weights
    options          see `weightsmith.options`: `ExtractSettings` and `RunOptions`

    `Merged.reports["extraction"]` has what the adapter keeps, by matrix. Everything else is as for `merge`. Raises PlanError
    for models that do not belong together, and if nothing differs.

    >>> weightsmith.extract_lora("tuned", "base", "adapter", energy=0.9).reports["extraction"].parameters  # doctest: +SKIP
    4884480
    """
    from weightsmith.adapters import prepare_extraction

    began = time.monotonic()
    settings, running = split_into("extract_lora", options, ExtractSettings, RunOptions)
    with prepare_extraction(finetuned, base, settings, output_dtype(dtype)) as prepared:
        with _watched("storing", progress, rechecking) as watching:
            return execute(prepared, out, running, watching, began=began)


def transplant_tokenizer(
    model: str | os.PathLike[str],
    donor: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | bool = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[TransplantKeywords],
) -> Merged:
    """Give a model the tokenizer of another, in a new folder.

    model    folder, hub id or `base+adapter`, stored in any format that weightsmith reads
    donor    the same; or, for approximations that do not need its embeddings, a folder with a tokenizer alone
    options  see `weightsmith.options`: `TransplantSettings` and `RunOptions`

    Rows of tokens that both have are the model's; the others are approximated. `Merged.reports["rows of missing tokens"]` has
    how, and how well; it is not there if no token is missing. Everything else is as for `merge`. Raises PlanError for a donor
    without embeddings where they are needed, and for a model without a tokenizer.

    >>> weightsmith.transplant_tokenizer("model", "donor", "out").plan.vocabulary["rows"]  # doctest: +SKIP
    49152
    """
    from weightsmith.transplant import prepare_transplant

    began = time.monotonic()
    settings, running = split_into("transplant_tokenizer", options, TransplantSettings, RunOptions)
    with prepare_transplant(model, donor, settings) as prepared:
        with _watched("copying", progress, rechecking) as watching:
            return execute(prepared, out, running, watching, began=began)


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
    from weightsmith.planner.reopen import load_plan, reopen

    began = time.monotonic()
    running = split("run", options)[2]
    with reopen(plan if isinstance(plan, Plan) else load_plan(plan), allow_code=allow_code) as prepared:
        with _watched("running", progress, rechecking) as watching:
            if part is not None:
                execute_part(prepared, out, part, running, watching)
                return None
            return execute(prepared, out, running, watching, began=began)


@contextmanager
def _watched(
    doing: str, progress: Callable[[Progress], None] | bool, rechecking: Callable[[int, int], None] | None
) -> Iterator[Callbacks]:
    """The callbacks of a call: the user's, or a progress bar's in terminals and notebooks."""
    if not isinstance(progress, bool):
        yield Callbacks(progress, rechecking)
    elif not progress:
        yield Callbacks(None, rechecking)
    else:
        with watched_meter() as shown:
            own = callbacks(shown, doing)
            yield Callbacks(own[0], rechecking or own[1])


def execute(
    prepared: Prepared,
    out: str | os.PathLike[str],
    options: RunOptions,
    callbacks: Callbacks = Callbacks(),
    *,
    began: float | None = None,
) -> Merged:
    """Run a prepared plan and publish its output; see `merge`. began: time.monotonic() at the start of the timed work.

    If another plan follows from the products, these are computed first, in a staging folder of their own, which remains until
    the output is published. So are the results of other recipes that cannot be computed when they are read.
    """
    began = time.monotonic() if began is None else began
    with _stages_written(prepared, out, options, callbacks) as (ready, stages):
        if ready.plan.then is not None:
            with _measured(ready, out, options, callbacks) as following:
                merged = _execute(following, out, options, callbacks, began)
        else:
            merged = _execute(_Following(ready), out, options, callbacks, began)
    found = [finding for stage in stages for finding in stage.warnings[len(stage.plan.warnings) :]]
    found += [] if options.keep_stages else _without_stages(stages)
    kept = tuple(stage.out for stage in stages) if options.keep_stages else ()
    return replace(merged, warnings=(*merged.warnings, *found), stages=kept)


@contextmanager
def _stages_written(
    prepared: Prepared, out: str | os.PathLike[str], options: RunOptions, callbacks: Callbacks
) -> Iterator[tuple[Prepared, list[Merged]]]:
    """Write the results of other recipes that must be written, or all that are to be kept: the plan that reads them, and they.

    Each is a run of its own, which resumes; its folder remains until the output is published. One that an earlier run has
    finished, from the same plan and the same files, is verified and used again.
    """
    from weightsmith.store.target import check_out, check_vacant

    wanted = list({stage.path: stage for stage in prepared.stages if stage.why or options.keep_stages}.values())
    if not wanted:
        yield prepared, []
        return
    if prepared.again is None or any(stage.again is None for stage in wanted):
        raise ParameterError("a plan that was made before has no results of stages to keep", fix="merge the recipe itself")
    check_vacant(check_out(out), overwrite=options.overwrite, protected=_protected(prepared))
    written: dict[str, Path] = {}
    made: list[Merged] = []
    for stage in wanted:
        assert stage.again is not None
        with stage.again(written) as own:
            made.append(_stage(own, stage_folder(out, stage.path), options, callbacks))
        written[stage.path] = made[-1].out
    with prepared.again(written) as last:
        yield replace(last, plan=replace(last.plan, warnings=prepared.plan.warnings)), made


def _without_stages(stages: Sequence[Merged]) -> list[Finding]:
    """Remove results that were written only to be read; a warning for each that stays."""
    from weightsmith.store.disk import remove_tree
    from weightsmith.store.manifest import MANIFEST_NAME, read_manifest
    from weightsmith.store.target import check_replaced

    found = []
    for stage in stages:
        try:
            if read_manifest(stage.out).data.get(STAGE) is True:  # one of an earlier run may be there to be kept
                check_replaced(stage.out)
                remove_tree(stage.out, last=MANIFEST_NAME)
        except WeightsmithError as error:
            found.append(Finding(f"not removed: {error.finding.what}", str(stage.out), fix="remove it yourself"))
    return found


def _stage(prepared: Prepared, folder: Path, options: RunOptions, callbacks: Callbacks) -> Merged:
    """Write the result of one recipe for others, unless it is there."""
    from weightsmith.store.manifest import read_manifest
    from weightsmith.store.verify import verify

    began, plan = time.monotonic(), prepared.plan
    more = {STAGE: not options.keep_stages}
    options = replace(options, push=None)
    with suppress(WeightsmithError):  # not there, or damaged: it is made
        found = read_manifest(folder)
        if found.data.get(STAGE) is True:
            options = replace(options, overwrite=True)
        if found.plan == work_identity(plan, prepared.inputs, options.device):
            verify(folder, threads=_resources(plan, options).workers, progress=callbacks.rechecking)
            return Merged(folder, plan, len(plan.steps), 0, 0, time.monotonic() - began, (), plan.warnings)
    return _execute(_Following(prepared), folder, options, callbacks, began, more)


def stage_folder(out: str | os.PathLike[str], path: str) -> Path:
    """Where the result of another recipe is written for an output. path: `Stage.path`.

    >>> stage_folder("out", "first").name, stage_folder("out", "a/b").name
    ('out.stage-first', 'out.stage-a_b-c14cdd')
    """
    from weightsmith.store.target import absolute

    name = re.sub(r"[^\w.-]", "_", path)[:80]
    if name != path:
        name += f"-{hashlib.sha256(path.encode()).hexdigest()[:6]}"
    folder = absolute(out)
    return folder.with_name(f"{folder.name}.stage-{name}")


def check_computable(prepared: Prepared) -> None:
    """Raise ParameterError if a result must be written before the plan can be run."""
    for stage in prepared.stages:
        if stage.why:
            raise ParameterError(
                f"the result of {stage.label} must be written first: {stage.why}",
                fix="run weightsmith merge (weightsmith.merge), which does that; or merge it alone, and name its folder",
                state=NOTHING_WRITTEN,
            )


@dataclass(frozen=True, slots=True)
class _Following:
    """A plan to run, and what another one that was run first gives it.

    arrays   of products that both have, by name
    files    to add to the output
    reports  besides those of the products
    """

    prepared: Prepared
    arrays: Mapping[str, Arrays] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    reports: Mapping[str, Report] = field(default_factory=dict)


def _execute(
    following: _Following,
    out: str | os.PathLike[str],
    options: RunOptions,
    callbacks: Callbacks,
    began: float,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Merged:
    """See `execute`. more: for the manifest."""
    from weightsmith.engine.constants import copied
    from weightsmith.hub import check_push, push

    prepared = following.prepared
    plan, inputs = prepared.plan, prepared.inputs
    hub = check_push(options.push) if options.push is not None else None
    with _staged(prepared, out, options, callbacks) as (staging, run):
        results = _kept_products(plan, staging, following.arrays)
        done = _finished(plan, staging, results, options.allow_nonfinite)
        earlier = bool(staging.finished) or any(results.finished(product.name) for product in plan.products)
        try:
            outcome = run(skip=done, results=results)
        except WeightsmithError as error:
            made = not isinstance(error, PlanError) and any(results.finished(product.name) for product in plan.products)
            if error.product and not earlier and not made:  # a product that fails first leaves nothing behind
                staging.discard()
                error.state = NOTHING_WRITTEN
            raise
        reports = {**_reports(plan.products, results), **following.reports}
        distance = distance_by_layer(plan, outcome.distances)
        named = _files(prepared, Path(out).name, distance, reports, card=options.card, repo=options.push or "")
        for name, data in {**named, **following.files}.items():
            staging.add_file(name, data)
        for model in inputs:
            model.check_unchanged()
        folder = staging.publish({**_provenance(plan, distance), **more}, fsync=options.fsync)
    url = ""
    if hub is not None and options.push is not None:
        url = push(hub, folder, options.push, public=options.public, message=plan.made.title)
    found = [*staging.warnings]
    found += [_disagreement(plan, step) for step in plan.steps if outcome.finished[step.out.name].differing]
    found += copied(outcome.finished)
    found += [finding for report in reports.values() for finding in report.warnings(RECIPE_NAME)]
    return Merged(
        out=folder,
        plan=plan,
        resumed=len(done),
        read_bytes=outcome.read_bytes,
        written_bytes=outcome.written_bytes,
        seconds=time.monotonic() - began,
        distance=distance,
        warnings=(*plan.warnings, *found),
        reports=reports,
        url=url,
    )


@contextmanager
def _measured(
    prepared: Prepared, out: str | os.PathLike[str], options: RunOptions, callbacks: Callbacks
) -> Iterator[_Following]:
    """Compute the products of a plan from which another one follows."""
    from weightsmith.store.target import check_out, check_vacant

    check_vacant(check_out(out), overwrite=options.overwrite, protected=_protected(prepared))
    plan = replace(prepared.plan, made=Made("measurement"), steps=(), then=None)  # it serves any number of bits, any mixture
    folder = Path(out).with_name(f"{Path(out).name}.measurement")
    with _staged(replace(prepared, plan=plan), folder, options, callbacks) as (staging, run):
        results = _kept_products(plan, staging)
        found = run(results=results).results
        arrays = {product.name: found.arrays(product.name) for product in plan.products if not product.transient}
        try:
            following = _follow(prepared, arrays)
        except PlanError as error:
            if error.state == NOTHING_WRITTEN:
                staging.discard()
            raise
        yield following
        staging.discard()


def _follow(prepared: Prepared, arrays: Mapping[str, Arrays]) -> _Following:
    from weightsmith import adapters
    from weightsmith.adapters.report import NAME
    from weightsmith.quantisation.formats import followed

    if (prepared.plan.then or {}).get("format") == adapters.FORMAT:
        plan, report = adapters.follow(prepared, arrays)
        return _Following(replace(prepared, plan=plan), arrays, reports={NAME: report})
    following, files = followed(prepared, arrays)
    return _Following(following, files=files)


def execute_part(
    prepared: Prepared,
    out: str | os.PathLike[str],
    part: tuple[int, int],
    options: RunOptions,
    callbacks: Callbacks = Callbacks(),
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
    with _staged(prepared, out, options, callbacks, part, steps) as (staging, run):
        with staging.only_process():  # other processes reuse these products
            results = _kept_products(plan, staging)
            if products := plan.products_for(steps):
                run(steps=(), products=products, results=results)
        run(steps=steps, products=(), skip=_finished(plan, staging, results, options.allow_nonfinite), results=results)
        for model in prepared.inputs:
            model.check_unchanged()


@contextmanager
def _staged(
    prepared: Prepared,
    out: str | os.PathLike[str],
    options: RunOptions,
    callbacks: Callbacks,
    part: tuple[int, int] | None = None,
    steps: Iterable[Step] | None = None,
) -> Iterator[tuple[Staging, Callable[..., Outcome]]]:
    """Download, then open the output: its staging, and `engine.local.run` bound to it. steps: of the part."""
    from weightsmith.engine.local import run
    from weightsmith.store.staging import Staging

    plan, inputs = prepared.plan, prepared.inputs
    resources = _resources(plan, options)
    for stage in prepared.stages:
        stage.source.set_run(
            allow_nonfinite=options.allow_nonfinite, tile_bytes=resources.tile_bytes, aligned_bytes=resources.aligned_bytes
        )
    _download(prepared, out, options)
    with Staging.open(
        out,
        plan.layout,
        work_identity(plan, inputs, options.device),
        part=part,
        names=None if steps is None else {out.name for step in steps for out in step.outs},
        facts=facts(plan, inputs, options.device),
        resume=options.resume,
        overwrite=options.overwrite,
        protected=_protected(prepared),
        other_bytes=_other_bytes(plan, inputs[plan.donor]),
        threads=resources.workers,
        progress=callbacks.rechecking,
    ) as staging:
        yield (
            staging,
            partial(
                run,
                plan,
                inputs,
                staging,
                resources,
                progress=callbacks.progress,
                allow_nonfinite=options.allow_nonfinite,
                folders=[model.folder for model in inputs],
            ),
        )


def make_product(
    prepared: Prepared, name: str, options: RunOptions, progress: Callable[[Progress], None] | None = None
) -> Report | None:
    """Compute one product of a plan and its dependencies in memory. Returns its report; writes nothing."""
    from weightsmith.engine.local import run

    check_computable(prepared)
    prepared.download()
    plan = prepared.plan
    products = plan.products_for((), {name})
    outcome = run(
        plan,
        prepared.inputs,
        _Discarded(),
        _resources(plan, options),
        steps=(),
        products=products,
        progress=progress,
        folders=[model.folder for model in prepared.inputs],
    )
    return _reports(products, outcome.results).get(name)


def measure_distance(
    prepared: Prepared, options: RunOptions, progress: Callable[[Progress], None] | None = None
) -> tuple[Moved, ...]:
    """The distance of the merge from its base: in total, then per layer; () without a base.

    Computes like `execute`, without writing anything. Cost: that of the merge without writing.
    """
    from weightsmith.engine.local import run

    check_computable(prepared)
    prepared.download()
    plan = prepared.plan
    steps = [step for step in plan.steps if any(leaf.base and leaf.merges for leaf in step.leaves)]
    outcome = run(
        plan,
        prepared.inputs,
        _Discarded(),
        _resources(plan, options),
        steps=steps,
        products=plan.products_for(steps),
        progress=progress,
    )
    return distance_by_layer(plan, outcome.distances)


def _resources(plan: Plan, options: RunOptions) -> Resources:
    """The engine's resources, by the options for threads (default: all available processors) and memory."""
    from weightsmith.engine.local import Resources
    from weightsmith.engine.schedule import RESIDENT_BYTES
    from weightsmith.engine.tiles import ALIGNED_BYTES, fit_resident_bytes, fit_tile_bytes

    threads = options.threads or Resources().workers
    memory = options.max_memory_bytes
    resident = fit_resident_bytes(memory, threads, plan.widest, RESIDENT_BYTES, plan.levels)
    return Resources(
        threads,
        fit_tile_bytes(memory, threads, plan.widest, plan.levels),
        resident,
        options.device,
        ALIGNED_BYTES if memory is None else 0,
        None if memory is None else resident,
    )


def _download(prepared: Prepared, out: str | os.PathLike[str], options: RunOptions) -> None:
    """Download missing files of hub models, after checking that the output folder can be written."""
    from weightsmith.store.target import check_out, check_vacant

    if prepared.missing:
        check_vacant(check_out(out), overwrite=options.overwrite, protected=_protected(prepared))
        prepared.download()


def _protected(prepared: Prepared) -> tuple[Path, ...]:
    """Every folder and file that a run reads: the inputs, their adapters, and other files the recipe names."""
    paths = [path for model in prepared.inputs for path in (*(() if model.alone else (model.folder,)), *model.paths)]
    return tuple(dict.fromkeys([*paths, *prepared.named]))


def _kept_products(plan: Plan, staging: Staging, known: Mapping[str, Arrays] = MappingProxyType({})) -> Results:
    """The products that an earlier run or another process has finished. known: the arrays of some."""
    from weightsmith.engine.results import Results

    results = Results(plan)
    for product in plan.products:
        arrays = known[product.name] if product.name in known else staging.product(product.name, product.outs)
        if arrays is not None:
            results.put(product, arrays)
    return results


def _finished(plan: Plan, staging: Staging, results: Results, allow_nonfinite: bool) -> dict[str, Finished]:
    """The output tensors (`Step.out`) that an earlier run or another process has finished.

    A tensor counts only if the products it was computed from still exist (recomputed, they might differ), and if it was
    checked for NaN in the same way as in this run.
    """
    finished = staging.records

    def counts(step: Step) -> bool:
        needed = plan.needs(step)
        if not all(out.name in finished for out in step.outs) or not all(map(results.finished, needed)):
            return False
        digests = {results.digest(needed), results.digest(needed, allow_nonfinite=allow_nonfinite)}
        return all(finished[out.name].made_from in digests for out in step.outs)

    return {step.out.name: finished[step.outs[0].name] for step in plan.steps if counts(step)}


def _reports(products: Iterable[Product], results: Results) -> dict[str, Report]:
    from weightsmith.products import find_kind

    found = {}
    for product in products:
        if product.transient:
            continue
        arrays = [results.array(out.name) for out in product.outs]
        report = find_kind(product.op).report(product, arrays)
        if report is not None:
            found[product.name] = report
    return found


class _Discarded:
    """An engine output that discards everything."""

    def location(self, name: str) -> None:
        return None

    def write(self, name: str, start_byte: int, buffer: object) -> None:
        pass

    def finish(self, name: str, done: Finished) -> None:
        pass

    def create(self, product: object) -> None:
        pass

    def keep(self, product: object, arrays: Arrays) -> Arrays:
        return arrays

    def forget(self, product: object) -> None:
        pass


def _other_bytes(plan: Plan, donor: Checkpoint) -> int:
    """Approximate size of all files except weights: carried files, the recipe (also in the card), and others."""
    carried = sum(path.stat().st_size for name in plan.carried if (path := donor.folder / name).is_file())
    carried += sum(map(len, plan.files.values()))
    return carried + len(json.dumps(plan.config)) + 2 * len(plan.recipe.encode()) + (64 << 10)


def _disagreement(plan: Plan, step: Step) -> Finding:
    taken = plan.models[step.inputs[0].model].ref
    return Finding(f"the models differ in this {step.out.dtype.torch} tensor; taken from {taken}", step.out.name)


def _files(
    prepared: Prepared, name: str, distance: tuple[Moved, ...], reports: Mapping[str, Report], *, card: bool, repo: str
) -> dict[str, bytes | Path]:
    """All files except weights. These replace the donor's files of the same name."""
    plan = prepared.plan
    donor = prepared.inputs[plan.donor]
    files: dict[str, bytes | Path] = {name: donor.folder / name for name in plan.carried} | dict(plan.files)
    if plan.config is not None and plan.container in _CONFIG_NAMES:
        files[_CONFIG_NAMES[plan.container]] = (json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n").encode()
    if plan.made.name not in (EXTRACT, TRANSPLANT):  # they follow no recipe
        files[RECIPE_NAME] = plan.recipe.encode()
    if card:
        from weightsmith.cards import model_card

        sections = "".join(report.section() for report in reports.values())
        text = model_card(plan, name, distance, sections, inputs=prepared.inputs, repo=repo)
        files[CARD_NAME] = text.encode(errors="replace")
    for report in reports.values():
        files |= report.files()
    return files


def _inputs(plan: Plan) -> list[dict[str, Any]]:
    """The models; with the method and the models of each merge that is computed on the way."""

    def merge(made: Plan | None) -> dict[str, Any]:
        return {} if made is None else {"merge_method": made.made.name, "inputs": _inputs(made)}

    return [{"ref": m.ref, "revision": m.revision, "identity": m.identity, **merge(m.plan)} for m in plan.models]


def _provenance(plan: Plan, distance: tuple[Moved, ...]) -> dict[str, Any]:
    """The provenance of the output, for its manifest."""
    own = plan.made.code
    code = {} if own is None else {"merge_method_code": {"name": own.name, "sha256": own.sha256}}
    return {
        "made_by": {
            "weightsmith": __version__,
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "numba": version("numba"),
        },
        "merge_method": plan.made.name,
        **code,
        **({"quantised": plan.made.format} if plan.made.format else {}),
        "seed": plan.seed,
        "inputs": _inputs(plan),
        "dropped": [{"model": plan.models[d.model].ref, "tensor": d.tensor, "reason": d.reason} for d in plan.dropped],
        "distance_from_base": to_json(distance),
        "recipe": plan.recipe,
    }
