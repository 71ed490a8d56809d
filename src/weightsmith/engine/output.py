"""The interface of outputs: where a run writes its tensors and products."""

from __future__ import annotations

from typing import Protocol

from weightsmith.formats.files import Extent
from weightsmith.jobs.job import Bytes
from weightsmith.plans import Product
from weightsmith.products.base import Arrays
from weightsmith.store.journal import Finished


class Output(Protocol):
    """Where the bytes go: what the engine needs of `store.Staging`."""

    def location(self, name: str) -> tuple[int, int] | None:
        """File descriptor and absolute offset of a tensor; None if it is not in a file."""

    def write(self, name: str, start_byte: int, buffer: memoryview | Bytes) -> None:
        """Write part of a tensor. Called from many threads."""

    def equal(self, name: str, start_byte: int, extent: Extent) -> None:
        """These bytes of a tensor, which are about to be written, are a run of a file elsewhere: a store may copy that."""

    def finish(self, name: str, done: Finished) -> None:
        """All bytes of a tensor are written. done.made_from: `Results.digest` of its products."""

    def create(self, product: Product) -> Arrays | None:
        """Arrays of zeros in a file for a product that is being made; None where there is no file."""

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """A product is finished: keep it for a run that resumes this one. Returns its arrays, as they are to be read."""

    def forget(self, product: Product) -> None:
        """Nothing needs a product any more."""
