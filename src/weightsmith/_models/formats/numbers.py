"""Scales and small numbers that several formats store."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightsmith._base.tensors import DTYPES
from weightsmith.abc.stored import Bytes

NVFP4_GROUP, MXFP4_GROUP = 16, 32
"""Elements of a row that share a scale: a float8 (E4M3), or a power of two."""

_SCALE_OF_ZEROS = np.float32(2.0**-7)
_SMALLEST_SCALE = np.float32(2.0**-126)


def powers_of_two(exponents: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The scales that MX formats store (E8M0): 2^(exponent - 127), and NaN for 255: float32 [n].

    >>> powers_of_two(np.array([126, 127, 255], np.uint8)).tolist()
    [0.5, 1.0, nan]
    """
    powers = np.ldexp(np.float32(1), np.minimum(exponents, 254).astype(np.int32) - 127)
    return np.where(exponents == 255, np.float32(np.nan), powers).astype(np.float32)


def bf16_scales(maxima: npt.NDArray[np.float32], levels: float, stored: Bytes) -> npt.NDArray[np.float32]:
    """Write maxima / levels as bfloat16, and return these scales as they are stored: float32 [n].

    transformers casts scales to the dtype in which a model is loaded, so only a bfloat16 scale is the same in all readers. The
    scale of zeros is 2^-7, as in compressed-tensors; others are at least 2^-126, since smaller ones could be flushed to zero.
    """
    from weightsmith._kernels import codecs

    scales: npt.NDArray[np.float32] = np.maximum(maxima / np.float32(levels), _SMALLEST_SCALE)
    scales[maxima == 0] = _SCALE_OF_ZEROS
    bf16 = DTYPES["BF16"].code
    codecs.encode(scales, scales.size, bf16, 0, stored)
    codecs.decode(stored, bf16, 0, scales.size, scales)
    return scales


def maxima_of(rows: npt.NDArray[np.float32], high: int, wide: int) -> npt.NDArray[np.float32]:
    """The largest magnitude of each block of rows [n, cols]: float32 [blocks], in row-major order."""
    from weightsmith._kernels.codes import block_maxima

    n, cols = rows.shape
    maxima = np.empty(-(-n // high) * -(-cols // wide), np.float32)
    block_maxima(rows.reshape(-1), cols, high, wide, maxima)
    return maxima
