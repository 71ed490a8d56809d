"""Byte ranges from a server that may fail: a request is retried a limited number of times, from where it stopped."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from weightsmith.errors import CheckpointError

Put = Callable[[int, bytes], None]
"""Takes in bytes, and where they begin in the file."""


class Again(Exception):
    """A request failed, and may succeed when it is made again. wait_seconds: that the server asks for."""

    def __init__(self, why: str, wait_seconds: float = 0.0) -> None:
        super().__init__(why)
        self.why = why
        self.wait_seconds = wait_seconds


class Stopped(Exception):
    """Nobody waits for the bytes any more."""


class Ranges(Protocol):
    """The bytes of one file on a server. Thread-safe.

    where    for messages
    nbytes   size of the file
    version  equal for equal content
    """

    where: str
    nbytes: int
    version: str

    def request(self, first: int, end: int) -> Iterator[bytes]:
        """Make one request for bytes first … end, and yield them; never others, and never more.

        Raises Again for what may pass, CheckpointError for what will not: the file has changed, or may not be read.
        """

    def check_parts(self) -> None:
        """Raise CheckpointError if the requests so far have shown that parts of the file cannot be had."""

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file has changed since it was first read, Again for what may pass."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long.

    failures        in a row, without `progress_bytes` between them
    first_seconds   wait after the first failure; twice as long after each other one
    most_seconds    longest wait
    asked_seconds   longest wait that a server may ask for
    slow_seconds    a request that brings fewer than `slow_bytes` per second for so long is given up
    """

    failures: int = 8
    progress_bytes: int = 64 << 10
    first_seconds: float = 0.5
    most_seconds: float = 20.0
    asked_seconds: float = 120.0
    slow_seconds: float = 30.0
    slow_bytes: int = 16 << 10


PATIENCE = Patience()


def retry(call: Callable[[], None], where: str) -> None:
    """Call until it does not raise Again. Raises CheckpointError after too many failures."""
    failures = 0
    while True:
        try:
            return call()
        except Again as error:
            failures += 1
            _wait(error, failures, where, None)


def fetch(ranges: Ranges, first: int, end: int, put: Put, stop: threading.Event | None = None) -> None:
    """Hand bytes first … end to `put`, in order, each once.

    Raises CheckpointError when the file has changed or may not be read, and after `PATIENCE.failures` failures without
    progress; Stopped once `stop` is set.
    """
    at, failures, counted = first, 0, first
    while at < end:
        begun, asked = time.monotonic(), at
        try:
            for piece in ranges.request(at, end):
                if stop is not None and stop.is_set():
                    raise Stopped
                put(at, piece)
                at += len(piece)
                taken = time.monotonic() - begun
                if taken > PATIENCE.slow_seconds and at - asked < PATIENCE.slow_bytes * taken and at < end:
                    raise Again(f"{at - asked:,} bytes came in {taken:.0f} s")
            if at < end:
                raise Again(f"the answer ended after {at - asked:,} of {end - asked:,} bytes")
        except Again as error:
            if at - counted >= PATIENCE.progress_bytes:
                failures, counted = 0, at
            failures += 1
            _wait(error, failures, ranges.where, stop)


def _wait(error: Again, failures: int, where: str, stop: threading.Event | None) -> None:
    """Wait before the next attempt; give up after too many."""
    if failures > PATIENCE.failures:
        what = f"cannot be read: {error.why}, after {PATIENCE.failures} more attempts"
        raise CheckpointError(what, where=where, fix="Check the network, and run the same command again to resume.") from error
    if error.wait_seconds > PATIENCE.asked_seconds:
        what = f"cannot be read now: {error.why}, and the server asks to wait {error.wait_seconds:,.0f} s"
        raise CheckpointError(what, where=where, fix="Run the same command again later to resume.") from error
    delay = min(PATIENCE.most_seconds, PATIENCE.first_seconds * 2 ** (failures - 1))
    delay = max(error.wait_seconds, delay * random.uniform(0.5, 1.0))  # not all connections at the same moment
    if stop is None:
        time.sleep(delay)
    elif stop.wait(delay):
        raise Stopped
