"""Kernels of differences and statistics against their twins in numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.kernels import reference
from weightsmith._base.tensors import DTYPES
from weightsmith._kernels.codecs import Encoded, EncodedInputs
from weightsmith._kernels.combine import LANES
from weightsmith._kernels.differences import DIFFERENCE_SUMS, STATISTICS, Sketch, difference, project, statistics
from weightsmith._reports.look.differences import WIDTH, sparse_signs

CODES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def pair(rows: int, cols: int, dtypes: tuple[str, str]) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Two tensors, their bytes [2, bytes], and their codes; a third of the elements is equal."""
    random = np.random.default_rng(rows * cols)
    a = random.standard_normal((rows, cols)).astype(CODES[dtypes[0]])
    b = np.where(random.random((rows, cols)) < 0.33, a.astype(np.float32), random.standard_normal((rows, cols)))
    tensors = [a, b.astype(CODES[dtypes[1]])]
    raw = np.zeros((2, rows * cols * 4), np.uint8)
    for row, tensor in zip(raw, tensors, strict=True):
        row[: tensor.nbytes] = tensor.reshape(-1).view(np.uint8)
    return tensors, raw, np.array([DTYPES[name].code for name in dtypes], np.int64)


def widened(tensors: list[np.ndarray]) -> list[np.ndarray]:
    return [tensor.astype(np.float64) for tensor in tensors]


@pytest.mark.parametrize("dtypes", [("BF16", "BF16"), ("BF16", "F32"), ("F16", "BF16")])
@pytest.mark.parametrize(("rows", "cols", "grain_rows"), [(7, 300, 3), (4, 64, 4), (3, 1, 2)])
def test_sums_of_a_difference_by_grain(dtypes: tuple[str, str], rows: int, cols: int, grain_rows: int) -> None:
    tensors, raw, codes = pair(rows, cols, dtypes)
    signs, shifts = sparse_signs(cols)
    out, grain = np.empty((-(-rows // grain_rows), DIFFERENCE_SUMS)), grain_rows * cols
    sketch = np.zeros((rows, min(WIDTH, cols)), np.float32)
    scratch, lanes = np.empty((2, cols), np.float32), np.empty((3, LANES))
    difference(EncodedInputs(raw, codes), rows * cols, cols, grain, out, Sketch(signs, shifts, sketch), scratch, lanes)
    a, b = widened(tensors)
    for g in range(len(out)):
        span = slice(g * grain_rows, (g + 1) * grain_rows)
        np.testing.assert_allclose(out[g], reference.difference(a[span], b[span]), rtol=1e-6, atol=1e-9)
    expected = reference.sparse_sketch(b - a, signs, shifts, sketch.shape[1])
    np.testing.assert_allclose(sketch, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_a_projection_takes_every_row_once(rows: int) -> None:
    tensors, raw, codes = pair(rows, 1030, ("BF16", "BF16"))
    basis = np.random.default_rng(0).standard_normal((rows, 5)).astype(np.float32)
    out = np.ones((5, 1030), np.float32)
    project(raw, codes, rows, 1030, basis, out, np.empty((5, 1030), np.float32))
    a, b = widened(tensors)
    np.testing.assert_allclose(out, 1 + basis.T.astype(np.float64) @ (b - a), rtol=1e-4, atol=1e-4)


def test_statistics_leave_out_what_is_not_finite() -> None:
    x = np.random.default_rng(1).standard_normal((5, 100)).astype(np.float32)
    x[1, 3], x[2, 50], x[2, 51], x[4, 99], x[0, 0] = np.nan, np.inf, -np.inf, 0, -0.0
    x[3] = np.nan
    out, squares = np.empty((5, STATISTICS)), np.zeros(6)
    statistics(
        Encoded(x.reshape(-1).view(np.uint8), DTYPES["F32"].code),
        x.size,
        100,
        100,
        out,
        squares,
        np.empty((1, 100), np.float32),
        np.empty((2, LANES)),
    )
    for row, sums, square in zip(x.astype(np.float64), out, squares, strict=False):
        expected = reference.statistics(row)
        np.testing.assert_allclose(sums, expected, rtol=1e-12)
        assert square == pytest.approx(expected[1])
