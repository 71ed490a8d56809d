"""Methods that look at one position at a time, and those that choose positions by a score."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import xxhash

from tests.cases.case import Arrays, Case, deltas, f64
from tests.kernels import reference


def ram(arrays: Arrays, factors: tuple[float, ...] | None, epsilon: float = 1e-5) -> np.ndarray:
    """RAM, with factors on what is active alone; None: RAM+ of mergekit with r 0.1 and alpha 0.2."""
    ds = np.array(deltas(arrays))
    active = np.abs(ds) > epsilon
    count = active.sum(0)
    if factors is None:
        shared, alone = [(active & where).reshape(len(ds), -1).sum(1) for where in (count > 1, count == 1)]
        factors = tuple(1 + 0.1 * np.clip(shared / np.maximum(alone, epsilon), 0, 0.2))
    kept = np.where(active, ds, 0.0)
    single = (kept * np.array(factors).reshape(-1, *[1] * (ds.ndim - 1))).sum(0)
    return f64(arrays)[0] + np.where(count == 1, single, kept.sum(0) / np.maximum(count, 1))


def ramplus(arrays: Arrays, rescale: float) -> np.ndarray:
    """Over the whole model, here one tensor."""
    active = np.array([np.abs(d) > 1e-5 for d in deltas(arrays)])
    count = active.sum(0)
    shared, alone = [(active & where).reshape(len(active), -1).sum(1) for where in (count > 1, count == 1)]
    return ram(arrays, tuple(1 + (rescale - 1) * np.minimum(1, shared / np.maximum(alone, 1))))


def consensus(arrays: Arrays, thresholds: tuple[float, ...], k: int, factor: float) -> np.ndarray:
    ds = np.array(deltas(arrays))
    total = ds.sum(0)
    votes = sum((np.abs(d) > t * np.abs(total - d)).astype(int) for d, t in zip(ds, thresholds, strict=True))
    return f64(arrays)[0] + factor * np.where(votes >= k, total, 0.0)


def nearswap(arrays: Arrays, t: float) -> np.ndarray:
    """As its author writes it; mergekit's floor of 1e-6 under the distance changes nothing that float32 can hold here."""
    base, other = f64(arrays)
    distance = np.abs(deltas(arrays)[0])
    u = np.clip(t / np.maximum(distance, 1e-30), 0, 1)
    return base + u * (other - base)


def trained(arrays: Arrays, factor: float) -> np.ndarray:
    """As SuperMerger's traindiff computes it."""
    base, a, b = f64(arrays)
    near, far = np.abs(b - base), np.abs(b - a)
    scale = np.where(near + far != 0, far / np.where(near + far != 0, near + far, 1), 0)
    return a + np.sign(b - base) * scale * np.abs(b - base) * (factor * 1.8)


def smoothed(arrays: Arrays, factor: float) -> np.ndarray:
    """With the filters that SuperMerger's smoothAdd calls."""
    from scipy.ndimage import gaussian_filter, median_filter

    _, a, _ = f64(arrays)
    delta = deltas(arrays)[1]
    return a + factor * (gaussian_filter(median_filter(delta, size=3), sigma=1) if delta.ndim else delta)


def spliced(arrays: Arrays, alpha: float, beta: float, axis: str) -> np.ndarray:
    """As SuperMerger's tensor and tensor2 choose rows and columns."""
    a, b = f64(arrays)
    if not a.ndim:
        return a
    along = 1 if axis == "columns" and a.ndim > 1 else 0
    n = a.shape[1] if along and a.shape[1] > 100 else a.shape[0]
    whole, piece = (a, b) if alpha + beta <= 1 else (b, a)
    first, end = (beta, alpha + beta) if alpha + beta <= 1 else (alpha + beta - 1, beta)
    result, places = whole.copy(), (slice(None),) * along + (slice(int(n * first), int(n * end)),)
    result[places] = piece[places]
    return result


def crossed(arrays: Arrays, alpha: float, tilt: float) -> np.ndarray:
    """As sd-mecha's crossover computes it."""
    a, b = f64(arrays)
    if not a.ndim:
        return (1 - alpha) * a + alpha * b
    spectra = [np.fft.rfftn(x) for x in (a, b)]
    share = crossover_filter(spectra[0].shape, alpha, tilt)
    return np.fft.irfftn((1 - share) * spectra[0] + share * spectra[1], a.shape, range(a.ndim))


def crossed_in_order(arrays: Arrays, alpha: float, tilt: float) -> np.ndarray:
    """As sd-mecha's distribution_crossover computes it; equal elements of the base in the order of their positions."""
    c, a, b = f64(arrays)
    if not a.ndim:
        return (1 - alpha) * a + alpha * b
    places = np.argsort(c, axis=None, kind="stable")
    spectra = [np.fft.rfft(x.ravel()[places]) for x in (a, b)]
    share = crossover_filter(spectra[0].shape, alpha, tilt)
    mixed = np.fft.irfft((1 - share) * spectra[0] + share * spectra[1], a.size)
    return mixed[np.argsort(places, kind="stable")].reshape(a.shape)


def crossover_filter(shape: tuple[int, ...], alpha: float, tilt: float) -> np.ndarray:
    """Their filter, of a tilt between 0 and 2."""
    gradients = []
    for axis, size in enumerate(shape):
        up, down = np.linspace(0, (size - 1) // 2, size - size // 2), np.linspace(size // 2, 1, size // 2)
        whole = axis == len(shape) - 1 or size == 1
        gradients.append(np.linspace(0, 1, size) if whole else np.concatenate([up, down]) / (size // 2))
    mesh = np.sqrt(sum(g**2 for g in np.meshgrid(*gradients, indexing="ij")) / len(shape))
    if tilt == 0:
        return (mesh.astype(np.float32) > np.float32(1 - alpha)).astype(float)
    slope = 1 / np.tan(np.pi * tilt / 2)
    constant = alpha * slope + alpha - slope if tilt <= 1 else alpha - alpha * slope
    return np.clip(mesh * slope + constant, 0, 1)


def noisy(arrays: Arrays, deviation: float) -> np.ndarray:
    """The normal number of each element's random word, by the standard library."""
    (a,) = f64(arrays)
    key = xxhash.xxh3_64_intdigest(b"weight\0noise", 0)
    normal = NormalDist().inv_cdf
    numbers = [normal((reference.philox(key, i) + 0.5) / 2**32) for i in range(a.size)]
    return a + deviation * np.reshape(numbers, a.shape)


def similar(arrays: Arrays, alpha: float, beta: float) -> np.ndarray:
    """As sd-meh's similarity_add_difference computes it."""
    c, a, b = f64(arrays)
    largest = np.maximum(np.abs(a), np.abs(b))
    s = np.where(largest > 0, (a * b / np.where(largest > 0, largest, 1) ** 2 + 1) / 2 * beta, beta)
    return (1 - s) * (a + alpha * (b - c)) + s * ((1 - alpha / 2) * a + alpha / 2 * b)


def sce(arrays: Arrays, topk: float, mask_update: bool = True) -> np.ndarray:
    ds = np.array(deltas(arrays))
    selected = np.ones(ds.shape[1:], bool)
    if topk < 1:
        variance = np.asarray(np.array(f64(arrays[1:])).var(0))
        variance[np.all(np.array(f64(arrays[1:])) == f64(arrays)[1], axis=0)] = 0
        selected = reference.keep_largest(variance, int(topk * (variance > 0).sum()))
    energy = (np.where(selected, ds, 0) ** 2).reshape(len(ds), -1).sum(1)
    shares = energy / energy.sum() if energy.sum() > 0 else np.full(len(ds), 1 / len(ds))
    sign = np.where(ds.sum(0) >= 0, 1, -1)
    agree = (np.sign(ds) == sign) & (selected | (not mask_update))
    c = shares.reshape(-1, *[1] * (ds.ndim - 1)) * agree
    return f64(arrays)[0] + (c * ds).sum(0) / np.where(c.sum(0) > 0, c.sum(0), 1)


def fusion(arrays: Arrays) -> np.ndarray:
    base, other = f64(arrays)
    rows = [x.reshape(-1, x.shape[-1] if x.ndim else 1) for x in (base, other)]
    soft = [np.exp(r - r.max(-1, keepdims=True)) for r in rows]
    q, p = [s / s.sum(-1, keepdims=True) + 1e-8 for s in soft]
    divergence = np.maximum((p * np.log(p / q)).sum(-1, keepdims=True), 0)
    importance = (np.abs(rows[1] - rows[0]) * divergence).astype(np.float32)
    low, median, high = [float(np.sort(importance, axis=None)[(k * (base.size - 1)) // 4]) for k in (1, 2, 3)]
    keep = importance.astype(np.float64) >= median + 1.5 * (high - low)
    return base + np.where(keep.reshape(base.shape), other - base, 0.0)


RAM = {"epsilon": 1e-5}
SCE = {"select_applies_to": "update", "int8_mask": False}
CONSENSUS = [{}, *[{"weight": 1.0, "threshold": t} for t in (0.4, 0.5, 0.6)]]

SPLICE = {"alpha": 0.4, "beta": 0.3, "axis": "rows"}

CASES = (
    Case("ram", "ram", RAM, [{}] * 3, lambda a: ram(a, (1.0, 1.0))),
    Case("ram, five", "ram", {"epsilon": 1e-3}, [{}] * 6, lambda a: ram(a, (1.0,) * 5, 1e-3)),
    Case("ramplus_tl", "ramplus_tl", RAM | {"r": 0.1, "alpha": 0.2}, [{}] * 3, lambda a: ram(a, None)),
    Case("ramplus", "ramplus", RAM | {"rescale": 1.2, "lambda": 1.0}, [{}] * 3, lambda a: ramplus(a, 1.2)),
    Case("consensus_ta", "consensus_ta", {"k": 2, "lambda": 0.4}, CONSENSUS, lambda a: consensus(a, (0.4, 0.5, 0.6), 2, 0.4)),
    Case(
        "consensus_ta, nobody asked", "consensus_ta", {"k": 0, "lambda": 0.4}, CONSENSUS,
        lambda a: f64(a)[0] + 0.4 * sum(deltas(a)),
    ),
    Case("nearswap", "nearswap", {"t": 1e-3}, [{}] * 2, lambda a: nearswap(a, 1e-3)),
    Case("train_difference", "train_difference", {"lambda": 1.0}, [{}] * 3, lambda a: trained(a, 1.0)),
    Case("smooth_add", "smooth_add", {"lambda": 1.0}, [{}] * 3, lambda a: smoothed(a, 1.0)),
    Case("smooth_add, half", "smooth_add", {"lambda": 0.5}, [{}] * 3, lambda a: smoothed(a, 0.5)),
    Case(
        "similarity_add", "similarity_add", {"alpha": 1.0, "beta": 1.0}, [{}] * 3, lambda a: similar(a, 1.0, 1.0)
    ),
    Case(
        "similarity_add, weak", "similarity_add", {"alpha": 0.4, "beta": 0.3}, [{}] * 3, lambda a: similar(a, 0.4, 0.3)
    ),
    Case("splice", "splice", SPLICE, [{}] * 2, lambda a: spliced(a, 0.4, 0.3, "rows")),
    Case(
        "splice, round the end", "splice", SPLICE | {"alpha": 0.7, "beta": 0.6}, [{}] * 2,
        lambda a: spliced(a, 0.7, 0.6, "rows"),
    ),
    Case("splice, columns", "splice", SPLICE | {"axis": "columns"}, [{}] * 2, lambda a: spliced(a, 0.4, 0.3, "columns")),
    Case(
        "splice, columns round the end", "splice", {"alpha": 0.7, "beta": 0.6, "axis": "columns"}, [{}] * 2,
        lambda a: spliced(a, 0.7, 0.6, "columns"),
    ),
    Case("crossover", "crossover", {"alpha": 0.4, "tilt": 0.0}, [{}] * 2, lambda a: crossed(a, 0.4, 0.0)),
    Case("crossover, soft", "crossover", {"alpha": 0.3, "tilt": 0.6}, [{}] * 2, lambda a: crossed(a, 0.3, 0.6)),
    Case("crossover, upside down", "crossover", {"alpha": 0.3, "tilt": 1.7}, [{}] * 2, lambda a: crossed(a, 0.3, 1.7)),
    Case(
        "distribution_crossover", "distribution_crossover", {"alpha": 0.4, "tilt": 0.0}, [{}] * 3,
        lambda a: crossed_in_order(a, 0.4, 0.0),
    ),
    Case(
        "distribution_crossover, soft", "distribution_crossover", {"alpha": 0.6, "tilt": 1.3}, [{}] * 3,
        lambda a: crossed_in_order(a, 0.6, 1.3),
    ),
    Case(
        "add_noise", "add_noise", {"deviation": 0.01}, [{}], lambda a: noisy(a, 0.01), base=False, identity=False,
        tensor="weight",
    ),
    Case("train_difference, reversed", "train_difference", {"lambda": -0.5}, [{}] * 3, lambda a: trained(a, -0.5)),
    Case("sce", "sce", SCE | {"select_topk": 1.0}, [{}] * 4, lambda a: sce(a, 1.0)),
    Case("sce, selected", "sce", SCE | {"select_topk": 0.1}, [{}] * 4, lambda a: sce(a, 0.1)),
    Case(
        "sce, selected for the shares", "sce", SCE | {"select_topk": 0.3, "select_applies_to": "weights"}, [{}] * 3,
        lambda a: sce(a, 0.3, mask_update=False),
    ),
    Case("arcee_fusion", "arcee_fusion", {}, [{}] * 2, fusion),
)  # fmt: skip
