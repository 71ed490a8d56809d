"""4-bit floats (E2M1) with scales of groups.

nvfp4a16: 4-bit floats with a scale for each 16 elements of a row, like compressed-tensors' NVFP4A16.

    X.weight_packed        U8 [rows, cols / 2]        E2M1 codes, two in a byte, the first in the low half
    X.weight_scale         F8_E4M3 [rows, cols / 16]  local scales: e4m3(global · largest magnitude of the group / 6)
    X.weight_global_scale  F32 [1]                    448 · 6 / largest magnitude of the weight

An element is code · local / global. The global scale needs the largest magnitude of the whole weight before its first row is
encoded: the product `magnitudes` finds it. Weights that engines join into one (query, key and value; gate and up) have the
largest magnitude of all.

**Error.** With s = local / global, |value - x| ≤ max(s / 4, |x| / 3) for every finite x: the spacing of E2M1 is s / 2 up to 2
s and a third of the value above, and a local scale that was rounded down leaves the largest elements beyond 6 s, most where it
is subnormal.

mxfp4: 4-bit floats with a power of two for each 32 elements of a row, like compressed-tensors' MXFP4A16.

    X.weight_packed  U8 [rows, cols / 2]   E2M1 codes, two in a byte, the first in the low half
    X.weight_scale   U8 [rows, cols / 32]  exponents e: the scale is 2^(e - 127)

The scale is a quarter of the largest magnitude of the group, rounded down to a power of two, or up if the magnitude's
significand is at least 1.75. So the largest element is 3.5 … 7 scales.

**Error.** With scale s, |value - x| ≤ max(s / 4, |x| / 5) for every finite x: the spacing of E2M1 is s / 2 up to 2 s, and what
lies between 6 s and 7 s becomes 6 s. (Groups below 2^-124 have the scale 2^-126.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.compressed_tensors.encoding import compressed
from weightsmith._models.formats.numbers import MXFP4_GROUP, NVFP4_GROUP, maxima_of
from weightsmith.abc.stored import Bytes, Rows

_LARGEST = np.float32(448 * 6)
_SCALE_OF_ZEROS = np.float32(0.125)
"""compressed-tensors' scale where the quotient is rounded to zero: e4m3's epsilon."""


def _fill_nvfp4(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    """NaN becomes 0.

    numbers  float32 [1]: the largest magnitude of the weight, and of those it is joined with
    """
    from weightsmith._kernels import codecs
    from weightsmith._kernels.codes import quantise_float4

    with np.errstate(all="ignore"):
        whole = np.float32(1) if numbers[0] == 0 else min(_LARGEST / numbers[0], np.finfo(np.float32).max)
        local = np.minimum(whole * maxima_of(rows, 1, NVFP4_GROUP) / np.float32(6), np.float32(448))
    e4m3 = DTYPES["F8_E4M3"].code
    codecs.encode(local, local.size, e4m3, 0, outs[1])
    codecs.decode(outs[1], e4m3, 0, local.size, local)
    local[local == 0] = _SCALE_OF_ZEROS
    codecs.encode(local, local.size, e4m3, 0, outs[1])
    with np.errstate(all="ignore"):
        quantise_float4(rows.reshape(-1), NVFP4_GROUP, local / whole, outs[0])
    outs[2][:] = np.array([whole], "<f4").view(np.uint8)


def _fill_mxfp4(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    """NaN becomes 0."""
    from weightsmith._kernels.codes import quantise_float4

    bits = maxima_of(rows, 1, MXFP4_GROUP).view(np.uint32)
    exponents = (bits >> 23).astype(np.int64) + ((bits & 0x7FFFFF) >= 0x600000) - 2
    exponents = np.clip(exponents, 1, 254)
    outs[1][:] = exponents
    scales = (exponents.astype(np.uint32) << 23).view(np.float32)
    quantise_float4(rows.reshape(-1), MXFP4_GROUP, scales, outs[0])


def _weights(strategy: str, group: int, scale: str) -> dict[str, Any]:
    dtypes = {"scale_dtype": scale, "zp_dtype": scale}
    return {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": group, **dtypes}


NVFP4 = compressed(
    "nvfp4a16",
    "nvfp4-pack-quantized",
    _weights("tensor_group", NVFP4_GROUP, "torch.float8_e4m3fn"),
    _fill_nvfp4,
    scale="F8_E4M3",
    product="magnitudes",
)
MXFP4 = compressed("mxfp4", "mxfp4-pack-quantized", _weights("group", MXFP4_GROUP, "torch.uint8"), _fill_mxfp4, scale="U8")
