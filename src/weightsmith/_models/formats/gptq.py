"""GPTQ's weights: codes of 2, 3, 4 or 8 bits, transposed and packed along the inputs.

X.qweight I32 [inputs · bits / 32, outputs]   codes; each column is a stream of bits, the lowest bit of a word first
X.qzeros  I32 [groups, outputs · bits / 32]   zeros, packed along the outputs
X.scales      [groups, outputs]
X.g_idx   I32 [inputs]                        the group of each input; missing: groups of group_size inputs in order

A weight is (code - zero) · scale. Format `gptq` stores zero - 1, `gptq_v2` the zero itself. The older one is undone as
GPTQModel does it: 1 is added to whole words, so that a carry undoes the borrow of a zero of 0 (of 3 bits: to each zero).
The groups of a model with `desc_act` are not in order, so it must have g_idx.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightsmith._base.dataclass import dataclass
from weightsmith._base.errors import FormatError
from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.config import DAMAGED_CHECKPOINT, ending, plain_dtype, recogniser
from weightsmith._models.formats.decoded import F32, Band, QuantisedModel, TransposedWeight, read_all, read_columns, reader
from weightsmith.abc.stored import StoredFormat, labelled
from weightsmith.abc.tensors import Tensors

_BITS = (2, 3, 4, 8)
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True, slots=True)
class GptqWeight(TransposedWeight):
    """One weight.

    stored      qweight, qzeros, scales, and g_idx if there is one, which then says what is in a group
    bits        of a code
    zero_minus  1 if zeros are stored less 1, else 0
    """

    bits: int
    zero_minus: int

    def groups_of_inputs(self, stored: Tensors) -> npt.NDArray[np.int64]:
        """[inputs]: the group of each. A g_idx of zeros counts as none, as in ExLlama: old tools wrote it without desc_act."""
        if len(self.stored) == 4:
            name = self.stored[3]
            found: npt.NDArray[np.int64] = read_all(stored, name).astype(np.int64)
            low, high = int(found.min()), int(found.max())
            if low < 0 or high >= self.groups:
                what = f"tensor {show(name)} holds groups {low:,} to {high:,}, and the weight has {self.groups:,}"
                raise FormatError(what, fix=DAMAGED_CHECKPOINT)
            if high > 0 or -(-found.size // self.group_size) != self.groups:
                return found
        return TransposedWeight.groups_of_inputs(self, stored)

    def band(self, stored: Tensors, outputs: slice) -> Band:
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


def weights(model: QuantisedModel) -> list[GptqWeight]:
    entry, found = model.entry, []
    if entry.get("is_marlin_format"):
        raise model.unsupported("GPTQ weights in Marlin's layout (is_marlin_format) are not read")
    model.setting("pack_dtype", "int32", ("int32",))
    key = "checkpoint_format" if "checkpoint_format" in entry else "format"
    version = model.setting(key, "gptq", ("gptq", "gptq_v2"))
    bits, group_size = model.setting("bits", None, _BITS), model.group_size()
    for module in model.modules(".qweight"):
        shape = _shape(model, module, bits, group_size)
        scales = model.part(f"{module}.scales", ("F16", "BF16", "F32"), (shape.groups, shape.outputs))
        if entry.get("desc_act") is True and shape.groups > 1:  # its groups are not in order
            model.part(f"{module}.g_idx", ("I32",), (shape.inputs,))
        zeros = model.part(f"{module}.qzeros", ("I32",), (shape.groups, -(-shape.outputs * shape.bits // 32)))
        index = [f"{module}.g_idx"] if f"{module}.g_idx" in model.specs else []
        found.append(
            GptqWeight(
                spec=TensorSpec(f"{module}.weight", F32, (shape.outputs, shape.inputs)),
                stored=(f"{module}.qweight", zeros.name, scales.name, *index),
                natural_dtype=plain_dtype(model.config, scales.dtype),
                bits=shape.bits,
                zero_minus=1 if version == "gptq" else 0,
                groups=shape.groups,
                group_size=shape.inputs if group_size < 0 else group_size,
            )
        )
    return found


class _Shape(NamedTuple):
    inputs: int
    outputs: int
    bits: int
    groups: int


def _shape(model: QuantisedModel, module: str, bits: int, group_size: int) -> _Shape:
    """What the shapes of qweight and g_idx say. config.json may have other bits and group sizes for some modules (dynamic)."""
    specs, mixed = model.specs, bool(model.entry.get("dynamic"))
    rows, outputs = model.part(f"{module}.qweight", ("I32",), (None, None)).shape
    indexed = f"{module}.g_idx" in specs
    inputs = model.part(f"{module}.g_idx", ("I32",), (None,)).shape[0] if indexed else rows * 32 // bits
    if mixed and indexed:
        bits = next((b for b in (bits, *_BITS) if -(-inputs * b // 32) == rows), bits)
    model.part(f"{module}.qweight", ("I32",), (-(-inputs * bits // 32), outputs))
    groups = 1 if group_size < 0 else -(-inputs // group_size)
    if mixed and indexed and f"{module}.scales" in specs:
        groups = (*specs[f"{module}.scales"].shape, 0)[0]
    return _Shape(inputs, outputs, bits, groups)


_read = reader("GPTQ", (".qweight", ".qzeros", ".scales", ".g_idx"), weights)
FORMAT = StoredFormat("gptq", "GPTQ", recogniser(ending(".qweight"), "gptq"), _read, {".qweight": labelled("GPTQ or AWQ")})
