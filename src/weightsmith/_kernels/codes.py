"""Rows to small codes with scales: integers of 4 and 8 bits, 4-bit floats (E2M1), and affine codes.

A group is a run of elements of one row that share a scale. All functions take flat rows, in which groups follow each other
without gaps, so they see groups alone; two 4-bit codes are in one byte, the first in the low half. Codes are x / scale,
divided in float32 and rounded to nearest even, and held to the range. A NaN becomes the code of 0.
"""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.jit import kernel

_ROUND = np.float32(1.5 * 2.0**23)
"""Adding it and taking it away again rounds a small float32 to the nearest integer, ties to even."""


@kernel
def quantise_integers(rows: np.ndarray, group: int, scales: np.ndarray, bits: int, offset: int, codes: np.ndarray) -> None:
    """codes = rows / scales as integers of -2^(bits - 1) … 2^(bits - 1) - 1, plus `offset`.

    rows    float32 [n]
    group   elements that share a scale; even for 4 bits
    scales  float32 [n / group], positive
    bits    8 or 4
    codes   uint8 [n · bits / 8]: the low byte or half byte of each
    """
    low, high = np.float32(-(1 << (bits - 1))), np.float32((1 << (bits - 1)) - 1)
    whole = np.empty(group, np.uint8)
    for g in range(scales.size):
        scale, row = scales[g], rows[g * group : (g + 1) * group]
        for j in range(group):
            q = row[j] / scale
            q = high if q > high else q
            q = low if q < low else q
            q = q if q == q else np.float32(0)
            whole[j] = np.uint8(np.int32((q + _ROUND) - _ROUND) + np.int32(offset))
        _store(whole, bits, g * group, codes)


@kernel
def quantise_float4(rows: np.ndarray, group: int, scales: np.ndarray, codes: np.ndarray) -> None:
    """codes = rows / scales as E2M1: nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code.

    rows    float32 [n]
    group   elements that share a scale, an even number
    scales  float32 [n / group], positive
    codes   uint8 [n / 2]
    """
    whole = np.empty(group, np.uint8)
    for g in range(scales.size):
        scale, row = scales[g], rows[g * group : (g + 1) * group]
        for j in range(group):
            q = row[j] / scale
            a = abs(q)
            code = np.uint8(a > np.float32(0.25)) + np.uint8(a >= np.float32(0.75)) + np.uint8(a > np.float32(1.25))
            code += np.uint8(a >= np.float32(1.75)) + np.uint8(a > np.float32(2.5)) + np.uint8(a >= np.float32(3.5))
            code += np.uint8(a > np.float32(5))
            whole[j] = np.uint8(code) + (np.uint8(8) if q < np.float32(0) else np.uint8(0))
        _store(whole, 4, g * group, codes)


@kernel
def quantise_affine(rows: np.ndarray, group: int, scales: np.ndarray, biases: np.ndarray, bits: int, codes: np.ndarray) -> None:
    """codes = (rows - biases) / scales as integers of 0 … 2^bits - 1.

    rows            float32 [n]
    group           elements that share scale and bias; even for 4 bits
    scales, biases  float32 [n / group]; scales are not zero
    bits            8 or 4
    codes           uint8 [n · bits / 8]
    """
    high = np.float32((1 << bits) - 1)
    whole = np.empty(group, np.uint8)
    for g in range(scales.size):
        scale, bias, row = scales[g], biases[g], rows[g * group : (g + 1) * group]
        for j in range(group):
            q = (row[j] - bias) / scale
            q = high if q > high else q
            q = np.float32(0) if q < np.float32(0) else q
            q = q if q == q else np.float32(0)
            whole[j] = np.uint8(np.int32((q + _ROUND) - _ROUND))
        _store(whole, bits, g * group, codes)


@kernel
def _store(whole: np.ndarray, bits: int, first: int, codes: np.ndarray) -> None:
    """Codes of `whole`, from element `first` on."""
    if bits == 8:
        codes[first : first + whole.size] = whole
    else:
        for j in range(whole.size // 2):
            codes[first // 2 + j] = (whole[2 * j] & np.uint8(15)) | np.uint8(whole[2 * j + 1] << np.uint8(4))
