"""The task-vector family in one kernel: delta → sparsify → weight → elect signs → combine → scale → add to base.

TIES (Yadav et al. 2023, https://arxiv.org/abs/2306.01708), DARE (Yu et al. 2023, https://arxiv.org/abs/2311.03099) and task
arithmetic (Ilharco et al. 2022, https://arxiv.org/abs/2212.04089) are settings of it. A delta is float32(model) -
float32(base), rounded to float32 (exact for bf16 inputs of similar exponents). The sum that elects the signs is float64, as
are sums without election: a sign must not turn on a rounding. The elected contributions are summed in float32 rows. All of it
is float64 when the output is F32 or F64.
"""

from __future__ import annotations

import numpy as np

from weightsmith.kernels.codecs import BF16, BLOCK, as_bits, as_float, decode, encode
from weightsmith.kernels.combine import LANES, add_magnitudes, add_scaled, fill, set_scaled, subtract, sum_lanes
from weightsmith.kernels.jit import kernel
from weightsmith.kernels.philox import random_words

KEEP_ALL, KEEP_LARGE, KEEP_RANDOM, KEEP_NONE = 0, 1, 2, 3


@kernel
def keep_large(delta: np.ndarray, n: int, threshold: int, cut: int) -> None:
    """Zero delta[:n] but where its magnitude bits exceed `threshold`, or equal it at an index below `cut`."""
    cut = min(max(cut, 0), n)
    limit = np.uint32(threshold)
    head, tail = delta[:cut], delta[cut:n]  # two loops with one comparison each: 3 times faster than testing the index
    for j in range(head.size):
        bits = np.uint32(as_bits(head[j]) & np.uint32(0x7FFFFFFF))
        head[j] = head[j] if bits >= limit else np.float32(0)
    for j in range(tail.size):
        bits = np.uint32(as_bits(tail[j]) & np.uint32(0x7FFFFFFF))
        tail[j] = tail[j] if bits > limit else np.float32(0)


@kernel
def decode_large(
    raw: np.ndarray, code: int, start: int, n: int, base: np.ndarray, threshold: int, cut: int, delta: np.ndarray
) -> None:
    """`decode_delta`, then `keep_large`; for bf16 in one loop."""
    if code == BF16:
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
    else:
        decode_delta(raw, code, start, n, base, delta)
        keep_large(delta, n, threshold, cut)


@kernel
def keep_random(delta: np.ndarray, n: int, words: np.ndarray, limit: int) -> None:
    """Zero delta[:n] but where words[j] < limit (a probability times 2^32)."""
    d, w = delta[:n], words[:n]
    bound = np.uint64(limit)
    for j in range(n):
        d[j] = d[j] if np.uint64(w[j]) < bound else np.float32(0)


@kernel
def sparsify(delta: np.ndarray, n: int, mode: int, limit: int, cut: int, key: int, index: int, words: np.ndarray) -> None:
    """Apply one model's mask to delta[:n], whose first element has flat index `index` in its tensor."""
    if mode == KEEP_LARGE:
        keep_large(delta, n, limit, cut - index)
    elif mode == KEEP_RANDOM:
        offset = random_words(key, index, n, words)
        keep_random(delta, n, words[offset:], limit)
    elif mode == KEEP_NONE:
        fill(delta, n, 0.0)


@kernel
def decode_delta(raw: np.ndarray, code: int, start: int, n: int, base: np.ndarray, delta: np.ndarray) -> None:
    """delta[:n] = elements start … start + n of raw, minus base[:n], rounded to the row's dtype."""
    if code == BF16:  # decode and subtract in one loop
        x = raw.view(np.uint16)[start : start + n]
        b, d = base[:n], delta[:n]
        for j in range(n):
            d[j] = as_float(np.uint32(x[j]) << np.uint32(16)) - b[j]
    else:
        decode(raw, code, start, n, delta)
        subtract(delta, base, n)


@kernel
def elected_signs(total: np.ndarray, n: int, sign: np.ndarray) -> None:
    """sign[:n] = 1 where total is zero or more, else -1."""
    t, s = total[:n], sign[:n]
    for j in range(n):
        s[j] = np.float32(1.0) if t[j] >= 0.0 else np.float32(-1.0)


@kernel
def add_elected(
    factor: float, weight: float, delta: np.ndarray, sign: np.ndarray, n: int, mixed: np.ndarray, divisor: np.ndarray
) -> None:
    """Where factor·delta has the elected sign: mixed[:n] += it, divisor[:n] += weight; in the rows' dtype."""
    d, e, s, v = delta[:n], sign[:n], mixed[:n], divisor[:n]
    for j in range(n):
        x = factor * d[j]
        agree = x * e[j] > 0
        s[j] += x if agree else np.float32(0.0)
        v[j] += weight if agree else np.float32(0.0)


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
def add_total(base: np.ndarray, factor: float, total: np.ndarray, n: int) -> None:
    """base[:n] += factor · total[:n], in float64, rounded to the row's dtype."""
    b, t = base[:n], total[:n]
    for j in range(n):
        b[j] = np.float64(b[j]) + factor * t[j]


@kernel
def merge_task_vectors(
    raw: np.ndarray,
    codes: np.ndarray,
    n: int,
    index: int,
    weights: np.ndarray,
    scales: np.ndarray,
    modes: np.ndarray,
    limits: np.ndarray,
    cuts: np.ndarray,
    keys: np.ndarray,
    elect: bool,
    normalize: bool,
    factor: float,
    out: np.ndarray,
    out_code: int,
    rows: np.ndarray,
    sums: np.ndarray,
    words: np.ndarray,
) -> None:
    """One tile of a task-vector merge.

    raw, codes  uint8 [1 + models, bytes] and int64; raw[0] is the base
    n, index    elements in the tile, and the flat index of its first
    weights, scales       float64 [models]: of the delta, and of what is left of it after the mask
    modes, limits, cuts, keys   int64, int64, int64, uint64 [models]: see `sparsify`
    elect       keep only contributions of the elected sign (TIES)
    normalize   divide by the sum of the weights that contributed (with election) or of all (factor holds it then)
    factor      lambda, divided by the sum of weights when normalising without election
    rows        scratch [4 + models, BLOCK]; sums float64 [1, BLOCK]; words uint32 [BLOCK + 512]
    """
    base, total = rows[0], sums[0]
    models = weights.size
    sign, mixed, divisor = rows[models + 1], rows[models + 2], rows[models + 3]
    of_row = base.dtype.type
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        decode(raw[0], codes[0], start, m, base)
        for i in range(models):
            delta = rows[i + 1]
            if modes[i] == KEEP_LARGE:
                decode_large(raw[i + 1], codes[i + 1], start, m, base, limits[i], cuts[i] - index - start, delta)
            else:
                decode_delta(raw[i + 1], codes[i + 1], start, m, base, delta)
                sparsify(delta, m, modes[i], limits[i], cuts[i], keys[i], index + start, words)
            if i == 0:
                set_scaled(weights[i] * scales[i], delta, m, total)
            else:
                add_scaled(weights[i] * scales[i], delta, m, total)
        if elect:
            elected_signs(total, m, sign)
            fill(mixed, m, 0.0)
            fill(divisor, m, 0.0)
            for i in range(models):
                add_elected(of_row(weights[i] * scales[i]), of_row(weights[i]), rows[i + 1], sign, m, mixed, divisor)
            add_mean(base, of_row(factor), mixed, divisor, m, normalize)
        else:
            add_total(base, factor, total, m)
        encode(base, m, out_code, start, out)


@kernel
def l1_norms(
    raw: np.ndarray,
    codes: np.ndarray,
    i: int,
    n: int,
    grain: int,
    index: int,
    mode: int,
    limit: int,
    cut: int,
    key: int,
    out: np.ndarray,
    rows: np.ndarray,
    sums: np.ndarray,
    words: np.ndarray,
) -> None:
    """out[g] (float64 [grains, 2]) = L1 norm of model i's delta in grain g, before and after its mask."""
    base, delta = rows[0], rows[1]
    for g in range(out.shape[0]):
        end = min(n, (g + 1) * grain)
        fill(sums[0], LANES, 0.0)
        fill(sums[1], LANES, 0.0)
        for start in range(g * grain, end, BLOCK):
            m = min(BLOCK, end - start)
            decode(raw[0], codes[0], start, m, base)
            decode_delta(raw[i], codes[i], start, m, base, delta)
            add_magnitudes(delta, m, sums[0])
            sparsify(delta, m, mode, limit, cut, key, index + start, words)
            add_magnitudes(delta, m, sums[1])
        out[g, 0] = sum_lanes(sums[0])
        out[g, 1] = sum_lanes(sums[1])
