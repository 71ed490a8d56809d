"""The position of every output byte: weight files, their headers, each tensor's offset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weightsmith._base.errors import NOTHING_WRITTEN, StoreError
from weightsmith._base.tensors import TensorSpec


class TensorPlace(NamedTuple):
    """Where one tensor is stored: `nbytes` bytes from byte `offset` of file number `shard`."""

    shard: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One weight file.

    name     `model.safetensors`, or `model-00002-of-00007.safetensors`
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
    index        bytes of `model.safetensors.index.json`; None with one shard
    total_bytes  sizes of all weight files and the index
    """

    shards: tuple[ShardLayout, ...]
    places: Mapping[str, TensorPlace]
    index: bytes | None
    total_bytes: int


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
