"""Integers of 4 and 8 bits with scales.

int8: 8-bit integers with a scale for each output channel, like compressed-tensors' W8A8.

    X.weight        I8 [rows, cols]   codes -128 … 127, to be multiplied by their row's scale
    X.weight_scale  BF16 [rows, 1]    largest magnitude of the row / 127.5

Activations are quantised at run time, per token. Scales are bfloat16, as in `float8`, and rows are divided by the scale
as stored, in float32: division in bfloat16 changes one code in eleven.

**Error.** For every finite x of a row with scale s, |code · s - x| ≤ s. Half a step, except for the largest positive elements:
127.5 steps, or 128 if the scale was rounded down, become 127.

w4a16 and w8a16: integers of 4 or 8 bits with a scale for each group of a row, like compressed-tensors' W4A16 and W8A16.

    X.weight_packed  I32 [rows, cols · bits / 32]  codes + 2^(bits - 1), from the lowest bits of each word
    X.weight_scale   BF16 [rows, cols / group]     largest magnitude of the group / (2^(bits - 1) - 1/2)
    X.weight_shape   I64 [2]                       rows, cols

Activations stay as they are. Weights are rounded to nearest, in float32, over the scale as stored in bfloat16 (`float8`
has the reason). The width of a weight must be a multiple of the group, as engines require.

**Error.** For every finite x of a group with scale s, |code · s - x| ≤ 0.53 · s with 4 bits, and ≤ s with 8: half a step,
except for the largest positive elements, which are up to a quarter of a step beyond the largest code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.compressed_tensors.encoding import compressed
from weightsmith._models.formats.matrices import MatrixEncoding
from weightsmith._models.formats.numbers import bf16_scales, maxima_of
from weightsmith.abc.product import Arrays
from weightsmith.abc.stored import Bytes, Rows, grouped_name

GROUPS = (128, 64, 32)
"""Group sizes of packed codes, the default first."""
PACKED = {grouped_name(f"w{bits}a16", group, GROUPS): (bits, group) for bits in (4, 8) for group in GROUPS}
"""Bits and group size of each encoding with packed codes."""


def _scales(rows: Rows, bits: int, group: int, stored: Bytes) -> Rows:
    """Write the scales of the groups, and return them: float32 [groups]."""
    return bf16_scales(maxima_of(rows, 1, group), 2 ** (bits - 1) - 0.5, stored)


def _fill(rows: Rows, outs: Sequence[Bytes], bits: int, group: int, offset: int) -> None:
    """Codes and scales. NaN becomes 0. offset: added to codes."""
    from weightsmith._kernels.codes import quantise_integers

    scales = _scales(rows, bits, group, outs[1])
    quantise_integers(rows.reshape(-1), group, scales, bits, offset, outs[0])


def _fill_rows(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    _fill(rows, outs, 8, rows.shape[1], 0)


def _integers(bits: int, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", **more}


INT8 = compressed(
    "int8", "int-quantized", _integers(8, strategy="channel"), _fill_rows, activations=_integers(8, strategy="token")
)


def packed(bits: int) -> dict[int, MatrixEncoding]:
    """w4a16 or w8a16, by group size."""

    def encoding(group: int) -> MatrixEncoding:
        def fill(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
            _fill(rows, outs, bits, group, 2 ** (bits - 1))
            outs[2][:] = np.array(spec.shape, "<i8").view(np.uint8)

        name = grouped_name(f"w{bits}a16", group, GROUPS)
        return compressed(name, "pack-quantized", _integers(bits, strategy="group", group_size=group), fill)

    return {group: encoding(group) for group in GROUPS}


def encode_packed(weight: Rows, encoding: str, codes_of: Callable[[Rows], Rows]) -> Arrays:
    """The stored tensors of a weight whose codes are chosen elsewhere.

    encoding  one of `PACKED`
    codes_of  scales, float32 [rows, groups] → the codes as numbers, float32 [rows, cols]
    """
    from weightsmith._kernels.codes import quantise_integers

    (bits, group), (rows, cols) = PACKED[encoding], weight.shape
    words, stored = np.empty((rows, cols * bits // 32), "<i4"), np.empty((rows, cols // group), DTYPES["BF16"].numpy)
    scales = _scales(weight, bits, group, stored.reshape(-1).view(np.uint8))
    codes = codes_of(scales.reshape(stored.shape))
    quantise_integers(codes.reshape(-1), group, np.ones_like(scales), bits, 2 ** (bits - 1), words.reshape(-1).view(np.uint8))
    return words, stored, np.array(weight.shape, np.int64)


def decode_packed(arrays: Arrays, encoding: str) -> Rows:
    """The weight of the stored tensors, as readers compute it: float32 [rows, cols]. encoding: one of `PACKED`."""
    from weightsmith._kernels.codes import TABLES, dequantise

    (bits, group), (words, scales, shape) = PACKED[encoding], arrays
    values = np.empty(tuple(shape), np.float32)
    codes, factors = np.array(words).reshape(-1).view(np.uint8), scales.astype(np.float32).reshape(-1)
    cols = values.shape[1]
    dequantise(codes, TABLES[f"offset{bits}"], 0, cols, factors, cols // group, 1, group, values.reshape(-1))
    return values
