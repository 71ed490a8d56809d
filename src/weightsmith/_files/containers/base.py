"""The position of every output byte: weight files, their headers, each tensor's offset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
