"""Runs a plan on the threads of this machine.

A thread takes a tile, reads each input's rows into its own buffers, lets the job do its work, and writes the encoded result
to its final place. The compiled kernels and the reads and writes release the GIL.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from weightsmith import methods
from weightsmith.checkpoint import Checkpoint
from weightsmith.engine.buffers import Buffers
from weightsmith.engine.matrices import matrices
from weightsmith.engine.schedule import APPLY, RESIDENT_BYTES, Part, Scheduler, Task, Work
from weightsmith.engine.survey import conduct
from weightsmith.engine.tiles import TILE_BYTES, Cut, cut, tile_grains
from weightsmith.errors import NonFinite, StoreError
from weightsmith.jobs.job import Bytes, Job, Matrix, Tile
from weightsmith.jobs.survey import Survey
from weightsmith.kernels.delta import distance
from weightsmith.kernels.finite import first_nonfinite
from weightsmith.planner.steps import Plan, Step
from weightsmith.store.checksum import DIGEST_BYTES, byte_view, combine, hash_grains
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
    """How far a run is: bytes of output written and in all, bytes read so far, tensors, and seconds since it began."""

    written_bytes: int
    total_bytes: int
    read_bytes: int
    tensors: int
    total_tensors: int
    seconds: float


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
        self.total_bytes = sum(s.out.nbytes for s in plan.steps)
        self.written_bytes = self.total_bytes - sum(s.out.nbytes for s in self.steps)
        self.read_bytes = 0
        self.tensors = len(plan.steps) - len(self.steps)
        self.differing: set[str] = set()
        self.allow_nonfinite = allow_nonfinite
        self.survey: Survey | None = None
        self.distances: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()
        self.scheduler = Scheduler(self._parts(), self._finished, resident_bytes)

    def _parts(self) -> Iterator[Part]:
        for step in self.steps:
            yield from self._step_parts(step)

    def _step_parts(self, step: Step) -> list[Part]:
        grain = grain_elements(step.out.shape)
        work = Work(step, grain, -(-step.out.size // grain))
        if not step.out.size:
            parts = []
        elif step.op == "copy":
            parts = [Part(work, None, 0, self.cuts(step, step.out.size))]
        else:
            parts = [
                Part(work, self._job(step, matrix), matrix.index, self.cuts(step, matrix.size))
                for matrix in self.matrices(step)
            ]
        work.parts = len(parts)
        if not parts:
            self._finished(work)
        return parts

    def cuts(self, step: Step, size: int) -> list[Cut]:
        """The tiles of `size` elements of a step's tensor."""
        grain = grain_elements(step.out.shape)
        sources = [self.inputs[i.model].tensors[i.tensor].spec.dtype for i in step.inputs]
        return cut(size, grain, tile_grains(grain, [*sources, step.out.dtype], self.tile_bytes))

    def matrices(self, step: Step) -> list[Matrix]:
        """The logical matrices of a step that merges."""
        return matrices(self.plan, step, self.inputs, self.survey)

    def _job(self, step: Step, matrix: Matrix) -> Job:
        if step.op == "cast":
            from weightsmith.jobs.combination import CombinationJob

            return CombinationJob(matrix, np.ones(1))
        return methods.get(step.op).job(matrix)

    def _finished(self, work: Work) -> None:
        self.output.finish(work.step.out.name, combine(bytes(work.digests)))
        with self._lock:
            self.tensors += 1
            self._note_distance(work)

    def _note_distance(self, work: Work) -> None:
        if len(work.distances):
            moved, base = np.cumsum(work.distances, axis=0)[-1]
            self.distances[work.step.out.name] = float(moved), float(base)

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
        step = part.work.step
        place = part.cuts[task.tile]
        first = part.index + place.start
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
            out = self._out(step, first, place.size, buffers)
            written = out.size
            part.job.apply(Tile(place.start, place.size, raw, buffers.scratch), out)
            if not self.allow_nonfinite and (step.op != "cast" or first_nonfinite(raw[0], self._code(step, 0), place.size) < 0):
                self._check_output(step, first, place.size, out)
            self.output.write(step.out.name, first * step.out.dtype.itemsize, out)
            self._measure(part.work, first, place.size, raw, out, buffers)
            self._note_digests(part.work, first, out)
        self.count(read, written)
        return result

    def _do_copy(self, part: Part, first: int, size: int, buffers: Buffers) -> None:
        """Copy elements first … first + size of the first input, and compare them with those of the others."""
        step = part.work.step
        width = step.out.dtype.itemsize
        source, *others = step.inputs
        out = self._out(step, first, size, buffers)
        self.inputs[source.model].read_into(source.tensor, first * width, out)
        if not self._copy(step, first * width, out.size):
            self.output.write(step.out.name, first * width, out)
        if others:
            raw, _ = self.read(replace(step, inputs=tuple(others)), first, size, buffers)
            if any(not np.array_equal(out, other[: out.size]) for other in raw):
                self.differing.add(step.out.name)
        self._note_digests(part.work, first, out)
        self.count(out.size * len(step.inputs), out.size)

    def _out(self, step: Step, first: int, size: int, buffers: Buffers) -> Bytes:
        """Memory for elements first … first + size of the output."""
        width = step.out.dtype.itemsize
        return buffers.out(size * width, self.output.location(step.out.name)[1] + first * width)

    def _note_digests(self, work: Work, first: int, out: Bytes) -> None:
        at = first // work.grain * DIGEST_BYTES
        digests = hash_grains(out, work.grain * work.step.out.dtype.itemsize)
        work.digests[at : at + len(digests)] = digests

    def count(self, read: int, written: int) -> None:
        """Enter bytes read and written."""
        with self._lock:
            self.read_bytes += read
            self.written_bytes += written

    def _measure(self, work: Work, first: int, size: int, raw: Bytes, out: Bytes, buffers: Buffers) -> None:
        """Enter how far elements first … first + size of the output are from the base, raw[0]."""
        if len(work.distances):
            at = first // work.grain
            totals = work.distances[at : at + -(-size // work.grain)]
            step = work.step
            code = self._code(step, 0)
            rows = buffers.scratch.rows(2, np.array([code]), step.out.dtype.code)
            distance(raw[0], code, out, step.out.dtype.code, size, work.grain, totals, rows, buffers.scratch.sums(2))

    def _code(self, step: Step, i: int) -> int:
        """The dtype's code of one input of a step."""
        source = step.inputs[i]
        return self.inputs[source.model].tensors[source.tensor].spec.dtype.code

    def measure_finished(self, names: Collection[str], report: Callable[[], None]) -> None:
        """Distances of tensors that an earlier run has finished, from what it wrote."""
        buffers = Buffers()
        for step in self.plan.steps:
            if step.base and step.out.name in names and step.out.size:
                grain = grain_elements(step.out.shape)
                work = Work(step, grain, -(-step.out.size // grain))
                base = replace(step, inputs=step.inputs[:1])
                for place in self.cuts(step, step.out.size):
                    raw, read = self.read(base, place.start, place.size, buffers)
                    self.count(read, 0)
                    fd, offset = self.output.location(step.out.name)
                    width = step.out.dtype.itemsize
                    out = buffers.out(place.size * width, 0)
                    if read_into(fd, byte_view(out), offset + place.start * width) < out.size:
                        raise StoreError(
                            "a finished tensor was cut short by someone else", where=f"output tensor {step.out.name}"
                        )
                    self._measure(work, place.start, place.size, raw, out, buffers)
                    report()
                self._note_distance(work)

    def _check_inputs(self, step: Step, first: int, size: int, raw: Bytes) -> None:
        """Raise NonFinite for a NaN or infinity among the elements read."""
        for i, source in enumerate(step.inputs):
            dtype = self.inputs[source.model].tensors[source.tensor].spec.dtype
            at = first_nonfinite(raw[i], dtype.code, size)
            if at >= 0:
                value = raw[i, at * dtype.itemsize : (at + 1) * dtype.itemsize].view(dtype.numpy)[0]
                raise NonFinite(
                    f"element {_place(first + at, step.out.shape)} is {float(value)}",
                    where=f"{self.plan.models[source.model].ref}, tensor {source.tensor}",
                    fix="repair the model, leave it out, or merge all the same with --allow-nonfinite (allow_nonfinite=True)",
                    state=_UNPUBLISHED,
                )

    def _check_output(self, step: Step, first: int, size: int, out: Bytes) -> None:
        """Raise NonFinite for a result that the output's dtype cannot hold."""
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
            self.inputs[source.model].read_into(source.tensor, first * width, row[: size * width])
        return raw, size * sum(widths)

    def _copy(self, step: Step, start_byte: int, nbytes: int) -> bool:
        """Let the file system share or copy bytes of the first input; False where it would only move them through memory."""
        source = step.inputs[0]
        from_fd, from_offset = self.inputs[source.model].location(source.tensor)
        to_fd, to_offset = self.output.location(step.out.name)
        if not copies_by_reference(to_fd):
            return False
        done = 0
        try:
            while done < nbytes:
                at = start_byte + done
                n = os.copy_file_range(from_fd, to_fd, nbytes - done, from_offset + at, to_offset + at)
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
) -> Outcome:
    """Make every output tensor of `plan` and write it to `output`.

    tile_bytes  of each input; the result does not depend on it
    resident_bytes  that methods of whole matrices may hold; a matrix that needs more is merged alone
    skip        tensors that are finished already
    progress    called from the calling thread: at the start, about ten times a second, and at the end
    allow_nonfinite  merge NaN and infinities as any number; False raises NonFinite

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
    task.survey = conduct(task, threads, report)
    task.measure_finished(skip, report)
    pool = [threading.Thread(target=task.work, name=f"weightsmith-{i}", daemon=True) for i in range(threads)]
    for thread in pool:
        thread.start()
    try:
        for thread in pool:
            while thread.is_alive():
                thread.join(0.1)
                report()
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
