"""The least code that reads and writes safetensors, apart from weightsmith's own, so that the benchmarks can judge it.

A file is: the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, start and end in the
data), the data.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

NUMPY = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes are: `offset` counts from the start of `file`."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> npt.NDArray[Any]:
        """The tensor, as a new array."""
        count = int(np.prod(self.shape, dtype=np.int64))
        return np.fromfile(self.file, NUMPY[self.dtype], count, offset=self.offset).reshape(self.shape)


def tensors(folder: Path) -> dict[str, Place]:
    """Every tensor of every `.safetensors` file in `folder`."""
    places: dict[str, Place] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if name in places:
                raise ValueError(f"{folder}: {name} is in two files")
            places[name] = Place(file, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
    return places


def reserve(folder: Path, shapes: Iterable[tuple[str, tuple[int, ...]]], max_shard_bytes: int) -> dict[str, Place]:
    """Create bf16 weight files of the right size, headers written and data zero, and the index if there are several.

    Tensors keep their order; a new file is begun when the next tensor would make the current one too large.
    """
    shards: list[list[tuple[str, tuple[int, ...]]]] = []
    filled = max_shard_bytes
    for name, shape in shapes:
        nbytes = 2 * int(np.prod(shape))
        if filled + nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape))
        filled += nbytes

    places: dict[str, Place] = {}
    for file, shard in zip(_shard_names(len(shards)), shards, strict=True):
        places |= _reserve_file(folder / file, shard)
    if len(shards) > 1:
        total = sum(2 * int(np.prod(place.shape)) for place in places.values())
        index = {"metadata": {"total_size": total}, "weight_map": {n: p.file.name for n, p in places.items()}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return places


def _shard_names(count: int) -> Iterator[str]:
    if count == 1:
        yield "model.safetensors"
    else:
        yield from (f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1))


def _reserve_file(file: Path, shard: list[tuple[str, tuple[int, ...]]]) -> dict[str, Place]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shard:
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)  # data on a page boundary, as the format's authors advise
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
    data = 8 + len(text)
    return {n: Place(file, data + header[n]["data_offsets"][0], "BF16", shape) for n, shape in shard}
