"""Outputs of the engine that write no files."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weightsmith._base.files import Extent
from weightsmith._plans import Product
from weightsmith.abc.job import Bytes
from weightsmith.abc.output import Finished
from weightsmith.abc.product import Arrays, Target


class DiscardedOutput:
    """Discards tensors. Products stay in memory."""

    def location(self, name: str) -> tuple[int, int] | None:
        """There is no file."""
        return None

    def write(self, name: str, start_byte: int, buffer: memoryview | Bytes) -> None:
        """Nothing is kept."""

    def equal(self, name: str, start_byte: int, extent: Extent) -> None:
        """There is nothing to copy to."""

    def finish(self, name: str, done: Finished) -> None:
        """Nothing follows."""

    def create(self, product: Product) -> None:
        """There is no file."""

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """Nothing is kept."""
        return arrays

    def forget(self, product: Product) -> None:
        """Nothing was kept."""


class MemoryOutput(DiscardedOutput):
    """Hands the bytes of each tensor to its target."""

    def __init__(self, targets: Mapping[str, Target]) -> None:
        self._targets = targets

    def write(self, name: str, start_byte: int, buffer: memoryview | Bytes) -> None:
        """Hand over some bytes."""
        self._targets[name].take(start_byte, np.frombuffer(buffer, np.uint8))
