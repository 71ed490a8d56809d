"""Steps and products whose tiles are being worked on, and the scheduler that hands out the next tile.

A step becomes one `LeafPass`, or one for each of its pieces. It goes through the statistics passes of its job, then through
the apply pass. A product that streams goes through its own passes over many steps (`ReductionPass`). No pass touches bytes or
waits.

A run has one scheduler for its steps and products, whose threads are the pool of the run. A tensor that is computed when it is
read (`computed.py`) has one for its statistics, whose threads are those that wait for them.

Any thread may take any tile of a pass. Steps that have begun take priority over new ones, so few are active at a time; a new
step begins only when no active one has a free tile. A step that needs products waits until they are finished.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from weightsmith._base.tensors import TensorSpec, grain_elements
from weightsmith._engine.resources import RESIDENT_BYTES, Cut
from weightsmith._outputs.checksum import DIGEST_BYTES, combine, grain_bytes, hash_grains
from weightsmith._plans import PLAIN, Product, Step
from weightsmith.abc.job import Bytes, Job, Matrix
from weightsmith.abc.product import StreamingReduction

if TYPE_CHECKING:
    from weightsmith._engine.reader import InputReads

APPLY = -1
"""The phase of the pass that writes; statistics passes are numbered from 0."""

REDUCTION_WINDOW = 64
"""Results of a reduction that may wait for one that comes before them."""


_NO_DISTANCES = np.zeros((0, 2))


class ActivePass(ABC):
    """A step or product with free tiles. The owner calls all but `drain` and `finish_pass` under a lock.

    resident_bytes  memory that it holds until it is complete
    in_order        the tiles of this pass are done one after the other
    """

    resident_bytes = 0
    in_order = False

    @property
    @abstractmethod
    def ready(self) -> bool:
        """A tile can be taken now."""

    @abstractmethod
    def take(self) -> Task:
        """The next tile."""

    @abstractmethod
    def enter(self, task: Task, result: Any) -> bool:
        """A tile is done. True if it was the last of its pass."""

    def drain(self) -> bool:
        """Consume results that wait, if any; called without the lock. True if more tiles can be taken afterwards."""
        return False

    @abstractmethod
    def finish_pass(self) -> None:
        """Process the results of a pass; called once per pass, without the lock."""

    @abstractmethod
    def advance(self) -> bool:
        """Begin the next pass; False if this was the last."""

    @abstractmethod
    def complete(self) -> bool:
        """Called after the last pass. True if a whole step or product is complete with it."""

    def free(self) -> None:  # noqa: B027  most hold nothing
        """Let go of what it held, although waiting threads may still refer to it. Called when it is complete."""


class TensorHash:
    """The checksum of a tensor whose bytes are written in any order by any thread: the digests of its grains.

    A grain that several tiles fill is hashed when the last of them is in.
    """

    def __init__(self, spec: TensorSpec) -> None:
        self._nbytes = spec.nbytes
        self._grain = grain_bytes(spec)
        self._digests = bytearray(-(-spec.nbytes // self._grain) * DIGEST_BYTES)
        self._lock = threading.Lock()
        self._shared: dict[int, tuple[bytearray, int]] = {}  # grains that several tiles fill, and the bytes still missing

    def update(self, start: int, data: Bytes) -> None:
        """Enter the bytes from `start` on. Every byte is entered once."""
        grain = self._grain
        end = start + len(data)
        head = min(-(-start // grain) * grain, end)
        tail = end if end == self._nbytes else max(head, end // grain * grain)
        if head < tail:
            digests = hash_grains(data[head - start : tail - start], grain)
            at = head // grain * DIGEST_BYTES
            self._digests[at : at + len(digests)] = digests
        if start < head:
            self._fill(start, data[: head - start])
        if tail < end:
            self._fill(tail, data[tail - start :])

    def _fill(self, start: int, piece: Bytes) -> None:
        """Some bytes of a grain that ends or begins in another tile."""
        number = start // self._grain
        nbytes = min(self._grain, self._nbytes - number * self._grain)
        with self._lock:
            held, missing = self._shared.pop(number, (bytearray(), nbytes))
            held = held or bytearray(nbytes)
            at = start - number * self._grain
            held[at : at + len(piece)] = piece.tobytes()
            missing -= len(piece)
            if missing:
                self._shared[number] = held, missing
            else:
                self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] = hash_grains(held, nbytes)

    def checksum(self) -> str:
        """32 hex digits, once all bytes are in."""
        return combine(bytes(self._digests))


class ActiveStep:
    """A step that has begun.

    hashes  of the tensors that it writes
    leaves  that make it, in the order of their elements
    unfinished  number of leaves that are not finished
    differing, nonfinite   see `abc.output.Finished`
    gathered  its numbers so far, if its encoding needs all of them at once
    encoded   whether its numbers are stored as codes, which are computed
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.hashes = tuple(map(TensorHash, step.outs))
        self.leaves: list[LeafPass] = []
        self.unfinished = 0
        self.differing = self.nonfinite = False
        self.gathered: Gathered | None = None
        self.encoded = step.encoding != PLAIN and not step.verbatim

    @property
    def distance(self) -> tuple[float, float] | None:
        """Squared norms of output - base and of the base: the sums of its grains, leaf after leaf; None without a base."""
        if not any(len(leaf.distances) for leaf in self.leaves):
            return None
        grains = np.concatenate([leaf.distances for leaf in self.leaves])
        moved, base = np.cumsum(grains, axis=0)[-1]  # adds sequentially; sum would add pairwise
        return float(moved), float(base)


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
        """So many more numbers are entered. True if these were the last."""
        with self._lock:
            self._missing -= count
            return not self._missing


class LeafPass(ActivePass):
    """A tensor, or a piece of one: its job (None: copy bytes), its tiles, and the pass that is under way.

    leaf       the step that makes it: the tensor's, or a piece of it
    inputs     how those of the leaf are read; None until the first tile
    origin     index in the tensor of the leaf's first element
    target     number of the tensor to write that it is part of
    applies    whether the last pass is that which writes; False: it ends with the statistics, and keeps its job
    distances  of its grains: squared norms of out - base and of the base, float64 [grains, 2]; only if it has a base
    constants  a NaN or an infinity that all inputs share was found in the first pass
    """

    def __init__(
        self,
        active: ActiveStep,
        leaf: Step,
        job: Job | None,
        origin: int,
        cuts: list[Cut],
        *,
        target: int = 0,
        applies: bool = True,
    ) -> None:
        self.active = active
        self.leaf = leaf
        self.inputs: InputReads | None = None
        self.job = job
        self.origin = origin
        self.target = target
        self.cuts = cuts
        self.applies = applies
        self.grain = grain_elements(leaf.out.shape)
        self.distances = np.zeros((-(-leaf.out.size // self.grain), 2)) if leaf.base else _NO_DISTANCES
        self.resident_bytes = 0 if job is None else job.resident_bytes
        self.number = 0
        self.constants = False
        self._begin_pass()

    def _begin_pass(self) -> None:
        self.phase = self.number if self.job is not None and self.number < self.job.passes() else APPLY
        self.in_order = self.job is not None and self.job.sequential and self.phase != APPLY
        self.next_tile = 0
        self.tiles_to_do = len(self.cuts)
        self.results: list[Any] = [None] * len(self.cuts)

    @property
    def ready(self) -> bool:
        if self.next_tile == len(self.cuts):
            return False
        return not self.in_order or self.tiles_to_do == len(self.cuts) - self.next_tile

    def take(self) -> Task:
        self.next_tile += 1
        return Task(self, self.phase, self.next_tile - 1, self.leaf, self.cuts[self.next_tile - 1])

    def enter(self, task: Task, result: Any) -> bool:
        self.results[task.tile] = result
        self.tiles_to_do -= 1
        return self.tiles_to_do == 0

    def finish_pass(self) -> None:
        if self.phase != APPLY:
            assert self.job is not None
            self.job.finish_pass(self.phase, self.results)

    def advance(self) -> bool:
        if self.phase == APPLY:
            return False
        self.number += 1
        self._begin_pass()
        return self.phase != APPLY or self.applies

    def complete(self) -> bool:
        self.active.unfinished -= 1
        return not self.active.unfinished

    def free(self) -> None:
        if self.applies:
            self.job = None


Reduced: TypeAlias = "tuple[Matrix, InputReads]"
"""A matrix that a product reads, and how its inputs are read."""


class ReductionPass(ActivePass):
    """A product that streams: the tiles of all the steps that it reads, pass after pass, results consumed in plan order."""

    def __init__(
        self, product: Product, reduction: StreamingReduction, tiles: Callable[[], Iterator[tuple[Reduced, Step, Cut]]]
    ) -> None:
        """tiles: restarts for each pass."""
        self.product = product
        self.reduction = reduction
        self._tiles = tiles
        self._lock = threading.Lock()
        self.number = -1
        self._taken = 0
        self._has_pass = self.advance()

    def advance(self) -> bool:
        if self.number + 1 >= self.reduction.passes():
            return False
        self.number += 1
        self.reduction.begin(self.number)
        self._rest = self._tiles()
        self._next = next(self._rest, None)
        self._taken = self._entered = self._consumed = 0
        self._waiting: dict[int, Any] = {}
        return True

    @property
    def ready(self) -> bool:
        return self._next is not None and self._taken - self._consumed < REDUCTION_WINDOW

    def take(self) -> Task:
        assert self._next is not None
        reduced, step, place = self._next
        self._next = next(self._rest, None)
        self._taken += 1
        if self.reduction.sampled(self.number):
            place = Cut(place.start, min(place.size, reduced[0].grain))
        return Task(self, self.number, self._taken - 1, step, place, reduced)

    def enter(self, task: Task, result: Any) -> bool:
        self._waiting[task.tile] = result
        self._entered += 1
        return self._next is None and self._entered == self._taken

    @property
    def empty(self) -> bool:
        """It has no tile to read, or no pass to make."""
        return not self._has_pass or (self._next is None and not self._taken)

    def drain(self) -> bool:
        """Consume the results that are next. One thread at a time does it."""
        while self._consumed in self._waiting and self._lock.acquire(blocking=False):
            try:
                self._take_waiting()
            finally:
                self._lock.release()
        return True

    def _take_waiting(self) -> None:
        while self._consumed in self._waiting:
            self.reduction.take(self.number, self._waiting.pop(self._consumed))
            self._consumed += 1

    def finish_pass(self) -> None:
        with self._lock:
            self._take_waiting()
            self.reduction.end(self.number)

    def complete(self) -> bool:
        return True


class Task:
    """One tile of one pass. reduced: only of a reduction's tile."""

    __slots__ = ("active", "phase", "place", "reduced", "step", "tile")

    def __init__(
        self, active: ActivePass, phase: int, tile: int, step: Step, place: Cut, reduced: Reduced | None = None
    ) -> None:
        self.active = active
        self.phase = phase
        self.tile = tile
        self.step = step
        self.place = place
        self.reduced = reduced


# ---- the scheduler


class Scheduler:
    """Hands out tasks to threads until all steps and products are finished, or something fails."""

    def __init__(
        self,
        steps: Iterable[tuple[Step, frozenset[str]]] = (),
        products: Iterable[str] = (),
        begin: Callable[[Step], Sequence[ActivePass]] = lambda step: (),
        complete: Callable[[ActivePass], None] = lambda active: None,
        resident_bytes: int = RESIDENT_BYTES,
        *,
        in_order: bool = False,
    ) -> None:
        """Steps are begun while active jobs hold at most `resident_bytes`; one alone may hold more.

        steps     in plan order, with the products that each needs
        products  that are still to be made
        begin     the passes of a step; called under the lock. A step without any is finished by it
        complete  called without the lock, from the thread that did the last tile of a step or of a product
        in_order  begin no step before those that come before it
        """
        self._products = set(products)
        self._ready: deque[Step] = deque()
        self._blocked: list[tuple[Step, frozenset[str]]] = []
        self._in_order = in_order
        self._sort(steps)
        self._begin = begin
        self._complete = complete
        self._allowed_bytes = resident_bytes
        self._resident_bytes = 0
        self._begun: deque[ActivePass] = deque()  # of the step that began last; the first may wait for memory
        self._active: deque[ActivePass] = deque()
        self._condition = threading.Condition()
        self.error: BaseException | None = None

    def _sort(self, steps: Iterable[tuple[Step, frozenset[str]]]) -> None:
        """Enter steps as ready or blocked."""
        self._blocked = []
        for step, needs in steps:
            if needs.isdisjoint(self._products) and not (self._in_order and self._blocked):
                self._ready.append(step)
            else:
                self._blocked.append((step, needs))

    @property
    def waiting(self) -> bool:
        """All remaining steps wait for a product that computes."""
        return bool(self._products) and not (self._ready or self._begun or self._active)

    def product_finished(self, name: str) -> None:
        """Steps that needed only this product can begin."""
        with self._condition:
            self._products.discard(name)
            self._sort(self._blocked)
            self._condition.notify_all()

    def wait_for(self, steps: Callable[[Step], bool]) -> bool:
        """Wait until none of these steps has begun, or could begin; or until something fails. Returns whether nothing has."""
        with self._condition:
            while self.error is None and any(map(steps, self._under_way())):
                self._condition.wait()
            return self.error is None

    def _under_way(self) -> Iterator[Step]:
        yield from self._ready
        for active in (*self._begun, *self._active):
            if isinstance(active, LeafPass):
                yield active.active.step

    def add(self, active: ActivePass) -> None:
        """Begin a pass of no step, before all else."""
        with self._condition:
            self._resident_bytes += active.resident_bytes
            self._active.appendleft(active)
            self._condition.notify_all()

    def work(self, do: Callable[[Task], Any]) -> None:
        """Do tasks until there is none left, or something fails: the loop of each thread. do: returns a task's statistics."""
        try:
            while (task := self.next()) is not None:
                self.done(task, do(task))
        except BaseException as error:
            self.fail(error)

    def next(self) -> Task | None:
        """The next task; waits for one; None when there is nothing left to do, or something failed."""
        with self._condition:
            while self.error is None:
                active = self._next_active()
                if active is not None:
                    return active.take()
                if not (self._ready or self._products or self._begun or self._active):
                    self._condition.notify_all()
                    return None
                self._condition.wait()
        return None

    def _next_active(self) -> ActivePass | None:
        for active in self._active:
            if active.ready:
                return active
        while not self._begun and self._ready:
            self._begun.extend(self._begin(self._ready.popleft()))
        if not self._begun:
            return None
        new = self._begun[0]
        if new.resident_bytes and 0 < self._resident_bytes > self._allowed_bytes - new.resident_bytes:
            return None
        self._resident_bytes += new.resident_bytes
        self._active.append(self._begun.popleft())
        return new

    def _remove(self, active: ActivePass) -> None:
        """It is complete."""
        self._active.remove(active)
        self._resident_bytes -= active.resident_bytes
        active.free()
        self._condition.notify_all()

    def done(self, task: Task, result: Any) -> None:
        """A task is done; the last one of a pass finishes the pass."""
        active = task.active
        with self._condition:
            last = active.enter(task, result)
            if not last and active.in_order:
                self._condition.notify_all()
        if not last:
            if active.drain():
                with self._condition:
                    self._condition.notify_all()
            return
        active.finish_pass()
        with self._condition:
            if active.advance():
                self._condition.notify_all()
                return
            if not active.complete():
                self._remove(active)
                return
        self._complete(active)
        with self._condition:  # only now: while it is active no thread ends, so an error here is still seen
            self._remove(active)

    def fail(self, error: BaseException) -> None:
        """Stop handing out tasks; `error` is the first one to be seen."""
        with self._condition:
            if self.error is None:
                self.error = error
            self._condition.notify_all()
