"""The interface of a kind of product."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import CheckpointError, Finding
from weightsmith._base.files import read_bounded
from weightsmith._base.tensors import TensorSpec
from weightsmith._files.copied import MAX_COPIED_BYTES
from weightsmith._kernels.codecs import BLOCK, decode
from weightsmith._plans import Product as Product
from weightsmith.abc.job import Bytes, Matrix, Tile

if TYPE_CHECKING:
    from weightsmith._base.report.blocks import Block


# ---- The interface of a statistic of a text: a sum or maximum over its tokens for each linear layer of a model


@dataclass(frozen=True, slots=True)
class Statistic:
    """A sum over the tokens of a text, for a linear layer with a weight [N, K].

    shape      (N, K) → the shape of the sum, and of the array, which is float32
    add        (sum, part, x) adds what one row of the text gives to the rows `part` of the sum, in place. x: torch float32
               [tokens, K], what enters the layer for the tokens that reach it. Called from many threads, with other parts
    finish     (sum, reached, tokens) → the array: tokens that reached the layer, and of the text
    gradients  `add` gets also g, [tokens, N]: gradients of log p(label) at the outputs of the layer, summed over the labels
               of all tokens. Without gradients, layers with the same input share an array
    labels     of gradients: `drawn` from the model's own predictions, or the next tokens of the `text`
    precise    the sum is float64; else float32
    tile       rows of the sum that one thread adds; 0: all of them
    """

    shape: Callable[[int, int], tuple[int, ...]]
    add: Callable[..., None]
    finish: Callable[[Any, int, int], Any]
    gradients: bool = False
    labels: Literal["drawn", "text"] = "drawn"
    precise: bool = False
    tile: int = 0


# ---- Receivers of a tensor's bytes, for products that compute


Floats = npt.NDArray[np.float32]


class TensorSink(Protocol):
    """Takes the numbers of one tensor."""

    def take(self, start_byte: int, data: Bytes) -> None:
        """Some of its bytes as they are stored: whole elements. Called from many threads."""


class WholeTensor:
    """All numbers of a tensor, in an array of its shape."""

    def __init__(self, spec: TensorSpec, array: Floats) -> None:
        assert array.shape == spec.shape, (spec, array.shape)
        self._spec = spec
        self._flat = array.reshape(-1)
        assert not self._flat.size or np.shares_memory(self._flat, array)

    def take(self, start_byte: int, data: Bytes) -> None:
        width = self._spec.dtype.itemsize
        first, count = start_byte // width, len(data) // width
        _decode(self._spec, data, 0, count, self._flat[first : first + count])


class SomeRows:
    """Some rows of a matrix, by ascending numbers: float32 [len(numbers), cols]."""

    def __init__(self, spec: TensorSpec, numbers: npt.NDArray[np.int64], values: Floats) -> None:
        self._spec = spec
        self._numbers = numbers
        self._values = values

    def take(self, start_byte: int, data: Bytes) -> None:
        cols, width = self._spec.shape[1], self._spec.dtype.itemsize
        first, end = start_byte // width, (start_byte + len(data)) // width
        for k in range(*np.searchsorted(self._numbers, [first // cols, -(-end // cols)])):
            row = int(self._numbers[k]) * cols
            start, stop = max(first, row), min(end, row + cols)
            _decode(self._spec, data, start - first, stop - start, self._values[k, start - row : stop - row])


class Largest:
    """The largest magnitude of a tensor so far, `largest`; NaN does not count."""

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self.largest = 0.0

    def take(self, start_byte: int, data: Bytes) -> None:
        from weightsmith._kernels.codes import block_maxima

        count, row, top = len(data) // self._spec.dtype.itemsize, np.empty(BLOCK, np.float32), np.empty(1, np.float32)
        largest = 0.0
        for start in range(0, count, BLOCK):
            n = min(BLOCK, count - start)
            _decode(self._spec, data, start, n, row[:n])
            block_maxima(row[:n], n, 1, n, top)
            largest = max(largest, float(top[0]))
        with self._lock:
            self.largest = max(self.largest, largest)


def _decode(spec: TensorSpec, data: Bytes, start: int, count: int, out: Floats) -> None:
    """out = elements start … start + count of the bytes of a tensor."""
    if spec.dtype.code >= 0:
        decode(data, spec.dtype.code, start, count, out)
    else:
        out[:] = data.view(spec.dtype.numpy)[start : start + count]


Arrays = Sequence[npt.NDArray[Any]]
"""One array for each of `Product.outs`, with its dtype and shape."""


class StreamingReduction(ABC):
    """Statistics over the tiles of many tensors, in one or more passes.

    begin(0) → statistics(0, every tile), take(0, every result) → end(0) → begin(1) → …

    `statistics` is called from many threads, and its result may depend only on the grains of the tile. `take` receives the
    results one by one in plan order, so the outcome does not depend on tile size or number of threads.

    divisible  several processes may share the tiles of a pass: what they have taken adds up exactly in any order, as counts
               do, and `partial` and `add` pass it on; a copy (`copy.deepcopy`) measures on its own
    """

    divisible: ClassVar[bool] = False

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

    def partial(self, number: int) -> Arrays:
        """What `take` has received in pass `number` so far, for `add` in other processes.

        Throughout a pass, it is the same number of arrays, and only their lengths (their first dimension) may change.
        """
        raise NotImplementedError

    def add(self, number: int, partial: Arrays) -> None:
        """Add what another process has taken of other tiles. partial: may be read-only."""
        raise NotImplementedError

    def end(self, number: int) -> None:  # noqa: B027
        """Finish pass `number`, after its last `take`."""

    @abstractmethod
    def arrays(self) -> Arrays:
        """The result, after the last pass. Before the first pass, only shapes and dtypes are valid."""


class Cancelled(Exception):
    """The run has ended: release all resources."""


class Tasks(Protocol):
    """Tasks of a product for the processes that wait for it. A task is JSON; its result is the same in every process."""

    def has_helpers(self) -> bool:
        """Whether another process waits now."""

    def threads(self, most: int) -> int:
        """How many of its threads this process may use for a task of its own."""

    def put(self, array: npt.NDArray[Any]) -> str:
        """Keep an array for tasks, and return its name there. Raises OSError."""

    def array(self, name: str) -> npt.NDArray[Any]:
        """An array of a task. Raises OSError."""

    def offer(self, task: Mapping[str, Any]) -> str:
        """Let others do a task, and return its key. Raises OSError."""

    def take(self, key: str, make: Callable[[], Arrays], specs: Sequence[TensorSpec] | None = None) -> Arrays | None:
        """The arrays of a task: another process's, or those of `make`; None while another process is making them.

        specs  dtypes and shapes that they must have: others are made again; None: any
        """

    def clear(self) -> None:
        """Remove all tasks and arrays."""


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
    tasks         for other processes; None if there are none
    """

    product: Product
    device: str
    threads: int
    memory_bytes: int | None
    folders: Sequence[Path]
    make: Callable[[Mapping[str, TensorSink]], None]
    arrays: Callable[[str], Arrays]
    create: Callable[[], Arrays]
    progress: Callable[[int, int], None]
    also: Callable[[Callable[[Product], bool]], Arrays | None] = lambda _fits: None
    tasks: Tasks | None = None

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
    help       does a task of it (`ProductContext.tasks`) on so many threads, in a process that waits for it; None: it has none.
               Raises what the product's own computation would raise, and OSError
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
    help: Callable[[Mapping[str, Any], Tasks, int], Arrays] | None = None
