"""Divides the steps of a plan among processes: a part is a set of whole weight files."""

from __future__ import annotations

from weightsmith._plans.values import Plan, Step


def units_of(plan: Plan) -> list[list[Step]]:
    """The steps that one process must do, in plan order: those of a weight file, and of files that a step joins.

    A file has one writer, so that whoever makes it can put it where the output goes. The order of units is that of their first
    steps.
    """
    places = plan.layout.places
    first = [*range(len(plan.layout.shards))]  # of its unit, or a file that is nearer to it

    def root(i: int) -> int:
        while first[i] != i:
            first[i] = first[first[i]]
            i = first[i]
        return i

    for step in plan.steps:
        roots = {root(places[out.name].shard) for out in step.outs}
        for file in roots:
            first[file] = min(roots)
    units: dict[int, list[Step]] = {}
    for step in plan.steps:
        units.setdefault(root(places[step.outs[0].name].shard), []).append(step)
    return [*units.values()]


def parts_of(plan: Plan, n: int) -> list[list[Step]]:
    """The steps of each of n parts. Parts have about the same number of output bytes, and consist of whole units.

    Depends only on the plan. Every step is in exactly one part; a part may be empty.
    """
    units = units_of(plan)
    sizes = [sum(out.nbytes for step in unit for out in step.outs) for unit in units]
    total = max(1, sum(sizes))
    parts: list[list[Step]] = [[] for _ in range(n)]
    before = 0
    for unit, nbytes in zip(units, sizes, strict=True):
        parts[min((before + nbytes // 2) * n // total, n - 1)] += unit
        before += nbytes
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
