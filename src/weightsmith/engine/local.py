"""Runs a plan on the threads of this machine.

A thread takes a tile, reads each input's rows into its own buffers, lets the job do its work, and writes the encoded result
to its final place. The compiled kernels and the reads and writes release the GIL. Products run in the same graph: those that
stream on the same threads, those that compute in one more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weightsmith.encodings import Encoding, find_encoding
from weightsmith.engine.bench import Computing, EngineBench
from weightsmith.engine.buffers import Buffers
from weightsmith.engine.constants import Constants, equal_constants
from weightsmith.engine.reader import Reader, Source
from weightsmith.engine.results import Results
from weightsmith.engine.schedule import APPLY, RESIDENT_BYTES, Flight, Part, Scheduler, SurveyFlight, Task, Work
from weightsmith.engine.tiles import ALIGNED_BYTES, TILE_BYTES, Cut
from weightsmith.errors import NonFinite
from weightsmith.jobs.job import Bytes, Matrix, Tile
from weightsmith.kernels.codecs import decode
from weightsmith.kernels.delta import distance
from weightsmith.kernels.finite import first_nonfinite
from weightsmith.kernels.jit import is_compiling, leave
from weightsmith.plans import CAST, COPY, PLAIN, Gather, Plan, Product, Step
from weightsmith.products import find_kind
from weightsmith.products.base import Arrays
from weightsmith.store.disk import copies_by_reference
from weightsmith.tensors import GRAIN_ELEMENTS, TensorSpec, grain_elements

_UNPUBLISHED = "Nothing was published; finished tensors are kept, and the same command resumes from them."


class Output(Protocol):
    """Where the bytes go: what the engine needs of `store.Staging`."""

    def location(self, name: str) -> tuple[int, int] | None:
        """File descriptor and absolute offset of a tensor; None where there is no file."""

    def write(self, name: str, start_byte: int, buffer: memoryview | Bytes) -> None:
        """Write part of a tensor. Called from many threads."""

    def finish(self, name: str, checksum: str, distance: tuple[float, float] | None, made_from: str) -> None:
        """All bytes of a tensor are written.

        distance   squared norms of output - base and of the base, if it has one
        made_from  `Results.digest` of the products that it was made from
        """

    def keep(self, product: Product, arrays: Arrays) -> None:
        """A product is finished: keep it for a run that resumes this one."""


@dataclass(frozen=True, slots=True)
class Computation:
    """A product that is being computed, and how far it is. total_bytes: 0 while that is not known."""

    doing: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: bytes of output written and in all, bytes read so far, tensors, and seconds since it began.

    waiting      what is left needs a product that is still being computed
    computation  that product
    compiling    kernels are being compiled, because no earlier run needed them
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did.

    read_bytes, written_bytes  of tensors
    differing   integer tensors on which the models disagree
    nonfinite   tensors with a NaN or an infinity that is the same in all inputs, and was copied
    distances   for each tensor merged with a base: squared Frobenius norms of output - base and of the base
    results     the products
    """

    read_bytes: int
    written_bytes: int
    differing: tuple[str, ...]
    nonfinite: tuple[str, ...]
    distances: Mapping[str, tuple[float, float]]
    results: Results


@dataclass(frozen=True, slots=True)
class Resources:
    """What a run may take.

    threads         default: the processors this process may use
    tile_bytes      of each input; the result does not depend on it
    aligned_bytes   the same, of tiles with as many rows as an input prefers
    resident_bytes  that methods of whole matrices may hold; a matrix that needs more is merged alone
    device          for products that compute, as torch names it
    """

    threads: int = 0
    tile_bytes: int = TILE_BYTES
    resident_bytes: int = RESIDENT_BYTES
    device: str = "cpu"
    aligned_bytes: int = ALIGNED_BYTES

    @property
    def workers(self) -> int:
        """Number of threads."""
        return self.threads or processors()


def processors() -> int:
    """The processors that this process may use; where the system does not say which, all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Run:
    """One execution of some steps and products of a plan."""

    def __init__(
        self,
        reader: Reader,
        steps: Sequence[Step],
        products: Sequence[Product],
        output: Output,
        resources: Resources,
        *,
        allow_nonfinite: bool = False,
        folders: Sequence[Path] = (),
    ) -> None:
        """folders: of each model's files, for products that read them."""
        self.reader = reader
        self.plan = reader.plan
        self.output = output
        self.resources = resources
        self.allow_nonfinite = allow_nonfinite
        self.folders = folders
        self.total_bytes = sum(out.nbytes for step in steps for out in step.outs)
        self.total_tensors = len(steps)
        self.written_bytes = self.read_bytes = self.tensors = 0
        self.differing: set[str] = set()
        self.nonfinite: set[str] = set()
        self.distances: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()
        self._encodings: dict[str, Encoding] = {}
        self._sharing: dict[int, bool] = {}
        self._cancelled = threading.Event()
        self._computation: Computation | None = None
        self._computing = Computing(self._bench, self._product_done)
        self._unmade = {p.name: p for p in products if not reader.results.finished(p.name)}
        self._unbegun = dict(self._unmade)
        needs = ((step, self.plan.needs(step)) for step in steps)
        self.scheduler = Scheduler(needs, self._unmade, self._parts, self._complete, resources.resident_bytes)

    def go(self, report: Callable[[], None] = lambda: None) -> None:
        """Run. report: called from this thread, about ten times a second; what it raises ends the run.

        Raises what the first failing tile or product raised. KeyboardInterrupt stops the threads at their next tile and is
        raised again; a thread that compiles a kernel is not waited for, and ends without touching anything.
        """
        pool = [
            threading.Thread(target=self._work, name=f"weightsmith-{i}", daemon=True) for i in range(self.resources.workers)
        ]
        self._computing.start(self.scheduler.fail)
        try:
            self._begin_products()
            for thread in pool:
                thread.start()
            for thread in pool:
                while thread.is_alive():
                    thread.join(0.1)
                    report()
        except BaseException as error:  # KeyboardInterrupt, or the caller's progress function
            self.scheduler.fail(error)
            leave([thread for thread in pool if thread.ident is not None])
            raise
        finally:
            self._cancelled.set()
            self._computing.close()
        if self.scheduler.error is not None:
            raise self.scheduler.error

    # ---- products

    def _begin_products(self) -> None:
        """Begin every product whose own needs are finished."""
        with self._lock:
            begun = [p for p in self._unbegun.values() if not any(name in self._unmade for name in p.needs)]
            for product in begun:
                del self._unbegun[product.name]
        for product in begun:
            kind = find_kind(product.op)
            if kind.survey is None:
                self._computing.add(product)
                continue
            flight = SurveyFlight(product, kind.survey(product), lambda product=product: self._survey_tiles(product))  # type: ignore[misc]
            if flight.empty:
                self._product_done(product, flight.survey.arrays())
            else:
                self.scheduler.survey(flight)

    def _product_done(self, product: Product, arrays: Arrays) -> None:
        self.reader.results.put(product, arrays)
        self.output.keep(product, arrays)
        with self._lock:
            del self._unmade[product.name]
            self._computation = None
        self._begin_products()
        self.scheduler.product_finished(product.name)

    def _survey_tiles(self, product: Product) -> Iterator[tuple[Step, Matrix, Cut]]:
        for step in product.steps or self.plan.steps:
            for leaf in step.leaves:
                if product.name in leaf.needs and leaf.out.size:
                    matrix = self.reader.matrix(leaf)
                    for place in self.reader.cuts(leaf):
                        yield leaf, matrix, place

    def _bench(self, product: Product) -> EngineBench:
        doing = find_kind(product.op).doing
        with self._lock:
            self._computation = Computation(doing, 0, 0)

        def report(done: int, total: int) -> None:
            with self._lock:
                self._computation = Computation(doing, done, total)

        return EngineBench(
            self.plan,
            product,
            self.folders,
            self.resources.device,
            self.resources.workers,
            self._run_apart,
            report,
            self._cancelled,
        )

    def _run_apart(self, steps: Sequence[Step], output: Output, check: Callable[[], None]) -> None:
        """Make some steps for a product that computes. Its own products are finished: the plan says that it needs them."""
        run = Run(self.reader, steps, (), output, self.resources, allow_nonfinite=self.allow_nonfinite)
        run.go(check)
        self.count(run.read_bytes, 0)

    # ---- steps

    def _parts(self, step: Step) -> list[Part]:
        work = Work(step)
        origin, align = 0, self._encoding(step).align_rows if step.encoding != PLAIN else 1
        for leaf in step.leaves:
            if leaf.out.size:
                job = None if leaf.op == COPY else self.reader.job(leaf)
                work.parts.append(Part(work, leaf, job, origin, self.reader.cuts(leaf, align)))
            origin += leaf.out.size
        work.left = len(work.parts)
        if not work.parts:
            self._step_done(work)
        return work.parts

    def _encoding(self, step: Step) -> Encoding:
        if step.encoding not in self._encodings:
            self._encodings[step.encoding] = find_encoding(step.encoding)
        return self._encodings[step.encoding]

    def _complete(self, flight: Flight) -> None:
        if isinstance(flight, SurveyFlight):
            self._product_done(flight.product, flight.survey.arrays())
        else:
            assert isinstance(flight, Part)
            self._step_done(flight.work)

    def _step_done(self, work: Work) -> None:
        moved = _sum_of([part.distances for part in work.parts])
        made_from = self.reader.results.digest(self.plan.needs(work.step), allow_nonfinite=self.allow_nonfinite)
        for spec, hashed in zip(work.step.outs, work.hashes, strict=True):
            self.output.finish(spec.name, hashed.checksum(), moved, made_from)
        with self._lock:
            self.tensors += 1
            if moved is not None:
                self.distances[work.step.out.name] = moved

    def _work(self) -> None:
        """What each thread does until there is nothing left."""
        buffers = Buffers()
        try:
            while (task := self.scheduler.next()) is not None:
                self.scheduler.done(task, self._do(task, buffers))
        except BaseException as error:
            self.scheduler.fail(error)

    def _do(self, task: Task, buffers: Buffers) -> object:
        flight, step, place = task.flight, task.step, task.place
        if isinstance(flight, SurveyFlight):
            assert task.matrix is not None
            raw, read = self.reader.read(step.inputs, place.start, place.size, buffers)
            self._take_constants(step, place, raw)
            self.count(read, 0)
            return flight.survey.statistics(task.phase, task.matrix, Tile(place.start, place.size, raw, buffers.scratch))
        assert isinstance(flight, Part)
        if flight.job is None:
            self._copy(flight, place, buffers)
            return None
        raw, read = self.reader.read(step.inputs, place.start, place.size, buffers)
        plain_cast = step.op == CAST and flight.work.step.encoding == PLAIN
        constants = None
        if (flight.number == 0 or flight.constants) and not plain_cast:
            constants = self._take_constants(step, place, raw, encoded=flight.work.step.encoding != PLAIN)
            flight.constants |= constants is not None
        tile = Tile(place.start, place.size, raw, buffers.scratch)
        if task.phase != APPLY:
            self.count(read, 0)
            return flight.job.statistics(task.phase, tile)
        out = self._out(flight, place, buffers)
        flight.job.apply(tile, out)
        if not self.allow_nonfinite and (step.op != CAST or first_nonfinite(raw[0], self._code(step, 0), place.size) < 0):
            self._check_output(flight, place, out)
        self._measure(step, flight.distances[place.start // flight.grain :], place.size, raw, out, buffers)
        if constants is not None:
            constants.put(out, step.out.dtype)
            self.nonfinite.add(flight.work.step.out.name)
        written = self._write(flight, place, out, buffers)
        self.count(read, written)
        return None

    def _copy(self, part: Part, place: Cut, buffers: Buffers) -> None:
        """Copy some elements of the first input, and compare them with those of the others."""
        step = part.step
        source, *others = step.inputs
        out = self._out(part, place, buffers)
        self.reader.fill(source, place.start, out)
        if part.work.step.encoding != PLAIN and not self.allow_nonfinite:  # an infinity would take its whole row with it
            self._check_input(step, 0, place, out)
        written = self._write(part, place, out, buffers, copied=self._share(part, place.start, out.size))
        self._measure(step, part.distances[place.start // part.grain :], place.size, out[None], out, buffers)
        if others:
            raw, _ = self.reader.read(others, place.start, place.size, buffers)
            if any(not np.array_equal(out, other[: out.size]) for other in raw):
                self.differing.add(part.work.step.out.name)
        self.count(out.size * len(step.inputs), written)

    def _out(self, part: Part, place: Cut, buffers: Buffers) -> Bytes:
        """Memory for some elements of a part's output, before they are encoded."""
        step = part.work.step
        width = step.out.dtype.itemsize
        if step.encoding != PLAIN:
            return buffers.numbers(place.size * width)
        at = self.output.location(step.out.name)
        return buffers.out(place.size * width, (at[1] if at else 0) + (part.origin + place.start) * width)

    def _write(self, part: Part, place: Cut, out: Bytes, buffers: Buffers, *, copied: bool = False) -> int:
        """Encode, write and hash some elements of a part; copied: they are written already. Returns the bytes written."""
        step, first = part.work.step, part.origin + place.start
        if step.encoding != PLAIN:
            return self._write_encoded(part.work, first, out, buffers)
        start = first * step.out.dtype.itemsize
        if not copied:
            self.output.write(step.out.name, start, out)
        part.work.hashes[0].update(start, out)
        return out.size

    def _write_encoded(self, work: Work, first: int, numbers: Bytes, buffers: Buffers) -> int:
        """Encode and write whole rows, about a grain at a time. Extra memory: the codes of one tile."""
        step, encoding = work.step, self._encoding(work.step)
        spec, cols, align = step.out, step.out.shape[-1], encoding.align_rows
        top, count, height = first // cols, numbers.size // (cols * spec.dtype.itemsize), spec.size // cols
        spans = [_span(stored, height, align, top, count) for stored in step.outs]
        place = self.output.location(step.outs[0].name)  # memory is aligned for the first, which has most of the bytes
        memory = buffers.out(sum(size + 64 for _, size in spans), (place[1] if place else 0) + spans[0][0])
        outs, at = [], 0
        for _, size in spans:
            outs.append(memory[at : at + size])
            at += size + -(memory.ctypes.data + at + size) % 64  # the others begin where numbers of any dtype may
        most = -(-max(1, GRAIN_ELEMENTS // cols) // align) * align
        for row in range(0, count, most):
            n = min(most, count - row)
            rows = buffers.rows(n * cols)
            decode(numbers, spec.dtype.code, row * cols, rows.size, rows)
            runs = [_span(stored, height, align, top + row, n) for stored in step.outs]
            views = [out[a - start :][:size] for out, (start, _), (a, size) in zip(outs, spans, runs, strict=True)]
            encoding.encode(spec, rows.reshape(n, cols), top + row, views)
        for stored, hashed, (start, _), data in zip(step.outs, work.hashes, spans, outs, strict=True):
            self.output.write(stored.name, start, data)
            hashed.update(start, data)
        return sum(size for _, size in spans)

    def count(self, read: int, written: int) -> None:
        """Enter bytes read and written."""
        with self._lock:
            self.read_bytes += read
            self.written_bytes += written

    def _measure(
        self, step: Step, squares: npt.NDArray[np.float64], size: int, raw: Bytes, out: Bytes, buffers: Buffers
    ) -> None:
        """Enter how far `size` elements of an output are from the base, raw[0], into the first rows of `squares`."""
        if len(squares):
            grain = grain_elements(step.out.shape)
            totals = squares[: -(-size // grain)]
            code = self._code(step, 0)
            rows = buffers.scratch.rows(2, np.array([code]), step.out.dtype.code)
            distance(raw[0], code, out, step.out.dtype.code, size, grain, totals, rows, buffers.scratch.sums(2))

    def _code(self, step: Step, i: int) -> int:
        """The dtype's code of one input of a step."""
        return self.reader.dtype(step.inputs[i]).code

    def _take_constants(self, step: Step, place: Cut, raw: Bytes, *, encoded: bool = False) -> Constants | None:
        """Take every NaN and infinity out of what was read, where all the inputs have the same ones; the job sees zeros.

        encoded  the output is stored as codes: an infinity would take its whole row with it

        Returns None when there is none. Raises NonFinite for one that is not the same in all of two or more inputs.
        """
        if self.allow_nonfinite:
            return None
        dtypes = [self.reader.dtype(read) for read in step.inputs]
        if all(first_nonfinite(data, dtype.code, place.size) < 0 for data, dtype in zip(raw, dtypes, strict=False)):
            return None
        found = equal_constants(raw, dtypes, place.size) if len(dtypes) > 1 and not encoded else None
        if found is None:
            for i, data in enumerate(raw[: len(dtypes)]):
                self._check_input(step, i, place, data)
        return found

    def _check_input(self, step: Step, i: int, place: Cut, data: Bytes) -> None:
        """Raise NonFinite for a NaN or infinity among the elements read of one input."""
        read = step.inputs[i]
        spec, dtype = self.reader.source(read).specs[read.tensor], self.reader.dtype(read)
        at = first_nonfinite(data, dtype.code, place.size)
        if at >= 0:
            value = data[at * dtype.itemsize : (at + 1) * dtype.itemsize].view(dtype.numpy)[0]
            flat = self.reader.flat(read, place.start + at)
            raise NonFinite(
                f"element {_place(flat, spec.shape)} is {float(value)}",
                where=f"{self.plan.label(read)}, tensor {read.tensor}",
                fix="repair the model, leave it out, or merge all the same with --allow-nonfinite (allow_nonfinite=True)",
                state=_UNPUBLISHED,
            )

    def _check_output(self, part: Part, place: Cut, out: Bytes) -> None:
        """Raise NonFinite for a result that the output's dtype cannot hold."""
        step = part.work.step
        at = first_nonfinite(out, step.out.dtype.code, place.size)
        if at >= 0:
            flat = part.origin + place.start + at
            raise NonFinite(
                f"element {_place(flat, step.out.shape)} of the result is no number that {step.out.dtype.torch} can hold",
                where=f"output tensor {step.out.name}",
                fix="choose a wider dtype, smaller weights or another method, or go on with --allow-nonfinite "
                "(allow_nonfinite=True)",
                state=_UNPUBLISHED,
            )

    def _share(self, part: Part, first: int, nbytes: int) -> bool:
        """Let the file system share or copy bytes of the first input; False where it would only move them through memory."""
        step, read, width = part.work.step, part.step.inputs[0], part.step.out.dtype.itemsize
        view = read.view
        if step.encoding != PLAIN or isinstance(view, Gather) or not (view is None or view.whole_rows):
            return False
        source, target = self.reader.source(read).location(read.tensor), self.output.location(step.out.name)
        if source is None or target is None or not self._shares(target[0]):
            return False
        from_offset = source[1] + (first + (0 if view is None else view.offset)) * width
        to_offset = target[1] + (first + part.origin) * width
        done = 0
        try:
            while done < nbytes:
                n = os.copy_file_range(source[0], target[0], nbytes - done, from_offset + done, to_offset + done)
                if n == 0:
                    return False
                done += n
        except OSError:  # another file system, or a kernel without it; a real error shows again in write
            return False
        return True

    def _shares(self, fd: int) -> bool:
        """The file system of an output file may copy without moving the bytes through memory; asked once for each file."""
        if fd not in self._sharing:
            self._sharing[fd] = copies_by_reference(fd)
        return self._sharing[fd]

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
                self.scheduler.waiting,
                self._computation,
                is_compiling(),
            )


def _sum_of(squares: Sequence[npt.NDArray[np.float64]]) -> tuple[float, float] | None:
    """A tensor's distance from its base: the sums of its grains, part after part; None without a base."""
    together = np.concatenate(squares) if squares else np.zeros((0, 2))
    if not len(together):
        return None
    moved, base = np.cumsum(together, axis=0)[-1]
    return float(moved), float(base)


def _span(stored: TensorSpec, rows: int, align: int, first: int, count: int) -> tuple[int, int]:
    """Start and length in bytes of what `count` rows from `first` on take in a stored tensor.

    There is something for each row, or for each band of `align` rows. A tile begins at a band.
    """
    unit, units = (1, rows) if stored.nbytes % rows == 0 and stored.shape[0] == rows else (align, -(-rows // align))
    each = stored.nbytes // units
    start, end = first // unit, -(-(first + count) // unit)
    return start * each, (end - start) * each


def _place(flat: int, shape: tuple[int, ...]) -> str:
    """A flat index as the indices of an element."""
    return str([int(i) for i in np.unravel_index(flat, shape)])


def run(
    plan: Plan,
    inputs: Sequence[Source],
    output: Output,
    resources: Resources = Resources(),
    *,
    steps: Sequence[Step] | None = None,
    products: Sequence[Product] | None = None,
    skip: Mapping[str, tuple[float, float] | None] | None = None,
    results: Results | None = None,
    progress: Callable[[Progress], None] | None = None,
    allow_nonfinite: bool = False,
    folders: Sequence[Path] = (),
) -> Outcome:
    """Make output tensors and products of `plan` and write them to `output`.

    steps     of the plan; None: all
    products  of the plan, with all that these and the steps need; None: all
    skip      output tensors (`Step.out`) that are finished already, with their distances from the base
    results   with the products that are finished already
    progress  called from the calling thread: at the start, about ten times a second, and at the end
    allow_nonfinite  merge NaN and infinities as any number; False raises NonFinite
    folders   of each model's files, for products that read them

    Raises what the first failing tile or product raised; `WeightsmithError.product` names the product. KeyboardInterrupt stops
    the threads at their next tile and is raised again.
    """
    steps, skip = plan.steps if steps is None else steps, skip or {}
    results = Results(plan) if results is None else results
    reader = Reader(plan, inputs, results, resources.tile_bytes, resources.aligned_bytes)
    left = [step for step in steps if step.out.name not in skip]
    skipped = [step for step in steps if step.out.name in skip]
    wanted = plan.products if products is None else products
    task = Run(reader, left, wanted, output, resources, allow_nonfinite=allow_nonfinite, folders=folders)
    finished = len(skipped), sum(out.nbytes for step in skipped for out in step.outs)
    began = time.monotonic()

    def report() -> None:
        if progress is not None:
            progress(task.progress(began, finished))

    report()
    task.go(report)
    report()
    differing = tuple(step.out.name for step in left if step.out.name in task.differing)
    distances = {name: moved for name, moved in {**skip, **task.distances}.items() if moved is not None}
    nonfinite = tuple(step.out.name for step in left if step.out.name in task.nonfinite)
    return Outcome(task.read_bytes, task.total_bytes, differing, nonfinite, dict(sorted(distances.items())), results)
