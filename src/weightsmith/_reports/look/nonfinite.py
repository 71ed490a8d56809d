"""NaN and infinities in the tensors that are looked at: how many, and where. What is computed from them is undefined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.pages import Mark
from weightsmith._base.text import count
from weightsmith._kernels.codecs import decode
from weightsmith.abc.job import Matrix, Tile


@dataclass(frozen=True, slots=True)
class NonFinite:
    """How many elements are NaN, how many are infinite, and how many tensors have such elements.

    >>> NonFinite.of(1, 0) + NonFinite.of(0, 3) + NonFinite.of(2, 5)
    NonFinite(nans=3, nan_tensors=2, infinities=8, infinite_tensors=2)
    >>> bool(NonFinite.of(0, 0))
    False
    """

    nans: int = 0
    nan_tensors: int = 0
    infinities: int = 0
    infinite_tensors: int = 0

    @classmethod
    def of(cls, nans: int, infinities: int) -> NonFinite:
        """The counts of one tensor."""
        return cls(nans, int(nans > 0), infinities, int(infinities > 0))

    def __add__(self, other: NonFinite) -> NonFinite:
        return NonFinite(
            self.nans + other.nans,
            self.nan_tensors + other.nan_tensors,
            self.infinities + other.infinities,
            self.infinite_tensors + other.infinite_tensors,
        )

    def __bool__(self) -> bool:
        return bool(self.nans or self.infinities)

    def __str__(self) -> str:
        """`NaN in 1 element of 1 tensor and infinities in 3 elements of 2 tensors`."""
        found = ((self.nans, self.nan_tensors, "NaN"), (self.infinities, self.infinite_tensors, "infinities"))
        return " and ".join(f"{what} in {count(n, 'element')} of {count(tensors, 'tensor')}" for n, tensors, what in found if n)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def together(found: Iterable[NonFinite]) -> NonFinite:
    """The sum."""
    return sum(found, NonFinite())


def mark_of(found: Iterable[NonFinite]) -> Mark | None:
    """The mark of what holds such elements; None if nothing does."""
    total = together(found)
    if not total:
        return None
    return Mark.BOTH if total.nans and total.infinities else Mark.NAN if total.nans else Mark.INFINITE


def decoded(matrix: Matrix, tile: Tile) -> npt.NDArray[Any]:
    """A tile's numbers, float32 or float64 [inputs, size]. For the rare tile that is looked at a second time."""
    found = np.empty((len(matrix.codes), tile.size), tile.scratch.rows(1, matrix.codes, matrix.out_code).dtype)
    for raw, code, row in zip(tile.raw, matrix.codes.tolist(), found, strict=True):
        decode(raw, code, 0, tile.size, row)
    return found


def counted(numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """How many numbers of each row are NaN, and how many are infinite: int64 [rows, 2].

    >>> counted(np.array([[1, np.nan, np.inf, -np.inf], [0, 0, 0, 0]]))
    array([[1, 2],
           [0, 0]])
    """
    return np.stack([np.isnan(numbers).sum(1), np.isinf(numbers).sum(1)], axis=1)


def of_rows(counts: npt.NDArray[Any]) -> tuple[NonFinite, ...]:
    """Of each input of one tensor, from its `counted` sums."""
    return tuple(NonFinite.of(int(nans), int(infinities)) for nans, infinities in counts.tolist())


def differs(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Where two arrays differ; NaN is equal to NaN, and an infinity to itself."""
    found: npt.NDArray[np.bool_] = (a != b) & ~(np.isnan(a) & np.isnan(b))
    return found


def sentences(names: Sequence[str], found: Sequence[tuple[str, Sequence[NonFinite]]]) -> list[str]:
    """Which model has such elements, and in how many tensors.

    names  of the models
    found  names of tensors, and what they hold in each model
    """
    texts = []
    for i, name in enumerate(names):
        own = [(tensor, each[i]) for tensor, each in found if each[i]]
        if own:
            texts.append(f"{name} has {together(each for _, each in own)}, the first {own[0][0]}.")
    return texts
