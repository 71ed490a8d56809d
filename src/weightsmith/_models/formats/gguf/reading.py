"""GGUF files: one, or several as llama.cpp splits them. Blocks are dequantised on read, by the package libgguf.

Tensors have the Hub's names, shapes and order of rows (`base/tensors.py`). Tensors of plain numbers have their own
dtype, blocks are F32. config.json and the tokenizer's files are made from the file's keys; what else is in the folder is not
read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Finding, FormatError, Unsupported
from weightsmith._base.files import DAMAGED, Extent, Opener, StoredTensor, open_local, show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._files.arrays import view_of
from weightsmith._files.hf_folder import FolderWeights, natural_key
from weightsmith._models.formats.decoded import DecodedTensors, Weight
from weightsmith._models.formats.gguf.about import GENERATION, card_of_keys, generation_of_keys, values_of
from weightsmith._models.formats.gguf.architectures import architecture_of_file
from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture
from weightsmith._models.formats.gguf.base.tensors import predicts
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufValues
from weightsmith._models.formats.gguf.cuts import (
    CutEncoding,
    CutWeight,
    KeyWeight,
    OrderedWeight,
    cut_weight,
    ordered_weight,
    padded_weight,
)
from weightsmith._models.formats.gguf.diffusion.reading import is_single_file, single_file_dtype, single_file_spec
from weightsmith._models.formats.gguf.diffusion.text_encoder import SPIECE, is_umt5, spiece_of_keys
from weightsmith._models.formats.gguf.header import ADAPTER_TYPE, SMALL, GgufHeader, GgufTensor, read_gguf_header, text_of
from weightsmith._models.formats.gguf.pooling import pooling_files
from weightsmith._models.formats.gguf.tokenizer.files import tokenizer_files
from weightsmith._models.formats.gguf.writing import GgufEncoding, dequantise, from_llama_order, libgguf
from weightsmith._models.formats.verbatim import as_bytes
from weightsmith._models.sources.composed import Foldered, StateDict
from weightsmith._models.sources.files import FileTensors, PlainFiles, SourceFile, unite
from weightsmith._models.tokenizers.files import json_bytes, settings_in
from weightsmith.abc.tensors import FileKind, Index, OpenedFiles, StoredAs, StoredPart, Tensors, Verbatim, digest

SUFFIX = ".gguf"
CHUNK_ELEMENTS = 1 << 18
"""Elements dequantised at a time by each reading thread."""
MAX_EXPERTS = 4096

_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})(\.gguf)", re.IGNORECASE)
_NO_MODEL = ("mmproj", "imatrix")
"""How the names of GGUF files begin that are no language models: projectors of images, importance matrices."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Numbers by which the matrices of a tensor are multiplied, as NVFP4 needs them: `blk.0.attn_q.scale`, F32.

    file     that has them
    offset   of the first byte
    count    one for each matrix of the tensor, or one for all
    name     of their tensor in the file
    first    of the file's tensor that is the first
    """

    file: Path
    offset: int
    count: int
    name: str
    first: int = 0


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A tensor as the Hub has it, and where its blocks or numbers are in a GGUF file.

    spec       under the Hub's name
    file       the file, as it was opened
    offset     of its first byte
    stored     the type in the file
    head_rows  rows of a head, if the rows of each head are in another order; else 0
    shift      what was added to the values
    power      1 or -1: exp or -exp of the values is stored; 0: the values
    factors    by which its matrices are multiplied
    name       of the tensor in the file; of the experts of a layer, which are one there, of all of them
    expert     its number among these
    """

    spec: TensorSpec
    file: Path
    offset: int
    stored: DType
    head_rows: int = 0
    shift: float = 0.0
    power: int = 0
    factors: Factors | None = None
    name: str = ""
    expert: int = 0

    @property
    def plain(self) -> bool:
        """Whether the bytes in the file are those of the tensor."""
        changed = self.head_rows or self.shift or self.power or self.factors is not None
        return self.stored.block == 1 and not changed


class GgufTensors(FileTensors[StoredBlocks]):
    """The tensors of GGUF files."""

    def __init__(
        self, stored: Mapping[str, StoredBlocks], files: Sequence[SourceFile], where: str, dtype: DType, types: object = None
    ) -> None:
        """
        dtype  of the model's weights, in which a merge writes them by default
        types  llama.cpp's number of the mixture of types, general.file_type
        """
        super().__init__(stored, files, where)
        self._dtype, self._types = dtype, types
        if any(tensor.stored.block > 1 for tensor in stored.values()):
            libgguf(where)

    def natural_dtype(self, name: str) -> DType:
        dtype = self._find(name).spec.dtype
        return self._dtype if dtype.floating else dtype

    def dtype_in_file(self, name: str) -> DType:
        """The dtype of a tensor in the file."""
        return self._find(name).stored

    def stored_as(self, name: str) -> StoredAs:
        """How the file has a tensor."""
        tensor = self._find(name)
        factors, cols = tensor.factors, tensor.spec.shape[-1] if tensor.spec.shape else 1
        encoding = GgufEncoding(tensor.stored, tensor.head_rows, tensor.shift, tensor.power, factored=factors is not None)
        first = tensor.expert * (tensor.spec.size // cols) * as_bytes(TensorSpec("", tensor.stored, (cols,))).size
        parts = [StoredPart(tensor.name, tensor.stored, first)]
        if factors is not None:
            parts.append(StoredPart(factors.name, DTYPES["F32"], factors.first))
        return StoredAs(encoding.name, tuple(parts), types=self._types, decoded=tensor.stored.block > 1)

    def location(self, name: str) -> tuple[int, int] | None:
        tensor = self._find(name)
        return self._files.location(tensor.file, tensor.offset) if tensor.plain else None

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        tensor = self._find(name)
        if tensor.plain:
            return self._files.extents(tensor.file, tensor.offset + start_byte, nbytes)
        stored = tensor.stored
        extents = self._files.extents(tensor.file, tensor.offset, tensor.spec.size // stored.block * stored.itemsize)
        if tensor.factors is None:
            return extents
        return *extents, *self._files.extents(tensor.factors.file, tensor.factors.offset, 4 * tensor.factors.count)

    def preferred_rows(self, name: str) -> int:
        """The rows of a head, where these are in another order; else 1."""
        return self._find(name).head_rows or 1

    def _read(self, tensor: StoredBlocks, start_byte: int, out: memoryview) -> None:
        if tensor.plain:
            self._files.read(tensor.file, tensor.spec.name, tensor.offset + start_byte, out)
            return
        width, target = tensor.spec.dtype.itemsize, np.frombuffer(out, np.uint8)
        end = start_byte + target.size
        cols = tensor.spec.shape[-1] if len(tensor.spec.shape) > 1 else 1
        unit = math.lcm(tensor.head_rows * cols or 1, tensor.stored.block)  # elements that are decoded together
        at = start_byte // width // unit * unit
        while at * width < end:
            needed = -(-(-(-end // width) - at) // unit) * unit
            count = min(needed, max(unit, CHUNK_ELEMENTS // unit * unit))
            first, last = max(start_byte, at * width), min(end, (at + count) * width)
            values = self._decoded(tensor, at, count, cols).view(np.uint8)
            target[first - start_byte : last - start_byte] = values[first - at * width : last - at * width]
            at += count

    def _decoded(self, tensor: StoredBlocks, first: int, count: int, cols: int) -> npt.NDArray[Any]:
        """`count` elements from `first` on, whole units; in the dtype of the spec."""
        stored = tensor.stored
        raw = np.empty(count // stored.block * stored.itemsize, np.uint8)
        offset = tensor.offset + first // stored.block * stored.itemsize
        self._files.read(tensor.file, tensor.spec.name, offset, raw.data)
        if stored.block > 1:
            values: npt.NDArray[Any] = dequantise(stored, raw, count)
        elif tensor.shift or tensor.power or tensor.factors is not None:
            values = raw.view(stored.numpy).astype(np.float32)
        else:
            values = raw.view(f"u{stored.itemsize}")
        if tensor.factors is not None:
            values *= self._factors(tensor, tensor.factors, first, count)
        values = from_llama_order(values, tensor.head_rows, cols)
        if tensor.shift:
            values -= np.float32(tensor.shift)
        if tensor.power:  # libm's: numpy's log depends on the CPU; NaN is the caller's to refuse
            values = np.array([math.log(x) if x > 0 else math.nan for x in (tensor.power * values).tolist()], np.float32)
        return values

    def _factors(self, tensor: StoredBlocks, factors: Factors, first: int, count: int) -> npt.NDArray[np.float32]:
        """By what `count` elements from `first` on are multiplied: float32 [count], or [1]."""
        raw = np.empty(4 * factors.count, np.uint8)
        self._files.read(factors.file, tensor.spec.name, factors.offset, raw.data)
        numbers = raw.view(np.float32)
        if factors.count == 1:
            return numbers
        matrix = tensor.spec.size // factors.count
        return numbers[np.arange(first, first + count) // matrix]


class GgufBytes(PlainFiles):
    """All tensors of GGUF files under the files' names, types of blocks as rows of bytes."""

    def __init__(self, headers: Mapping[Path, GgufHeader], files: Sequence[SourceFile], where: str) -> None:
        stored = {
            tensor.name: StoredTensor(as_bytes(TensorSpec(tensor.name, tensor.dtype, tensor.shape)), path, tensor.offset)
            for path, header in headers.items()
            for tensor in header.tensors
        }
        super().__init__(stored, files, where)
        self.identity = digest([self.identity, "undecoded"])


class GgufMovedTensors(DecodedTensors):
    """The tensors of GGUF files, some of which are in parts, in keys, or have their rows or columns in another order."""

    def __init__(self, stored: GgufTensors, weights: Sequence[Weight], where: str) -> None:
        super().__init__(stored, weights, [], where)
        self._first = {weight.spec.name: weight.stored[:1] for weight in weights}
        self._blocks = stored

    def dtype_in_file(self, name: str) -> DType:
        """The dtype of a tensor in the file; of its first part. That of a key is F32."""
        first = self._first.get(name, (name,))
        return self._blocks.dtype_in_file(first[0]) if first else DTYPES["F32"]

    def stored_as(self, name: str) -> StoredAs | None:
        """How the file has a tensor; None: in a key, or without its first rows."""
        weight = self._weight(name)
        if weight is None:
            return self._blocks.stored_as(name)
        if isinstance(weight, OrderedWeight):
            return replace(self._blocks.stored_as(weight.stored[0]), order=weight.order)
        if not isinstance(weight, CutWeight):
            return None
        places = [self._blocks.stored_as(part) for part in weight.stored]
        dtypes = [place.parts[0].dtype for place in places]
        encoding = CutEncoding(weight.height, tuple(zip(dtypes, weight.parts, strict=True)), weight.flat).name
        if any(place.encoding != GgufEncoding(dtype).name for place, dtype in zip(places, dtypes, strict=True)):
            encoding = ""  # a part has factors, which no encoding of several parts has
        decoded = any(place.decoded for place in places)
        return replace(places[0], encoding=encoding, parts=tuple(place.parts[0] for place in places), decoded=decoded)


def choose(names: Sequence[str], where: str) -> FolderWeights | None:
    """The GGUF file of the model, or its parts; None if there is none.

    Raises FormatError for several models, as most repositories of GGUF files have them, and for missing parts.
    """
    files = [name for name in names if "/" not in name and name.lower().endswith(SUFFIX)]
    models: dict[str, list[str]] = {}
    for name in sorted((n for n in files if not n.lower().startswith(_NO_MODEL)), key=natural_key):
        part = _PART.fullmatch(name)
        models.setdefault(f"{part[1]} of {part[3]}" if part else name, []).append(name)
    if not models:
        return None
    if len(models) > 1:
        listed = [parts[0] for parts in models.values()]
        what = f"{len(models)} GGUF models in one folder: {', '.join(map(show, listed[:5]))}{', …' if len(listed) > 5 else ''}"
        raise FormatError(what, where=where, fix=f"Name one of the files: {Path(where, listed[0])}")
    (chosen,) = models.values()
    if part := _PART.fullmatch(chosen[0]):
        missing = sorted(set(_parts(part)).difference(chosen))
        if missing:
            what = f"{len(missing)} of {int(part[3])} parts are missing: {', '.join(missing[:3])}"
            raise FormatError(what, where=where, fix="Get the missing files: the download was probably interrupted.")
    return FolderWeights(None, tuple(chosen), tuple(name for name in files if name not in chosen))


def _parts(part: re.Match[str]) -> list[str]:
    """The names of all parts of a split file. Raises FormatError for the number 0."""
    count = int(part[3])
    if not count:
        raise FormatError("part of a file that is split into 0", where=part[0], fix="Do not rename the parts of a split file.")
    return [f"{part[1]}-{i:05d}-of-{count:05d}{part[4]}" for i in range(1, count + 1)]


def open_files(paths: Sequence[Path], index: Index | None, where: str, open_file: Opener = open_local) -> OpenedFiles:
    """The tensors of a GGUF file, and its config.json and tokenizer. Of a split file, any part stands for all.

    Raises FormatError, Unsupported (architectures, types, versions; libgguf is missing), NotFound and CheckpointError.
    """
    if len(paths) == 1 and (part := _PART.fullmatch(paths[0].name)):
        paths = [paths[0].with_name(name) for name in _parts(part)]
    headers = {path: read_gguf_header(path, open_file) for path in paths}
    first = headers[paths[0]]
    count = first.keys.get("split.count", 1)
    if type(count) is not int or count not in (0, len(paths)):
        what = f"part of a file that is split into {show(count)}, and {len(paths)} were found"
        raise FormatError(what, where=str(paths[0]), fix="Do not rename the parts of a split file.")
    if text_of(first.keys.get("general.type")) == ADAPTER_TYPE:
        fix = f"write its base in front of it, BASE+{where}; to merge adapters, all models of the recipe must be adapters"
        raise Unsupported("an adapter (LoRA), not a model", where=where, fix=fix)
    tensors = {tensor.name: tensor for header in headers.values() for tensor in header.tensors}
    if is_single_file(first.keys, tensors, where):
        return _open_single_file(headers, first.keys, tensors, where)
    architecture = architecture_of_file(first.keys, tensors, where)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    small = {name: values for header in headers.values() for name, values in header.small.items()}
    dtype = _dtype(tensors.values())
    predicted = architecture.predicted_layers(values := architecture.values(first.keys, where))
    layers: float = values.count("block_count") - predicted if predicted else math.inf
    if architecture.predicting and any(predicts(name, layers) for name in tensors):
        architecture, layers = architecture.with_predictors(values.count("block_count") - predicted, predicted), math.inf
    config = architecture.config(first.keys, Contents(shapes, small), dtype.torch, where)
    factors = _factors(headers, tensors, architecture)
    named = _Named(architecture, config, layers, factors)
    stored = unite((_tensors(path, header, named) for path, header in headers.items()), paths[0].parent)
    files = [SourceFile(path, header.state, header.digest) for path, header in headers.items()]
    other_files, notes = tokenizer_files(first.keys, architecture, where)
    if several := [name for name in tensors if predicts(name, layers)]:
        what = f"{len(several):,} tensors are left out: layers that predict several tokens at a time"
        notes = [*notes, Finding(what, several[0], fix="use the model as it is: it works without them")]
    if architecture.multipliers:
        what = "its weights are multiplied by numbers of the original's config.json, which llama.cpp does not know"
        fix = "merge it with GGUF files alone, and apply no adapter of the original"
        notes = [*notes, Finding(what, where, fix=fix)]
    other_files |= {"config.json": json_bytes(config), **pooling_files(first.keys, architecture.name)}
    if sampling := generation_of_keys(first.keys):
        other_files[GENERATION] = json_bytes(settings_in(other_files.get(GENERATION, b"{}")) | sampling)
    whole = GgufTensors(stored, files, where, dtype, first.keys.get("general.file_type"))
    weights, padded = _moved(whole, architecture, GgufConfig(config), dtype, where)
    if architecture.in_keys:
        in_keys = architecture.numbers_of_keys(GgufValues(first.keys, where, DAMAGED), config["num_hidden_layers"])
        weights += [KeyWeight(TensorSpec(name, DTYPES["F32"], shape), (), dtype, n) for name, (n, shape) in in_keys.items()]
    source = GgufMovedTensors(whole, weights, where) if weights else whole
    return OpenedFiles(
        source,
        notes=(*notes, *padded),
        files=other_files,
        card=card_of_keys(first.keys),
        decoded=_most_blocks(tensors.values()),
        verbatim=Verbatim(GgufBytes(headers, files, where), source.stored_as, values_of(first)),
    )


def _moved(
    whole: GgufTensors, architecture: GgufArchitecture, config: GgufConfig, dtype: DType, where: str
) -> tuple[list[Weight], list[Finding]]:
    """Tensors that a file has in parts, in another order or without their first rows; and notes."""
    cuts = list(dict.fromkeys(split for name in whole.specs if (split := architecture.part_of(name)) is not None))
    weights, notes = list[Weight](), list[Finding]()
    for cut, layer in cuts:
        weight = cut_weight(cut, layer, whole.specs, config, dtype, where)
        weights.append(replace(weight, spec=replace(weight.spec, name=architecture.published(weight.spec.name))))
    for spec in whole.specs.values():
        if (order := architecture.order(spec.name, config)) is not None:
            weights.append(ordered_weight(spec, str(architecture.hub_name(spec.name)), order, dtype, where))
        if skipped := architecture.rows_skipped(spec.name, config):
            name = str(architecture.hub_name(spec.name))
            weights.append(padded_weight(spec, name, skipped, dtype, where))
            what = f"its first {skipped:,} rows are 0: the file does not have them, because no token has these positions"
            notes.append(Finding(what, name, fix="use the model as it is"))
    return weights, notes


def _open_single_file(
    headers: Mapping[Path, GgufHeader], keys: Mapping[str, Any], tensors: Mapping[str, GgufTensor], where: str
) -> OpenedFiles:
    """The tensors of a diffusion model or of T5, which bring no config.json; with UMT5's tokenizer, as in ComfyUI's files."""
    stored = [
        [
            StoredBlocks(single_file_spec(keys, tensor, tensors, str(path)), path, tensor.offset, tensor.dtype)
            for tensor in header.tensors
        ]
        for path, header in headers.items()
    ]
    files = [SourceFile(path, header.state, header.digest) for path, header in headers.items()]
    parent = next(iter(headers)).parent
    weights = GgufTensors(unite(stored, parent), files, where, single_file_dtype(tensors.values()))
    source: Tensors = weights
    notes = list[Finding]()
    if is_umt5(keys, tensors):
        if (spiece := spiece_of_keys(keys, where)) is not None:
            view = view_of(SPIECE, np.frombuffer(spiece, np.uint8))
            source = Foldered(weights, {"": StateDict({SPIECE: view}, where)}, where)
        else:
            what = "the file has no tokenizer, and ComfyUI reads that of UMT5 from the same file"
            fix = f"add the tensor {SPIECE} of ComfyUI's own file of UMT5 to the output"
            notes.append(Finding(what, "token_embd.weight", fix=fix))
    return OpenedFiles(source, notes=tuple(notes), card=card_of_keys(keys), decoded=_most_blocks(tensors.values()))


def _most_blocks(tensors: Iterable[GgufTensor]) -> str:
    """The type of blocks that most tensors have, for users; "" if all are plain numbers."""
    blocks = Counter(tensor.dtype.name for tensor in tensors if tensor.dtype.block > 1)
    return f"GGUF, mostly {blocks.most_common(1)[0][0]}" if blocks else ""


def _dtype(tensors: Iterable[GgufTensor]) -> DType:
    """The dtype of the model that a file was made of: F32 or F16 if its matrices are, else BF16."""
    names = {tensor.dtype.name for tensor in tensors if len(tensor.shape) > 1}
    return DTYPES[next(iter(names)) if names in ({"F32"}, {"F16"}) else "BF16"]


_FACTORS, _INPUT_FACTORS = ".scale", ".input_scale"
"""Ends of names that a weight's tensors of factors have instead of `.weight`: of the weight, and of what enters the layer."""


def _factors(
    headers: Mapping[Path, GgufHeader], tensors: Mapping[str, GgufTensor], architecture: GgufArchitecture
) -> dict[str, Factors]:
    """By what weights are multiplied, by the names of the tensors of factors. Raises FormatError for shapes that do not fit."""
    factors = {}
    for path, header in headers.items():
        for tensor in header.tensors:
            weight = tensors.get(f"{tensor.name.removesuffix(_FACTORS)}.weight")
            if not tensor.name.endswith(_FACTORS) or weight is None or architecture.hub_name(tensor.name) is not None:
                continue
            count, matrices = math.prod(tensor.shape), math.prod(weight.shape[:-2])
            if tensor.dtype.name != "F32" or count not in (1, matrices):
                what = f"tensor {show(tensor.name)} is {tensor.dtype} {list(tensor.shape)}"
                what += f", not F32 of 1 or {matrices:,} numbers"
                raise FormatError(what, where=str(path), fix=DAMAGED)
            factors[tensor.name] = Factors(path, tensor.offset, count, tensor.name)
    return factors


@dataclass(frozen=True, slots=True)
class _Named:
    """How the tensors of a GGUF file become the Hub's.

    layers   those behind them are left out
    factors  by which weights are multiplied, by the names of the tensors of factors
    """

    architecture: GgufArchitecture
    config: Mapping[str, Any]
    layers: float
    factors: Mapping[str, Factors]

    def unread(self, name: str) -> bool:
        """Whether a tensor is none of the Hub's, and known."""
        return (
            name in SMALL
            or name in self.factors
            or predicts(name, self.layers)
            or name in self.architecture.unread(GgufConfig(self.config))
            or (name.endswith(_INPUT_FACTORS) and f"{name.removesuffix(_INPUT_FACTORS)}{_FACTORS}" in self.factors)
        )


def _tensors(path: Path, header: GgufHeader, named: _Named) -> list[StoredBlocks]:
    """The tensors of one file under the Hub's names."""
    stored: list[StoredBlocks] = []
    architecture, config = named.architecture, named.config
    for tensor in header.tensors:
        if named.unread(tensor.name):
            continue
        moved = architecture.part_of(tensor.name) is not None or architecture.order(tensor.name, GgufConfig(config)) is not None
        padded = architecture.rows_skipped(tensor.name, GgufConfig(config)) > 0
        name = tensor.name if moved or padded else architecture.hub_name(tensor.name)
        if name is None:
            what = f"tensor {show(tensor.name)} does not belong to a model of the family {architecture.model_types[0]}"
            raise Unsupported(what, where=str(path), fix="Use the model's original checkpoint.")
        factors = (
            named.factors.get(f"{tensor.name.removesuffix('.weight')}{_FACTORS}") if tensor.name.endswith(".weight") else None
        )
        if "{}" in name:
            count = int(config.get(architecture.experts) or 0) if architecture.experts else [*tensor.shape, 0][0]
            stored += _experts(path, tensor, name, count, factors)
            continue
        heads = architecture.rotated_heads(tensor.name, *_heads(config))
        if heads and tensor.shape[0] % (2 * heads):
            what = f"tensor {show(tensor.name)} has {tensor.shape[0]:,} rows for {heads} heads"
            raise FormatError(what, where=str(path), fix=DAMAGED)
        shift, power = architecture.shift_of(tensor.name), architecture.power_of(tensor.name)
        decoded = tensor.dtype.block > 1 or shift or power or factors is not None
        dtype = DTYPES["F32"] if decoded else tensor.dtype
        head_rows = tensor.shape[0] // heads if heads else 0
        shape = architecture.hub_shape(tensor.name, tensor.shape)
        spec = TensorSpec(name, dtype, shape)
        stored.append(StoredBlocks(spec, path, tensor.offset, tensor.dtype, head_rows, shift, power, factors, tensor.name))
    return stored


def _heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Heads of q and of k; of encoders, whose rows are never in another order, 0."""
    heads = config.get("num_attention_heads", 0)
    return heads, config.get("num_key_value_heads", heads)


def _experts(path: Path, tensor: GgufTensor, name: str, experts: int, factors: Factors | None) -> Iterator[StoredBlocks]:
    """The experts of a layer, one after another in one tensor."""
    if len(tensor.shape) != 3 or tensor.shape[0] != experts or experts > MAX_EXPERTS:
        what = f"tensor {show(tensor.name)} has the shape {list(tensor.shape)}, not one matrix for each of {experts:,} experts"
        raise FormatError(what, where=str(path), fix=DAMAGED)
    dtype = DTYPES["F32"] if tensor.dtype.block > 1 or factors is not None else tensor.dtype
    for expert in range(experts):
        spec = TensorSpec(name.format(expert), dtype, tensor.shape[1:])
        offset, one = tensor.offset + expert * (tensor.nbytes // experts), factors
        if factors is not None and factors.count > 1:
            one = replace(factors, offset=factors.offset + 4 * expert, count=1, first=expert)
        yield StoredBlocks(spec, path, offset, tensor.dtype, factors=one, name=tensor.name, expert=expert)


KIND = FileKind("GGUF", (SUFFIX,), (), choose, open_files)
