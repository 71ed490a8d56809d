"""llama.cpp's importance matrices: for each weight, the mean square of what each of its columns is multiplied by.

Two forms of files: GGUF, with the sums of squares and their counts as tensors; and the older one, numbers after numbers.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import FormatError
from weightsmith._base.files import expand_user, open_regular, read_bounded, show
from weightsmith._models.formats.gguf.header import GgufTensor, read_gguf_header
from weightsmith._models.formats.gguf.layout import MAGIC

MAX_BYTES = 4 << 30
LARGEST = 1e15
"""ggml computes with squares of importances in float32; where these overflow, blocks are wrong, or the process is aborted."""
RUN = 16
"""Columns that share a scale in the narrowest of ggml's types: without importances, they would all become 0."""
SMALLEST = 1e-25
"""Importances below count as none: ggml multiplies them by squares of weights in float32."""
_MAX_NAME_BYTES = 4096
_SUMS, _COUNTS = ".in_sum2", ".counts"
_FIX = "Make it again with llama.cpp's llama-imatrix."

Floats = npt.NDArray[np.float32]


def read_imatrix(path: str | os.PathLike[str]) -> dict[str, Floats]:
    """The importances of each tensor, under llama.cpp's names: float32 [cols], or [matrices · cols] of experts.

    Raises FormatError for a file in neither form, with numbers that are not finite or negative, NotFound, CheckpointError.
    """
    place = expand_user(path)
    with open_regular(place) as file:
        start = file.read(4)
    importances = _of_gguf(place) if start == MAGIC else _of_numbers(place)
    if not importances:
        raise FormatError("an importance matrix without tensors", where=str(place), fix=_FIX)
    for name, values in importances.items():
        if not are_importances(values):
            what = f"importances of {show(name)} are negative, or no finite numbers up to {LARGEST:g}"
            raise FormatError(what, where=str(place), fix=_FIX)
    return importances


def are_importances(values: Floats) -> bool:
    """Whether all are numbers from 0 to `LARGEST`."""
    return bool(((values >= 0) & (values <= LARGEST)).all())


def of_sums(sums: Mapping[str, Floats], counts: Mapping[str, Floats]) -> dict[str, Floats]:
    """Importances from sums of squares.

    sums    of the squares of the inputs of each column: float32 [matrices, cols]
    counts  rows that were summed, of each matrix: float32 [matrices]. A matrix that saw none has importances of 1

    >>> of_sums({"w": np.float32([[2, 4], [0, 0]])}, {"w": np.float32([2, 0])})["w"]
    array([1., 2., 1., 1.], dtype=float32)
    """
    importances = {}
    for name, values in sums.items():
        number = counts[name].reshape(-1, 1)
        mean = values.reshape(len(number), -1) / np.where(number > 0, number, 1).astype(np.float32)
        importances[name] = np.where(number > 0, mean, np.float32(1)).astype(np.float32).reshape(-1)
    return importances


def with_defaults(values: Floats, cols: int) -> tuple[Floats, int]:
    """Importances in which each run of columns that has none gets 1; and the number of these runs.

    values  float32 [matrices · cols]

    ggml would store such a run as 0, or abort: it divides by sums of importances. So llama.cpp reads an expert that no token
    reached as 1, where the file counts tokens.

    >>> with_defaults(np.float32([0] * 16 + [0, 3] + [0] * 14), 32)[0].tolist() == [1] * 16 + [0, 3] + [0] * 14
    True
    """
    runs = -(-cols // RUN)
    padded = np.zeros((values.size // cols, runs * RUN), np.float32)
    padded[:, :cols] = values.reshape(-1, cols)
    missing = (padded.reshape(-1, runs, RUN) < SMALLEST).all(-1)
    if not (count := int(missing.sum())):
        return values, 0
    filled = np.where(np.repeat(missing, RUN, 1), np.float32(1), padded)[:, :cols]
    return np.ascontiguousarray(filled).reshape(-1), count


def imatrix_bytes(importances: Mapping[str, Floats]) -> bytes:
    """A file in the older form, which `read_imatrix` and llama.cpp read: next to a model, a .gguf file would look like one."""
    parts = [struct.pack("<i", len(importances))]
    for name, values in importances.items():
        parts += [struct.pack("<i", len(name.encode())), name.encode(), struct.pack("<ii", 1, values.size)]
        parts.append(values.astype("<f4").tobytes())
    return b"".join(parts)


def _of_gguf(path: Path) -> dict[str, Floats]:
    header = read_gguf_header(path)
    total = sum(tensor.nbytes for tensor in header.tensors)
    if total > MAX_BYTES:
        raise FormatError(f"{total:,} bytes of importances", where=str(path), fix=_FIX)
    by_end: dict[str, dict[str, Floats]] = {_SUMS: {}, _COUNTS: {}}
    with open_regular(path) as file:
        for tensor in header.tensors:
            for end, values in by_end.items():
                if tensor.name.endswith(end):
                    values[tensor.name.removesuffix(end)] = _values(file.fileno(), tensor, path)
    sums, counts = by_end[_SUMS], by_end[_COUNTS]
    for name, squares in sums.items():
        if name not in counts or squares.size % counts[name].size:
            raise FormatError(f"{show(name)} has sums, but no counts that fit", where=str(path), fix=_FIX)
    return of_sums(sums, counts)


def _values(fd: int, tensor: GgufTensor, path: Path) -> Floats:
    if tensor.dtype.name != "F32":
        raise FormatError(f"tensor {show(tensor.name)} is {tensor.dtype}, not F32", where=str(path), fix=_FIX)
    return np.frombuffer(os.pread(fd, tensor.nbytes, tensor.offset), "<f4")


def _of_numbers(path: Path) -> dict[str, Floats]:
    """i32 entries, and of each: i32 and its name, i32 calls, i32 numbers, f32 sums of means."""
    data = read_bounded(path, MAX_BYTES)
    at = 0

    def number(most: int) -> int:
        nonlocal at
        if at + 4 > len(data):
            raise FormatError(f"no importance matrix, or cut off: it ends at byte {len(data):,}", where=str(path), fix=_FIX)
        (value,) = struct.unpack_from("<i", data, at)
        at += 4
        if not 0 <= value <= most:
            raise FormatError(f"no importance matrix: {value:,} at byte {at - 4:,}", where=str(path), fix=_FIX)
        return int(value)

    importances = {}
    for _ in range(number(len(data) // 12)):
        length = number(min(_MAX_NAME_BYTES, len(data) - at))
        name = data[at : at + length].decode(errors="replace")
        at += length
        calls = number(1 << 30)
        count = number((len(data) - at - 4) // 4)
        values = np.frombuffer(data, "<f4", count, at).astype(np.float32)
        at += 4 * count
        importances[name] = values / np.float32(calls) if calls else values
    return importances
