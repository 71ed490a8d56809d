"""The interface of a kind of product."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import CheckpointError, Finding
from weightsmith._base.files import read_bounded
from weightsmith._base.tensors import TensorSpec
from weightsmith._files.copied import MAX_COPIED_BYTES
from weightsmith._plans import Product as Product
from weightsmith.abc.job import Matrix, Tile
from weightsmith.abc.product_targets import Floats as Floats
from weightsmith.abc.product_targets import Largest, SomeRows, Target, WholeTensor

if TYPE_CHECKING:
    from weightsmith._base.report.blocks import Block

Arrays = Sequence[npt.NDArray[Any]]
"""One array for each of `Product.outs`, with its dtype and shape."""


class StreamingReduction(ABC):
    """Statistics over the tiles of many tensors, in one or more passes.

    begin(0) → statistics(0, every tile), take(0, every result) → end(0) → begin(1) → …

    `statistics` is called from many threads, and its result may depend only on the grains of the tile. `take` receives the
    results one by one in plan order, so the outcome does not depend on tile size or number of threads.
    """

    @abstractmethod
    def passes(self) -> int:
        """Number of passes. Called again after each `end`."""

    def sampled(self, number: int) -> bool:
        """Whether pass `number` reads only the first grain of each tile."""
        return False

    def begin(self, number: int) -> None:  # noqa: B027  most have nothing to prepare
        """Start pass `number`."""

    @abstractmethod
    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> Any:
        """Statistics of one tile."""

    @abstractmethod
    def take(self, number: int, result: Any) -> None:
        """Receive the statistics of the next tile."""

    def end(self, number: int) -> None:  # noqa: B027
        """Finish pass `number`, after its last `take`."""

    @abstractmethod
    def arrays(self) -> Arrays:
        """The result, after the last pass. Before the first pass, only shapes and dtypes are valid."""


class Cancelled(Exception):
    """The run has ended: release all resources."""


@dataclass(frozen=True, slots=True)
class ProductContext:
    """What a product that computes can use.

    product       the product to compute
    device        torch device name for matrix products and forward passes
    threads       number of threads it may use
    memory_bytes  that it may hold besides its arrays, of the run's limit; None: the run has no limit
    folders       of each model's files
    make          makes tensors of `product.steps` and hands their bytes to targets, by name. Raises as the engine does
    arrays        the arrays of a finished product that this one needs, read-only. They may be mapped from a file
    create        arrays of zeros for the result, in a file if the run has one: for results that are too large for memory
    progress      reports the work done and the total, in any units. Raises Cancelled if nobody waits for the result any more:
                  call it often
    also          arrays of zeros for another product that could be computed at the same time, if one meets a condition: for
                  what is found on the way. They must be filled, as its own computation would; None if there is none
    """

    product: Product
    device: str
    threads: int
    memory_bytes: int | None
    folders: Sequence[Path]
    make: Callable[[Mapping[str, Target]], None]
    arrays: Callable[[str], Arrays]
    create: Callable[[], Arrays]
    progress: Callable[[int, int], None]
    also: Callable[[Callable[[Product], bool]], Arrays | None] = lambda _fits: None

    def fill(self, arrays: Mapping[str, Floats]) -> None:
        """Fill C-contiguous arrays with whole tensors. arrays: by the names of `product.steps`, with the tensor's shape.

        Values are those of the tensor as stored, converted to float32 tile by tile, so no further memory is needed.
        """
        specs = self.specs
        self.make({name: WholeTensor(specs[name], array) for name, array in arrays.items()})

    def load(self, names: Iterable[str]) -> dict[str, Floats]:
        """Whole tensors, as `fill` makes them, in new arrays."""
        specs = self.specs
        arrays = {name: np.empty(specs[name].shape, np.float32) for name in names}
        self.fill(arrays)
        return arrays

    def rows(self, name: str, numbers: Sequence[int]) -> Floats:
        """Some rows of a matrix [R, C]: float32 [len(numbers), C]. numbers: ascending, each once."""
        spec = self.specs[name]
        values = np.empty((len(numbers), spec.shape[1]), np.float32)
        self.make({name: SomeRows(spec, np.array(numbers, np.int64), values)})
        return values

    def largest(self, names: Sequence[str]) -> Floats:
        """The largest magnitude of each of some tensors: float32 [len(names)]. NaN does not count. Reads tile by tile."""
        specs = self.specs
        targets = {name: Largest(specs[name]) for name in names}
        self.make(targets)
        return np.array([targets[name].largest for name in names], np.float32)

    def folder(self, model: int) -> Path:
        """The folder of `plan.models[model]`. Raises CheckpointError if one of `product.files` has changed."""
        folder = self.folders[model]
        for file in self.product.files:
            path = folder / file.name
            if file.model == model and hashlib.sha256(read_bounded(path, MAX_COPIED_BYTES)).hexdigest() != file.sha256:
                raise CheckpointError("the file has changed since the plan was made", where=str(path), fix="plan again")
        return folder

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors of `product.steps`, by name."""
        return {step.out.name: step.out for step in self.product.steps}


class ProductReport(Protocol):
    """What a product reports to the user, besides its arrays."""

    def files(self) -> Mapping[str, bytes]:
        """Files to add to the output, by name."""

    def section(self) -> str:
        """A section for the model card, in Markdown."""

    def blocks(self) -> Sequence[Block]:
        """What the page of a run shows of it."""

    def warnings(self, where: str) -> list[Finding]:
        """Warnings. where: the recipe."""


@dataclass(frozen=True, slots=True)
class ProductKind:
    """A kind of product: either `reduce` or `compute` is set.

    doing    text of the progress display, with a verb in -ing
    reads    files that it reads, other than `product.files`
    installed  the code of plug-ins that it uses: `Plugins.identity`, or "". Belongs to the identity of interrupted work
    transient  only products need its arrays: `Product.transient`
    released   large arrays without a report, computed alike each time: removed once the products and steps that need them
               are finished
    device   the result depends on `ProductContext.device`: finished work is mixed only with that of the same type of device
    serves   whether a finished product has all that another one of this kind, of one tensor alone, would have
    check    why a product's settings, steps and arrays are invalid, or ""; plans may come from untrusted sources
    reduce   for streaming
    compute  for computing; raises WeightsmithError for invalid inputs
    report   the report of a finished product, or None
    """

    doing: str
    reduce: Callable[[Product], StreamingReduction] | None = None
    compute: Callable[[ProductContext], Arrays] | None = None
    report: Callable[[Product, Arrays], ProductReport | None] = lambda product, arrays: None
    check: Callable[[Product], str] = lambda product: ""
    serves: Callable[[Product, Product], bool] = lambda product, other: set(other.models) <= set(product.models)
    reads: Callable[[Product], Sequence[Path]] = lambda product: ()
    installed: Callable[[Product], str] = lambda product: ""
    device: bool = False
    transient: bool = False
    released: bool = False
