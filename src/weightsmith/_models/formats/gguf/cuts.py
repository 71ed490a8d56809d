"""Tensors of the Hub that llama.cpp stores as several: written by one encoding, and put together again when they are read.

    gguf-256:q5_0[0-128]t,q4_k[128-256]         of every 256 rows, the first 128 transposed, and the others
    gguf-32:f16[0-32,0+2]t,f16[0-32,1+2]t       of every 32 rows, the even columns transposed, and the odd ones

A matrix is a run of bands, each of as many rows; the experts of a layer are one band each. Of every band, each part takes some
rows and columns. The parts of all bands are one tensor of three dimensions, or of two if there is one band or one row of each.

**Error.** That of the parts' types (`writing.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import DAMAGED, show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._models.formats.decoded import Weight, bands, read_all
from weightsmith._models.formats.gguf.families import LAYERS, Cut
from weightsmith._models.formats.gguf.layout import MAX_DIMENSIONS
from weightsmith._models.formats.gguf.values import Config
from weightsmith._models.formats.gguf.writing import NEEDS_IMPORTANCES, PREFIX, TYPES, encode_matrix
from weightsmith.abc.stored import Bytes, Modules, Rows
from weightsmith.abc.tensors import Tensors


@dataclass(frozen=True, slots=True)
class Piece:
    """What a part takes of each band: rows first … end, and of these the columns `column`, `column + step`, …"""

    first: int
    end: int
    column: int = 0
    step: int = 1
    transposed: bool = False

    @property
    def rows(self) -> int:
        return self.end - self.first

    def shape(self, cols: int) -> tuple[int, int]:
        """Of the part of one band of `cols` columns."""
        taken = len(range(self.column, cols, self.step))
        return (taken, self.rows) if self.transposed else (self.rows, taken)

    def of(self, band: Rows) -> Rows:
        """The part of some bands [bands, rows, cols]: float32 [bands, …, …], a view."""
        part = band[:, self.first : self.end, self.column :: self.step]
        return part.swapaxes(1, 2) if self.transposed else part

    def __str__(self) -> str:
        columns = f",{self.column}+{self.step}" if self.step > 1 else ""
        return f"[{self.first}-{self.end}{columns}]{'t' if self.transposed else ''}"


def pieces_of(cut: Cut, config: Config, shape: tuple[int, ...]) -> tuple[int, tuple[Piece, ...]]:
    """The rows of a band, and what each part of a cut takes of it. shape: of the Hub's tensor. Raises FormatError.

    >>> from weightsmith._models.formats.gguf.families import Part
    >>> halves = Cut("input_linear.weight", (Part("ffn_gate_exps.weight"), Part("ffn_up_exps.weight")))
    >>> height, pieces = pieces_of(halves, Config({}), (4, 6, 8))
    >>> height, *map(str, pieces)
    (6, '[0-3]', '[3-6]')
    """
    count = len(cut.parts)
    if len(shape) < 2 or (cut.columns and shape[-1] % count):
        raise FormatError(f"its shape is {list(shape)}", where=cut.name, fix="download it again")
    if all(part.rows for part in cut.parts):
        sizes = [config.count(part.rows) for part in cut.parts]
    else:
        height = shape[-2] if len(shape) == 3 or not cut.bands else 1
        sizes = [height] if cut.columns else [height // count] * count
    height = sum(sizes)
    if math.prod(shape[:-1]) % height:
        what = f"its {math.prod(shape[:-1]):,} rows are not {' + '.join(map(str, sizes))}, once or several times"
        raise FormatError(what, where=cut.name, fix="repair config.json, or download the model again")
    if cut.columns:
        return height, tuple(Piece(0, height, i, count, part.transposed) for i, part in enumerate(cut.parts))
    ends = np.cumsum(sizes).tolist()
    return height, tuple(
        Piece(end - size, end, transposed=part.transposed) for end, size, part in zip(ends, sizes, cut.parts, strict=True)
    )


def part_shape(piece: Piece, height: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a part. shape: of the whole."""
    count = math.prod(shape[:-1]) // height
    rows, cols = piece.shape(shape[-1])
    if count == 1 and len(shape) == 2:
        return rows, cols
    return (count, cols) if rows == 1 and len(shape) == 2 else (count, rows, cols)


# ---- writing


@dataclass(frozen=True, slots=True)
class CutEncoding:
    """Bands of rows as several tensors.

    height  rows of a band
    parts   types, and what they are of
    """

    height: int
    parts: tuple[tuple[DType, Piece], ...]
    product: str = ""
    vocabulary: bool = True
    whole: int = 0

    @property
    def name(self) -> str:
        """As in plans."""
        return f"{PREFIX}{self.height}:{','.join(f'{dtype.name.lower()}{piece}' for dtype, piece in self.parts)}"

    @property
    def align_rows(self) -> int:
        return self.height

    def refusal(self, spec: TensorSpec) -> str:
        """Accepts matrices of whole bands, of which the parts have whole blocks in each row."""
        if not spec.dtype.floating or spec.dtype.itemsize < 2:
            return f"it is {spec.dtype}, not floating point of 16 bits or more"
        if not spec.size or not 2 <= len(spec.shape) <= MAX_DIMENSIONS - 1:
            return f"its shape is {list(spec.shape)}"
        if math.prod(spec.shape[:-1]) % self.height or (len(spec.shape) == 3 and spec.shape[1] != self.height):
            return f"its shape {list(spec.shape)} is not one of whole bands of {self.height:,} rows"
        for dtype, piece in self.parts:
            if piece.end > self.height or min(piece.shape(spec.shape[1])) < 1:
                return f"it has no rows or columns {piece}"
            if piece.shape(spec.shape[-1])[1] % dtype.block:
                return f"the rows of its part {piece} are not a multiple of {dtype.block}"
        return ""

    def outs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """A tensor for each part.

        >>> from weightsmith._base.tensors import DTYPES
        >>> print(*find_cut("gguf-8:f16[0-6]t,f32[6-8]").outs(TensorSpec("kv_b.weight", DTYPES["BF16"], (32, 16))))
        kv_b.weight.0 [4, 16, 6] F16 kv_b.weight.1 [4, 2, 16] F32
        """
        if why := self.refusal(spec):
            raise Unsupported(f"tensor {show(spec.name)} cannot be stored as {self.name}: {why}")
        return tuple(
            TensorSpec(f"{spec.name}.{i}", dtype, part_shape(piece, self.height, spec.shape))
            for i, (dtype, piece) in enumerate(self.parts)
        )

    def importances(self, spec: TensorSpec) -> tuple[int, ...]:
        """The number of importances that it takes: of each column of each part of each band."""
        return (sum(self._columns(spec)),)

    def _columns(self, spec: TensorSpec) -> list[int]:
        count = math.prod(spec.shape[:-1]) // self.height
        return [count * piece.shape(spec.shape[-1])[1] for _, piece in self.parts]

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        """As `Encoding.encode`.

        numbers  the importances of each part after the other, zeros for a part without; empty if all are without
        """
        found = rows.reshape(-1, self.height, rows.shape[1])
        first, at = first_row // self.height, 0
        for (dtype, piece), out, size in zip(self.parts, outs, self._columns(spec), strict=True):
            part = np.ascontiguousarray(piece.of(found))
            nbytes = out.size // len(part)
            weights = numbers[at : at + size].reshape(-1, part.shape[2])
            at += size
            for i, matrix in enumerate(part):
                own = weights[first + i] if weights.size else None
                own = None if own is None or not (own.any() or dtype.name in NEEDS_IMPORTANCES) else own
                encode_matrix(spec, dtype, matrix, out[i * nbytes : (i + 1) * nbytes], own)

    def config(self, modules: Modules) -> dict[str, Any]:
        """Nothing: the file says what its tensors are."""
        return {}


_NUMBER = "(0|[1-9][0-9]{0,8})"
_NAME = re.compile(r"gguf-([1-9][0-9]{0,8}):(.+)")
_PART = re.compile(rf"([a-z0-9_]+)\[{_NUMBER}-{_NUMBER}(?:,{_NUMBER}\+([2-9]))?\](t?)")


def find_cut(name: str) -> CutEncoding | None:
    """The encoding of a name; None for a name that is none of them.

    >>> find_cut("gguf-8:f16[0-6,1+2]t").parts[0][1], find_cut("gguf-8:f16[6-6]"), find_cut("gguf-q4_k")
    (Piece(first=0, end=6, column=1, step=2, transposed=True), None, None)
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    parts = []
    for text in re.split(r",(?=[a-z])", match[2]):
        found = _PART.fullmatch(text)
        dtype = None if found is None else TYPES.get(found[1].upper())
        if found is None or dtype is None or int(found[2]) >= int(found[3]):
            return None
        piece = Piece(int(found[2]), int(found[3]), int(found[4] or 0), int(found[5] or 1), bool(found[6]))
        parts.append((dtype, piece))
    encoding = CutEncoding(int(match[1]), tuple(parts))
    return encoding if encoding.name == name else None


# ---- reading


@dataclass(frozen=True, slots=True)
class CutWeight(Weight):
    """A tensor of the Hub that is put together from parts.

    height, pieces  rows of a band, and what each of `stored` is of it
    """

    height: int
    pieces: tuple[Piece, ...]

    @property
    def preferred_rows(self) -> int:
        return self.height

    def decode(self, stored: Tensors, first: int, values: Rows) -> None:
        cols = self.spec.shape[-1]
        for row, end, skip, target in bands(first, values, cols, self.height, self.height):
            band, whole = row // self.height, np.empty((1, end - row, cols), np.float32)
            for name, piece in zip(self.stored, self.pieces, strict=True):
                shape = piece.shape(cols)
                size = math.prod(shape)
                part = read_all(stored, name, band * size, (band + 1) * size).astype(np.float32).reshape(shape)
                piece.of(whole)[0] = part
            target[:] = whole.reshape(-1)[skip : skip + target.size]


def cut_weight(
    cut: Cut, layer: str, specs: Mapping[str, TensorSpec], config: Config, natural_dtype: DType, where: str
) -> CutWeight:
    """A tensor of the Hub, from those of its parts.

    specs   of the tensors of the GGUF file, under its names

    Raises FormatError for parts that are missing or do not fit together.
    """
    name = f"{LAYERS}{layer}.{cut.name}"
    stored = tuple(f"blk.{layer}.{part.name}" for part in cut.parts)
    if missing := [each for each in stored if each not in specs]:
        what = f"tensor {show(missing[0])} is missing, and there are other parts of {show(name)}"
        raise FormatError(what, where=where, fix=DAMAGED)
    shapes = [specs[each].shape for each in stored]
    try:
        shape = _whole_shape(cut, shapes)
        height, pieces = pieces_of(cut, config, shape)
        fits = [part_shape(piece, height, shape) for piece in pieces] == shapes
    except (FormatError, ValueError):
        fits = False
    if not fits:
        what = f"the parts of {show(name)} have the shapes {', '.join(str(list(each)) for each in shapes)}"
        raise FormatError(what, where=where, fix=DAMAGED)
    return CutWeight(TensorSpec(name, DTYPES["F32"], shape), stored, natural_dtype, height, pieces)


def _whole_shape(cut: Cut, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of a tensor whose parts have these shapes, if they fit. Raises ValueError."""
    turned = [(*s[:-2], s[-1], s[-2]) if part.transposed else s for part, s in zip(cut.parts, shapes, strict=True)]
    *before, rows, cols = turned[0]
    if cut.columns:
        cols = sum(each[-1] for each in turned)
    else:
        rows = sum(each[-2] for each in turned)
    return (math.prod(before) * rows, cols) if cut.bands else (*before, rows, cols)
