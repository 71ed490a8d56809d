"""MXFP4 as gpt-oss is published: quant_method mxfp4. It is read; `compressed_tensors` writes such numbers.

X_blocks  U8 [experts, outputs, groups, 16]: two float4 in a byte, the first in the low half
X_scales  U8 [experts, outputs, groups]: exponents of 2, with 127 added, of 32 inputs each

X is [experts, inputs, outputs], as transformers computes with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.config import ending, plain_dtype, recogniser
from weightsmith._models.formats.decoded import F32, ROWS_BYTES, QuantisedModel, Weight, bands, read_columns, reader
from weightsmith._models.formats.matrices import MXFP4_GROUP
from weightsmith.abc.stored import Rows, Specs, StoredFormat
from weightsmith.abc.tensors import Tensors

BLOCKS, SCALES = "_blocks", "_scales"
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_PAIRS = np.stack([_FLOAT4[np.arange(256) & 15], _FLOAT4[np.arange(256) >> 4]], 1)
"""The two numbers of a byte: float32 [256, 2]."""


@dataclass(frozen=True, slots=True)
class ExpertsWeight(Weight):
    """The experts of a layer: [experts, inputs, outputs], stored as [experts, outputs, inputs]."""

    @property
    def preferred_rows(self) -> int:
        """Whole groups of inputs that divide those of an expert: each read takes some bytes of all outputs."""
        _, inputs, outputs = self.spec.shape
        groups = inputs // MXFP4_GROUP
        most = max(1, ROWS_BYTES // (4 * MXFP4_GROUP * outputs))
        return MXFP4_GROUP * max(n for n in range(1, min(most, groups) + 1) if groups % n == 0)

    def decode(self, stored: Tensors, first: int, values: Rows) -> None:
        _, inputs, outputs = self.spec.shape
        rows = self.preferred_rows
        for top, end, skip, target in bands(first, values, outputs, rows, rows):
            expert, begin = divmod(top, inputs)
            of_expert = slice(expert * outputs, (expert + 1) * outputs)
            some = slice(begin // 2, (begin + end - top) // 2)
            groups = slice(begin // MXFP4_GROUP, (begin + end - top) // MXFP4_GROUP)
            pairs = _PAIRS[read_columns(stored, self.stored[0], inputs // 2, of_expert, some)]
            powers = read_columns(stored, self.stored[1], inputs // MXFP4_GROUP, of_expert, groups).astype(np.int32) - 127
            with np.errstate(over="ignore"):  # an infinity is the caller's to refuse
                numbers = np.ldexp(pairs.reshape(outputs, -1, MXFP4_GROUP), powers[:, :, None])
            target[:] = np.ascontiguousarray(numbers.reshape(outputs, -1).T).reshape(-1)[skip : skip + target.size]


def _weights(model: QuantisedModel) -> list[Weight]:
    read_weights: list[Weight] = []
    dtype = plain_dtype(model.config)
    for name in dict.fromkeys([*model.modules(BLOCKS), *model.modules(SCALES)]):
        blocks = model.part(name + BLOCKS, ("U8",), (None, None, None, MXFP4_GROUP // 2))
        model.part(name + SCALES, ("U8",), blocks.shape[:3])
        if not math.prod(blocks.shape):
            raise model.damaged(f"tensor {show(blocks.name)} is empty")
        experts, outputs, groups, _ = blocks.shape
        spec = TensorSpec(name, F32, (experts, groups * MXFP4_GROUP, outputs))
        read_weights.append(ExpertsWeight(spec, (name + BLOCKS, name + SCALES), dtype))
    return read_weights


def _mark(name: str, specs: Specs) -> str:
    return "MXFP4" if name.removesuffix(SCALES) + BLOCKS in specs else ""


FORMAT = StoredFormat(
    "mxfp4", "MXFP4", recogniser(ending(BLOCKS), "mxfp4"), reader("MXFP4", (BLOCKS, SCALES), _weights), {SCALES: _mark}
)
