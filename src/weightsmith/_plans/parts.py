"""The parts of a plan: divided among processes, and their identities, by which results of one plan serve another.

A part for a process is a set of whole weight files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cached_property

from weightsmith._plans.codec import encode
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
            first[i] = first[first[i]]  # halves the way: a model may have thousands of files
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


class PartHashes:
    """Hashes of the tensors and products of a plan (sha256, hex). With equal inputs, equal hashes mean equal bytes.

    They do not depend on where settings, steps and products stand in their plan, nor on its other parts.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._products = dict[str, str]()

    def tensors(self) -> dict[str, str]:
        """The digest of each tensor of the plan, by its name."""
        return {step.out.name: self.step(step) for step in self._plan.steps}

    def step(self, step: Step) -> str:
        """The digest of what a step makes."""
        needs = [self.product(name) for name in sorted(self._plan.needs(step))]
        return _sha256([self._common, encode(step.out), step.encoding, step.weighted, self._leaves(step), needs])

    def product(self, name: str) -> str:
        """The digest of a product's arrays."""
        if name not in self._products:
            product = next(product for product in self._plan.products if product.name == name)
            # Without steps of its own, it reads those that need it.
            steps = product.steps or [step for step in self._plan.steps if name in self._plan.needs(step)]
            facts = encode(replace(product, steps=(), needs=()))
            needs = [self.product(need) for need in product.needs]
            self._products[name] = _sha256([self._common, facts, [self._leaves(step) for step in steps], needs])
        return self._products[name]

    @cached_property
    def _common(self) -> str:
        plan = self._plan
        tables = [hashlib.sha256(table.data).hexdigest() for table in plan.tables]
        return _sha256([plan.seed, encode(plan.provenance.code), encode(plan.models), tables])

    def _leaves(self, step: Step) -> object:
        settings = self._plan.settings
        # An index of the plan stands for nothing in another plan: what it names is hashed instead.
        return [encode((replace(leaf, settings=0, pieces=()), settings[leaf.settings])) for leaf in step.leaves]


def _sha256(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
