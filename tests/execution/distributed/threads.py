"""Workers that are threads of this process, and that die, stall and fail as a test wants."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable

from weightsmith._execution.cluster import Answer, Lost, Order, Share, do


class Died(BaseException):
    """Ends a worker as if its process had been killed."""


class Answering:
    """The part of `distributed.work.Workers` that all workers of tests have in common: a number of slots, and answers."""

    setting, advice, several_machines = "ray", "read the logs of Ray", True

    def __init__(self, slots: int) -> None:
        self.started: list[Share] = []
        self._slots = slots
        self._answers: queue.Queue[tuple[Share, Answer]] = queue.Queue()

    def slots(self) -> int:
        return self._slots

    def answers(self, seconds: float) -> list[tuple[Share, Answer]]:
        try:
            return [self._answers.get(timeout=seconds)]
        except queue.Empty:
            return []


class Threads(Answering):
    """See `distributed.work.Workers`.

    before   called in the worker's thread before it begins; what it raises ends the worker
    started, stopped, died   shares, in order
    """

    def __init__(self, slots: int, before: Callable[[Share], None] = lambda share: None) -> None:
        super().__init__(slots)
        self.before = before
        self.orders: list[Order] = []
        self.stopped: list[Share] = []
        self.died: list[Share] = []
        self.threads: list[threading.Thread] = []

    def begin(self, order: Order) -> None:
        self.orders.append(pickle.loads(pickle.dumps(order)))

    def start(self, share: Share) -> None:
        self.started.append(share)
        self.threads.append(threading.Thread(target=self._work, args=(self.orders[-1], share)))
        self.threads[-1].start()

    def _work(self, order: Order, share: Share) -> None:
        try:
            self.before(share)
            answer: Answer = pickle.loads(do(order, share))
        except Died:
            self.died.append(share)
            answer = Lost("killed")
        if share not in self.stopped:
            self._answers.put((share, answer))

    def stop(self, share: Share) -> None:
        self.stopped.append(share)

    def started_again(self) -> set[Share]:
        """Shares that were started more than once. How often does not matter: a lock may be released a moment later."""
        return {share for share in self.started if self.started.count(share) > 1}

    def join(self) -> None:
        for thread in self.threads:
            thread.join()
