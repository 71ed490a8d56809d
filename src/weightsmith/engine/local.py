"""Runs a plan on the threads of this machine.

A thread takes a tile, reads each input's rows into its own buffers, lets the job do its work, and writes the encoded result
to its final place. The compiled kernels and the reads and writes release the GIL.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from weightsmith import methods
from weightsmith.checkpoint import Checkpoint
from weightsmith.engine.schedule import APPLY, Part, Scheduler, Task, Work
from weightsmith.engine.tiles import TILE_BYTES, cut, tile_grains
from weightsmith.methods.job import Bytes, Job, Matrix, Scratch, Tile
from weightsmith.planner.steps import Plan, Step
from weightsmith.store.checksum import DIGEST_BYTES, combine, hash_grains
from weightsmith.store.weight_file import PAGE_BYTES
from weightsmith.tensors import grain_elements


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
    """What a run did: bytes of tensors read and written, and integer tensors on which the models disagree."""

    read_bytes: int
    written_bytes: int
    differing: tuple[str, ...]


class Buffers:
    """One thread's memory: raw tiles of the inputs, the encoded tile of the output, kernel scratch."""

    def __init__(self) -> None:
        self.scratch = Scratch()
        self._raw = np.empty(0, np.uint8)
        self._out = np.empty(0, np.uint8)

    def raw(self, inputs: int, nbytes: int) -> Bytes:
        """uint8 [inputs, >= nbytes], rows aligned to 64 bytes."""
        width = -(-nbytes // 64) * 64
        if self._raw.size < inputs * width:
            self._raw = np.empty(inputs * width, np.uint8)
        return self._raw[: inputs * width].reshape(inputs, width)

    def out(self, nbytes: int, offset: int) -> Bytes:
        """uint8 [nbytes], at an address that equals `offset` (in its file) modulo a page, as direct writes want it."""
        if self._out.size < nbytes + PAGE_BYTES:
            self._out = np.empty(nbytes + PAGE_BYTES, np.uint8)
        first = (offset - self._out.ctypes.data) % PAGE_BYTES
        return self._out[first : first + nbytes]


class Run:
    """One execution of one plan."""

    def __init__(
        self, plan: Plan, inputs: Sequence[Checkpoint], output: Output, *, tile_bytes: int, skip: Collection[str]
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
        self._lock = threading.Lock()
        self.scheduler = Scheduler(self._parts(), self._finished)

    def _parts(self) -> Iterator[Part]:
        for step in self.steps:
            yield from self._step_parts(step)

    def _step_parts(self, step: Step) -> list[Part]:
        shape = step.out.shape
        grain = grain_elements(shape)
        size = step.out.size // step.matrices
        work = Work(step, grain, -(-step.out.size // grain) * DIGEST_BYTES)
        sources = [self.inputs[i.model].tensors[i.tensor].spec.dtype for i in step.inputs]
        grains = tile_grains(grain, [*sources, step.out.dtype], self.tile_bytes)
        if step.op == "copy":
            parts = [Part(work, None, 0, cut(step.out.size, grain, grains))]
        else:
            parts = [
                Part(work, self._job(step, m * size, size, grain), m * size, cut(size, grain, grains))
                for m in range(step.matrices)
            ]
        parts = [p for p in parts if p.cuts]
        work.parts = len(parts)
        if not parts:  # a tensor of no elements
            self._finished(work)
        return parts

    def _job(self, step: Step, index: int, size: int, grain: int) -> Job:
        settings = self.plan.settings[step.settings]
        codes = [self.inputs[i.model].tensors[i.tensor].spec.dtype.code for i in step.inputs]
        shape = step.out.shape
        matrix = Matrix(
            name=step.out.name,
            index=index,
            size=size,
            cols=shape[-1] if shape else 1,
            grain=grain,
            codes=np.array(codes, np.int64),
            out_code=step.out.dtype.code,
            base=step.base,
            shared=settings.shared,
            models=settings.models,
            seed=self.plan.seed,
        )
        if step.op == "cast":
            from weightsmith.methods.combination import CombinationJob

            return CombinationJob(matrix, np.ones(1))
        return methods.get(step.op).job(matrix)

    def _finished(self, work: Work) -> None:
        self.output.finish(work.step.out.name, combine(bytes(work.digests)))
        with self._lock:
            self.tensors += 1

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
        raw, read = self._read(step, first, place.size, buffers)
        result = None
        written = 0
        if task.phase != APPLY:
            assert part.job is not None
            result = part.job.statistics(task.phase, Tile(place.start, place.size, raw, buffers.scratch))
        else:
            width = step.out.dtype.itemsize
            written = place.size * width
            if part.job is None:
                out = raw[0, :written]
                self._copy(step, first * width, out)
                if any(not np.array_equal(out, other[:written]) for other in raw[1:]):
                    self.differing.add(step.out.name)
            else:
                out = buffers.out(written, self.output.location(step.out.name)[1] + first * width)
                part.job.apply(Tile(place.start, place.size, raw, buffers.scratch), out)
                self.output.write(step.out.name, first * width, out)
            at = first // part.work.grain * DIGEST_BYTES
            digests = hash_grains(out, part.work.grain * width)
            part.work.digests[at : at + len(digests)] = digests
        with self._lock:
            self.read_bytes += read
            self.written_bytes += written
        return result

    def _read(self, step: Step, first: int, size: int, buffers: Buffers) -> tuple[Bytes, int]:
        widths = [self.inputs[i.model].tensors[i.tensor].spec.dtype.itemsize for i in step.inputs]
        raw = buffers.raw(len(widths), size * max(widths))
        for row, source, width in zip(raw, step.inputs, widths, strict=True):
            self.inputs[source.model].read_into(source.tensor, first * width, row[: size * width])
        return raw, size * sum(widths)

    def _copy(self, step: Step, start_byte: int, read: Bytes) -> None:
        """Copy bytes inside the kernel, by reference where the file system can; `read` holds them for the checksum."""
        source = step.inputs[0]
        from_fd, from_offset = self.inputs[source.model].location(source.tensor)
        to_fd, to_offset = self.output.location(step.out.name)
        done = 0
        try:
            while done < read.size:
                at = start_byte + done
                n = os.copy_file_range(from_fd, to_fd, read.size - done, from_offset + at, to_offset + at)
                if n == 0:
                    break
                done += n
        except OSError:  # another file system, or a kernel without it; a real error shows again in write
            pass
        if done < read.size:
            self.output.write(step.out.name, start_byte + done, read[done:])

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


def run(
    plan: Plan,
    inputs: Sequence[Checkpoint],
    output: Output,
    *,
    threads: int,
    tile_bytes: int = TILE_BYTES,
    skip: Collection[str] = frozenset(),
    progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    """Make every output tensor of `plan` and write it to `output`.

    tile_bytes  of each input; the result does not depend on it
    skip        tensors that are finished already
    progress    called from the calling thread: at the start, about ten times a second, and at the end

    Raises what the first failing tile raised. KeyboardInterrupt stops the threads at their next tile and is raised again.
    """
    task = Run(plan, inputs, output, tile_bytes=tile_bytes, skip=skip)
    began = time.monotonic()
    if progress is not None:
        progress(task.progress(began))
    pool = [threading.Thread(target=task.work, name=f"weightsmith-{i}", daemon=True) for i in range(threads)]
    for thread in pool:
        thread.start()
    try:
        for thread in pool:
            while thread.is_alive():
                thread.join(0.1)
                if progress is not None:
                    progress(task.progress(began))
    except BaseException as error:  # KeyboardInterrupt, or the caller's progress function
        task.scheduler.fail(error)
        for thread in pool:
            thread.join()
        raise
    if task.scheduler.error is not None:
        raise task.scheduler.error
    final = task.progress(began)
    if progress is not None:
        progress(final)
    differing = tuple(s.out.name for s in task.steps if s.out.name in task.differing)
    return Outcome(final.read_bytes, sum(s.out.nbytes for s in task.steps), differing)
