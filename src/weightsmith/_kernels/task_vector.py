"""The task-vector family in one kernel: delta → sparsify → weight → elect signs → combine → scale → add to base.

TIES (Yadav et al. 2023, https://arxiv.org/abs/2306.01708), DARE (Yu et al. 2023, https://arxiv.org/abs/2311.03099), DELLA (Deep
et al. 2024, https://arxiv.org/abs/2406.11617), Model Breadcrumbs (Davari and Belilovsky 2023, https://arxiv.org/abs/2312.06795)
and task arithmetic (Ilharco et al. 2022, https://arxiv.org/abs/2212.04089) are settings of it. A delta is float32(model) -
float32(base), rounded to float32 (exact for bf16 inputs of similar exponents). The sum that elects the signs is float64, as
are sums without election: a sign must not turn on a rounding. The elected contributions are summed in float32 rows. All of it
is float64 when the output is F32 or F64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from weightsmith._kernels.codecs import (
    BF16,
    BF16_IN,
    OTHER_IN,
    Encoded,
    EncodedInputs,
    as_bits,
    as_float,
    decode,
    encode,
    or_zero,
)
from weightsmith._kernels.combine import LANES, add_delta, add_magnitudes, add_scaled, fill, set_scaled, subtract, sum_lanes
from weightsmith._kernels.jit import Switch, kernel
from weightsmith._kernels.randomness import random_words
from weightsmith._kernels.rows import keep_band, keep_by_rank, keep_in_groups, keep_ranks

KEEP_ALL, KEEP_NONE, KEEP_LARGE, KEEP_BAND, KEEP_RANDOM, KEEP_ROW_RANKS, KEEP_BY_RANK, KEEP_GROUPS, KEEP_CHOSEN = range(9)
"""How a delta is sparsified. KEEP_ROW_RANKS, KEEP_BY_RANK and KEEP_GROUPS need whole rows; KEEP_CHOSEN is told which elements.

mode            limits[i]                  cuts[i]       shares[i]
KEEP_LARGE      threshold, -               its cut, -
KEEP_BAND       threshold, upper one       their cuts
KEEP_RANDOM     probability times 2^32
KEEP_ROW_RANKS  first rank, one past last
KEEP_BY_RANK                                             density, epsilon
KEEP_GROUPS     kept, of a group of
"""

SUM, BY_WEIGHT, BY_COUNT, LARGEST = range(4)
"""How contributions are combined: added; divided by Σ |weight| of those that agree; by their number; the largest alone.

What agrees is weight · delta, all of one sign, so its mean needs positive shares. Divided by Σ weight, 0.5 and -1.0 would turn
the result round (-0.5), and 0.3, 0.6 and -0.9 would divide it by a rounding error.
"""

ELECT_NONE, ELECT_SUM, ELECT_COUNT, ELECT_PAIR = range(4)
"""Who decides the sign: nobody; the sum of the weighted deltas; each model with one vote; the sum again, of just two deltas
that are not combined as LARGEST, which is faster."""

_LARGE, _BAND, _RANDOM, _ROW_RANKS, _BY_RANK, _GROUPS, _CHOSEN = (
    Switch("keep", [mode])
    for mode in (KEEP_LARGE, KEEP_BAND, KEEP_RANDOM, KEEP_ROW_RANKS, KEEP_BY_RANK, KEEP_GROUPS, KEEP_CHOSEN)
)
_ELECTED, _COUNTED = Switch("elect", [ELECT_SUM, ELECT_COUNT]), Switch("elect", [ELECT_COUNT])
_PAIR, _NO_PAIR = Switch("elect", [ELECT_PAIR]), Switch("elect", [ELECT_NONE, ELECT_SUM, ELECT_COUNT])
_DIVIDED, _LARGEST = Switch("mean", [BY_WEIGHT, BY_COUNT], behind=_NO_PAIR), Switch("mean", [LARGEST], behind=_NO_PAIR)


class Place(NamedTuple):
    """Where a tile is: its number of elements, the flat index of its first, and the elements that are done at a time.

    block  a row's elements, for modes that need whole rows; else at most BLOCK
    """

    n: int
    first: int
    block: int


class Masks(NamedTuple):
    """What is kept of each model's delta.

    modes   int64 [models], KEEP_ALL to KEEP_CHOSEN
    limits, cuts, shares  int64, int64, float64 [models, 2], by mode: see above
    unbiased  KEEP_BY_RANK divides by each element's probability
    keys    uint64 [models], of the random masks
    chosen  uint8 [models, elements of the tile], 1 where KEEP_CHOSEN keeps an element; [models, 0] if no mode is that
    """

    modes: np.ndarray
    limits: np.ndarray
    cuts: np.ndarray
    shares: np.ndarray
    unbiased: bool
    keys: np.ndarray
    chosen: np.ndarray


class Combination(NamedTuple):
    """How masked deltas become one.

    weights  float64 [models]: factor of each model's delta
    scales   float64 [models]: factor of what the mask leaves of that delta
    elect   ELECT_NONE to ELECT_PAIR: keep only contributions of the elected sign
    mean    SUM, BY_WEIGHT, BY_COUNT or LARGEST
    factor  lambda, divided by the sum of all weights when normalising without election
    """

    weights: np.ndarray
    scales: np.ndarray
    elect: int
    mean: int
    factor: float


class MergeScratch(NamedTuple):
    """Working memory.

    rows    [1 + models + 3, block] to merge, [2, block] for norms
    sums    float64 [1, block] to merge, [2 · models, >= LANES] for norms
    words   uint32 [block + 512]
    bits, order, taken  uint32 [block], uint32 [4, block], uint8 [block]; empty if no mode needs whole rows
    """

    rows: np.ndarray
    sums: np.ndarray
    words: np.ndarray
    bits: np.ndarray
    order: np.ndarray
    taken: np.ndarray


@kernel
def keep_large(delta: np.ndarray, n: int, threshold: int, cut: int) -> None:
    """Zero delta[:n] but where its magnitude bits exceed `threshold`, or equal it at an index below `cut`."""
    cut = min(max(cut, 0), n)
    limit = np.uint32(threshold)
    head, tail = delta[:cut], delta[cut:n]  # two loops with one comparison each: 3 times faster than testing the index
    for j in range(head.size):
        bits = np.uint32(as_bits(head[j]) & np.uint32(0x7FFFFFFF))
        head[j] = or_zero(head[j], bits >= limit)
    for j in range(tail.size):
        bits = np.uint32(as_bits(tail[j]) & np.uint32(0x7FFFFFFF))
        tail[j] = or_zero(tail[j], bits > limit)


@kernel
def decode_large(
    raw: np.ndarray, code: int, start: int, n: int, base: np.ndarray, threshold: int, cut: int, delta: np.ndarray
) -> None:
    """`decode_delta`, then `keep_large`; for bf16 in one loop."""
    if BF16_IN and code == BF16:
        x = raw.view(np.uint16)[start : start + n]
        cut = min(max(cut, 0), n)
        limit = np.uint32(threshold)
        b, d, y = base[:cut], delta[:cut], x[:cut]
        for j in range(cut):
            value = as_float(np.uint32(y[j]) << np.uint32(16)) - b[j]
            d[j] = value if np.uint32(as_bits(value) & np.uint32(0x7FFFFFFF)) >= limit else np.float32(0)
        b, d, y = base[cut:n], delta[cut:n], x[cut:]
        for j in range(n - cut):
            value = as_float(np.uint32(y[j]) << np.uint32(16)) - b[j]
            d[j] = value if np.uint32(as_bits(value) & np.uint32(0x7FFFFFFF)) > limit else np.float32(0)
    elif OTHER_IN:
        decode_delta(raw, code, start, n, base, delta)
        keep_large(delta, n, threshold, cut)


@kernel
def keep_random(delta: np.ndarray, n: int, words: np.ndarray, limit: int) -> None:
    """Zero delta[:n] but where words[j] < limit (a probability times 2^32)."""
    if limit <= 0:
        fill(delta, n, 0.0)
        return
    d, w = delta[:n], words[:n]
    last = np.uint32(limit - 1)  # the limit itself may be 2^32
    for j in range(n):
        d[j] = or_zero(d[j], w[j] <= last)


@kernel
def keep_chosen(delta: np.ndarray, n: int, chosen: np.ndarray) -> None:
    """Zero delta[:n] but where chosen[j] is 1."""
    d, g = delta[:n], chosen[:n]
    for j in range(n):
        d[j] = or_zero(d[j], g[j] != np.uint8(0))


@kernel
def sparsify(delta: np.ndarray, n: int, masks: Masks, i: int, index: int, scratch: MergeScratch) -> None:
    """Apply model i's mask to delta[:n], whose first element has flat index `index` in its tensor.

    `scratch.taken` is what earlier models have taken of the row.
    """
    mode, limits, cuts, shares, key = masks.modes[i], masks.limits[i], masks.cuts[i], masks.shares[i], masks.keys[i]
    words, bits = scratch.words, scratch.bits
    if _LARGE and mode == KEEP_LARGE:
        keep_large(delta, n, limits[0], cuts[0] - index)
    elif _BAND and mode == KEEP_BAND:
        keep_band(delta, n, limits[0], cuts[0] - index, limits[1], cuts[1] - index)
    elif _RANDOM and mode == KEEP_RANDOM:
        offset = random_words(key, index, n, words)
        keep_random(delta, n, words[offset:], limits[0])
    elif _ROW_RANKS and mode == KEEP_ROW_RANKS:
        keep_ranks(delta, n, limits[0], limits[1], bits)
    elif _BY_RANK and mode == KEEP_BY_RANK:
        offset = random_words(key, index, n, words)
        keep_by_rank(delta, n, shares[0], shares[1], masks.unbiased, words[offset:], bits, scratch.order)
    elif _GROUPS and mode == KEEP_GROUPS:
        keep_in_groups(delta, n, limits[0], limits[1], scratch.taken, bits)
    elif mode == KEEP_NONE:
        fill(delta, n, 0.0)


@kernel
def decode_delta(raw: np.ndarray, code: int, start: int, n: int, base: np.ndarray, delta: np.ndarray) -> None:
    """delta[:n] = elements start … start + n of raw, minus base[:n], rounded to the row's dtype."""
    if BF16_IN and code == BF16:  # decode and subtract in one loop
        x = raw.view(np.uint16)[start : start + n]
        b, d = base[:n], delta[:n]
        for j in range(n):
            d[j] = as_float(np.uint32(x[j]) << np.uint32(16)) - b[j]
    elif OTHER_IN:
        decode(raw, code, start, n, delta)
        subtract(delta, base, n)


@kernel
def elected_signs(total: np.ndarray, n: int, sign: np.ndarray) -> None:
    """sign[:n] = 1 where total is zero or more, else -1."""
    t, s = total[:n], sign[:n]
    for j in range(n):  # a tie is positive, as in mergekit
        s[j] = np.float32(1.0) if t[j] >= 0.0 else np.float32(-1.0)


@kernel
def add_signs(weight: float, x: np.ndarray, n: int, total: np.ndarray) -> None:
    """total[:n] += the sign of weight · x[:n]."""
    a, t = x[:n], total[:n]
    for j in range(n):
        y = weight * a[j]
        t[j] += 1.0 if y > 0 else (-1.0 if y < 0 else 0.0)


@kernel
def add_elected(
    factor: float, weight: float, delta: np.ndarray, sign: np.ndarray, n: int, mixed: np.ndarray, divisor: np.ndarray
) -> None:
    """Where factor·delta has the elected sign: mixed[:n] += it, divisor[:n] += weight; in the rows' dtype."""
    # All terms of a sum have the elected sign: nothing cancels, so k terms in float32 are wrong by k · 2^-24 of the sum at
    # most, far below half a step of bf16 (2^-9), and the loop moves half the bytes.
    d, e, s, v = delta[:n], sign[:n], mixed[:n], divisor[:n]
    for j in range(n):
        x = factor * d[j]
        agree = x * e[j] > 0
        s[j] += x if agree else np.float32(0.0)
        v[j] += weight if agree else np.float32(0.0)


@kernel
def add_pair(
    weights: np.ndarray, scaled: tuple[Any, Any], votes: tuple[Any, Any], factor: float, rows: np.ndarray, n: int
) -> None:
    """rows[0, :n] += what two deltas, rows[1] and rows[2], come to: with ELECT_SUM, in one loop and half the time.

    weights  float64 [2], that elect the sign; scaled: the same in the rows' dtype
    votes    what each adds to the divisor, in the rows' dtype; both 0: there is none
    """
    base, x, y = rows[0][:n], rows[1][:n], rows[2][:n]
    nothing, (v, w) = np.float32(0), (weights[0], weights[1])
    for j in range(n):
        a, b = scaled[0] * x[j], scaled[1] * y[j]
        total = v * np.float64(x[j]) + w * np.float64(y[j])  # in float64, as the sum of `set_scaled` and `add_scaled`
        sign = np.float32(1) if total >= 0.0 else np.float32(-1)
        first, second = a * sign > nothing, b * sign > nothing
        mixed = (a if first else nothing) + (b if second else nothing)
        divisor = (votes[0] if first else nothing) + (votes[1] if second else nothing)
        base[j] += factor * mixed / (divisor if divisor != nothing else np.float32(1))


@kernel
def add_nonzero(factor: float, weight: float, delta: np.ndarray, n: int, mixed: np.ndarray, divisor: np.ndarray) -> None:
    """`add_elected` where nobody elects: whatever is not zero."""
    d, s, v = delta[:n], mixed[:n], divisor[:n]
    for j in range(n):
        s[j] += factor * d[j]
        v[j] += weight if d[j] != 0 else np.float32(0.0)


@kernel
def take_larger(factor: float, delta: np.ndarray, sign: np.ndarray, elect: bool, n: int, mixed: np.ndarray) -> None:
    """mixed[:n] = factor·delta[:n] where that is larger in magnitude (and has the elected sign); of equal ones the later."""
    d, e, s = delta[:n], sign[:n], mixed[:n]
    for j in range(n):
        x = factor * d[j]
        allowed = (x * e[j] > 0) | (not elect)
        s[j] = x if allowed & (abs(x) >= abs(s[j])) else s[j]


@kernel
def add_mean(base: np.ndarray, factor: float, mixed: np.ndarray, divisor: np.ndarray, n: int, divide: bool) -> None:
    """base[:n] += factor · mixed[:n], divided by divisor[:n] where that is asked for and not zero."""
    b, s, v = base[:n], mixed[:n], divisor[:n]
    if divide:
        for j in range(n):
            b[j] += factor * s[j] / (v[j] if v[j] != 0 else np.float32(1.0))
    else:
        for j in range(n):
            b[j] += factor * s[j]


@kernel
def _vote(mean: int, weight: float) -> float:
    """What a model adds to the divisor where it agrees."""
    return 1.0 if mean == BY_COUNT else abs(weight)


@kernel(inputs_codes="in", out_code="out", masks_modes="keep", masks_unbiased="unbiased", how_elect="elect", how_mean="mean")
def merge_task_vectors(
    inputs: EncodedInputs, place: Place, masks: Masks, how: Combination, out: Encoded, scratch: MergeScratch
) -> None:
    """One tile of a task-vector merge. inputs: the base, then the models."""
    raw, codes = inputs
    n, first, block = place
    modes, limits, cuts, chosen = masks.modes, masks.limits, masks.cuts, masks.chosen
    weights, scales, elect, mean, factor = how
    rows, taken = scratch.rows, scratch.taken
    base, total = rows[0], scratch.sums[0]
    models = weights.size
    sign, mixed, divisor = rows[models + 1], rows[models + 2], rows[models + 3]
    of_row = base.dtype.type
    for start in range(0, n, block):
        m = min(block, n - start)
        decode(raw[0], codes[0], start, m, base)
        taken[:] = 0
        for i in range(models):
            delta = rows[i + 1]
            if _LARGE and modes[i] == KEEP_LARGE:
                decode_large(raw[i + 1], codes[i + 1], start, m, base, limits[i, 0], cuts[i, 0] - first - start, delta)
            elif _CHOSEN and modes[i] == KEEP_CHOSEN:
                decode_delta(raw[i + 1], codes[i + 1], start, m, base, delta)
                keep_chosen(delta, m, chosen[i, start:])
            else:
                decode_delta(raw[i + 1], codes[i + 1], start, m, base, delta)
                sparsify(delta, m, masks, i, first + start, scratch)
            if _COUNTED:
                if i == 0:
                    fill(total, m, 0.0)
                add_signs(weights[i] * scales[i], delta, m, total)
            elif _NO_PAIR and i == 0:
                set_scaled(weights[i] * scales[i], delta, m, total)
            elif _NO_PAIR:
                add_scaled(weights[i] * scales[i], delta, m, total)
        if _PAIR:
            voting = 0.0 if mean == SUM else 1.0
            votes = of_row(voting * _vote(mean, weights[0])), of_row(voting * _vote(mean, weights[1]))
            scaled_pair = of_row(weights[0] * scales[0]), of_row(weights[1] * scales[1])
            add_pair(weights * scales, scaled_pair, votes, of_row(factor), rows, m)
        elif _ELECTED or _DIVIDED or _LARGEST:
            elected_signs(total, m, sign)
            fill(mixed, m, 0.0)
            fill(divisor, m, 0.0)
            for i in range(models):
                scaled, vote = of_row(weights[i] * scales[i]), of_row(_vote(mean, weights[i]))
                if _LARGEST:
                    take_larger(scaled, rows[i + 1], sign, elect != ELECT_NONE, m, mixed)
                elif _ELECTED:
                    add_elected(scaled, vote, rows[i + 1], sign, m, mixed, divisor)
                else:
                    add_nonzero(scaled, vote, rows[i + 1], m, mixed, divisor)
            add_mean(base, of_row(factor), mixed, divisor, m, mean == BY_WEIGHT or mean == BY_COUNT)
        else:
            add_delta(total, factor, m, base)
        encode(base, m, out.code, start, out.data)


@kernel(inputs_codes="in", masks_modes="keep", masks_unbiased="unbiased")
def l1_norms(
    inputs: EncodedInputs, place: Place, grain: int, masks: Masks, out: np.ndarray, scratch: MergeScratch, kept: np.ndarray
) -> None:
    """out[g, i] (float64 [grains, models, 2]) = L1 norm of model i's delta in grain g, before and after its mask.

    kept  uint8 [models, n], becomes 1 where a model's delta is kept and not zero; [models, 0]: not wanted
    """
    raw, codes = inputs
    n, first, block = place
    rows, sums, taken = scratch.rows, scratch.sums, scratch.taken
    base, delta = rows[0], rows[1]
    models = masks.modes.size
    for g in range(out.shape[0]):
        end = min(n, (g + 1) * grain)
        for s in range(2 * models):
            fill(sums[s], LANES, 0.0)
        for start in range(g * grain, end, block):
            m = min(block, end - start)
            decode(raw[0], codes[0], start, m, base)
            taken[:] = 0
            for i in range(models):
                decode_delta(raw[i + 1], codes[i + 1], start, m, base, delta)
                add_magnitudes(delta, m, sums[2 * i])
                sparsify(delta, m, masks, i, first + start, scratch)
                add_magnitudes(delta, m, sums[2 * i + 1])
                if kept.shape[1]:
                    mask = kept[i, start : start + m]
                    for j in range(m):
                        mask[j] = np.uint8(delta[j] != 0)
        for i in range(models):
            out[g, i, 0] = sum_lanes(sums[2 * i])
            out[g, i, 1] = sum_lanes(sums[2 * i + 1])
