"""Runs a plan on the threads of this machine.

A thread takes a tile, reads each input's rows into its own buffers, lets the job do its work, and writes the encoded result
to its final place. The compiled kernels and the reads and writes release the GIL.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weightsmith import methods
from weightsmith.checkpoint import Checkpoint
from weightsmith.engine.buffers import Buffers
from weightsmith.engine.matrix import matrix_of
from weightsmith.engine.schedule import APPLY, RESIDENT_BYTES, Part, Scheduler, Task, Work
from weightsmith.engine.survey import conduct
from weightsmith.engine.tiles import TILE_BYTES, Cut, cut, tile_grains
from weightsmith.errors import NonFinite, StoreError
from weightsmith.jobs.job import Bytes, Job, Matrix, Tile
from weightsmith.jobs.operations import COPY, OPERATIONS
from weightsmith.jobs.survey import Survey
from weightsmith.kernels.delta import distance
from weightsmith.kernels.finite import first_nonfinite
from weightsmith.planner.steps import Plan, Source, Step
from weightsmith.store.checksum import byte_view, combine
from weightsmith.store.disk import copies_by_reference, read_into
from weightsmith.tensors import grain_elements

_UNPUBLISHED = "Nothing was published; what is finished is kept, and the same merge goes on from it."


class Output(Protocol):
    """Where the bytes go: what the engine needs of `store.Staging`."""

    def location(self, name: str) -> tuple[int, int]:
        """File descriptor and absolute offset of a tensor."""

    def write(self, name: str, start_byte: int, buffer: memoryview | Bytes) -> None:
        """Write part of a tensor. Called from many threads."""

    def finish(self, name: str, checksum: str) -> None:
        """All bytes of a tensor are written."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: bytes of output written and in all, bytes read so far, tensors, and seconds since it began.

    waiting  what is left needs a model that is still being computed
    """

    written_bytes: int
    total_bytes: int
    read_bytes: int
    tensors: int
    total_tensors: int
    seconds: float
    waiting: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did.

    read_bytes, written_bytes  of tensors
    differing   integer tensors on which the models disagree
    distances   for each tensor merged with a base: squared Frobenius norms of output - base and of the base
    """

    read_bytes: int
    written_bytes: int
    differing: tuple[str, ...]
    distances: Mapping[str, tuple[float, float]]


class Run:
    """One execution of one plan."""

    def __init__(
        self,
        plan: Plan,
        inputs: Sequence[Checkpoint],
        output: Output,
        *,
        tile_bytes: int,
        resident_bytes: int,
        skip: Collection[str],
        allow_nonfinite: bool,
    ) -> None:
        self.plan = plan
        self.inputs = inputs
        self.output = output
        self.tile_bytes = tile_bytes
        self.steps = [s for s in plan.steps if s.out.name not in skip]
        if not all(model.ready for model in inputs):
            self.steps.sort(key=lambda step: not all(self._ready(leaf) for leaf in step.leaves))  # those that wait come last
        self.total_bytes = sum(s.out.nbytes for s in plan.steps)
        self.written_bytes = self.total_bytes - sum(s.out.nbytes for s in self.steps)
        self.read_bytes = 0
        self.tensors = len(plan.steps) - len(self.steps)
        self.differing: set[str] = set()
        self.allow_nonfinite = allow_nonfinite
        self.surveys: Mapping[str, Survey] = {}
        self.distances: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()
        self.scheduler = Scheduler(self._parts(), self._finished, resident_bytes, lambda part: self._ready(part.step))

    def _parts(self) -> Iterator[Part]:
        for step in self.steps:
            yield from self._step_parts(step)

    def _ready(self, step: Step) -> bool:
        """What the step reads is there."""
        return all(self.inputs[i.model].ready for i in step.inputs)

    def _step_parts(self, step: Step) -> list[Part]:
        work = Work(step)
        origin = 0
        for leaf in step.leaves:
            if leaf.out.size:
                work.parts.append(Part(work, leaf, None if leaf.op == COPY else self._job(leaf), origin, self.cuts(leaf)))
            origin += leaf.out.size
        work.left = len(work.parts)
        if not work.parts:
            self._finished(work)
        return work.parts

    def cuts(self, step: Step) -> list[Cut]:
        """The tiles of a step's tensor."""
        grain = grain_elements(step.out.shape)
        sources = [self.inputs[i.model].tensors[i.tensor].spec.dtype for i in step.inputs]
        return cut(step.out.size, grain, tile_grains(grain, [*sources, step.out.dtype], self.tile_bytes))

    def matrix(self, step: Step) -> Matrix:
        """What the job of a step is made for."""
        return matrix_of(self.plan, step, self.inputs, self.surveys.get(step.op))

    def _job(self, step: Step) -> Job:
        return (methods.get(step.op).job if step.merges else OPERATIONS[step.op])(self.matrix(step))

    def _finished(self, work: Work) -> None:
        self.output.finish(work.step.out.name, combine(bytes(work.digests)))
        with self._lock:
            self.tensors += 1
            self._note_distance(work.step, [part.distances for part in work.parts])

    def _note_distance(self, step: Step, squares: Sequence[npt.NDArray[np.float64]]) -> None:
        """Enter a tensor's distance from its base: the sums of its grains, part after part."""
        together = np.concatenate(squares) if squares else np.zeros((0, 2))
        if len(together):
            moved, base = np.cumsum(together, axis=0)[-1]
            self.distances[step.out.name] = float(moved), float(base)

    def work(self) -> None:
        """What each thread does until there is nothing left."""
        buffers = Buffers()
        try:
            while (task := self.scheduler.next()) is not None:
                self.scheduler.done(task, self._do(task, buffers))
        except BaseException as error:
            self.scheduler.fail(error)

    def _do(self, task: Task, buffers: Buffers) -> object:
        part = task.part
        step = part.step
        place = part.cuts[task.tile]
        first = place.start
        if part.job is None:
            self._do_copy(part, first, place.size, buffers)
            return None
        raw, read = self.read(step, first, place.size, buffers)
        if part.number == 0 and step.op != "cast" and not self.allow_nonfinite:
            self._check_inputs(step, first, place.size, raw)
        result = None
        written = 0
        if task.phase != APPLY:
            result = part.job.statistics(task.phase, Tile(place.start, place.size, raw, buffers.scratch))
        else:
            out = self._out(part, first, place.size, buffers)
            written = out.size
            part.job.apply(Tile(place.start, place.size, raw, buffers.scratch), out)
            if not self.allow_nonfinite and (step.op != "cast" or first_nonfinite(raw[0], self._code(step, 0), place.size) < 0):
                self._check_output(part, first, place.size, out)
            self._write(part, first, out)
            self._measure(step, part.distances[place.start // part.grain :], place.size, raw, out, buffers)
        self.count(read, written)
        return result

    def _do_copy(self, part: Part, first: int, size: int, buffers: Buffers) -> None:
        """Copy elements first … first + size of the first input, and compare them with those of the others."""
        step = part.step
        source, *others = step.inputs
        out = self._out(part, first, size, buffers)
        self._read_source(source, first, out)
        self._write(part, first, out, copied=self._copy(part, first, out.size))
        if others:
            raw, _ = self.read(replace(step, inputs=tuple(others)), first, size, buffers)
            if any(not np.array_equal(out, other[: out.size]) for other in raw):
                self.differing.add(part.work.step.out.name)
        self.count(out.size * len(step.inputs), out.size)

    def _out(self, part: Part, first: int, size: int, buffers: Buffers) -> Bytes:
        """Memory for elements first … first + size of a part's output."""
        step = part.work.step
        width = step.out.dtype.itemsize
        offset = self.output.location(step.out.name)[1] + (part.origin + first) * width
        return buffers.out(size * width, offset)

    def _write(self, part: Part, first: int, out: Bytes, *, copied: bool = False) -> None:
        """Write and hash the bytes of a part's elements first … ; copied: they are written already."""
        step, first = part.work.step, part.origin + first
        if not copied:
            self.output.write(step.out.name, first * step.out.dtype.itemsize, out)
        part.work.hash(first, out)

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
        source = step.inputs[i]
        return self.inputs[source.model].tensors[source.tensor].spec.dtype.code

    def measure_finished(self, names: Collection[str], threads: int, report: Callable[[], None]) -> None:
        """Distances of tensors that an earlier run has finished, from what it wrote."""
        own = threading.local()

        def measure(step: Step) -> list[npt.NDArray[np.float64]]:
            if not hasattr(own, "buffers"):
                own.buffers = Buffers()
            squares, origin = [], 0
            for leaf in step.leaves:
                if leaf.base and leaf.out.size:
                    squares.append(self._measure_leaf(step, leaf, origin, own.buffers))
                origin += leaf.out.size
            return squares

        steps = [s for s in self.plan.steps if s.out.name in names and any(leaf.base for leaf in s.leaves)]
        with ThreadPoolExecutor(threads, thread_name_prefix="weightsmith-measure") as pool:
            try:
                for step, squares in zip(steps, pool.map(measure, steps), strict=True):
                    self._note_distance(step, squares)
                    report()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _measure_leaf(self, step: Step, leaf: Step, origin: int, buffers: Buffers) -> npt.NDArray[np.float64]:
        """The distances of one finished leaf, whose output begins at element `origin` of the tensor, by grain."""
        grain, width = grain_elements(leaf.out.shape), leaf.out.dtype.itemsize
        squares = np.zeros((-(-leaf.out.size // grain), 2))
        base = replace(leaf, inputs=leaf.inputs[:1])
        fd, offset = self.output.location(step.out.name)
        for place in self.cuts(leaf):
            raw, read = self.read(base, place.start, place.size, buffers)
            self.count(read, 0)
            out = buffers.out(place.size * width, 0)
            if read_into(fd, byte_view(out), offset + (origin + place.start) * width) < out.size:
                raise StoreError("a finished tensor was cut short by someone else", where=f"output tensor {step.out.name}")
            self._measure(leaf, squares[place.start // grain :], place.size, raw, out, buffers)
        return squares

    def _check_inputs(self, step: Step, first: int, size: int, raw: Bytes) -> None:
        """Raise NonFinite for a NaN or infinity among the elements read."""
        for i, source in enumerate(step.inputs):
            dtype = self.inputs[source.model].tensors[source.tensor].spec.dtype
            at = first_nonfinite(raw[i], dtype.code, size)
            if at >= 0:
                value = raw[i, at * dtype.itemsize : (at + 1) * dtype.itemsize].view(dtype.numpy)[0]
                flat = first + at if source.window is None else source.window.flat(first + at)
                raise NonFinite(
                    f"element {_place(flat, self.inputs[source.model].tensors[source.tensor].spec.shape)} is {float(value)}",
                    where=f"{self.plan.models[source.model].ref}, tensor {source.tensor}",
                    fix="repair the model, leave it out, or merge all the same with --allow-nonfinite (allow_nonfinite=True)",
                    state=_UNPUBLISHED,
                )

    def _check_output(self, part: Part, first: int, size: int, out: Bytes) -> None:
        """Raise NonFinite for a result that the output's dtype cannot hold."""
        step, first = part.work.step, part.origin + first
        at = first_nonfinite(out, step.out.dtype.code, size)
        if at >= 0:
            raise NonFinite(
                f"element {_place(first + at, step.out.shape)} of the result is no number that {step.out.dtype.torch} can hold",
                where=f"output tensor {step.out.name}",
                fix="choose a wider dtype, smaller weights or another method, or go on with --allow-nonfinite "
                "(allow_nonfinite=True)",
                state=_UNPUBLISHED,
            )

    def read(self, step: Step, first: int, size: int, buffers: Buffers) -> tuple[Bytes, int]:
        """The bytes of elements first … first + size of all the step's inputs, and how many were read."""
        widths = [self.inputs[i.model].tensors[i.tensor].spec.dtype.itemsize for i in step.inputs]
        raw = buffers.raw(len(widths), size * max(widths))
        for row, source, width in zip(raw, step.inputs, widths, strict=True):
            self._read_source(source, first, row[: size * width])
        return raw, size * sum(widths)

    def _read_source(self, source: Source, first: int, out: Bytes) -> None:
        """Fill `out` with the bytes of a source's elements first … ."""
        checkpoint, window = self.inputs[source.model], source.window
        width = checkpoint.tensors[source.tensor].spec.dtype.itemsize
        if window is None or window.whole_rows:
            offset = 0 if window is None else window.offset
            checkpoint.read_into(source.tensor, (offset + first) * width, out)
            return
        cols, stride = window.cols, window.stride
        wanted, done = len(out) // width, 0
        while done < wanted:  # some rows at a time, with what lies between them
            row, col = divmod(first + done, cols)
            rows = min(-(-(col + wanted - done) // cols), max(1, TILE_BYTES // (stride * width)))
            span = np.empty((rows, stride * width), np.uint8)
            flat = span.reshape(-1)[: ((rows - 1) * stride + cols) * width]
            checkpoint.read_into(source.tensor, (window.offset + row * stride) * width, flat)
            found = span[:, : cols * width].reshape(-1)[col * width :][: (wanted - done) * width]
            out[done * width : done * width + len(found)] = found
            done += len(found) // width

    def _copy(self, part: Part, first: int, nbytes: int) -> bool:
        """Let the file system share or copy bytes of the first input; False where it would only move them through memory."""
        source, name, width = part.step.inputs[0], part.work.step.out.name, part.step.out.dtype.itemsize
        from_fd, from_offset = self.inputs[source.model].location(source.tensor)
        to_fd, to_offset = self.output.location(name)
        window = source.window
        if not copies_by_reference(to_fd) or not (window is None or window.whole_rows):
            return False
        from_offset += (first + (0 if window is None else window.offset)) * width
        to_offset += (first + part.origin) * width
        done = 0
        try:
            while done < nbytes:
                n = os.copy_file_range(from_fd, to_fd, nbytes - done, from_offset + done, to_offset + done)
                if n == 0:
                    return False
                done += n
        except OSError:  # another file system, or a kernel without it; a real error shows again in write
            return False
        return True

    def progress(self, began: float) -> Progress:
        """A snapshot."""
        with self._lock:
            return Progress(
                self.written_bytes,
                self.total_bytes,
                self.read_bytes,
                self.tensors,
                len(self.plan.steps),
                time.monotonic() - began,
                self.scheduler.waiting,
            )


def _place(flat: int, shape: tuple[int, ...]) -> str:
    """A flat index as the indices of an element."""
    return str([int(i) for i in np.unravel_index(flat, shape)])


def run(
    plan: Plan,
    inputs: Sequence[Checkpoint],
    output: Output,
    *,
    threads: int,
    tile_bytes: int = TILE_BYTES,
    resident_bytes: int = RESIDENT_BYTES,
    skip: Collection[str] = frozenset(),
    progress: Callable[[Progress], None] | None = None,
    allow_nonfinite: bool = False,
    surveys: Mapping[str, Survey] | None = None,
) -> Outcome:
    """Make every output tensor of `plan` and write it to `output`.

    tile_bytes  of each input; the result does not depend on it
    resident_bytes  that methods of whole matrices may hold; a matrix that needs more is merged alone
    skip        tensors that are finished already
    progress    called from the calling thread: at the start, about ten times a second, and at the end
    allow_nonfinite  merge NaN and infinities as any number; False raises NonFinite
    surveys     that were conducted for a larger plan of which this is a part; None: they are conducted first

    Models that are not `ready` are waited for when all else is done.

    Raises what the first failing tile raised. KeyboardInterrupt stops the threads at their next tile and is raised again.
    """
    task = Run(
        plan,
        inputs,
        output,
        tile_bytes=tile_bytes,
        resident_bytes=resident_bytes,
        skip=skip,
        allow_nonfinite=allow_nonfinite,
    )
    began = time.monotonic()

    def report() -> None:
        if progress is not None:
            progress(task.progress(began))

    report()
    task.surveys = conduct(task, threads, report) if surveys is None else surveys
    task.measure_finished(skip, threads, report)
    pool = [threading.Thread(target=task.work, name=f"weightsmith-{i}", daemon=True) for i in range(threads)]
    for thread in pool:
        thread.start()
    try:
        for thread in pool:
            while thread.is_alive():
                thread.join(0.1)
                report()
                if task.scheduler.waiting:
                    task.scheduler.wake()
    except BaseException as error:  # KeyboardInterrupt, or the caller's progress function
        task.scheduler.fail(error)
        for thread in pool:
            thread.join()
        raise
    if task.scheduler.error is not None:
        raise task.scheduler.error
    report()
    final = task.progress(began)
    differing = tuple(s.out.name for s in task.steps if s.out.name in task.differing)
    written = sum(s.out.nbytes for s in task.steps)
    return Outcome(final.read_bytes, written, differing, dict(sorted(task.distances.items())))
