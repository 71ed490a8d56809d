"""The position of every output byte: weight files, their headers, each tensor's offset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weightsmith._base.errors import NOTHING_WRITTEN, StoreError
from weightsmith._base.tensors import TensorSpec


class TensorPlace(NamedTuple):
    """Where one tensor is stored: `nbytes` bytes from byte `offset` of file number `shard`."""

    shard: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Naming:
    """How the safetensors files of a model are named, and what they say besides their tensors.

    stem      what names begin with: `model`, or `diffusion_pytorch_model` for diffusers
    metadata  of the files, besides `format`
    folders   subfolders with a weight file of their own: the tensor `2_Dense/linear.weight` is `linear.weight` in
              `2_Dense/model.safetensors`
    """

    stem: str = "model"
    metadata: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()

    def folder_of(self, tensor: str) -> str:
        """The subfolder with the weight file of a tensor; "" for the model's folder.

        >>> Naming(folders=("2_Dense",)).folder_of("2_Dense/linear.weight")
        '2_Dense'
        """
        fitting = [folder for folder in self.folders if tensor.startswith(f"{folder}/")]
        return max(fitting, key=len, default="")


PLAIN_NAMES = Naming()
"""`model.safetensors`, or shards, in one folder."""


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One weight file.

    name     `model.safetensors`, `model-00002-of-00007.safetensors`, or `2_Dense/model.safetensors`
    header   the file's first bytes: 8-byte length, JSON, padding
    nbytes   size of the whole file
    tensors  in file order
    """

    name: str
    header: bytes
    nbytes: int
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """All weight files of one checkpoint.

    shards       in file order
    places       tensor name -> place, in model order
    index        bytes of the index; None with one shard
    total_bytes  sizes of all weight files and the index
    index_name   of its file
    """

    shards: tuple[ShardLayout, ...]
    places: Mapping[str, TensorPlace]
    index: bytes | None
    total_bytes: int
    index_name: str = "model.safetensors.index.json"


def split(specs: Sequence[TensorSpec], max_shard_bytes: int, nbytes: Callable[[TensorSpec], int]) -> list[list[TensorSpec]]:
    """Split tensors, in their order, into runs of at most `max_shard_bytes`; at least one run. nbytes: of one tensor.

    Raises StoreError for a maximum of 0 or less.
    """
    if max_shard_bytes <= 0:
        fix = "pass a positive number of bytes, such as 5_000_000_000"
        what = f"must be positive, not {max_shard_bytes} bytes"
        raise StoreError(what, where="max_shard_bytes", fix=fix, state=NOTHING_WRITTEN)
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        size = nbytes(spec)
        if groups[-1] and filled + size > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += size
    return groups
