"""The linear assignment problem: which column each row gets, so that the sum of the chosen entries is largest."""

from __future__ import annotations

import numpy as np

from weightsmith.kernels.jit import kernel


@kernel
def assign(gain: np.ndarray, chosen: np.ndarray) -> None:
    """chosen[i] = the column of row i in the permutation with the largest Σ gain[i, chosen[i]].

    gain    float32 [n, n], finite
    chosen  int64 [n], written

    Shortest augmenting paths with dual prices (Jonker & Volgenant 1987, Computing 38; in the form of Crouse 2016, IEEE TAES
    52(4), algorithm 2), in float64. Of equal columns the lower one is taken, so the result is a function of `gain` alone.
    O(n³) at worst; n² entries are read at least. Scratch: seven vectors of n.
    """
    n = gain.shape[0]
    row_price, column_price = np.zeros(n), np.empty(n)
    owner = np.full(n, -1, np.int64)  # the row that has each column
    before = np.empty(n, np.int64)  # on the way to a column: the row before it
    nearest, settled, seen = np.empty(n), np.empty(n, np.bool_), np.empty(n, np.bool_)
    chosen[:] = -1
    # Cost is -gain. With each column's least cost as its price no reduced cost is negative, and many are 0 at once.
    column_price[:] = np.inf
    for i in range(n):
        for j in range(n):
            column_price[j] = min(column_price[j], -np.float64(gain[i, j]))
    for start in range(n):
        nearest[:] = np.inf
        settled[:] = False
        seen[:] = False
        i, length, end = start, 0.0, -1
        while end < 0:
            seen[i] = True
            shortest, best = np.inf, -1
            for j in range(n):
                if settled[j]:
                    continue
                reached = length - np.float64(gain[i, j]) - row_price[i] - column_price[j]
                if reached < nearest[j]:
                    nearest[j], before[j] = reached, i
                # A free column ends the search; of columns that are equally near, the first free one, else the first.
                if (nearest[j] < shortest) | ((nearest[j] == shortest) & (owner[j] < 0) & (owner[best] >= 0)):
                    shortest, best = nearest[j], j
            length = shortest
            settled[best] = True
            i = owner[best]
            end = best if i < 0 else -1
        for k in range(n):
            if seen[k]:
                row_price[k] += length if k == start else length - nearest[chosen[k]]
        for j in range(n):
            if settled[j]:
                column_price[j] -= length - nearest[j]
        while True:
            i = before[end]
            owner[end] = i
            chosen[i], end = end, chosen[i]
            if i == start:
                break
