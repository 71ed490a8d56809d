"""Plain values: one tensor of the requested dtype, rounded to nearest even."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weightsmith.encodings.base import Bytes, Rows
from weightsmith.errors import Unsupported
from weightsmith.formats.files import show
from weightsmith.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Plain:
    """Rows → a tensor of `spec.dtype` and any shape."""

    name: str = "plain"
    align_rows: int = 1

    def refusal(self, spec: TensorSpec) -> str:
        """Accepts every floating-point tensor."""
        return "" if spec.dtype.floating else f"it is {spec.dtype}, not floating point"

    def outs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensor itself.

        >>> from weightsmith.tensors import DTYPES
        >>> print(*Plain().outs(TensorSpec("w", DTYPES["BF16"], (3, 4))))
        w [3, 4] BF16
        """
        if why := self.refusal(spec):
            raise Unsupported(f"tensor {show(spec.name)} cannot be encoded: {why}")
        return (spec,)

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes]) -> None:
        """As `Encoding.encode`; a value that overflows becomes an infinity (NaN in F8_E4M3)."""
        from weightsmith.kernels.codecs import encode

        encode(rows.reshape(-1), rows.size, spec.dtype.code, 0, outs[0])

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """No keys: every reader supports plain tensors."""
        return {}


ENCODING = Plain()
