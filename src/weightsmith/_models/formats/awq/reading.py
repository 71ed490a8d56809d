"""AWQ's weights as numbers. The package describes the tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._models.formats.config import group_size_of, part_of, plain_dtype, quantisation_entry, setting
from weightsmith._models.formats.decoded import F32, Band, Weight, decode_transposed, decoded, read_columns, transposed_rows
from weightsmith.abc.stored import Config, Wrapped
from weightsmith.abc.tensors import Tensors

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
        from weightsmith._kernels.packed import unpack_nibbles

        packed = slice(outputs.start // 8, outputs.stop // 8)
        words = read_columns(stored, name, self.spec.shape[0] // 8, slice(0, rows), packed).view(np.uint32)
        codes = np.empty((rows, outputs.stop - outputs.start), np.uint8)
        unpack_nibbles(words.reshape(-1), _ORDER, codes.reshape(-1))
        return codes


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
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
