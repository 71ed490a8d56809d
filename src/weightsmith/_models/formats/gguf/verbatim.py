"""Tensors of GGUF files as the files have them: what another GGUF file gets without being decoded and encoded again.

The reader of files says under which encoding a file has each tensor of the model, and gives its bytes (`abc.tensors.Verbatim`).
If the new file would have a tensor under the same encoding, `copied` makes its steps: copies, which the engine does not decode.

    gguf-copied-q4_k  rows of bytes, which are blocks of Q4_K
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weightsmith._base.files import StoredTensor
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.gguf.header import GgufHeader, GgufTensor
from weightsmith._models.formats.gguf.writing import PREFIX, TYPES, GgufEncoding, OneType
from weightsmith._models.sources.files import PlainFiles, SourceFile
from weightsmith._plans import CAST, COPY, JOIN, Block, Read, Step
from weightsmith.abc.stored import Bytes, Encoding, ModelFiles, Rows
from weightsmith.abc.tensors import StoredPart, digest

_COPIED = f"{PREFIX}copied-"
_U8 = DTYPES["U8"]


@dataclass(frozen=True, slots=True)
class CopiedBlocks(OneType):
    """Rows of bytes that are blocks of one of ggml's types already."""

    @property
    def name(self) -> str:
        """As in plans."""
        return f"{_COPIED}{self.dtype.name.lower()}"

    @property
    def verbatim(self) -> bool:
        return True

    def refusal(self, spec: TensorSpec) -> str:
        """Accepts bytes of whole blocks."""
        if spec.dtype.name != "U8" or not spec.shape or spec.shape[-1] % self.dtype.itemsize:
            return f"it is {spec.dtype} {list(spec.shape)}, not rows of blocks of {self.dtype.itemsize} bytes"
        return ""

    def tensors(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """One tensor, of the rows of numbers that the blocks hold.

        >>> print(*find_copied("gguf-copied-q8_0").outs(TensorSpec("w", DTYPES["U8"], (64, 34))))
        w [64, 32] Q8_0
        """
        cols = spec.shape[-1] // self.dtype.itemsize * self.dtype.block
        return (TensorSpec(spec.name, self.dtype, (*spec.shape[:-1], cols)),)

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        raise NotImplementedError(f"{self.name} is copied")


def find_copied(name: str) -> CopiedBlocks | None:
    """The encoding of a name; None for a name that is none of them."""
    dtype = TYPES.get(name.removeprefix(_COPIED).upper()) if name.startswith(_COPIED) else None
    encoding = None if dtype is None or dtype.block == 1 else CopiedBlocks(dtype)
    return encoding if encoding is not None and encoding.name == name else None


# ---- reading


class GgufBytes(PlainFiles):
    """All tensors of GGUF files under the files' names, types of blocks as rows of bytes."""

    def __init__(self, headers: Mapping[Path, GgufHeader], files: Sequence[SourceFile], where: str) -> None:
        stored = {
            tensor.name: StoredTensor(replace(as_bytes(tensor), name=tensor.name), path, tensor.offset)
            for path, header in headers.items()
            for tensor in header.tensors
        }
        super().__init__(stored, files, where)
        self.identity = digest([self.identity, "undecoded"])


def as_bytes(tensor: GgufTensor | TensorSpec) -> TensorSpec:
    """A tensor of blocks as rows of bytes; any other as it is."""
    if tensor.dtype.block == 1:
        return TensorSpec(tensor.name, tensor.dtype, tensor.shape)
    return TensorSpec(tensor.name, _U8, (*tensor.shape[:-1], tensor.shape[-1] // tensor.dtype.block * tensor.dtype.itemsize))


# ---- writing


def copied(step: Step, encoding: Encoding, order: object, names: Sequence[str], companions: ModelFiles) -> list[Step]:
    """The steps that copy what a tensor is stored as; [] if not all of it is in GGUF files in this encoding.

    step   that copies the tensor, or joins the experts of a layer, before it is encoded
    order  of its rows or columns in the new file
    names  of the stored tensors there
    """
    leaves, outs = step.leaves, encoding.outs(step.out)
    if any(leaf.op not in (COPY, CAST) or len(leaf.inputs) != 1 or leaf.inputs[0].view is not None for leaf in leaves):
        return []
    if step.pieces and (len(step.out.shape) != 3 or step.out.shape[0] != len(leaves)):
        return []
    reads = [leaf.inputs[0] for leaf in leaves]
    places = [place for read in reads if (place := companions.stored_as(read)) is not None and len(place.parts) == len(outs)]
    if len(places) < len(leaves) or any((place.encoding, place.order) != (encoding.name, order) for place in places):
        return []
    return [
        _copied(step, out, name, [(read, place.parts[i]) for read, place in zip(reads, places, strict=True)], companions)
        for i, (out, name) in enumerate(zip(outs, names, strict=True))
    ]


def _copied(step: Step, out: TensorSpec, name: str, parts: Sequence[tuple[Read, StoredPart]], companions: ModelFiles) -> Step:
    """The step that copies one stored tensor. parts: it, or those of the experts, with what would be read decoded."""
    spec = as_bytes(out)
    shape = spec.shape[1:] if step.pieces else spec.shape
    shape = shape or (1,)
    size = math.prod(shape)
    encoding = CopiedBlocks(out.dtype) if out.dtype.block > 1 else GgufEncoding(out.dtype)
    leaves = []
    for leaf, (decoded, part) in zip(step.leaves, parts, strict=True):
        read = Read(companions.undecoded(decoded), part.tensor, Block(part.first, 1, size, size))
        leaves.append(
            Step(
                TensorSpec(f"{leaf.out.name}{spec.name.removeprefix(step.out.name)}", spec.dtype, shape),
                COPY,
                (read,),
                settings=leaf.settings,
                role=leaf.role,
                layer=leaf.layer,
            )
        )
    whole = leaves[0] if not step.pieces else Step(spec, JOIN, (), pieces=tuple(leaves), role=step.role, layer=step.layer)
    return replace(whole, encoding=encoding.name, stored=(replace(out, name=name),))
