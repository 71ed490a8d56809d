"""int8: 8-bit integers with a scale for each output channel, like compressed-tensors' W8A8.

    X.weight        I8 [rows, cols]   codes -128 … 127, to be multiplied by their row's scale
    X.weight_scale  BF16 [rows, 1]    largest magnitude of the row / 127.5

Activations are quantised at run time, per token. Scales are bfloat16, as in `fp8_dynamic`, and rows are divided by the scale
as stored, in float32: division in bfloat16 changes one code in eleven.

**Error.** For every finite x of a row with scale s, |code · s - x| ≤ s. Half a step, except for the largest positive elements:
127.5 steps, or 128 if the scale was rounded down, become 127.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from weightsmith.encodings.base import Bytes, Rows
from weightsmith.encodings.matrices import MatrixEncoding, beside, bf16_scales, maxima_of, quantization_config
from weightsmith.tensors import DTYPES, TensorSpec

_INT8 = {"num_bits": 8, "type": "int"}


def _parts(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """Codes and scales.

    >>> for out in ENCODING.outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 32))):
    ...     print(out)
    q_proj.weight [64, 32] I8
    q_proj.weight_scale [64, 1] BF16
    """
    return TensorSpec(spec.name, DTYPES["I8"], spec.shape), beside(spec, "_scale", "BF16", spec.shape[0], 1)


def _fill(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    """NaN becomes 0."""
    from weightsmith.kernels.codes import quantise_integers

    cols = rows.shape[1]
    scales = bf16_scales(maxima_of(rows, 1, cols), 127.5, outs[1])
    quantise_integers(rows.reshape(-1), cols, scales, 8, 0, outs[0])


_config = partial(quantization_config, "int-quantized", {**_INT8, "strategy": "channel"}, {**_INT8, "strategy": "token"})

ENCODING = MatrixEncoding("int8", _parts, _fill, _config)
