"""w4a16 and w8a16: integers of 4 or 8 bits with a scale for each group of a row, like compressed-tensors' W4A16 and W8A16.

    X.weight_packed  I32 [rows, cols · bits / 32]  codes + 2^(bits - 1), from the lowest bits of each word
    X.weight_scale   BF16 [rows, cols / group]     largest magnitude of the group / (2^(bits - 1) - 1/2)
    X.weight_shape   I64 [2]                       rows, cols

Activations stay as they are. Weights are rounded to nearest, in float32, over the scale as stored in bfloat16 (`fp8_dynamic`
has the reason). The width of a weight must be a multiple of the group, as engines require.

**Error.** For every finite x of a group with scale s, |code · s - x| ≤ 0.53 · s with 4 bits, and ≤ s with 8: half a step,
except for the largest positive elements, which are up to a quarter of a step beyond the largest code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from weightsmith.encodings.base import Bytes, Rows
from weightsmith.encodings.matrices import MatrixEncoding, beside, bf16_scales, maxima_of, quantization_config
from weightsmith.tensors import TensorSpec

GROUPS = (128, 64, 32)
"""Group sizes, the default first."""


def _encoding(bits: int, group: int) -> MatrixEncoding:
    """Codes, scales and shape.

    >>> from weightsmith.tensors import DTYPES
    >>> for out in _encoding(4, 128).outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 256))):
    ...     print(out)
    q_proj.weight_packed [64, 32] I32
    q_proj.weight_scale [64, 2] BF16
    q_proj.weight_shape [2] I64
    """

    def parts(spec: TensorSpec) -> tuple[TensorSpec, ...]:
        rows, cols = spec.shape
        return (
            beside(spec, "_packed", "I32", rows, cols * bits // 32),
            beside(spec, "_scale", "BF16", rows, cols // group),
            beside(spec, "_shape", "I64", 2),
        )

    def fill(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
        """NaN becomes 0."""
        from weightsmith.kernels.codes import quantise_integers

        levels = 2 ** (bits - 1)
        scales = bf16_scales(maxima_of(rows, 1, group), levels - 0.5, outs[1])
        quantise_integers(rows.reshape(-1), group, scales, bits, levels, outs[0])
        outs[2][:] = np.array(spec.shape, "<i8").view(np.uint8)

    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group}
    name = f"w{bits}a16" if group == GROUPS[0] else f"w{bits}a16-g{group}"
    config = partial(quantization_config, "pack-quantized", weights, None)
    return MatrixEncoding(name, parts, fill, config, group=group, whole=1)


ENCODINGS = tuple(_encoding(bits, group) for bits in (4, 8) for group in GROUPS)
