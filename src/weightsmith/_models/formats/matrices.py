"""Encodings of weight matrices, from a few functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith.abc.stored import Bytes, Rows

SUFFIX = ".weight"


@dataclass(frozen=True, slots=True)
class MatrixEncoding:
    """The `Encoding` of matrices `X.weight`, from the functions of one file. The other fields are those of `Encoding`.

    parts     the stored tensors of a weight that is accepted
    fill      (weight, rows, buffers, numbers): `Encoding.encode`; the bytes of a row do not depend on its position
    settings  ignored modules → `Encoding.config`
    group     elements of a row that share a scale; it divides the width
    """

    name: str
    parts: Callable[[TensorSpec], tuple[TensorSpec, ...]]
    fill: Callable[[TensorSpec, Rows, Sequence[Bytes], Rows], None]
    settings: Callable[[Sequence[str]], dict[str, Any]]
    group: int = 1
    align_rows: int = 1
    whole: int = 0
    product: str = ""
    vocabulary: bool = False

    def refusal(self, spec: TensorSpec) -> str:
        return matrix_refusal(spec, self.group)

    def outs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        if why := self.refusal(spec):
            raise Unsupported(f"tensor {show(spec.name)} cannot be stored as {self.name}: {why}")
        return self.parts(spec)

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        self.fill(spec, rows, outs, numbers)

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        return self.settings(ignored)


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
