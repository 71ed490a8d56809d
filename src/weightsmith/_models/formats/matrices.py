"""Encodings of weight matrices, from a few functions; scales and small numbers that several formats store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith.abc.stored import ActivationScale, Bytes, Encoding, Kind, Modules, Rows, grouped_name

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

    def outs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        if why := self.refusal(spec):
            raise Unsupported(f"tensor {show(spec.name)} cannot be stored as {self.name}: {why}")
        return self.parts(spec)

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        self.fill(spec, rows, outs, numbers)

    def config(self, modules: Modules) -> dict[str, Any]:
        return self.settings(modules.ignored)


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
