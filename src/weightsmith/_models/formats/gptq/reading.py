"""GPTQ's weights as numbers. The package describes the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import FormatError
from weightsmith._base.files import show
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._models.formats.config import (
    DAMAGED_CHECKPOINT,
    group_size_of,
    part_of,
    plain_dtype,
    quantisation_entry,
    setting,
    unsupported,
)
from weightsmith._models.formats.decoded import (
    F32,
    Band,
    Weight,
    decode_transposed,
    decoded,
    read_all,
    read_columns,
    transposed_rows,
)
from weightsmith.abc.stored import Config, Wrapped
from weightsmith.abc.tensors import Tensors

_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
_BITS = (2, 3, 4, 8)
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True, slots=True)
class GptqWeight:
    """One weight.

    spec        the plain weight
    stored      qweight, qzeros, scales, and g_idx if there is one
    natural_dtype  config.json's dtype, else that of the scales
    bits        of a code
    zero_minus  1 if zeros are stored less 1, else 0
    groups      rows of the scales
    group_size  consecutive inputs of a group, where g_idx does not say
    """

    spec: TensorSpec
    stored: tuple[str, ...]
    natural_dtype: DType
    bits: int
    zero_minus: int
    groups: int
    group_size: int

    @property
    def preferred_rows(self) -> int:
        return transposed_rows(*self.spec.shape)

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        decode_transposed(self.spec, self._groups(stored), lambda outputs: self._band(stored, outputs), first, values)

    def _groups(self, stored: Tensors) -> npt.NDArray[np.int64]:
        """The group of each input. A g_idx of zeros counts as none, as in ExLlama: old tools wrote it without desc_act."""
        inputs = self.spec.shape[1]
        if len(self.stored) == 4:
            name = self.stored[3]
            found: npt.NDArray[np.int64] = read_all(stored, name).astype(np.int64)
            low, high = int(found.min()), int(found.max())
            if low < 0 or high >= self.groups:
                what = f"tensor {show(name)} holds groups {low:,} to {high:,}, and the weight has {self.groups:,}"
                raise FormatError(what, fix=DAMAGED_CHECKPOINT)
            if high > 0 or -(-inputs // self.group_size) != self.groups:
                return found
        return np.arange(inputs) // self.group_size

    def _band(self, stored: Tensors, outputs: slice) -> Band:
        from weightsmith._kernels.packed import unpack_down

        qweight, qzeros, scales = self.stored[:3]
        width, inputs = self.spec.shape
        count, bits = outputs.stop - outputs.start, self.bits
        words = read_columns(stored, qweight, width, slice(0, -(-inputs * bits // 32)), outputs)
        codes = np.empty((inputs, count), np.uint8)
        unpack_down(words.view(np.uint32).reshape(-1), count, bits, codes.reshape(-1))

        packed = slice(outputs.start * bits // 32, -(-outputs.stop * bits // 32))  # 32 codes are whole words
        words = read_columns(stored, qzeros, -(-width * bits // 32), slice(0, self.groups), packed).view(np.uint32)
        zeros = np.empty((count, self.groups), np.uint8)
        if self.zero_minus and bits in _ONES:
            words = words + np.uint32(_ONES[bits])
        unpack_down(np.ascontiguousarray(words.T).reshape(-1), self.groups, bits, zeros.reshape(-1))
        zeros = np.ascontiguousarray(zeros.T)
        if self.zero_minus and bits not in _ONES:
            zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
        return codes, zeros, read_columns(stored, scales, width, slice(0, self.groups), outputs).astype(np.float32)


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
    _, entry = quantisation_entry(config, where)
    if entry.get("is_marlin_format"):
        raise unsupported("GPTQ weights in Marlin's layout (is_marlin_format) are not read", where)
    setting(entry, "pack_dtype", "int32", ("int32",), where)
    key = "checkpoint_format" if "checkpoint_format" in entry else "format"
    version = setting(entry, key, "gptq", ("gptq", "gptq_v2"), where)
    bits, group_size = setting(entry, "bits", None, _BITS, where), group_size_of(entry, where)
    weights: list[Weight] = []
    for name in stored.specs:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            shape = _shape(stored.specs, module, bits, group_size, bool(entry.get("dynamic")), where)
            scales = part_of(stored.specs, f"{module}.scales", ("F16", "BF16", "F32"), (shape.groups, shape.outputs), where)
            if entry.get("desc_act") is True and shape.groups > 1:  # its groups are not in order
                part_of(stored.specs, f"{module}.g_idx", ("I32",), (shape.inputs,), where)
            zeros = (shape.groups, -(-shape.outputs * shape.bits // 32))
            names = [name, part_of(stored.specs, f"{module}.qzeros", ("I32",), zeros, where).name, scales.name]
            weights.append(
                GptqWeight(
                    spec=TensorSpec(f"{module}.weight", F32, (shape.outputs, shape.inputs)),
                    stored=(*names, *([f"{module}.g_idx"] if f"{module}.g_idx" in stored.specs else [])),
                    natural_dtype=plain_dtype(config, scales.dtype),
                    bits=shape.bits,
                    zero_minus=1 if version == "gptq" else 0,
                    groups=shape.groups,
                    group_size=shape.inputs if group_size < 0 else group_size,
                )
            )
    return decoded(stored, weights, config, where, kind="GPTQ", parts=_PARTS)


class _Shape(NamedTuple):
    inputs: int
    outputs: int
    bits: int
    groups: int


def _shape(specs: Mapping[str, TensorSpec], module: str, bits: int, group_size: int, mixed: bool, where: str) -> _Shape:
    """What the shapes of qweight and g_idx say. mixed: config.json has other bits and group sizes for some modules."""
    rows, outputs = part_of(specs, f"{module}.qweight", ("I32",), (None, None), where).shape
    indexed = f"{module}.g_idx" in specs
    inputs = part_of(specs, f"{module}.g_idx", ("I32",), (None,), where).shape[0] if indexed else rows * 32 // bits
    if mixed and indexed:
        bits = next((b for b in (bits, *_BITS) if -(-inputs * b // 32) == rows), bits)
    part_of(specs, f"{module}.qweight", ("I32",), (-(-inputs * bits // 32), outputs), where)
    groups = 1 if group_size < 0 else -(-inputs // group_size)
    if mixed and indexed and f"{module}.scales" in specs:
        groups = (*specs[f"{module}.scales"].shape, 0)[0]
    return _Shape(inputs, outputs, bits, groups)
