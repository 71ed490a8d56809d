"""Plain values: one tensor, rounded to nearest even. `plain F16` stores float16, whatever the dtype without the encoding is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weightsmith._base.errors import NonFinite, Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith.abc.stored import Bytes, Rows


@dataclass(frozen=True, slots=True)
class Plain:
    """Rows → a tensor of any shape.

    dtype  of the tensor; None: `spec.dtype`
    """

    name: str = "plain"
    dtype: DType | None = None
    align_rows: int = 1
    whole: int = 0
    product: str = ""
    vocabulary: bool = False

    def refusal(self, spec: TensorSpec) -> str:
        """Accepts every floating-point tensor."""
        return "" if spec.dtype.floating else f"it is {spec.dtype}, not floating point"

    def outs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensor itself.

        >>> from weightsmith._base.tensors import DTYPES
        >>> print(*Plain().outs(TensorSpec("w", DTYPES["BF16"], (3, 4))))
        w [3, 4] BF16
        """
        if why := self.refusal(spec):
            raise Unsupported(f"tensor {show(spec.name)} cannot be encoded: {why}")
        return (spec if self.dtype is None else replace(spec, dtype=self.dtype),)

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        """As `Encoding.encode`; a value that overflows becomes an infinity (NaN in F8_E4M3).

        Raises NonFinite if `dtype` is given and cannot hold a finite number.
        """
        from weightsmith._kernels.codecs import encode, first_nonfinite

        flat, dtype = rows.reshape(-1), self.dtype or spec.dtype
        encode(flat, flat.size, dtype.code, 0, outs[0])
        if self.dtype is not None and (at := first_nonfinite(outs[0], dtype.code, flat.size)) >= 0 and np.isfinite(flat[at]):
            raise NonFinite(
                f"{float(flat[at])} is not a number that {dtype.torch} can hold", where=f"output tensor {show(spec.name)}"
            )

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """No keys: every reader supports plain tensors."""
        return {}


ENCODING = Plain()


def parse(name: str) -> Plain | None:
    """The encoding of a name, `plain F16`; None for a name of others. Raises ValueError."""
    family, _, dtype = name.partition(" ")
    if family != "plain":
        return None
    if dtype not in DTYPES or not DTYPES[dtype].floating:
        raise ValueError(name)
    return Plain(name, DTYPES[dtype])
