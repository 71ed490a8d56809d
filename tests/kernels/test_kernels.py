"""Kernels against their plain numpy twins, on what hypothesis finds."""

from __future__ import annotations

import itertools

import ml_dtypes
import numba.core.config
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.kernels import reference
from weightsmith._base.tensors import DTYPES
from weightsmith._kernels.codecs import BLOCK, Encoded, EncodedInputs, first_nonfinite
from weightsmith._kernels.combine import LANES, combine, combine_columns, combine_rows, distance, gram, gram_columns, gram_rows
from weightsmith._kernels.divergence import NEAR, exponentials, logarithms, row_divergence
from weightsmith._kernels.randomness import random_words
from weightsmith._kernels.rows import SHORT, descending, keep_band, keep_by_rank, keep_in_groups, keep_ranks, ranks
from weightsmith._kernels.select import (
    HIGH_BINS,
    MAX_PATTERNS,
    TABLE,
    Patterns,
    Scores,
    count_high,
    count_windows,
    find_bin,
    index_of_tie,
)
from weightsmith._kernels.task_vector import (
    BY_COUNT,
    BY_WEIGHT,
    ELECT_NONE,
    ELECT_SUM,
    KEEP_ALL,
    KEEP_LARGE,
    KEEP_NONE,
    KEEP_RANDOM,
    LARGEST,
    SUM,
    Combination,
    Masks,
    MergeScratch,
    Place,
    l1_norms,
    merge_task_vectors,
)

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


ROWLESS = (np.zeros(0, np.uint32), np.zeros((4, 0), np.uint32), np.zeros(0, np.uint8))
"""The scratch of modes that work on whole rows, where there are none."""


def raw(stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.ascontiguousarray(stack).view(np.uint8), np.full(len(stack), F32, np.int64)


@pytest.mark.slow
@given(stacks(), st.data())
def test_combine_is_the_rounded_float64_sum(stack: np.ndarray, data: st.DataObject) -> None:
    weights = data.draw(st.lists(finite(), min_size=len(stack), max_size=len(stack)))
    rows, sums, _, _ = scratch(len(stack))
    out = np.zeros(stack.shape[1] * 4, np.uint8)
    combine(*raw(stack), np.array(weights), stack.shape[1], out, F32, rows, sums)
    expected = reference.combine(list(stack.astype(np.float64)), weights)
    np.testing.assert_array_equal(out.view(np.float32), expected.astype(np.float32))


@pytest.mark.slow
@given(stacks(2), st.integers(1, 5000), st.booleans())
def test_gram_by_grains(stack: np.ndarray, grain: int, deltas: bool) -> None:
    n = stack.shape[1]
    vectors = (stack[1:] - stack[0] if deltas else stack).astype(np.float64)
    k, grains = len(vectors), -(-n // grain)
    rows, sums, _, _ = scratch(len(stack))
    out = np.empty((grains, k * (k + 1) // 2))
    gram(*raw(stack), n, grain, deltas, out, rows, sums)
    parts = np.pad(vectors, ((0, 0), (0, grains * grain - n))).reshape(k, grains, grain).swapaxes(0, 1)
    expected = (parts @ parts.swapaxes(1, 2))[:, *np.triu_indices(k)]
    bound = np.abs(parts).max((1, 2))[:, None] ** 2 + np.abs(expected)
    assert (np.abs(out - expected) <= 1e-12 * bound).all()


def bf16_tiles(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Two rows of n bf16 as uint16: all codes beside others, with NaN and infinities in the last part alone; neighbours."""
    rng = np.random.default_rng(n)
    finite_codes = np.arange(1 << 16, dtype=np.uint16)
    finite_codes = finite_codes[finite_codes & 0x7F80 != 0x7F80]
    base = rng.choice(finite_codes, n)
    out = rng.choice(finite_codes, n)
    near = rng.integers(0, n, n // 2)
    out[near] = base[near] ^ rng.integers(0, 16, n // 2, dtype=np.uint16)
    last = slice(n - n // 8, None)
    out[last] = rng.integers(0, 1 << 16, n // 8, dtype=np.uint16)
    return base, out


MANY = 100_019 if numba.core.config.DISABLE_JIT else 10_000_019  # as plain Python an element takes a microsecond


@pytest.mark.long
@pytest.mark.parametrize("n", [1, LANES - 1, BLOCK + LANES + 3, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("grain", [LANES + 1, 16 * BLOCK])
def test_a_distance_of_bf16_has_the_bits_of_the_same_numbers_in_float32(n: int, grain: int) -> None:
    base, out = bf16_tiles(n)
    rows, sums, _, _ = scratch(2)
    actual, expected = np.empty((2, -(-n // grain), 2))
    kinds = (np.uint16, DTYPES["BF16"].code, actual), (np.float32, F32, expected)
    for kind, code, totals in kinds:
        held = [x if kind is np.uint16 else x.view(ml_dtypes.bfloat16).astype(np.float32) for x in (base, out)]
        a, b = (Encoded(x.view(np.uint8), code) for x in held)
        with np.errstate(all="ignore"):
            distance(a, b, n, grain, totals, rows, sums)
    np.testing.assert_array_equal(actual.view(np.uint64), expected.view(np.uint64))


@pytest.mark.parametrize("cols", [1, LANES + 1, BLOCK, BLOCK + 37])
@pytest.mark.parametrize("deltas", [False, True])
def test_products_and_combinations_by_row_and_by_column(cols: int, deltas: bool) -> None:
    rng = np.random.default_rng(cols)
    height = 5
    stack = rng.normal(size=(3, height, cols)).astype(np.float32)
    vectors = (stack[1:] - stack[0] if deltas else stack).astype(np.float64)
    first, second = np.triu_indices(len(vectors))
    flat, codes = raw(stack.reshape(3, -1))
    rows, sums, _, _ = scratch(3)
    by_row, by_column = np.empty((height - 1, len(first))), np.zeros((len(first), cols))
    gram_rows(flat, codes, 1, cols, deltas, by_row, rows, sums)
    np.testing.assert_allclose(by_row, np.einsum("prc,prc->rp", vectors[first], vectors[second])[1:], rtol=1e-9, atol=1e-9)
    gram_columns(flat, codes, height * cols, cols, deltas, by_column, rows)
    np.testing.assert_allclose(by_column, np.einsum("prc,prc->pc", vectors[first], vectors[second]), rtol=1e-12, atol=1e-12)
    of_rows, of_columns = rng.normal(size=(height - 1, 3)), rng.normal(size=(3, cols))
    out = np.zeros((height, cols), np.float32)
    encoded = Encoded(out.reshape(-1).view(np.uint8), F32)
    combine_rows(EncodedInputs(flat, codes), of_rows, 1, cols, encoded, rows, sums)
    np.testing.assert_allclose(out[1:], np.einsum("rm,mrc->rc", of_rows, stack[:, 1:]), rtol=1e-6, atol=1e-6)
    assert not out[0].any()
    combine_columns(EncodedInputs(flat, codes), of_columns, height * cols, cols, encoded, rows, sums)
    np.testing.assert_allclose(out, np.einsum("mc,mrc->rc", of_columns, stack), rtol=1e-6, atol=1e-6)


def test_a_band_of_magnitudes_with_its_ties() -> None:
    """Neighbouring bit patterns, so that one too many or too few is seen."""
    n, least = 18, int(np.float32(1.5).view(np.int32))
    index, bits = np.arange(n), least + np.arange(n, dtype=np.int32) * 5 % 6
    row = bits.view(np.float32) * np.where(index % 4 < 2, np.float32(-1), np.float32(1))
    for low, high, low_cut, high_cut in itertools.product(range(6), range(6), (-1, 0, 7, n, n + 1), (-1, 0, 5, 11, n)):
        if low <= high:
            among_low = (bits > least + low) | ((bits == least + low) & (index < low_cut))
            among_high = (bits > least + high) | ((bits == least + high) & (index < high_cut))
            kept = row.copy()
            keep_band(kept, n, least + low, low_cut, least + high, high_cut)
            np.testing.assert_array_equal(kept, np.where(among_low & ~among_high, row, np.float32(0)))


def test_philox_matches_the_published_vectors() -> None:
    """Salmon et al.'s known answers for Philox4x32-10: the four words of a counter lie 64 elements apart."""
    words = np.zeros(BLOCK + 512, np.uint32)
    random_words(np.uint64(0), 0, 256, words)
    assert [hex(words[i]) for i in (0, 64, 128, 192)] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


@pytest.mark.slow
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 700))
@settings(max_examples=25)
def test_random_words_depend_on_key_and_index_alone(key: int, index: int, n: int) -> None:
    words = np.zeros(BLOCK + 512, np.uint32)
    offset = random_words(np.uint64(key), index, n, words)
    for j in {0, n // 2, n - 1}:
        assert int(words[offset + j]) == reference.philox(key, index + j)


@pytest.mark.long
@given(stacks(2, 2), st.data())
def test_radix_selection_is_sorting(stack: np.ndarray, data: st.DataObject) -> None:
    n = stack.shape[1]
    k = data.draw(st.integers(1, n))
    rows, _, _, bits = scratch(2)
    delta = stack[1] - stack[0]
    high = np.zeros(HIGH_BINS, np.uint32)
    scores = Scores(*raw(stack), 1, np.zeros(0), 1, rows, bits)  # no factors of rows
    count_high(scores, n, high)
    bin_, _ = find_bin(high, k)
    table = Patterns(np.zeros(TABLE, np.uint32), np.zeros(TABLE, np.uint32), np.zeros(MAX_PATTERNS, np.uint32))
    patterns, numbers, slots = table
    other = data.draw(st.integers(0, HIGH_BINS - 1))  # another window, which may be the same, takes nothing from the first
    firsts, aboves = np.array([bin_, other]) << 16, np.full(2, -1)
    ends = firsts + (1 << 16)
    count = count_windows(scores, n, firsts, ends, aboves, table)
    used = slots[:count]
    counted = dict(zip(patterns[used].tolist(), numbers[used].tolist(), strict=True))
    magnitudes = np.abs(delta).view(np.uint32)
    inside = magnitudes[(magnitudes >> 16 == bin_) | (magnitudes >> 16 == other)]
    assert counted == {int(v): int(c) for v, c in zip(*np.unique(inside, return_counts=True), strict=True)}
    assert aboves.tolist() == [(magnitudes >> 16 > high_).sum() for high_ in (bin_, other)]
    threshold = np.sort(magnitudes)[::-1][k - 1]
    quota = k - int((magnitudes > threshold).sum())
    cut = index_of_tie(scores, n, int(threshold), quota)
    kept = (magnitudes > threshold) | ((magnitudes == threshold) & (np.arange(n) < cut))
    np.testing.assert_array_equal(kept, reference.keep_largest(delta.astype(np.float64), k))


def test_too_many_patterns_are_reported_and_not_overrun() -> None:
    n = MAX_PATTERNS + 1
    stack = np.stack([np.zeros(n, np.float32), (np.arange(n, dtype=np.uint32) + (1 << 29)).view(np.float32)])
    rows, _, _, bits = scratch(2)
    table = Patterns(np.zeros(TABLE, np.uint32), np.zeros(TABLE, np.uint32), np.zeros(MAX_PATTERNS, np.uint32))
    window = np.array([0]), np.array([1 << 31]), np.zeros(1, np.int64)
    count = count_windows(Scores(*raw(stack), 1, np.zeros(0), 1, rows, bits), n, *window, table)
    assert count == -1
    assert (table.numbers[table.slots] == 1).all()


MODES = [KEEP_ALL, KEEP_LARGE, KEEP_RANDOM, KEEP_NONE]


@pytest.mark.matrix("True-True")
@pytest.mark.slow
@pytest.mark.parametrize("elect", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@given(stack=stacks(2), data=st.data())
@settings(max_examples=60)
def test_task_vectors_are_float64_results_to_float32_rounding(
    elect: bool, normalize: bool, stack: np.ndarray, data: st.DataObject
) -> None:
    models, n = len(stack) - 1, stack.shape[1]
    weights = data.draw(st.lists(st.sampled_from([1.0, 0.5, -0.5, 0.3, -0.7]), min_size=models, max_size=models))
    modes = data.draw(st.lists(st.sampled_from(MODES), min_size=models, max_size=models))
    by_sum, mean = ELECT_SUM if elect else ELECT_NONE, BY_WEIGHT if normalize and elect else SUM
    factor = data.draw(st.sampled_from([1.0, 0.3, -2.0]))
    deltas = (stack[1:] - stack[0]).astype(np.float64)
    keys = np.arange(models, dtype=np.uint64) + np.uint64(7)
    limits, cuts, shares = np.zeros((models, 2), np.int64), np.zeros((models, 2), np.int64), np.zeros((models, 2))
    masked, scales = [], np.linspace(1.0, 2.0, models)
    for i, mode in enumerate(modes):
        keep = np.ones(n, bool)
        if mode == KEEP_LARGE:
            bits = np.abs(deltas[i]).astype(np.float32).view(np.uint32)
            limits[i, 0], cuts[i, 0] = int(np.sort(bits)[n // 2]), n // 3
            keep = (bits > limits[i, 0]) | ((bits == limits[i, 0]) & (np.arange(n) < cuts[i, 0]))
        elif mode == KEEP_RANDOM:
            limits[i, 0] = 1 << 31
            keep = reference.random_mask(int(keys[i]), min(n, 600), 0.5) if n <= 600 else keep
            modes[i] = KEEP_RANDOM if n <= 600 else KEEP_ALL
        elif mode == KEEP_NONE:
            keep[:] = False
        masked.append(np.where(keep, deltas[i], 0.0) * scales[i])
    rows, sums, words, _ = scratch(models)
    out = np.zeros(n * 4, np.uint8)
    # The branches of all modes at once, else each choice of modes is a variant to compile.
    merge = merge_task_vectors.variant({"in": [F32], "out": [F32], "keep": MODES, "elect": [by_sum], "mean": [mean]})
    applied = factor
    if normalize and not elect:
        applied /= sum(weights) if abs(sum(weights)) >= 1e-8 else 1.0
    masks = Masks(np.array(modes, np.int64), limits, cuts, shares, False, keys, np.zeros((models, 0), np.uint8))
    how = Combination(np.array(weights), scales, by_sum, mean, applied)
    memory = MergeScratch(rows, sums, words, *ROWLESS)
    merge(EncodedInputs(*raw(stack)), Place(n, 0, BLOCK), masks, how, Encoded(out, F32), memory)
    expected = reference.merge_task_vectors(
        stack[0].astype(np.float64), masked, weights, elect=elect, normalize=normalize, factor=factor
    )
    got = out.view(np.float32).astype(np.float64)
    size = np.abs(stack[0]) + np.abs(factor) * np.abs(np.array(masked)).sum(0) / (0.1 if normalize else 1.0)
    # Each elected contribution, their sum, the quotient and the addition round to float32 once. Without an election weights of
    # both signs may cancel in the divisor, down to 0.1 with these; after one its terms are magnitudes.
    # Where contributions cancel but for the rounding of float64, either sign may be elected.
    votes = np.array(weights)[:, None] * np.array(masked)
    sure = ~np.bool_(elect) | (np.abs(votes.sum(0)) > 1e-12 * np.abs(votes).sum(0)) | ~votes.any(0)
    np.testing.assert_array_less(np.abs(got - expected)[sure], ((models + 3) * 2.0**-24 * size + 1e-30)[sure])


@pytest.mark.long
@given(stacks(2), st.integers(64, 5000))
@settings(max_examples=50)
def test_l1_norms_before_and_after_a_mask(stack: np.ndarray, grain: int) -> None:
    n = stack.shape[1]
    delta = np.abs((stack[1] - stack[0]).astype(np.float64))
    limit = int(np.sort(delta.astype(np.float32).view(np.uint32))[n // 2])
    rows, sums, words, _ = scratch(2)
    out = np.empty((-(-n // grain), 1, 2))
    two, keys = np.zeros((1, 2)), np.zeros(1, np.uint64)
    limits, cuts = np.array([[limit, 0]]), np.array([[n, 0]])
    modes, kept = np.array([KEEP_LARGE]), np.zeros((1, n), np.uint8)
    masks = Masks(modes, limits, cuts, two, False, keys, np.zeros((1, 0), np.uint8))
    l1_norms(EncodedInputs(*raw(stack)), Place(n, 0, BLOCK), grain, masks, out, MergeScratch(rows, sums, words, *ROWLESS), kept)
    kept = np.where(delta.astype(np.float32).view(np.uint32) >= limit, delta, 0.0)
    for g in range(len(out)):
        part = slice(g * grain, (g + 1) * grain)
        np.testing.assert_allclose(out[g, 0], [delta[part].sum(), kept[part].sum()], rtol=1e-12, atol=1e-300)


def by_magnitude(row: np.ndarray) -> np.ndarray:
    """Indices, the largest magnitude first, of equal ones the lower index first."""
    return np.argsort(-np.abs(row.astype(np.float32)), kind="stable")


@pytest.mark.long
@given(stacks(1, 1), st.data())
def test_ranks_of_a_row(stack: np.ndarray, data: st.DataObject) -> None:
    row = stack[0]
    n = row.size
    first, end = data.draw(st.integers(-1, n + 1)), data.draw(st.integers(0, n + 1))
    got = row.copy()
    keep_ranks(got, n, first, end, np.zeros(n, np.uint32))
    expected = np.zeros_like(row)
    kept = by_magnitude(row)[max(first, 0) : end]
    expected[kept] = row[kept]
    np.testing.assert_array_equal(got, expected)
    order = np.zeros((4, n), np.uint32)
    descending(row, n, order)
    np.testing.assert_array_equal(order[0], by_magnitude(row))
    ranks(row, n, np.zeros(n, np.uint32), order)
    np.testing.assert_array_equal(order[0][by_magnitude(row)], np.arange(n))


@pytest.mark.parametrize("n", [SHORT, SHORT + 1, 2048])
@pytest.mark.parametrize("kind", ["16 bits", "some longer", "one far off", "many octaves", "zero", "longer"])
def test_ranks_by_counting(kind: str, n: int) -> None:
    """Rows that are counted, whose bins are partly sorted, and those that are given up."""
    rng = np.random.default_rng(0)
    row = rng.integers(-40, 40, n).astype(np.float32) * np.float32(2.0**-14)
    if kind == "some longer":
        row[::9] += rng.integers(0, 3, row[::9].size).astype(np.float32) * np.float32(2.0**-22)
    elif kind == "one far off":
        row[n // 2] = 1e9
    elif kind == "many octaves":
        row *= (2.0 ** rng.integers(-100, 100, n)).astype(np.float32)
    elif kind == "zero":
        row[:] = 0
    elif kind == "longer":
        row += rng.normal(0, 1e-4, n).astype(np.float32)
    order = np.zeros((4, n), np.uint32)
    ranks(row, n, np.zeros(n, np.uint32), order)
    np.testing.assert_array_equal(order[0][by_magnitude(row)], np.arange(n))


@pytest.mark.long
@given(stacks(1, 1), st.sampled_from([(0.5, 0.2, False), (0.7, 0.29, True), (0.3, 0.0, True)]))
@settings(max_examples=30)
def test_probability_by_rank(stack: np.ndarray, how: tuple[float, float, bool]) -> None:
    density, epsilon, unbiased = how
    row, n = stack[0].astype(np.float64), stack.shape[1]
    words = np.random.default_rng(0).integers(0, 2**32, n, np.uint32)
    got = row.copy()
    keep_by_rank(got, n, density, epsilon, unbiased, words, np.zeros(n, np.uint32), np.zeros((4, n), np.uint32))
    rank = np.empty(n)
    rank[by_magnitude(row)] = np.arange(n)[::-1]
    p = density - epsilon + 2 * epsilon * (rank / (n - 1) if n > 1 else 0.5)
    kept = words < p * 2.0**32
    np.testing.assert_allclose(got, np.where(kept, row / p if unbiased else row, 0.0), rtol=1e-14)


@pytest.mark.long
@given(stacks(2, 2), st.integers(1, 8), st.integers(8, 300))
def test_groups_of_neighbours_shared_out(stack: np.ndarray, keep: int, group: int) -> None:
    n = stack.shape[1]
    taken, bits = np.zeros(n, np.uint8), np.zeros(n, np.uint32)
    free = np.ones(n, bool)
    for row in stack:
        got = row.copy()
        keep_in_groups(got, n, keep, group, taken, bits)
        expected = np.zeros_like(row)
        for start in range(0, n, group):
            part = np.where(free[start : start + group], row[start : start + group], 0)
            kept = by_magnitude(part)[: -(-keep * part.size // group)] + start
            expected[kept] = np.where(free[kept], row[kept], 0)
        np.testing.assert_array_equal(got, expected)
        free &= got == 0
        np.testing.assert_array_equal(taken == 0, free)


@pytest.mark.long
@pytest.mark.parametrize("elect", [ELECT_NONE, ELECT_SUM])
@given(stack=stacks(2))
@settings(max_examples=30)
def test_means_by_count_and_the_largest_alone(elect: int, stack: np.ndarray) -> None:
    models, n = len(stack) - 1, stack.shape[1]
    deltas = (stack[1:] - stack[0]).astype(np.float64)
    sign = np.where(deltas.sum(0) >= 0, 1, -1) if elect else 0
    allowed = (np.sign(deltas) == sign) if elect else deltas != 0
    for mean in (BY_COUNT, LARGEST):
        rows, sums, words, _ = scratch(models)
        out = np.zeros(n * 4, np.uint8)
        two, modes, keys = np.zeros((models, 2)), np.zeros(models, np.int64), np.zeros(models, np.uint64)
        masks = Masks(modes, two.astype(np.int64), two.astype(np.int64), two, False, keys, np.zeros((models, 0), np.uint8))
        how = Combination(np.ones(models), np.ones(models), elect, mean, 1.0)
        memory = MergeScratch(rows, sums, words, *ROWLESS)
        merge_task_vectors(EncodedInputs(*raw(stack)), Place(n, 0, BLOCK), masks, how, Encoded(out, F32), memory)
        chosen = np.where(allowed, deltas, 0.0)
        if mean == BY_COUNT:
            delta = chosen.sum(0) / np.maximum(allowed.sum(0), 1)
        else:
            last_first = chosen[::-1]
            delta = np.take_along_axis(last_first, np.abs(last_first).argmax(0)[None], 0)[0]
        size = np.abs(stack[0]) + np.abs(deltas).sum(0)
        difference = np.abs(out.view(np.float32) - (stack[0].astype(np.float64) + delta))
        np.testing.assert_array_less(difference, (models + 3) * 2.0**-24 * size + 1e-30)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_every_code_that_is_no_number_is_found_where_it_is(name: str) -> None:
    dtype = DTYPES[name]
    kind = dtype.numpy
    if dtype.itemsize > 2:
        values = np.array([0.0, 1.5, np.finfo(kind).max, -0.0, np.nan, np.inf, -np.inf], kind)
    else:
        values = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(kind)
    with np.errstate(invalid="ignore"):
        bad = ~np.isfinite(values.astype(np.float64))
    for value, is_bad in zip(values, bad, strict=True):
        row = np.full(5, 1, kind)
        row[3] = value
        assert first_nonfinite(row.view(np.uint8), dtype.code, 5) == (3 if is_bad else -1)
    assert first_nonfinite(np.full(5, 1, kind).view(np.uint8), dtype.code, 0) == -1


def test_exponentials_and_logarithms_of_our_own_are_the_libraries() -> None:
    """Vectorised twins of np.exp and np.log for softmax divergences."""
    rng = np.random.default_rng(0)
    x = -np.abs(rng.normal(0, 20, 5000))
    x[:4] = [0.0, -1e-300, -700.0, -1e-9]
    out = np.empty_like(x)
    exponentials(x, x.size, 0.0, out)
    np.testing.assert_array_max_ulp(out, np.exp(x), 2)
    x = np.concatenate([10.0 ** rng.uniform(-300, 300, 5000), 1 + rng.normal(0, 1e-3, 5000), [1.0, 0.5, 2.0]])
    out = x.copy()
    logarithms(out, out.size)
    np.testing.assert_allclose(out, np.log(x), rtol=5e-16, atol=2e-16)


@pytest.mark.long
@pytest.mark.parametrize("spread", [1e-5, 3e-3, 0.99 * NEAR, 1.01 * NEAR, 0.3, 5.0])
@pytest.mark.parametrize("cols", [1, 70, 2 * BLOCK + 17])
def test_divergence_of_rows_to_the_last_digits(spread: float, cols: int) -> None:
    """Against long doubles; Σ p log(p / q) in float64 has 8 digits at 1e-3 and none at 1e-8."""
    rng = np.random.default_rng(1)
    base = rng.normal(0, 0.5, (2, cols)).astype(np.float32)
    model = (base + rng.uniform(-spread, spread, base.shape)).astype(np.float32)
    out, sums = np.zeros(2), np.full((4, max(BLOCK, cols)), np.nan)
    stack = np.stack([base.ravel(), model.ravel()])
    row_divergence(EncodedInputs(*raw(stack)), base.size, cols, 1e-8, out, np.full((2, BLOCK), np.nan, np.float32), sums)
    soft = [np.exp(x.astype(np.longdouble)) for x in (base, model)]
    q, p = (s / s.sum(1, keepdims=True) + np.longdouble(1e-8) for s in soft)
    exact = (q * ((p / q) * np.log(p / q) - (p / q - 1))).sum(1).astype(np.float64)
    np.testing.assert_allclose(out, exact, rtol=1e-12 + 1e-17 / spread**2, atol=1e-18 if cols == 1 else 0)


def test_products_of_rows_depend_on_no_other_row() -> None:
    from weightsmith._kernels.combine import add_matrix_product, rotate_blocks

    rng = np.random.default_rng(0)
    rows, right, blocks = rng.normal(size=(7, 12)), rng.normal(size=(12, 9)), rng.normal(size=(2, 3, 3))
    total, turned = np.ones((7, 9)), np.empty_like(rows)
    add_matrix_product(rows, right, total)
    rotate_blocks(rows, blocks, turned)
    np.testing.assert_allclose(total, 1 + rows @ right, rtol=1e-12, atol=1e-12)
    diagonal = np.zeros((12, 12))
    for i in range(4):
        diagonal[3 * i : 3 * i + 3, 3 * i : 3 * i + 3] = blocks[i % 2]
    np.testing.assert_allclose(turned, rows @ diagonal, rtol=1e-12, atol=1e-12)
    for i in range(7):
        one, other = np.ones((1, 9)), np.empty((1, 12))
        add_matrix_product(rows[i : i + 1], right, one)
        rotate_blocks(rows[i : i + 1], blocks, other)
        assert one.tobytes() == total[i].tobytes()
        assert other.tobytes() == turned[i].tobytes()
