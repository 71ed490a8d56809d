"""Negative weights under a sign election: a model is subtracted, and the mean stays a mean."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from weightsmith._execution.state_dicts import merge_state_dicts

ELECTED: dict[str, dict[str, Any]] = {
    "ties": {"normalize": True},
    "dare_ties": {"normalize": True, "density": 0.9},
    "della": {"normalize": True, "density": 0.8, "epsilon": 0.1},
    "breadcrumbs_ties": {"normalize": True, "density": 0.9},
    "task_vectors": {"elect": "sum", "combine": "mean"},
}


def models(count: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """A base of numbers that bf16 has, and fine-tunes that have half of their change in common; in float32."""
    rng = np.random.default_rng(0)
    shared = rng.normal(0, 1e-3, (80, 96))
    base = rng.normal(0, 0.02, (80, 96)).astype(ml_dtypes.bfloat16).astype(np.float32)  # kernels for it are compiled already
    tuned = [(base.astype(np.float64) + shared + rng.normal(0, 1e-3, base.shape)).astype(np.float32) for _ in range(count)]
    return base, tuned


def delta(method: str, base: np.ndarray, tuned: list[np.ndarray], weight: list[float], **parameters: Any) -> np.ndarray:
    models = [{"w": t} for t in tuned]
    merged = merge_state_dicts(method, models, base={"w": base}, weight=weight, out_dtype="float32", **parameters)
    return merged["w"].astype(np.float64) - base.astype(np.float64)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.vdot(a, b) / np.sqrt(np.vdot(a, a) * np.vdot(b, b)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ELECTED)
@pytest.mark.parametrize("weight", [[0.5, -1.0], [0.7, -0.69], [0.3, 0.6, -0.9]], ids=str)
def test_the_merge_points_where_task_arithmetic_does_and_stays_within_the_deltas(method: str, weight: list[float]) -> None:
    base, tuned = models(len(weight))
    plain = delta("task_arithmetic", base, tuned, weight)
    merged = delta(method, base, tuned, weight, **ELECTED[method])
    assert cosine(merged, plain) > 0.7
    # L1 rescaling, the default of dare_ties and della, lengthens a delta by about 1 / density.
    longest = np.max([np.abs(t.astype(np.float64) - base.astype(np.float64)) for t in tuned], axis=0)
    assert (np.abs(merged) <= 1.5 * longest + 1e-7).all()


def test_all_weights_negative_is_the_merge_turned_round() -> None:
    base, tuned = models(3)
    zero, deltas = np.zeros_like(base), [t - base.astype(np.float32) for t in tuned]
    there = delta("ties", zero, deltas, [0.5, 0.2, 1.0], density=0.4)
    back = delta("ties", zero, deltas, [-0.5, -0.2, -1.0], density=0.4)
    np.testing.assert_array_equal(back, -there)
