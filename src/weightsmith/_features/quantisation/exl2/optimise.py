"""Which setting each block gets, so that the model has a target size and the least loss.

Each block has candidates with a size and a loss, one of which is chosen (a multiple-choice knapsack). Losses of blocks add up:
to the second order, errors of different blocks are independent ("linearity theorem", Malinovskii et al. 2024,
https://arxiv.org/abs/2411.17525). Everything is deterministic, without random numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightsmith._base.options import option_error


class Candidate(NamedTuple):
    """A setting of a block: its size, and what it adds to the model's loss, in any unit."""

    bits: int
    loss: float


Slots = Sequence[Sequence[Candidate]]


def choose(slots: Slots, weights: int, target_bits: float) -> tuple[int, ...]:
    """The index of each block's candidate: at most `target_bits` for each weight, all of them together.

    slots    the candidates of each block
    weights  of all blocks

    Raises ParameterError for a target that the candidates cannot reach, with the range that they can.

    >>> cheap, dear = Candidate(20, 0.3), Candidate(40, 0.1)
    >>> choose([[cheap, dear], [cheap, Candidate(40, 0.2)]], 10, 6.0)
    (1, 0)
    """
    least, most = (sum(pick(c.bits for c in slot) for slot in slots) / weights for pick in (min, max))
    if not least <= target_bits <= most:
        what = f"{target_bits:g} bits for each weight are out of reach: settings take {least:.2f} to {most:.2f} bits"
        raise option_error("bits", what, f"write a number between {least + 0.005:.2f} and {most - 0.005:.2f}")
    return solve(slots, int(weights * target_bits))


def solve(slots: Slots, budget: int) -> tuple[int, ...]:
    """The candidates with the least sum of losses within `budget` bits, or nearly so.

    A Lagrangian solution, improved by exchanges of one or two blocks until none helps. What is left goes to larger
    candidates of equal loss.
    """
    width = max(map(len, slots))
    bits = np.array([[c.bits for c in slot] + [slot[-1].bits] * (width - len(slot)) for slot in slots], np.int64)
    losses = np.array([[c.loss for c in slot] + [np.inf] * (width - len(slot)) for slot in slots])
    choice = _lagrangian(bits, losses, budget)
    rows = np.arange(len(slots))
    while (moves := _exchange(bits, losses, choice, budget)) is not None:
        for slot, option in moves:
            choice[slot] = option
    while True:
        slack = budget - int(bits[rows, choice].sum())
        extra = bits - bits[rows, choice][:, None]
        free = (losses <= losses[rows, choice][:, None]) & (extra > 0) & (extra <= slack)
        if not free.any():
            return tuple(map(int, choice))
        slot, option = divmod(int(np.where(free, extra, 0).argmax()), width)
        choice[slot] = option


def _lagrangian(bits: npt.NDArray[np.int64], losses: npt.NDArray[np.float64], budget: int) -> npt.NDArray[np.int64]:
    """The candidates that minimise loss + λ · bits, with the smallest λ that stays within the budget."""
    rows = np.arange(len(bits))

    def best(price: float) -> npt.NDArray[np.int64]:
        total = losses + price * bits
        return np.asarray(np.where(total == total.min(1, keepdims=True), bits, np.iinfo(np.int64).max).argmin(1), np.int64)

    low, high = 0.0, 1e-12
    while bits[rows, best(high)].sum() > budget and high < 1e30:
        low, high = high, high * 4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if bits[rows, best(middle)].sum() > budget else (low, middle)
    found = best(high)
    return found if bits[rows, found].sum() <= budget else bits.argmin(1)


def _exchange(
    bits: npt.NDArray[np.int64], losses: npt.NDArray[np.float64], choice: npt.NDArray[np.int64], budget: int
) -> list[tuple[int, int]] | None:
    """The change of one or two blocks that helps most within the budget; None if none does."""
    rows, width = np.arange(len(bits)), bits.shape[1]
    slack = budget - int(bits[rows, choice].sum())
    costs = (bits - bits[rows, choice][:, None]).ravel()
    gains = (losses - losses[rows, choice][:, None]).ravel()
    order = np.argsort(costs, kind="stable")
    sorted_costs = costs[order].tolist()
    # The best of the cheapest 0 … i, and the best of those that change another block.
    best: list[tuple[int, int]] = []
    first = second = -1
    for move in order.tolist():
        if first < 0 or gains[move] < gains[first]:
            if first >= 0 and first // width != move // width:
                second = first
            first = move
        elif move // width != first // width and (second < 0 or gains[move] < gains[second]):
            second = move
        best.append((first, second))
    found, least = None, -1e-12 * float(losses[rows, choice].sum())
    for a in np.flatnonzero(costs <= slack - min(sorted_costs)).tolist():
        at = bisect_right(sorted_costs, slack - int(costs[a])) - 1
        for b in best[at] if at >= 0 else ():
            if b >= 0 and (b // width != a // width) and gains[a] + gains[b] < least:
                found, least = [divmod(a, width), divmod(b, width)], gains[a] + gains[b]
        if costs[a] <= slack and gains[a] < least:
            found, least = [divmod(a, width)], gains[a]
    return found
