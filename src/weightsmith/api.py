"""The Python API: `plan`, `merge`, `moe` and `run`."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from weightsmith._version import __version__
from weightsmith.checkpoint import CARD_NAME
from weightsmith.distance import Moved, distance_by_layer, to_json
from weightsmith.errors import NOTHING_WRITTEN, Finding, ParameterError, WeightsmithError
from weightsmith.identity import facts, work_identity
from weightsmith.options import Keywords, RecipeKeywords, RecipeOptions, RunKeywords, RunOptions, split
from weightsmith.planner.build import Prepared, folder_of, loaded_recipe, prepare, prepare_recipe
from weightsmith.plans import Plan, Product, Step
from weightsmith.plans.parts import part_of
from weightsmith.progress import callbacks, watched_meter
from weightsmith.recipe import Recipe

if TYPE_CHECKING:
    from weightsmith.checkpoint import Checkpoint
    from weightsmith.engine.local import Progress, Resources
    from weightsmith.engine.results import Results
    from weightsmith.products import Report
    from weightsmith.store.staging import Staging

RECIPE_NAME = "recipe.yml"

RecipeSource = str | os.PathLike[str] | Mapping[str, Any]
"""Path of a YAML file, YAML text (with a newline), or a mapping."""


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


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Callbacks during a run, from the calling thread.

    progress    called about ten times per second
    rechecking  called with (bytes done, total bytes) while the finished tensors of an interrupted run are verified
    """

    progress: Callable[[Progress], None] | None = None
    rechecking: Callable[[int, int], None] | None = None


def plan(recipe: RecipeSource, **options: Unpack[RecipeKeywords]) -> Plan:
    """Plan a recipe of `merge` or `moe`: every output tensor with its op, inputs and parameters.

    Reads only headers and writes nothing. options: see `weightsmith.options.RecipeOptions`.

    Raises PlanError with all problems of the recipe and the models.
    """
    with prepare_any(recipe, split("plan", options)[0]) as prepared:
        return prepared.plan


def prepare_any(recipe: RecipeSource, options: RecipeOptions) -> Prepared:
    """The plan and open checkpoints of a recipe, of `merge` or `moe` depending on its keys; see `plan`."""
    with loaded_recipe(recipe, None, options) as (loaded, problems):
        if isinstance(loaded, Recipe):
            return prepare_recipe(loaded, options, problems, folder=folder_of(recipe))
        from weightsmith.mixture import prepare_mixture

        return prepare_mixture(loaded, options, problems, folder_of(recipe))


def merge(
    recipe: RecipeSource,
    out: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | bool = True,
    rechecking: Callable[[int, int], None] | None = None,
    **options: Unpack[Keywords],
) -> Merged:
    """Merge checkpoints into a new folder, as described by a recipe.

    recipe      path of a YAML file, YAML text, or a mapping
    out         output folder, created only when complete
    progress    called about ten times per second from this thread; True: a bar in terminals and notebooks, False: none
    rechecking  called with (bytes done, total bytes) while the finished tensors of an interrupted run are verified
    options     see `weightsmith.options`: RecipeOptions (seed, out_dtype, …) and RunOptions (threads, overwrite, …)

    Raises PlanError before anything is written, StoreError for problems with the output, CheckpointError if an input
    changes or cannot be read, PushFailed if the finished output cannot be uploaded. After KeyboardInterrupt or a crash, the
    same call resumes.
    """
    began = time.monotonic()
    planning, running = split("merge", options)
    with prepare(recipe, planning) as prepared:
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
    planning, running = split("moe", options)
    with prepare_moe(recipe, planning) as prepared:
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
    running = split("run", options)[1]
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
    """Run a prepared plan and publish its output; see `merge`. began: time.monotonic() at the start of the timed work."""
    from weightsmith.engine.constants import copied
    from weightsmith.engine.local import run
    from weightsmith.hub import check_push, push
    from weightsmith.store.staging import Staging

    began = time.monotonic() if began is None else began
    plan, inputs = prepared.plan, prepared.inputs
    resources = _resources(plan, options)
    hub = check_push(options.push) if options.push is not None else None
    _download(prepared, out, options)
    with Staging.open(
        out,
        plan.layout,
        work_identity(plan, inputs),
        facts=facts(plan, inputs),
        resume=options.resume,
        overwrite=options.overwrite,
        protected=_protected(prepared),
        other_bytes=_other_bytes(plan, inputs[plan.donor]),
        threads=resources.workers,
        progress=callbacks.rechecking,
    ) as staging:
        results = _kept_products(plan, staging)
        done = _finished(plan, staging, results, options.allow_nonfinite)
        earlier = bool(staging.finished) or any(results.finished(product.name) for product in plan.products)
        try:
            outcome = run(
                plan,
                inputs,
                staging,
                resources,
                skip=done,
                results=results,
                progress=callbacks.progress,
                allow_nonfinite=options.allow_nonfinite,
                folders=[model.folder for model in inputs],
            )
        except WeightsmithError as error:
            if error.product and not earlier:  # a failed product leaves nothing behind
                staging.discard()
                error.state = NOTHING_WRITTEN
            raise
        reports = _reports(plan.products, results)
        distance = distance_by_layer(plan, outcome.distances)
        named = _files(prepared, Path(out).name, distance, reports, card=options.card, repo=options.push or "")
        for name, data in named.items():
            staging.add_file(name, data)
        for model in inputs:
            model.check_unchanged()
        folder = staging.publish(_provenance(plan, distance), fsync=options.fsync)
    url = ""
    if hub is not None and options.push is not None:
        url = push(hub, folder, options.push, public=options.public, message=plan.made.title)
    found = [*staging.warnings]
    found += [_disagreement(plan, step) for step in plan.steps if step.out.name in outcome.differing]
    found += copied(outcome.nonfinite)
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


def execute_part(
    prepared: Prepared,
    out: str | os.PathLike[str],
    part: tuple[int, int],
    options: RunOptions,
    callbacks: Callbacks = Callbacks(),
) -> None:
    """Run one part of a prepared plan, in parallel with other processes; see `run`."""
    from weightsmith.engine.local import run
    from weightsmith.store.staging import Staging

    if not options.resume:
        fix = "run once without a part and with --no-resume (resume=False), or remove the staging folder"
        raise ParameterError("a part cannot discard the work of other parts", fix=fix)
    plan, inputs = prepared.plan, prepared.inputs
    steps = part_of(plan, *part)
    resources = _resources(plan, options)
    _download(prepared, out, options)
    with Staging.attach(
        out,
        plan.layout,
        work_identity(plan, inputs),
        part,
        {out.name for step in steps for out in step.outs},
        facts=facts(plan, inputs),
        overwrite=options.overwrite,
        protected=_protected(prepared),
        other_bytes=_other_bytes(plan, inputs[plan.donor]),
        threads=resources.workers,
        progress=callbacks.rechecking,
    ) as staging:
        do = partial(
            run,
            plan,
            inputs,
            staging,
            resources,
            progress=callbacks.progress,
            allow_nonfinite=options.allow_nonfinite,
            folders=[model.folder for model in inputs],
        )
        with staging.only_process():  # other processes reuse these products
            results = _kept_products(plan, staging)
            if products := plan.products_for(steps):
                do(steps=(), products=products, results=results)
        do(steps=steps, products=(), skip=_finished(plan, staging, results, options.allow_nonfinite), results=results)
        for model in inputs:
            model.check_unchanged()


def make_product(
    prepared: Prepared, name: str, options: RunOptions, progress: Callable[[Progress], None] | None = None
) -> Report | None:
    """Compute one product of a plan and its dependencies in memory. Returns its report; writes nothing."""
    from weightsmith.engine.local import run

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
    return Resources(
        threads,
        fit_tile_bytes(memory, threads, plan.widest),
        fit_resident_bytes(memory, threads, plan.widest, RESIDENT_BYTES),
        options.device,
        ALIGNED_BYTES if memory is None else 0,
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


def _kept_products(plan: Plan, staging: Staging) -> Results:
    """The products that an earlier run or another process has finished."""
    from weightsmith.engine.results import Results

    results = Results(plan)
    for product in plan.products:
        arrays = staging.product(product.name, product.outs)
        if arrays is not None:
            results.put(product, arrays)
    return results


def _finished(plan: Plan, staging: Staging, results: Results, allow_nonfinite: bool) -> dict[str, tuple[float, float] | None]:
    """The tensors that an earlier run has finished, with their distances from the base.

    A tensor counts only if the products it was computed from still exist (recomputed, they might differ), and if it was
    checked for NaN in the same way as in this run.
    """
    finished, distances = staging.finished, staging.distances

    def counts(step: Step) -> bool:
        needed = plan.needs(step)
        if not all(out.name in finished for out in step.outs) or not all(map(results.finished, needed)):
            return False
        digests = {results.digest(needed), results.digest(needed, allow_nonfinite=allow_nonfinite)}
        return all(staging.made_from(out.name) in digests for out in step.outs)

    return {step.out.name: distances.get(step.outs[0].name) for step in plan.steps if counts(step)}


def _reports(products: Iterable[Product], results: Results) -> dict[str, Report]:
    from weightsmith.products import find_kind

    found = {}
    for product in products:
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

    def finish(self, name: str, checksum: str, distance: object, made_from: str) -> None:
        pass

    def keep(self, product: object, arrays: object) -> None:
        pass


def _other_bytes(plan: Plan, donor: Checkpoint) -> int:
    """Approximate size of all files except weights: carried files, the recipe (also in the card), and others."""
    carried = sum(path.stat().st_size for name in plan.carried if (path := donor.folder / name).is_file())
    return carried + len(json.dumps(plan.config)) + 2 * len(plan.recipe.encode()) + (64 << 10)


def _disagreement(plan: Plan, step: Step) -> Finding:
    taken = plan.models[step.inputs[0].model].ref
    return Finding(f"the models differ in this {step.out.dtype.torch} tensor; copied from {taken}", step.out.name)


def _files(
    prepared: Prepared, name: str, distance: tuple[Moved, ...], reports: Mapping[str, Report], *, card: bool, repo: str
) -> dict[str, bytes | Path]:
    """All files except weights. These replace the donor's files of the same name."""
    plan = prepared.plan
    donor = prepared.inputs[plan.donor]
    files: dict[str, bytes | Path] = {name: donor.folder / name for name in plan.carried}
    if plan.config is not None:
        files["config.json"] = (json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n").encode()
    files[RECIPE_NAME] = plan.recipe.encode()
    if card:
        from weightsmith.cards import model_card

        sections = "".join(report.section() for report in reports.values())
        text = model_card(plan, name, distance, sections, inputs=prepared.inputs, repo=repo)
        files[CARD_NAME] = text.encode(errors="replace")
    for report in reports.values():
        files |= report.files()
    return files


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
        **({"quantised": list(plan.encodings)} if plan.encodings else {}),
        "seed": plan.seed,
        "inputs": [{"ref": m.ref, "revision": m.revision, "identity": m.identity} for m in plan.models],
        "dropped": [{"model": plan.models[d.model].ref, "tensor": d.tensor, "reason": d.reason} for d in plan.dropped],
        "distance_from_base": to_json(distance),
        "recipe": plan.recipe,
    }
