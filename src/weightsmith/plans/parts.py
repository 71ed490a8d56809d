"""Parts of a plan, for several processes: which steps each does."""

from __future__ import annotations

from weightsmith.plans.values import Plan, Step


def part_of(plan: Plan, k: int, n: int) -> tuple[Step, ...]:
    """The steps of the k-th of n parts (k from 1), in plan order: about the same bytes of output in each.

    A function of the plan alone; every step is in exactly one part. A part may be empty.
    """
    if not 1 <= k <= n:
        raise ValueError(f"there is no part {k} of {n}")
    total = max(1, sum(step.out.nbytes for step in plan.steps))
    steps, before = [], 0
    for step in plan.steps:
        if min(before * n // total, n - 1) == k - 1:
            steps.append(step)
        before += step.out.nbytes
    return tuple(steps)
