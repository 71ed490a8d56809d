"""AWQ's weights in the layout `gemm`: codes of 4 bits, transposed and packed along the outputs.

X.qweight I32 [inputs, outputs / 8]   the lowest nibble of a word is output 0 of 8, the next ones are 2, 4, 6, 1, 3, 5, 7
X.qzeros  I32 [groups, outputs / 8]   zeros, in the same order
X.scales      [groups, outputs]       groups of group_size inputs in order

A weight is (code - zero) · scale. The layouts of other kernels (gemv, gemv_fast, Marlin) are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith.formats.quantised import group_size_of, method_of, part_of, plain_dtype, quantisation_entry, setting
from weightsmith.sources.base import Tensors
from weightsmith.sources.decoded import F32, Band, Weight, decode_transposed, decoded, read_columns, transposed_rows
from weightsmith.sources.kind import Wrapped, Wrapper
from weightsmith.tensors import DType, TensorSpec

_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32)
"""The nibble that holds output i of 8."""


@dataclass(frozen=True, slots=True)
class AwqWeight:
    """One weight.

    spec        the plain weight
    stored      qweight, qzeros, scales
    natural_dtype  config.json's dtype, else that of the scales
    groups      rows of the scales
    group_size  inputs of a group
    """

    spec: TensorSpec
    stored: tuple[str, ...]
    natural_dtype: DType
    groups: int
    group_size: int

    @property
    def preferred_rows(self) -> int:
        return transposed_rows(*self.spec.shape)

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        groups = np.arange(self.spec.shape[1]) // self.group_size
        decode_transposed(self.spec, groups, lambda outputs: self._band(stored, outputs), first, values)

    def _band(self, stored: Tensors, outputs: slice) -> Band:
        qweight, qzeros, scales = self.stored
        width, inputs = self.spec.shape
        codes, zeros = self._unpack(stored, qweight, inputs, outputs), self._unpack(stored, qzeros, self.groups, outputs)
        return codes, zeros, read_columns(stored, scales, width, slice(0, self.groups), outputs).astype(np.float32)

    def _unpack(self, stored: Tensors, name: str, rows: int, outputs: slice) -> npt.NDArray[np.uint8]:
        from weightsmith.kernels.packed import unpack_nibbles

        packed = slice(outputs.start // 8, outputs.stop // 8)
        words = read_columns(stored, name, self.spec.shape[0] // 8, slice(0, rows), packed).view(np.uint32)
        codes = np.empty((rows, outputs.stop - outputs.start), np.uint8)
        unpack_nibbles(words.reshape(-1), _ORDER, codes.reshape(-1))
        return codes


def _recognises(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> bool:
    return method_of(config) == "awq" and any(name.endswith(".qweight") for name in specs)


def _wrap(stored: Tensors, config: Mapping[str, Any], where: str) -> Wrapped:
    _, entry = quantisation_entry(config, where)
    for key in ("version", "checkpoint_format", "format"):
        setting(entry, key, "gemm", ("gemm", "GEMM"), where)
    setting(entry, "bits" if "bits" in entry else "w_bit", 4, (4,), where)
    group_size = group_size_of(entry, where, "group_size" if "group_size" in entry else "q_group_size")
    specs, weights = stored.specs, list[Weight]()
    for name in specs:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            inputs, words = part_of(specs, name, ("I32",), (None, None), where).shape
            groups = 1 if group_size < 0 else -(-inputs // group_size)
            scales = part_of(specs, f"{module}.scales", ("F16", "BF16", "F32"), (groups, 8 * words), where)
            zeros = part_of(specs, f"{module}.qzeros", ("I32",), (groups, words), where)
            weights.append(
                AwqWeight(
                    spec=TensorSpec(f"{module}.weight", F32, (8 * words, inputs)),
                    stored=(name, zeros.name, scales.name),
                    natural_dtype=plain_dtype(config, scales.dtype),
                    groups=groups,
                    group_size=inputs if group_size < 0 else group_size,
                )
            )
    return decoded(stored, weights, config, where, kind="AWQ", parts=(".qweight", ".qzeros", ".scales"))


WRAPPER = Wrapper("AWQ", _recognises, _wrap)
