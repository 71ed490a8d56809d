"""Weights that stay as a file has them: where the output would store the same tensors, nothing is decoded or encoded.

A reader says under which encoding a file has each tensor of the model, and where it has the stored tensors
(`abc.tensors.StoredAs`). If the output would have a tensor in the same encoding, `copied` gives the step that copies them, in
place of the one that decodes and encodes. Copies read a second input: the model as its files have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._plans import CAST, COPY, Block, Read, Step
from weightsmith.abc.tensors import StoredAs

_ALIKE = (frozenset({"F16", "BF16"}), frozenset({"I32", "I64"}))
"""Dtypes that programs take for each other in a stored tensor: they cast scales when they load them, and read shapes."""


def are_alike(outs: Sequence[TensorSpec], stored: Sequence[TensorSpec]) -> bool:
    """Whether stored tensors are those of an encoding, but for dtypes that programs cast.

    >>> scales = TensorSpec("q_proj.scales", DTYPES["F16"], (2, 64))
    >>> are_alike([scales], [replace(scales, dtype=DTYPES["BF16"])]), are_alike([scales], [replace(scales, shape=(1, 64))])
    (True, False)
    """
    return len(outs) == len(stored) and all(map(_is_alike, outs, stored))


def _is_alike(out: TensorSpec, stored: TensorSpec) -> bool:
    dtypes = {out.dtype.name, stored.dtype.name}
    return (out.name, out.shape) == (stored.name, stored.shape) and (len(dtypes) == 1 or dtypes in _ALIKE)


def fills(piece: TensorSpec, out: TensorSpec) -> bool:
    """Whether a piece that is copied may be part of a stored tensor: numbers of its dtype, or bytes of blocks."""
    return piece.dtype is out.dtype or (out.dtype.block > 1 and piece.dtype.name == "U8")


def copied(
    step: Step,
    encoding: str,
    outs: Sequence[TensorSpec],
    stored_as: Callable[[Read], StoredAs | None],
    undecoded: Callable[[Read], int],
    order: object = None,
) -> Step | None:
    """The step that copies what a tensor is stored as; None if not all of it is in files in this encoding.

    step   that copies the tensor, or joins the experts of a layer, before it is encoded
    outs   the tensors that the encoding stores; scales get the dtype that they have in the files
    stored_as, undecoded  see `ModelFiles`
    order  of the tensor's rows or columns in the output
    """
    leaves = step.leaves if outs else ()
    if not leaves:
        return None
    if any(leaf.op not in (COPY, CAST) or len(leaf.inputs) != 1 or leaf.inputs[0].view is not None for leaf in leaves):
        return None
    if step.pieces and (len(step.out.shape) != 3 or step.out.shape[0] != len(leaves)):
        return None
    reads = [leaf.inputs[0] for leaf in leaves]
    places = [stored_as(read) for read in reads if read.model >= 0]
    in_files = [place for place in places if place is not None and _is_stored(place, encoding, order, outs)]
    if len(in_files) < len(leaves):
        return None
    stored = tuple(replace(out, dtype=in_files[0].parts[i].dtype) for i, out in enumerate(outs))
    alike = all(part.dtype is out.dtype for place in in_files for part, out in zip(place.parts, stored, strict=True))
    if not alike or not are_alike(outs, stored):
        return None
    models = [undecoded(read) for read in reads]
    pieces = tuple(
        _copy(out, leaf, Read(model, place.parts[i].tensor), place.parts[i].first, joined=bool(step.pieces))
        for i, out in enumerate(stored)
        for leaf, model, place in zip(leaves, models, in_files, strict=True)
    )
    return Step(step.out, COPY, (), pieces=pieces, role=step.role, layer=step.layer, encoding=encoding, stored=stored)


def _is_stored(place: StoredAs, encoding: str, order: object, outs: Sequence[TensorSpec]) -> bool:
    return (place.encoding, place.order) == (encoding, order) and len(place.parts) == len(outs)


def _copy(out: TensorSpec, leaf: Step, read: Read, first: int, *, joined: bool) -> Step:
    """The step that copies a stored tensor, or an expert of one. first: element of what is read."""
    spec = as_bytes(out)
    shape = (spec.shape[1:] if joined else spec.shape) or (1,)
    size = math.prod(shape)
    view = Block(first, 1, size, size)
    return Step(TensorSpec(read.tensor, spec.dtype, shape), COPY, (replace(read, view=view),), settings=leaf.settings)


def as_bytes(tensor: TensorSpec) -> TensorSpec:
    """A tensor of blocks as rows of bytes; any other as it is."""
    if tensor.dtype.block == 1:
        return TensorSpec(tensor.name, tensor.dtype, tensor.shape)
    row_bytes = tensor.shape[-1] // tensor.dtype.block * tensor.dtype.itemsize
    return TensorSpec(tensor.name, DTYPES["U8"], (*tensor.shape[:-1], row_bytes))
