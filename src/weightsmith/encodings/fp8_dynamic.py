"""fp8-dynamic: 8-bit weights with a scale for each output channel, like compressed-tensors' FP8_DYNAMIC.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from weightsmith.encodings.base import Bytes, Rows
from weightsmith.encodings.matrices import MatrixEncoding, beside, bf16_scales, maxima_of, quantization_config
from weightsmith.tensors import DTYPES, TensorSpec

_FLOAT8 = {"num_bits": 8, "type": "float"}


def _parts(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """Codes and scales.

    >>> for out in ENCODING.outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 32))):
    ...     print(out)
    q_proj.weight [64, 32] F8_E4M3
    q_proj.weight_scale [64, 1] BF16
    """
    return TensorSpec(spec.name, DTYPES["F8_E4M3"], spec.shape), beside(spec, "_scale", "BF16", spec.shape[0], 1)


def _fill(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    """NaN stays NaN; a row with an infinity becomes zeros and NaN."""
    from weightsmith.kernels import fp8

    cols = rows.shape[1]
    scales = bf16_scales(maxima_of(rows, 1, cols), 448, outs[1])
    fp8.quantise(rows.reshape(-1), cols, 1, cols, scales, outs[0])


_config = partial(quantization_config, "float-quantized", {**_FLOAT8, "strategy": "channel"}, {**_FLOAT8, "strategy": "token"})

ENCODING = MatrixEncoding("fp8-dynamic", _parts, _fill, _config)
