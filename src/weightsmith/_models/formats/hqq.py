"""HQQ's weights (half-quadratic quantisation), as transformers saves them, and as hqq does. They are read.

X.W_q        packed codes of the weight, seen as a matrix [R, C]; view_as_float: under a dtype of floats
X.scale      of each row of that matrix (axis 1) or each column (axis 0), or of all of it
X.zero       the same
X.shape      [outputs, inputs]
X.packing, X.axis, X.group_size, …  settings

An element is (code - zero) · scale. With axis 1 the matrix has a group of consecutive elements in a row; with axis 0 it has as
many rows as a group has elements. Codes in a word are those of rows that are far apart: with 4 bits, row r is in the high half
of row r of the bytes, and row R / 2 + r in the low half. Of 3 bits, ten are in a word of 32, the first in the bits from 27.

Settings are tensors of a number or of the bytes of a text, or values in the pickle of `qmodel.pt`. There scales and zeros may
be quantised, too: X.zero_q with X.meta_zero. Both may be one tensor, zeros first: X.zero_scale.

hqq computes in its compute_dtype, which rounds each step. Here it is float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import BY_TORCH_NAME, DTYPES, DType, TensorSpec
from weightsmith._models.formats.config import config_entries, method_of, plain_dtype
from weightsmith._models.formats.decoded import F32, QuantisedModel, Weight, chunks, read_all, read_if_here
from weightsmith._models.formats.scaled import FLOATS
from weightsmith.abc.stored import Config, Rows, Specs, StoredFormat, Wrapped, labelled
from weightsmith.abc.tensors import Tensors

METHOD, _TITLE = "hqq", "HQQ"
_CODES = ".W_q"
_SETTINGS = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero",
    "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
_PARTS = (_CODES, ".zero_scale", ".zero_q", ".scale_q", ".packing", ".nbits")
_MAX_TEXT, _MAX_GROUP, _MAX_SIZE = 64, 1 << 30, 1 << 40

_PACKINGS = {"8bit_u8": (8, 1, 1), "4bit_u8": (4, 2, 1), "2bit_u8": (2, 4, 1), "1bit_u8": (1, 8, 1), "3bit_32": (3, 10, 4)}
"""packing → bits of a code, codes in a word, bytes of a word. Codes of 5 and 6 bits are in bytes of their own."""


# ---- arrays


@dataclass(frozen=True, slots=True)
class Numbers:
    """Scales or zeros as they are: `size` elements of a tensor, from `first` on."""

    name: str
    first: int
    size: int

    def read(self, stored: Tensors, start: int, end: int) -> npt.NDArray[np.float32]:
        """Elements start … end."""
        return np.asarray(read_all(stored, self.name, self.first + start, self.first + end).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Codes:
    """An array that is quantised: a matrix of codes, its scales and its zeros.

    name         of the tensor of words, from the byte `first` on
    packing      of `_PACKINGS`
    rows, cols   of the matrix
    by_row       a scale belongs to a row, else to a column
    scale, zero  of size 1 if there is one for all
    """

    name: str
    first: int
    packing: str
    rows: int
    cols: int
    by_row: bool
    scale: Numbers | Codes
    zero: Numbers | Codes

    @property
    def size(self) -> int:
        return self.rows * self.cols

    def read(self, stored: Tensors, start: int, end: int) -> npt.NDArray[np.float32]:
        """Elements start … end, in row-major order. Memory: of these elements, and of as many scales and zeros."""
        values = self._codes(stored, start, end)
        with np.errstate(all="ignore"):  # NaN and infinities are the caller's to refuse
            values -= self._spread(self.zero, stored, start, end)
            values *= self._spread(self.scale, stored, start, end)
        return values

    def _codes(self, stored: Tensors, start: int, end: int) -> npt.NDArray[np.float32]:
        bits, per_word, width = _PACKINGS[self.packing]
        words = -(-self.rows // per_word) * self.cols  # each has a code of `per_word` runs of this many elements
        values = np.empty(end - start, np.float32)
        for at, stop in _runs(start, end, words):
            raw = np.empty((stop - at) * width, np.uint8)
            stored.read_into(self.name, self.first + at % words * width, raw)
            shift = bits * (per_word - 1 - at // words)
            values[at - start : stop - start] = raw.view(f"<u{width}") >> shift & ((1 << bits) - 1)
        return values

    def _spread(self, numbers: Numbers | Codes, stored: Tensors, start: int, end: int) -> npt.NDArray[np.float32]:
        """The scale or the zero of each element."""
        if numbers.size == 1:
            return numbers.read(stored, 0, 1)
        if self.by_row:
            first = start // self.cols
            of_rows = numbers.read(stored, first, -(-end // self.cols))
            return of_rows[np.arange(start, end) // self.cols - first]
        if end - start >= self.cols:
            return numbers.read(stored, 0, self.cols)[np.arange(start, end) % self.cols]
        return np.concatenate(
            [numbers.read(stored, at % self.cols, at % self.cols + stop - at) for at, stop in _runs(start, end, self.cols)]
        )


def _runs(start: int, end: int, length: int) -> Iterator[tuple[int, int]]:
    """The parts of a range that lie between multiples of a length.

    >>> list(_runs(3, 10, 4))
    [(3, 4), (4, 8), (8, 10)]
    """
    while start < end:
        stop = min(end, (start // length + 1) * length)
        yield start, stop
        start = stop


@dataclass(frozen=True, slots=True)
class HqqWeight(Weight):
    """A matrix whose elements are those of an array of codes."""

    codes: Codes

    def decode(self, stored: Tensors, first: int, values: Rows) -> None:
        for begin, part in chunks(first, values):
            part[:] = self.codes.read(stored, begin, begin + part.size)


# ---- what a checkpoint says


def recognises(config: Config, specs: Specs) -> bool:
    named = method_of(config) == METHOD or not config_entries(config)
    return named and any(name.endswith(_CODES) for name in specs)


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
    model = QuantisedModel(stored, config, where)
    weights = [_Module(model, module).weight() for module in model.modules(_CODES)]
    return model.decoded(weights, _TITLE, _PARTS)


class _Module:
    """A module with codes: what is said of it, in tensors or in the pickle."""

    def __init__(self, model: QuantisedModel, name: str) -> None:
        modules = model.entry.get("modules")
        self.model, self.name = model, name
        self.pickled = modules.get(name) if isinstance(modules, Mapping) else None
        self.used: list[str] = []

    def weight(self) -> HqqWeight:
        shape = self._setting("", "shape")
        if type(shape) is not list or len(shape) != 2 or not all(type(n) is int and 0 < n <= _MAX_SIZE for n in shape):
            raise self._bad("", "shape", shape, "two whole numbers")
        codes = self._codes("", "W_q", math.prod(shape), shape)
        dtype = self._setting("", "compute_dtype", "")
        present = [name for setting in _SETTINGS if (name := f"{self.name}.{setting}") in self.model.specs]
        spec = TensorSpec(f"{self.name}.weight", F32, (shape[0], shape[1]))
        return HqqWeight(spec, tuple(dict.fromkeys([*self.used, *present])), self._dtype(dtype), codes)

    def _dtype(self, named: object) -> DType:
        known = BY_TORCH_NAME.get(named.removeprefix("torch.")) if isinstance(named, str) else None
        return known if known is not None and known.name in FLOATS else plain_dtype(self.model.config, DTYPES["F16"])

    def _codes(self, prefix: str, leaf: str, size: int, shape: list[int], place: tuple[str, int, int] | None = None) -> Codes:
        """An array of codes.

        prefix  of its settings, scales and zeros
        place   tensor, first byte, bytes; None: all of X.leaf
        """
        packing, axis = self._setting(prefix, "packing"), self._setting(prefix, "axis", 0)
        if not isinstance(packing, str) or packing not in _PACKINGS:
            what = f"HQQ's weights with packing {show(packing)} are not read, only {', '.join(_PACKINGS)}"
            raise self.model.unsupported(f"{what} ({show(self.name)})")
        if axis not in (0, 1):
            raise self._bad(prefix, "axis", axis, "0 or 1")
        rows, cols = self._matrix(prefix, size, shape, by_row=axis == 1)
        _, per_word, width = _PACKINGS[packing]
        nbytes = -(-rows // per_word) * cols * width
        if place is None:
            name = f"{self.name}.{leaf}"
            spec = self.model.specs.get(name)
            if spec is None:
                raise self.model.damaged(f"tensor {show(name)} is missing, which a quantised weight needs")
            place = name, 0, spec.nbytes
        if place[2] != nbytes:
            what = f"tensor {show(place[0])} has {place[2]:,} bytes, and {size:,} codes of {packing} in a matrix {[rows, cols]}"
            raise self.model.damaged(f"{what} need {nbytes:,}")
        self.used.append(place[0])
        count = rows if axis == 1 else cols
        zero, scale = self._numbers(prefix, count)
        return Codes(place[0], place[1], packing, rows, cols, axis == 1, scale, zero)

    def _matrix(self, prefix: str, size: int, shape: list[int], *, by_row: bool) -> tuple[int, int]:
        """Rows and columns of the matrix that is quantised."""
        group = self._setting(prefix, "group_size", None)
        rows, cols = shape[0], size // shape[0] if shape[0] else 0
        if group is None or self._setting(prefix, "channel_wise", True) is False:
            return rows, cols
        if type(group) is not int or not 1 <= group <= _MAX_GROUP or size % group:
            raise self._bad(prefix, "group_size", group, f"a whole number that divides {size:,}")
        return (size // group, group) if by_row else (group, size // group)

    def _numbers(self, prefix: str, count: int) -> tuple[Numbers | Codes, Numbers | Codes]:
        """Zeros and scales, `count` of each, or one. What is not quantised comes first."""
        both = f"{self.name}.{prefix}zero_scale"
        if both in self.model.specs:
            spec = self.model.specs[both]
            half = spec.size // 2
            if spec.dtype.name in FLOATS and spec.shape[:1] == (2,) and half in (1, count):
                self.used.append(both)
                return Numbers(both, 0, half), Numbers(both, half, half)
            if spec.dtype.name != "U8" or spec.shape[:1] != (2,) or prefix:
                raise self.model.damaged(
                    f"tensor {show(both)} is {list(spec.shape)} {spec.dtype}, not zeros and scales of {count:,} groups"
                )
            return self._quantised("zero", count, (both, 0, half)), self._quantised("scale", count, (both, half, half))
        return self._one(prefix, "zero", count), self._one(prefix, "scale", count)

    def _one(self, prefix: str, part: str, count: int) -> Numbers | Codes:
        name = f"{self.name}.{prefix}{part}"
        if not prefix and name not in self.model.specs and f"{name}_q" in self.model.specs:
            return self._quantised(part, count, None)
        spec = self.model.specs.get(name)
        if spec is None:
            raise self.model.damaged(f"tensor {show(name)} is missing, which a quantised weight needs")
        if spec.dtype.name not in FLOATS:
            raise self.model.unsupported(f"tensor {show(name)} is {spec.dtype}, and only {', '.join(FLOATS)} are read")
        if spec.size not in (1, count):
            raise self.model.damaged(f"tensor {show(name)} is {list(spec.shape)}, and its weight has {count:,} groups")
        self.used.append(name)
        return Numbers(name, 0, spec.size)

    def _quantised(self, part: str, count: int, place: tuple[str, int, int] | None) -> Codes:
        """Scales or zeros that are codes, with settings, scales and zeros of their own."""
        shape = self._setting(f"meta_{part}.", "shape")
        if type(shape) is not list or not all(type(n) is int and n > 0 for n in shape) or math.prod(shape) != count:
            raise self._bad(f"meta_{part}.", "shape", shape, f"that of {count:,} groups")
        return self._codes(f"meta_{part}.", f"{part}_q", count, shape, place)

    # Settings

    def _setting(self, prefix: str, key: str, *default: Any) -> Any:
        """A setting; raises FormatError if it is missing, and there is no default."""
        if isinstance(self.pickled, Mapping):
            value = self.pickled.get(prefix + key)
        else:
            value = self._stored(f"{self.name}.{prefix}{key}", key)
        if value is None and not default:
            raise self.model.damaged(f"{show(f'{self.name}.{prefix}{key}')} is missing, which a quantised weight needs")
        return default[0] if value is None else value

    def _stored(self, name: str, key: str) -> Any:
        """A setting that is a tensor: a number, the bytes of a text, or a shape; None if there is none."""
        spec = self.model.specs.get(name)
        if spec is None:
            return None
        if spec.dtype.name not in ("U8", "I32", "I64") or spec.size > _MAX_TEXT:
            raise self.model.damaged(f"tensor {show(name)} is {list(spec.shape)} {spec.dtype}, not a setting of HQQ's")
        values = read_if_here(self.model.stored, name)
        if values is None:
            what = "the shapes of HQQ's weights are stored with their codes, and these are not downloaded yet"
            raise Unsupported(what, where=self.model.where, fix="Download the model first, with `hf download`.")
        if spec.dtype.name == "U8" and spec.shape:
            return bytes(values).decode("ascii", "replace")
        numbers = values.tolist()
        if key in ("view_as_float", "channel_wise") and len(numbers) == 1:
            return bool(numbers[0])
        return numbers if spec.shape else numbers[0]

    def _bad(self, prefix: str, key: str, value: object, expected: str) -> Exception:
        return self.model.damaged(f"{show(f'{self.name}.{prefix}{key}')} is {show(value)}, not {expected}")


FORMAT = StoredFormat("hqq", _TITLE, recognises, read, {_CODES: labelled(_TITLE)})
