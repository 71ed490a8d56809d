"""NaN and infinities: constants of the model if all inputs have the same ones, as bounds that clip nothing; else errors."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Finding, NonFinite
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._engine.reader import Inputs, Reader
from weightsmith._engine.tiles import Cut
from weightsmith._kernels.codecs import any_nonfinite, first_nonfinite
from weightsmith._plans import CAST, PRODUCTS, Step
from weightsmith.abc.job import Bytes
from weightsmith.abc.output import Finished

UNPUBLISHED = (
    "Nothing was published. Finished tensors are kept: with --allow-nonfinite the same command resumes from them; "
    "with a changed model or recipe, add --no-resume."
)
"""The same command meets the same number again."""


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

    >>> from weightsmith._base.tensors import DTYPES
    >>> tile = np.array([[1, np.inf, 2], [3, np.inf, 4]], np.float32)
    >>> equal_constants(tile.view(np.uint8), [DTYPES["F32"]] * 2, 3)
    Constants(where=array([1]), values=array([inf]))
    >>> tile
    array([[1., 0., 2.],
           [3., 0., 4.]], dtype=float32)
    """
    tiles = [row[: size * dtype.itemsize].view(dtype.numpy) for row, dtype in zip(raw, dtypes, strict=False)]
    with np.errstate(invalid="ignore"):  # a signalling NaN
        wide_tiles = [tile.astype(np.float64) for tile in tiles]
    where = np.flatnonzero(~np.isfinite(wide_tiles[0]))
    values = wide_tiles[0][where]
    for other in wide_tiles[1:]:
        if not np.array_equal(np.flatnonzero(~np.isfinite(other)), where):
            return None
        if not np.array_equal(other[where].view(np.uint64), values.view(np.uint64)):
            return None
    for tile in tiles:
        tile[where] = 0
    return Constants(where, values)


def copied(finished: Mapping[str, Finished]) -> tuple[Finding, ...]:
    """The warning that tensors of a merge hold such constants; () for none.

    >>> print(*copied({f"audio.layers.0.input_{bound}": Finished("", nonfinite=True) for bound in ("max", "min")}))
    audio.layers.0.input_max: 2 tensors hold a NaN or an infinity that is the same in all the models: it is copied
    """
    names = [name for name, done in finished.items() if done.nonfinite]
    if not names:
        return ()
    holding = f"{len(names):,} tensors hold" if len(names) > 1 else "this tensor holds"
    return (Finding(f"{holding} a NaN or an infinity that is the same in all the models: it is copied", names[0]),)


class Finite:
    """What becomes of NaN and infinities in the tiles of a plan. allow: they are merged like any number."""

    def __init__(self, reader: Reader, allow: bool) -> None:
        self._reader = reader
        self._allow = allow

    def take_constants(self, step: Step, place: Cut, inputs: Inputs, raw: Bytes, *, encoded: bool = False) -> Constants | None:
        """Take every NaN and infinity out of what was read, where all the inputs have the same ones; the job sees zeros.

        encoded  the output is stored as codes: an infinity would spoil its whole row

        Returns None when there is none. Raises NonFinite for one that is not the same in all of two or more inputs.
        """
        if self._allow:
            return None
        if not any_nonfinite(raw, inputs.codes, place.size):
            return None
        dtypes = inputs.dtypes
        constants = equal_constants(raw, dtypes, place.size) if len(dtypes) > 1 and not encoded else None
        if constants is None:
            for i, data in enumerate(raw[: len(dtypes)]):
                self.check_input(step, i, place, data)
        return constants

    def check_copied(self, step: Step, place: Cut, data: Bytes, *, encoded: bool = False) -> None:
        """Raise NonFinite for a NaN or infinity in numbers that are copied, if they were computed from codes or factors.

        Stored numbers are copied as they are: an infinity may be a constant of the model. A computed one is damage.

        encoded  the output is stored as codes: an infinity would spoil its whole row
        """
        read = step.inputs[0]
        source = self._reader.source(read)
        if not self._allow and (encoded or source.natural_dtype(read.tensor) is not source.specs[read.tensor].dtype):
            self.check_input(step, 0, place, data)

    def check_input(self, step: Step, i: int, place: Cut, data: Bytes) -> None:
        """Raise NonFinite for a NaN or infinity among the elements read of one input."""
        read = step.inputs[i]
        spec, dtype = self._reader.source(read).specs[read.tensor], self._reader.dtype(read)
        at = first_nonfinite(data, dtype.code, place.size)
        if at >= 0:
            value = data[at * dtype.itemsize : (at + 1) * dtype.itemsize].view(dtype.numpy)[0]
            flat = self._reader.flat(read, place.start + at)
            taken = f"{_place(place.start + at, step.out.shape)}, taken from other models,"
            element = _place(flat, spec.shape) if flat >= 0 else taken
            label = self._reader.plan.label(read)
            raise NonFinite(
                f"element {element} is {float(value)}",
                where=f"{label}, tensor {read.tensor}",
                details=self._ways_out(step, i, label),
                fix="download or convert the model again, leave it out, or merge all the same with --allow-nonfinite "
                "(allow_nonfinite=True)",
                state=UNPUBLISHED,
            )

    def _ways_out(self, step: Step, i: int, label: str) -> list[str]:
        """How to look at a tensor of an input, and how to merge it without that input, where these can be done."""
        plan, read = self._reader.plan, step.inputs[i]
        steps = []
        if read.model != PRODUCTS and plan.models[read.model].plan is None and self._reader.source(read).paths:
            steps.append(f"to look at it:       weightsmith inspect {shlex.join([label, read.tensor])} --stats")
        if step.merges and "weight" in plan.settings[step.settings].models[i]:
            entry = f"{{filter: {json.dumps(read.tensor)}, value: 0}}"
            steps.append(f"to merge without it: weight: [{entry}, ...] in the parameters of {label}")
        return steps

    def check_result(self, leaf: Step, out: TensorSpec, origin: int, place: Cut, raw: Bytes, data: Bytes) -> None:
        """Raise NonFinite for a result that the output's dtype cannot hold.

        out     the tensor, whose elements from `origin` on are the leaf's
        raw     what it was computed from: a cast may pass on what it read
        data    the elements of the tile
        """
        if self._allow:
            return
        if leaf.op == CAST and first_nonfinite(raw[0], self._reader.dtype(leaf.inputs[0]).code, place.size) >= 0:
            self.check_copied(leaf, place, raw[0])
            return
        if any_nonfinite(data[None], self._reader.codes((out.dtype,)), place.size):
            at = first_nonfinite(data, out.dtype.code, place.size)
            flat = origin + place.start + at
            raise NonFinite(
                f"element {_place(flat, out.shape)} of the result is not a number that {out.dtype.torch} can hold",
                where=f"output tensor {out.name}",
                fix="choose a wider dtype, smaller weights or another method, or continue with --allow-nonfinite "
                "(allow_nonfinite=True)",
                state=UNPUBLISHED,
            )


def _place(flat: int, shape: tuple[int, ...]) -> str:
    """A flat index as the indices of an element."""
    return str([int(i) for i in np.unravel_index(flat, shape)])
