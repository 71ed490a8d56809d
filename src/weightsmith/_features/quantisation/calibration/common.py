"""What the products of a calibration have in common: places of errors, memory that threads share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from weightsmith._base.errors import WeightsmithError


@contextmanager
def located(where: str) -> Iterator[None]:
    """Errors of weightsmith are of this place."""
    try:
        yield
    except WeightsmithError as error:
        error.finding = replace(error.finding, where=where)
        raise


class Room:
    """Memory that threads share: `with room(nbytes):` waits until so many bytes are free. One alone may take more than all."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._taken = 0
        self._condition = threading.Condition()

    @contextmanager
    def __call__(self, nbytes: int) -> Iterator[None]:
        """Take some bytes, and give them back."""
        with self._condition:
            self._condition.wait_for(lambda: not self._taken or self._taken + nbytes <= self._limit)
            self._taken += nbytes
        try:
            yield
        finally:
            with self._condition:
                self._taken -= nbytes
                self._condition.notify_all()
