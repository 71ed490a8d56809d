"""The Python front door: `plan`, `merge` and `moe`."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypedDict

from weightsmith._version import __version__
from weightsmith.distance import Moved, distance_by_layer, to_json
from weightsmith.errors import NOTHING_WRITTEN, Finding, StoreError, WeightsmithError
from weightsmith.methods.user_files import loaded
from weightsmith.planner.build import Prepared, prepare
from weightsmith.planner.steps import COMPUTED, Plan, Step
from weightsmith.recipe import is_moe
from weightsmith.tensors import DType

if TYPE_CHECKING:
    from weightsmith.checkpoint import Checkpoint
    from weightsmith.engine.local import Progress
    from weightsmith.mixture import PreparedMixture
    from weightsmith.mixture.routing.report import Report

RECIPE_NAME = "recipe.yml"
CARD_NAME = "README.md"


@dataclass(frozen=True, slots=True)
class Merged:
    """What a merge did.

    out            the finished folder
    plan           what was planned, and done
    resumed        tensors that an interrupted run had finished
    read_bytes, written_bytes   of tensor data, in this run
    seconds        of this run, planning included
    distance       how far it has moved from the base: the whole, then layer by layer; () when nothing has a base
    warnings       the plan's and those found in the data
    """

    out: Path
    plan: Plan
    resumed: int
    read_bytes: int
    written_bytes: int
    seconds: float
    distance: tuple[Moved, ...]
    warnings: tuple[Finding, ...]


def plan(recipe: str | os.PathLike[str] | Mapping[str, Any], **options: Any) -> Plan:
    """What a recipe of `merge` or `moe` would do: every output tensor, its op, inputs and parameters.

    Reads headers only, writes nothing.

    recipe   path of a YAML file, YAML text, or a mapping
    options  out_dtype (DType), max_shard_bytes, seed, lenient, allow_code: as for `merge`

    Raises PlanError with every problem of the recipe and the models.
    """
    with prepare_any(recipe, **options) as prepared:
        return prepared.plan


@contextmanager
def prepare_any(recipe: str | os.PathLike[str] | Mapping[str, Any], **options: Any) -> Iterator[Prepared]:
    """The plan and open checkpoints of a recipe of `merge` or of `moe`, as its keys say; see `plan`."""
    source = Path(recipe) if isinstance(recipe, os.PathLike) else recipe
    if is_moe(source):
        from weightsmith.mixture import prepare_moe

        with prepare_moe(source, **options) as made:
            yield made.prepared
    else:
        with prepare(source, **options) as prepared:
            yield prepared


def merge(
    recipe: str | os.PathLike[str] | Mapping[str, Any],
    out: str | os.PathLike[str],
    *,
    threads: int | None = None,
    max_memory_bytes: int | None = None,
    max_shard_bytes: int = 5_000_000_000,
    seed: int = 0,
    out_dtype: DType | None = None,
    overwrite: bool = False,
    resume: bool = True,
    fsync: bool = True,
    card: bool = True,
    lenient: bool = False,
    allow_nonfinite: bool = False,
    allow_code: bool = False,
    progress: Callable[[Progress], None] | None = None,
    rechecking: Callable[[int, int], None] | None = None,
) -> Merged:
    """Merge checkpoints as a recipe says, into a new folder.

    recipe            path of a YAML file, YAML text, or a mapping
    out               folder to make; it appears when all is finished, and never half-made
    threads           default: the processors this process may use
    max_memory_bytes  bound of resident memory; tiles shrink to fit
    max_shard_bytes   bound of a weight file
    seed              of random masks (DARE)
    out_dtype         overrides the recipe's dtype
    overwrite         replace a checkpoint that is there
    resume            go on from interrupted work of the same plan; False discards it
    fsync             wait until the bytes are on the disk before the folder appears
    card              write README.md, a model card
    lenient           settings that mergekit ignores are warnings, not errors
    allow_nonfinite   merge NaN and infinities as any number; else they are an error that names tensor and model
    allow_code        run the Python file that merge_method may name; without it that is an error
    progress          called about ten times a second from this thread
    rechecking        called with (bytes done, bytes in all) while the finished tensors of an interrupted run are re-read

    Raises PlanError before anything is written, StoreError for problems with the output, CheckpointError when an input
    changes or fails meanwhile. After KeyboardInterrupt, or a crash, the same call goes on where it stopped.
    """
    began = time.monotonic()
    with prepare(
        recipe, out_dtype=out_dtype, max_shard_bytes=max_shard_bytes, seed=seed, lenient=lenient, allow_code=allow_code
    ) as prepared:
        return execute(
            prepared,
            out,
            threads=threads,
            max_memory_bytes=max_memory_bytes,
            overwrite=overwrite,
            resume=resume,
            fsync=fsync,
            card=card,
            allow_nonfinite=allow_nonfinite,
            progress=progress,
            rechecking=rechecking,
            began=began,
        )


def moe(
    recipe: str | os.PathLike[str] | Mapping[str, Any],
    out: str | os.PathLike[str],
    *,
    threads: int | None = None,
    max_memory_bytes: int | None = None,
    max_shard_bytes: int = 5_000_000_000,
    seed: int = 0,
    out_dtype: DType | None = None,
    overwrite: bool = False,
    resume: bool = True,
    fsync: bool = True,
    card: bool = True,
    lenient: bool = False,
    allow_nonfinite: bool = False,
    allow_code: bool = False,
    progress: Callable[[Progress], None] | None = None,
    rechecking: Callable[[int, int], None] | None = None,
    report: bool | None = None,
    device: str = "cpu",
) -> Merged:
    """Make a mixture-of-experts checkpoint as a recipe says, into a new folder.

    The recipe is one of mergekit-moe's, or has weightsmith's own keys; see docs/moe.md. All else is as for `merge`, but for

    report  where the router sends the prompts' tokens, in OUT/routing.json and OUT/routing.svg; True takes a pass of the base
            over the prompts where the router weights need none, False skips it, None skips it there
    device  for the hidden states, as torch names it

    Hidden states are computed while the engine copies, with torch's threads, and a layer in float32 beside the engine's memory.
    A PlanError of the prompts, or of what transformers makes of the base, comes then: nothing is left of this run; work of an
    earlier one stays.
    """
    from weightsmith.mixture import prepare_moe

    began = time.monotonic()
    with prepare_moe(
        recipe, out_dtype=out_dtype, max_shard_bytes=max_shard_bytes, seed=seed, lenient=lenient, allow_code=allow_code
    ) as prepared:
        return execute_mixture(
            prepared,
            out,
            report=report,
            device=device,
            threads=threads,
            max_memory_bytes=max_memory_bytes,
            overwrite=overwrite,
            resume=resume,
            fsync=fsync,
            card=card,
            allow_nonfinite=allow_nonfinite,
            progress=progress,
            rechecking=rechecking,
            began=began,
        )


def execute_mixture(
    prepared: PreparedMixture,
    out: str | os.PathLike[str],
    *,
    report: bool | None = None,
    device: str = "cpu",
    overwrite: bool = False,
    filling: Callable[[int, int], None] | None = None,
    filled: Callable[[Report | None], None] = lambda told: None,
    **options: Any,
) -> Merged:
    """Run the plan of a prepared mixture, and compute what it needs: meanwhile, or first; see `moe`.

    filling  called with (bytes of weights done, bytes in all) of what is computed, from a thread of its own or from this one
    filled   called with the report of the routing, if there is one, before anything is published
    options  as for `execute`
    """
    from weightsmith.mixture.filling import Filling

    def beside(folder: Path) -> Beside:
        return Filling(prepared, folder, report=report, device=device, progress=filling, filled=filled)

    if prepared.beside:
        return execute(prepared.prepared, out, overwrite=overwrite, beside=beside, **options)
    check_output(prepared.prepared, out, overwrite=overwrite)
    filled(prepared.fill(report=report, device=device, progress=filling))
    return execute(prepared.prepared, out, overwrite=overwrite, **options)


def check_output(prepared: Prepared, out: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raise the StoreError with which `execute` would refuse this folder, for those who compute for long before they call it.

    A folder with interrupted work beside it is left to `execute`, which may have to finish or undo that first.
    """
    from weightsmith.store.staging import staging_folder
    from weightsmith.store.target import check_out, check_vacant

    folder = check_out(out)
    _check_not_input(folder, prepared.inputs)
    if not staging_folder(folder).exists():
        check_vacant(folder, overwrite=overwrite)


def execute(
    prepared: Prepared,
    out: str | os.PathLike[str],
    *,
    threads: int | None = None,
    max_memory_bytes: int | None = None,
    overwrite: bool = False,
    resume: bool = True,
    fsync: bool = True,
    card: bool = True,
    allow_nonfinite: bool = False,
    progress: Callable[[Progress], None] | None = None,
    rechecking: Callable[[int, int], None] | None = None,
    began: float | None = None,
    beside: Callable[[Path], Beside] | None = None,
) -> Merged:
    """Run a prepared plan; see `merge`.

    beside  makes what goes on meanwhile, from the folder in which the output is built
    """
    from weightsmith.engine.local import run
    from weightsmith.store.staging import Staging

    began = time.monotonic() if began is None else began
    plan, inputs = prepared.plan, prepared.inputs
    if beside is None and not all(model.ready for model in inputs):
        raise ValueError("the plan needs what is not computed: use execute_mixture")
    resources = _resources(plan, threads, max_memory_bytes)
    _check_not_input(Path(out), inputs)
    with ExitStack() as stack:
        staging = stack.enter_context(
            Staging.open(
                out,
                plan.layout,
                _work_hash(plan, inputs),
                resume=resume,
                overwrite=overwrite,
                threads=resources["threads"],
                progress=rechecking,
            )
        )
        done = staging.finished
        other = stack.enter_context(_Nothing() if beside is None else beside(staging.folder))

        def report(now: Progress) -> None:
            other.check()
            if progress is not None:
                progress(now)

        try:
            outcome = run(plan, inputs, staging, **resources, skip=done, progress=report, allow_nonfinite=allow_nonfinite)
            more, section = other.result()
        except WeightsmithError as error:
            if error is other.error and not done:  # as if it had been computed first
                staging.discard()
                error.state = NOTHING_WRITTEN
            raise
        distance = distance_by_layer(plan, outcome.distances)
        for name, data in _files(plan, inputs, Path(out).name, distance, card=card, section=section):
            if name not in more:
                staging.add_file(name, data)
        for name, data in more.items():
            staging.add_file(name, data)
        folder = staging.publish(_provenance(plan, distance), fsync=fsync)
    found = tuple(_disagreement(plan, step) for step in plan.steps if step.out.name in outcome.differing)
    return Merged(
        out=folder,
        plan=plan,
        resumed=len(done),
        read_bytes=outcome.read_bytes,
        written_bytes=outcome.written_bytes,
        seconds=time.monotonic() - began,
        distance=distance,
        warnings=plan.warnings + found,
    )


class Beside(Protocol):
    """What goes on in a thread of its own while the engine runs: begun and ended as a context manager.

    error  what has gone wrong so far
    """

    @property
    def error(self) -> BaseException | None: ...

    def check(self) -> None:
        """Raise the error, if there is one."""

    def result(self) -> tuple[Mapping[str, bytes], str]:
        """Wait for its end: more files of the output by name, and more of the model card in Markdown."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *args: object) -> None: ...


class _Nothing:
    """Nothing goes on meanwhile."""

    error = None

    def check(self) -> None:
        pass

    def result(self) -> tuple[Mapping[str, bytes], str]:
        return {}, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        pass


class _Resources(TypedDict):
    """What the engine may take, as its arguments."""

    threads: int
    tile_bytes: int
    resident_bytes: int


def _resources(plan: Plan, threads: int | None, max_memory_bytes: int | None) -> _Resources:
    """The engine's arguments for these threads (default: the processors this process may use) and this memory."""
    from weightsmith.engine.schedule import RESIDENT_BYTES
    from weightsmith.engine.tiles import fit_resident_bytes, fit_tile_bytes

    threads = threads or len(os.sched_getaffinity(0))
    return {
        "threads": threads,
        "tile_bytes": fit_tile_bytes(max_memory_bytes, threads, plan.widest),
        "resident_bytes": fit_resident_bytes(max_memory_bytes, threads, plan.widest, RESIDENT_BYTES),
    }


class _Discarded:
    """An engine output that keeps nothing."""

    def location(self, name: str) -> tuple[int, int]:
        return -1, 0

    def write(self, name: str, start_byte: int, buffer: object) -> None:
        pass

    def finish(self, name: str, checksum: str) -> None:
        pass


def measure_distance(
    prepared: Prepared,
    *,
    threads: int | None = None,
    max_memory_bytes: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Moved, ...]:
    """How far the merge would move from its base, layer by layer: computed as `execute` does, and not written.

    The whole comes first; () when nothing has a base. Cost: that of the merge without writing.
    """
    from weightsmith.engine.local import run

    plan = prepared.plan
    outcome = run(
        plan,
        prepared.inputs,
        _Discarded(),
        **_resources(plan, threads, max_memory_bytes),
        skip={step.out.name for step in plan.steps if not any(leaf.base and leaf.merges for leaf in step.leaves)},
        progress=progress,
    )
    return distance_by_layer(plan, outcome.distances)


def _check_not_input(out: Path, inputs: Sequence[Checkpoint]) -> None:
    """A merge never replaces what it reads from."""
    for checkpoint in inputs:
        if any(out.resolve() == folder.resolve() for folder in checkpoint.folders):
            raise StoreError(
                f"the output folder is the input {checkpoint.ref}",
                where=str(out),
                fix="choose another output folder",
                state=NOTHING_WRITTEN,
            )


def _disagreement(plan: Plan, step: Step) -> Finding:
    taken = plan.models[step.inputs[0].model].ref
    return Finding(f"the models disagree on this {step.out.dtype.torch} tensor; taken from {taken}", step.out.name)


def _work_hash(plan: Plan, inputs: Sequence[Checkpoint]) -> str:
    """Identity of work that may be resumed: the plan, and the input files as they are now."""
    return hashlib.sha256("\n".join([plan.hash, *(c.state_hash for c in inputs)]).encode()).hexdigest()


def _files(
    plan: Plan, inputs: Sequence[Checkpoint], name: str, distance: tuple[Moved, ...], *, card: bool, section: str = ""
) -> list[tuple[str, bytes | Path]]:
    """Everything that is not a weight."""
    donor = inputs[plan.donor]
    files: list[tuple[str, bytes | Path]] = [(f, donor.folder / f) for f in plan.carried if f != RECIPE_NAME]
    if plan.config is not None:
        files.append(("config.json", (json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n").encode()))
    files.append((RECIPE_NAME, plan.recipe.encode()))
    if card:
        from weightsmith.cards import model_card

        files.append((CARD_NAME, model_card(plan, name, distance, section).encode()))
    return files


def _provenance(plan: Plan, distance: tuple[Moved, ...]) -> dict[str, Any]:
    """Where the output comes from, for its manifest."""
    own = loaded(plan.method)
    code = {} if own is None else {"merge_method_code": {"name": own.name, "sha256": own.sha256}}
    return {
        "made_by": {
            "weightsmith": __version__,
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "numba": version("numba"),
        },
        "merge_method": plan.method,
        **code,
        "seed": plan.seed,
        "inputs": [
            {"ref": m.ref, "revision": m.revision, "header_hash": m.header_hash} for m in plan.models if m.ref != COMPUTED
        ],
        "dropped": [{"model": plan.models[d.model].ref, "tensor": d.tensor, "reason": d.reason} for d in plan.dropped],
        "distance_from_base": to_json(distance),
        "recipe": plan.recipe,
    }
