"""Identities of the parts of a plan, by which results of one plan serve another."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cached_property

from weightsmith._plans.codec import encode
from weightsmith._plans.values import Plan, Step


class PartHashes:
    """Hashes of the tensors and products of a plan (sha256, hex). With equal inputs, equal hashes mean equal bytes.

    They do not depend on where settings, steps and products stand in their plan, nor on its other parts.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._steps = dict[Step, str]()
        self._products = dict[str, str]()

    def tensors(self) -> dict[str, str]:
        """Of each tensor of the plan, by its name."""
        return {step.out.name: self.step(step) for step in self._plan.steps}

    def step(self, step: Step) -> str:
        """Of what a step makes."""
        needs = [self.product(name) for name in sorted(self._plan.needs(step))]
        return _sha256([self._common, encode(step.out), step.encoding, step.weighted, self._leaves(step), needs])

    def product(self, name: str) -> str:
        """Of the arrays of a product."""
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
        return [encode((replace(leaf, settings=0, pieces=()), settings[leaf.settings])) for leaf in step.leaves]


def _sha256(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
