"""Kernels against their plain numpy twins, on what hypothesis finds."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from weightsmith.kernels import reference
from weightsmith.kernels.codecs import BLOCK
from weightsmith.kernels.combine import LANES, combine, gram
from weightsmith.kernels.philox import random_words
from weightsmith.kernels.select import HIGH_BINS, MAX_PATTERNS, TABLE, count_high, count_window, find_bin, index_of_tie
from weightsmith.kernels.task_vector import KEEP_ALL, KEEP_LARGE, KEEP_NONE, KEEP_RANDOM, l1_norms, merge_task_vectors
from weightsmith.tensors import DTYPES

F32 = DTYPES["F32"].code
SIZES = st.integers(1, 3 * LANES) | st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 17])


def finite(bound: float = 1e3) -> st.SearchStrategy[float]:
    return st.floats(-bound, bound, width=32, allow_subnormal=True)


@st.composite
def stacks(draw: st.DrawFn, low: int = 1, high: int = 4) -> np.ndarray:
    """float32 [models, n]: coarse values, so that ties, zeros and cancellations are common, or any at all."""
    models, n = draw(st.integers(low, high)), draw(SIZES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["coarse", "normal", "wild"]))
    if kind == "coarse":
        return rng.integers(-3, 4, (models, n)).astype(np.float32)
    if kind == "normal":
        return rng.normal(0, 0.02, (models, n)).astype(ml_dtypes.bfloat16).astype(np.float32)
    head = draw(hnp.arrays(np.float32, (models, min(n, 16)), elements=finite()))
    return np.concatenate([head, rng.normal(0, 100, (models, n - head.shape[1])).astype(np.float32)], axis=1)


def scratch(models: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    pairs = max(3, models * (models + 1) // 2)
    rows = np.full((models + 4, BLOCK), np.nan, np.float32)
    return rows, np.full((pairs, BLOCK), np.nan), np.zeros(BLOCK + 512, np.uint32), np.zeros(BLOCK, np.uint32)


def raw(stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.ascontiguousarray(stack).view(np.uint8), np.full(len(stack), F32, np.int64)


@given(stacks(), st.data())
def test_combine_is_the_rounded_float64_sum(stack: np.ndarray, data: st.DataObject) -> None:
    weights = data.draw(st.lists(finite(), min_size=len(stack), max_size=len(stack)))
    rows, sums, _, _ = scratch(len(stack))
    out = np.zeros(stack.shape[1] * 4, np.uint8)
    combine(*raw(stack), np.array(weights), stack.shape[1], out, F32, rows, sums)
    expected = reference.combine(list(stack.astype(np.float64)), weights)
    np.testing.assert_array_equal(out.view(np.float32), expected.astype(np.float32))


@given(stacks(2), st.integers(1, 5000), st.booleans())
def test_gram_by_grains(stack: np.ndarray, grain: int, deltas: bool) -> None:
    n = stack.shape[1]
    vectors = (stack[1:] - stack[0] if deltas else stack).astype(np.float64)
    k = len(vectors)
    rows, sums, _, _ = scratch(len(stack))
    out = np.empty((-(-n // grain), k * (k + 1) // 2))
    gram(*raw(stack), n, grain, deltas, out, rows, sums)
    for g in range(len(out)):
        part = vectors[:, g * grain : (g + 1) * grain]
        np.testing.assert_allclose(
            out[g], (part @ part.T)[np.triu_indices(k)], rtol=1e-12, atol=1e-12 * np.abs(part).max() ** 2
        )


def test_philox_matches_the_published_vectors() -> None:
    """Salmon et al.'s known answers for Philox4x32-10: the four words of a counter lie 64 elements apart."""
    words = np.zeros(BLOCK + 512, np.uint32)
    random_words(0, 0, 256, words)
    assert [hex(words[i]) for i in (0, 64, 128, 192)] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 700))
@settings(max_examples=25)
def test_random_words_depend_on_key_and_index_alone(key: int, index: int, n: int) -> None:
    words = np.zeros(BLOCK + 512, np.uint32)
    offset = random_words(np.uint64(key), index, n, words)
    for j in {0, n // 2, n - 1}:
        assert int(words[offset + j]) == reference.philox(key, index + j)


@given(stacks(2, 2), st.data())
def test_radix_selection_is_sorting(stack: np.ndarray, data: st.DataObject) -> None:
    n = stack.shape[1]
    k = data.draw(st.integers(1, n))
    rows, _, _, bits = scratch(2)
    delta = stack[1] - stack[0]
    high = np.zeros(HIGH_BINS, np.uint32)
    count_high(*raw(stack), 1, n, high, rows, bits)
    bin_, _ = find_bin(high, k)
    patterns, numbers, slots = np.zeros(TABLE, np.uint32), np.zeros(TABLE, np.uint32), np.zeros(MAX_PATTERNS, np.uint32)
    above, found = count_window(*raw(stack), 1, n, bin_ << 16, (bin_ + 1) << 16, patterns, numbers, slots, rows, bits)
    used = slots[:found]
    counted = dict(zip(patterns[used].tolist(), numbers[used].tolist(), strict=True))
    magnitudes = np.abs(delta).view(np.uint32)
    inside = magnitudes[magnitudes >> 16 == bin_]
    assert counted == {int(v): int(c) for v, c in zip(*np.unique(inside, return_counts=True), strict=True)}
    assert above == (magnitudes >> 16 > bin_).sum()
    threshold = np.sort(magnitudes)[::-1][k - 1]
    quota = k - int((magnitudes > threshold).sum())
    cut = index_of_tie(*raw(stack), 1, n, threshold, quota, rows, bits)
    kept = (magnitudes > threshold) | ((magnitudes == threshold) & (np.arange(n) < cut))
    np.testing.assert_array_equal(kept, reference.keep_largest(delta.astype(np.float64), k))


def test_too_many_patterns_are_reported_and_not_overrun() -> None:
    n = MAX_PATTERNS + 1
    stack = np.stack([np.zeros(n, np.float32), (np.arange(n, dtype=np.uint32) + (1 << 29)).view(np.float32)])
    rows, _, _, bits = scratch(2)
    patterns, numbers, slots = np.zeros(TABLE, np.uint32), np.zeros(TABLE, np.uint32), np.zeros(MAX_PATTERNS, np.uint32)
    assert count_window(*raw(stack), 1, n, 0, 1 << 31, patterns, numbers, slots, rows, bits) == (0, -1)
    assert (numbers[slots] == 1).all()


@pytest.mark.parametrize("elect", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@given(stack=stacks(2), data=st.data())
@settings(max_examples=60)
def test_task_vectors_are_float64_results_to_float32_rounding(
    elect: bool, normalize: bool, stack: np.ndarray, data: st.DataObject
) -> None:
    models, n = len(stack) - 1, stack.shape[1]
    weights = data.draw(st.lists(st.sampled_from([1.0, 0.5, -0.5, 0.3, -0.7]), min_size=models, max_size=models))
    modes = data.draw(
        st.lists(st.sampled_from([KEEP_ALL, KEEP_LARGE, KEEP_RANDOM, KEEP_NONE]), min_size=models, max_size=models)
    )
    factor = data.draw(st.sampled_from([1.0, 0.3, -2.0]))
    deltas = (stack[1:] - stack[0]).astype(np.float64)
    keys = np.arange(models, dtype=np.uint64) + np.uint64(7)
    limits, cuts = np.zeros(models, np.int64), np.zeros(models, np.int64)
    masked, scales = [], np.linspace(1.0, 2.0, models)
    for i, mode in enumerate(modes):
        keep = np.ones(n, bool)
        if mode == KEEP_LARGE:
            bits = np.abs(deltas[i]).astype(np.float32).view(np.uint32)
            limits[i], cuts[i] = int(np.sort(bits)[n // 2]), n // 3
            keep = (bits > limits[i]) | ((bits == limits[i]) & (np.arange(n) < cuts[i]))
        elif mode == KEEP_RANDOM:
            limits[i] = 1 << 31
            keep = reference.random_mask(int(keys[i]), min(n, 600), 0.5) if n <= 600 else keep
            modes[i] = KEEP_RANDOM if n <= 600 else KEEP_ALL
        elif mode == KEEP_NONE:
            keep[:] = False
        masked.append(np.where(keep, deltas[i], 0.0) * scales[i])
    rows, sums, words, _ = scratch(models)
    out = np.zeros(n * 4, np.uint8)
    applied = factor
    if normalize and not elect:
        applied /= sum(weights) if abs(sum(weights)) >= 1e-8 else 1.0
    merge_task_vectors(
        *raw(stack), n, 0, np.array(weights), scales, np.array(modes, np.int64), limits, cuts, keys,
        elect, normalize, applied, out, F32, rows, sums, words,
    )  # fmt: skip
    expected = reference.merge_task_vectors(
        stack[0].astype(np.float64), masked, weights, elect=elect, normalize=normalize, factor=factor
    )
    got = out.view(np.float32).astype(np.float64)
    size = np.abs(stack[0]) + np.abs(factor) * np.abs(np.array(masked)).sum(0) / (0.1 if normalize else 1.0)
    # Each elected contribution, their sum, the quotient and the addition round to float32 once.
    np.testing.assert_array_less(np.abs(got - expected), (models + 3) * 2.0**-24 * size + 1e-30)


@given(stacks(2), st.integers(64, 5000))
@settings(max_examples=50)
def test_l1_norms_before_and_after_a_mask(stack: np.ndarray, grain: int) -> None:
    n = stack.shape[1]
    delta = np.abs((stack[1] - stack[0]).astype(np.float64))
    limit = int(np.sort(delta.astype(np.float32).view(np.uint32))[n // 2])
    rows, sums, words, _ = scratch(2)
    out = np.empty((-(-n // grain), 2))
    l1_norms(*raw(stack), 1, n, grain, 0, KEEP_LARGE, limit, n, np.uint64(0), out, rows, sums, words)
    kept = np.where(delta.astype(np.float32).view(np.uint32) >= limit, delta, 0.0)
    for g in range(len(out)):
        part = slice(g * grain, (g + 1) * grain)
        np.testing.assert_allclose(out[g], [delta[part].sum(), kept[part].sum()], rtol=1e-12, atol=1e-300)
