"""Which threads compile kernels, and how those are left behind that nobody waits for any more."""

from __future__ import annotations

import atexit
import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet


class Abandoned(BaseException):
    """A kernel is not compiled to the end: nobody waits for this thread any more."""


class _Watch:
    """Knows which threads are in numba's compiler, and ends those that nobody waits for.

    inside     threads that wait for the compiler, load from the cache, or compile
    compiling  those of them that compile

    The garbage collector is off while a kernel is compiled: it takes a fifth of the time, and finds little.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside: set[threading.Thread] = set()
        self.compiling: set[threading.Thread] = set()
        self.abandoned: WeakSet[threading.Thread] = WeakSet()
        self._collect = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is in the compiler."""
        thread = threading.current_thread()
        with self.lock:
            self._check(thread)
            self.inside.add(thread)
        try:
            yield
        finally:
            with self.lock:
                self.inside.discard(thread)
                if thread in self.compiling:
                    self.compiling.discard(thread)
                    if not self.compiling and self._collect:
                        gc.enable()
        self._check(thread)

    def began(self, *, compiling: bool) -> None:
        """numba compiles a function (compiling), or makes a pass over one."""
        thread = threading.current_thread()
        self._check(thread)
        if compiling and thread in self.inside:
            with self.lock:
                if not self.compiling:
                    self._collect = gc.isenabled()
                    gc.disable()
                self.compiling.add(thread)

    def _check(self, thread: threading.Thread) -> None:
        if thread in self.abandoned:
            raise Abandoned


watch = _Watch()


def is_compiling() -> bool:
    """A kernel is being compiled now, in any thread: it was not in the cache."""
    return bool(watch.compiling)


def is_left() -> bool:
    """A thread that nobody waits for is still in the compiler."""
    with watch.lock:
        return any(thread in watch.abandoned for thread in watch.inside)


def leave(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads that were told to end, but not for the compiler: a thread in it raises Abandoned at its next step."""
    with watch.lock:
        watch.abandoned.update(threads)
    for thread in threads:
        while thread.is_alive():
            with watch.lock:
                if thread in watch.inside:
                    atexit.register(thread.join)  # LLVM must not be at work when the process is taken down
                    break
            thread.join(0.02)
