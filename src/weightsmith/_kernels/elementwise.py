"""Merges that look at one position of all models at a time, and the counts some of them need."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weightsmith._kernels.codecs import BLOCK, Encoded, EncodedInputs, decode, encode, or_zero
from weightsmith._kernels.combine import LANES, add_delta, add_products, add_scaled, fill, set_scaled, subtract, sum_lanes
from weightsmith._kernels.jit import kernel


@kernel
def read_deltas(raw: np.ndarray, codes: np.ndarray, start: int, n: int, rows: np.ndarray) -> None:
    """rows[0, :n] = the base, rows[i, :n] = model i minus base, of elements start … start + n."""
    decode(raw[0], codes[0], start, n, rows[0])
    for i in range(1, raw.shape[0]):
        decode(raw[i], codes[i], start, n, rows[i])
        subtract(rows[i], rows[0], n)


@kernel(inputs_codes="in", out_code="out")
def merge_clipped(inputs: EncodedInputs, n: int, limit: float, out: Encoded, rows: np.ndarray, sums: np.ndarray) -> None:
    """out = base + the delta of the one model, cut to ±limit (float64; none above zero: the base)."""
    raw, codes = inputs
    bound, total = max(limit, 0.0), sums[0]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        read_deltas(raw, codes, start, m, rows)
        d = rows[1]
        for j in range(m):
            total[j] = min(max(np.float64(d[j]), -bound), bound)
        add_delta(total, 1.0, m, rows[0])
        encode(rows[0], m, out.code, start, out.data)


@kernel(inputs_codes="in", out_code="out")
def merge_trained(inputs: EncodedInputs, n: int, factor: float, out: Encoded, rows: np.ndarray, sums: np.ndarray) -> None:
    """out = A + factor · (B - base) · |B - A| / (|B - A| + |B - base|), of base, A and B; A where all three are equal.

    sums float64 [1, BLOCK] scratch
    """
    raw, codes = inputs
    total = sums[0]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        read_deltas(raw, codes, start, m, rows)
        first, second = rows[1], rows[2]
        for j in range(m):
            a, b = np.float64(first[j]), np.float64(second[j])
            apart = abs(b - a)
            total[j] = a + or_zero(factor * b * (apart / (apart + abs(b))), b != 0)
        add_delta(total, 1.0, m, rows[0])
        encode(rows[0], m, out.code, start, out.data)


@kernel(inputs_codes="in", out_code="out")
def merge_similar(
    inputs: EncodedInputs, n: int, alpha: float, beta: float, out: Encoded, rows: np.ndarray, sums: np.ndarray
) -> None:
    """out = A + alpha · ((1 - s) · (B - base) + s · (B - A) / 2), s = beta · (A B / max(|A|, |B|)² + 1) / 2, of base, A and B.

    Where A and B are 0, s is beta. sums: float64 [1, BLOCK] scratch
    """
    raw, codes = inputs
    total = sums[0]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        for i in range(3):
            decode(raw[i], codes[i], start, m, rows[i])
        base, first, second = rows[0], rows[1], rows[2]
        for j in range(m):
            a, b = np.float64(first[j]), np.float64(second[j])
            largest = max(abs(a), abs(b))
            alike = beta
            if largest > 0:
                alike = beta * (((a / largest) * (b / largest) + 1.0) / 2.0)
            total[j] = alpha * ((1.0 - alike) * (b - np.float64(base[j])) + alike * (b - a) / 2.0)
        add_delta(total, 1.0, m, rows[1])
        encode(rows[1], m, out.code, start, out.data)


@kernel(codes="in")
def count_active(
    raw: np.ndarray, codes: np.ndarray, n: int, epsilon: float, counts: np.ndarray, rows: np.ndarray, sums: np.ndarray
) -> None:
    """counts[i] (int64 [models, 2]) += positions where model i is active alone, and where others are too.

    Active is |delta| > epsilon; sums float64 [1, BLOCK] scratch.
    """
    active = sums[0]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        read_deltas(raw, codes, start, m, rows)
        fill(active, m, 0.0)
        for i in range(1, raw.shape[0]):
            d = rows[i]
            for j in range(m):
                active[j] += 1.0 if abs(np.float64(d[j])) > epsilon else 0.0
        for i in range(1, raw.shape[0]):
            d = rows[i]
            alone, shared = 0, 0
            for j in range(m):
                on = abs(np.float64(d[j])) > epsilon
                alone += int(on & (active[j] < 1.5))
                shared += int(on & (active[j] > 1.5))
            counts[i - 1, 0] += alone
            counts[i - 1, 1] += shared


@kernel(inputs_codes="in", out_code="out")
def merge_active(
    inputs: EncodedInputs,
    n: int,
    epsilon: float,
    alone: np.ndarray,
    factor: float,
    out: Encoded,
    rows: np.ndarray,
    sums: np.ndarray,
) -> None:
    """RAM: where one model is active its delta times alone[i] (float64 [models]), where several are the mean of theirs.

    sums float64 [3, BLOCK] scratch
    """
    raw, codes = inputs
    total, single, active = sums[0], sums[1], sums[2]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        read_deltas(raw, codes, start, m, rows)
        fill(total, m, 0.0)
        fill(single, m, 0.0)
        fill(active, m, 0.0)
        for i in range(1, raw.shape[0]):
            d, scale = rows[i], alone[i - 1]
            for j in range(m):
                x = np.float64(d[j])
                x = x if abs(x) > epsilon else np.float64(0.0)
                total[j] += x
                single[j] += scale * x
                active[j] += 1.0 if x != 0 else 0.0
        for j in range(m):
            one, several = single[j], total[j] / active[j]
            total[j] = one if active[j] < 1.5 else several
        add_delta(total, factor, m, rows[0])
        encode(rows[0], m, out.code, start, out.data)


class Consensus(NamedTuple):
    """thresholds float64 [models] of models that stand out, and the votes that an element needs."""

    thresholds: np.ndarray
    votes: int


@kernel(inputs_codes="in", out_code="out")
def merge_consensus(
    inputs: EncodedInputs,
    n: int,
    weights: np.ndarray,
    consensus: Consensus,
    factor: float,
    out: Encoded,
    rows: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Consensus TA: the sum of the weighted deltas where at least `votes` models stand out of the rest of it.

    Model i stands out where |wᵢδᵢ| > thresholds[i] · |Σ wδ - wᵢδᵢ|. sums float64 [2, BLOCK] scratch.
    """
    raw, codes = inputs
    total, count = sums[0], sums[1]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        read_deltas(raw, codes, start, m, rows)
        fill(total, m, 0.0)
        fill(count, m, 0.0)
        for i in range(1, raw.shape[0]):
            add_scaled(weights[i - 1], rows[i], m, total)
        for i in range(1, raw.shape[0]):
            d, w, bound = rows[i], weights[i - 1], consensus.thresholds[i - 1]
            for j in range(m):
                x = w * np.float64(d[j])
                count[j] += 1.0 if abs(x) > bound * abs(total[j] - x) else 0.0
        for j in range(m):
            total[j] = or_zero(total[j], count[j] >= consensus.votes)
        add_delta(total, factor, m, rows[0])
        encode(rows[0], m, out.code, start, out.data)


@kernel(inputs_codes="in", out_code="out")
def merge_fused(
    inputs: EncodedInputs,
    n: int,
    limit: float,
    factors: np.ndarray,
    cols: int,
    out: Encoded,
    rows: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Arcee Fusion: base plus the delta where float32(|delta| · factors[its row]) is at least `limit`."""
    raw, codes = inputs
    total = sums[0]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        decode(raw[0], codes[0], start, m, rows[0])
        decode(raw[1], codes[1], start, m, rows[1])
        begin = 0
        while begin < m:  # row by row
            row = (start + begin) // cols
            end = min(m, (row + 1) * cols - start)
            x, y, t = rows[0][begin:end], rows[1][begin:end], total[begin:end]
            factor = factors[row]
            for j in range(end - begin):
                delta = np.float64(y[j]) - np.float64(x[j])
                t[j] = delta if np.float64(np.float32(abs(delta) * factor)) >= limit else 0.0
            begin = end
        add_delta(total, 1.0, m, rows[0])
        encode(rows[0], m, out.code, start, out.data)


# ---- SCE


@kernel(codes="in")
def count_varying(raw: np.ndarray, codes: np.ndarray, n: int, rows: np.ndarray) -> int:
    """Positions at which the models raw[1:] are not all equal; rows scratch [2, BLOCK]."""
    total = 0
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        decode(raw[1], codes[1], start, m, rows[0])
        first, x = rows[0], rows[1]
        varies = np.zeros(m, np.uint8)
        for i in range(2, raw.shape[0]):
            decode(raw[i], codes[i], start, m, x)
            for j in range(m):
                varies[j] = varies[j] | np.uint8(x[j] != first[j])
        for j in range(m):
            total += varies[j]
    return total


@kernel(codes="in")
def energies(
    raw: np.ndarray,
    codes: np.ndarray,
    n: int,
    grain: int,
    selected: np.ndarray,
    out: np.ndarray,
    rows: np.ndarray,
    sums: np.ndarray,
) -> None:
    """out[g, i] (float64 [grains, models]) = Σ δ² of model i over the selected elements of grain g.

    selected  uint8 [n], or [0] for all; sums float64 [models, >= LANES] scratch
    """
    models = raw.shape[0] - 1
    for g in range(out.shape[0]):
        end = min(n, (g + 1) * grain)
        for i in range(models):
            fill(sums[i], LANES, 0.0)
        for start in range(g * grain, end, BLOCK):
            m = min(BLOCK, end - start)
            read_deltas(raw, codes, start, m, rows)
            for i in range(models):
                d = rows[i + 1]
                if selected.size:
                    chosen = selected[start : start + m]
                    for j in range(m):
                        d[j] = or_zero(d[j], chosen[j] != np.uint8(0))
                add_products(d, d, m, sums[i])
        for i in range(models):
            out[g, i] = sum_lanes(sums[i])


@kernel(inputs_codes="in", out_code="out")
def merge_elected(
    inputs: EncodedInputs,
    n: int,
    shares: np.ndarray,
    selected: np.ndarray,
    out: Encoded,
    rows: np.ndarray,
    sums: np.ndarray,
) -> None:
    """SCE: base plus the mean, by `shares` (float64 [models]), of the deltas that have the sign of their plain sum.

    selected  uint8 [n]: other positions keep the base; [0] for all. sums float64 [3, BLOCK] scratch.
    """
    raw, codes = inputs
    total, mixed, divisor = sums[0], sums[1], sums[2]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        read_deltas(raw, codes, start, m, rows)
        set_scaled(1.0, rows[1], m, total)
        for i in range(2, raw.shape[0]):
            add_scaled(1.0, rows[i], m, total)
        fill(mixed, m, 0.0)
        fill(divisor, m, 0.0)
        for i in range(1, raw.shape[0]):
            d, share = rows[i], shares[i - 1]
            for j in range(m):
                value, up = np.float64(d[j]), total[j] >= 0
                agrees = ((value > 0) & up) | ((value < 0) & (not up))
                mixed[j] += share * value if agrees else 0.0
                divisor[j] += share if agrees else 0.0
        if selected.size:
            chosen = selected[start : start + m]
            for j in range(m):
                mixed[j] = or_zero(mixed[j] / divisor[j], (divisor[j] > 0) & (chosen[j] != np.uint8(0)))
        else:
            for j in range(m):
                mixed[j] = or_zero(mixed[j] / divisor[j], divisor[j] > 0)
        add_delta(mixed, 1.0, m, rows[0])
        encode(rows[0], m, out.code, start, out.data)
