"""Divides the steps of a plan among processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weightsmith._plans.values import Plan, Step

Together = Sequence[Collection[str]]
"""Sets of output tensors, each of which one process must build. No tensor is in two of them."""


def units_of(plan: Plan, together: Together = ()) -> list[list[Step]]:
    """The steps that one process must do, in plan order: single steps, and those linked by sets of tensors.

    Steps are linked if a set holds tensors of both. The order of units is that of their first steps.
    """
    step_of = {out.name: i for i, step in enumerate(plan.steps) for out in step.outs}
    first = [*range(len(plan.steps))]  # of its unit, or a step that is nearer to it

    def root(i: int) -> int:
        while first[i] != i:
            first[i] = first[first[i]]
            i = first[i]
        return i

    for names in together:
        roots = {root(step_of[name]) for name in names}
        for each in roots:
            first[each] = min(roots)
    units: dict[int, list[Step]] = {}
    for i, step in enumerate(plan.steps):
        units.setdefault(root(i), []).append(step)
    return [*units.values()]


def parts_of(plan: Plan, n: int, together: Together = ()) -> list[list[Step]]:
    """The steps of each of n parts. Parts have about the same number of output bytes, and consist of whole units.

    Depends only on the plan and on `together`. Every step is in exactly one part; a part may be empty.
    """
    total = max(1, sum(step.out.nbytes for step in plan.steps))
    parts: list[list[Step]] = [[] for _ in range(n)]
    before = 0
    for unit in units_of(plan, together):
        parts[min(before * n // total, n - 1)] += unit
        before += sum(step.out.nbytes for step in unit)
    return parts


def part_of(plan: Plan, k: int, n: int, together: Together = ()) -> list[Step]:
    """The steps of part k of n (k from 1): see `parts_of`."""
    if not 1 <= k <= n:
        raise ValueError(f"invalid part {k} of {n}")
    return parts_of(plan, n, together)[k - 1]


def label(part: tuple[int, int]) -> str:
    """A part in file names.

    >>> label((2, 4))
    '2-of-4'
    """
    return f"{part[0]}-of-{part[1]}"
