"""mxfp4: 4-bit floats with a power of two for each 32 elements of a row, like compressed-tensors' MXFP4A16.

    X.weight_packed  U8 [rows, cols / 2]   E2M1 codes, two in a byte, the first in the low half
    X.weight_scale   U8 [rows, cols / 32]  exponents e: the scale is 2^(e - 127)

The scale is a quarter of the largest magnitude of the group, rounded down to a power of two, or up if the magnitude's
significand is at least 1.75. So the largest element is 3.5 … 7 scales.

**Error.** With scale s, |value - x| ≤ max(s / 4, |x| / 5) for every finite x: the spacing of E2M1 is s / 2 up to 2 s, and what
lies between 6 s and 7 s becomes 6 s. (Groups below 2^-124 have the scale 2^-126.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from weightsmith.encodings.base import Bytes, Rows
from weightsmith.encodings.matrices import MatrixEncoding, beside, maxima_of, quantization_config
from weightsmith.tensors import TensorSpec

GROUP = 32


def _parts(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """Codes and exponents.

    >>> from weightsmith.tensors import DTYPES
    >>> for out in ENCODING.outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 32))):
    ...     print(out)
    q_proj.weight_packed [64, 16] U8
    q_proj.weight_scale [64, 1] U8
    """
    rows, cols = spec.shape
    return beside(spec, "_packed", "U8", rows, cols // 2), beside(spec, "_scale", "U8", rows, cols // GROUP)


def _fill(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    """NaN becomes 0."""
    from weightsmith.kernels.codes import quantise_float4

    bits = maxima_of(rows, 1, GROUP).view(np.uint32)
    exponents = (bits >> 23).astype(np.int64) + ((bits & 0x7FFFFF) >= 0x600000) - 2
    exponents = np.clip(exponents, 1, 254)
    outs[1][:] = exponents
    scales = (exponents.astype(np.uint32) << 23).view(np.float32)
    quantise_float4(rows.reshape(-1), GROUP, scales, outs[0])


_DTYPES = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP, **_DTYPES}
_config = partial(quantization_config, "mxfp4-pack-quantized", _WEIGHTS, None)

ENCODING = MatrixEncoding("mxfp4", _parts, _fill, _config, group=GROUP)
