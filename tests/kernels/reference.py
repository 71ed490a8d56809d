"""Slow, obvious twins of kernels, in numpy. Tests hold the kernels to these; nothing else uses them.

Kernels whose reference is a formula of a method have theirs in `tests/cases`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Row32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]


def combine(inputs: Sequence[Array], coefficients: Sequence[float]) -> Array:
    """Σ coefficients[i] · inputs[i]."""
    total = np.zeros_like(inputs[0])
    for x, c in zip(inputs, coefficients, strict=True):
        total += c * x
    return total


def slerp(a: Array, b: Array, t: float, *, lerp_above: float = 0.9995) -> Array:
    """Spherical interpolation of two tensors as vectors; linear when |cos| > lerp_above."""
    u, v = a.ravel(), b.ravel()
    nu, nv = np.linalg.norm(u), np.linalg.norm(v)
    c = np.clip((u / (nu if nu > 1e-8 else 1)) @ (v / (nv if nv > 1e-8 else 1)), -1, 1)
    if abs(c) > lerp_above:
        return (1 - t) * a + t * b
    theta = np.arccos(c)
    result: Array = (np.sin((1 - t) * theta) * a + np.sin(t * theta) * b) / np.sin(theta)
    return result


def nuslerp(a: Array, b: Array, t: float, *, axis: int | None = None) -> Array:
    """Spherical interpolation of whole tensors (axis None), or of every vector along `axis`."""
    if axis is None:
        return nuslerp(a.reshape(1, -1), b.reshape(1, -1), t, axis=1).reshape(a.shape)
    norm_a = np.maximum(np.sqrt((a * a).sum(axis, keepdims=True)), 1e-7)
    norm_b = np.maximum(np.sqrt((b * b).sum(axis, keepdims=True)), 1e-7)
    c = np.clip((a * b).sum(axis, keepdims=True) / (norm_a * norm_b), -1, 1)
    flat = 1 - c * c <= 1e-16
    theta = np.arccos(np.where(flat, 0.0, c))
    round_ = (np.sin((1 - t) * theta) * a + np.sin(t * theta) * b) / np.sin(theta)
    return np.where(flat, (1 - t) * a + t * b, round_)


def keep_largest(delta: Array, k: int) -> npt.NDArray[np.bool_]:
    """Mask of the k largest magnitudes (compared as float32); of equal ones those with the lower flat index."""
    order = np.argsort(-np.abs(delta.ravel().astype(np.float32)), kind="stable")
    mask = np.zeros(delta.size, bool)
    mask[order[:k]] = True
    return mask.reshape(delta.shape)


def philox(key: int, index: int) -> int:
    """The random word of element `index`: Philox4x32-10, arranged as in `_kernels/randomness.py`."""
    counter = 64 * (index // 256) + index % 64
    x = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(p1 >> 32) ^ x[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ x[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x[index // 64 % 4]


def random_mask(key: int, size: int, density: float) -> npt.NDArray[np.bool_]:
    """True where the element is kept."""
    return np.array([philox(key, i) < round(density * 2.0**32) for i in range(size)], bool)


def merge_task_vectors(
    base: Array,
    deltas: Sequence[Array],
    weights: Sequence[float],
    *,
    elect: bool,
    normalize: bool,
    factor: float,
) -> Array:
    """Base plus the combination of (masked, rescaled) deltas."""
    weighted = [w * d for w, d in zip(weights, deltas, strict=True)]
    total = combine(weighted, [1.0] * len(weighted))
    if not elect:
        whole = sum(weights)
        return base + factor * total / (whole if normalize and abs(whole) >= 1e-8 else 1.0)
    sign = np.where(total >= 0, 1.0, -1.0)
    mixed, divisor = np.zeros_like(base), np.zeros_like(base)
    for d, w in zip(weighted, weights, strict=True):
        agree = np.sign(d) == sign
        mixed += np.where(agree, d, 0.0)
        divisor += np.where(agree, abs(w), 0.0)
    if normalize:
        mixed /= np.where(divisor == 0, 1.0, divisor)
    return base + factor * mixed


def quantise_fp8(rows: Row32, scales: Row32, block: tuple[int, int]) -> Codes:
    """float8_e4m3fn codes [n, cols] of rows [n, cols] over the scales of blocks: in float32, held to ±448, to nearest even."""
    import ml_dtypes

    quotients = np.clip(rows / _spread(scales, rows.shape, block), np.float32(-448), np.float32(448))
    codes: Codes = quotients.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes


def packed(codes: Codes, bits: int) -> Codes:
    """Bytes of codes [n]: as they are, or two 4-bit codes in one byte, the first in the low half."""
    if bits == 8:
        return codes
    halves: Codes = (codes[0::2] & 15) + 16 * (codes[1::2] & 15)
    return halves


def quantise_integers(rows: Row32, scales: Row32, bits: int, offset: int) -> Codes:
    """Packed codes of rows [groups, group] over scales [groups]: integers, plus `offset`."""
    top = 2 ** (bits - 1)
    quotients = np.nan_to_num(np.clip(rows / scales[:, None], -top, top - 1), nan=0)
    return packed((np.rint(quotients).astype(np.int64) + offset).astype(np.uint8).reshape(-1), bits)


def quantise_float4(rows: Row32, scales: Row32) -> Codes:
    """Packed E2M1 codes of rows [groups, group] over scales [groups]: the nearest value, ties to the even code."""
    quotients = rows / scales[:, None]
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
    distance = np.abs(np.nan_to_num(np.minimum(np.abs(quotients), 6), nan=0).astype(np.float64)[..., None] - values)
    nearest = distance == distance.min(-1, keepdims=True)
    even = np.arange(8) % 2 == 0
    code = np.where(nearest.sum(-1) > 1, (nearest & even).argmax(-1), nearest.argmax(-1))
    return packed((code + 8 * (quotients < 0)).astype(np.uint8).reshape(-1), 4)


def quantise_affine(rows: Row32, scales: Row32, biases: Row32, bits: int) -> Codes:
    """Packed codes of rows [groups, group]: (rows - biases) / scales, integers from 0."""
    quotients = np.clip((rows - biases[:, None]) / scales[:, None], 0, 2**bits - 1)
    return packed(np.rint(np.nan_to_num(quotients, nan=0)).astype(np.uint8).reshape(-1), bits)


def group_costs(rows: Row32, scales: Row32, zeros: Row32, bits: int, costs: Row32) -> np.ndarray:
    """The weighted squares of the errors of groups, float64: rows and costs [groups, group], scales and zeros [groups]."""
    codes = np.clip(np.rint(rows / scales[:, None]) + zeros[:, None], 0, 2**bits - 1)
    errors = (rows - (codes - zeros[:, None]) * scales[:, None]).astype(np.float64)
    return (costs.astype(np.float64) * errors * errors).sum(1)


def block_maxima(rows: Row32, block: tuple[int, int]) -> Row32:
    """The largest magnitude of each block of rows [n, cols]; NaN does not count."""
    (n, cols), (high, wide) = rows.shape, block
    padded = np.zeros((-(-n // high) * high, -(-cols // wide) * wide), rows.dtype)
    padded[:n, :cols] = np.where(np.isnan(rows), 0, np.abs(rows))
    maxima: Row32 = padded.reshape(-1, high, padded.shape[1] // wide, wide).max((1, 3))
    return maxima


def dequantise(codes: Codes, table: Row32, scales: Row32, block: tuple[int, int]) -> Row32:
    """float32 [rows, cols] of codes [rows, cols], not packed: the value of each code · the scale of its block."""
    return table[codes] * _spread(scales, codes.shape, block)


def _spread(scales: Row32, shape: tuple[int, ...], block: tuple[int, int]) -> Row32:
    """The scale of each element."""
    spread: Row32 = scales.repeat(block[0], 0)[: shape[0]].repeat(block[1], 1)[:, : shape[1]]
    return spread


def difference(a: Array, b: Array) -> list[float]:
    """Σ a², Σ a·d, Σ d², elements with d ≠ 0, the largest |d|; d = b - a."""
    d = b - a
    return [float((a * a).sum()), float((a * d).sum()), float((d * d).sum()), float((d != 0).sum()), float(np.abs(d).max())]


def sparse_sketch(rows: Array, signs: Row32, shifts: npt.NDArray[np.int64], width: int) -> Array:
    """The rows times a sparse matrix of signs: column j goes to column (j mod width + shift of its chunk) mod width."""
    sketch = np.zeros((len(rows), width))
    for row_signs, moved in zip(signs, shifts, strict=True):
        for j in range(rows.shape[1]):
            sketch[:, (j % width + moved[j // width]) % width] += row_signs[j] * rows[:, j]
    return sketch


def statistics(x: Array) -> list[float]:
    """Σ x, Σ x², smallest, largest, zeros, NaN, infinities; sums and extremes of finite elements."""
    good = x[np.isfinite(x)]
    low, high = (float(good.min()), float(good.max())) if good.size else (np.inf, -np.inf)
    zeros, nans, infinities = float((good == 0).sum()), float(np.isnan(x).sum()), float(np.isinf(x).sum())
    return [float(good.sum()), float((good * good).sum()), low, high, zeros, nans, infinities]


def agreement(deltas: Sequence[Array], limits: Sequence[float]) -> list[int]:
    """Elements where two or more deltas are not zero; where two signs differ; where both of a pair, i <= j, are large."""
    signs = np.sign(np.stack(deltas))
    large = [(np.abs(d) >= limit) & (d != 0) for d, limit in zip(deltas, limits, strict=True)]
    counts = [int((np.abs(signs).sum(0) > 1).sum()), int(((signs > 0).any(0) & (signs < 0).any(0)).sum())]
    return counts + [int((large[i] & large[j]).sum()) for i in range(len(large)) for j in range(i, len(large))]


def survival(merged: Array, delta: Array) -> list[float]:
    """Σ d², Σ min(|m|, |d|)² where signs agree, elements with d ≠ 0, with the other sign in m, with m = 0, Σ (m - d)²."""
    less = np.minimum(np.abs(merged), np.abs(delta))
    agree = merged * delta > 0
    counts = [float(x.sum()) for x in (delta != 0, merged * delta < 0, (delta != 0) & (merged == 0))]
    return [float((delta**2).sum()), float((less[agree] ** 2).sum()), *counts, float(((merged - delta) ** 2).sum())]
