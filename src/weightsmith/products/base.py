"""What a kind of product is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weightsmith.errors import Finding
from weightsmith.jobs.job import Matrix, Tile
from weightsmith.plans import Product

Arrays = Sequence[npt.NDArray[Any]]
"""One array for each of `Product.outs`, in their dtypes and shapes."""

Floats = npt.NDArray[np.float32]


class Survey(ABC):
    """Statistics over the tiles of many tensors, in one pass or more.

    begin(0) → statistics(0, every tile), take(0, every result) → end(0) → begin(1) → …

    `statistics` is called from many threads; its result must depend on the grains of the tile alone. `take` gets the results
    one after another, in the order of the plan, so that the outcome is the same for any tile size and number of threads.
    """

    @abstractmethod
    def passes(self) -> int:
        """Number of passes; asked again after each `end`."""

    def sampled(self, number: int) -> bool:
        """Pass `number` looks at the first grain of each tile only."""
        return False

    def begin(self, number: int) -> None:  # noqa: B027  most have nothing to prepare
        """Pass `number` begins."""

    @abstractmethod
    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> Any:
        """Statistics of one tile."""

    @abstractmethod
    def take(self, number: int, result: Any) -> None:
        """The statistics of the next tile."""

    def end(self, number: int) -> None:  # noqa: B027
        """All results of pass `number` are in."""

    @abstractmethod
    def arrays(self) -> Arrays:
        """What the product is, after the last pass; before the first, something of that shape."""


class Bench(Protocol):
    """What a product that computes works with.

    product  that is made
    device   for matrix products and forward passes, as torch names it
    threads  that it may use
    """

    product: Product
    device: str
    threads: int

    def fill(self, arrays: Mapping[str, Floats]) -> None:
        """Fill C-contiguous arrays with whole tensors. arrays: by the names of `product.steps`, each of its tensor's shape.

        The numbers are those of the tensor as it is, or would be, stored; they become float32 tile by tile, so that nothing
        but the arrays takes memory. Raises as the engine does.
        """

    def rows(self, name: str, numbers: Sequence[int]) -> Floats:
        """Some rows of a matrix [R, C]: float32 [len(numbers), C]. numbers: ascending, each once."""

    def folder(self, model: int) -> Path:
        """Where the files of `plan.models[model]` are. Raises CheckpointError when one of `product.files` has changed."""

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Report how far it is. Raises Cancelled when nobody waits for the product any more: call it often."""


class Cancelled(Exception):
    """The run has ended: let go of everything."""


class Report(Protocol):
    """What a product tells the user beside its arrays."""

    def files(self) -> Mapping[str, bytes]:
        """Files of the output, by name."""

    def section(self) -> str:
        """More of the model card, in Markdown."""

    def warnings(self, where: str) -> list[Finding]:
        """What the user should know. where: the recipe."""


def _no_problem(product: Product) -> str:
    return ""


def _no_report(product: Product, arrays: Arrays) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of product: it streams or computes.

    doing    what progress says, with a verb in -ing
    check    why the settings, steps and arrays of a product cannot be, "" if they can: a plan may come from anyone
    survey   of one that streams
    compute  of one that computes; raises WeightsmithError for what is wrong with its inputs
    report   of a finished product; None where there is nothing to report
    """

    doing: str
    survey: Callable[[Product], Survey] | None = None
    compute: Callable[[Bench], Arrays] | None = None
    report: Callable[[Product, Arrays], Report | None] = _no_report
    check: Callable[[Product], str] = _no_problem
