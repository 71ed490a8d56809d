"""A source of the tensors that a plan makes: computed when they are read, and stored nowhere.

A recipe whose models are results of other recipes runs as one plan in this way: the tiles of the inner one are made, and
rounded to its dtype, where the outer one reads them. The bytes are those of the checkpoint that the inner plan would write.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith._base.files import Extent
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._engine.reader import Reader, Source
from weightsmith._engine.resources import DEFAULTS, Buffers, Resources
from weightsmith._engine.results import Results
from weightsmith._engine.schedule import APPLY, ActiveStep, LeafPass, Scheduler, Task
from weightsmith._engine.tile_work import Finite, Merger
from weightsmith._files.hf_folder import natural_key
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._plans import CAST, COPY, PRODUCTS, Gather, Plan, Read, Step
from weightsmith.abc.job import Bytes
from weightsmith.abc.tensors import check_range, closed, digest, spec_of

if TYPE_CHECKING:
    from pathlib import Path

    from weightsmith.abc.tensors import Buffer

_MERGES = 64
"""Matrices whose statistics are held. The engine works on few tensors at a time."""
_HELD_BYTES = 128 << 20
"""What their jobs may hold together, of more than a few: masks, of one bit for each element."""
_FEW = 8


class ComputedSource:
    """The source. Its plan has no encodings.

    inputs   of the plan; closed with this one
    where    the model as the user named it, for messages
    results  with the products of the plan, all finished; None: it has none

    Statistics of a matrix are computed when it is first read, by all the threads that wait for them. A tile is computed each
    time that it is read. Methods of whole matrices hold the matrix that was read last, and others as memory allows: read
    tensor after tensor, not a little of each in turn.
    """

    def __init__(self, plan: Plan, inputs: Sequence[Checkpoint], where: str, results: Results | None = None) -> None:
        self.plan = plan
        self.inputs = tuple(inputs)
        self._where = where
        self._results = Results(plan) if results is None else results
        steps = {step.out.name: step for step in plan.steps}
        self._steps = {name: steps[name] for name in sorted(steps, key=natural_key)}
        self.specs: Mapping[str, TensorSpec] = {name: step.out for name, step in self._steps.items()}
        self.paths: tuple[Path, ...] = tuple(dict.fromkeys(path for source in inputs for path in source.paths))
        self._lock = threading.Lock()
        self._merges: OrderedDict[tuple[str, int], _Merge] = OrderedDict()
        self._threads = threading.local()
        self._closed = False
        self._tiles_read: dict[str, float] = {}
        self.set_run()

    def set_run(self, resources: Resources = DEFAULTS, *, allow_nonfinite: bool = False) -> None:
        """Compute as the engine does that reads from here. Not while something is read."""
        self._reader = Reader(self.plan, self.inputs, self._results, resources)
        self._merger = Merger(self._reader, Finite(self._reader, allow_nonfinite))
        self._resident_bytes = resources.resident_bytes
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
        return any(_holds_matrix(leaf, self._reader.job_facts(leaf)[1]) for leaf in leaves)

    def read_bytes(self, name: str) -> tuple[int, int]:
        """Bytes of models that are read to compute a tensor: each time, and once before, for statistics."""
        again = once = 0
        for leaf in self._step(name).leaves:
            reads = [self._read_bytes(read, leaf.out.size) for read in leaf.inputs[: 1 if leaf.op == COPY else None]]
            read_now = sum(times for times, _ in reads)
            again += read_now
            once += self._reader.job_facts(leaf)[0] * read_now + sum(first for _, first in reads)
        return again, once

    def statistics_passes(self, name: str) -> int:
        """How often the models behind a tensor are read for statistics, before it is first read itself."""
        return max(self._reader.job_facts(leaf)[0] + inner_passes(self._reader, leaf) for leaf in self._step(name).leaves)

    def _read_bytes(self, read: Read, size: int) -> tuple[int, int]:
        source = self._reader.source(read)
        spec, inner = source.specs[read.tensor], computed_source(source)
        if inner is None:
            return size * spec.dtype.itemsize, 0
        again, once = inner.read_bytes(read.tensor)
        return again * size // max(1, spec.size), once

    def tiles_read(self, name: str) -> float:
        """Tiles of models that are read for one tile of a tensor; infinite if a product or a whole matrix is needed first."""
        if name not in self._tiles_read:
            self._tiles_read[name] = max(map(self._tiles_of, self._step(name).leaves), default=1)
        return self._tiles_read[name]

    def _tiles_of(self, leaf: Step) -> float:
        if leaf.needs or any(read.model == PRODUCTS or read.table for read in leaf.all_inputs):
            return math.inf
        if leaf.op != COPY and _holds_matrix(leaf, self._reader.job_facts(leaf)[1]):
            return math.inf
        inner = ((computed_source(self._reader.source(read)), read.tensor) for read in leaf.inputs)
        return sum(1 if source is None else source.tiles_read(name) for source, name in inner)

    def counterparts(self, one: str, other: str) -> list[tuple[Checkpoint, str, str]] | None:
        """The model and the tensors that two tensors are made of in the same way; None if it is not the same."""
        leaves, twins = self._step(one).leaves, self._step(other).leaves
        if len(leaves) != len(twins) or any(map(_made_apart, leaves, twins)):
            return None
        pairs = [pair for leaf, twin in zip(leaves, twins, strict=True) for pair in zip(leaf.inputs, twin.inputs, strict=True)]
        return [(self.inputs[a.model], a.tensor, b.tensor) for a, b in pairs if a.model != PRODUCTS]

    def copy_of(self, name: str) -> tuple[Checkpoint, str] | None:
        """The model and its tensor that a tensor is a copy of, as a whole; None if it is not."""
        step = self._step(name)
        if step.op not in (COPY, CAST) or len(step.inputs) != 1:
            return None
        (read,) = step.inputs
        return None if read.view is not None or read.model == PRODUCTS else (self.inputs[read.model], read.tensor)

    def natural_dtype(self, name: str) -> DType:
        return self._step(name).out.dtype

    def preferred_rows(self, name: str) -> int:
        """The rows of a tile, which is computed as a whole."""
        step = self._step(name)
        leaf, cols = step.leaves[0], max(1, step.out.shape[-1] if step.out.shape else 1)
        if leaf.op == COPY:
            return max(self._reader.source(read).preferred_rows(read.tensor) for read in leaf.inputs)
        return max(1, self._reader.cuts(leaf)[0].size // cols) if leaf.out.size else 1

    def location(self, name: str) -> tuple[int, int] | None:
        step = self._step(name)
        if self._closed:
            raise closed(self._where)
        read = step.inputs[0] if step.op == COPY else None
        if read is None or isinstance(read.view, Gather) or not (read.view is None or read.view.whole_rows):
            return None
        place = self._reader.source(read).location(read.tensor)
        offset = 0 if read.view is None else read.view.offset * step.out.dtype.itemsize
        return None if place is None else (place[0], place[1] + offset)

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        """All that the tensor is made of."""
        leaves = self._step(name).leaves
        places = (self._reader.extents(read, 0, leaf.out.size) for leaf in leaves for read in leaf.inputs)
        return tuple(part for parts in places for part in parts)

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

    @property
    def sources(self) -> Sequence[Checkpoint]:
        """The models that it is computed from."""
        return self.inputs

    def _step(self, name: str) -> Step:
        return self._steps[spec_of(self.specs, name, self._where).name]

    def _fill(self, step: Step, number: int, origin: int, a: int, b: int, out: Bytes) -> None:
        """Fill `out` with elements a to b of a leaf, which begins at element `origin` of the tensor."""
        leaf, width = step.leaves[number], step.out.dtype.itemsize
        if leaf.op == COPY:
            self._reader.fill(leaf.inputs[0], a, out)
            return
        merge = self._merge(step, number, origin)
        merge.prepare(self._statistics)
        size = merge.leaf.cuts[0].size
        for k in range(a // size, -(-b // size)):
            place = merge.leaf.cuts[k]
            data = self._tile(merge.leaf, k)
            low, high = max(a, place.start), min(b, place.start + place.size)
            out[(low - a) * width : (high - a) * width] = data[(low - place.start) * width : (high - place.start) * width]

    def _merge(self, step: Step, number: int, origin: int) -> _Merge:
        key, leaf = (step.out.name, number), step.leaves[number]
        with self._lock:
            if key not in self._merges:
                leaf_pass = LeafPass(
                    ActiveStep(step), leaf, self._reader.job(leaf), origin, self._reader.cuts(leaf), applies=False
                )
                self._merges[key] = _Merge(leaf_pass)
                self._forget()
            self._merges.move_to_end(key)
            return self._merges[key]

    def _forget(self) -> None:
        """Drop jobs, those used longest ago first, until the others fit the limits. The newest stays."""
        held = sum(merge.leaf.resident_bytes for merge in self._merges.values())
        for key in list(self._merges)[:-1]:
            count, leaf = len(self._merges), self._merges[key].leaf
            is_large = held > self._resident_bytes and _holds_matrix(leaf.leaf, leaf.resident_bytes)
            if count > _MERGES or (held > _HELD_BYTES and count > _FEW) or is_large:
                held -= self._merges.pop(key).leaf.resident_bytes

    def _statistics(self, task: Task) -> Any:
        """Statistics of one tile in the pass that is under way."""
        memory, leaf = self._memory(), task.active
        assert isinstance(leaf, LeafPass)
        memory.tile = None  # the buffers are shared
        return self._merger.statistics(leaf, task.place, memory.buffers)[0]

    def _tile(self, leaf: LeafPass, k: int) -> Bytes:
        """One tile; the thread has it until it computes another."""
        memory, place = self._memory(), leaf.cuts[k]
        out = memory.buffers.numbers(place.size * leaf.leaf.out.dtype.itemsize)
        if memory.tile != (leaf, k):
            memory.tile = None
            self._merger.apply(leaf, place, out, memory.buffers)
            memory.tile = (leaf, k)
        return out

    def _memory(self) -> _ThreadBuffers:
        memory: _ThreadBuffers | None = getattr(self._threads, "memory", None)
        if memory is None:
            memory = self._threads.memory = _ThreadBuffers()
        return memory


class _ThreadBuffers:
    """One thread's buffers. tile: the one that is in its buffer of numbers, by leaf and number."""

    def __init__(self) -> None:
        self.buffers = Buffers()
        self.tile: tuple[LeafPass, int] | None = None


class _Merge:
    """A leaf whose statistics are computed once, by all the threads that wait for them."""

    def __init__(self, leaf: LeafPass) -> None:
        self.leaf = leaf
        self._scheduler = Scheduler()
        if leaf.phase != APPLY:
            self._scheduler.add(leaf)

    def prepare(self, work: Callable[[Task], Any]) -> None:
        """Take part in the statistics until they are finished. work: does one tile.

        An error in one thread is raised in all, now and later.
        """
        self._scheduler.work(work)
        if self._scheduler.error is not None:
            raise self._scheduler.error


def computed_source(source: Source) -> ComputedSource | None:
    """The merge behind a checkpoint whose tensors are computed when they are read; None for any other source."""
    inner = source.source if isinstance(source, Checkpoint) else source
    return inner if isinstance(inner, ComputedSource) else None


def inner_passes(reader: Reader, leaf: Step) -> int:
    """How often models are read for the statistics of other merges that a leaf reads."""
    sources = ((computed_source(reader.source(read)), read.tensor) for read in leaf.inputs)
    return max((source.statistics_passes(name) for source, name in sources if source is not None), default=0)


def _made_apart(leaf: Step, other: Step) -> bool:
    """Whether two leaves are made in different ways, whatever tensors they read. Equal settings have one index."""
    ways = [(x.op, x.settings, x.base, x.out.shape, *((r.model, r.view) for r in x.inputs)) for x in (leaf, other)]
    return ways[0] != ways[1]


def _holds_matrix(leaf: Step, resident_bytes: int) -> bool:
    """Whether a job holds a whole matrix: more than a mask of each input."""
    return resident_bytes > len(leaf.inputs) * -(-leaf.out.size // 8)
