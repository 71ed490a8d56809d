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


def solve_together(
    bits: Sequence[Sequence[int]], scores: Sequence[npt.NDArray[np.float32]], budget: int, starts: Sequence[Sequence[int]] = ()
) -> tuple[int, ...]:
    """The candidates whose errors together change the predictions least, within `budget` bits, or nearly so.

    bits    of the candidates of each block
    scores  of each block [candidates, tokens]: the loss of a choice is half the mean square of their sum over blocks
    starts  choices to begin from, besides the one for errors that are independent; those beyond the budget are left out

    Each start is improved by changing one or two blocks at a time until nothing helps. The best result wins. Errors may cancel
    by chance, so any budget left is spent on larger candidates with a lower loss of their own, unless they make the total
    significantly worse.
    Memory: 24 bytes for each pair of candidates of any blocks.

    >>> twice = np.float32([[1, 1], [0, 0]])  # two blocks that push the same way, and a small one that pushes back
    >>> solve_together([[1, 2], [1, 2], [1, 2]], [twice, twice, np.float32([[-1, -1], [0, 0]])], 4)
    (0, 1, 0)
    """
    width, tokens = max(map(len, bits)), scores[0].shape[1]
    costs = np.array([[*candidates, *[candidates[-1]] * (width - len(candidates))] for candidates in bits], np.int64)
    usable = np.array([[k < len(candidates) for k in range(width)] for candidates in bits])
    whole = np.zeros((len(bits), width, tokens), np.float32)
    for block, candidates in enumerate(scores):
        whole[block, : len(candidates)] = candidates
    flat = whole.reshape(-1, tokens)
    gram = (flat @ flat.T).astype(np.float64) / tokens
    own_losses = np.where(usable, 0.5 * gram.diagonal().reshape(usable.shape), np.inf)
    slots = [
        [Candidate(*pair) for pair in zip(candidates, losses.tolist(), strict=False)]
        for candidates, losses in zip(bits, own_losses, strict=True)
    ]
    rows = np.arange(len(bits))
    best, least = solve(slots, budget), np.inf
    for start in (best, *starts):
        choice = np.array(start, np.int64)
        if costs[rows, choice].sum() > budget:
            continue
        while (moves := _exchange_together(costs, usable, gram, choice, budget)) is not None:
            for block, option in moves:
                choice[block] = option
        at = rows * width + choice
        loss = float(gram[np.ix_(at, at)].sum())
        if loss < least:
            best, least = tuple(map(int, choice)), loss
    return _filled(costs, own_losses, gram, np.array(best, np.int64), budget, tokens)


def _filled(
    costs: npt.NDArray[np.int64],
    losses: npt.NDArray[np.float64],
    gram: npt.NDArray[np.float64],
    choice: npt.NDArray[np.int64],
    budget: int,
    tokens: int,
) -> tuple[int, ...]:
    """The choice with larger candidates of less loss, where it is not worse by more than three standard errors."""
    width, rows = costs.shape[1], np.arange(len(costs))
    while True:
        slack = budget - int(costs[rows, choice].sum())
        at = rows * width + choice
        total = max(0.0, float(gram[np.ix_(at, at)].sum()))
        extra = costs - costs[rows, choice][:, None]
        less = losses[rows, choice][:, None] - losses
        moves = np.argwhere((extra > 0) & (extra <= slack) & (less > 0))
        for block, option in moves[np.argsort(-less[tuple(moves.T)], kind="stable")].tolist():
            new, old = block * width + option, int(at[block])
            size = gram[new, new] - 2 * gram[new, old] + gram[old, old]
            change = float(gram[new, at].sum() - gram[old, at].sum() + 0.5 * size)
            if change <= 3 * np.sqrt(max(0.0, size) * total / tokens):
                choice[block] = option
                break
        else:
            return tuple(map(int, choice))


def _exchange_together(
    costs: npt.NDArray[np.int64],
    usable: npt.NDArray[np.bool_],
    gram: npt.NDArray[np.float64],
    choice: npt.NDArray[np.int64],
    budget: int,
) -> list[tuple[int, int]] | None:
    """The change of one or two blocks that helps most within the budget; None if none does.

    gram  mean products of the scores, of all candidates of all blocks
    """
    n, width = costs.shape
    rows = np.arange(n)
    at = rows * width + choice
    now = np.repeat(at, width)  # of each move, the candidate that it replaces
    every = np.arange(n * width)
    extra = (costs - costs[rows, choice][:, None]).ravel()
    slack = budget - int(costs[rows, choice].sum())
    together = gram[:, at].sum(1)
    gains = together - together[now] + 0.5 * (gram[every, every] - 2 * gram[every, now] + gram[now, now])
    moves = np.flatnonzero(usable.ravel() & (every != now))
    loss = float(gram[np.ix_(at, at)].sum()) / 2
    exchange, least = None, -1e-9 * loss
    fitting = moves[extra[moves] <= slack]
    if len(fitting) and gains[fitting].min() < least:
        move = int(fitting[gains[fitting].argmin()])
        exchange, least = [divmod(move, width)], float(gains[move])
    if not len(moves):
        return exchange
    old = now[moves]
    products = gram[np.ix_(moves, moves)] - gram[np.ix_(moves, old)] - gram[np.ix_(old, moves)] + gram[np.ix_(old, old)]
    pairs = gains[moves][:, None] + gains[moves] + products
    pairs[(extra[moves][:, None] + extra[moves] > slack) | (old[:, None] == old)] = np.inf
    first, second = divmod(int(pairs.argmin()), len(moves))
    if pairs[first, second] < least:
        return [divmod(int(moves[first]), width), divmod(int(moves[second]), width)]
    return exchange


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
    choice = best(high)
    return choice if bits[rows, choice].sum() <= budget else bits.argmin(1)


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
    best_moves, least = None, -1e-12 * float(losses[rows, choice].sum())
    for a in np.flatnonzero(costs <= slack - min(sorted_costs)).tolist():
        at = bisect_right(sorted_costs, slack - int(costs[a])) - 1
        for b in best[at] if at >= 0 else ():
            if b >= 0 and (b // width != a // width) and gains[a] + gains[b] < least:
                best_moves, least = [divmod(a, width), divmod(b, width)], gains[a] + gains[b]
        if costs[a] <= slack and gains[a] < least:
            best_moves, least = [divmod(a, width)], gains[a]
    return best_moves
