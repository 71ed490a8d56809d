"""The encodings of diffusion models in GGUF files: a tensor as one of ggml's types, with its shape.

    gguf-comfyui-q4_k          rows as blocks
    gguf-comfyui-q4_k-folded   the same, of a tensor whose pieces have other rows: convolutions as rows of 256 numbers
    gguf-comfyui-bf16-swapped  the second half of the rows before the first: scale and shift have another order in diffusers

The encodings of language models (`writing.py`) leave out a dimension of some convolutions, and allow at most four.

**Error.** That of the type, as in `writing.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.gguf.layout import MAX_DIFFUSION_DIMENSIONS
from weightsmith._models.formats.gguf.writing import NEEDS_IMPORTANCES, PREFIX, TYPES, OneType, dequantise, encode_matrix
from weightsmith.abc.product import Arrays
from weightsmith.abc.stored import WHOLE, Bytes, Rows

_NAME = re.compile(rf"{PREFIX}comfyui-([a-z0-9_]+?)(-folded|-swapped)?")
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
    match = _NAME.fullmatch(name)
    dtype = None if match is None else TYPES.get(match[1].upper())
    if match is None or dtype is None:
        return None
    return DiffusionEncoding(dtype, match[2] == "-folded", match[2] == "-swapped")
