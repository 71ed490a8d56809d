"""The task-vector family in one kernel: delta → sparsify → weight → elect signs → combine → scale → add to base.

TIES (Yadav et al. 2023, https://arxiv.org/abs/2306.01708), DARE (Yu et al. 2023, https://arxiv.org/abs/2311.03099) and task
arithmetic (Ilharco et al. 2022, https://arxiv.org/abs/2212.04089) are settings of it. A delta is float32(model) -
float32(base), rounded to float32 (exact for bf16 inputs of similar exponents; float64 throughout when a tensor is F64);
products, sums and the final addition are float64.
"""

from __future__ import annotations

import numpy as np

from weightsmith.kernels.codecs import BLOCK, as_bits, decode, encode
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
def keep_random(delta: np.ndarray, n: int, words: np.ndarray, limit: int) -> None:
    """Zero delta[:n] but where words[j] < limit (a probability times 2^32)."""
    d, w = delta[:n], words[:n]
    bound = np.uint64(limit)
    for j in range(n):
        d[j] = d[j] if np.uint64(w[j]) < bound else np.float32(0)


@kernel
def sparsify(
    delta: np.ndarray, n: int, mode: int, limit: int, cut: int, key: int, index: int, words: np.ndarray
) -> None:
    """Apply one model's mask to delta[:n], whose first element has flat index `index` in its tensor."""
    if mode == KEEP_LARGE:
        keep_large(delta, n, limit, cut - index)
    elif mode == KEEP_RANDOM:
        offset = random_words(key, index, n, words)
        keep_random(delta, n, words[offset:], limit)
    elif mode == KEEP_NONE:
        fill(delta, n, 0.0)


@kernel
def add_elected(
    factor: float,
    weight: float,
    delta: np.ndarray,
    n: int,
    total: np.ndarray,
    mixed: np.ndarray,
    divisor: np.ndarray,
    first: bool,
) -> None:
    """Where factor·delta has the sign of total (zero counts as +): mixed += it, divisor += weight; `first` begins both."""
    d, t, s, v = delta[:n], total[:n], mixed[:n], divisor[:n]
    if first:
        for j in range(n):
            x = factor * np.float64(d[j])
            agree = ((x > 0.0) & (t[j] >= 0.0)) | ((x < 0.0) & (t[j] < 0.0))
            s[j] = x if agree else 0.0
            v[j] = weight if agree else 0.0
    else:
        for j in range(n):
            x = factor * np.float64(d[j])
            agree = ((x > 0.0) & (t[j] >= 0.0)) | ((x < 0.0) & (t[j] < 0.0))
            s[j] += x if agree else 0.0
            v[j] += weight if agree else 0.0


@kernel
def add_to_base(base: np.ndarray, factor: float, mixed: np.ndarray, divisor: np.ndarray, n: int, divide: bool) -> None:
    """base[:n] += factor · mixed[:n] (/ divisor[:n] where that is not zero), in float64, rounded to the row's dtype."""
    b, s, v = base[:n], mixed[:n], divisor[:n]
    if divide:
        for j in range(n):
            b[j] = np.float64(b[j]) + factor * s[j] / (v[j] if v[j] != 0.0 else 1.0)
    else:
        for j in range(n):
            b[j] = np.float64(b[j]) + factor * s[j]


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
    rows        scratch [1 + models, BLOCK]; sums float64 [3, BLOCK]; words uint32 [BLOCK + 512]
    """
    base, total = rows[0], sums[0]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        decode(raw[0], codes[0], start, m, base)
        for i in range(weights.size):
            delta = rows[i + 1]
            decode(raw[i + 1], codes[i + 1], start, m, delta)
            subtract(delta, base, m)
            sparsify(delta, m, modes[i], limits[i], cuts[i], keys[i], index + start, words)
            if i == 0:
                set_scaled(weights[i] * scales[i], delta, m, total)
            else:
                add_scaled(weights[i] * scales[i], delta, m, total)
        mixed = total
        if elect:
            mixed = sums[1]
            for i in range(weights.size):
                add_elected(weights[i] * scales[i], weights[i], rows[i + 1], m, total, mixed, sums[2], i == 0)
        add_to_base(base, factor, mixed, sums[2], m, elect and normalize)
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
            decode(raw[i], codes[i], start, m, delta)
            subtract(delta, base, m)
            add_magnitudes(delta, m, sums[0])
            sparsify(delta, m, mode, limit, cut, key, index + start, words)
            add_magnitudes(delta, m, sums[1])
        out[g, 0] = sum_lanes(sums[0])
        out[g, 1] = sum_lanes(sums[1])
