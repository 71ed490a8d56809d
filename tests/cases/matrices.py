"""The methods of whole matrices, written with numpy's SVD and plain inverses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.cases.case import Arrays, Case, deltas, f64

Array = np.ndarray
Merge = Callable[[list[Array]], Array]
OfBoth = Callable[[list[Array], list[Array]], Array]


def svd(a: Array, keep: int | None = None) -> tuple[Array, Array, Array]:
    u, s, vt = np.linalg.svd(a, full_matrices=False)
    return u[:, :keep], s[:keep], vt[:keep]


def polar(a: Array) -> Array:
    u, _, vt = svd(a)
    return u @ vt


def cut(a: Array, keep: int) -> Array:
    u, s, vt = svd(a, keep)
    return (u * s) @ vt


def tsv_m(ds: list[Array], keep: int, flatten: float = 0.0) -> Array:
    parts = [svd(d, keep) for d in ds]
    u, v = np.hstack([p[0] for p in parts]), np.vstack([p[2] for p in parts]).T
    return polar(u) @ np.diag(np.concatenate([(1 - flatten) * p[1] + flatten * p[1].mean() for p in parts])) @ polar(v).T


def iso_c(ds: list[Array], beta: float) -> Array:
    u, s, vt = svd(np.sum(ds, axis=0))
    return u @ np.diag((1 - beta) * s + beta * s.mean()) @ vt


def iso_cts(ds: list[Array], common: float) -> Array:
    rank = min(ds[0].shape)
    separate = round((rank - int(common * rank)) / len(ds))
    parts = [svd(np.sum(ds, axis=0), rank - separate * len(ds))]
    outside = np.eye(len(ds[0])) - parts[0][0] @ parts[0][0].T
    parts += [svd(outside @ d, separate) for d in ds]
    u, v = np.hstack([p[0] for p in parts]), np.vstack([p[2] for p in parts]).T
    return np.concatenate([p[1] for p in parts]).mean() * polar(u) @ polar(v).T


def star(ds: list[Array], eta: float, ranks: Sequence[int | None] = (None, None)) -> Array:
    total = np.zeros(ds[0].shape)
    for d, rank in zip(ds, ranks, strict=True):
        s = svd(d)[1][:rank]
        keep = next(k for k in range(1, len(s) + 1) if s[:k].sum() >= eta * s.sum())
        total += cut(d, keep) * (s.sum() / s[:keep].sum())
    return total / len(ds)


def wudi(ds: list[Array], raw: list[Array], ridge: float) -> Array:
    """ds are the weighted deltas, raw the deltas."""
    grams = [d.T @ d / np.sum(d * d) for d in raw]
    total = np.sum(grams, axis=0)
    epsilon = ridge * np.diag(total).mean()
    target = sum(d @ c for d, c in zip(ds, grams, strict=True))
    return np.linalg.solve(total + epsilon * np.eye(len(total)), target.T).T


def svc(raw: list[Array], weights: Sequence[float], alpha: float) -> Array:
    merged = sum(w * d for w, d in zip(weights, raw, strict=True))
    u, s, vt = svd(merged)
    out = np.zeros(merged.shape)
    for r in range(len(s)):
        repeats = []
        for d in raw:
            a = u[:, r] @ d
            repeats.append(max(alpha, float((u[:, r] @ merged) @ a / (a @ a))))
        out += len(raw) / sum(repeats) * s[r] * np.outer(u[:, r], vt[r])
    return out


def cosine(a: Array, b: Array) -> float:
    return float(np.vdot(a, b) / np.sqrt(np.vdot(a, a) * np.vdot(b, b)))


def resmerge(ds: list[Array], share: float, low: float, high: float) -> Array:
    heads = [cut(d, 1) for d in ds]
    rests = [d - h for d, h in zip(ds, heads, strict=True)]
    pairs = [(i, j) for i in range(len(ds)) for j in range(i)]
    norms = [np.linalg.norm(r) for r in rests]
    q = sum(r / n for r, n in zip(rests, norms, strict=True))
    q /= np.linalg.norm(q)
    c = np.mean([cosine(r, q) for r in rests])
    s = np.mean([cosine(rests[i], rests[j]) for i, j in pairs])
    beta = high - (high - low) * ((s + 1) / 2 + (c + 1) / 2) / 2
    base = q * np.mean(norms) * c**beta if c > 1 / np.sqrt(len(ds)) else np.mean(rests, axis=0)
    agreement = np.mean([max(0.0, cosine(heads[i], heads[j])) for i, j in pairs])
    head = np.mean(heads, axis=0)
    return base + share * agreement * np.linalg.norm(base) * head / np.linalg.norm(head)


def merged(arrays: Arrays, weights: Sequence[float], merge: OfBoth, factor: float) -> Array:
    """Base plus factor times the merge of a matrix's deltas (weighted, and as they are), or times the mean of others."""
    raw = deltas(arrays)
    ds = [w * d for w, d in zip(weights, raw, strict=True)]
    matrix = arrays[0].ndim == 2 and min(arrays[0].shape) > 1
    return f64(arrays)[0] + factor * (merge(ds, raw) if matrix else np.mean(ds, axis=0))


def case(name: str, method: str, shared: dict[str, Any], weights: list[float], merge: Merge) -> Case:
    return Case(
        name, method, shared, [{}, *[{"weight": w} for w in weights]],
        lambda a: merged(a, weights, lambda ds, raw: merge(ds), shared["lambda"]),
    )  # fmt: skip


def svc_case(name: str, alpha: float | None, weights: list[float]) -> Case:
    def reference(a: Arrays) -> Array:
        if a[0].ndim != 2:
            return f64(a)[0] + 0.9 * sum(w * d for w, d in zip(weights, deltas(a), strict=True))
        return f64(a)[0] + 0.9 * svc(deltas(a), weights, alpha or 1 / len(weights))

    return Case(name, "svc", {"alpha": alpha, "lambda": 0.9}, [{}, *[{"weight": w} for w in weights]], reference)


def unmeasured(method: str, shared: dict[str, Any], weights: list[float]) -> Case:
    """A method that looks at a text, without one: the mean of the weighted deltas."""
    return Case(
        f"{method}, no text", method, shared, [{}, *[{"weight": w} for w in weights]],
        lambda a: merged(a, weights, lambda ds, raw: np.mean(ds, axis=0), shared["lambda"]),
    )  # fmt: skip


def cart(arrays: Arrays) -> Array:
    xs = f64(arrays)
    mean = np.mean(xs, axis=0)
    if mean.ndim != 2:
        return mean
    return mean + 0.7 * sum(cut(x - mean, max(1, int(0.1 * min(x.shape)))) for x in xs)


ROTATE = {"alpha": 0.0, "centralization": 1.0}


def rotated(a: Array, b: Array, alpha: float, centre: float) -> Array:
    """As sd-mecha's first rotate computes it, with an alignment of 1: by a square matrix, however few the rows are."""
    if a.ndim < 2:
        return (1 - alpha) * a + alpha * b
    x, y = a.reshape(len(a), -1), b.reshape(len(b), -1)
    of_x, of_y = centre * x.mean(0), centre * y.mean(0)
    u, _, vt = np.linalg.svd((x - of_x).T @ (y - of_y))
    turn = u @ vt
    mixed = (1 - alpha) * (x - of_x) + alpha * (y - of_y) @ turn.T
    return (mixed @ turn + of_y).reshape(a.shape)


CASES = (
    case("tsv_m", "tsv_m", {"directions": 3, "flatten": 0.0, "lambda": 0.8}, [1.0, 0.5], lambda ds: tsv_m(ds, 3)),
    case(
        "tsv_m, all", "tsv_m", {"directions": None, "flatten": 0.0, "lambda": 1.0}, [1.0] * 3,
        lambda ds: tsv_m(ds, min(ds[0].shape) // 3),
    ),
    case("tsv_m, flat", "tsv_m", {"directions": 4, "flatten": 0.4, "lambda": 1.0}, [1.0, 0.5], lambda ds: tsv_m(ds, 4, 0.4)),
    case("iso_c", "iso_c", {"beta": 1.0, "lambda": 1.0}, [1.0, 1.0], lambda ds: iso_c(ds, 1.0)),
    case("iso_c, half", "iso_c", {"beta": 0.5, "lambda": 0.6}, [1.0, 0.5], lambda ds: iso_c(ds, 0.5)),
    case("iso_cts", "iso_cts", {"common": 0.8, "lambda": 0.7}, [1.0, 0.9, 0.8], lambda ds: iso_cts(ds, 0.8)),
    case("star", "star", {"eta": 0.4, "lambda": 1.3}, [1.0, 0.5], lambda ds: star(ds, 0.4)),
    Case(
        "star, known rank", "star", {"eta": 0.5, "lambda": 1.0},
        [{}, {"weight": 1.0, "known_rank": 6}, {"weight": 0.5, "known_rank": 9}],
        lambda a: merged(a, [1.0, 0.5], lambda ds, raw: star(ds, 0.5, [6, 9]), 1.0),
    ),
    Case(
        "wudi", "wudi", {"ridge": 0.1, "lambda": 0.7}, [{}, {"weight": 1.0}, {"weight": 0.5}],
        lambda a: merged(a, [1.0, 0.5], lambda ds, raw: wudi(ds, raw, 0.1), 0.7),
    ),
    Case(
        "wudi, more rows", "wudi", {"ridge": 0.5, "lambda": 1.0}, [{}, *[{"weight": 1.0}] * 5],
        lambda a: merged(a, [1.0] * 5, lambda ds, raw: wudi(ds, raw, 0.5), 1.0),
    ),
    svc_case("svc", None, [0.6, 0.6, 0.6]),
    svc_case("svc, shrink", 1.0, [1.0, 0.5]),
    case(
        "resmerge", "resmerge", {"head_rank": 1, "head_share": 0.2, "beta_min": 0.7, "beta_max": 1.0, "lambda": 1.0},
        [1.0, 0.5], lambda ds: resmerge(ds, 0.2, 0.7, 1.0),
    ),
    unmeasured(
        "regmean", {"alpha": 1.0, "ridge": 0.1, "prior": "none", "prior_parameters": None, "mu": 0.3, "lambda": 0.9}, [1.0, 0.5]
    ),
    unmeasured("fisher", {"floor": 0.1, "lambda": 0.9}, [1.0, 0.5]),
    Case("core_step, no text", "core_step", {"directions": 2, "step": 0.1, "damping": 3.0}, [{}] * 3, lambda a: f64(a)[0]),
    Case("rotate", "rotate", ROTATE, [{}] * 2, lambda a: rotated(*f64(a), 0.0, 1.0)),
    Case(
        "rotate, mixed", "rotate", {"alpha": 0.4, "centralization": 0.5}, [{}] * 2, lambda a: rotated(*f64(a), 0.4, 0.5)
    ),
    Case("rotate, deltas", "rotate", ROTATE, [{}] * 3, lambda a: f64(a)[0] + rotated(*deltas(a), 0.0, 1.0)),
    Case("cart", "cart", {"rank": 0.1, "lambda": 0.7}, [{}, {}, {}], cart, base=False),
)  # fmt: skip
