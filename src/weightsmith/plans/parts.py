"""Divides the steps of a plan among processes."""

from __future__ import annotations

from weightsmith.plans.values import Plan, Step


def parts_of(plan: Plan, n: int) -> list[list[Step]]:
    """The steps of each of n parts, in plan order. Parts have about the same number of output bytes.

    Depends only on the plan. Every step is in exactly one part; a part may be empty.
    """
    total = max(1, sum(step.out.nbytes for step in plan.steps))
    parts: list[list[Step]] = [[] for _ in range(n)]
    before = 0
    for step in plan.steps:
        parts[min(before * n // total, n - 1)].append(step)
        before += step.out.nbytes
    return parts


def part_of(plan: Plan, k: int, n: int) -> list[Step]:
    """The steps of part k of n (k from 1): see `parts_of`."""
    if not 1 <= k <= n:
        raise ValueError(f"invalid part {k} of {n}")
    return parts_of(plan, n)[k - 1]


def label(part: tuple[int, int]) -> str:
    """A part in file names.

    >>> label((2, 4))
    '2-of-4'
    """
    return f"{part[0]}-of-{part[1]}"
