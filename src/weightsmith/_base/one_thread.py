"""torch on one thread, for results that do not depend on the number of processors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weightsmith._base.process import return_large_blocks

Tensor = Any  # torch is optional, so mypy cannot use its type


class _OneThread:
    """Context manager: torch uses one thread while any block is active, and the previous number after the last.

    OpenMP has a number for each thread, so every thread sets its own to 1. A thread that leaves before the last keeps 1,
    because restoring it would change the process's too; its number does not count as the previous one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 1
        self._here = threading.local()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        import torch

        return_large_blocks()
        with self._lock:
            if self._inside == 0 and not getattr(self._here, "changed", False):
                self._before = torch.get_num_threads()
            self._inside += 1
            self._here.changed = True
            torch.set_num_threads(1)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    torch.set_num_threads(self._before)
                    self._here.changed = False


one_thread = _OneThread()
