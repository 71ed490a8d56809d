"""mlx-4bit and mlx-8bit: affine codes with a scale and a bias for each group of a row, as MLX quantises (mode `affine`).

    X.weight  U32 [rows, cols · bits / 32]   codes 0 … 2^bits - 1, from the lowest bits of each word
    X.scales  the weight's dtype [rows, cols / group]
    X.biases  the weight's dtype [rows, cols / group]

An element is code · scale + bias. The bias is the end of the group's range that has the larger magnitude, which is exact, and
the scale is adjusted so that 0 is a multiple of it; the scale is negative if that end is the positive one. Codes are computed
from scale and bias as stored. Embeddings and heads are quantised too, as mlx-lm does.

**Error.** |code · scale + bias - x| ≤ (1 + 2^(bits - 8)) · |scale| for weights of bfloat16: half a step; up to one at the far
end of the range, because the adjusted scale may be smaller by 1/16; and the rounding of the scale, which grows with the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.matrices import SUFFIX, MatrixEncoding
from weightsmith.abc.stored import Bytes, Rows, grouped_name

GROUPS = (64, 32, 128)
"""Group sizes, the default first."""

_SMALLEST_SCALE = np.float32(1e-7)
"""MLX's."""


def _encoding(bits: int, group: int) -> MatrixEncoding:
    """Codes, scales and biases.

    >>> for out in _encoding(4, 64).outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 128))):
    ...     print(out)
    q_proj.weight [64, 16] U32
    q_proj.scales [64, 2] BF16
    q_proj.biases [64, 2] BF16
    """

    def parts(spec: TensorSpec) -> tuple[TensorSpec, ...]:
        rows, cols = spec.shape
        module, groups = spec.name.removesuffix(SUFFIX), (rows, cols // group)
        return (
            TensorSpec(spec.name, DTYPES["U32"], (rows, cols * bits // 32)),
            TensorSpec(f"{module}.scales", spec.dtype, groups),
            TensorSpec(f"{module}.biases", spec.dtype, groups),
        )

    def fill(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
        """NaN becomes some code."""
        from weightsmith._kernels import codecs
        from weightsmith._kernels.codes import group_extremes, quantise_affine

        flat = rows.reshape(-1)
        lows, highs = np.empty((2, flat.size // group), np.float32)
        group_extremes(flat, group, lows, highs)
        with np.errstate(all="ignore"):
            scales = np.maximum((highs - lows) / np.float32(2**bits - 1), _SMALLEST_SCALE)
            from_low = np.abs(lows) > np.abs(highs)
            scales = np.where(from_low, scales, -scales)
            edges = np.where(from_low, lows, highs)
            steps = np.rint(edges / scales)
            scales = np.where(steps != 0, edges / np.where(steps != 0, steps, 1), scales).astype(np.float32)
            biases = np.where(steps != 0, edges, 0).astype(np.float32)
        code = spec.dtype.code
        for values, out in ((scales, outs[1]), (biases, outs[2])):
            codecs.encode(values, values.size, code, 0, out)
            codecs.decode(out, code, 0, values.size, values)
        zero = scales == 0  # smaller than the dtype's smallest number: every code is the bias
        quantise_affine(flat, group, np.where(zero, np.float32(1), scales), biases, bits, outs[0])

    def config(ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization`, and the same as `quantization_config`, where transformers looks. mlx-lm quantises what has scales."""
        entry = {"group_size": group, "bits": bits, "mode": "affine"}
        return {"quantization": entry, "quantization_config": entry}

    return MatrixEncoding(grouped_name(f"mlx-{bits}bit", group, GROUPS), parts, fill, config, group=group, vocabulary=True)


def affine(bits: int) -> dict[int, MatrixEncoding]:
    """mlx-4bit or mlx-8bit, by group size."""
    return {group: _encoding(bits, group) for group in GROUPS}
