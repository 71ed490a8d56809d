"""How tensors are laid out in files, by the kind of container: weight files, their headers, each tensor's offset. Does no I/O.

A container is a function `(specs, max_shard_bytes, naming, header, mmproj) -> Layout`, which determines every offset and header
byte before the first tensor byte is written. To add one, add it to `CONTAINERS`.

safetensors: `model.safetensors`, or `model-00001-of-00007.safetensors` … and an index. A file is an 8-byte little-endian
length, that many bytes of JSON, then the tensors' bytes without gaps. The JSON is padded with spaces so that tensor data starts
on a 4,096-byte boundary, and tensors of wider dtypes come first, so every tensor is aligned to its element size and readers can
use it in place from a memory map.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from json.encoder import encode_basestring as quote  # JSON string, non-ASCII unchanged
from types import MappingProxyType
from typing import Any, NamedTuple

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
    parts     those of a pipeline of diffusers, whose loader reads shards and an index in each: folder → stem
    """

    stem: str = "model"
    metadata: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict, metadata={"omit": True})  # of the JSON of a plan, while empty

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
    indexes      of shards, the bytes of each by file name; none for a model, or a part of a pipeline, in one file
    total_bytes  sizes of all weight files and indexes
    """

    shards: tuple[ShardLayout, ...]
    places: Mapping[str, TensorPlace]
    indexes: Mapping[str, bytes]
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


DATA_ALIGNMENT_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000  # the safetensors library rejects longer headers
PEFT_NAME = "adapter_model.safetensors"
KOHYA_NAME = "lora.safetensors"
DIFFUSERS_LORA_NAME = "pytorch_lora_weights.safetensors"
MLX_ADAPTER_NAME = "adapters.safetensors"
PT_METADATA: Mapping[str, str] = MappingProxyType({"format": "pt"})  # transformers rejects files without it


def make_layout(
    specs: Sequence[TensorSpec],
    max_shard_bytes: int,
    metadata: Mapping[str, str] | None = None,
    *,
    index_metadata: Mapping[str, str] | None = None,
    naming: Naming = PLAIN_NAMES,
) -> Layout:
    """Lay out tensors in as few weight files as possible in their order.

    specs           in model order; names are unique
    max_shard_bytes maximum bytes of tensor data per file; a larger tensor gets its own file
    metadata        `__metadata__` of every weight file; None means `{"format": "pt"}`
    index_metadata  keys of the index's metadata besides `total_size`; unused with one file
    naming          of the files; each of its folders with tensors has one file, because loaders of modules read no index,
                    but for the parts of a pipeline

    Without tensors, lays out one valid, empty file. Raises StoreError for names that cannot be stored, a maximum of 0 or
    less, and headers longer than readers accept. Cost: about 6 us per tensor.

    >>> from weightsmith._base.tensors import DTYPES
    >>> layout = make_layout([TensorSpec("a", DTYPES["BF16"], (3,)), TensorSpec("b", DTYPES["F32"], (2,))], 100)
    >>> layout.shards[0].name, layout.places["b"], layout.places["a"]  # wider dtypes first
    ('model.safetensors', TensorPlace(shard=0, offset=4096, nbytes=8), TensorPlace(shard=0, offset=4104, nbytes=6))
    """
    if not isinstance(specs, Sequence):
        raise TypeError(f"specs must be a sequence in model order, not {type(specs).__name__}")
    _check_names(spec.name for spec in specs)
    inner = {spec.name: folder for spec in specs if (folder := naming.folder_of(spec.name))} if naming.folders else {}
    metadata = {**PT_METADATA, **naming.metadata} if metadata is None else metadata
    _check_metadata(metadata)

    files = _Files(specs, max_shard_bytes, index_metadata or {})
    outer = [spec for spec in specs if spec.name not in inner]
    if outer or not naming.parts:
        files.add_shards(naming.stem, outer, metadata)
    for folder in dict.fromkeys(inner.values()):
        group = [spec for spec in specs if inner.get(spec.name) == folder]
        if folder in naming.parts:
            files.add_shards(naming.parts[folder], group, PT_METADATA, f"{folder}/")
        else:
            files.add(f"{folder}/model.safetensors", group, PT_METADATA, f"{folder}/")
    return files.layout()


class _Files:
    """Lays out the weight files of a checkpoint, one after another."""

    def __init__(self, specs: Sequence[TensorSpec], max_shard_bytes: int, index_metadata: Mapping[str, str]) -> None:
        """specs: all tensors, in model order."""
        self._shards: list[ShardLayout] = []
        self._places: dict[str, TensorPlace] = dict.fromkeys(spec.name for spec in specs)  # type: ignore[assignment]
        self._indexes: dict[str, bytes] = {}
        self._max_shard_bytes, self._index_metadata = max_shard_bytes, index_metadata

    def add(self, name: str, group: list[TensorSpec], metadata: Mapping[str, str], prefix: str) -> None:
        """One file of these tensors. prefix: of their names, which they do not have in the file."""
        group.sort(key=lambda spec: -spec.dtype.itemsize)  # stable: model order within a width
        header = _header(group, metadata, name, prefix)
        offset = len(header)
        for spec in group:
            self._places[spec.name] = TensorPlace(len(self._shards), offset, spec.nbytes)
            offset += spec.nbytes
        self._shards.append(ShardLayout(name, header, offset, tuple(group)))

    def add_shards(self, stem: str, specs: list[TensorSpec], metadata: Mapping[str, str], prefix: str = "") -> None:
        """As many files as these tensors need, and an index if that is more than one."""
        groups = split(specs, self._max_shard_bytes, lambda spec: spec.nbytes)
        for number, group in enumerate(groups, 1):
            part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            self.add(f"{prefix}{stem}{part}.safetensors", group, metadata, prefix)
        if len(groups) > 1:
            places = {spec.name: self._places[spec.name] for spec in specs}
            self._indexes[f"{prefix}{stem}.safetensors.index.json"] = _index(self._shards, places, self._index_metadata, prefix)

    def layout(self) -> Layout:
        """The layout of all files."""
        total = sum(shard.nbytes for shard in self._shards) + sum(map(len, self._indexes.values()))
        return Layout(tuple(self._shards), MappingProxyType(self._places), MappingProxyType(self._indexes), total)


def make_adapter_layout(specs: Sequence[TensorSpec], name: str = PEFT_NAME, naming: Naming = PLAIN_NAMES) -> Layout:
    """Lay out an adapter: all tensors in one file, for PEFT and other loaders of adapters read no other.

    naming  has the metadata of the file

    Raises StoreError as `make_layout`.

    >>> make_adapter_layout([]).shards[0].name
    'adapter_model.safetensors'
    """
    layout = make_layout(specs, sum(spec.nbytes for spec in specs) + 1, naming=Naming(metadata=naming.metadata))
    return replace(layout, shards=tuple(replace(shard, name=name) for shard in layout.shards))


def _check_names(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise StoreError("two tensors have this name", where=name, state=NOTHING_WRITTEN)
        if name == "__metadata__":
            what = "this name is reserved in safetensors files"
            raise StoreError(what, where=name, fix="rename the tensor", state=NOTHING_WRITTEN)
        if not name.isascii():
            try:
                name.encode()
            except UnicodeEncodeError:
                what = f"tensor name {name!r} is not valid Unicode (a lone surrogate)"
                raise StoreError(what, state=NOTHING_WRITTEN) from None
        seen.add(name)


def _check_metadata(metadata: Mapping[Any, Any]) -> None:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            what = f"safetensors metadata must map strings to strings, not {key!r} to {value!r}"
            fix = "convert the value to a string, for example with json.dumps"
            raise StoreError(what, where="metadata", fix=fix, state=NOTHING_WRITTEN)


def _header(group: Sequence[TensorSpec], metadata: Mapping[str, str], name: str, prefix: str) -> bytes:
    """The file's first bytes. prefix: of the tensors' names, which the file does not have."""
    entries = [f'"__metadata__":{json.dumps(dict(metadata), separators=(",", ":"), ensure_ascii=False)}']
    start = 0
    for spec in group:
        end = start + spec.nbytes
        shape = ",".join(map(str, spec.shape))
        entries.append(
            f'{quote(spec.name.removeprefix(prefix))}:{{"dtype":"{spec.dtype.name}","shape":[{shape}],"data_offsets":[{start},{end}]}}'
        )
        start = end
    text = ("{" + ",".join(entries) + "}").encode()
    padding = -(8 + len(text)) % DATA_ALIGNMENT_BYTES
    length = len(text) + padding
    if length > MAX_HEADER_BYTES:
        what = f"the header of {len(group):,} tensors would be {length:,} bytes; readers accept {MAX_HEADER_BYTES:,}"
        fix = "use a smaller max_shard_bytes to spread the tensors over more files"
        raise StoreError(what, where=name, fix=fix, state=NOTHING_WRITTEN)
    return length.to_bytes(8, "little") + text + b" " * padding


def _index(
    shards: Sequence[ShardLayout], places: Mapping[str, TensorPlace], index_metadata: Mapping[str, str], prefix: str
) -> bytes:
    """The index as transformers writes it: indented by two, keys sorted, with a trailing newline.

    prefix  of tensors and files, the folder that the index is in
    """
    metadata = {**index_metadata, "total_size": sum(place.nbytes for place in places.values())}
    head = json.dumps(metadata, indent=2, sort_keys=True).replace("\n", "\n  ")
    files = {name: shards[places[name].shard].name.removeprefix(prefix) for name in sorted(places)}
    lines = [f'    {quote(name.removeprefix(prefix))}: "{file}"' for name, file in files.items()]
    body = ",\n".join(lines)
    return f'{{\n  "metadata": {head},\n  "weight_map": {{\n{body}\n  }}\n}}\n'.encode()


SAFETENSORS = "safetensors"
GGUF = "gguf"
PEFT = "peft"
KOHYA = "kohya"
DIFFUSERS_LORA = "diffusers-lora"
GGUF_ADAPTER = "gguf-adapter"
MLX_ADAPTER = "mlx-adapter"
ADAPTERS = frozenset({PEFT, KOHYA, DIFFUSERS_LORA, GGUF_ADAPTER, MLX_ADAPTER})
"""Those that hold an adapter."""


CONTAINERS: Mapping[str, Callable[[Sequence[TensorSpec], int, Naming, bytes, bytes], Layout]] = {
    SAFETENSORS: lambda specs, max_shard_bytes, naming, *headers: make_layout(specs, max_shard_bytes, naming=naming),
    # The stored format lays out its files; it is further down.
    GGUF: lambda specs, max_shard_bytes, naming, *headers: import_module("weightsmith._models.formats.gguf.layout").make_layout(
        specs, max_shard_bytes, *headers
    ),
    GGUF_ADAPTER: lambda specs, max_shard_bytes, naming, *headers: import_module(
        "weightsmith._models.formats.gguf.layout"
    ).make_adapter_layout(specs, headers[0]),
    PEFT: lambda specs, *rest: make_adapter_layout(specs),
    KOHYA: lambda specs, _max_shard_bytes, naming, *headers: make_adapter_layout(specs, KOHYA_NAME, naming),
    DIFFUSERS_LORA: lambda specs, _max_shard_bytes, naming, *headers: make_adapter_layout(specs, DIFFUSERS_LORA_NAME, naming),
    MLX_ADAPTER: lambda specs, *rest: make_adapter_layout(specs, MLX_ADAPTER_NAME),
}
"""Name in `Plan.container` → layout function of the stored tensors, the maximum of a file, `Plan.naming`, `header`, `mmproj`"""
