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
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weightsmith.encodings import Encoding, find_encoding
from weightsmith.encodings.base import WHOLE, array_name
from weightsmith.engine.bench import Computing, EngineBench
from weightsmith.engine.buffers import Buffers
from weightsmith.engine.constants import UNPUBLISHED, Finite
from weightsmith.engine.passes import visits
from weightsmith.engine.reader import Reader, Source
from weightsmith.engine.results import Results
from weightsmith.engine.schedule import APPLY, RESIDENT_BYTES, Flight, Gathered, Part, Scheduler, SurveyFlight, Task, Work
from weightsmith.engine.tiles import ALIGNED_BYTES, TILE_BYTES, Cut
from weightsmith.errors import NonFinite
from weightsmith.jobs.job import Bytes, Matrix, Tile
from weightsmith.jobs.requires import named_device
from weightsmith.kernels.codecs import decode
from weightsmith.kernels.delta import distance
from weightsmith.kernels.finite import first_nonfinite
from weightsmith.kernels.watch import is_compiling, leave
from weightsmith.options import SPOOL_BYTES
from weightsmith.outputs.interface import Finished, Output
from weightsmith.outputs.local.disk import copies_by_reference
from weightsmith.plans import CAST, COPY, PLAIN, Gather, Plan, Product, Step
from weightsmith.products import find_kind
from weightsmith.products.base import Arrays
from weightsmith.remote.ahead import ReadAhead
from weightsmith.tensors import GRAIN_ELEMENTS, TensorSpec, grain_elements

_NO_NUMBERS = np.empty(0, np.float32)
WHOLE_BYTES = 6
"""Memory for each element of a tensor that is encoded as a whole: float32, the codes, and a group of rows."""


@dataclass(frozen=True, slots=True)
class Computation:
    """A product that is being computed, and how far it is, in units of its own. total: 0 while that is not known."""

    doing: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: bytes of output written and in all, bytes read so far, tensors, and seconds since it began.

    waiting      all remaining tensors need a product that is still being computed
    computation  that product
    compiling    kernels are being compiled, because no earlier run needed them
    checking     all is written, and transformers has not said yet whether it can load it
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did.

    read_bytes, written_bytes  of tensors
    fetched_bytes  of files elsewhere, over the network
    finished    the output tensors (`Step.out`), also those that were skipped
    results     the products
    """

    read_bytes: int
    written_bytes: int
    finished: Mapping[str, Finished]
    results: Results
    fetched_bytes: int = 0

    @property
    def distances(self) -> dict[str, tuple[float, float]]:
        """For each tensor merged with a base: squared Frobenius norms of output - base and of the base."""
        return {name: done.distance for name, done in sorted(self.finished.items()) if done.distance is not None}


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a run.

    threads         default: the processors this process may use
    tile_bytes      of each input; the result does not depend on it
    aligned_bytes   the same, of tiles with as many rows as an input prefers
    product_bytes   that a product that computes may hold besides its arrays; None: no limit
    resident_bytes  that methods of whole matrices may hold; a matrix that needs more is merged alone
    device          for products that compute and for whole matrices, as torch names it, or auto
    spool_bytes     on disk, for bytes of files elsewhere
    """

    threads: int = 0
    tile_bytes: int = TILE_BYTES
    resident_bytes: int = RESIDENT_BYTES
    device: str = "cpu"
    aligned_bytes: int = ALIGNED_BYTES
    product_bytes: int | None = None
    spool_bytes: int = SPOOL_BYTES

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
        abandon: Callable[[], None] = lambda: None,
        in_order: bool = False,
    ) -> None:
        """
        folders  of each model's files, for products that read them
        abandon  after an error: wakes threads that wait for bytes, or for the output. May be called several times
        in_order  see `run`
        """
        self.reader = reader
        self.plan = reader.plan
        self.output = output
        self.resources = resources
        self.allow_nonfinite = allow_nonfinite
        self.finite = Finite(reader, allow_nonfinite)
        self.folders = folders
        self.abandon = abandon
        self.total_bytes = sum(out.nbytes for step in steps for out in step.outs)
        self.total_tensors = len(steps)
        self.written_bytes = self.read_bytes = self.tensors = 0
        self.finished: dict[str, Finished] = {}
        self._lock = threading.Lock()
        self._encodings: dict[str, Encoding] = {}
        self._sharing: dict[int, bool] = {}
        self._cancelled = threading.Event()
        self._computation: Computation | None = None
        self._computing = Computing(self._bench, self._product_done)
        self._makes_products = bool(products)
        self._unmade = _unmade(self.plan, steps, products, reader.results)
        self._unbegun = dict(self._unmade)
        needs = ((step, self.plan.needs(step)) for step in steps)
        self.scheduler = Scheduler(
            needs, self._unmade, self._parts, self._complete, resources.resident_bytes, in_order=in_order
        )

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
            self._forget_products()
            self._begin_products()
            for thread in pool:
                thread.start()
            for thread in pool:
                while thread.is_alive():
                    thread.join(0.1)
                    if self.scheduler.error is not None:
                        self.abandon()
                    report()
        except BaseException as error:  # KeyboardInterrupt, or the caller's progress function
            self.scheduler.fail(error)
            self.abandon()
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
        self.reader.results.put(product, self.output.keep(product, arrays))
        with self._lock:
            del self._unmade[product.name]
            self._computation = None
        self._forget_products()
        self._begin_products()
        self.scheduler.product_finished(product.name)

    def _forget_products(self) -> None:
        """Remove transient products that no unfinished product needs."""
        if not self._makes_products:  # it runs for a product, whose own needs are in use
            return
        with self._lock:
            needed = {name for product in self._unmade.values() for name in product.needs}
        for product in self.plan.products:
            if product.transient and product.name not in needed and self.reader.results.finished(product.name):
                self.reader.results.drop(product)
                self.output.forget(product)

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
            self.reader.results,
            partial(self.output.create, product),
            product,
            self.folders,
            self.resources.device,
            self.resources.workers,
            self.resources.product_bytes,
            self._run_apart,
            report,
            self._cancelled,
        )

    def _run_apart(self, steps: Sequence[Step], output: Output, check: Callable[[], None]) -> None:
        """Run steps for a product that computes. The products they need are finished, because it needs them too."""
        run = Run(self.reader, steps, (), output, self.resources, allow_nonfinite=self.allow_nonfinite)
        run.go(check)
        self.count(run.read_bytes, 0)

    # ---- steps

    def _parts(self, step: Step) -> list[Part]:
        work = Work(step)
        origin, align = 0, self._encoding(step).align_rows if step.encoding != PLAIN else 1
        if align == WHOLE:
            align, work.gathered = 1, Gathered(step.out.size)
        for leaf in step.leaves:
            if leaf.out.size:
                job = None if leaf.op == COPY else self.reader.job(leaf)
                part = Part(work, leaf, job, origin, self.reader.cuts(leaf, align))
                if work.gathered is not None:
                    part.resident_bytes += WHOLE_BYTES * leaf.out.size
                work.parts.append(part)
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
        done = [Finished(hashed.checksum(), made_from, moved, work.differing, work.nonfinite) for hashed in work.hashes]
        for spec, finished in zip(work.step.outs, done, strict=True):
            self.output.finish(spec.name, finished)
        with self._lock:
            self.tensors += 1
            self.finished[work.step.out.name] = done[0]

    def _work(self) -> None:
        """The loop of each thread."""
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
            self.finite.take_constants(step, place, raw)
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
            constants = self.finite.take_constants(step, place, raw, encoded=flight.work.step.encoding != PLAIN)
            flight.constants |= constants is not None
        tile = Tile(place.start, place.size, raw, buffers.scratch)
        if task.phase != APPLY:
            self.count(read, 0)
            return flight.job.statistics(task.phase, tile)
        out = self._out(flight, place, buffers)
        flight.job.apply(tile, out)
        self.finite.check_result(step, flight.work.step.out, flight.origin, place, raw, out)
        self._measure(step, flight.distances[place.start // flight.grain :], place.size, raw, out, buffers)
        if constants is not None:
            constants.put(out, step.out.dtype)
            flight.work.nonfinite = True
        written = self._write(flight, place, out, buffers)
        self.count(read, written)
        return None

    def _copy(self, part: Part, place: Cut, buffers: Buffers) -> None:
        """Copy some elements of the first input, and compare them with those of the others."""
        step = part.step
        source, *others = step.inputs
        out = self._out(part, place, buffers)
        self.reader.fill(source, place.start, out)
        if part.work.step.encoding != PLAIN and not self.allow_nonfinite:  # an infinity would spoil its whole row
            self.finite.check_input(step, 0, place, out)
        else:
            self.finite.check_copied(step, place, out)
        self._offer(part, place.start, out.size)
        written = self._write(part, place, out, buffers, copied=self._share(part, place.start, out.size))
        self._measure(step, part.distances[place.start // part.grain :], place.size, out[None], out, buffers)
        if others:
            raw, _ = self.reader.read(others, place.start, place.size, buffers)
            if any(not np.array_equal(out, other[: out.size]) for other in raw):
                part.work.differing = True
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
        if part.work.gathered is not None:
            return self._gather(part.work, part.work.gathered, first, out)
        if step.encoding != PLAIN:
            return self._write_encoded(part.work, first, out, buffers)
        start = first * step.out.dtype.itemsize
        if not copied:
            self.output.write(step.out.name, start, out)
        part.work.hashes[0].update(start, out)
        return out.size

    def _gather(self, work: Work, whole: Gathered, first: int, numbers: Bytes) -> int:
        """Enter some elements of a tensor; with the last of them, encode and write it. Returns the bytes written."""
        spec, encoding = work.step.out, self._encoding(work.step)
        count = numbers.size // spec.dtype.itemsize
        decode(numbers, spec.dtype.code, 0, count, whole.values[first : first + count])
        if not whole.entered(count):
            return 0
        outs = [np.empty(stored.nbytes, np.uint8) for stored in work.step.outs]
        encoding.encode(spec, whole.values.reshape(spec.shape), 0, outs, _NO_NUMBERS)
        work.gathered = None
        for stored, hashed, data in zip(work.step.outs, work.hashes, outs, strict=True):
            self.output.write(stored.name, 0, data)
            hashed.update(0, data)
        return sum(data.size for data in outs)

    def _write_encoded(self, work: Work, first: int, numbers: Bytes, buffers: Buffers) -> int:
        """Encode and write whole rows, about a grain at a time. Extra memory: the codes of one tile."""
        step, encoding = work.step, self._encoding(work.step)
        spec, align = step.out, encoding.align_rows
        cols = spec.shape[-1] if len(spec.shape) > 1 else 1  # a vector may be cut anywhere
        top, count, height = first // cols, numbers.size // (cols * spec.dtype.itemsize), spec.size // cols
        rowed = len(step.outs) - encoding.whole

        def span(i: int, row: int, n: int) -> tuple[int, int]:
            return _span(step.outs[i], height, align, row, n) if i < rowed else (0, step.outs[i].nbytes)

        spans = [span(i, top, count) for i in range(len(step.outs))]
        place = self.output.location(step.outs[0].name)  # memory is aligned for the first, which has most of the bytes
        memory = buffers.out(sum(size + 64 for _, size in spans), (place[1] if place else 0) + spans[0][0])
        outs, at = [], 0
        for _, size in spans:
            outs.append(memory[at : at + size])
            at += size + -(memory.ctypes.data + at + size) % 64  # the others begin where numbers of any dtype may
        most = -(-max(1, GRAIN_ELEMENTS // cols) // align) * align
        about = self.reader.results.array(array_name(encoding, spec.name)) if encoding.product else _NO_NUMBERS
        about = self.plan.tables[step.weighted].floats if step.weighted >= 0 else about
        for row in range(0, count, most):
            n = min(most, count - row)
            rows = buffers.rows(n * cols)
            decode(numbers, spec.dtype.code, row * cols, rows.size, rows)
            runs = [span(i, top + row, n) for i in range(len(step.outs))]
            views = [out[a - start :][:size] for out, (start, _), (a, size) in zip(outs, spans, runs, strict=True)]
            encoding.encode(spec, rows.reshape(n, cols), top + row, views, about)
        made = len(outs) if top == 0 else rowed  # the first tile writes what belongs to the whole tensor
        for stored, hashed, (start, _), data in list(zip(step.outs, work.hashes, spans, outs, strict=True))[:made]:
            if stored.dtype.name == "F16" and not self.allow_nonfinite:
                self._check_stored(step, stored, start, data)
            self.output.write(stored.name, start, data)
            hashed.update(start, data)
        return sum(size for _, size in spans[:made])

    def _check_stored(self, step: Step, stored: TensorSpec, start: int, data: Bytes) -> None:
        """Raise NonFinite for a number that the type of a stored tensor cannot hold."""
        at = first_nonfinite(data, stored.dtype.code, data.size // stored.dtype.itemsize)
        if at >= 0:
            raise NonFinite(
                f"an element of row {(start // stored.dtype.itemsize + at) // stored.shape[-1]:,} is not a number that "
                f"{stored.dtype} can hold",
                where=f"output tensor {step.out.name}",
                fix="choose a format with a wider range, such as gguf-bf16",
                state=UNPUBLISHED,
            )

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

    def _offer(self, part: Part, first: int, nbytes: int) -> None:
        """Tell the output where bytes of the first input are, if that is a run of a file elsewhere."""
        step, width = part.work.step, part.step.out.dtype.itemsize
        if step.encoding == PLAIN and not isinstance(part.step.inputs[0].view, Gather):
            extents = self.reader.extents(part.step.inputs[0], first, nbytes // width)
            if len(extents) == 1 and extents[0].nbytes == nbytes:
                self.output.equal(step.out.name, (part.origin + first) * width, extents[0])

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


def _unmade(plan: Plan, steps: Sequence[Step], products: Sequence[Product], results: Results) -> dict[str, Product]:
    """The unfinished products; of the transient ones, those that an unfinished product needs."""
    wanted = {p.name for p in products if not p.transient} | {name for step in steps for name in plan.needs(step)}
    found = {}
    for product in reversed(plan.products):
        if product.name in wanted and not results.finished(product.name):
            found[product.name] = product
            wanted.update(product.needs)
    return {p.name: p for p in plan.products if p.name in found}


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


def run(
    plan: Plan,
    inputs: Sequence[Source],
    output: Output,
    resources: Resources = Resources(),
    *,
    steps: Sequence[Step] | None = None,
    products: Sequence[Product] | None = None,
    skip: Mapping[str, Finished] | None = None,
    results: Results | None = None,
    progress: Callable[[Progress], None] | None = None,
    allow_nonfinite: bool = False,
    folders: Sequence[Path] = (),
    in_order: bool = False,
    abandon: Callable[[], None] = lambda: None,
) -> Outcome:
    """Compute output tensors and products of `plan` and write them to `output`.

    steps     of the plan; None: all
    products  of the plan, including all that these and the steps need; None: all
    skip      output tensors (`Step.out`) that are finished already
    results   with the products that are finished already
    progress  called from the calling thread: at the start, about ten times a second, and at the end
    allow_nonfinite  merge NaN and infinities like any number; False raises NonFinite
    folders   of each model's files, for products that read them
    in_order  begin the steps in their order: none before a step that waits for a product. For outputs that hold a few files
              at a time
    abandon   wakes threads that wait for the output, after an error; may be called several times

    Raises what the first failing tile or product raised; `WeightsmithError.product` names the product. KeyboardInterrupt stops
    the threads at their next tile and is raised again.
    """
    steps, skip = plan.steps if steps is None else steps, skip or {}
    results = Results(plan) if results is None else results
    reader = Reader(plan, inputs, results, resources.tile_bytes, resources.aligned_bytes, named_device(resources.device))
    left = [step for step in steps if step.out.name not in skip]
    skipped = [step for step in steps if step.out.name in skip]
    wanted = plan.products if products is None else products
    finished = len(skipped), sum(out.nbytes for step in skipped for out in step.outs)
    began = time.monotonic()
    to_make = [product for product in wanted if not results.finished(product.name)]
    with ReadAhead(visits(reader, left, to_make), resources.spool_bytes) as ahead:

        def stop() -> None:
            ahead.stop()
            abandon()

        task = Run(
            reader,
            left,
            wanted,
            output,
            resources,
            allow_nonfinite=allow_nonfinite,
            folders=folders,
            abandon=stop,
            in_order=in_order,
        )

        def report() -> None:
            if progress is not None:
                progress(task.progress(began, finished))

        report()
        task.go(report)
        report()
    done = {**skip, **task.finished}
    made = {step.out.name: done[step.out.name] for step in steps}
    return Outcome(task.read_bytes, task.total_bytes, made, results, ahead.fetched_bytes)
