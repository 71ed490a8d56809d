"""Kernels that compare deltas, against their twins in numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.kernels import reference
from weightsmith._base.tensors import DTYPES
from weightsmith._kernels.codecs import BLOCK
from weightsmith._kernels.differences import SURVIVAL, agreement, sketch_deltas, survival
from weightsmith._reports.look.differences import WIDTH, sparse_signs


def tensors(count: int, size: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """bf16 tensors as float64, of which a third of the elements is that of the first; their bytes; their codes."""
    random = np.random.default_rng(size)
    first = random.standard_normal(size).astype(ml_dtypes.bfloat16)
    stack = [first]
    for _ in range(count - 1):
        other = random.standard_normal(size).astype(ml_dtypes.bfloat16)
        stack.append(np.where(random.random(size) < 0.33, first, other))
    raw = np.stack([tensor.view(np.uint8) for tensor in stack])
    return [tensor.astype(np.float64) for tensor in stack], raw, np.full(count, DTYPES["BF16"].code, np.int64)


@pytest.mark.parametrize("size", [1, 100, BLOCK + 7])
def test_counts_of_agreement(size: int) -> None:
    (base, *models), raw, codes = tensors(4, size)
    deltas = [(model.astype(np.float32) - base.astype(np.float32)).astype(np.float64) for model in models]
    limits = np.float32([0.5, 1.5, 0])
    counts = np.zeros(2 + 6, np.int64)
    marks = np.empty((6, BLOCK), np.uint8)
    agreement(raw, codes, size, limits.view(np.uint32), counts, np.empty((2, BLOCK), np.float32), marks)
    assert counts.tolist() == reference.agreement(deltas, limits.tolist())


def test_sketches_of_deltas() -> None:
    (base, *models), raw, codes = tensors(3, 5 * 300)
    signs, shifts = sparse_signs(300)
    out = np.zeros((2, 5, WIDTH), np.float32)
    sketch_deltas(raw, codes, 5, 300, signs, shifts, out, np.empty((2, BLOCK), np.float32))
    for sketch, model in zip(out, models, strict=True):
        expected = reference.sparse_sketch((model - base).reshape(5, 300), signs, shifts, WIDTH)
        np.testing.assert_allclose(sketch, expected, rtol=1e-4, atol=1e-4)


def test_what_survives_by_group() -> None:
    size, group = 2 * BLOCK + 100, BLOCK + 50
    (base, merged, *models), raw, codes = tensors(4, size)
    out = np.empty((2, 3, SURVIVAL))
    survival(raw, codes, size, group, out, np.empty((3, BLOCK), np.float32))
    m, *deltas = ((x.astype(np.float32) - base.astype(np.float32)).astype(np.float64) for x in (merged, *models))
    for g, part in enumerate((slice(0, group), slice(group, None))):
        np.testing.assert_allclose(out[g, 0, :2], [(m[part] ** 2).sum(), (base[part] ** 2).sum()], rtol=1e-9)
        for k, delta in enumerate(deltas):
            np.testing.assert_allclose(out[g, 1 + k], reference.survival(m[part], delta[part]), rtol=1e-9)
