"""8-bit floats with scales.

fp8-dynamic: 8-bit weights with a scale for each output channel, like compressed-tensors' FP8_DYNAMIC.

    X.weight        F8_E4M3 [rows, cols]   codes, to be multiplied by their row's scale
    X.weight_scale  BF16 [rows, 1]         largest magnitude of the row / 448

Activations are quantised at run time: vLLM and SGLang scale and round them per token.

**The scale is always bfloat16.** transformers casts scales to the dtype in which the model is loaded, so a float32 scale would
be rounded after the codes were computed from it (an error of 0.3 % on every weight of a bfloat16 model). A bfloat16 scale is
exact in all readers, and rows are divided by the scale as stored.

**Error.** For every finite x of a row with scale s, |code · s - x| ≤ 2^-4 · |x| + 2^-10 · s: half a unit in the last place of a
4-bit significand, or half the spacing of e4m3's subnormals (relative to the row's largest magnitude, 2^-10 / 448 = 2.2e-6).

**Special rows.** A row of zeros has the scale 2^-7, as in compressed-tensors. Scales are at least 2^-126, the smallest normal
bfloat16: smaller ones could be flushed to zero.

fp8-block: 8-bit weights with a scale for each block of 128 by 128, like compressed-tensors' FP8_BLOCK.

    X.weight        F8_E4M3 [rows, cols]                 codes, to be multiplied by their block's scale
    X.weight_scale  BF16 [ceil(rows / 128), cols / 128]  largest magnitude of the block / 448

Activations are quantised at run time, in groups of 128, so no loader can run a matrix of another width. The last block of
rows may be smaller: compressed-tensors and transformers read it. vLLM does not where it joins or splits such matrices.

**Error.** As fp8-dynamic, with s the scale of the block: |code · s - x| ≤ 2^-4 · |x| + 2^-10 · s. Scales are bfloat16 for
the same reason, and special blocks are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.compressed_tensors.encoding import compressed
from weightsmith._models.formats.numbers import bf16_scales, maxima_of
from weightsmith.abc.stored import Bytes, Rows

SIDE = 128
_FORMAT = "float-quantized"
_FLOAT8 = {"num_bits": 8, "type": "float"}


def _fill_rows(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    _fill(rows, outs, 1, rows.shape[1])


def _fill_blocks(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    _fill(rows, outs, SIDE, SIDE)


def _fill(rows: Rows, outs: Sequence[Bytes], high: int, wide: int) -> None:
    """Encode blocks of high by wide elements. NaN stays NaN; a block with an infinity becomes zeros and NaN."""
    from weightsmith._kernels.codes import quantise_float8

    scales = bf16_scales(maxima_of(rows, high, wide), 448, outs[1])
    quantise_float8(rows.reshape(-1), rows.shape[1], high, wide, scales, outs[0])


DYNAMIC = compressed(
    "fp8-dynamic", _FORMAT, {**_FLOAT8, "strategy": "channel"}, _fill_rows, activations={**_FLOAT8, "strategy": "token"}
)
BLOCK = compressed(
    "fp8-block",
    _FORMAT,
    {**_FLOAT8, "strategy": "block", "block_structure": [SIDE, SIDE]},
    _fill_blocks,
    activations={**_FLOAT8, "strategy": "group", "group_size": SIDE},
)
