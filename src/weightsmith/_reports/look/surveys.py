"""Surveys: products of tensors that are computed in memory, with a row of each of their arrays for each step."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.report.blocks import Mark
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._base.text import count
from weightsmith._execution.progress import Meter, Reading, show_progress, shown_meter
from weightsmith._kernels.codecs import decode
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._planning.planner.prepared import download
from weightsmith._plans import ModelInput, PlanDraft, Product, Provenance, Settings, Step, Table
from weightsmith.abc.job import Matrix, Tile
from weightsmith.abc.product import Arrays, ProductKind, StreamingReduction

if TYPE_CHECKING:
    from weightsmith._engine.local import Outcome, Progress


Watching = Callable[["Progress"], None] | Meter | bool
"""Called about ten times per second; or what shows the progress; True: a bar in terminals and notebooks, False: nothing."""


def survey_product(
    name: str, op: str, steps: Sequence[Step], shapes: Mapping[str, tuple[int, ...]], integers: Collection[str] = ()
) -> Product:
    """The product of a survey, which looks at the steps that need it.

    shapes    of a row of each array, by name
    integers  arrays that are int64; the others are float64
    """
    dtypes = {what: DTYPES["I64" if what in integers else "F64"] for what in shapes}
    outs = tuple(TensorSpec(f"{name}: {what}", dtypes[what], (len(steps), *shape)) for what, shape in shapes.items())
    needs = (name,)  # one tuple serves all steps
    return Product(name, op, outs, {}, tuple(replace(step, needs=needs) for step in steps))


def survey_kind(
    doing: str,
    reduce: Callable[[Product], StreamingReduction],
    product: Callable[[str, Sequence[Step]], Product],
    problem: Callable[[Sequence[Step]], str],
) -> ProductKind:
    """The kind of a survey. product: makes it of its steps; problem: what is wrong with some steps, or ""."""

    def check(checked: Product) -> str:
        if wrong := problem(checked.steps):
            return wrong
        return "" if checked.outs == product(checked.name, checked.steps).outs else "its arrays are not those of its steps"

    return ProductKind(doing, reduce=reduce, check=check)


class Survey(StreamingReduction):
    """The reduction of a survey, in one pass.

    row     of each step, by name
    specs   of the steps
    linear  names of steps that are weights of linear layers
    totals  the arrays, which begin as zeros
    """

    def __init__(self, product: Product) -> None:
        self.row = {step.out.name: i for i, step in enumerate(product.steps)}
        self.specs = [step.out for step in product.steps]
        self.linear = {step.out.name for step in product.steps if step.role == "linear"}
        self.totals: list[npt.NDArray[Any]] = [np.zeros(out.shape, out.dtype.numpy) for out in product.outs]

    def passes(self) -> int:
        return 1

    def arrays(self) -> Arrays:
        return self.totals


def added(held: npt.NDArray[np.float64], parts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The sum of an array and others, one after the other; `np.sum` would add in an order that depends on the tiles.

    held   float64 [...]
    parts  float64 [n, ...]
    """
    with np.errstate(invalid="ignore", over="ignore"):
        total: npt.NDArray[np.float64] = np.cumsum(np.concatenate([held[None], parts]), axis=0)[-1]
    return total


LOWEST, POWERS = -40, 48
"""Magnitudes are counted by powers of two: the exponent of the first, and their number."""

SAMPLE = 1024
"""Elements of each tile whose magnitudes are counted."""


def sampled(matrix: Matrix, tile: Tile, number: int) -> npt.NDArray[np.float32]:
    """The first elements of a tile, at most `SAMPLE`. number: of the input."""
    numbers = np.empty(min(tile.size, SAMPLE), np.float32)
    decode(tile.raw[number], int(matrix.codes[number]), 0, numbers.size, numbers)
    return numbers


def magnitudes(numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """How many numbers have a magnitude from 2**k up to 2**(k + 1), for the `POWERS` exponents k from `LOWEST` on.

    Smaller and larger ones count as the first and the last. Zeros, NaN and infinities are left out.

    >>> found = magnitudes(np.float32([1.5, -1, 0.25, 0, np.inf, 1e30, 1e-30]))
    >>> [(int(i) + LOWEST, int(found[i])) for i in np.flatnonzero(found)]
    [(-40, 1), (-2, 1), (0, 2), (7, 1)]
    """
    used = numbers[np.isfinite(numbers) & (numbers != 0)]
    exponents = np.clip(np.frexp(used)[1] - 1 - LOWEST, 0, POWERS - 1)
    return np.bincount(exponents, minlength=POWERS).astype(np.int64)


def compact(counts: npt.NDArray[np.int64]) -> array[int]:
    """Counts in as few bytes as hold them all.

    >>> compact(np.array([3, 700])), compact(np.array([70_000]))
    (array('H', [3, 700]), array('I', [70000]))
    """
    code = "H" if counts.max(initial=0) < 1 << 16 else "I" if counts.max() < 1 << 32 else "Q"
    return array(code, counts.tolist())


def shares(counts: Sequence[int]) -> tuple[tuple[float, ...], int]:
    """The counts of `magnitudes` as shares, without the empty ones at both ends; and the exponent of the first.

    >>> shares([0, 0, 3, 1, 0]), shares([0])
    (((0.75, 0.25), -38), ((), 0))
    """
    used = [i for i, n in enumerate(counts) if n]
    if not used:
        return (), 0
    total = sum(counts)
    return tuple(n / total for n in counts[used[0] : used[-1] + 1]), LOWEST + used[0]


def keep_largest(held: npt.NDArray[np.float64], first: int, values: npt.NDArray[np.float64]) -> None:
    """Add rows to a list of those with the largest values, in place. Of equal ones the first stays.

    held    float64 [n, 2]: numbers and values of rows, the largest first; -1 where there are fewer
    first   number of the first of the rows
    values  float64 [rows]; those below zero, and NaN, do not count

    >>> held = np.full((2, 2), -1.0)
    >>> keep_largest(held, 10, np.array([3.0, -1.0, 5.0, 3.0]))
    >>> held
    array([[12.,  5.],
           [10.,  3.]])
    """
    chosen = np.argsort(-values, kind="stable")[: len(held)]
    chosen = chosen[values[chosen] >= 0]
    rows = np.concatenate([held, np.stack([first + chosen, values[chosen]], axis=1)])
    held[:] = rows[np.lexsort((rows[:, 0], -rows[:, 1]))][: len(held)]


def survey(
    name: str,
    models: Sequence[Checkpoint],
    products: Sequence[Product],
    *,
    threads: int | None,
    progress: Watching,
    doing: str,
    passes: int = 1,
    tables: Sequence[Table] = (),
) -> Outcome:
    """Compute products of tensors, in memory. NaN and infinities are numbers like any others.

    doing   text of the progress display
    passes  over the tensors, for the progress display
    tables  of the plan, for gathers
    """
    from weightsmith._engine.local import (
        DiscardedOutput,
        run,  # numba takes half a second to import; headers need none
    )
    from weightsmith._engine.resources import Resources, Workload

    download(models)
    settings = [Settings({}, tuple({} for _ in models))]
    inputs = [ModelInput(model.ref, model.revision, model.identity) for model in models]
    draft = PlanDraft(Provenance(name), inputs, [], settings, list(products), list(tables))
    go = partial(
        run, draft.finish(stored=False), models, DiscardedOutput(), Resources(threads or 0), Workload(allow_nonfinite=True)
    )
    if progress is False:
        return go()
    if not isinstance(progress, bool | Meter):
        return go(progress=progress)
    reads = [(models[read.model], read, leaf) for product in products for leaf in product.steps for read in leaf.inputs]
    total = passes * sum(leaf.out.size * model.specs[read.tensor].dtype.itemsize for model, read, leaf in reads)
    with shown_meter(progress) as shown:
        return go(progress=lambda now: _show(shown, now, doing, total))


def _show(shown: Meter, now: Progress, doing: str, total_bytes: int) -> None:
    if now.compiling:
        show_progress(shown, now, doing)
    elif now.read_bytes:
        shown.show(Reading(doing, min(now.read_bytes, total_bytes), total_bytes, now.read_bytes))


@dataclass(frozen=True, slots=True)
class NonFiniteCounts:
    """How many elements are NaN, how many are infinite, and how many tensors have such elements.

    >>> NonFiniteCounts.of(1, 0) + NonFiniteCounts.of(0, 3) + NonFiniteCounts.of(2, 5)
    NonFiniteCounts(nans=3, nan_tensors=2, infinities=8, infinite_tensors=2)
    >>> bool(NonFiniteCounts.of(0, 0))
    False
    """

    nans: int = 0
    nan_tensors: int = 0
    infinities: int = 0
    infinite_tensors: int = 0

    @classmethod
    def of(cls, nans: int, infinities: int) -> NonFiniteCounts:
        """The counts of one tensor."""
        if not nans and not infinities:
            return _NONE  # of thousands of tensors: one
        return cls(nans, int(nans > 0), infinities, int(infinities > 0))

    def __add__(self, other: NonFiniteCounts) -> NonFiniteCounts:
        return NonFiniteCounts(
            self.nans + other.nans,
            self.nan_tensors + other.nan_tensors,
            self.infinities + other.infinities,
            self.infinite_tensors + other.infinite_tensors,
        )

    def __bool__(self) -> bool:
        return bool(self.nans or self.infinities)

    def __str__(self) -> str:
        """`NaN in 1 element of 1 tensor and infinities in 3 elements of 2 tensors`."""
        counts = ((self.nans, self.nan_tensors, "NaN"), (self.infinities, self.infinite_tensors, "infinities"))
        return " and ".join(
            f"{what} in {count(n, 'element')} of {count(tensors, 'tensor')}" for n, tensors, what in counts if n
        )


_NONE = NonFiniteCounts()


def together(counts: Iterable[NonFiniteCounts]) -> NonFiniteCounts:
    """The sum."""
    return sum(counts, NonFiniteCounts())


def mark_of(counts: Iterable[NonFiniteCounts]) -> Mark | None:
    """The mark of what holds such elements; None if nothing does."""
    total = together(counts)
    if not total:
        return None
    return Mark.BOTH if total.nans and total.infinities else Mark.NAN if total.nans else Mark.INFINITE


def decoded(matrix: Matrix, tile: Tile) -> npt.NDArray[Any]:
    """A tile's numbers, float32 or float64 [inputs, size]. For the rare tile that is looked at a second time."""
    numbers = np.empty((len(matrix.codes), tile.size), tile.scratch.rows(1, matrix.codes, matrix.out_code).dtype)
    for raw, code, row in zip(tile.raw, matrix.codes.tolist(), numbers, strict=True):
        decode(raw, code, 0, tile.size, row)
    return numbers


def counted(numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """How many numbers of each row are NaN, and how many are infinite: int64 [rows, 2].

    >>> counted(np.array([[1, np.nan, np.inf, -np.inf], [0, 0, 0, 0]]))
    array([[1, 2],
           [0, 0]])
    """
    return np.stack([np.isnan(numbers).sum(1), np.isinf(numbers).sum(1)], axis=1)


def of_rows(counts: npt.NDArray[Any]) -> tuple[NonFiniteCounts, ...]:
    """The counts of each input of one tensor, from its `counted` sums."""
    return tuple(NonFiniteCounts.of(int(nans), int(infinities)) for nans, infinities in counts.tolist())


def differs(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Where two arrays differ; NaN is equal to NaN, and an infinity to itself."""
    return (a != b) & ~(np.isnan(a) & np.isnan(b))


def sentences(names: Sequence[str], tensors: Sequence[tuple[str, Sequence[NonFiniteCounts]]]) -> list[str]:
    """Which model has such elements, and in how many tensors.

    names  of the models
    tensors  names of tensors, and what they hold in counts model
    """
    texts = []
    for i, name in enumerate(names):
        affected = [(tensor, counts[i]) for tensor, counts in tensors if counts[i]]
        if affected:
            texts.append(f"{name} has {together(counts for _, counts in affected)}, the first {affected[0][0]}.")
    return texts
