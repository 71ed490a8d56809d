"""ggml's types, as GGUF files store them: `gguf-q4_k` and others.

Blocks of common types are encoded by kernels of our own, those of the others by the package libgguf. Both write ggml's bytes.

    gguf-q4_k      rows as blocks of Q4_K, all in one tensor
    gguf-q8_0/64   the same, with the rows of each head of 64 in the order that llama.cpp's RoPE wants
    gguf-f32+1     numbers, to which 1 is added: a norm of Gemma
    gguf-f32-exp   -exp of numbers: how fast the states of Qwen3.5's linear attention decay; gguf-f32+exp: exp, as Ling has it
    gguf-nvfp4-scaled  NVFP4 of rows divided by a number, which is a tensor of its own: `X.scale`
    gguf-q8_0~0.5  rows that are multiplied by 0.5
    gguf-q8_0~0.5~64:0.25,96:2.0  the same, and then the first 64 by 0.25, and the next 96 by 2
    gguf-f32:2     numbers without the first two rows
    gguf-f16*3     each third of the rows in a tensor of its own: q, k and v
    gguf-f16*2@2   each place along dimension 2 in a tensor of its own: the two frames of a convolution

    gguf-f32-deep  a depthwise convolution [channels, 1, width] as [1, channels, 1, width]

    gguf-comfyui-q4_k          rows as blocks, in files for ComfyUI
    gguf-comfyui-q4_k-folded   the same, of a tensor whose pieces have other rows: convolutions as rows of 256 numbers
    gguf-comfyui-bf16-swapped  the second half of the rows before the first: scale and shift have another order in diffusers

The middle dimension of other depthwise convolutions is left out.

The name says all that the bytes depend on, but for importances, which a step takes from a table of its plan. The stored tensor
has llama.cpp's name; a name says nothing about its bytes, so `outs` leaves the Hub's.

**Error.** F32 is exact; F16 and BF16 are rounded to nearest. In a block whose largest magnitude is a, no element is further off
than a / 254 (Q8_0), a / 16 (Q5_0) or a / 8 (Q4_0), and a · 2^-11 for the rounding of the scale to float16. The other types
minimise the (weighted) square error of a block; they have no such bound.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import NonFinite, Unsupported
from weightsmith._base.files import show
from weightsmith._base.installation import install
from weightsmith._base.tensors import BLOCKS, DTYPES, DType, TensorSpec
from weightsmith._models.formats.gguf.layout import MAX_DIFFUSION_DIMENSIONS, MAX_DIMENSIONS, TYPE_IDS
from weightsmith._models.formats.matrices import NVFP4_GROUP, maxima_of
from weightsmith.abc.product import Arrays
from weightsmith.abc.stored import WHOLE, Bytes, Encoding, Importances, Kind, Rows

if TYPE_CHECKING:
    from types import ModuleType

PREFIX = "gguf-"
PLAIN = ("F32", "F16", "BF16")
TYPES: dict[str, DType] = {name: DTYPES[name] for name in PLAIN} | dict(BLOCKS)
"""The types of tensors that are written, by ggml's name."""
STORED = {**TYPES, "I32": DTYPES["I32"]}
"""The same, and that of tables of whole numbers, for which no other can be chosen."""

NEEDS_IMPORTANCES = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"})
"""Types that cannot be encoded without them."""

_LARGEST_SCALE = 65504
"""The largest float16."""
_LARGEST_NVFP4 = np.float32(6 * 448)
"""The largest number of NVFP4 before it is multiplied."""
_LARGEST_POWER = 88.7
"""The largest power of e that a float32 holds, rounded down."""
_LARGEST_FACTOR = 3e38
_NAME = re.compile(
    r"gguf-([a-z0-9_]+)(?:/([1-9][0-9]{0,5}))?(\+1|[+-]exp|-scaled|-deep)?(?::([1-9][0-9]{0,3}))?(?:\*([2-9])(?:@([1-9]))?)?(?:=([1-9][0-9]{0,8}))?"
    r"((?:~[0-9.e:,+-]{1,999}){0,3})"
)
_BAND = re.compile(r"(?:([1-9][0-9]{0,8}):)?([0-9.e+-]{1,30})")

Multiplied = tuple[tuple[int, float], ...]
"""Bands of rows and what each of them is multiplied by, the first rows first; 0 rows: all of them."""


@dataclass(frozen=True, slots=True)
class OneType(Encoding):
    """What encodings as one of ggml's types have in common. dtype: the type."""

    vocabulary: ClassVar[bool] = True
    dtype: DType

    @property
    def kind(self) -> Kind:
        return "plain" if self.dtype.block == 1 else "blocks"

    @property
    def bits(self) -> float:
        return 8 * self.dtype.itemsize / self.dtype.block

    @property
    def group(self) -> int | None:
        return self.dtype.block if self.dtype.block > 1 else None

    def _unfit_rows(self, spec: TensorSpec) -> str:
        """Why the rows of a tensor have no whole blocks; "" if they have."""
        if self.dtype.block == 1 or (len(spec.shape) > 1 and spec.shape[-1] % self.dtype.block == 0):
            return ""
        return f"its rows of {spec.shape[-1] if spec.shape else 1:,} are not a multiple of {self.dtype.block}"


@dataclass(frozen=True, slots=True)
class GgufEncoding(OneType):
    """Rows as one of ggml's types.

    head_rows  rows of a head that are reordered; 0: none are
    shift      added to every value
    power      1 or -1: exp or -exp of every value is stored; 0: the value
    pieces     number of equal pieces that are tensors of their own
    axis       dimension that is cut into pieces; other than 0, it has a place for each, and the pieces do not have it
    skipped    number of rows at the start that are left out
    columns    of the matrix that a vector is stored as; 0: it stays a vector
    deep       whether a depthwise convolution keeps its middle dimension, and gets one before it
    times      by what rows are multiplied, one after the other
    factored   whether rows are divided by a number, which a tensor of its own has, so that the largest scale of 16 elements is
               the largest of float8: NVFP4 alone
    """

    head_rows: int = 0
    shift: float = 0.0
    power: int = 0
    pieces: int = 1
    axis: int = 0
    skipped: int = 0
    factored: bool = False
    columns: int = 0
    times: tuple[Multiplied, ...] = ()
    deep: bool = False

    @property
    def name(self) -> str:
        """As in plans."""
        heads = f"/{self.head_rows}" if self.head_rows else ""
        pieces = "" if self.pieces == 1 else f"*{self.pieces}{f'@{self.axis}' if self.axis else ''}"
        change = "+1" if self.shift else "-scaled" if self.factored else "-deep" if self.deep else ""
        change = change or {1: "+exp", -1: "-exp"}.get(self.power, "")
        change = change or (f":{self.skipped}" if self.skipped else "")
        columns = f"={self.columns}" if self.columns else ""
        times = "".join(f"~{','.join(f'{rows}:{by!r}' if rows else repr(by) for rows, by in bands)}" for bands in self.times)
        return f"{PREFIX}{self.dtype.name.lower()}{heads}{change}{pieces}{columns}{times}"

    @property
    def importances(self) -> Importances:
        if self.dtype.block == 1 or self.factored:
            return "no"
        return "must" if self.dtype.name in NEEDS_IMPORTANCES else "may"

    @property
    def align_rows(self) -> int:
        """A head, if its rows are reordered; all rows, if they are cut into pieces or some are left out."""
        return WHOLE if self.pieces > 1 or self.skipped else self.head_rows or 1

    @property
    def whole(self) -> int:
        """Every piece; the tensor, if rows are left out; the number by which rows are divided."""
        return self.pieces if self.pieces > 1 or self.skipped else int(self.factored)

    @property
    def maxima(self) -> bool:
        """The largest magnitude gives the number by which rows are divided."""
        return self.factored

    def refusal(self, spec: TensorSpec) -> str:
        """Accepts what has whole blocks in each row, and whole heads."""
        if self.dtype.name == "I32":
            return "" if spec.dtype.name in ("I64", "I32") else f"it is {spec.dtype}, not whole numbers"
        if not spec.dtype.floating or spec.dtype.itemsize < 2:
            return f"it is {spec.dtype}, not floating point of 16 bits or more"
        if not spec.size or len(spec.shape) - bool(self.axis) > MAX_DIMENSIONS:
            return f"its shape is {list(spec.shape)}"
        if why := self._unfit_rows(spec):
            return why
        if self.head_rows and (self.head_rows % 2 or spec.shape[0] % self.head_rows):
            return f"its {spec.shape[0]:,} rows are not whole heads of {self.head_rows}"
        if self.factored and (self.dtype.name != "NVFP4" or self.shift or self.power):
            return "only NVFP4 has a number by which rows are divided"
        if self.deep and (len(spec.shape) != 3 or spec.shape[1] != 1 or self.dtype.block > 1):
            return f"its shape {list(spec.shape)} is not one of a depthwise convolution"
        if self.columns and (len(spec.shape) != 1 or spec.shape[0] % self.columns or self.dtype.block > 1 or self.pieces > 1):
            return f"its shape {list(spec.shape)} is not one of a vector that becomes plain rows of {self.columns:,}"
        if self.times and (len(spec.shape) != 2 or self.shift or self.power or self.factored):
            return f"its shape is {list(spec.shape)}, and only rows of matrices are multiplied"
        if bands := next((b for b in self.times if b[0][0] and sum(rows for rows, _ in b) != spec.shape[0]), None):
            return f"its {spec.shape[0]:,} rows are not {' + '.join(f'{rows:,}' for rows, _ in bands)}"
        changed = self.dtype.block > 1 or self.head_rows or self.shift or self.power or self.times
        if self.pieces > 1 and (changed or self.skipped):
            return "pieces are plain numbers"
        if self.skipped and (changed or len(spec.shape) < 2 or spec.shape[0] <= self.skipped):
            return f"its shape is {list(spec.shape)}, and without {self.skipped} rows it is to be plain numbers"
        if self.pieces > 1 and not self._cuts(spec.shape):
            return f"its shape {list(spec.shape)} cannot be cut into {self.pieces} pieces along dimension {self.axis}"
        return ""

    def tensors(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """One tensor of the same shape, without the middle dimension of a depthwise convolution.

        >>> print(*find("gguf-q8_0/8").outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 32))))
        q_proj.weight [64, 32] Q8_0
        """
        shape = spec.shape
        if self.pieces > 1:
            shape = shape[: self.axis] + shape[self.axis + 1 :] if self.axis else (shape[0] // self.pieces, *shape[1:])
        elif self.columns:
            shape = shape[0] // self.columns, self.columns
        elif self.skipped:
            shape = shape[0] - self.skipped, *shape[1:]
        elif self.deep:
            shape = 1, shape[0], 1, shape[-1]
        elif len(shape) == 3 and shape[0] > 1 == shape[1]:
            shape = shape[0], shape[2]
        if self.factored:
            factors = TensorSpec(f"{spec.name}.scale", DTYPES["F32"], (shape[0] if len(shape) == 3 else 1,))
            return TensorSpec(spec.name, self.dtype, shape), factors
        names = [spec.name] if self.pieces == 1 else [f"{spec.name}.{i}" for i in range(self.pieces)]
        return tuple(TensorSpec(name, self.dtype, shape) for name in names)

    def _cuts(self, shape: tuple[int, ...]) -> bool:
        if self.axis:
            return self.axis < len(shape) - 1 and shape[self.axis] == self.pieces
        return len(shape) > 0 and shape[0] % self.pieces == 0

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        """As `Encoding.encode`.

        numbers  importances by which the square errors of columns are weighted: [matrices · cols], of each matrix of a tensor
                 of three dimensions, or [cols]; empty: all are equal. If `factored`, the largest magnitude [1]
        """
        if self.pieces > 1:
            for piece, out in zip(np.split(rows.reshape(spec.shape), self.pieces, self.axis), outs, strict=True):
                _plain(self.dtype, piece, out)
            return
        if self.skipped:
            _plain(self.dtype, rows.reshape(spec.shape)[self.skipped :], outs[0])
            return
        n, cols = rows.shape
        for bands in self.times:
            rows = rows * _factors_of(bands, first_row, n)
        rows = to_llama_order(rows, self.head_rows)
        if self.shift:
            rows = rows + np.float32(self.shift)
        if self.power:  # libm's: numpy's exp depends on the processor
            if (top := rows[np.isfinite(rows)].max(initial=0)) > _LARGEST_POWER:
                what, fix = f"exp({top:g}) is not a number that F32 can hold", "repair the model"
                raise NonFinite(what, where=f"output tensor {show(spec.name)}", fix=fix)
            rows = np.array([self.power * math.exp(x) for x in rows.reshape(-1).tolist()], np.float32).reshape(rows.shape)
        if self.dtype.block == 1:
            _plain(self.dtype, rows, outs[0])
            return
        if self.factored:
            _nvfp4(rows, numbers[0], outs[0], outs[1])
            return
        height = spec.shape[-2]  # of each matrix
        done = 0
        while done < n:  # rows of one matrix at a time: each has importances of its own
            matrix, row = divmod(first_row + done, height)
            count = min(n - done, height - row)
            weights = numbers.reshape(-1, cols)[matrix % (numbers.size // cols)] if numbers.size else None
            nbytes = cols // self.dtype.block * self.dtype.itemsize
            out = outs[0][done * nbytes : (done + count) * nbytes]
            encode_matrix(spec, self.dtype, rows[done : done + count], out, weights)
            done += count

    def importance_counts(self, spec: TensorSpec) -> tuple[int, ...]:
        """The numbers of importances that it takes: of each column, or of each column of each matrix."""
        cols = spec.shape[-1]
        return (cols, cols * spec.shape[0]) if len(spec.shape) == 3 else (cols,)

    def dequantise(self, arrays: Arrays, shape: tuple[int, ...]) -> Rows:
        """The values of stored blocks."""
        values = dequantise(self.dtype, np.asarray(arrays[0]), math.prod(shape)).reshape(shape)
        return values * np.float32(arrays[1].reshape(-1)[0]) if self.factored else values


def _factors_of(bands: Multiplied, first_row: int, count: int) -> Rows:
    """By what `count` rows from `first_row` on are multiplied: float32 [count, 1], or [1, 1]."""
    factors = np.array([by for _, by in bands], np.float32)
    if bands[0][0]:
        ends = np.cumsum([rows for rows, _ in bands])
        factors = factors[np.searchsorted(ends, np.arange(first_row, first_row + count), "right")]
    return factors[:, None]


def _nvfp4(rows: Rows, largest: np.float32, out: Bytes, factors: Bytes) -> None:
    """Rows as NVFP4, divided by a number, which is written for each matrix of the tensor: all have the same. NaN becomes 0.

    largest  magnitude of the tensor
    """
    from weightsmith._kernels import codecs
    from weightsmith._kernels.codes import quantise_float4

    with np.errstate(all="ignore"):
        factor = largest / _LARGEST_NVFP4
        factor = factor if np.isfinite(factor) and factor >= np.finfo(np.float32).tiny else np.float32(1)
        scales = np.minimum(maxima_of(rows, 1, NVFP4_GROUP) / (np.float32(6) * factor), np.float32(448))
    e4m3 = DTYPES["F8_E4M3"].code
    stored, codes = np.empty(scales.size, np.uint8), np.empty(rows.size // 2, np.uint8)
    codecs.encode(scales, scales.size, e4m3, 0, stored)
    codecs.decode(stored, e4m3, 0, scales.size, scales)
    scales[~(scales > 0)] = 1  # all elements become 0
    with np.errstate(all="ignore"):
        quantise_float4(rows.reshape(-1), NVFP4_GROUP, scales * factor, codes)
    halves = np.stack([codes & 15, codes >> 4], 1).reshape(-1, 2, NVFP4_GROUP // 2)  # the first 8 elements, and the others
    numbers = (halves[:, 0] | halves[:, 1] << 4).reshape(-1, 32)
    out[:] = np.concatenate([stored.reshape(-1, 4), numbers], 1).reshape(-1)
    factors.view(np.float32)[:] = factor


def encode_matrix(spec: TensorSpec, dtype: DType, rows: Rows, out: Bytes, importances: Rows | None) -> None:
    """Rows of one matrix as one of ggml's types. Raises NonFinite. spec: of the tensor that they are of."""
    if dtype.block == 1:
        _plain(dtype, rows, out)
        return
    quantise(dtype, rows, out, importances)
    _check_finite(dtype, spec, rows, out)


def _plain(dtype: DType, values: npt.NDArray[np.float32], out: Bytes) -> None:
    """Numbers of any shape as plain ones of a dtype."""
    from weightsmith._kernels.codecs import encode

    if not dtype.floating:
        out.view(np.int32)[:] = values.reshape(-1)
        return
    encode(np.ascontiguousarray(values).reshape(-1), values.size, dtype.code, 0, out)


def _check_finite(dtype: DType, spec: TensorSpec, rows: Rows, out: Bytes) -> None:
    """Raise NonFinite if finite rows have become blocks that are not: scales are float16."""
    if (maxima_of(rows, 1, rows.shape[1]) <= _LARGEST_SCALE).all():
        return
    if np.isfinite(rows).all() and not np.isfinite(dequantise(dtype, out, rows.size)).all():
        raise NonFinite(
            f"{float(np.abs(rows).max()):g} is not a number that blocks of {dtype} can hold",
            where=f"output tensor {show(spec.name)}",
            fix="choose a format with a wider range, such as gguf-bf16",
        )


def find(name: str) -> GgufEncoding | None:
    """The encoding of a name; None for a name that is none of them.

    >>> find("gguf-f32~0.5~2:1.0,3:4.0").times
    (((0, 0.5),), ((2, 1.0), (3, 4.0)))
    >>> find("gguf-f32+1").shift, find("gguf-q4_k/64").head_rows, find("gguf-q9_9")
    (1.0, 64, None)
    """
    match = _NAME.fullmatch(name)
    dtype = None if match is None else STORED.get(match[1].upper())
    if match is None or dtype is None or (dtype.name not in TYPES and name != f"{PREFIX}{match[1]}"):
        return None
    shift, power = 1.0 if match[3] == "+1" else 0.0, {"+exp": 1, "-exp": -1}.get(match[3], 0)
    skipped, pieces, axis = int(match[4] or 0), int(match[5] or 1), int(match[6] or 0)
    factored, columns = match[3] == "-scaled", int(match[7] or 0)
    times = [_bands(text) for text in match[8].split("~")[1:]]
    head_rows, known = int(match[2] or 0), tuple(bands for bands in times if bands)
    deep = match[3] == "-deep"
    encoding = GgufEncoding(dtype, head_rows, shift, power, pieces, axis, skipped, factored, columns, times=known, deep=deep)
    return encoding if len(known) == len(times) and encoding.name == name else None


def _bands(text: str) -> Multiplied:
    """What `Multiplied` says, of a name; () for what it does not say."""
    matches = [_BAND.fullmatch(band) for band in text.split(",")]
    try:
        bands = tuple((int(match[1] or 0), float(match[2])) for match in matches if match is not None)
    except ValueError:
        return ()
    whole = len(bands) == 1 and not bands[0][0]
    finite = all(0 < abs(by) < _LARGEST_FACTOR for _, by in bands)
    return bands if len(bands) == len(matches) and finite and (whole or all(rows for rows, _ in bands)) else ()


# ---- ggml's blocks of numbers, and llama.cpp's order of rows

_ready: set[str] = set()
_lock = threading.Lock()


def libgguf(where: str = "") -> ModuleType:
    """The package that knows ggml's blocks. Raises Unsupported where it is not installed."""
    try:
        import libgguf as library
    except ImportError:
        what = "the package libgguf, which encodes and decodes ggml's types of blocks, is not installed"
        raise Unsupported(what, where=where, fix=f"run {install('gguf')}") from None
    module: ModuleType = library
    return module


_NONE = np.empty(0, np.float32)


def quantise(dtype: DType, rows: Rows, out: Bytes, importances: Rows | None) -> None:
    """Blocks of some rows [n, cols]. libgguf's tables are made once, by one thread.

    NaN and infinities, which a user can allow, go to libgguf: what ggml makes of them depends on the processor's conversions.
    """
    from weightsmith._kernels.ggml import ENCODED, encode_blocks

    if dtype.name in ENCODED and np.isfinite(rows.max()) and np.isfinite(rows.min()):
        encode_blocks(dtype.name, rows.reshape(-1), _NONE if importances is None else importances, out)
        return
    library, number = libgguf(), TYPE_IDS[dtype.name]
    if dtype.name not in _ready:
        with _lock:
            ones = np.ones(dtype.block, np.float32)
            library.quantize_rows_into_raw(number, ones, bytearray(dtype.itemsize), 1, dtype.block, ones)
            _ready.add(dtype.name)
    library.quantize_rows_into_raw(number, rows, out, len(rows), rows.shape[1], importances)


def dequantise(dtype: DType, blocks: Bytes, count: int) -> Rows:
    """The numbers of some blocks: float32 [count]."""
    values = np.empty(count, np.float32)
    libgguf().dequantize_rows_into_raw(TYPE_IDS[dtype.name], blocks, values, 1, count)
    return values


def to_llama_order(rows: Rows, head_rows: int) -> Rows:
    """Rows of whole heads as llama.cpp stores them: row 2·i + j of a head there is row j·head_rows/2 + i of the Hub's.

    head_rows  rows of a head; 0: they stay

    >>> to_llama_order(np.arange(4, dtype=np.float32)[:, None], 4).ravel().tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    if not head_rows:
        return rows
    heads = rows.reshape(-1, 2, head_rows // 2, rows.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def from_llama_order(values: npt.NDArray[Any], head_rows: int, cols: int) -> npt.NDArray[Any]:
    """The inverse, of rows of `cols` numbers of any type that follow one another.

    >>> from_llama_order(np.array([0, 2, 1, 3]), 4, 1).tolist()
    [0, 1, 2, 3]
    """
    if not head_rows:
        return values
    return np.ascontiguousarray(values.reshape(-1, head_rows // 2, 2, cols).swapaxes(1, 2)).reshape(-1)


# ---- Diffusion models: a tensor as one of ggml's types, with its shape. Encodings of language models leave out a dimension of
# some convolutions, and allow at most four.


_COMFYUI_NAME = re.compile(rf"{PREFIX}comfyui-([a-z0-9_]+?)(-folded|-swapped)?")
_FOLDED_ROWS = 256


@dataclass(frozen=True, slots=True)
class DiffusionEncoding(OneType):
    """Rows as one of ggml's types.

    folded   whether the tensor's pieces have other rows, of any length: 256 of these fill whole rows of 256
    swapped  whether the second half of the rows comes first
    """

    folded: bool = False
    swapped: bool = False

    @property
    def name(self) -> str:
        """As in plans."""
        change = "-folded" if self.folded else "-swapped" if self.swapped else ""
        return f"{PREFIX}comfyui-{self.dtype.name.lower()}{change}"

    @property
    def align_rows(self) -> int:
        """256 rows of a piece, whatever their length; all rows, if halves are swapped."""
        return WHOLE if self.swapped else _FOLDED_ROWS if self.folded else 1

    @property
    def whole(self) -> int:
        return int(self.swapped)

    def refusal(self, spec: TensorSpec) -> str:
        """Accepts floating point of 16 bits or more with whole blocks in each row.

        Vectors may be empty: ComfyUI recognises some models by the name of an empty vector.
        """
        if not spec.dtype.floating or spec.dtype.itemsize < 2:
            return f"it is {spec.dtype}, not floating point of 16 bits or more"
        if (not spec.size and len(spec.shape) != 1) or len(spec.shape) > MAX_DIFFUSION_DIMENSIONS:
            return f"its shape is {list(spec.shape)}"
        if self.dtype.name in NEEDS_IMPORTANCES:
            return "its type needs importances, and it has none"
        if why := self._unfit_rows(spec):
            return why
        if self.swapped and (not spec.shape or spec.shape[0] % 2):
            return f"its shape {list(spec.shape)} has no halves"
        return ""

    def tensors(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """One tensor of the same shape.

        >>> from weightsmith._base.tensors import DTYPES
        >>> print(*find_diffusion("gguf-comfyui-q8_0").outs(TensorSpec("proj.weight", DTYPES["BF16"], (64, 32))))
        proj.weight [64, 32] Q8_0
        """
        return (TensorSpec(spec.name, self.dtype, spec.shape),)

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        """As `Encoding.encode`; all columns weigh the same."""
        if not spec.size:
            return
        rows = rows.reshape(-1, rows.shape[-1])
        if self.swapped:
            rows = np.concatenate(np.split(rows.reshape(spec.shape), 2)[::-1]).reshape(rows.shape)
        encode_matrix(spec, self.dtype, rows, outs[0], None)

    def dequantise(self, arrays: Arrays, shape: tuple[int, ...]) -> Rows:
        """The values of stored blocks, in their order."""
        return dequantise(self.dtype, np.asarray(arrays[0]), math.prod(shape)).reshape(shape)


def find_diffusion(name: str) -> DiffusionEncoding | None:
    """The encoding of a name; None for a name that is none of them.

    >>> find_diffusion("gguf-comfyui-q4_k-folded").folded, find_diffusion("gguf-q4_k")
    (True, None)
    """
    match = _COMFYUI_NAME.fullmatch(name)
    dtype = None if match is None else TYPES.get(match[1].upper())
    if match is None or dtype is None:
        return None
    return DiffusionEncoding(dtype, match[2] == "-folded", match[2] == "-swapped")
