"""The task-vector family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.cases.case import Arrays, Case, deltas, f64
from tests.kernels import reference
from weightsmith._methods.jobs.selection import kept_ranks
from weightsmith._methods.jobs.task_vectors import random_key

GTA = {"normalize": False, "rescale": "none", "lambda": 1.0, "int8_mask": False}
MEAN = GTA | {"normalize": True}
Mask = Callable[[np.ndarray, int], np.ndarray]


def merged(
    arrays: Arrays,
    weights: Sequence[float],
    mask: Mask,
    *,
    rescale: float | str = 1.0,
    elect: bool = False,
    mean: bool = False,
    factor: float = 1.0,
) -> np.ndarray:
    """Base plus the combination of the deltas, each times `mask(delta, model)`."""
    masked = []
    for i, d in enumerate(deltas(arrays)):
        kept = d * mask(d, i)
        before, after = np.abs(d).sum(), np.abs(kept).sum()
        l1 = before / after if before >= 1e-7 and after >= 1e-7 else 1.0
        masked.append(kept * (l1 if rescale == "l1" else float(rescale)))
    return reference.merge_task_vectors(f64(arrays)[0], masked, weights, elect=elect, normalize=mean, factor=factor)


def everything(delta: np.ndarray, i: int) -> np.ndarray:
    return np.ones(delta.shape)


def largest(density: float) -> Mask:
    return lambda d, i: reference.keep_largest(d, max(1, int(density * d.size)))


def in_rows(d: np.ndarray) -> np.ndarray:
    """The rows of a delta; a vector is one row."""
    return d.reshape(-1, d.shape[-1] if d.ndim else 1)


def band(d: np.ndarray, density: float, gamma: float) -> np.ndarray:
    """Mask of a band of ranks among all elements."""
    first, end = kept_ranks(d.size, density, gamma)
    return reference.keep_largest(d, end) & ~reference.keep_largest(d, first)


def row_band(density: float, gamma: float) -> Mask:
    return lambda d, i: np.stack([band(row, density, gamma) for row in in_rows(d)]).reshape(d.shape)


def at_random(density: float) -> Mask:
    return lambda d, i: reference.random_mask(random_key(0, i, "w"), d.size, density).reshape(d.shape)


def by_rank(density: float, epsilon: float, unbiased: bool = False) -> Mask:
    """DELLA: probabilities by rank in the row; 1 / probability where kept, if unbiased."""

    def mask(d: np.ndarray, i: int) -> np.ndarray:
        rows = in_rows(d)
        n = rows.shape[1]
        words = np.array([reference.philox(random_key(0, i, "w"), j) for j in range(d.size)], np.float64).reshape(rows.shape)
        rank = np.empty(rows.shape)
        for r, row in enumerate(rows):
            rank[r, np.argsort(-np.abs(row.astype(np.float32)), kind="stable")] = np.arange(n)[::-1]
        p = density - epsilon + 2 * epsilon * (rank / (n - 1) if n > 1 else 0.5)
        kept = words < p * 2.0**32
        return (kept / p if unbiased else kept.astype(np.float64)).reshape(d.shape)

    return mask


def models(*weights: float, **parameters: float) -> list[dict[str, Any]]:
    return [{}, *[{"weight": w, **parameters} for w in weights]]


def case(name: str, method: str, shared: dict[str, Any], per_model: list[dict[str, Any]], mask: Mask, **how: Any) -> Case:
    weights = [m["weight"] for m in per_model[1:]]
    identity = how.pop("identity", True)
    return Case(name, method, shared, per_model, lambda a: merged(a, weights, mask, **how), identity=identity)


ELECTED = {"elect": True, "mean": True}
T = "task_vectors"
OPEN = {"sparsify": "none", "scope": "tensor", "rescale": "none", "elect": "none", "combine": "sum", "lambda": 1.0}


def whole_model(density: float) -> Mask:
    """The survey of a merge of one tensor is that of the tensor, with all ties kept."""

    def mask(d: np.ndarray, i: int) -> np.ndarray:
        size = np.abs(d.astype(np.float32))
        k = max(1, int(density * d.size))
        return size >= np.sort(size, axis=None)[::-1][k - 1]

    return mask


def disjoint_mean(arrays: Arrays, mask: Mask) -> np.ndarray:
    kept = np.array([d * mask(d, i) for i, d in enumerate(deltas(arrays))])
    return f64(arrays)[0] + kept.sum(0) / np.maximum((kept != 0).sum(0), 1)


def largest_alone(arrays: Arrays, weights: Sequence[float]) -> np.ndarray:
    weighted = np.array([w * d for w, d in zip(weights, deltas(arrays), strict=True)])[::-1]
    return f64(arrays)[0] + np.take_along_axis(weighted, np.abs(weighted).argmax(0)[None], 0)[0]


def in_turn(arrays: Arrays, weights: Sequence[float], keep: int, group: int) -> np.ndarray:
    """CABS: groups of neighbours in a row, models in turn."""
    total, free = f64(arrays)[0], np.ones(arrays[0].shape, bool)
    for w, d in zip(weights, deltas(arrays), strict=True):
        mask = np.zeros(d.shape, bool)
        for row, kept, free_row in zip(in_rows(d), in_rows(mask), in_rows(free), strict=True):
            for start in range(0, row.size, group):
                part = np.where(free_row[start : start + group], row[start : start + group], 0)
                quota = -(-keep * part.size // group)
                kept[start : start + group] = reference.keep_largest(part, quota) & (part != 0)
                free_row[start : start + group] &= ~kept[start : start + group]
        total = total + w * np.where(mask, d, 0.0)
    return total


def voted(arrays: Arrays) -> np.ndarray:
    """One vote a model, then the mean of those that agree."""
    ds = np.array(deltas(arrays))
    sign = np.where(np.sign(ds).sum(0) >= 0, 1, -1)
    agree = np.sign(ds) == sign
    return f64(arrays)[0] + np.where(agree, ds, 0).sum(0) / np.maximum(agree.sum(0), 1)


CASES = (
    Case(
        "task_arithmetic", "task_arithmetic", GTA | {"lambda": 0.8}, models(0.7, -0.2),
        lambda a: merged(a, [0.7, -0.2], everything, factor=0.8), ulp=0.51,
    ),
    Case(
        "task_arithmetic, mean", "task_arithmetic", MEAN, models(0.7, -0.2),
        lambda a: merged(a, [0.7, -0.2], everything, mean=True), ulp=0.51,
    ),
    case("ties", "ties", MEAN, models(1.0, 0.5, density=0.5), largest(0.5), **ELECTED),
    case("ties, sum", "ties", GTA | {"lambda": 0.4}, models(0.3, 0.3, -0.6, density=0.2), largest(0.2), elect=True, factor=0.4),
    case("ties, untrimmed", "ties", MEAN, models(1.0, 0.5, density=1.0), everything, **ELECTED),
    case("ties, rows", "ties", MEAN | {"scope": "row"}, models(1.0, 0.5, density=0.3), row_band(0.3, 0.0), **ELECTED),
    case("ties, model", "ties", MEAN | {"scope": "model"}, models(1.0, 0.5, density=0.2), whole_model(0.2), **ELECTED),
    case("ties, negative", "ties", MEAN, models(0.3, 0.6, -0.9, density=0.5), largest(0.5), **ELECTED),
    case("ties, five", "ties", MEAN, models(1, 1, 1, 1, 1, density=0.2), largest(0.2), **ELECTED),
    case("ties, one", "ties", MEAN, models(1.0, density=0.4), largest(0.4), **ELECTED),
    case("dare_linear", "dare_linear", GTA | {"rescale": "l1"}, models(0.6, 0.6, density=0.3), at_random(0.3), rescale="l1"),
    case(
        "dare_ties", "dare_ties", GTA | {"rescale": "inv_density"}, models(0.6, 0.6, density=0.3), at_random(0.3),
        rescale=1 / 0.3, elect=True,
    ),
    case(
        "dare_ties, mean", "dare_ties", MEAN | {"rescale": "l1"}, models(0.6, 0.6, density=0.7), at_random(0.7),
        rescale="l1", **ELECTED,
    ),
    case(
        "della", "della", MEAN | {"rescale": "l1"}, models(1.0, 0.5, density=0.5, epsilon=0.2), by_rank(0.5, 0.2),
        rescale="l1", **ELECTED,
    ),
    case(
        "della, unbiased", "della", MEAN | {"rescale": "inv_probability"}, models(1.0, 0.5, density=0.7, epsilon=0.1),
        by_rank(0.7, 0.1, True), **ELECTED,
    ),
    case("della_linear", "della_linear", GTA, models(0.6, 0.6, density=0.5, epsilon=0.2), by_rank(0.5, 0.2)),
    case("breadcrumbs", "breadcrumbs", GTA, models(0.6, 0.5, density=0.4, gamma=0.05), lambda d, i: band(d, 0.4, 0.05)),
    case(
        "breadcrumbs, rows", "breadcrumbs", GTA | {"scope": "row"}, models(0.6, 0.5, density=0.15, gamma=0.02),
        row_band(0.15, 0.02),
    ),
    case("breadcrumbs, no outliers", "breadcrumbs", GTA, models(0.6, density=0.5, gamma=0.0), largest(0.5)),
    case(
        "breadcrumbs_ties", "breadcrumbs_ties", MEAN, models(0.6, 0.5, density=0.9, gamma=0.01),
        lambda d, i: band(d, 0.9, 0.01), **ELECTED,
    ),
    case("task_vectors", T, OPEN, models(0.6, 0.5, density=1.0), everything),
    Case(
        "task_vectors, voted", T, OPEN | {"elect": "count", "combine": "disjoint_mean"}, models(1, 1, 1, density=1.0), voted,
    ),
    Case("cabs", "cabs", {"lambda": 1.0}, models(1.2, 0.7, density=0.25, group=16), lambda a: in_turn(a, [1.2, 0.7], 4, 16)),
    Case(
        "cabs, nothing of one", "cabs", {"lambda": 1.0},
        [*models(1.2, density=0.25, group=16), *models(0.7, density=0.0, group=16)[1:]],
        lambda a: in_turn(a[:2], [1.2], 4, 16),
    ),
    Case("magmax", "magmax", {"lambda": 1.0}, models(1.0, -0.5, 2.0), lambda a: largest_alone(a, [1.0, -0.5, 2.0])),
    Case(
        "localize_and_stitch", "localize_and_stitch", {"scope": "model", "embeddings": False, "lambda": 1.0},
        models(1.0, 1.0, density=0.3),
        lambda a: disjoint_mean(a, whole_model(0.3)),
    ),
)  # fmt: skip
