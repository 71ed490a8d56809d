"""A merged tensor that holds several matrices is split into pieces, each merged like a separate tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weightsmith._base.tensors import TensorSpec
from weightsmith._models.structure.fused import SubMatrix
from weightsmith._plans import JOIN, Block, Step


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
