"""How often a plan reads its inputs, and which parts of files elsewhere: known before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from weightsmith._base.files import Extent
from weightsmith._engine.computed import inner_passes
from weightsmith._engine.products import StreamingReduction, find_kind
from weightsmith._engine.reader import Reader
from weightsmith._plans import Plan, Product, Step

STRIDE_BYTES = 4 << 20
"""Of each input of a tensor in turn: its tiles are read in all inputs at once."""


class Passes:
    """How often each step reads its inputs: asked of the jobs themselves, once for each set of parameters and shape."""

    def __init__(self, plan: Plan, reader: Reader) -> None:
        self._reader = reader
        self._reductions: dict[str, StreamingReduction] = {}
        for product in plan.products:
            make = find_kind(product.op).reduce
            if make is not None:
                self._reductions[product.name] = make(product)

    def before(self, step: Step) -> int:
        """Whole passes over the inputs of a step for products that it needs."""
        reductions = [self._reductions[name] for name in step.needs if name in self._reductions]
        return sum(not reduction.sampled(number) for reduction in reductions for number in range(reduction.passes()))

    def of(self, step: Step) -> int:
        """Passes over the inputs of a step, the one that writes included."""
        return 1 + self._reader.job_facts(step)[0]

    def resident_bytes(self, step: Step) -> int:
        """What the job of a step holds in memory between its passes."""
        return self._reader.job_facts(step)[1]


def visits(reader: Reader, steps: Iterable[Step], products: Sequence[Product]) -> list[list[Extent]]:
    """The parts of files elsewhere that steps and products read, in order: an entry for each pass over a matrix.

    Without what products read that compute: they ask for what they need. Cost: a few microseconds for each 4 MiB.
    """
    inputs = [i for i, source in enumerate(reader.inputs) if not all(map(Path.is_file, source.paths))]
    if not inputs:
        return []
    found = []
    for product in products:
        make = find_kind(product.op).reduce
        if make is None:
            continue
        reduction = make(product)
        leaves = list(reader.leaves_of(product))
        for number in range(reduction.passes()):
            found += [_visit(reader, leaf, inputs, sampled=reduction.sampled(number)) for leaf in leaves]
    passes = Passes(reader.plan, reader)
    for step in steps:
        for leaf in step.leaves:
            if leaf.out.size and any(read.model in inputs for read in leaf.inputs):
                found += [_visit(reader, leaf, inputs, sampled=False)] * (passes.of(leaf) + inner_passes(reader, leaf))
    return [visit for visit in found if visit]


def _visit(reader: Reader, leaf: Step, inputs: Sequence[int], *, sampled: bool) -> list[Extent]:
    """What one pass over a leaf reads."""
    reads = [read for read in leaf.inputs if read.model in inputs]
    if sampled:
        matrix = reader.matrix(leaf)
        places = [(place.start, min(place.size, matrix.grain)) for place in reader.cuts(leaf)]
    else:
        stride = STRIDE_BYTES // max([reader.dtype(read).itemsize for read in reads], default=1)
        places = [(start, min(stride, leaf.out.size - start)) for start in range(0, leaf.out.size, stride)]
    found: dict[tuple[int, Extent], None] = {}  # once for each read: of some tensors, every part is decoded from the whole
    for first, size in places:
        for i, read in enumerate(reads):
            found |= dict.fromkeys((i, extent) for extent in reader.extents(read, first, size))
    return [extent for _, extent in found]
