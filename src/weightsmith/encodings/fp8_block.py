"""fp8-block: 8-bit weights with a scale for each block of 128 by 128, like compressed-tensors' FP8_BLOCK.

    X.weight        F8_E4M3 [rows, cols]                 codes, to be multiplied by their block's scale
    X.weight_scale  BF16 [ceil(rows / 128), cols / 128]  largest magnitude of the block / 448

Activations are quantised at run time, in groups of 128, so no loader can run a matrix of another width. The last block of
rows may be smaller: compressed-tensors and transformers read it. vLLM does not where it joins or splits such matrices.

**Error.** As `fp8_dynamic`, with s the scale of the block: |code · s - x| ≤ 2^-4 · |x| + 2^-10 · s. Scales are bfloat16 for
the same reason, and special blocks are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from weightsmith.encodings.base import Bytes, Rows
from weightsmith.encodings.matrices import MatrixEncoding, beside, bf16_scales, maxima_of, quantization_config
from weightsmith.tensors import DTYPES, TensorSpec

SIDE = 128
_FLOAT8 = {"num_bits": 8, "type": "float"}


def _parts(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """Codes and scales.

    >>> for out in ENCODING.outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (192, 640))):
    ...     print(out)
    q_proj.weight [192, 640] F8_E4M3
    q_proj.weight_scale [2, 5] BF16
    """
    rows, cols = spec.shape
    return TensorSpec(spec.name, DTYPES["F8_E4M3"], spec.shape), beside(spec, "_scale", "BF16", -(-rows // SIDE), cols // SIDE)


def _fill(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    """NaN stays NaN; a block with an infinity becomes zeros and NaN."""
    from weightsmith.kernels import fp8

    scales = bf16_scales(maxima_of(rows, SIDE, SIDE), 448, outs[1])
    fp8.quantise(rows.reshape(-1), rows.shape[1], SIDE, SIDE, scales, outs[0])


_config = partial(
    quantization_config,
    "float-quantized",
    {**_FLOAT8, "strategy": "block", "block_structure": [SIDE, SIDE]},
    {**_FLOAT8, "strategy": "group", "group_size": SIDE},
)

ENCODING = MatrixEncoding("fp8-block", _parts, _fill, _config, group=SIDE, align_rows=SIDE)
