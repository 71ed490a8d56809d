"""Slow, obvious twins of kernels, in numpy. Tests hold the kernels to these; nothing else uses them.

Kernels whose reference is a formula of a method have theirs in `tests/cases`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


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
    """The random word of element `index`: Philox4x32-10, arranged as in `kernels/philox.py`."""
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


def quantise_fp8(rows: npt.NDArray[np.float32], scales: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """float8_e4m3fn codes [n, cols] of rows [n, cols] over scales [n]: divided in float32, held to ±448, to nearest even."""
    import ml_dtypes

    quotients = np.clip(rows / scales[:, None], np.float32(-448), np.float32(448))
    codes: npt.NDArray[np.uint8] = quotients.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes


def dequantise_fp8(
    codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], block: tuple[int, int]
) -> npt.NDArray[np.float32]:
    """float32 [rows, cols] of codes [rows, cols]: code · the scale of the block that it is in."""
    import ml_dtypes

    rows, cols = codes.shape
    spread = scales.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :cols]
    values: npt.NDArray[np.float32] = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values * spread
