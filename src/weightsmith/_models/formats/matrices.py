"""Encodings of weight matrices, and what several formats share of them: scales, small numbers, codes in words, names.

`MatrixEncoding` stores rows. `TransposedEncoding` is what GPTQ and AWQ share: weights are stored as [inputs, outputs], with
scales of groups of inputs. Whole matrices are encoded: each word holds codes of several inputs or outputs, and all outputs of
an input follow each other. Scales are stored in float16, as both formats have them, and have values that bfloat16 holds too:
vLLM and SGLang load them in the dtype of the model. Below 2^-17, these are the multiples of 2^-24, to which scales are rounded
up.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import NonFinite, raised_at
from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._models.formats.hessians import CodesOf, quantise_groups
from weightsmith._models.formats.verbatim import are_alike
from weightsmith._models.structure.projections import ENGINES_FUSED
from weightsmith.abc.product import Arrays
from weightsmith.abc.stored import (
    WHOLE,
    ActivationScale,
    Bytes,
    Encoding,
    FactoredHessian,
    Float16,
    HessianForm,
    Kind,
    Modules,
    Rows,
    Unread,
    grouped_name,
)

SUFFIX = ".weight"

NVFP4_GROUP, MXFP4_GROUP = 16, 32
"""Elements of a row that share a scale: a float8 (E4M3), or a power of two."""

_SCALE_OF_ZEROS = np.float32(2.0**-7)
_SMALLEST_SCALE = np.float32(2.0**-126)


@dataclass(frozen=True, slots=True)
class MatrixEncoding(Encoding):
    """An encoding of matrices `X.weight`, from the functions of one file. Other fields are as in `Encoding`.

    family    its name, but for a group size that users choose
    parts     the stored tensors of a weight that is accepted
    fill      (weight, rows, buffers, numbers): `Encoding.encode`; the bytes of a row do not depend on its position
    settings  ignored modules → `Encoding.config`
    groups    the group sizes that users choose from, the default first; () for no choice
    stacks    in the names of matrices that are stacked: [stack, rows, columns]; "" if none are
    """

    family: str
    parts: Callable[[TensorSpec], tuple[TensorSpec, ...]]
    fill: Callable[[TensorSpec, Rows, Sequence[Bytes], Rows], None]
    settings: Callable[[Sequence[str]], dict[str, Any]]
    groups: tuple[int, ...] = ()
    stacks: str = ""
    kind: Kind = field(kw_only=True)
    bits: float = field(kw_only=True)
    group: int | None = None
    symmetric: bool = True
    scale: DType | None = None
    align_rows: int = 1
    whole: int = 0
    vocabulary: bool = False
    maxima: bool = False
    inputs: ActivationScale | None = None

    @property
    def name(self) -> str:
        return grouped_name(self.family, self.group, self.groups)

    def refusal(self, spec: TensorSpec) -> str:
        if self.stacks and self.stacks in spec.name and len(spec.shape) == 3:
            spec = replace(spec, shape=spec.shape[1:])
        return matrix_refusal(spec, self.group or 1)

    def tensors(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return self.parts(spec)

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        self.fill(spec, rows, outs, numbers)

    def config(self, modules: Modules) -> dict[str, Any]:
        return self.settings(modules.ignored)


@dataclass(frozen=True, slots=True)
class WholeEncoding(Encoding):
    """Matrices that are encoded as a whole, with scales in float16."""

    scale: ClassVar[DType] = DTYPES["F16"]
    align_rows: ClassVar[int] = WHOLE

    @abstractmethod
    def rounded(self, weight: Rows) -> Arrays:
        """The arrays of the stored tensors, with codes rounded to nearest. Raises NonFinite. weight: float32 [N, K]"""

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        """As `Encoding.encode`, for all rows at once. Raises NonFinite, also for a weight whose scale float16 cannot hold."""
        with raised_at(f"output tensor {show(spec.name)}"):
            arrays = self.rounded(rows)
        for out, array in zip(outs, arrays, strict=True):
            out[:] = array.reshape(-1).view(np.uint8)


def matrix_refusal(spec: TensorSpec, group: int = 1) -> str:
    """Why a tensor is not a weight that can be encoded, or "": non-empty floating-point matrices named `….weight` are.

    group  elements of a row that share a scale; it must divide the width

    >>> from weightsmith._base.tensors import DTYPES
    >>> matrix_refusal(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 96)), 64)
    'its width 96 is not a multiple of 64'
    """
    if not spec.name.endswith(SUFFIX):
        return f"its name does not end in {SUFFIX}, which readers need to find the scales"
    if len(spec.shape) != 2:
        return f"its shape is {list(spec.shape)}, not a matrix"
    if not spec.dtype.floating or spec.dtype.itemsize not in (2, 4):
        return f"it is {spec.dtype}, not 16-bit or 32-bit floating point"
    if not spec.size:
        return f"its shape {list(spec.shape)} has no elements"
    return f"its width {spec.shape[1]:,} is not a multiple of {group}" if spec.shape[1] % group else ""


def encoding_of(weight: TensorSpec, stored: Sequence[TensorSpec], encodings: Iterable[Encoding]) -> str:
    """The name of the first of some encodings that stores a weight in tensors like these; "" if none does.

    encodings  whose codes have the same meaning
    """
    fitting = (one for one in encodings if not one.refusal(weight) and are_alike(one.tensors(weight), stored))
    return next((one.name for one in fitting), "")


# ---- scales


def powers_of_two(exponents: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The scales that MX formats store (E8M0): 2^(exponent - 127), and NaN for 255: float32 [n].

    >>> powers_of_two(np.array([126, 127, 255], np.uint8)).tolist()
    [0.5, 1.0, nan]
    """
    powers = np.ldexp(np.float32(1), np.minimum(exponents, 254).astype(np.int32) - 127)
    return np.where(exponents == 255, np.float32(np.nan), powers).astype(np.float32)


def bf16_scales(maxima: npt.NDArray[np.float32], levels: float, stored: Bytes) -> npt.NDArray[np.float32]:
    """Write maxima / levels as bfloat16, and return these scales as they are stored: float32 [n].

    transformers casts scales to the dtype in which a model is loaded, so only a bfloat16 scale is the same in all readers. The
    scale of zeros is 2^-7, as in compressed-tensors; others are at least 2^-126, since smaller ones could be flushed to zero.
    """
    from weightsmith._kernels import codecs

    scales: npt.NDArray[np.float32] = np.maximum(maxima / np.float32(levels), _SMALLEST_SCALE)
    scales[maxima == 0] = _SCALE_OF_ZEROS
    bf16 = DTYPES["BF16"].code
    codecs.encode(scales, scales.size, bf16, 0, stored)
    codecs.decode(stored, bf16, 0, scales.size, scales)
    return scales


def maxima_of(rows: npt.NDArray[np.float32], high: int, wide: int) -> npt.NDArray[np.float32]:
    """The largest magnitude of each block of rows [n, cols]: float32 [blocks], in row-major order."""
    from weightsmith._kernels.codes import block_maxima

    n, cols = rows.shape
    maxima = np.empty(-(-n // high) * -(-cols // wide), np.float32)
    block_maxima(rows.reshape(-1), cols, high, wide, maxima)
    return maxima


def mx_scales(rows: Rows, largest: int, stored: Bytes, up: int = 0x600000) -> Rows:
    """Write the exponents of groups, and return their scales: float32 [groups].

    largest  exponent of the largest code: 2 of E2M1, 8 of E4M3
    up       bits of the significand from which a magnitude is rounded up: 1.75, or what follows it
    """
    bits = maxima_of(rows, 1, MXFP4_GROUP).view(np.uint32)
    exponents = (bits >> 23).astype(np.int64) + ((bits & 0x7FFFFF) >= up) - largest
    exponents = np.clip(exponents, 1, 254)
    stored[:] = exponents
    return (exponents.astype(np.uint32) << 23).view(np.float32)


# ---- weights that are stored as [inputs, outputs]


GROUPS = (128, 64, 32)
"""Group sizes, the default first."""

_BAND = 128
"""Outputs whose codes are unpacked at once: a multiple of 32."""
_FINE, _STEP = np.float32(2.0**-17), np.float32(2.0**-24)
"""Below the first, float16 has multiples of the second."""


@dataclass(frozen=True, slots=True)
class TransposedEncoding(WholeEncoding):
    """Matrices `X.weight` → tensors of integers with a scale for each output and each group of inputs.

    A subclass has the stored tensors, and how they are filled and decoded.
    """

    bits: int
    group: int

    kind: ClassVar[Kind] = "integer"
    hessian: ClassVar[HessianForm] = "sorted"
    float16: ClassVar[Float16] = "default"

    @property
    def whole(self) -> int:
        return len(self.tensors(TensorSpec(SUFFIX, DTYPES["F32"], (32, self.group))))

    @abstractmethod
    def _fill(self, weight: Rows, arrays: Sequence[npt.NDArray[Any]], codes_of: CodesOf | None) -> None:
        """Fill the arrays of the stored tensors. codes_of: chooses the codes; None rounds to nearest. Raises NonFinite."""

    def refusal(self, spec: TensorSpec) -> str:
        """Accepts matrices named `….weight` whose codes fill whole words."""
        multiple = 8 if 32 % self.bits == 0 else 32
        if why := matrix_refusal(spec, self.group):
            return why
        return f"its outputs are {spec.shape[0]:,}, not a multiple of {multiple}" if spec.shape[0] % multiple else ""

    def rounded(self, weight: Rows) -> Arrays:
        return self._arrays(weight, None)

    def quantise(self, weight: Rows | Unread, hessian: Rows | FactoredHessian | None, threads: int) -> Arrays:
        assert not isinstance(hessian, np.ndarray)
        return quantise_groups(weight, hessian, self.bits, self._arrays)

    def _arrays(self, weight: Rows, codes_of: CodesOf | None) -> Arrays:
        parts = self.tensors(TensorSpec(f"x{SUFFIX}", DTYPES["F32"], weight.shape))
        arrays = [np.empty(part.shape, part.dtype.numpy) for part in parts]
        self._fill(weight, arrays, codes_of)
        return arrays


def half_scales(extents: npt.NDArray[np.float32], levels: float) -> npt.NDArray[np.float32]:
    """extents / levels, rounded to numbers that float16 and bfloat16 both hold: float32, positive. That of zeros is 2^-7.

    Raises NonFinite for one that float16 cannot hold.
    """
    scales = bf16_scales(extents, levels, np.empty(2 * extents.size, np.uint8))
    small = scales < _FINE
    scales[small] = np.ceil(scales[small] / _STEP) * _STEP
    if not (scales <= np.finfo(np.float16).max).all():
        what = "a weight is too large for a scale in float16, or is not a number"
        raise NonFinite(what, fix="repair the model, or choose another format")
    return scales


def transposed_codes(weight: Rows, scales: Rows, zeros: Rows, bits: int) -> Iterator[tuple[slice, npt.NDArray[np.uint8]]]:
    """The codes of some outputs after the other, uint8 [inputs, outputs], and which outputs these are.

    weight         float32 [outputs, inputs], C-contiguous
    scales, zeros  float32 [outputs, groups]
    """
    from weightsmith._kernels.codes import quantise_transposed

    n, k = weight.shape
    for top in range(0, n, _BAND):
        some = slice(top, min(top + _BAND, n))
        codes = np.empty((k, some.stop - top), np.uint8)
        quantise_transposed(weight[some], k // scales.shape[1], scales[some], zeros[some], bits, codes)
        yield some, codes


# ---- the names of modules in config.json


def parts_of(modules: Sequence[str], others: Sequence[str]) -> list[str]:
    """Parts of the names of modules, as short as they can be without being part of another one's name.

    A part is what follows a layer's number, or else the whole name; of an expert, the name of all experts.

    >>> parts_of(["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"], ["model.layers.0.self_attn.q_proj"])
    ['mlp.gate']
    >>> parts_of(["model.layers.1.mlp.gate"], ["model.layers.0.mlp.gate_proj"])
    ['model.layers.1.mlp.gate']
    """
    parts: dict[str, None] = {}
    for name in dict.fromkeys(re.sub(r"(?<=\.experts)\..*", "", name) for name in modules):
        short = re.split(r"\.\d+\.", name)[-1]
        parts[name if any(short in other for other in others) else short] = None
    return list(parts)


def with_joined(modules: Sequence[str]) -> list[str]:
    """The names of modules, and those of the matrices into which engines join them.

    >>> with_joined(["mlp.up_proj", "mlp.gate_proj"])
    ['mlp.up_proj', 'mlp.gate_proj', 'mlp.gate_up_proj']
    """
    names = dict.fromkeys(modules)
    for name in modules:
        head, _, leaf = name.rpartition(".")
        for fused, parts in ENGINES_FUSED.items():
            if leaf == parts[0] and all(f"{head}.{part}" in names for part in parts):
                names[f"{head}.{fused}"] = None
    return list(names)


# ---- Integer codes in words of 32 bits, along the rows of a matrix: the first code is in the lowest bits of the first word. A
# code of 3, 5, 6 or 7 bits may begin in one word and end in the next: 32 codes fill as many words as a code has bits. Releases
# of compressed-tensors before 0.18 left the rest of a word empty instead (`loose`). For other widths both are the same.


WORD_BITS = 32


def words_of(codes: int, bits: int, *, loose: bool = False) -> int:
    """The words of a row of codes.

    >>> words_of(64, 3), words_of(64, 3, loose=True), words_of(9, 4)
    (6, 7, 2)
    """
    return -(-codes // (WORD_BITS // bits)) if loose else -(-codes * bits // WORD_BITS)


def is_loose(codes: int, bits: int, words: int) -> bool | None:
    """Whether a row of codes is stored loosely in so many words; None if it is stored neither way, or if nothing tells.

    >>> is_loose(64, 3, 6), is_loose(64, 3, 7), is_loose(64, 3, 8), is_loose(15, 3, 2)
    (False, True, None, None)
    """
    dense = words_of(codes, bits) == words
    same = WORD_BITS % bits == 0 or codes <= WORD_BITS // bits
    if same or words_of(codes, bits, loose=True) != words:
        return False if dense else None
    return None if dense else True


def rows_of_a_word(bits: int, *, loose: bool = False) -> int:
    """After so many codes, the next one begins a word."""
    return WORD_BITS // bits if loose or WORD_BITS % bits == 0 else WORD_BITS


def unpack_rows(words: npt.NDArray[np.uint32], bits: int, codes: int, *, loose: bool = False) -> npt.NDArray[np.uint8]:
    """The codes of rows.

    words  uint32 [rows, words]
    codes  of a row

    Returns uint8 [rows, codes].

    >>> unpack_rows(np.array([[0o76543210]], np.uint32), 3, 8)
    array([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=uint8)
    """
    from weightsmith._kernels.codes import unpack_down

    if loose:
        of_words = np.empty((WORD_BITS // bits, words.size), np.uint8)
        unpack_down(words.reshape(-1), words.size, bits, of_words.reshape(-1))
        return of_words.T.reshape(len(words), -1)[:, :codes]
    columns = np.empty((codes, len(words)), np.uint8)
    unpack_down(np.ascontiguousarray(words.T).reshape(-1), len(words), bits, columns.reshape(-1))
    return columns.T
