"""Runs a plan on the threads of this machine.

Each thread takes a tile from the scheduler and hands it to what the pass needs: `Copier`, `Merger` and `TileEncoder`, or the
reduction of a product (`ProductGraph`). The compiled kernels and the reads and writes release the GIL. Bytes of files elsewhere
are fetched ahead of the threads, in the order of `visits`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith._base.files import Extent
from weightsmith._engine.product_graph import Computation, ProductGraph
from weightsmith._engine.products import find_kind
from weightsmith._engine.reader import Reader
from weightsmith._engine.resources import DEFAULTS, WHOLE, Buffers, Resources, Workload
from weightsmith._engine.results import Results
from weightsmith._engine.schedule import APPLY, ActivePass, ActiveStep, LeafPass, ReductionPass, Scheduler, Task
from weightsmith._engine.tile_work import Copier, Finite, Merger, TileEncoder
from weightsmith._kernels.jit import is_compiling, leave
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._plans import COPY, Gather, Plan, Product, Step
from weightsmith.abc.job import Bytes, Job
from weightsmith.abc.output import Finished, Output
from weightsmith.abc.product import Arrays, StreamingReduction, TensorSink
from weightsmith.abc.tensors import Tensors

if TYPE_CHECKING:
    from weightsmith._engine.computed import ComputedSource
    from weightsmith._files.remote.ahead import ReadAhead


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: bytes of output written and in all, bytes read so far, tensors, and seconds since it began.

    waiting      all remaining tensors need a product that is still being computed
    computation  that product
    compiling    kernels are being compiled, because no earlier run needed them
    checking     all is written, and transformers has not said yet whether it can load it
    copied_bytes  of those that were read: from local copies of inputs
    """

    written_bytes: int
    total_bytes: int
    read_bytes: int
    tensors: int
    total_tensors: int
    seconds: float
    waiting: bool = False
    computation: Computation | None = None
    compiling: bool = False
    checking: bool = False
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did.

    read_bytes, written_bytes  of tensors
    fetched_bytes  of remote files, over the network
    copied_bytes   of the tensors that were read: from local copies of inputs
    finished    the output tensors (`Step.out`), also those that were skipped
    results     the products
    """

    read_bytes: int
    written_bytes: int
    finished: Mapping[str, Finished]
    results: Results
    fetched_bytes: int
    copied_bytes: int = 0

    @property
    def distances(self) -> dict[str, tuple[float, float]]:
        """For each tensor merged with a base: squared Frobenius norms of output - base and of the base."""
        return {name: done.distance for name, done in sorted(self.finished.items()) if done.distance is not None}


class Run:
    """One execution of some steps and products of a plan: the threads, the graph, progress and errors."""

    def __init__(
        self,
        reader: Reader,
        steps: Sequence[Step],
        products: Sequence[Product],
        output: Output,
        resources: Resources,
        workload: Workload = WHOLE,
        *,
        abandon: Callable[[], None] = lambda: None,
        in_order: bool = False,
    ) -> None:
        """
        workload  its folders, whether NaN is allowed, and whether products are released
        abandon   after an error: wakes threads that wait for bytes, or for the output. May be called several times
        in_order  see `run`
        """
        self.reader = reader
        self.resources = resources
        self.total_bytes = sum(step.nbytes for step in steps)
        self.total_tensors = len(steps)
        self.written_bytes = self.read_bytes = self.copied_bytes = self.tensors = 0
        self.finished: dict[str, Finished] = {}
        self._output = output
        self._allow_nonfinite = workload.allow_nonfinite
        self._memory = workload.memory
        self._abandon = abandon
        self._lock = threading.Lock()
        finite = Finite(reader, workload.allow_nonfinite)
        self._encoder = TileEncoder(reader, output, allow_nonfinite=workload.allow_nonfinite)
        self._copier = Copier(reader, finite, output, self._encoder)
        self._merger = Merger(reader, finite, measures=True)
        self.products = ProductGraph(reader, finite, output, steps, products, resources, workload, self._make)
        needs = ((step, reader.plan.needs(step)) for step in steps)
        self._scheduler = Scheduler(
            needs, self.products.unmade, self._begin, self._complete, resources.resident_bytes, in_order=in_order
        )

    def go(self, report: Callable[[], None] = lambda: None) -> None:
        """Run. report: called from this thread, about ten times a second; what it raises ends the run.

        Raises what the first failing tile or product raised. KeyboardInterrupt stops the threads at their next tile and is
        raised again; a thread that compiles a kernel is not waited for, and ends without touching anything.
        """
        pool = [
            threading.Thread(target=self._work, name=f"weightsmith-{i}", daemon=True) for i in range(self.resources.workers)
        ]
        try:
            self.products.start(self._scheduler)
            for thread in pool:
                thread.start()
            for thread in pool:
                while thread.is_alive():
                    thread.join(0.1)
                    if self._scheduler.error is not None:
                        self._abandon()
                    report()
        except BaseException as error:  # KeyboardInterrupt, or the caller's progress function
            self._scheduler.fail(error)
            self._abandon()
            leave([thread for thread in pool if thread.ident is not None])
            raise
        finally:
            self.products.close()
        if self._scheduler.error is not None:
            raise self._scheduler.error

    def release(self) -> None:
        """Let go of the output after a run that ended well. The parts of a run refer to each other, so that without this a
        model in memory stays there until Python collects garbage, which it rarely does in a process with torch."""
        self.products.release()
        del self._scheduler, self.products

    def _make(self, steps: Sequence[Step], targets: Mapping[str, TensorSink], check: Callable[[], None]) -> None:
        """Run steps for a product that computes. The products they need are finished, because it needs them too."""
        workload = Workload(allow_nonfinite=self._allow_nonfinite)
        run = Run(self.reader, steps, (), MemoryOutput(targets), self.resources, workload)
        run.go(check)
        self._count(run.read_bytes, 0, run.copied_bytes)
        run.release()

    def _begin(self, step: Step) -> list[LeafPass]:
        """The passes of a step; a step of no elements is complete at once."""
        active = ActiveStep(step)
        align = self._encoder.begin(active)
        for leaf, target, origin in step.places:
            if leaf.out.size:
                job, cuts = None if leaf.op == COPY else self._job(leaf), self.reader.cuts(leaf, align)
                active.leaves.append(self._encoder.reserve(LeafPass(active, leaf, job, origin, cuts, target=target)))
        active.unfinished = len(active.leaves)
        if not active.leaves:
            self._step_done(active)
        return active.leaves

    def _job(self, leaf: Step) -> Job:
        job = self.reader.job(leaf)
        if self._memory is not None and not any(isinstance(read.view, Gather) for read in leaf.inputs):
            models = self.reader.plan.models
            # Fine-tunes of one base have one identity: their names tell them apart.
            inputs = tuple((models[read.model].ref, models[read.model].identity, read) for read in leaf.inputs)
            job.recall(self._memory.of((leaf.out, leaf.base, inputs)))
        return job

    def _complete(self, active: ActivePass) -> None:
        if isinstance(active, ReductionPass):
            self.products.done(active.product, active.reduction.arrays())
        else:
            assert isinstance(active, LeafPass)
            self._step_done(active.active)

    def _step_done(self, active: ActiveStep) -> None:
        step, distance = active.step, active.distance
        made_from = self.reader.results.digest(self.reader.plan.needs(step), allow_nonfinite=self._allow_nonfinite)
        done = [
            Finished(hashed.checksum(), made_from, distance, active.differing, active.nonfinite) for hashed in active.hashes
        ]
        for spec, finished in zip(step.outs, done, strict=True):
            self._output.finish(spec.name, finished)
        with self._lock:
            self.tensors += 1
            self.finished[step.out.name] = done[0]
        self.products.step_finished(step)

    def _work(self) -> None:
        """The loop of each thread."""
        buffers = Buffers()
        self._scheduler.work(lambda task: self._do(task, buffers))

    def _do(self, task: Task, buffers: Buffers) -> Any:
        """Do the work of one tile. Returns its statistics, in a pass for these."""
        active, place, result, written = task.active, task.place, None, 0
        if isinstance(active, ReductionPass):
            result, read = self.products.reduce(active, task, buffers)
            leaf = task.step
        else:
            assert isinstance(active, LeafPass)
            leaf = active.leaf
            if active.job is None:
                read, written = self._copier.copy(active, place, buffers)
            elif task.phase != APPLY:
                result, read = self._merger.statistics(active, place, buffers)
            else:
                out = self._encoder.memory(active, place, buffers)
                read = self._merger.apply(active, place, out, buffers)
                written = self._encoder.write(active, place, out, buffers)
        self._count(read, written, round(read * self.reader.copied_share(leaf)))
        return result

    def _count(self, read: int, written: int, copied: int) -> None:
        with self._lock:
            self.read_bytes += read
            self.written_bytes += written
            self.copied_bytes += copied

    def progress(self, began: float, finished: tuple[int, int]) -> Progress:
        """A snapshot. finished: tensors and bytes that an earlier run has made."""
        with self._lock:
            return Progress(
                self.written_bytes + finished[1],
                self.total_bytes + finished[1],
                self.read_bytes,
                self.tensors + finished[0],
                self.total_tensors + finished[0],
                time.monotonic() - began,
                self._scheduler.waiting,
                self.products.computation,
                is_compiling(),
                copied_bytes=self.copied_bytes,
            )


def run(
    plan: Plan,
    inputs: Sequence[Tensors],
    output: Output,
    resources: Resources = DEFAULTS,
    workload: Workload = WHOLE,
    *,
    progress: Callable[[Progress], None] | None = None,
    in_order: bool = False,
    abandon: Callable[[], None] = lambda: None,
) -> Outcome:
    """Compute output tensors and products of `plan` and write them to `output`.

    progress  called from the calling thread: at the start, about ten times a second, and at the end
    in_order  begin the steps in their order: none before a step that waits for a product. For outputs that hold a few files
              at a time
    abandon   wakes threads that wait for the output, after an error; may be called several times

    Raises what the first failing tile or product raised; `WeightsmithError.product` names the product. KeyboardInterrupt stops
    the threads at their next tile and is raised again.
    """
    steps, skip = plan.steps if workload.steps is None else workload.steps, workload.skip or {}
    results = Results(plan) if workload.results is None else workload.results
    reader = Reader(plan, inputs, results, resources)
    unfinished = [step for step in steps if step.out.name not in skip]
    skipped = [step for step in steps if step.out.name in skip]
    products = plan.products if workload.products is None else workload.products
    finished = len(skipped), sum(step.nbytes for step in skipped)
    began = time.monotonic()
    to_make = [product for product in products if not results.finished(product.name)]
    with _fetching(visits(reader, unfinished, to_make, workload.reduction), resources.cache_bytes) as ahead:

        def stop() -> None:
            if ahead is not None:
                ahead.stop()
            abandon()

        task = Run(reader, unfinished, products, output, resources, workload, abandon=stop, in_order=in_order)

        def report() -> None:
            if progress is not None:
                progress(task.progress(began, finished))

        report()
        task.go(report)
        report()
        task.release()
    done = {**skip, **task.finished}
    finished_tensors = {step.out.name: done[step.out.name] for step in steps}
    fetched_bytes = 0 if ahead is None else ahead.fetched_bytes
    return Outcome(task.read_bytes, task.total_bytes, finished_tensors, results, fetched_bytes, task.copied_bytes)


def _fetching(parts: list[list[Extent]], cache_bytes: int) -> AbstractContextManager[ReadAhead | None]:
    """Fetches parts of files elsewhere before they are read; without any, nothing: files that are here need no client."""
    if not parts:
        return nullcontext()
    from weightsmith._files.remote.ahead import ReadAhead

    return ReadAhead(parts, cache_bytes)


def open_merge(
    plan: Plan,
    inputs: Sequence[Checkpoint],
    where: str,
    resources: Resources = DEFAULTS,
    *,
    allow_nonfinite: bool = False,
) -> ComputedSource:
    """A merge as a source of tensors, without writing it: its tensors are computed when they are read.

    where  the merge as the user named it, for messages

    The products of the plan are made first, in memory. Raises as `run` does. Close the source to close the inputs.
    """
    from weightsmith._engine.computed import ComputedSource

    folders = [model.folder for model in inputs]
    workload = Workload(steps=(), folders=folders, allow_nonfinite=allow_nonfinite)
    source = ComputedSource(plan, inputs, where, run(plan, inputs, DiscardedOutput(), resources, workload).results)
    source.set_run(resources, allow_nonfinite=allow_nonfinite)
    return source


# ---- outputs that write no files


class DiscardedOutput:
    """Discards tensors. Products stay in memory."""

    def location(self, name: str) -> tuple[int, int] | None:
        """There is no file."""
        return None

    def write(self, name: str, start_byte: int, buffer: memoryview | Bytes) -> None:
        """Nothing is kept."""

    def finish(self, name: str, done: Finished) -> None:
        """Nothing follows."""

    def create(self, product: Product) -> None:
        """There is no file."""

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """Nothing is kept."""
        return arrays

    def forget(self, product: Product) -> None:
        """Nothing was kept."""


class MemoryOutput(DiscardedOutput):
    """Hands the bytes of each tensor to its target."""

    def __init__(self, targets: Mapping[str, TensorSink]) -> None:
        self._targets = targets

    def write(self, name: str, start_byte: int, buffer: memoryview | Bytes) -> None:
        """Hand over some bytes."""
        self._targets[name].take(start_byte, np.frombuffer(buffer, np.uint8))


# ---- what is read of files elsewhere


STRIDE_BYTES = 4 << 20
"""Bytes that are read of each input in turn: a tile is read in all inputs at once."""


def whole_passes(products: Iterable[Product]) -> dict[str, int]:
    """How often each product that streams reads all of its steps, and not a sample."""
    reductions = {product.name: make(product) for product in products if (make := find_kind(product.op).reduce) is not None}
    return {name: sum(not one.sampled(number) for number in range(one.passes())) for name, one in reductions.items()}


def visits(
    reader: Reader, steps: Iterable[Step], products: Sequence[Product], reduction: StreamingReduction | None = None
) -> list[list[Extent]]:
    """The parts of files elsewhere that steps and products read, in order: an entry for each pass over a matrix.

    reduction  of the products, in place of those of their kinds

    Without what products read that compute: they ask for what they need. Cost: a few microseconds for each 4 MiB.
    """
    inputs = [i for i, source in enumerate(reader.inputs) if not all(map(Path.is_file, source.paths))]
    if not inputs:
        return []
    from weightsmith._engine.computed import inner_passes

    passes = []
    for product in products:
        make = find_kind(product.op).reduce
        if make is None:
            continue
        used = reduction or make(product)
        leaves = list(reader.plan.leaves_of(product))
        for number in range(used.passes()):
            passes += [_visit(reader, leaf, inputs, sampled=used.sampled(number)) for leaf in leaves]
    for step in steps:
        for leaf in step.leaves:
            if leaf.out.size and any(read.model in inputs for read in leaf.inputs):
                times = 1 + reader.job_facts(leaf)[0] + inner_passes(reader, leaf)
                passes += [_visit(reader, leaf, inputs, sampled=False)] * times
    return [visit for visit in passes if visit]


def _visit(reader: Reader, leaf: Step, inputs: Sequence[int], *, sampled: bool) -> list[Extent]:
    """What one pass over a leaf reads."""
    reads = [read for read in leaf.inputs if read.model in inputs]
    if sampled:
        matrix = reader.matrix(leaf)
        places = [(place.start, min(place.size, matrix.grain)) for place in reader.cuts(leaf)]
    else:
        stride = STRIDE_BYTES // max([reader.dtype(read).itemsize for read in reads], default=1)
        places = [(start, min(stride, leaf.out.size - start)) for start in range(0, leaf.out.size, stride)]
    extents: dict[tuple[int, Extent], None] = {}  # once for each read: of some tensors, every part is decoded from the whole
    for first, size in places:
        for i, read in enumerate(reads):
            extents |= dict.fromkeys((i, extent) for extent in reader.extents(read, first, size))
    return [extent for _, extent in extents]
