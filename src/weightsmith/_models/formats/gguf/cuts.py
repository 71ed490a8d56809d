"""Tensors of the Hub that llama.cpp stores as several, or in another order.

Those in parts are written by one encoding, and put together again when they are read.

    gguf-256:q5_0[0-128]t,q4_k[128-256]         of every 256 rows, the first 128 transposed, and the others
    gguf-32:f16[0-32,0+2]t,f16[0-32,1+2]t       of every 32 rows, the even columns transposed, and the odd ones
    gguf-32:f16[0-32,0-8]t,f16[0-32,8-16]t      of every 32 rows, the first 8 columns transposed, and the second 8
    gguf-32+:f16[0-8]+[16-24],f16[8-16]         of every 32 rows, some: the first 8 of all bands, and then the third 8

A matrix is a run of bands, each of as many rows; the experts of a layer are one band each. Of every band, each part takes some
rows and columns. The parts of all bands are one tensor of three dimensions, or of two if there is one band or one row of each.

**Error.** That of the parts' types (`writing.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import FormatError
from weightsmith._base.files import DAMAGED, show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._models.formats.decoded import Weight, bands, read_all
from weightsmith._models.formats.gguf.base.tensors import LAYERS, SplitTensor
from weightsmith._models.formats.gguf.base.values import GgufConfig
from weightsmith._models.formats.gguf.layout import MAX_DIMENSIONS
from weightsmith._models.formats.gguf.writing import NEEDS_IMPORTANCES, PREFIX, TYPES, encode_matrix
from weightsmith.abc.stored import WHOLE, Bytes, Encoding, Importances, Kind, Rows
from weightsmith.abc.tensors import Tensors


@dataclass(frozen=True, slots=True)
class Piece:
    """The slice that a part takes of each band: rows first … end, and the columns `column`, `column + step`, …

    stop  the column before which they end; 0: the last
    """

    first: int
    end: int
    column: int = 0
    step: int = 1
    transposed: bool = False
    stop: int = 0

    @property
    def rows(self) -> int:
        return self.end - self.first

    @property
    def moved(self) -> bool:
        """Whether it is more than a run of rows."""
        return self.step > 1 or self.stop > 0 or self.transposed

    def shape(self, cols: int) -> tuple[int, int]:
        """The shape that this part has in a band of `cols` columns."""
        taken = len(range(self.column, min(self.stop or cols, cols), self.step))
        return (taken, self.rows) if self.transposed else (self.rows, taken)

    def of(self, band: Rows) -> Rows:
        """The part of some bands [bands, rows, cols]: float32 [bands, …, …], a view."""
        part = band[:, self.first : self.end, self.column : self.stop or None : self.step]
        return part.swapaxes(1, 2) if self.transposed else part

    def __str__(self) -> str:
        columns = f",{self.column}-{self.stop}" if self.stop else f",{self.column}+{self.step}" if self.step > 1 else ""
        return f"[{self.first}-{self.end}{columns}]{'t' if self.transposed else ''}"


Pieces = tuple[Piece, ...]


def pieces_of(split: SplitTensor, config: GgufConfig, shape: tuple[int, ...]) -> tuple[int, tuple[Pieces, ...]]:
    """The rows of a band, and what each part of a cut takes of it. shape: of the Hub's tensor. Raises FormatError.

    >>> from weightsmith._models.formats.gguf.base.tensors import SplitPart
    >>> halves = SplitTensor("input_linear.weight", (SplitPart("ffn_gate_exps.weight"), SplitPart("ffn_up_exps.weight")))
    >>> height, pieces = pieces_of(halves, GgufConfig({}), (4, 6, 8))
    >>> height, *(str(piece) for part in pieces for piece in part)
    (6, '[0-3]', '[3-6]')
    """
    count = len(split.parts)
    if len(shape) < 2 or (split.columns and shape[-1] % count):
        raise FormatError(f"its shape is {list(shape)}", where=split.name, fix="download it again")
    stated = [part.rows(config) for part in split.parts if part.rows is not None]
    height = shape[-2] if len(shape) == 3 or not split.bands else 1
    sizes = stated or [(height,) if split.columns else (height // count,)] * count
    height = height if split.columns else sum(map(sum, sizes))
    if math.prod(shape[:-1]) % height:
        rows = " + ".join(str(size) for sizes_of_part in sizes for size in sizes_of_part)
        what = f"its {math.prod(shape[:-1]):,} rows are not {rows}, once or several times"
        raise FormatError(what, where=split.name, fix="repair config.json, or download the model again")
    if split.columns == "alternate":
        return height, tuple((Piece(0, height, i, count, part.transposed),) for i, part in enumerate(split.parts))
    if split.columns == "runs":
        wide = shape[-1] // count
        return height, tuple(
            (Piece(0, height, i * wide, 1, part.transposed, (i + 1) * wide),) for i, part in enumerate(split.parts)
        )
    all_pieces, end = list[Pieces](), 0
    for sizes_of_part, part in zip(sizes, split.parts, strict=True):
        pieces = []
        for size in sizes_of_part:
            pieces.append(Piece(end, end + size, transposed=part.transposed))
            end += size
        all_pieces.append(tuple(pieces))
    return height, tuple(all_pieces)


def part_shape(pieces: Pieces, height: int, shape: tuple[int, ...], *, flat: bool) -> tuple[int, ...]:
    """The shape of a part. shape: of the whole; flat: see `SplitTensor`."""
    count = math.prod(shape[:-1]) // height
    rows, cols = pieces[0].shape(shape[-1])
    if flat:
        return count * sum(piece.rows for piece in pieces), cols
    if count == 1 and len(shape) == 2:
        return rows, cols
    return (count, cols) if rows == 1 and len(shape) == 2 else (count, rows, cols)


# ---- writing


@dataclass(frozen=True, slots=True)
class CutEncoding(Encoding):
    """Bands of rows as several tensors.

    height  rows of a band
    parts   types, and what they are of
    flat    see `SplitTensor`
    """

    vocabulary: ClassVar[bool] = True
    height: int
    parts: tuple[tuple[DType, Pieces], ...]
    flat: bool = False

    @property
    def name(self) -> str:
        """As in plans."""
        parts = (f"{dtype.name.lower()}{'+'.join(map(str, pieces))}" for dtype, pieces in self.parts)
        return f"{PREFIX}{self.height}{'+' if self.flat else ''}:{','.join(parts)}"

    @property
    def kind(self) -> Kind:
        return "plain" if all(dtype.block == 1 for dtype, _ in self.parts) else "blocks"

    @property
    def bits(self) -> float:
        """Bits of a weight, averaged over the parts."""
        return sum(8 * dtype.itemsize / dtype.block for dtype, _ in self.parts) / len(self.parts)

    @property
    def importances(self) -> Importances:
        if self.kind == "plain":
            return "no"
        return "must" if any(dtype.name in NEEDS_IMPORTANCES for dtype, _ in self.parts) else "may"

    @property
    def align_rows(self) -> int:
        """A band, or all of them if they are not together in a part."""
        return WHOLE if self.flat else self.height

    @property
    def whole(self) -> int:
        """Every part that has several bands in one matrix."""
        return len(self.parts) if self.flat else 0

    def refusal(self, spec: TensorSpec) -> str:
        """Accepts matrices of whole bands, of which the parts have whole blocks in each row."""
        if not spec.dtype.floating or spec.dtype.itemsize < 2:
            return f"it is {spec.dtype}, not floating point of 16 bits or more"
        if not spec.size or not 2 <= len(spec.shape) <= MAX_DIMENSIONS - 1:
            return f"its shape is {list(spec.shape)}"
        if math.prod(spec.shape[:-1]) % self.height or (len(spec.shape) == 3 and spec.shape[1] != self.height):
            return f"its shape {list(spec.shape)} is not one of whole bands of {self.height:,} rows"
        for dtype, pieces in self.parts:
            for piece in pieces:
                if piece.end > self.height or piece.stop > spec.shape[-1] or min(piece.shape(spec.shape[-1])) < 1:
                    return f"it has no rows or columns {piece}"
                if piece.shape(spec.shape[-1])[1] % dtype.block:
                    return f"the rows of its part {piece} are not a multiple of {dtype.block}"
        return ""

    def tensors(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """A tensor for each part.

        >>> from weightsmith._base.tensors import DTYPES
        >>> print(*find_cut("gguf-8:f16[0-6]t,f32[6-8]").outs(TensorSpec("kv_b.weight", DTYPES["BF16"], (32, 16))))
        kv_b.weight.0 [4, 16, 6] F16 kv_b.weight.1 [4, 2, 16] F32
        >>> print(*find_cut("gguf-8+:f16[0-2]+[4-8],f32[2-4]").outs(TensorSpec("qkvz.weight", DTYPES["BF16"], (32, 16))))
        qkvz.weight.0 [24, 16] F16 qkvz.weight.1 [8, 16] F32
        """
        return tuple(
            TensorSpec(f"{spec.name}.{i}", dtype, part_shape(pieces, self.height, spec.shape, flat=self.flat))
            for i, (dtype, pieces) in enumerate(self.parts)
        )

    def importance_counts(self, spec: TensorSpec) -> tuple[int, ...]:
        """The number of importances that it takes: of each column of each matrix of each part."""
        return (sum(self._columns(spec)),)

    def _columns(self, spec: TensorSpec) -> list[int]:
        count = 1 if self.flat else math.prod(spec.shape[:-1]) // self.height
        return [count * pieces[0].shape(spec.shape[-1])[1] for _, pieces in self.parts]

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        """As `Encoding.encode`.

        numbers  the importances of each part after the other, zeros for a part without; empty if all are without
        """
        bands_of_rows = rows.reshape(-1, self.height, rows.shape[-1])
        first, at = first_row // self.height, 0
        for (dtype, pieces), out, size in zip(self.parts, outs, self._columns(spec), strict=True):
            weights, start = numbers[at : at + size].reshape(-1, pieces[0].shape(spec.shape[-1])[1]), 0
            at += size
            for piece in pieces:
                part = np.ascontiguousarray(piece.of(bands_of_rows))
                nbytes = part[0].size // dtype.block * dtype.itemsize
                for i, matrix in enumerate(part):
                    importances = weights[(first + i) % len(weights)] if weights.size else None
                    if importances is not None and not (importances.any() or dtype.name in NEEDS_IMPORTANCES):
                        importances = None
                    encode_matrix(spec, dtype, matrix, out[start + i * nbytes : start + (i + 1) * nbytes], importances)
                start += len(part) * nbytes


_NUMBER = "(0|[1-9][0-9]{0,8})"
_NAME = re.compile(r"gguf-([1-9][0-9]{0,8})(\+?):(.+)")
_PART = re.compile(r"([a-z0-9_]+)(\[.+)")
_PIECE = re.compile(rf"\[{_NUMBER}-{_NUMBER}(?:,{_NUMBER}(?:\+([2-9])|-{_NUMBER}))?\](t?)")


def find_cut(name: str) -> CutEncoding | None:
    """The encoding of a name; None for a name that is none of them.

    >>> find_cut("gguf-8:f16[0-6,1+2]t").parts[0][1], find_cut("gguf-8:f16[6-6]"), find_cut("gguf-q4_k")
    ((Piece(first=0, end=6, column=1, step=2, transposed=True, stop=0),), None, None)
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    parts = []
    for text in re.split(r",(?=[a-z])", match[3]):
        part = _PART.fullmatch(text)
        dtype = None if part is None else TYPES.get(part[1].upper())
        pieces = [] if part is None else [_PIECE.fullmatch(piece) for piece in re.split(r"\+(?=\[)", part[2])]
        if dtype is None or not all(piece is not None and int(piece[1]) < int(piece[2]) for piece in pieces):
            return None
        read = tuple(_piece(piece) for piece in pieces if piece is not None)
        if any(piece.stop <= piece.column for piece in read if piece.stop):
            return None
        parts.append((dtype, read))
    encoding = CutEncoding(int(match[1]), tuple(parts), bool(match[2]))
    moved = any(piece.moved for _, pieces in parts for piece in pieces)
    several = any(len(pieces) > 1 for _, pieces in parts)
    return encoding if encoding.name == name and not (moved if encoding.flat else several) else None


def _piece(match: re.Match[str]) -> Piece:
    return Piece(int(match[1]), int(match[2]), int(match[3] or 0), int(match[4] or 1), bool(match[6]), int(match[5] or 0))


# ---- reading


@dataclass(frozen=True, slots=True)
class CutWeight(Weight):
    """A tensor of the Hub that is put together from parts.

    height, parts  rows of a band, and what each of `stored` is of it
    flat           see `SplitTensor`
    """

    height: int
    parts: tuple[Pieces, ...]
    flat: bool

    @property
    def preferred_rows(self) -> int:
        return self.height

    def decode(self, stored: Tensors, first: int, values: Rows) -> None:
        cols, count = self.spec.shape[-1], math.prod(self.spec.shape[:-1]) // self.height
        for row, end, skip, target in bands(first, values, cols, self.height, self.height):
            band, whole = row // self.height, np.empty((1, end - row, cols), np.float32)
            for name, pieces in zip(self.stored, self.parts, strict=True):
                start = 0
                for piece in pieces:
                    shape = piece.shape(cols)
                    size = math.prod(shape)
                    at = start + band * size
                    piece.of(whole)[0] = read_all(stored, name, at, at + size).astype(np.float32).reshape(shape)
                    start += count * size
            target[:] = whole.reshape(-1)[skip : skip + target.size]


def cut_weight(
    split: SplitTensor, layer: str, specs: Mapping[str, TensorSpec], config: GgufConfig, natural_dtype: DType, where: str
) -> CutWeight:
    """A tensor of the Hub, from those of its parts; its layer is named `model.layers.`.

    specs   of the tensors of the GGUF file, under its names

    Raises FormatError for parts that are missing or do not fit together.
    """
    name = f"{LAYERS}{layer}.{split.name}"
    stored = tuple(f"blk.{layer}.{part.name}" for part in split.parts)
    if missing := [part for part in stored if part not in specs]:
        what = f"tensor {show(missing[0])} is missing, and there are other parts of {show(name)}"
        raise FormatError(what, where=where, fix=DAMAGED)
    shapes = [specs[part].shape for part in stored]
    try:
        shape = _whole_shape(split, shapes)
        height, parts = pieces_of(split, config, shape)
        fits = [part_shape(pieces, height, shape, flat=split.flat) for pieces in parts] == shapes
    except (FormatError, ValueError):
        fits = False
    if not fits:
        what = f"the parts of {show(name)} have the shapes {', '.join(str(list(part)) for part in shapes)}"
        raise FormatError(what, where=where, fix=DAMAGED)
    return CutWeight(TensorSpec(name, DTYPES["F32"], shape), stored, natural_dtype, height, parts, split.flat)


def _whole_shape(split: SplitTensor, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of a tensor whose parts have these shapes, if they fit. Raises ValueError."""
    if min(map(len, shapes)) < 2:
        raise ValueError(shapes)
    turned = [(*s[:-2], s[-1], s[-2]) if part.transposed else s for part, s in zip(split.parts, shapes, strict=True)]
    *before, rows, cols = turned[0]
    if split.columns:
        cols = sum(shape[-1] for shape in turned)
    else:
        rows = sum(shape[-2] for shape in turned)
    return (math.prod(before) * rows, cols) if split.bands else (*before, rows, cols)


# ---- Tensors whose rows or columns have another order in a GGUF file: those of value heads that share a key head. The Hub has
# those of the first key head first, then those of the second, and so on; llama.cpp has the first of every key head first, then
# the second of every one. Of Falcon, it has the queries of all key heads first, in the Hub's order.


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Rows (axis 0) or columns (axis 1) of a tensor: `before` that stay, then `width` for each value head.

    parts     what they are, for users
    settings  of config.json that say how many there are
    together  value heads of each key head that stay beside each other, before the others
    """

    axis: Literal[0, 1]
    before: int
    keys: int
    values: int
    width: int
    parts: str = "value heads"
    settings: str = "linear_num_value_heads and the other linear_…"
    together: int = 0

    @property
    def size(self) -> int:
        """Rows or columns of the tensor."""
        return self.before + self.values * self.width

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """int64 [size]: where each of llama.cpp's is in the Hub's."""
        heads = np.arange(self.values * self.width).reshape(self.keys, self.values // self.keys, self.width)
        kept, others = heads[:, : self.together].reshape(-1), heads[:, self.together :].swapaxes(0, 1).reshape(-1)
        return np.concatenate([np.arange(self.before), self.before + kept, self.before + others])


@dataclass(frozen=True, slots=True)
class OrderedWeight(Weight):
    """A tensor whose rows or columns the file has in another order."""

    order: HeadOrder

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        stored_at, rows = np.argsort(self.order.places), self.spec.shape[0]
        cols = self.spec.size // rows
        for row, end, skip, target in bands(first, values, cols):
            if self.order.axis == 1:
                whole = self._read(stored, row * cols, end * cols).reshape(-1, cols)[:, stored_at]
            else:
                places = stored_at[row:end]
                starts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
                runs = [(int(places[a]) * cols, (int(places[b - 1]) + 1) * cols) for a, b in pairwise(starts)]
                whole = np.concatenate([self._read(stored, a, b) for a, b in runs])
            target[:] = whole.reshape(-1)[skip : skip + target.size]

    def _read(self, stored: Tensors, start: int, end: int) -> npt.NDArray[np.float32]:
        return read_all(stored, self.stored[0], start, end).astype(np.float32)


def ordered_weight(spec: TensorSpec, name: str, order: HeadOrder, natural_dtype: DType, where: str) -> OrderedWeight:
    """A tensor under the Hub's name, from one of the file. Raises FormatError for one of another size than the keys say."""
    matrix = order.axis == 0 or len(spec.shape) == 2
    if not matrix or not spec.shape or spec.shape[order.axis] != order.size:
        heads = f"{order.size:,} for {order.values:,} {order.parts}"
        what = f"tensor {show(spec.name)} has the shape {list(spec.shape)}, not {heads}"
        raise FormatError(what, where=where, fix=DAMAGED)
    return OrderedWeight(TensorSpec(name, DTYPES["F32"], spec.shape), (spec.name,), natural_dtype, order)


@dataclass(frozen=True, slots=True)
class PaddedWeight(Weight):
    """A tensor whose first rows the file does not have: they are 0."""

    skipped: int

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        before = max(0, self.skipped * self.spec.shape[1] - first)  # elements that are 0
        values[:before] = 0
        if before < len(values):
            start = first + before - self.skipped * self.spec.shape[1]
            values[before:] = read_all(stored, self.stored[0], start, start + len(values) - before).astype(np.float32)


def padded_weight(spec: TensorSpec, name: str, skipped: int, natural_dtype: DType, where: str) -> PaddedWeight:
    """A tensor under the Hub's name, from one of the file without its first rows. Raises FormatError if it is no matrix."""
    if len(spec.shape) != 2:
        what = f"tensor {show(spec.name)} has the shape {list(spec.shape)}, and is no matrix"
        raise FormatError(what, where=where, fix=DAMAGED)
    rows, cols = spec.shape
    return PaddedWeight(TensorSpec(name, DTYPES["F32"], (rows + skipped, cols)), (spec.name,), natural_dtype, skipped)


@dataclass(frozen=True, slots=True)
class KeyWeight(Weight):
    """A tensor of one number, which the file has in a key."""

    number: float

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        values[:] = self.number
