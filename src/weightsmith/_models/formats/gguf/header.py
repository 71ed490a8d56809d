"""The header of one GGUF file, parsed and checked. See `layout.py` for the bytes.

Nothing here trusts a byte of the file. Every count and length is compared with the bytes that are left before memory is
allocated for it, tensors must follow each other without hole or overlap, and no tensor data is read.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import DAMAGED, FileState, Opener, RandomAccess, lookalike, open_local, show
from weightsmith._base.tensors import DType
from weightsmith._models.formats.gguf.layout import (
    ALIGNMENT,
    DIFFUSION_ARCHITECTURES,
    FORMATS,
    KINDS,
    MAGIC,
    MAX_DIFFUSION_DIMENSIONS,
    MAX_DIMENSIONS,
    TYPES,
    ValueType,
)

ADAPTER_TYPE = "adapter"
"""`general.type` of a file with an adapter."""
MAX_HEADER_BYTES = 100_000_000  # the largest vocabularies, of 262,144 tokens, take 15 MB
MAX_KEYS = 65_536
MAX_KEY_BYTES = 65_535
MAX_STRINGS = 2_000_000  # of one list: ten times the tokens or merges of the largest vocabularies
SMALL = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_MAX_SMALL_BYTES = 1 << 20
_MAX_BYTES = 2**63 - 1
_MAX_ALIGNMENT = 1 << 20
_PIECE = 1 << 20
_AGAIN = "Get the file again: the download was probably interrupted."
_BIG_ENDIAN = "Get a little-endian file of the model; nearly all are."


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a GGUF file.

    name    as in the file: `blk.0.attn_q.weight`
    dtype   its type
    shape   rows first, as in every other format: the reverse of what the file says
    offset  of its first byte, from the start of the file
    nbytes  without padding
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All that the header of one file says, checked.

    keys     numbers, texts, and lists (numpy arrays of numbers, lists of str)
    kinds    the type of each of these values, or of what is in a list
    tensors  in the order of their bytes
    state    of the file, taken before its header was read
    digest   xxh3_128 of the header's bytes and of `small`, hex
    small    the values of small F32 tensors that belong to config.json: float32 vectors, by name
    """

    keys: Mapping[str, Any]
    kinds: Mapping[str, ValueType]
    tensors: tuple[GgufTensor, ...]
    state: FileState
    digest: str
    small: Mapping[str, npt.NDArray[np.float32]]


def read_gguf_header(path: Path, open_file: Opener = open_local) -> GgufHeader:
    """Read and check the header of a GGUF file of version 2 or 3.

    Raises FormatError for every way in which the bytes break the format, Unsupported for other versions, big-endian files and
    unknown types of tensors, else as `open_file`. Cost: about 0.15 s for a vocabulary of 150,000 tokens.
    """
    with open_file(path) as file:
        return _Reader(file, path).header()


def is_adapter_header(path: Path) -> bool:
    """Whether a GGUF file is of an adapter. Reads its keys up to `general.type`, which writers put first.

    Raises as `read_gguf_header`.
    """
    with open_local(path) as file:
        return text_of(_Reader(file, path).value_of("general.type")) == ADAPTER_TYPE


def text_of(value: object) -> str:
    """The value of a key that should be text; "" for any other. A list of numbers cannot be compared with a text."""
    return value if isinstance(value, str) else ""


def check_keys(data: bytes, where: Path) -> None:
    """Check what `encode_metadata` returned, or should have. where: for messages. Raises FormatError and Unsupported."""
    reader = _Reader(_InMemory(data), where)
    keys = reader.keys(reader.unpack("Q")[0])
    if reader.remaining():
        raise reader.wrong(f"after its keys follow {reader.remaining():,} more bytes")
    if keys.get("general.alignment", ALIGNMENT) != ALIGNMENT:
        raise reader.wrong(f"general.alignment is {show(keys['general.alignment'])}, and files are written with {ALIGNMENT}")
    if split := next((key for key in keys if key.startswith("split.")), ""):
        raise reader.wrong(f"the key {show(split)} belongs to the layout of the files")


class _InMemory:
    """Bytes as `RandomAccess`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.state = FileState(0, 0, len(data), 0, 0)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return self._data[offset : offset + nbytes]


class _Reader:
    """Reads one header from its start, a megabyte at a time."""

    def __init__(self, file: RandomAccess, path: Path) -> None:
        self.file, self.path = file, path
        self.nbytes = file.state.nbytes
        self.data = b""
        self.at = 0
        self.kinds: dict[str, ValueType] = {}

    def header(self) -> GgufHeader:
        self._check_start()
        tensors_count, keys_count = self.unpack("QQ")
        if tensors_count > self.remaining() // 24:
            raise self.wrong(f"{tensors_count:,} tensors do not fit into the file")
        keys = self.keys(keys_count)
        diffusion = text_of(keys.get("general.architecture")) in DIFFUSION_ARCHITECTURES
        tensors = self._tensors(tensors_count, self._alignment(keys), diffusion=diffusion)
        small = {tensor.name: self._small(tensor) for tensor in tensors if tensor.name in SMALL}
        digest = xxhash.xxh3_128(memoryview(self.data)[: self.at])
        for values in small.values():
            digest.update(values.tobytes())
        return GgufHeader(keys, self.kinds, tensors, self.file.state, digest.hexdigest(), small)

    def value_of(self, name: str) -> Any:
        """The value of one key; None without it. What follows it is not read."""
        self._check_start()
        for _ in range(self.unpack("QQ")[1]):
            key = self.text("a key", MAX_KEY_BYTES)
            value = self.value(key)
            if key == name:
                return value
        return None

    def keys(self, count: int) -> dict[str, Any]:
        """The keys, and their values."""
        if count > MAX_KEYS:
            raise self.wrong(f"{count:,} keys, and at most {MAX_KEYS:,} are read")
        keys: dict[str, Any] = {}
        for _ in range(count):
            key = self.text("a key", MAX_KEY_BYTES)
            if key in keys:
                raise self.wrong(f"the key {show(key)} occurs twice")
            keys[key] = self.value(key)
        return keys

    def _small(self, tensor: GgufTensor) -> npt.NDArray[np.float32]:
        if tensor.dtype.name != "F32" or len(tensor.shape) != 1 or tensor.nbytes > _MAX_SMALL_BYTES:
            raise self.wrong(f"tensor {tensor.name} is {tensor.dtype} {list(tensor.shape)}, not a short vector of F32")
        return np.frombuffer(self.file.read_at(tensor.offset, tensor.nbytes), "<f4")

    def _check_start(self) -> None:
        start = self.file.read_at(0, 8)
        if len(start) < 8:
            raise FormatError(f"{self.nbytes} bytes: too short for a GGUF file", where=str(self.path), fix=_AGAIN)
        if start[:4] != MAGIC:
            what = f"not a GGUF file: it starts with {start[:4]!r}"
            raise FormatError(what, where=str(self.path), fix=lookalike(start))
        version = int.from_bytes(start[4:], "little")
        if version not in (2, 3):
            if int.from_bytes(start[4:], "big") in (1, 2, 3):
                raise Unsupported("a big-endian GGUF file", where=str(self.path), fix=_BIG_ENDIAN)
            fix = "Get a newer file of the model." if version == 1 else DAMAGED
            raise Unsupported(f"GGUF version {version}; versions 2 and 3 are read", where=str(self.path), fix=fix)
        self.need(8)
        self.at = 8

    def _alignment(self, keys: Mapping[str, Any]) -> int:
        alignment = keys.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.wrong(f"general.alignment is {show(alignment)}, not a power of two from 8 to {_MAX_ALIGNMENT}")
        return alignment

    def _tensors(self, count: int, alignment: int, *, diffusion: bool) -> tuple[GgufTensor, ...]:
        most_dimensions = MAX_DIFFUSION_DIMENSIONS if diffusion else MAX_DIMENSIONS
        listed: list[tuple[int, str, DType, tuple[int, ...], int]] = []
        names: set[str] = set()
        for _ in range(count):
            name = self.text("a tensor's name", MAX_KEY_BYTES)
            if name in names:
                raise self.wrong(f"two tensors are called {show(name)}")
            names.add(name)
            (dimensions,) = self.unpack("I")
            if not 1 <= dimensions <= most_dimensions:
                raise self.wrong(f"tensor {show(name)} has {dimensions:,} dimensions, and 1 to {most_dimensions} are allowed")
            *reverse, number, offset = self.unpack(f"{dimensions}QIQ")
            may_be_empty = diffusion and dimensions == 1  # ComfyUI recognises some models by the name of one
            dtype, nbytes = self._size(name, number, reverse, 0 if may_be_empty else 1)
            listed.append((offset, name, dtype, tuple(reverse[::-1]), nbytes))
        start = -(-self.at // alignment) * alignment
        listed.sort(key=lambda entry: (entry[0], entry[-1]))  # an empty tensor comes before one with the same offset
        tensors, expected, before = [], 0, ""
        for offset, name, dtype, shape, nbytes in listed:
            if offset != expected:
                told = f"tensor {show(name)} begins at byte {offset:,} of the data"
                after = f"tensor {show(before)} and its padding end at" if before else "the data begins at"
                raise self.wrong(f"{told}, and {after} {expected:,}")
            if nbytes and start + offset + nbytes > self.nbytes:
                missing = start + offset + nbytes - self.nbytes
                what = f"truncated: {missing:,} bytes of tensor {show(name)} are missing"
                raise FormatError(what, where=str(self.path), fix=_AGAIN)
            tensors.append(GgufTensor(name, dtype, shape, start + offset, nbytes))
            expected, before = offset + -(-nbytes // alignment) * alignment, name
        return tuple(tensors)

    def _size(self, name: str, number: int, reverse: list[int], least_bytes: int) -> tuple[DType, int]:
        """The type and the bytes of a tensor."""
        dtype = TYPES.get(number)
        if dtype is None:
            known = ", ".join(t.name for t in TYPES.values())
            what = f"tensor {show(name)} has ggml's type {number:,}, which is not known; known are {known}"
            raise Unsupported(what, where=str(self.path), fix="Get the model in another type.")
        size = 1
        for n in reverse:
            size *= n  # five factors below 2^64 at most
        if not least_bytes <= size * dtype.itemsize <= _MAX_BYTES:
            raise self.wrong(f"tensor {show(name)} has the shape {reverse[::-1]}")
        if reverse[0] % dtype.block:
            what = f"rows of {dtype} are a multiple of {dtype.block} elements, and those of tensor {show(name)} have"
            raise self.wrong(f"{what} {reverse[0]:,}")
        return dtype, size // dtype.block * dtype.itemsize

    def value(self, key: str) -> Any:
        """The value of a key."""
        kind = self.kinds[key] = self.kind(key)
        if kind == "str":
            return self.text(f"the value of {show(key)}", MAX_HEADER_BYTES)
        if kind != "array":
            return self.unpack(FORMATS[kind])[0]
        kind, count = self.kind(key), self.unpack("Q")[0]
        self.kinds[key] = kind
        if kind == "array":
            raise Unsupported(f"the value of {show(key)} is a list of lists", where=str(self.path), fix=DAMAGED)
        if kind == "str":
            if count > min(MAX_STRINGS, self.remaining() // 8):
                raise self.wrong(f"the value of {show(key)} is a list of {count:,} texts, which do not fit into the file")
            return self.texts(key, count)
        width = struct.calcsize(FORMATS[kind])
        if count > self.remaining() // width:
            raise self.wrong(f"the value of {show(key)} is a list of {count:,} numbers, which do not fit into the file")
        self.need(count * width)
        array = np.frombuffer(self.data, f"<{FORMATS[kind]}", count, self.at)
        self.at += count * width
        return array

    def texts(self, key: str, count: int) -> list[str]:
        """As `text`, many times: half a million calls of it would take a second."""
        texts: list[str] = []
        for _ in range(count):
            if self.at + 8 > len(self.data):
                self.need(8)
            begin = self.at + 8
            end = begin + int.from_bytes(self.data[self.at : begin], "little")
            if end > len(self.data):
                texts.append(self.text(f"a text in {show(key)}", MAX_HEADER_BYTES))
                continue
            try:
                texts.append(self.data[begin:end].decode())
            except UnicodeDecodeError:
                raise self.wrong(f"a text in {show(key)} is not valid UTF-8: {show(self.data[begin:end])}") from None
            self.at = end
        return texts

    def kind(self, key: str) -> ValueType:
        (number,) = self.unpack("I")
        if number >= len(KINDS):
            raise self.wrong(f"the value of {show(key)} has the type {number:,}, which does not exist")
        return KINDS[number]

    def text(self, what: str, most: int) -> str:
        (length,) = self.unpack("Q")
        if length > min(most, self.remaining()):
            raise self.wrong(f"{what} has {length:,} bytes, which do not fit into the file or are more than {most:,}")
        self.need(length)
        data = self.data[self.at : self.at + length]
        self.at += length
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self.wrong(f"{what} is not valid UTF-8: {show(data)}") from None

    def unpack(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{layout}")
        self.need(size)
        numbers = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += size
        return numbers

    def remaining(self) -> int:
        """Bytes of the file after those that were read."""
        return self.nbytes - self.at

    def need(self, count: int) -> None:
        """Have `count` more bytes in memory."""
        end = self.at + count
        if end <= len(self.data):
            return
        if end > MAX_HEADER_BYTES:
            raise self.wrong(f"its header is longer than {MAX_HEADER_BYTES:,} bytes")
        nbytes = max(end - len(self.data), _PIECE, len(self.data))  # twice as much each time
        self.data += self.file.read_at(len(self.data), min(nbytes, MAX_HEADER_BYTES - len(self.data)))
        if end > len(self.data):
            raise FormatError(f"its header does not end within {self.nbytes:,} bytes", where=str(self.path), fix=_AGAIN)

    def wrong(self, what: str) -> FormatError:
        return FormatError(what, where=str(self.path), fix=DAMAGED)
