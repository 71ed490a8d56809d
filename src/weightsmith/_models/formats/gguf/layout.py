"""GGUF files: `model.gguf`, or `model-00001-of-00007.gguf` … as llama.cpp splits them, and `mmproj.gguf` for images.

    4 bytes       GGUF
    u32, u64, u64 version 3, number of tensors, number of keys
    keys          name, type of the value, value
    tensors       name, number of dimensions, dimensions (the row's length first), type, offset from the start of the data
    padding, and the tensors' bytes, each padded to a multiple of 32

All numbers are little-endian. The keys describe the model and its tokenizer. They are a pure function of config.json and the
tokenizer's files, computed when the plan is made, and part of the plan (`Plan.header`, `Plan.mmproj`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from weightsmith._base.errors import NOTHING_WRITTEN, StoreError
from weightsmith._base.tensors import BLOCKS, DTYPES, DType, TensorSpec
from weightsmith._files.containers import Layout, ShardLayout, TensorPlace, split

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
MAX_NAME_BYTES = 63  # ggml's names have 64 bytes, with a zero at the end
MAX_DIFFUSION_NAME_BYTES = 127  # ComfyUI-GGUF builds llama.cpp with longer names
MAX_DIMENSIONS = 4
MAX_DIFFUSION_DIMENSIONS = 5  # ComfyUI-GGUF adds the convolutions over time of video models, which ggml cannot hold

DIFFUSION_ARCHITECTURES = (
    "flux", "sd1", "sdxl", "sd3", "aura", "ltxv", "hyvid", "wan", "hidream", "cosmos", "qwen_image", "lumina2",
)  # fmt: skip
"""`general.architecture` of diffusion models, as ComfyUI-GGUF writes it."""

TYPE_IDS: Mapping[str, int] = MappingProxyType(
    {
        "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
        "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20, "IQ3_S": 21,
        "IQ2_S": 22, "IQ4_XS": 23, "I8": 24, "I16": 25, "I32": 26, "I64": 27, "F64": 28, "IQ1_M": 29, "BF16": 30,
        "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39, "NVFP4": 40,
    }
)  # fmt: skip
"""ggml's number of each type of tensors, by its name."""

TYPES: Mapping[int, DType] = MappingProxyType({i: BLOCKS.get(name) or DTYPES[name] for name, i in TYPE_IDS.items()})
"""ggml's number → type."""

ValueType = Literal["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "array", "u64", "i64", "f64"]
KINDS: tuple[ValueType, ...] = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "array", "u64", "i64", "f64")
"""Types of values, by their number in the file."""

FORMATS: Mapping[str, str] = MappingProxyType(
    {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "?"}
    | {"u64": "Q", "i64": "q", "f64": "d"}
)
"""struct's format of each type of fixed size."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a GGUF file: one of type `kind`, or a list of them."""

    kind: ValueType
    value: bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]


def encode_metadata(values: Mapping[str, Value]) -> bytes:
    """The number of keys and the keys, as in a file. Raises struct.error for a number that its type cannot hold.

    >>> encode_metadata({"a": Value("u8", 7)}).hex()
    '01000000000000000100000000000000610000000007'
    """
    parts = [struct.pack("<Q", len(values))]
    for key, value in values.items():
        parts.append(_text(key))
        if isinstance(value.value, str | bool | int | float):
            parts += [struct.pack("<I", KINDS.index(value.kind)), _one(value.kind, value.value)]
            continue
        count = len(value.value)
        parts.append(struct.pack("<IIQ", KINDS.index("array"), KINDS.index(value.kind), count))
        if value.kind == "str":
            parts += [_text(str(text)) for text in value.value]
        else:
            parts.append(struct.pack(f"<{count}{FORMATS[value.kind]}", *value.value))
    return b"".join(parts)


def _one(kind: ValueType, value: bool | int | float | str) -> bytes:
    return _text(str(value)) if kind == "str" else struct.pack(f"<{FORMATS[kind]}", value)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


VISION = ("v.", "mm.")
"""Prefixes of the tensors that belong in `mmproj.gguf`."""


def make_layout(specs: Sequence[TensorSpec], max_shard_bytes: int, header: bytes = bytes(8), mmproj: bytes = b"") -> Layout:
    """Lay out tensors in as few files as possible, in their order.

    specs            under the names that llama.cpp expects; unique
    max_shard_bytes  maximum bytes of tensor data per file; a larger tensor gets its own file
    header           `encode_metadata`'s bytes; of several files, the first has the keys
    mmproj           the same for `mmproj.gguf`, the last file, which holds the tensors for images; empty: there is no such file

    Raises StoreError for names, shapes and dtypes that a GGUF file cannot hold, and for a maximum of 0 or less.

    >>> layout = make_layout([TensorSpec("a", DTYPES["F32"], (3,)), TensorSpec("b", BLOCKS["Q8_0"], (2, 64))], 10**9)
    >>> layout.shards[0].name, layout.places["b"]
    ('model.gguf', TensorPlace(shard=0, offset=160, nbytes=136))
    """
    _check(specs, diffusion=holds_diffusion(header))
    vision = [spec for spec in specs if mmproj and spec.name.startswith(VISION)]
    text = [spec for spec in specs if not mmproj or not spec.name.startswith(VISION)]
    groups = split(text, max_shard_bytes, lambda spec: _padded(spec.nbytes))
    shards: list[ShardLayout] = []
    places: dict[str, TensorPlace] = dict.fromkeys(spec.name for spec in specs)  # type: ignore[assignment]
    for number, group in enumerate([*groups, *([vision] if vision else [])]):
        name, keys = "model.gguf", header
        if number == len(groups):
            name, keys = "mmproj.gguf", mmproj
        elif len(groups) > 1:
            name = f"model-{number + 1:05d}-of-{len(groups):05d}.gguf"
            keys = _join(header if number == 0 else bytes(8), _split_keys(number, len(groups), len(text)))
        start = _start(group, keys)
        offset = len(start)
        for spec in group:
            places[spec.name] = TensorPlace(number, offset, spec.nbytes)
            offset += _padded(spec.nbytes)
        shards.append(ShardLayout(name, start, offset, tuple(group)))
    return Layout(tuple(shards), MappingProxyType(places), {}, sum(shard.nbytes for shard in shards))


ADAPTER_NAME = "adapter.gguf"


def make_adapter_layout(specs: Sequence[TensorSpec], header: bytes) -> Layout:
    """Lay out an adapter: all tensors in one file, for llama.cpp reads no other. Raises StoreError as `make_layout`.

    >>> make_adapter_layout([], bytes(8)).shards[0].name
    'adapter.gguf'
    """
    layout = make_layout(specs, sum(_padded(spec.nbytes) for spec in specs) + 1, header)
    return replace(layout, shards=tuple(replace(shard, name=ADAPTER_NAME) for shard in layout.shards))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _join(first: bytes, second: bytes) -> bytes:
    """The keys of two headers."""
    count = int.from_bytes(first[:8], "little") + int.from_bytes(second[:8], "little")
    return count.to_bytes(8, "little") + first[8:] + second[8:]


def _split_keys(number: int, count: int, tensors: int) -> bytes:
    keys = {"no": Value("u16", number), "count": Value("u16", count), "tensors.count": Value("i32", tensors)}
    return encode_metadata({f"split.{key}": value for key, value in keys.items()})


def _start(group: Sequence[TensorSpec], keys: bytes) -> bytes:
    """Everything before the data of a file."""
    parts, offset = [MAGIC, struct.pack("<IQ", VERSION, len(group)), keys], 0
    for spec in group:
        dims = spec.shape[::-1] or (1,)
        numbers = (len(dims), *dims, TYPE_IDS[spec.dtype.name], offset)
        parts += [_text(spec.name), struct.pack(f"<I{len(dims)}QIQ", *numbers)]
        offset += _padded(spec.nbytes)
    data = b"".join(parts)
    return data + bytes(-len(data) % ALIGNMENT)


def holds_diffusion(header: bytes, names: Sequence[str] = DIFFUSION_ARCHITECTURES) -> bool:
    """Whether the first key is an architecture of diffusion models, or one of other names."""
    key = _text("general.architecture") + struct.pack("<I", KINDS.index("str"))
    return header.startswith(tuple(key + _text(name) for name in names), 8)


def _check(specs: Sequence[TensorSpec], *, diffusion: bool) -> None:
    """Raise StoreError for a tensor that no GGUF file can hold."""
    seen: set[str] = set()
    most_bytes = MAX_DIFFUSION_NAME_BYTES if diffusion else MAX_NAME_BYTES
    most = MAX_DIFFUSION_DIMENSIONS if diffusion else MAX_DIMENSIONS
    for spec in specs:
        problem = ""
        if spec.name in seen:
            problem = "two tensors have this name"
        elif len(spec.name.encode(errors="replace")) > most_bytes:
            problem = f"a name in a GGUF file has at most {most_bytes} bytes"
        elif spec.dtype.name not in TYPE_IDS:
            problem = f"a GGUF file cannot hold {spec.dtype}"
        elif len(spec.shape) > most or (not spec.size and not (diffusion and len(spec.shape) == 1)):
            problem = f"a GGUF file cannot hold the shape {list(spec.shape)}"
        elif spec.dtype.block > 1 and (not spec.shape or spec.shape[-1] % spec.dtype.block):
            problem = f"rows of {spec.dtype} are a multiple of {spec.dtype.block} elements, and its shape is {list(spec.shape)}"
        if problem:
            raise StoreError(problem, where=spec.name, state=NOTHING_WRITTEN)
        seen.add(spec.name)
