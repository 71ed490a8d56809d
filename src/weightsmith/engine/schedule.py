"""What to do next: tiles of all tensors feed one pool of threads.

A step becomes one part, or one for each of its pieces. A part goes through its job's statistics passes and then its apply
pass; each pass is a set of tiles that any thread may take. Parts begun are preferred to new ones, so few are in flight; a
new one is begun only when no tile of those in flight is free. Nothing here touches bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from weightsmith.engine.tiles import Cut
from weightsmith.jobs.job import Bytes, Job
from weightsmith.planner.steps import Step
from weightsmith.store.checksum import DIGEST_BYTES, hash_grains
from weightsmith.tensors import grain_elements

APPLY = -1

RESIDENT_BYTES = 1 << 30
"""What jobs may hold in memory between their passes, if nobody says otherwise. Most hold next to nothing."""


class Work:
    """One output tensor in flight.

    digests    of its grains, 8 bytes each, filled in by the apply pass
    parts      that make it, in the order of their elements
    left       parts that are not yet finished
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.grain = grain_elements(step.out.shape)
        self.digests = bytearray(-(-step.out.size // self.grain) * DIGEST_BYTES)
        self.parts: list[Part] = []
        self.left = 0
        self._lock = threading.Lock()
        self._shared: dict[int, tuple[bytearray, int]] = {}  # grains that several tiles fill, and the bytes still missing

    def hash(self, first: int, out: Bytes) -> None:
        """Enter the digests of elements first … of the tensor; a grain that other tiles share is hashed by its last one."""
        width = self.step.out.dtype.itemsize
        end = first + len(out) // width
        head = min(-(-first // self.grain) * self.grain, end)
        tail = end if end == self.step.out.size else max(head, end // self.grain * self.grain)
        at = head // self.grain * DIGEST_BYTES
        if head < tail:
            digests = hash_grains(out[(head - first) * width : (tail - first) * width], self.grain * width)
            self.digests[at : at + len(digests)] = digests
        if first < head:
            self._fill(first, out[: (head - first) * width])
        if tail < end:
            self._fill(tail, out[(tail - first) * width :])

    def _fill(self, first: int, piece: Bytes) -> None:
        """Some bytes of a grain that ends or begins in another tile."""
        grain, width = first // self.grain, self.step.out.dtype.itemsize
        nbytes = min(self.grain, self.step.out.size - grain * self.grain) * width
        with self._lock:
            held, missing = self._shared.pop(grain, (bytearray(), nbytes))
            held = held or bytearray(nbytes)
            at = (first - grain * self.grain) * width
            held[at : at + len(piece)] = piece.tobytes()
            missing -= len(piece)
            if missing:
                self._shared[grain] = held, missing
            else:
                self.digests[grain * DIGEST_BYTES : (grain + 1) * DIGEST_BYTES] = hash_grains(held, nbytes)


class Part:
    """A tensor, or a piece of one: its job (None: copy bytes), tiles and progress through them.

    step       that makes it: the tensor's, or a piece of it
    origin     where the step's output begins in the tensor
    distances  of its grains: squared norms of out - base and of the base, float64 [grains, 2]; only if it has a base
    """

    def __init__(self, work: Work, step: Step, job: Job | None, origin: int, cuts: list[Cut]) -> None:
        self.work = work
        self.step = step
        self.job = job
        self.origin = origin
        self.cuts = cuts
        self.grain = grain_elements(step.out.shape)
        size = cuts[-1].start + cuts[-1].size
        self.distances = np.zeros((-(-size // self.grain) if step.base else 0, 2))
        self.resident_bytes = 0 if job is None else job.resident_bytes
        self.number = 0
        self._begin_pass()

    def _begin_pass(self) -> None:
        self.phase = self.number if self.job is not None and self.number < self.job.passes() else APPLY
        self.next_tile = 0
        self.left = len(self.cuts)
        self.results: list[Any] = [None] * len(self.cuts)

    @property
    def ready(self) -> bool:
        """A tile can be taken now."""
        if self.next_tile == len(self.cuts):
            return False
        in_order = self.job is not None and self.job.sequential and self.phase != APPLY
        return not in_order or self.left == len(self.cuts) - self.next_tile

    def fold(self) -> None:
        """Take in the results of a statistics pass."""
        if self.phase != APPLY:
            assert self.job is not None
            self.job.fold(self.phase, self.results)

    def advance(self) -> bool:
        """Begin the next pass; False when this was the last."""
        if self.phase == APPLY:
            return False
        self.number += 1
        self._begin_pass()
        return True


class Task:
    """One tile of one pass."""

    __slots__ = ("part", "phase", "tile")

    def __init__(self, part: Part, tile: int) -> None:
        self.part = part
        self.phase = part.phase
        self.tile = tile


class Scheduler:
    """Hands out tasks to threads until all parts are finished, or one fails."""

    def __init__(
        self,
        parts: Iterator[Part],
        finished: Callable[[Work], None],
        resident_bytes: int = RESIDENT_BYTES,
        begins: Callable[[Part], bool] = lambda part: True,
    ) -> None:
        """Parts are begun while the jobs in flight hold at most `resident_bytes`; one alone may hold more.

        `parts` is advanced under the lock; `finished` is called once a tensor, from the thread that finished it. A part for
        which `begins` is False is held, and those after it, until `wake` finds that it can begin.
        """
        self._waiting = parts
        self._allowed_bytes = resident_bytes
        self._resident_bytes = 0
        self._held: Part | None = None  # the next part, while there is no memory for it
        self._finished = finished
        self._begins = begins
        self.waiting = False
        self._flight: deque[Part] = deque()
        self._condition = threading.Condition()
        self._exhausted = False
        self.error: BaseException | None = None

    def next(self) -> Task | None:
        """The next task; waits for one; None when there is nothing left to do, or something failed."""
        with self._condition:
            while self.error is None:
                part = self._ready_part()
                if part is not None:
                    task = Task(part, part.next_tile)
                    part.next_tile += 1
                    return task
                if self._exhausted and not self._flight:
                    return None
                self._condition.wait()
        return None

    def _ready_part(self) -> Part | None:
        for part in self._flight:
            if part.ready:
                return part
        if self._exhausted:
            return None
        new = self._held or next(self._waiting, None)
        if new is None:
            self._exhausted = True
            self._condition.notify_all()
            return None
        self.waiting = not self._begins(new)
        if self.waiting or (new.resident_bytes and 0 < self._resident_bytes > self._allowed_bytes - new.resident_bytes):
            self._held = new
            return None
        self._held = None
        self._resident_bytes += new.resident_bytes
        self._flight.append(new)
        return new

    def _remove(self, part: Part) -> None:
        """A part is finished: what its job held is free again, for threads that wait may still hold the part."""
        self._flight.remove(part)
        self._resident_bytes -= part.resident_bytes
        part.job = None
        self._condition.notify_all()

    def done(self, task: Task, result: Any) -> None:
        """A task is done; the last of a pass folds it, the last of a part takes the part away."""
        part = task.part
        with self._condition:
            part.results[task.tile] = result
            part.left -= 1
            last = part.left == 0
            if not last:
                if part.job is not None and part.job.sequential:
                    self._condition.notify_all()
                return
        part.fold()
        with self._condition:
            complete = False
            if not part.advance():
                part.work.left -= 1
                complete = part.work.left == 0
            if not complete:
                if part.phase == APPLY and part.left == 0:
                    self._remove(part)
                self._condition.notify_all()
                return
        self._finished(part.work)
        with self._condition:  # only now: while a part is in flight no thread ends, so an error here is still seen
            self._remove(part)

    def wake(self) -> None:
        """Look again whether the part that is held can begin."""
        with self._condition:
            self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop handing out tasks; `error` is the first one to be seen."""
        with self._condition:
            if self.error is None:
                self.error = error
            self._condition.notify_all()
