"""How often a plan reads its inputs, and which parts of files elsewhere: known before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from weightsmith._base.files import Extent
from weightsmith._engine.computed import inner_passes
from weightsmith._engine.products import find_kind
from weightsmith._engine.reader import Reader
from weightsmith._plans import Product, Step

STRIDE_BYTES = 4 << 20
"""Of each input of a tensor in turn: its tiles are read in all inputs at once."""


def whole_passes(products: Iterable[Product]) -> dict[str, int]:
    """How often each product that streams reads all of its steps, and not a sample."""
    made = {product.name: make(product) for product in products if (make := find_kind(product.op).reduce) is not None}
    return {name: sum(not one.sampled(number) for number in range(one.passes())) for name, one in made.items()}


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
    for step in steps:
        for leaf in step.leaves:
            if leaf.out.size and any(read.model in inputs for read in leaf.inputs):
                times = 1 + reader.job_facts(leaf)[0] + inner_passes(reader, leaf)
                found += [_visit(reader, leaf, inputs, sampled=False)] * times
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
