"""How the products of a text run: the decoder, rows of states, threads, progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weightsmith._activations.decoder import Base
from weightsmith._activations.decoder.forward import Decoder, Layer, build
from weightsmith._activations.work import LayerWork
from weightsmith._base.errors import FormatError, NonFinite, ParameterError, PlanError, WeightsmithError
from weightsmith._base.torch_use import one_thread, usable_device
from weightsmith._files.arrays import release_pages
from weightsmith.abc.product import Floats, ProductContext

WORK_BYTES = 4 << 30
"""Limit of the sums that are held at once, and of what is computed of them, if the run has no limit."""

ROWS_AT_ONCE = 4
"""Rows that are shared out to the threads, unless there are more threads. Threads wait for each other after each batch, and
memory holds what enters the linear layers in each row of it.
"""

Ints = npt.NDArray[np.int32]

NumberedRow = tuple[int, Tensor]
"""A row's number, and its states [tokens, hidden]."""

T = TypeVar("T")


def decoder_of(base: Base) -> Decoder:
    """The module of a model, without weights, which is kept for the next product. Raises PlanError."""
    return _decoder(json.dumps(asdict(base), sort_keys=True))


@lru_cache(maxsize=1)
def _decoder(text: str) -> Decoder:
    return build_decoder(Base(**json.loads(text)))


def build_decoder(base: Base) -> Decoder:
    """A module of the caller's own: plans are made while others run, and both change it. Raises PlanError."""
    decoder = build(base, {})
    if isinstance(decoder, WeightsmithError):
        raise PlanError([decoder])
    return decoder


def device_of(context: ProductContext) -> str:
    """The torch device. Raises PlanError for one that cannot be used."""
    try:
        return usable_device(context.device)
    except ParameterError as error:
        raise PlanError([error]) from error


def on_cpu(device: str) -> bool:
    """Whether a torch device is the CPU."""
    return str(torch.device(device).type) == "cpu"


def budget(context: ProductContext) -> int:
    """The bytes that the sums of a product may take, and what is computed of them likewise: half of its memory each."""
    return WORK_BYTES if context.memory_bytes is None else context.memory_bytes // 2


@contextmanager
def workers(threads: int, device: str) -> Iterator[ThreadPoolExecutor]:
    """Threads on each of which torch computes alone. A GPU gets its work from one."""
    with one_thread(), ThreadPoolExecutor(threads if on_cpu(device) else 1) as pool:
        yield pool


@contextmanager
def together(threads: int) -> Iterator[ThreadPoolExecutor]:
    """So many threads that wait for each other, on each of which torch computes alone. A GPU gets its work from all of them."""
    with one_thread(), ThreadPoolExecutor(threads) as pool:
        yield pool


@contextmanager
def processors(threads: int, device: str, pool: ThreadPoolExecutor) -> Iterator[ThreadPoolExecutor]:
    """Threads for what processors compute, whatever the device. pool: of `workers`, which is used if it has as many."""
    if on_cpu(device):
        yield pool
        return
    with ThreadPoolExecutor(threads) as others:
        yield others


class PhaseProgress:
    """Reports the progress of all products of a phase as one: each layer counts `UNITS`.

    first, last  the part of the layer's units that this product takes
    """

    UNITS = 1000

    def __init__(self, context: ProductContext, base: Base, layer: int, first: float, last: float) -> None:
        self._context = context
        self._total = base.layers * self.UNITS
        self._start = (layer + first) * self.UNITS
        self._span = (last - first) * self.UNITS

    def __call__(self, share: float) -> None:
        """share: how much of this product is done, 0 … 1. Raises Cancelled."""
        self._context.progress(min(self._total, round(self._start + share * self._span)), self._total)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of states, and what a product does with them.

    states  float32 [rows, tokens, hidden]
    """

    context: ProductContext
    base: Base
    states: Floats
    device: str
    progress: PhaseProgress

    def batches(self, span: tuple[float, float] = (0, 1)) -> Iterator[list[NumberedRow]]:
        """The rows, some at a time, as tensors of their own. span: of the product's progress."""
        first, last = span
        size = max(self.context.threads, ROWS_AT_ONCE)
        for start in range(0, len(self.states), size):
            self.progress(first + (last - first) * start / len(self.states))
            numbers = range(start, min(start + size, len(self.states)))
            yield [(r, torch.from_numpy(np.array(self.states[r])).to(self.device)) for r in numbers]
            release_pages(self.states)

    def map(self, function: Callable[[NumberedRow], T]) -> Iterator[list[T]]:
        """What a function makes of each row, on any thread: in order, some at a time."""
        with workers(self.context.threads, self.device) as pool:
            for rows in self.batches():
                yield list(pool.map(function, rows))

    def fill(self, array: Floats, function: Callable[[NumberedRow], Tensor], what: str) -> None:
        """Fill an array with what a function makes of each row. what: for `check_finite`."""

        def run(numbered: NumberedRow) -> None:
            states_out = function(numbered)
            self.check_finite(states_out, what, numbered[0])
            array[numbered[0]] = states_out.cpu().numpy()

        for _ in self.map(run):
            release_pages(array)

    def check_finite(self, x: Tensor, what: str, row: int) -> None:
        """Raise NonFinite, with the layer and the row, unless all numbers have finite squares."""
        low, high = x.aminmax()
        if not bool(torch.isfinite(torch.maximum(-low, high) ** 2)):
            raise NonFinite(
                f"{what} is NaN, infinite or too large in row {row} of the text",
                where=self.base.label,
                fix=f"check the model with another program{self.base.instead}",
                state="Nothing was published. Finished layers are kept; with a changed model or text, add --no-resume.",
            )


@dataclass(frozen=True, slots=True)
class LayerRows(Rows):
    """A layer with its weights, and the rows of states that enter it."""

    number: int
    layer: Layer

    def keep(self, tensor: Tensor, array: Floats, row: int, what: str) -> None:
        """Put what was found for a row into an array [rows, tokens, hidden]. Raises NonFinite, with what it is of the layer."""
        self.check_finite(tensor, f"{what} of layer {self.number}", row)
        array[row] = tensor.cpu().numpy()


def states_of(context: ProductContext, work: LayerWork) -> Floats:
    """The states that a product names: float32 [rows, tokens, hidden].

    Raises FormatError if they are something else, which a plan from elsewhere may name.
    """
    arrays = context.arrays(work.states)
    if len(arrays) != 1 or arrays[0].ndim != 3 or arrays[0].dtype != np.float32 or arrays[0].shape[2] != work.base.hidden:
        what = f"product {work.states} does not have the states that enter a layer"
        raise FormatError(what, where=f"product {context.product.name}", fix="make the plan again")
    return arrays[0]


def rows_of_states(context: ProductContext, work: LayerWork, first: float, last: float, *, back: bool = False) -> Rows:
    """The rows that enter a layer, or the head.

    first, last  the part of the layer's progress that this product takes
    back         whether the phase goes from the last layer to the first
    """
    states = states_of(context, work)
    number = max(work.base.layers - 1 - work.layer, 0) if back else work.layer
    return Rows(context, work.base, states, device_of(context), PhaseProgress(context, work.base, number, first, last))


def ids_of(context: ProductContext, rows: str, states: tuple[int, ...]) -> Ints:
    """The tokens of the states of a text: int32 [rows, tokens].

    rows    the product that has them
    states  their shape: [rows, tokens, hidden]

    Raises FormatError for those of other states, which a plan from elsewhere may name.
    """
    ids: Ints = context.arrays(rows)[0]
    if ids.shape != states[:2]:
        what = f"its states are those of {list(states[:2])} tokens, but product {rows} has {list(ids.shape)}"
        raise FormatError(what, where=f"product {context.product.name}", fix="plan again")
    return ids


@contextmanager
def layer_rows(
    context: ProductContext,
    work: LayerWork,
    first: float,
    last: float,
    *,
    back: bool = False,
    overrides: Mapping[str, Tensor] | None = None,
) -> Iterator[LayerRows]:
    """A layer with the rows that enter it. overrides: weights in place of the model's, by name; else as `rows_of_states`."""
    rows = rows_of_states(context, work, first, last, back=back)
    decoder = decoder_of(work.base)
    with decoder.layer(work.layer, context, rows.states.shape[1], rows.device, overrides) as layer:
        yield LayerRows(rows.context, rows.base, rows.states, rows.device, rows.progress, work.layer, layer)
