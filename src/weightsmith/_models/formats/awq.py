"""AWQ's weights in the layout `gemm`: codes of 4 bits, transposed and packed along the outputs.

X.qweight I32 [inputs, outputs / 8]   the lowest nibble of a word is output 0 of 8, the next ones are 2, 4, 6, 1, 3, 5, 7
X.qzeros  I32 [groups, outputs / 8]   zeros, in the same order
X.scales      [groups, outputs]       groups of group_size inputs in order

A weight is (code - zero) · scale. The layouts of other kernels (gemv, gemv_fast, Marlin) are refused.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.config import ending, plain_dtype, recogniser
from weightsmith._models.formats.decoded import F32, Band, QuantisedModel, TransposedWeight, read_columns, reader
from weightsmith.abc.stored import StoredFormat
from weightsmith.abc.tensors import Tensors

_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32)
"""The nibble that holds output i of 8."""


class AwqWeight(TransposedWeight):
    """One weight. stored: qweight, qzeros, scales."""

    def band(self, stored: Tensors, outputs: slice) -> Band:
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


def weights(model: QuantisedModel) -> list[AwqWeight]:
    for key in ("version", "checkpoint_format", "format"):
        model.setting(key, "gemm", ("gemm", "GEMM"))
    model.setting("bits" if "bits" in model.entry else "w_bit", 4, (4,))
    group_size, found = model.group_size("group_size" if "group_size" in model.entry else "q_group_size"), []
    for module in model.modules(".qweight"):
        codes = model.part(f"{module}.qweight", ("I32",), (None, None))
        inputs, words = codes.shape
        groups = 1 if group_size < 0 else -(-inputs // group_size)
        scales = model.part(f"{module}.scales", ("F16", "BF16", "F32"), (groups, 8 * words))
        zeros = model.part(f"{module}.qzeros", ("I32",), (groups, words))
        found.append(
            AwqWeight(
                spec=TensorSpec(f"{module}.weight", F32, (8 * words, inputs)),
                stored=(codes.name, zeros.name, scales.name),
                natural_dtype=plain_dtype(model.config, scales.dtype),
                groups=groups,
                group_size=inputs if group_size < 0 else group_size,
            )
        )
    return found


_read = reader("AWQ", (".qweight", ".qzeros", ".scales"), weights)
FORMAT = StoredFormat("awq", "AWQ", recogniser(ending(".qweight"), "awq"), _read)
