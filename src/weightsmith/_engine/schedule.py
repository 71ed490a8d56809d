"""Hands out the next tile: the driver of all passes (`active.py`).

A run has one scheduler for its steps and products, whose threads are the pool of the run. A tensor that is computed when it is
read (`computed.py`) has one for its statistics, whose threads are those that wait for them.

Any thread may take any tile of a pass. Steps that have begun take priority over new ones, so few are active at a time; a new
step begins only when no active one has a free tile. A step that needs products waits until they are finished.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from weightsmith._engine.active import ActivePass, LeafPass, Task
from weightsmith._engine.tiles import RESIDENT_BYTES
from weightsmith._plans import Step


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
