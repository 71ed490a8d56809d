"""Divides the steps of a plan among processes."""

from __future__ import annotations

from weightsmith.plans.values import Plan, Step


def part_of(plan: Plan, k: int, n: int) -> tuple[Step, ...]:
    """The steps of part k of n (k from 1), in plan order. Parts have about the same number of output bytes.

    Depends only on the plan. Every step is in exactly one part; a part may be empty.
    """
    if not 1 <= k <= n:
        raise ValueError(f"invalid part {k} of {n}")
    total = max(1, sum(step.out.nbytes for step in plan.steps))
    steps, before = [], 0
    for step in plan.steps:
        if min(before * n // total, n - 1) == k - 1:
            steps.append(step)
        before += step.out.nbytes
    return tuple(steps)


def label(part: tuple[int, int]) -> str:
    """A part in file names.

    >>> label((2, 4))
    '2-of-4'
    """
    return f"{part[0]}-of-{part[1]}"
