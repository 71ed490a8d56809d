"""nvfp4a16: 4-bit floats with a scale for each 16 elements of a row, like compressed-tensors' NVFP4A16.

    X.weight_packed        U8 [rows, cols / 2]        E2M1 codes, two in a byte, the first in the low half
    X.weight_scale         F8_E4M3 [rows, cols / 16]  local scales: e4m3(global · largest magnitude of the group / 6)
    X.weight_global_scale  F32 [1]                    448 · 6 / largest magnitude of the weight

An element is code · local / global. The global scale needs the largest magnitude of the whole weight before its first row is
encoded: the product `magnitudes` finds it. Weights that engines join into one (query, key and value; gate and up) have the
largest magnitude of all.

**Error.** With s = local / global, |value - x| ≤ max(s / 4, |x| / 3) for every finite x: the spacing of E2M1 is s / 2 up to 2
s and a third of the value above, and a local scale that was rounded down leaves the largest elements beyond 6 s, most where it
is subnormal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from weightsmith.encodings.base import Bytes, Rows
from weightsmith.encodings.matrices import MatrixEncoding, beside, maxima_of, quantization_config
from weightsmith.tensors import DTYPES, TensorSpec

GROUP = 16
_LARGEST = np.float32(448 * 6)
_SCALE_OF_ZEROS = np.float32(0.125)
"""compressed-tensors' scale where the quotient is rounded to zero: e4m3's epsilon."""


def _parts(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """Codes, local scales and the global scale.

    >>> for out in ENCODING.outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 32))):
    ...     print(out)
    q_proj.weight_packed [64, 16] U8
    q_proj.weight_scale [64, 2] F8_E4M3
    q_proj.weight_global_scale [1] F32
    """
    rows, cols = spec.shape
    return (
        beside(spec, "_packed", "U8", rows, cols // 2),
        beside(spec, "_scale", "F8_E4M3", rows, cols // GROUP),
        beside(spec, "_global_scale", "F32", 1),
    )


def _fill(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    """NaN becomes 0.

    numbers  float32 [1]: the largest magnitude of the weight, and of those it is joined with
    """
    from weightsmith.kernels import codecs
    from weightsmith.kernels.codes import quantise_float4

    with np.errstate(all="ignore"):
        whole = np.float32(1) if numbers[0] == 0 else min(_LARGEST / numbers[0], np.finfo(np.float32).max)
        local = np.minimum(whole * maxima_of(rows, 1, GROUP) / np.float32(6), np.float32(448))
    e4m3 = DTYPES["F8_E4M3"].code
    codecs.encode(local, local.size, e4m3, 0, outs[1])
    codecs.decode(outs[1], e4m3, 0, local.size, local)
    local[local == 0] = _SCALE_OF_ZEROS
    codecs.encode(local, local.size, e4m3, 0, outs[1])
    with np.errstate(all="ignore"):
        quantise_float4(rows.reshape(-1), GROUP, local / whole, outs[0])
    outs[2][:] = np.array([whole], "<f4").view(np.uint8)


_DTYPES = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": GROUP, **_DTYPES}
_config = partial(quantization_config, "nvfp4-pack-quantized", _WEIGHTS, None)

ENCODING = MatrixEncoding("nvfp4a16", _parts, _fill, _config, group=GROUP, whole=1, product="magnitudes")
