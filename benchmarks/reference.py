"""The benchmarked methods again, in plain numpy and float64, independent of weightsmith's code: the judge.

Each function takes whole tensors (bf16, equal shapes) and returns float64 values that were never rounded. Deltas are
taken as float32(model) - float32(base): that is exact unless the exponents are 16 bits apart, and it is part of what
the methods promise, since it decides which magnitudes are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Tensor = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]


def linear(tensors: Sequence[Tensor], weights: Sequence[float]) -> F64:
    """The weighted mean (mergekit's `normalize: true`).

    >>> linear([np.float32([1, 2]), np.float32([3, 2])], [1, 3])
    array([2.5, 2. ])
    """
    total = sum(w * t.astype(np.float64) for w, t in zip(weights, tensors, strict=True))
    return np.asarray(total / sum(weights))


def slerp(a: Tensor, b: Tensor, t: float) -> F64:
    """Spherical interpolation of two tensors as vectors; straight when they are parallel (|cos| > 0.9995).

    >>> slerp(np.float32([1, 0]), np.float32([0, 1]), 0.5).round(3)
    array([0.707, 0.707])
    """
    x, y = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(x) * np.linalg.norm(y)
    cos = float(np.clip(np.sum(x * y) / norms, -1, 1)) if norms else 1.0
    if abs(cos) > 0.9995:
        return (1 - t) * x + t * y
    theta = np.arccos(cos)
    return np.asarray((np.sin((1 - t) * theta) * x + np.sin(t * theta) * y) / np.sin(theta))


def ties(base: Tensor, models: Sequence[Tensor], weights: Sequence[float], density: float) -> F64:
    """Trim each delta to its largest entries, elect a sign, average the deltas that have it, add to the base.

    Exactly int(density * size) entries of each delta are kept; of equal magnitudes those with the lower flat index.
    A sum of zero elects plus.

    >>> ties(np.float32([1, 1]), [np.float32([3, 1.1]), np.float32([2, 0])], [1, 1], 0.5)
    array([2.5, 1. ])
    """
    trimmed = [_trim(_delta(model, base), density).astype(np.float64) for model in models]
    deltas = [w * d for w, d in zip(weights, trimmed, strict=True)]
    elected = np.where(sum(deltas) >= 0, 1.0, -1.0)
    agrees = [np.sign(d) == elected for d in deltas]
    total = sum(d * ok for d, ok in zip(deltas, agrees, strict=True))
    weight = np.asarray(sum(w * ok for w, ok in zip(weights, agrees, strict=True)))
    return np.asarray(base.astype(np.float64) + total / np.where(weight == 0, 1, weight))


def _delta(model: Tensor, base: Tensor) -> npt.NDArray[np.float32]:
    return model.astype(np.float32) - base.astype(np.float32)


def _trim(delta: npt.NDArray[np.float32], density: float) -> npt.NDArray[np.float32]:
    k = max(1, int(density * delta.size))
    magnitude = np.abs(delta).ravel()
    threshold = np.partition(magnitude, -k)[-k]
    keep = magnitude > threshold
    equal = np.flatnonzero(magnitude == threshold)
    keep[equal[: k - int(keep.sum())]] = True
    return np.where(keep.reshape(delta.shape), delta, np.float32(0))


def ulps(values: Tensor, exact: F64, inputs: Sequence[Tensor]) -> F64:
    """|values - exact| in units of the last place that bf16 has at `exact` (8 significant bits).

    Where the inputs cancel, `exact` can be next to nothing beside them, and no float32 arithmetic could keep its last
    places: a unit is never smaller than 2^-22 of the largest input of that element.

    >>> ulps(np.float32([1.0078125, np.nan]), np.float64([1.0, 1.0]), [np.float32([1.0, 1.0])])
    array([ 1., inf])
    """
    largest = np.max([np.abs(tensor.astype(np.float32)) for tensor in inputs], axis=0)
    unit = np.maximum(_bf16_unit(exact), largest * 2.0**-22)
    error = np.abs(values.astype(np.float64) - exact) / unit
    return np.where(np.isnan(error), np.inf, error)  # every comparison with NaN is false: it would pass for right


def _bf16_unit(values: F64) -> F64:
    _, exponent = np.frexp(values)
    return np.asarray(np.exp2(np.maximum(exponent - 1, -126) - 7.0))


def dare_ties_problems(out: Tensor, base: Tensor, a: Tensor, b: Tensor, density: float) -> tuple[list[str], float]:
    """What is wrong with a random merge of two models of weight 1, and the share of elements that no mask explains.

    The masks are not known, so each element must be one of what the four outcomes give, within one ulp: the base, the
    base plus either rescaled delta, or, when the deltas agree in sign, plus both (when they do not, the larger wins).
    The rescaling restores the L1 norm, about 1/density; how far it can stray follows from the size of the tensor.
    Then, over the elements where the outcomes lie far enough apart to be told from each other, each must come up as
    often as independent masks of this density say.
    """
    exact = base.astype(np.float64)
    da, db = (_delta(m, base).astype(np.float64) / density for m in (a, b))
    keep, drop = density, 1 - density
    slack = 6 * np.sqrt(1.6 * drop / keep / out.size)  # six standard deviations of the rescaling factor
    together = np.where(da * db > 0, da + db, np.where(np.abs(da) >= np.abs(db), da, db))
    outcomes = np.stack([np.zeros_like(da), da, db, together])

    got = out.astype(np.float64)
    unit = _bf16_unit(exact + outcomes)
    fits = np.abs(got - exact - outcomes) <= unit + slack * np.abs(outcomes)
    unexplained = float(np.mean(~fits.any(axis=0)))
    problems = [f"{unexplained:.2g} of the elements fit no mask"] if unexplained > 1e-6 else []

    agree = da * db > 0
    cases = {
        "both signs equal": (agree, (0, 1, 2, 3), (drop * drop, keep * drop, drop * keep, keep * keep)),
        "first larger": ((da * db < 0) & (abs(da) > abs(db)), (0, 1, 2), (drop * drop, keep, drop * keep)),
        "second larger": ((da * db < 0) & (abs(da) < abs(db)), (0, 1, 2), (drop * drop, keep * drop, keep)),
    }
    for case, (where, candidates, expected) in cases.items():
        chosen = outcomes[list(candidates)][:, where]
        apart = np.full(chosen.shape[1], np.inf)
        for i in range(len(candidates)):
            for j in range(i):
                apart = np.minimum(apart, np.abs(chosen[i] - chosen[j]))
        clear = apart > 4 * unit.max(axis=0)[where] + 2 * slack * np.abs(outcomes).max(axis=0)[where]
        count = int(clear.sum())
        if count < 1000:
            continue
        nearest = np.abs((got - exact)[where][clear] - chosen[:, clear]).argmin(axis=0)
        for i, p in enumerate(expected):
            share = float(np.mean(nearest == i))
            if abs(share - p) > 6 * np.sqrt(p * (1 - p) / count):
                problems.append(f"{case}: outcome {i} in {share:.3f} of {count} elements, expected {p:.3f}")
    return problems, unexplained
