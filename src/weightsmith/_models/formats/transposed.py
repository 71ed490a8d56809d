"""How weights are written that are stored as [inputs, outputs], with scales of groups of inputs: what GPTQ and AWQ share.

Whole matrices are encoded: each word holds codes of several inputs or outputs, and all outputs of an input follow each other.

**Scales** are stored in float16, as both formats have them, and have values that bfloat16 holds too: vLLM and SGLang load them
in the dtype of the model. Below 2^-17, these are the multiples of 2^-24, to which scales are rounded up.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import NonFinite, Unsupported, raised_at
from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._models.formats.hessians import CodesOf, quantise_groups
from weightsmith._models.formats.matrices import SUFFIX, bf16_scales, matrix_refusal
from weightsmith._models.structure.fused import FUSED
from weightsmith.abc.product import Arrays
from weightsmith.abc.stored import (
    WHOLE,
    Bytes,
    Encoding,
    FactoredHessian,
    Float16,
    HessianForm,
    Kind,
    Rows,
    Unread,
)

GROUPS = (128, 64, 32)
"""Group sizes, the default first."""

_BAND = 128
"""Outputs whose codes are unpacked at once: a multiple of 32."""
_FINE, _STEP = np.float32(2.0**-17), np.float32(2.0**-24)
"""Below the first, float16 has multiples of the second."""


@dataclass(frozen=True, slots=True)
class TransposedEncoding(Encoding):
    """Matrices `X.weight` → tensors of integers with a scale for each output and each group of inputs.

    A subclass has the stored tensors, and how they are filled and decoded.
    """

    bits: int
    group: int

    @property
    def kind(self) -> Kind:
        return "integer"

    @property
    def scale(self) -> DType:
        return DTYPES["F16"]

    @property
    def align_rows(self) -> int:
        return WHOLE

    @property
    def whole(self) -> int:
        return len(self._parts(TensorSpec(SUFFIX, DTYPES["F32"], (32, self.group))))

    @property
    def hessian(self) -> HessianForm:
        return "sorted"

    @property
    def float16(self) -> Float16:
        return "default"

    @abstractmethod
    def _parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The stored tensors of a weight that is accepted."""

    @abstractmethod
    def _fill(self, weight: Rows, arrays: Sequence[npt.NDArray[Any]], codes_of: CodesOf | None) -> None:
        """Fill the arrays of the stored tensors. codes_of: chooses the codes; None rounds to nearest. Raises NonFinite."""

    def refusal(self, spec: TensorSpec) -> str:
        """Accepts matrices named `….weight` whose codes fill whole words."""
        multiple = 8 if 32 % self.bits == 0 else 32
        if why := matrix_refusal(spec, self.group):
            return why
        return f"its outputs are {spec.shape[0]:,}, not a multiple of {multiple}" if spec.shape[0] % multiple else ""

    def outs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        if why := self.refusal(spec):
            raise Unsupported(f"tensor {show(spec.name)} cannot be stored as {self.name}: {why}")
        return self._parts(spec)

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        """As `Encoding.encode`, for all rows at once. Raises NonFinite for a weight whose scale float16 cannot hold."""
        arrays = [out.view(part.dtype.numpy).reshape(part.shape) for out, part in zip(outs, self._parts(spec), strict=True)]
        with raised_at(f"output tensor {show(spec.name)}"):
            self._fill(rows, arrays, None)

    def quantise(self, weight: Rows | Unread, hessian: Rows | FactoredHessian | None, threads: int) -> Arrays:
        assert not isinstance(hessian, np.ndarray)
        return quantise_groups(weight, hessian, self.bits, self._arrays)

    def _arrays(self, weight: Rows, codes_of: CodesOf | None) -> Arrays:
        parts = self._parts(TensorSpec(f"x{SUFFIX}", DTYPES["F32"], weight.shape))
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
    from weightsmith._kernels.packed import quantise_transposed

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
    found: dict[str, None] = {}
    for name in dict.fromkeys(re.sub(r"(?<=\.experts)\..*", "", name) for name in modules):
        short = re.split(r"\.\d+\.", name)[-1]
        found[name if any(short in other for other in others) else short] = None
    return list(found)


def with_joined(modules: Sequence[str]) -> list[str]:
    """The names of modules, and those of the matrices into which engines join them.

    >>> with_joined(["mlp.up_proj", "mlp.gate_proj"])
    ['mlp.up_proj', 'mlp.gate_proj', 'mlp.gate_up_proj']
    """
    names = dict.fromkeys(modules)
    for name in modules:
        head, _, own = name.rpartition(".")
        for fused, parts in FUSED.items():
            if own == parts[0] and all(f"{head}.{part}" in names for part in parts):
                names[f"{head}.{fused}"] = None
    return list(names)
