"""What is kept of a row: zeroed in place, selected by a score, and remembered between passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numba.core.config
import numpy as np
import pytest

from tests.cases.task_vectors import GTA
from tests.mini import run_method
from weightsmith._base.tensors import DTYPES
from weightsmith._kernels.codecs import BLOCK, Encoded, EncodedInputs
from weightsmith._kernels.rows import keep_by_rank, ranks
from weightsmith._kernels.select import VARIANCE, Scores, select_scores
from weightsmith._kernels.task_vector import (
    BY_COUNT,
    BY_WEIGHT,
    ELECT_PAIR,
    ELECT_SUM,
    KEEP_ALL,
    KEEP_CHOSEN,
    KEEP_NONE,
    KEEP_RANDOM,
    SUM,
    Combination,
    Masks,
    MergeScratch,
    Place,
    keep_chosen,
    keep_large,
    keep_random,
    merge_task_vectors,
)
from weightsmith._methods.jobs import task_vectors
from weightsmith._methods.jobs.task_vectors import TaskVectorJob

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 7, 64, 1001])
def test_rows_are_zeroed_where_nothing_is_kept(dtype: Any, n: int) -> None:
    rng = np.random.default_rng(n)
    row = rng.normal(0, 1, n).astype(np.float32).astype(dtype)
    row[:: max(1, n // 3)] = np.inf
    words = rng.integers(0, 2**32, n, dtype=np.uint32)
    words[n // 2] = 2**32 - 1
    for limit in (0, 1, 1 << 31, int(words[0]), int(words[0]) + 1, (1 << 32) - 1, 1 << 32):
        got = row.copy()
        keep_random(got, n, words, limit)
        np.testing.assert_array_equal(got, np.where(words.astype(np.int64) < limit, row, 0))
    mask, got = (words & 1).astype(np.uint8), row.copy()
    keep_chosen(got, n, mask)
    np.testing.assert_array_equal(got, np.where(mask == 1, row, 0))
    bits, got = np.abs(row).astype(np.float32).view(np.uint32), row.copy()
    limit, cut = int(np.sort(bits)[n // 2]), n // 2
    keep_large(got, n, limit, cut)
    np.testing.assert_array_equal(got, np.where((bits > limit) | ((bits == limit) & (np.arange(n) < cut)), row, 0))


@pytest.mark.parametrize("models", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_selection_by_variance(models: int, kind: Any) -> None:
    n = 2 * BLOCK + 17
    stack = np.random.default_rng(models).integers(-3, 4, (1 + models, n)).astype(np.float32)  # exact, and full of ties
    scores = stack[1:].astype(np.float64).var(axis=0).astype(np.float32).view(np.uint32)
    close = np.sort(scores)[-n // 3]
    codes, rows, bits = np.full(1 + models, DTYPES["F32"].code), np.empty((2, BLOCK), kind), np.empty(BLOCK, np.uint32)
    selected = np.full(n, 7, np.uint8)
    for limit in (int(close) - 8, int(close) + 8):  # numpy's last digits are not those of updates
        for cut in (0, n):
            scored = Scores(stack.view(np.uint8), codes, VARIANCE, np.zeros(0), 1, rows, bits)
            select_scores(scored, n, max(limit, 0), cut, selected)
            expected = (scores > max(limit, 0)) | ((scores == max(limit, 0)) & (np.arange(n) < cut))
            np.testing.assert_array_equal(selected, expected)


@pytest.mark.parametrize("cut", [-5, 0, 1, BLOCK - 1, BLOCK, BLOCK + 9, 2 * BLOCK + 17, 10 * BLOCK])
def test_equal_scores_are_selected_up_to_the_cut(cut: int) -> None:
    n = 2 * BLOCK + 17
    stack = np.zeros((3, n), np.float32)
    stack[2] = 2.0  # the variance is 1 everywhere
    stack[2, ::5], stack[2, 1::5] = 4.0, 1.0
    limit = int(np.float32(1.0).view(np.uint32))
    rows, bits, selected = np.empty((2, BLOCK), np.float32), np.empty(BLOCK, np.uint32), np.full(n, 7, np.uint8)
    codes = np.full(3, DTYPES["F32"].code)
    scores = Scores(stack.view(np.uint8), codes, VARIANCE, np.zeros(0), 1, rows, bits)
    select_scores(scores, n, limit, cut, selected)
    expected = (stack[2] == 4) | ((stack[2] == 2) & (np.arange(n) < cut))
    np.testing.assert_array_equal(selected, expected)


def _rows(n: int) -> list[np.ndarray]:
    """Rows that are hard to rank: float32 [n] each."""
    rng = np.random.default_rng(n)
    normal = rng.normal(0, 1, n).astype(np.float32)
    base = rng.normal(0, 0.02, n).astype(BF16).astype(np.float32)

    def tuned(size: float) -> np.ndarray:
        return (base + size * normal).astype(BF16).astype(np.float32) - base

    sparse = np.where(rng.random(n) < 0.8, np.float32(-0.0), tuned(3e-4))
    long = tuned(3e-4)
    long[rng.random(n) < 0.04] *= np.float32(1.001)
    wide = (normal * 2.0 ** rng.integers(-140, 120, n)).astype(np.float32)
    special = tuned(3e-4)
    special[:: max(1, n // 3)], special[n // 2 :: max(1, n // 2)] = np.inf, np.nan
    rows = [
        normal, tuned(3e-4), tuned(3e-3), sparse, long, wide, special, np.zeros(n, np.float32), -np.ones(n, np.float32),
        np.sign(normal) * np.float32(1e-5) * (1 + rng.integers(0, 9, n) * np.float32(1e-6)),
        rng.integers(-3, 4, n) * 2.0**-149,
    ]  # fmt: skip
    return [row.astype(np.float32) for row in rows]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 16, 33, 255, 700, 2053])
def test_what_is_kept_by_rank_is_what_the_ranks_say(dtype: Any, n: int) -> None:
    rng = np.random.default_rng(n)
    bits, order = np.empty(n, np.uint32), np.empty((4, n), np.uint32)
    for row in _rows(n):
        words = rng.integers(0, 2**32, n, dtype=np.uint32)
        words[n // 2], words[n // 3] = 2**32 - 1, 0
        by_rank = np.empty(n, np.int64)
        by_rank[np.argsort(-(row.view(np.uint32) & 0x7FFFFFFF).astype(np.int64), kind="stable")] = np.arange(n)
        ranks(row, n, bits, order)
        np.testing.assert_array_equal(order[0], by_rank)
        for density, epsilon in ((0.5, 0.2), (0.5, 0.5), (0.9, 0.1), (0.3, 0.0), (0.6, 1e-9)):
            top, step = (density + epsilon, 2.0 * epsilon / (n - 1)) if n > 1 else (density, 0.0)
            kept = words < (top - by_rank * step) * 2.0**32
            got = row.astype(dtype)
            keep_by_rank(got, n, density, epsilon, False, words, bits, order)
            np.testing.assert_array_equal(got, np.where(kept, row, 0))


@pytest.mark.long
@pytest.mark.parametrize("stored", ["BF16", "F32"])
def test_a_pair_elects_as_any_number_of_models_does(stored: str) -> None:
    """Two deltas in one loop, and the loops for any number of them: the same bytes."""
    n, dtype = 2 * BLOCK + 13, DTYPES[stored]
    rng = np.random.default_rng(0)
    base = rng.normal(0, 0.02, n)
    arrays = [base, *(base + rng.normal(0, 3e-4, n) for _ in range(2))]
    arrays[2][: n // 2] = 2 * base[: n // 2] - arrays[1][: n // 2]  # deltas that cancel
    for k, special in enumerate((0.0, -0.0, 1e-39, 1e-45, np.inf, np.nan, 3e38)):
        arrays[k % 3][k::97] = special
        arrays[(k + 1) % 3][k::194] = -special
    with np.errstate(all="ignore"):
        raw = np.stack([x.astype(dtype.numpy).view(np.uint8) for x in arrays])
    codes, rows = np.full(3, dtype.code), np.empty((6, BLOCK), np.float64 if stored == "F32" else np.float32)
    memory = MergeScratch(rows, np.empty((1, BLOCK)), np.empty(BLOCK + 512, np.uint32), *(np.empty(0, np.uint32),) * 3)
    memory = memory._replace(order=np.empty((4, 0), np.uint32), taken=np.empty(0, np.uint8))
    nothing, cuts = np.zeros((2, 2), np.int64), np.zeros((2, 2), np.int64)
    axes = {"in": [dtype.code], "out": [dtype.code], "keep": [KEEP_ALL, KEEP_NONE], "mean": [SUM, BY_WEIGHT, BY_COUNT]}
    merges = [(elect, merge_task_vectors.variant({**axes, "elect": [elect]})) for elect in (ELECT_SUM, ELECT_PAIR)]
    for modes in ([KEEP_ALL, KEEP_ALL], [KEEP_NONE, KEEP_ALL]):
        masks = Masks(
            np.array(modes), nothing, cuts, np.zeros((2, 2)), False, np.zeros(2, np.uint64), np.empty((2, 0), np.uint8)
        )
        for weights in ([1.0, 1.0], [0.3, 0.7], [0.5, -0.5], [-0.3, 0.0]):
            for mean in (SUM, BY_WEIGHT, BY_COUNT):
                outs = []
                for elect, merge in merges:
                    how = Combination(np.array(weights), np.array([1.0, 1.7]), elect, mean, 0.9)
                    outs.append(np.empty(n * dtype.itemsize, np.uint8))
                    merge(EncodedInputs(raw, codes), Place(n, 0, BLOCK), masks, how, Encoded(outs[-1], dtype.code), memory)
                assert outs[0].tobytes() == outs[1].tobytes()


@pytest.mark.long
@pytest.mark.skipif(bool(numba.core.config.DISABLE_JIT), reason="a minute each; the kernels of it have tests of their own")
@pytest.mark.parametrize("method", ["dare_linear", "dare_ties", "della"])
def test_masks_made_again_are_the_masks_remembered(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    base = rng.normal(0, 0.02, (300, 700))
    arrays = [a.astype(BF16) for a in (base, *(base + rng.normal(0, 1e-3, base.shape) for _ in range(2)))]
    per_model = [{}, {"weight": 0.6, "density": 0.35, "epsilon": 0.1}, {"weight": -0.4, "density": 0.8, "epsilon": 0.1}]
    seen = list[TaskVectorJob]()
    make = TaskVectorJob.__init__

    def watched(self: TaskVectorJob, *args: Any) -> None:
        make(self, *args)
        seen.append(self)

    monkeypatch.setattr(TaskVectorJob, "__init__", watched)
    shared = GTA | {"rescale": "l1"}
    remembered = run_method(tmp_path / "a", method, arrays, shared=shared, models=per_model, base=True, tile_bytes=1)
    assert seen[-1].resident_bytes == 2 * base.size // 8
    assert (seen[-1].modes == KEEP_CHOSEN).all()
    monkeypatch.setattr(task_vectors, "REMEMBER_BYTES", 2 * base.size // 8 - 1)
    again = run_method(tmp_path / "b", method, arrays, shared=shared, models=per_model, base=True, tile_bytes=1)
    assert seen[-1].resident_bytes == 0
    assert not (seen[-1].modes == KEEP_CHOSEN).any()
    if method != "della":
        assert (seen[-1].modes == KEEP_RANDOM).all()
    assert remembered.tobytes() == again.tobytes()
