"""The optimiser against exhaustive search, and what it does with a budget."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from weightsmith._base.errors import ParameterError
from weightsmith._features.quantisation.optimise import Candidate, choose, solve


def random_slots(n: int, options: int, seed: int) -> list[list[Candidate]]:
    """Losses that fall with the bits, with noise; sizes of blocks differ."""
    rng = np.random.default_rng(seed)
    slots = []
    for _ in range(n):
        size, level = int(rng.integers(100, 1000)), rng.uniform(0.01, 0.5)
        bits = np.sort(rng.uniform(2, 8, options))
        slots.append([Candidate(int(size * b), float(level * 2**-b * rng.uniform(0.8, 1.2))) for b in bits])
    return slots


def loss(slots: list[list[Candidate]], choice: tuple[int, ...]) -> float:
    return sum(slot[i].loss for slot, i in zip(slots, choice, strict=True))


def size(slots: list[list[Candidate]], choice: tuple[int, ...]) -> int:
    return sum(slot[i].bits for slot, i in zip(slots, choice, strict=True))


@pytest.mark.long
def test_on_the_whole_it_finds_what_exhaustive_search_finds() -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for seed in range(400):
        n, options = int(rng.integers(1, 6)), int(rng.integers(1, 5))
        slots = random_slots(n, options, seed)
        least, most = (sum(pick(c.bits for c in slot) for slot in slots) for pick in (min, max))
        budget = least + int(rng.random() * (most - least))
        choice = solve(slots, budget)
        assert size(slots, choice) <= budget
        fitting = [choice for choice in product(*(range(options) for _ in slots)) if size(slots, choice) <= budget]
        ratios.append(loss(slots, choice) / min(loss(slots, choice) for choice in fitting))
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 390
    assert sum(ratio < 1.1 for ratio in ratios) >= 396


def test_the_size_is_near_the_target_and_never_above_it() -> None:
    slots = random_slots(60, 18, 1)
    weights = sum(slot[0].bits for slot in slots) // 2
    low, high = (sum(pick(c.bits for c in slot) for slot in slots) / weights for pick in (min, max))
    for target in np.linspace(low + 0.01, high - 0.01, 7).tolist():
        assert target - 0.02 <= size(slots, choose(slots, weights, target)) / weights <= target


def test_larger_candidates_of_equal_loss_use_what_is_left() -> None:
    slot = [Candidate(10, 0.5), Candidate(20, 0.2), Candidate(25, 0.2), Candidate(28, 0.3)]
    assert solve([slot], 29) == (2,)


def test_a_target_out_of_reach_is_rejected_with_the_range() -> None:
    slots = [[Candidate(20, 0.3), Candidate(40, 0.1)]] * 2
    for target in (1.9, 8.1, float("nan")):
        with pytest.raises(ParameterError, match=r"settings take 2\.00 to 4\.00 bits"):
            choose(slots, 20, target)


def test_a_large_model_takes_no_time() -> None:
    slots = random_slots(200, 19, 3)
    first = solve(slots, sum(slot[8].bits for slot in slots))
    assert first == solve(slots, sum(slot[8].bits for slot in slots))
