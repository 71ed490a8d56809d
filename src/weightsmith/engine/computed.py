"""A source of the tensors that a plan makes: computed when they are read, and stored nowhere.

A recipe whose models are results of other recipes runs as one plan in this way: the tiles of the inner one are made, and
rounded to its dtype, where the outer one reads them. The bytes are those of the checkpoint that the inner plan would write.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith.engine.buffers import Buffers
from weightsmith.engine.constants import Finite
from weightsmith.engine.reader import Reader
from weightsmith.engine.results import Results
from weightsmith.engine.tiles import ALIGNED_BYTES, TILE_BYTES, Cut
from weightsmith.formats.files import Extent
from weightsmith.formats.hf_folder import natural_key
from weightsmith.jobs.job import Bytes, Job, Tile
from weightsmith.plans import CAST, COPY, Gather, Plan, Read, Step
from weightsmith.sources.base import Tensors, check_range, closed, digest, spec_of
from weightsmith.tensors import DType, TensorSpec

if TYPE_CHECKING:
    from pathlib import Path

    from weightsmith.checkpoint import Checkpoint
    from weightsmith.sources.base import Buffer

_MERGES = 64
"""Matrices whose statistics are held. The engine works on few tensors at a time."""
_HELD_BYTES = 128 << 20
"""What their jobs may hold together, of more than a few: masks, of one bit for each element."""
_FEW = 8


class Computed:
    """The source. Its plan has neither products nor encodings, and no job that holds a whole matrix.

    inputs  of the plan; closed with this one
    where   the model as the user named it, for messages

    Statistics of a matrix are computed when it is first read, by all the threads that wait for them. A tile is computed each
    time that it is read.
    """

    def __init__(self, plan: Plan, inputs: Sequence[Checkpoint], where: str) -> None:
        self.plan = plan
        self.inputs = tuple(inputs)
        self._where = where
        steps = {step.out.name: step for step in plan.steps}
        self._steps = {name: steps[name] for name in sorted(steps, key=natural_key)}
        self.specs: Mapping[str, TensorSpec] = {name: step.out for name, step in self._steps.items()}
        self.paths: tuple[Path, ...] = tuple(dict.fromkeys(path for source in inputs for path in source.paths))
        self._lock = threading.Lock()
        self._merges: OrderedDict[tuple[str, int], _Merge] = OrderedDict()
        self._facts: dict[tuple[object, ...], tuple[int, int]] = {}
        self._threads = threading.local()
        self._closed = False
        self.set_run()

    def set_run(
        self,
        *,
        allow_nonfinite: bool = False,
        tile_bytes: int = TILE_BYTES,
        aligned_bytes: int = ALIGNED_BYTES,
        device: str = "cpu",
    ) -> None:
        """Compute as the engine does that reads from here. Not while something is read."""
        self._reader = Reader(self.plan, self.inputs, Results(self.plan), tile_bytes, aligned_bytes, device)
        self._finite = Finite(self._reader, allow_nonfinite)
        self._merges.clear()

    @cached_property
    def identity(self) -> str:
        return digest([self.plan.hash])

    @property
    def state(self) -> str:
        return digest([self.identity, *(source.state for source in self.inputs)])

    @property
    def holds_matrices(self) -> bool:
        """Whether a job holds a whole matrix: more than a mask of each input."""
        leaves = (leaf for step in self.plan.steps for leaf in step.leaves)
        return any(self._job_facts(leaf)[1] > len(leaf.inputs) * -(-leaf.out.size // 8) for leaf in leaves)

    def read_bytes(self, name: str) -> tuple[int, int]:
        """Bytes of models that are read to compute a tensor: each time, and once before, for statistics."""
        again = once = 0
        for leaf in self._step(name).leaves:
            reads = [self._read_bytes(read, leaf.out.size) for read in leaf.inputs[: 1 if leaf.op == COPY else None]]
            each = sum(times for times, _ in reads)
            again += each
            once += self._job_facts(leaf)[0] * each + sum(first for _, first in reads)
        return again, once

    def statistics_passes(self, name: str) -> int:
        """How often the models behind a tensor are read for statistics, before it is first read itself."""
        found = 0
        for leaf in self._step(name).leaves:
            sources = ((self.inputs[read.model].source, read.tensor) for read in leaf.inputs)
            inner = [source.statistics_passes(tensor) for source, tensor in sources if isinstance(source, Computed)]
            found = max(found, self._job_facts(leaf)[0] + max(inner, default=0))
        return found

    def _read_bytes(self, read: Read, size: int) -> tuple[int, int]:
        model, spec = self.inputs[read.model], self._source(read).specs[read.tensor]
        if not isinstance(model.source, Computed):
            return size * spec.dtype.itemsize, 0
        again, once = model.source.read_bytes(read.tensor)
        return again * size // max(1, spec.size), once

    def _job_facts(self, leaf: Step) -> tuple[int, int]:
        """Passes for statistics, and bytes held, of the job of a leaf: asked once for each kind of leaf."""
        if leaf.op == COPY or not leaf.out.size:
            return 0, 0
        key = leaf.op, leaf.settings, leaf.base, leaf.out.shape, leaf.role
        if key not in self._facts:
            job = self._reader.job(leaf)
            self._facts[key] = job.passes(), job.resident_bytes
        return self._facts[key]

    def kept_as(self, name: str) -> DType:
        return self._step(name).out.dtype

    def preferred_rows(self, name: str) -> int:
        """The rows of a tile, which is computed as a whole."""
        step = self._step(name)
        leaf, cols = step.leaves[0], max(1, step.out.shape[-1] if step.out.shape else 1)
        if leaf.op == COPY:
            return max(self._source(read).preferred_rows(read.tensor) for read in leaf.inputs)
        return max(1, self._reader.cuts(leaf)[0].size // cols) if leaf.out.size else 1

    def location(self, name: str) -> tuple[int, int] | None:
        step = self._step(name)
        if self._closed:
            raise closed(self._where)
        read = step.inputs[0] if step.op == COPY else None
        if read is None or isinstance(read.view, Gather) or not (read.view is None or read.view.whole_rows):
            return None
        place = self._source(read).location(read.tensor)
        offset = 0 if read.view is None else read.view.offset * step.out.dtype.itemsize
        return None if place is None else (place[0], place[1] + offset)

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        """All that the tensor is made of."""
        leaves = self._step(name).leaves
        found = (self._reader.extents(read, 0, leaf.out.size) for leaf in leaves for read in leaf.inputs)
        return tuple(part for parts in found for part in parts)

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        step = self._step(name)
        if self._closed:
            raise closed(self._where)
        into, width = np.frombuffer(out, np.uint8), step.out.dtype.itemsize
        check_range(step.out, start_byte, into.size, self._where)
        first, end = start_byte // width, -(-(start_byte + into.size) // width)
        whole = into if into.size == (end - first) * width else np.empty((end - first) * width, np.uint8)
        origin = 0
        for number, leaf in enumerate(step.leaves):
            a, b = max(first, origin), min(end, origin + leaf.out.size)
            if a < b:
                self._fill(step, number, origin, a - origin, b - origin, whole[(a - first) * width : (b - first) * width])
            origin += leaf.out.size
        if whole is not into:
            into[:] = whole[start_byte - first * width :][: into.size]

    def check_unchanged(self) -> None:
        for source in self.inputs:
            source.check_unchanged()

    def close(self) -> None:
        sources = () if self._closed else self.inputs  # results that use each other share them
        self._closed = True
        for source in sources:
            source.close()

    def _step(self, name: str) -> Step:
        return self._steps[spec_of(self.specs, name, self._where).name]

    def _source(self, read: Read) -> Tensors:
        return self.inputs[read.model]

    def _fill(self, step: Step, number: int, origin: int, a: int, b: int, out: Bytes) -> None:
        """Fill `out` with elements a to b of a leaf, which begins at element `origin` of the tensor."""
        leaf, width = step.leaves[number], step.out.dtype.itemsize
        if leaf.op == COPY:
            self._reader.fill(leaf.inputs[0], a, out)
            return
        merge = self._merge(step, number, leaf)
        merge.prepare(lambda k: self._statistics(merge, k))
        size = merge.cuts[0].size
        for k in range(a // size, -(-b // size)):
            place = merge.cuts[k]
            data = self._tile(step, origin, merge, k)
            low, high = max(a, place.start), min(b, place.start + place.size)
            out[(low - a) * width : (high - a) * width] = data[(low - place.start) * width : (high - place.start) * width]

    def _merge(self, step: Step, number: int, leaf: Step) -> _Merge:
        key = step.out.name, number
        with self._lock:
            if key not in self._merges:
                self._merges[key] = _Merge(leaf, self._reader.job(leaf), self._reader.cuts(leaf))
                held = sum(merge.job.resident_bytes for merge in self._merges.values())
                while len(self._merges) > (_MERGES if held <= _HELD_BYTES else _FEW):
                    held -= self._merges.popitem(last=False)[1].job.resident_bytes
            self._merges.move_to_end(key)
            return self._merges[key]

    def _statistics(self, merge: _Merge, k: int) -> Any:
        """Statistics of one tile in the pass that is under way."""
        memory, place = self._memory(), merge.cuts[k]
        memory.made = None  # the buffers are shared
        raw, _ = self._reader.read(merge.leaf.inputs, place.start, place.size, memory.buffers)
        if merge.number == 0 or merge.constants:
            merge.constants |= self._finite.take_constants(merge.leaf, place, raw) is not None
        return merge.job.statistics(merge.number, Tile(place.start, place.size, raw, memory.buffers.scratch))

    def _tile(self, step: Step, origin: int, merge: _Merge, k: int) -> Bytes:
        """One tile; the thread has it until it computes another."""
        memory, place, leaf = self._memory(), merge.cuts[k], merge.leaf
        out = memory.buffers.numbers(place.size * step.out.dtype.itemsize)
        if memory.made == (merge, k):
            return out
        memory.made = None
        raw, _ = self._reader.read(leaf.inputs, place.start, place.size, memory.buffers)
        constants = None
        if (merge.number == 0 or merge.constants) and leaf.op != CAST:
            constants = self._finite.take_constants(leaf, place, raw)
        merge.job.apply(Tile(place.start, place.size, raw, memory.buffers.scratch), out)
        self._finite.check_result(leaf, step.out, origin, place, raw, out)
        if constants is not None:
            constants.put(out, step.out.dtype)
        memory.made = (merge, k)
        return out

    def _memory(self) -> _Memory:
        found: _Memory | None = getattr(self._threads, "memory", None)
        if found is None:
            found = self._threads.memory = _Memory()
        return found


class _Memory:
    """Of one thread. made: the tile that is in its buffer of numbers, by merge and number."""

    def __init__(self) -> None:
        self.buffers = Buffers()
        self.made: tuple[_Merge, int] | None = None


class _Merge:
    """The job of one matrix, and its statistics: the tiles of a pass are shared among the threads that wait for it.

    number     of the pass that is under way; of those that were made, once all are
    constants  a NaN or an infinity that all inputs share was found in the first pass
    """

    def __init__(self, leaf: Step, job: Job, cuts: Sequence[Cut]) -> None:
        self.leaf = leaf
        self.job = job
        self.cuts = cuts
        self.number = 0
        self.constants = False
        self._condition = threading.Condition()
        self._error: BaseException | None = None
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._next = self._busy = 0
        self._results: list[Any] = [None] * len(self.cuts)

    def prepare(self, statistics: Callable[[int], Any]) -> None:
        """Take part in the statistics until they are finished. statistics: of a tile, by its number."""
        while (k := self._take()) >= 0:
            try:
                self._enter(k, statistics(k))
            except BaseException as error:
                with self._condition:
                    self._error = error
                    self._condition.notify_all()
                raise

    def _take(self) -> int:
        """The next tile; waits while others have the last of a pass. -1: all passes are made."""
        with self._condition:
            while self._error is None:
                if self.number >= self.job.passes():
                    return -1
                if self._next < len(self.cuts) and not (self.job.sequential and self._busy):
                    self._next += 1
                    self._busy += 1
                    return self._next - 1
                self._condition.wait()
            raise self._error

    def _enter(self, k: int, result: Any) -> None:
        with self._condition:
            self._results[k] = result
            self._busy -= 1
            if self._next == len(self.cuts) and not self._busy:
                self.job.fold(self.number, self._results)
                self.number += 1
                self._begin_pass()
                self._condition.notify_all()
            elif self.job.sequential:
                self._condition.notify_all()
