"""Methods of inner products, with references that work on whole tensors and know no Gram matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.cases.case import Case, deltas, f64


def unit(x: np.ndarray) -> np.ndarray:
    """x / |x|; zeros stay zeros."""
    norm = np.linalg.norm(x)
    return x / norm if norm > 0 else x


def angle(u: np.ndarray, v: np.ndarray) -> float:
    """Between unit vectors, accurate for small angles too."""
    return float(2 * np.arctan2(np.linalg.norm(u - v), np.linalg.norm(u + v)))


def log_map(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The tangent at u that points to v, as long as their angle. For opposite vectors none is preferred: zeros."""
    theta = angle(u, v)
    if theta < 1e-12 or theta > np.pi - 1e-6:
        return np.zeros_like(u)
    return theta / np.sin(theta) * (v - np.sum(u * v) * u)


def exp_map(u: np.ndarray, tangent: np.ndarray) -> np.ndarray:
    """The point at the end of the arc that begins at u with this tangent."""
    size = np.linalg.norm(tangent)
    return unit(np.cos(size) * u + np.sin(size) * unit(tangent))


def walk(u: np.ndarray, units: Sequence[np.ndarray], shares: Sequence[float], steps: int, tol: float) -> np.ndarray:
    """Steps to the Karcher mean."""
    for _ in range(steps):
        tangent = np.sum([a * log_map(u, v) for a, v in zip(shares, units, strict=True)], axis=0)
        if np.linalg.norm(tangent) <= tol:
            break
        u = exp_map(u, tangent)
    return u


def nlerp(xs: Sequence[np.ndarray], weights: Sequence[float], steps: int = 0) -> np.ndarray:
    """multislerp of vectors, tensors of any shape; with steps towards the weighted Karcher mean."""
    direction = np.sum([w * unit(x) for w, x in zip(weights, xs, strict=True)], axis=0)
    if np.linalg.norm(direction) <= 1e-8:
        return np.sum([w * x for w, x in zip(weights, xs, strict=True)], axis=0)
    u = walk(unit(direction), [unit(x) for x in xs], np.array(weights) / sum(weights), steps, 0.0)
    return u * abs(sum(w * np.linalg.norm(x) for w, x in zip(weights, xs, strict=True)))


def karcher(xs: Sequence[np.ndarray], max_iter: int = 10, tol: float = 1e-5) -> np.ndarray:
    units = [unit(x) for x in xs if x.any()]
    if not units:
        return xs[0]
    shares = [1 / len(units)] * len(units)
    mean = np.mean(units, axis=0)
    start = unit(mean) if np.linalg.norm(mean) > tol else units[0]
    return walk(start, units, shares, max_iter, tol) * np.mean([np.linalg.norm(x) for x in xs])


def stock(base: np.ndarray, ds: Sequence[np.ndarray], pooled: bool = False) -> np.ndarray:
    n = len(ds)
    pairs = [(a, b) for i, a in enumerate(ds) for b in ds[i + 1 :]]
    inner = [float(np.sum(a * b)) for a, b in pairs]
    size = [float(np.linalg.norm(a) * np.linalg.norm(b)) for a, b in pairs]
    if pooled:
        inner, size = [sum(inner)], [sum(size)]
    cosine = np.mean([i / s if s > 0 else 0.0 for i, s in zip(inner, size, strict=True)])
    t = max(0.0, n * cosine / (1 + (n - 1) * cosine)) if cosine > 0 else 0.0
    return t * np.mean([base + d for d in ds], axis=0) + (1 - t) * base


def even(ds: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """The mean of deltas, each by its weight over its norm."""
    norms = [float(np.linalg.norm(d)) for d in ds]
    shares = [w / n if n > 0 else 0.0 for w, n in zip(weights, norms, strict=True)]
    total = sum(map(abs, shares)) or 1.0
    return np.sum([s / total * d for s, d in zip(shares, ds, strict=True)], axis=0)


def stock_rows(base: np.ndarray, ds: Sequence[np.ndarray]) -> np.ndarray:
    """Each row by itself; a vector is one row."""
    if base.ndim < 2:
        return stock(base, ds)
    cols = base.shape[-1]
    rows = zip(base.reshape(-1, cols), *[d.reshape(-1, cols) for d in ds], strict=True)
    return np.stack([stock(b, d) for b, *d in rows]).reshape(base.shape)


def median(xs: Sequence[np.ndarray]) -> np.ndarray:
    """Weiszfeld's iteration until it rests; the median of an odd number of scalars."""
    if xs[0].size == 1:
        return np.median(np.stack(xs), axis=0)
    mean = np.mean(xs, axis=0)
    xs = [x - mean for x in xs]  # small numbers: rounded as they are in a model, the point would never rest
    point = np.zeros_like(mean)
    for _ in range(2000):
        distances = np.array([np.linalg.norm(x - point) for x in xs])
        if (distances < 1e-300).any():
            break
        before = point
        point = np.sum([x / d for x, d in zip(xs, distances, strict=True)], axis=0) / np.sum(1 / distances)
        if np.linalg.norm(point - before) < 1e-14 * distances.max():
            break
    return mean + point


W3 = [{"weight": 0.5}, {"weight": 0.3}, {"weight": 0.4}]
SLERP = {"normalize_weights": True, "eps": 1e-8, "karcher_steps": 0}
KARCHER = {"max_iter": 10, "tol": 1e-5}
STOCK = {"filter_wise": False, "cosine": "mean"}


def shares(*weights: float) -> list[float]:
    return [w / sum(weights) for w in weights]


def extract(arrays: Sequence[np.ndarray], alpha: float, beta: float, gamma: float) -> np.ndarray:
    """As SuperMerger's extract_super computes it."""
    (a, b), base = deltas(arrays), f64(arrays)[0]
    rows = [x.reshape(-1, x.shape[-1] if x.ndim else 1) for x in (a, b)]
    lengths = np.prod([np.maximum(np.linalg.norm(x, axis=-1), 1e-8) for x in rows], axis=0)  # torch limits each by itself
    d = (((rows[0] * rows[1]).sum(-1) / lengths + 1) / 2)[:, None] ** gamma
    mixed = (1 - alpha) * rows[0] + alpha * rows[1]
    return base + (mixed * ((1 - beta) * d + beta * (1 - d))).reshape(base.shape)


def cosine(arrays: Sequence[np.ndarray], alpha: float, form: str, low: float, high: float) -> np.ndarray:
    """As SuperMerger's cosine computes it, with the smallest and the largest similarity given."""
    a, b = f64(arrays)
    columns = [x.reshape(len(x) if x.ndim else 1, -1) for x in (a, b)]
    lengths = [np.linalg.norm(x, axis=0) for x in columns]
    cosines = (columns[0] * columns[1]).sum(0) / np.prod([np.maximum(size, 1e-8) for size in lengths], axis=0)
    whole = [x / np.maximum(size, 1e-12) for x, size in zip(columns, lengths, strict=True)] if form == "a" else columns
    size = np.linalg.norm(whole[0]) * np.linalg.norm(whole[1])
    similarity = (cosines + (np.sum(whole[0] * whole[1]) / size if size > 0 else 0)) / 2
    k = np.clip((similarity - low) / (high - low) - alpha, 0, 1)
    return (k * columns[0] + (1 - k) * columns[1]).reshape(a.shape)


CASES = (
    Case(
        "cosine", "cosine", {"alpha": 0.0, "form": "a", "low": 0.0, "high": 1.0}, [{}] * 2,
        lambda a: cosine(a, 0.0, "a", 0.0, 1.0),
    ),
    Case(
        "cosine, range", "cosine", {"alpha": 0.2, "form": "a", "low": 0.99, "high": 1.0}, [{}] * 2,
        lambda a: cosine(a, 0.2, "a", 0.99, 1.0),
    ),
    Case(
        "cosine, whole", "cosine", {"alpha": 0.1, "form": "b", "low": 0.5, "high": 1.0}, [{}] * 2,
        lambda a: cosine(a, 0.1, "b", 0.5, 1.0),
    ),
    Case(
        "extract_rows", "extract_rows", {"alpha": 0.3, "beta": 0.0, "gamma": 1.0}, [{}] * 3,
        lambda a: extract(a, 0.3, 0.0, 1.0),
    ),
    Case(
        "extract_rows, what differs", "extract_rows", {"alpha": 0.5, "beta": 0.8, "gamma": 3.0}, [{}] * 3,
        lambda a: extract(a, 0.5, 0.8, 3.0),
    ),
    Case("multislerp", "multislerp", SLERP, W3, lambda a: nlerp(f64(a), shares(0.5, 0.3, 0.4)), base=False),
    Case("multislerp, base", "multislerp", SLERP, [{}, *W3[:2]], lambda a: f64(a)[0] + nlerp(deltas(a), shares(0.5, 0.3))),
    Case(
        "multislerp, base, not normalised", "multislerp", SLERP | {"normalize_weights": False}, [{}, *W3],
        lambda a: f64(a)[0] + nlerp(deltas(a), (0.5, 0.3, 0.4)),
    ),
    Case(
        "multislerp, steps", "multislerp", SLERP | {"karcher_steps": 3}, [{}, *W3],
        lambda a: f64(a)[0] + nlerp(deltas(a), shares(0.5, 0.3, 0.4), 3),
    ),
    Case("multislerp, one", "multislerp", SLERP, W3[:1], lambda a: f64(a)[0], base=False),
    Case(
        "multislerp, base and one", "multislerp", SLERP | {"normalize_weights": False}, [{}, W3[0]],
        lambda a: f64(a)[0] + 0.5 * deltas(a)[0],
    ),
    Case("karcher", "karcher", KARCHER, [{}] * 3, lambda a: karcher(f64(a)), base=False),
    Case("karcher, one", "karcher", KARCHER, [{}], lambda a: f64(a)[0], base=False),
    Case("nan", "nan", {"lambda": 1.0}, [{}, *[{"weight": 1.0}] * 2], lambda a: f64(a)[0] + even(deltas(a), (1.0, 1.0))),
    Case(
        "nan, weights", "nan", {"lambda": 1.7}, [{}, *W3],
        lambda a: f64(a)[0] + 1.7 * even(deltas(a), [w["weight"] for w in W3]),
    ),
    Case("model_stock", "model_stock", STOCK, [{}] * 3, lambda a: stock(f64(a)[0], deltas(a))),
    Case("model_stock, four", "model_stock", STOCK, [{}] * 5, lambda a: stock(f64(a)[0], deltas(a))),
    Case(
        "model_stock, pooled", "model_stock", STOCK | {"cosine": "pooled"}, [{}] * 5,
        lambda a: stock(f64(a)[0], deltas(a), pooled=True),
    ),
    Case(
        "model_stock, rows", "model_stock", STOCK | {"filter_wise": True}, [{}] * 4,
        lambda a: stock_rows(f64(a)[0], deltas(a)),
    ),
    Case(
        "geometric_median", "geometric_median", {"max_iter": 1000, "tol": 1e-13}, [{}] * 3, lambda a: median(f64(a)),
        base=False,
    ),
)  # fmt: skip
