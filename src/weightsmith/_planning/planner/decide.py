"""What a merge must know of each tensor before it runs: what it is to the method, and which products it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weightsmith._base.errors import Unsupported, WeightsmithError
from weightsmith._base.tensors import TensorSpec
from weightsmith._methods.base import Method
from weightsmith._models.lora.forms import find_factors
from weightsmith._models.structure.fused import SubMatrix, role_of
from weightsmith._plans import CAST, COPY, JOIN, Block, Product, Settings, Step


def decide(steps: Sequence[Step], settings: Sequence[Settings], method: Method) -> tuple[list[Step], tuple[Product, ...]]:
    """The steps with their roles and needs, and the product of the method, if it has one for these parameters."""
    waiting = [
        (leaf, settings[leaf.settings])
        for step in steps
        for leaf in step.leaves
        if leaf.op == method.name and leaf.out.size and method.needs(settings[leaf.settings].shared)
    ]
    product = method.product(waiting) if waiting else None
    needing = {id(leaf) for leaf, _ in waiting} if product is not None else set()

    def decided(leaf: Step) -> Step:
        if not leaf.merges:
            return leaf
        needs = (product.name,) if product is not None and id(leaf) in needing else ()
        return replace(leaf, role=role_of(leaf.out), needs=needs)

    return [step.with_leaves(decided) for step in steps], () if product is None else (product,)


def factor_problems(steps: Sequence[Step], where: str, fix: str) -> list[WeightsmithError]:
    """The error for steps that would combine factors of adapters: a mean of factors is not that of what they add.

    where  for the message
    fix    what to do instead
    """
    names = [
        step.out.name
        for step in steps
        if any(leaf.merges and len({read.model for read in leaf.inputs}) > 1 for leaf in step.leaves)
    ]
    factors = find_factors(names)
    if not factors.modules and not factors.kinds:
        return []
    return [Unsupported(f"{factors} would be merged as weights, and their product is not merged then", where=where, fix=fix)]


# ---- A merged tensor that holds several matrices is split into pieces, each merged like a separate tensor.


def operation(method: Method, settings: Settings, n_inputs: int, places: Sequence[int], *, base: bool, same: bool) -> str:
    """The operation of a tensor: it is copied, or cast, where the base alone takes part, or the method leaves its only input.

    n_inputs  number of inputs
    places    of those that take part
    same      the first of these has the output's dtype
    """
    if (base and len(places) == 1) or (n_inputs == 1 and method.copies(settings.models)):
        return COPY if same else CAST
    return method.name


def split_fused(step: Step, parts: Sequence[SubMatrix]) -> Step:
    """The step as a join of one piece for each part; as it is when there are none.

    A piece has the name that its matrix has in an unfused model, so that it gets the random masks of that model too.
    """
    if not parts:
        return step
    pieces = []
    for part in parts:
        out = TensorSpec(part.name, step.out.dtype, part.shape)
        inputs = tuple(replace(read, view=Block(part.offset, 1, out.size, out.size)) for read in step.inputs)
        pieces.append(replace(step, out=out, inputs=inputs))
    return Step(step.out, JOIN, (), settings=step.settings, pieces=tuple(pieces))
