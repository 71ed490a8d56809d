"""NaN and infinities that are the same in every input: constants of the model, such as bounds that clip nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsmith.errors import Finding
from weightsmith.jobs.job import Bytes
from weightsmith.tensors import DType


@dataclass(frozen=True, slots=True)
class Constants:
    """Elements of a tile that are copied, whatever the merge method makes of the others.

    where   int64 [k], their places in the tile
    values  float64 [k], NaN or infinite
    """

    where: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    def put(self, out: Bytes, dtype: DType) -> None:
        """Write them into an encoded tile."""
        out.view(dtype.numpy)[self.where] = self.values.astype(dtype.numpy)


def equal_constants(raw: Bytes, dtypes: Sequence[DType], size: int) -> Constants | None:
    """Replace every NaN and infinity of the inputs by zero, if all the inputs have the same ones at the same places.

    raw   uint8 [inputs, >= bytes of size elements]; modified, unless the answer is None
    size  elements

    Returns what was replaced, or None when two inputs differ in one, by a bit.

    >>> from weightsmith.tensors import DTYPES
    >>> tile = np.array([[1, np.inf, 2], [3, np.inf, 4]], np.float32)
    >>> equal_constants(tile.view(np.uint8), [DTYPES["F32"]] * 2, 3)
    Constants(where=array([1]), values=array([inf]))
    >>> tile
    array([[1., 0., 2.],
           [3., 0., 4.]], dtype=float32)
    """
    tiles = [row[: size * dtype.itemsize].view(dtype.numpy) for row, dtype in zip(raw, dtypes, strict=False)]
    with np.errstate(invalid="ignore"):  # a signalling NaN
        found = [tile.astype(np.float64) for tile in tiles]
    where = np.flatnonzero(~np.isfinite(found[0]))
    values = found[0][where]
    for other in found[1:]:
        if not np.array_equal(np.flatnonzero(~np.isfinite(other)), where):
            return None
        if not np.array_equal(other[where].view(np.uint64), values.view(np.uint64)):
            return None
    for tile in tiles:
        tile[where] = 0
    return Constants(where, values)


def copied(names: Sequence[str]) -> tuple[Finding, ...]:
    """The warning that tensors of a merge hold such constants; () for none.

    >>> print(*copied(["audio.layers.0.input_max", "audio.layers.0.input_min"]))
    audio.layers.0.input_max: 2 tensors hold a NaN or an infinity that is the same in all the models: it is copied
    """
    if not names:
        return ()
    holding = f"{len(names):,} tensors hold" if len(names) > 1 else "this tensor holds"
    return (Finding(f"{holding} a NaN or an infinity that is the same in all the models: it is copied", names[0]),)
