"""Defects of mergekit that are not reproduced, each as docs/coming-from-mergekit.md says.

Of base and model one is bf16, the other float32: the kernels of `cases.case.mixed`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.cases.case import fine_tunes, mixed
from tests.cases.task_vectors import GTA
from tests.mini import run_method
from weightsmith._base.tensors import DTYPES


@pytest.mark.long
def test_breadcrumbs_keep_the_deltas_of_small_tensors(tmp_path: Path) -> None:
    """With fewer than 1/gamma elements nothing is an outlier; mergekit 0.1.4 then zeroed the delta."""
    base = np.zeros(64, ml_dtypes.bfloat16)
    model = np.arange(1, 65, dtype=np.float32)
    models = [{}, {"weight": 1.0, "density": 0.9, "gamma": 0.01}]
    got = run_method(tmp_path, "breadcrumbs", [base, model], shared=GTA, models=models, base=True)
    np.testing.assert_array_equal(got, np.where(np.arange(64) < 64 - 57, 0, model))


@pytest.mark.long
def test_della_ranks_of_a_long_row_are_all_different(tmp_path: Path) -> None:
    """A model in bf16 and 4,096 ranks: the share that is kept grows evenly, not in 700 steps."""
    n, rows = 4096, 400
    base = np.zeros((rows, n), np.float32)
    model = np.tile(np.linspace(1, 2, n), (rows, 1)).astype(ml_dtypes.bfloat16)  # 128 distinct values
    models = [{}, {"weight": 1.0, "density": 0.5, "epsilon": 0.4}]
    got = run_method(tmp_path, "della_linear", [base, model], shared=GTA, models=models, base=True)
    kept = (got != 0).mean(0).reshape(64, -1).mean(1)
    expected = (0.1 + 0.8 * np.arange(n) / (n - 1)).reshape(64, -1).mean(1)
    np.testing.assert_allclose(kept, expected, atol=6 * 0.5 / np.sqrt(rows * 64))


@pytest.mark.long
def test_della_unbiased_keeps_every_rank_on_average(tmp_path: Path) -> None:
    """The paper's rescale: the expected delta is the delta; mergekit's L1 makes it 1.25 at the top and 0.31 at the bottom."""
    n, rows = 256, 4000
    base, model = np.zeros((rows, n), ml_dtypes.bfloat16), np.tile(np.linspace(1, 2, n, dtype=np.float32), (rows, 1))
    models = [{}, {"weight": 1.0, "density": 0.3, "epsilon": 0.2}]
    shared = GTA | {"rescale": "inv_probability"}
    got = run_method(tmp_path, "della_linear", [base, model], shared=shared, models=models, base=True)
    ratio = (got.mean(0) / model[0]).reshape(8, -1).mean(1)
    np.testing.assert_allclose(ratio, 1.0, atol=6 * 3 / np.sqrt(rows * 32))


@pytest.mark.long
def test_a_matrix_of_one_column_can_be_merged_by_rank(tmp_path: Path) -> None:
    """mergekit fails on tensors such as a depthwise convolution's (D, 1, K)."""
    arrays = mixed((64, 1), 1)
    models = [{}, {"weight": 1.0, "density": 0.5, "epsilon": 0.2}]
    got = run_method(tmp_path, "della_linear", arrays, shared=GTA, models=models, base=True).astype(np.float64)
    base, model = (a.astype(np.float64) for a in arrays)
    kept = got != base
    assert 10 < kept.sum() < 54
    np.testing.assert_allclose(got[kept], model[kept], rtol=1e-6)


@pytest.mark.long
def test_sce_weighs_small_deltas_by_their_energy_too(tmp_path: Path) -> None:
    """Ordinary fine-tunes have mean squares far below mergekit's floor of 1e-6, under which all shares are equal."""
    base = np.zeros((40, 50), ml_dtypes.bfloat16)
    small, large = np.full(base.shape, 1e-5, np.float32), np.full(base.shape, 3e-5, np.float32)
    shared = {"select_topk": 1.0, "select_applies_to": "update", "int8_mask": False}
    got = run_method(tmp_path, "sce", [base, small, large], shared=shared, models=[{}] * 3, base=True)
    np.testing.assert_allclose(got, 0.1 * 1e-5 + 0.9 * 3e-5, rtol=1e-6)


@pytest.mark.slow
def test_arcee_fusion_gives_the_same_result_each_time(tmp_path: Path) -> None:
    arrays = fine_tunes((1200, 1024), 1)  # mergekit samples above a million elements
    outs = [
        run_method(tmp_path / str(i), "arcee_fusion", arrays, shared={}, models=[{}, {}], base=True, out=DTYPES["BF16"], seed=i)
        for i in range(2)
    ]
    assert outs[0].tobytes() == outs[1].tobytes()


def test_nearswap_takes_what_is_near_whole(tmp_path: Path) -> None:
    """Distances below 1e-6 too, which mergekit divides by 1e-6."""
    base = np.zeros(10, ml_dtypes.bfloat16)
    model = np.full(10, 1e-8, np.float32)
    shared: dict[str, Any] = {"t": 1e-7}
    got = run_method(tmp_path, "nearswap", [base, model], shared=shared, models=[{}, {}], base=True)
    np.testing.assert_array_equal(got, model)
