"""What to do next: one pool of threads takes tiles of steps and of products.

A step becomes one part, or one for each of its pieces. A part goes through its job's statistics passes and then its apply
pass; a survey (a product that streams) through its own passes over many steps. Each pass is a set of tiles that any thread may
take. Started steps take priority over new ones, so little is in flight; a new step is started only when no tile of those in
flight is free. A step that needs products waits until they are finished. Nothing here touches bytes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith.engine.hashing import TensorHash
from weightsmith.engine.tiles import Cut
from weightsmith.jobs.job import Job, Matrix
from weightsmith.plans import Product, Step
from weightsmith.products import Survey
from weightsmith.tensors import grain_elements

APPLY = -1

RESIDENT_BYTES = 1 << 30
"""Default limit of the memory that jobs hold between their passes. Most hold almost nothing."""

SURVEY_WINDOW = 64
"""Results of a survey that may wait for one that comes before them."""


class Flight(ABC):
    """Something with tiles, in flight. The scheduler calls all but `close_pass` under its lock."""

    resident_bytes = 0

    @property
    @abstractmethod
    def ready(self) -> bool:
        """A tile can be taken now."""

    @abstractmethod
    def take(self) -> Task:
        """The next tile."""

    @abstractmethod
    def enter(self, task: Task, result: Any) -> bool:
        """A tile is done. True when it was the last of its pass."""

    @abstractmethod
    def close_pass(self) -> None:
        """Take in what a pass has found; called once a pass, without the scheduler's lock."""

    @abstractmethod
    def advance(self) -> bool:
        """Begin the next pass; False when this was the last."""


class Work:
    """One step in flight.

    hashes  of the tensors that it writes
    parts   that make it, in the order of their elements
    left    parts that are not yet finished
    differing, nonfinite   see `outputs.journal.Finished`
    gathered  its numbers so far, if its encoding needs all of them at once
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.hashes = tuple(map(TensorHash, step.outs))
        self.parts: list[Part] = []
        self.left = 0
        self.differing = self.nonfinite = False
        self.gathered: Gathered | None = None


class Gathered:
    """A tensor's numbers, entered in any order by any thread. values: float32 [size], allocated with the first of them."""

    def __init__(self, size: int) -> None:
        self.size = self._missing = size
        self._values: npt.NDArray[np.float32] | None = None
        self._lock = threading.Lock()

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """Where numbers are entered."""
        with self._lock:
            if self._values is None:
                self._values = np.empty(self.size, np.float32)
            return self._values

    def entered(self, count: int) -> bool:
        """So many more numbers are entered. True when these were the last."""
        with self._lock:
            self._missing -= count
            return not self._missing


class Part(Flight):
    """A tensor, or a piece of one: its job (None: copy bytes), tiles and progress through them.

    step       that makes it: the tensor's, or a piece of it
    origin     where the step's output begins in the tensor
    distances  of its grains: squared norms of out - base and of the base, float64 [grains, 2]; only if it has a base
    constants  a NaN or an infinity that all inputs share was found in the first pass
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
        self.constants = False
        self._begin_pass()

    def _begin_pass(self) -> None:
        self.phase = self.number if self.job is not None and self.number < self.job.passes() else APPLY
        self.next_tile = 0
        self.left = len(self.cuts)
        self.results: list[Any] = [None] * len(self.cuts)

    @property
    def ready(self) -> bool:
        if self.next_tile == len(self.cuts):
            return False
        return not self.in_order or self.left == len(self.cuts) - self.next_tile

    @property
    def in_order(self) -> bool:
        """The tiles of this pass come one after the other."""
        return self.job is not None and self.job.sequential and self.phase != APPLY

    def take(self) -> Task:
        self.next_tile += 1
        return Task(self, self.phase, self.next_tile - 1, self.step, self.cuts[self.next_tile - 1])

    def enter(self, task: Task, result: Any) -> bool:
        self.results[task.tile] = result
        self.left -= 1
        return self.left == 0

    def close_pass(self) -> None:
        if self.phase != APPLY:
            assert self.job is not None
            self.job.fold(self.phase, self.results)

    def advance(self) -> bool:
        if self.phase == APPLY:
            return False
        self.number += 1
        self._begin_pass()
        return True


class SurveyFlight(Flight):
    """A product that streams: the tiles of all the steps that it looks at, pass after pass, results taken in plan order."""

    def __init__(self, product: Product, survey: Survey, tiles: Callable[[], Iterator[tuple[Step, Matrix, Cut]]]) -> None:
        """tiles: restarts for each pass."""
        self.product = product
        self.survey = survey
        self._tiles = tiles
        self._lock = threading.Lock()
        self.number = -1
        self._taken = 0
        self.more = self.advance()

    def advance(self) -> bool:
        if self.number + 1 >= self.survey.passes():
            return False
        self.number += 1
        self.survey.begin(self.number)
        self._rest = self._tiles()
        self._next = next(self._rest, None)
        self._taken = self._entered = self._folded = 0
        self._waiting: dict[int, Any] = {}
        return True

    @property
    def ready(self) -> bool:
        return self._next is not None and self._taken - self._folded < SURVEY_WINDOW

    def take(self) -> Task:
        assert self._next is not None
        step, matrix, place = self._next
        self._next = next(self._rest, None)
        self._taken += 1
        if self.survey.sampled(self.number):
            place = Cut(place.start, min(place.size, matrix.grain))
        return Task(self, self.number, self._taken - 1, step, place, matrix)

    def enter(self, task: Task, result: Any) -> bool:
        self._waiting[task.tile] = result
        self._entered += 1
        return self._next is None and self._entered == self._taken

    @property
    def empty(self) -> bool:
        """It has no tile to look at, or no pass to make."""
        return not self.more or (self._next is None and not self._taken)

    def drain(self) -> None:
        """Take in the results that are next, without the scheduler's lock. One thread at a time does it."""
        while self._folded in self._waiting and self._lock.acquire(blocking=False):
            try:
                self._take_waiting()
            finally:
                self._lock.release()

    def _take_waiting(self) -> None:
        while self._folded in self._waiting:
            self.survey.take(self.number, self._waiting.pop(self._folded))
            self._folded += 1

    def close_pass(self) -> None:
        with self._lock:
            self._take_waiting()
            self.survey.end(self.number)


class Task:
    """One tile of one pass. matrix: of a survey's tile."""

    __slots__ = ("flight", "matrix", "phase", "place", "step", "tile")

    def __init__(self, flight: Flight, phase: int, tile: int, step: Step, place: Cut, matrix: Matrix | None = None) -> None:
        self.flight = flight
        self.phase = phase
        self.tile = tile
        self.step = step
        self.place = place
        self.matrix = matrix


class Scheduler:
    """Hands out tasks to threads until all steps and products are finished, or something fails."""

    def __init__(
        self,
        steps: Iterable[tuple[Step, frozenset[str]]],
        products: Iterable[str],
        begin: Callable[[Step], Sequence[Part]],
        complete: Callable[[Flight], None],
        resident_bytes: int = RESIDENT_BYTES,
        *,
        in_order: bool = False,
    ) -> None:
        """Steps are begun while the jobs in flight hold at most `resident_bytes`; one alone may hold more.

        steps     in plan order, with the products that each needs
        products  that are still to be made
        begin     the parts of a step; called under the lock. A step without parts is finished by it
        complete  called without the lock, from the thread that did the last tile: a step's last part is done, or a survey
        in_order  begin no step before those that come before it
        """
        self._products = set(products)
        self._ready: deque[Step] = deque()
        self._blocked: list[tuple[Step, frozenset[str]]] = []
        for step, needs in steps:
            if needs.isdisjoint(self._products) and not (in_order and self._blocked):
                self._ready.append(step)
            else:
                self._blocked.append((step, needs))
        self._in_order = in_order
        self._begin = begin
        self._complete = complete
        self._allowed_bytes = resident_bytes
        self._resident_bytes = 0
        self._parts: deque[Flight] = deque()  # of what was begun last; the first may wait for memory
        self._flight: deque[Flight] = deque()
        self._condition = threading.Condition()
        self.error: BaseException | None = None

    @property
    def waiting(self) -> bool:
        """All remaining steps wait for a product that computes."""
        return bool(self._products) and not (self._ready or self._parts or self._flight)

    def product_finished(self, name: str) -> None:
        """Steps that needed only this product can begin."""
        with self._condition:
            self._products.discard(name)
            still: list[tuple[Step, frozenset[str]]] = []
            for step, needs in self._blocked:
                if needs.isdisjoint(self._products) and not (self._in_order and still):
                    self._ready.append(step)
                else:
                    still.append((step, needs))
            self._blocked = still
            self._condition.notify_all()

    def survey(self, flight: SurveyFlight) -> None:
        """Begin a survey, before all else."""
        with self._condition:
            self._flight.appendleft(flight)
            self._condition.notify_all()

    def next(self) -> Task | None:
        """The next task; waits for one; None when there is nothing left to do, or something failed."""
        with self._condition:
            while self.error is None:
                flight = self._next_flight()
                if flight is not None:
                    return flight.take()
                if not (self._ready or self._products or self._parts or self._flight):
                    self._condition.notify_all()
                    return None
                self._condition.wait()
        return None

    def _next_flight(self) -> Flight | None:
        for flight in self._flight:
            if flight.ready:
                return flight
        while not self._parts and self._ready:
            self._parts.extend(self._begin(self._ready.popleft()))
        if not self._parts:
            return None
        new = self._parts[0]
        if new.resident_bytes and 0 < self._resident_bytes > self._allowed_bytes - new.resident_bytes:
            return None
        self._resident_bytes += new.resident_bytes
        self._flight.append(self._parts.popleft())
        return new

    def _remove(self, flight: Flight) -> None:
        """It is finished: what its job held is free again, for threads that wait may still hold the part."""
        self._flight.remove(flight)
        self._resident_bytes -= flight.resident_bytes
        if isinstance(flight, Part):
            flight.job = None
        self._condition.notify_all()

    def done(self, task: Task, result: Any) -> None:
        """A task is done; the last of a pass closes it, the last of a part takes the part away."""
        flight = task.flight
        with self._condition:
            last = flight.enter(task, result)
            if not last and isinstance(flight, Part):
                if flight.in_order:
                    self._condition.notify_all()
                return
        if not last:
            assert isinstance(flight, SurveyFlight)
            flight.drain()
            with self._condition:  # there may be room for more results
                self._condition.notify_all()
            return
        flight.close_pass()
        with self._condition:
            if flight.advance():
                self._condition.notify_all()
                return
            if isinstance(flight, Part):
                flight.work.left -= 1
                if flight.work.left:
                    self._remove(flight)
                    return
        self._complete(flight)
        with self._condition:  # only now: while it is in flight no thread ends, so an error here is still seen
            self._remove(flight)

    def fail(self, error: BaseException) -> None:
        """Stop handing out tasks; `error` is the first one to be seen."""
        with self._condition:
            if self.error is None:
                self.error = error
            self._condition.notify_all()
