"""Distributed checkpoints of PyTorch (DCP): FSDP's of transformers and accelerate, torchtitan's.

.metadata     a pickle: dtype, shape and parts of each tensor, and the file, offset and length of each part
__0_0.distcp  what a process has written: for each part an archive of torch.save, one after another

Megatron's (torch_dist) have the tensors of the optimizer beside the model's, under names that begin with `optimizer.`. Layers
of one shape are one tensor: [layers, rows, columns].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from weightsmith._base.errors import Finding, FormatError, Unsupported, raised_at
from weightsmith._base.files import DAMAGED, FileState, Opener, RandomAccess, of_tensor, open_local, show, show_all
from weightsmith._base.tensors import BY_TORCH_NAME, TensorSpec
from weightsmith._files import state_pickle
from weightsmith._files.hf_folder import FolderWeights, natural_key
from weightsmith._files.pytorch import NESTED, PARALLEL, TRAINED, StoredView, read_archive, view_of
from weightsmith._files.safetensors import MAX_BYTES, MAX_DIMENSIONS, checked_product
from weightsmith._files.state_pickle import MAX_PICKLE_BYTES, Global, Instance, Tensor, describe, interpret
from weightsmith._files.zip_records import read_at
from weightsmith._models.formats.training.processes import FIX, MISSING, Box, BoxedTensors, fill
from weightsmith._models.sources.files import SourceFile
from weightsmith.abc.tensors import FileKind, Index, OpenedFiles

METADATA, SUFFIX = ".metadata", ".distcp"
_SUBFOLDER = re.compile(r"pytorch_model_fsdp_\d+", re.ASCII)  # of accelerate and transformers; `optimizer_0` is beside it
_TOP = "torch.distributed.checkpoint."
_TENSOR, _PART, _INDEX = (
    f"{_TOP}metadata.{name}" for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
)
_PLACE = f"{_TOP}filesystem._StorageInfo"
_CLASSES = frozenset(
    {
        *(_TENSOR, _PART, _INDEX, _PLACE),
        *(f"{_TOP}metadata.{name}" for name in ("Metadata", "BytesStorageMetadata", "TensorProperties", "StorageMeta")),
        f"{_TOP}metadata._MEM_FORMAT_ENCODING",
        *(f"pathlib.{local}{kind}Path" for local in ("", "_local.") for kind in ("Posix", "Windows")),
    }
)

_MEGATRON_STATE = re.compile(r"(chained_\d+\.)?(optimizer|rng_state|rerun_state_machine_state)\..+", re.ASCII)
"""Names in Megatron's checkpoints that are no part of the model."""

_Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Where a part of a tensor is: the file beside `.metadata`, and the archive's place in it, in bytes."""

    first: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Listed:
    """A tensor as `.metadata` has it: its spec under the name that it has there, and its parts."""

    spec: TensorSpec
    parts: tuple[_Part, ...]


class _Slice:
    """A run of bytes of a file, as a file."""

    def __init__(self, file: RandomAccess, offset: int, nbytes: int) -> None:
        self._file, self._offset, self._nbytes = file, offset, nbytes
        self.state: FileState = file.state

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return self._file.read_at(self._offset + offset, max(0, min(nbytes, self._nbytes - offset)))


def choose(names: Sequence[str], where: str) -> FolderWeights | None:
    """The files of a checkpoint in the folder, or in the one subfolder that accelerate gives the model.

    Raises FormatError for subfolders of several models.
    """
    folders = {name.rpartition("/")[0] for name in names if name.endswith(SUFFIX)}
    subfolders = sorted(folder for folder in folders if _SUBFOLDER.fullmatch(folder))
    for folder in ("", *subfolders):
        prefix = f"{folder}/" if folder else ""
        if folder in folders and f"{prefix}{METADATA}" in names:
            if folder and len(subfolders) > 1:
                what = f"checkpoints of {len(subfolders)} models: {show_all(subfolders)}"
                raise FormatError(what, where=where, fix="Name the folder of one, with its config.json and tokenizer in it.")
            parts = [n for n in names if n.endswith(SUFFIX) and n.rpartition("/")[0] == folder]
            return FolderWeights(None, (f"{prefix}{METADATA}", *sorted(parts, key=natural_key)), ())
    return None


def open_files(paths: Sequence[Path], index: Index | None, where: str, open_file: Opener = open_local) -> OpenedFiles:
    """The tensors of a checkpoint. paths: `.metadata`, and the files beside it. Reads the pickles and directories of parts.

    The state dict is the whole, or its entry `model`, `module`, `state_dict` or `model_state_dict`, at any depth.

    Raises FormatError, Unsupported, NotFound, CheckpointError. Cost: about 0.4 ms for each part of a tensor.
    """
    metadata = next(path for path in paths if path.name == METADATA)
    data_files = {path.name: path for path in paths if path is not metadata}
    with raised_at(str(metadata)), open_file(metadata) as file:
        state = file.state
        if state.nbytes > MAX_PICKLE_BYTES:
            raise Unsupported(f"the pickle has {state.nbytes:,} bytes, and at most {MAX_PICKLE_BYTES:,} are read")
        text = read_at(file, 0, state.nbytes)
        listed, notes = _model(text, str(metadata.parent))
        in_file: dict[str, list[tuple[str, _Part]]] = {}
        for name, tensor in listed.items():
            for part in tensor.parts:
                in_file.setdefault(part.file, []).append((name, part))
        needed = sorted(in_file, key=natural_key)
        if absent := [name for name in needed if name not in data_files]:
            what = f"{len(absent)} of {len(needed)} files are missing: {show_all(absent)}"
            raise FormatError(what, fix=MISSING)
    files: list[SourceFile] = []  # without `.metadata`, which is in the digest of each: nothing more is read from it
    boxes: dict[str, list[Box]] = {name: [] for name in listed}
    for file_name in needed:
        files.append(_read_parts(data_files[file_name], in_file[file_name], listed, boxes, open_file, xxhash.xxh3_128(text)))
    with raised_at(str(metadata.parent)):
        stored = {
            name: fill(
                tensor.spec, tensor.spec.shape, boxes[name], data_files[tensor.parts[0].file] if tensor.parts else metadata
            )
            for name, tensor in listed.items()
        }
    return OpenedFiles(BoxedTensors(stored, files, where), notes=notes)


def _read_parts(
    path: Path,
    parts: Sequence[tuple[str, _Part]],
    listed: Mapping[str, _Listed],
    boxes: Mapping[str, list[Box]],
    open_file: Opener,
    digests: xxhash.xxh3_128,
) -> SourceFile:
    """Read and check the archives of a file, and add what they hold to `boxes`. digests: takes theirs."""
    with raised_at(str(path)), open_file(path) as file:
        for name, part in sorted(parts, key=lambda item: item[1].offset):
            if part.offset + part.nbytes > file.state.nbytes:
                what = f"tensor {show(name)}: a part is at bytes {part.offset:,} to {part.offset + part.nbytes:,}"
                raise FormatError(f"{what}, and the file ends at {file.state.nbytes:,}", fix=DAMAGED)
            with of_tensor(name, f", its part at byte {part.offset:,}"):
                view, digest = _read_part(_Slice(file, part.offset, part.nbytes), part, listed[name].spec, path)
            digests.update(digest.encode())
            boxes[name].append(Box(path, part.offset + view.start, part.first, part.shape, view.strides))
        return SourceFile(path, file.state, digests.hexdigest())


def _read_part(piece: _Slice, part: _Part, spec: TensorSpec, path: Path) -> tuple[StoredView, str]:
    archive = read_archive(piece, part.nbytes)
    if type(archive.value) is not Tensor:
        raise Unsupported(f"it holds {describe(archive.value)}, not a tensor")
    view = view_of(spec.name, archive.value, path, archive, {})
    if (view.spec.dtype, view.spec.shape) != (spec.dtype, part.shape):
        what = f"it is {show(view.spec.shape)} {view.spec.dtype}, and {METADATA} says {show(part.shape)} {spec.dtype}"
        raise FormatError(what, fix=DAMAGED)
    return view, archive.digest


# ---- .metadata


def _model(text: bytes, where: str) -> tuple[dict[str, _Listed], tuple[Finding, ...]]:
    """The tensors of the model by name, and notes on what was taken."""
    whole = interpret(text, _CLASSES)
    if type(whole) is not Instance or whole.kind != f"{_TOP}metadata.Metadata":
        raise FormatError(f"it holds {describe(whole)}, not what PyTorch writes there", fix=DAMAGED)
    entries = dict(_named(whole.attribute("state_dict_metadata")))
    tensors = {name: entry for name, entry in entries.items() if entry.kind == _TENSOR}
    paths = dict(_paths(whole.attribute("planner_data")))
    names, notes = _choose_state_dict({name: paths.get(name, (name,)) for name in tensors}, where)
    places = dict(_places(whole.attribute("storage_data"), names))
    listed: dict[str, _Listed] = {}
    for stored, name in names.items():
        if name in listed:
            raise FormatError(f"two tensors have the name {show(name)}", fix=DAMAGED)
        with of_tensor(stored):
            listed[name] = _listed(name, tensors[stored], places.get(stored, {}))
    return listed, notes


def _choose_state_dict(paths: Mapping[str, _Path], where: str) -> tuple[dict[str, str], tuple[Finding, ...]]:
    """The names of the model's tensors by those that they are stored under, and notes."""
    places = {stored: _state_dict_of(path) for stored, path in paths.items()}
    trained = {stored for stored, path in paths.items() if any(type(k) is str and TRAINED.fullmatch(k) for k in path[:-1])}
    trained |= {stored for stored, path in paths.items() if len(path) == 1 and _MEGATRON_STATE.fullmatch(str(path[0]))}
    candidates = dict.fromkeys(place for stored, place in places.items() if stored not in trained)
    nested = [place for place in candidates if place]
    if len(nested) > 1:
        what = f"several state dicts: {show_all(['.'.join(map(str, place)) for place in nested])}; none is said to be the model"
        raise FormatError(what, fix="Save a checkpoint of the one that is meant.")
    if not candidates:
        raise Unsupported("it holds no tensors of a model", fix="Name the folder with the model, not that of the optimizer.")
    chosen = nested[0] if nested else ()
    names = {s: _joined(paths[s][len(chosen) :]) for s, place in places.items() if place == chosen and s not in trained}
    notes = []
    if chosen:
        others = sorted(
            {str(path[0] if path[0] != chosen[0] else path[len(chosen) - 1]) for s, path in paths.items() if s not in names}
        )
        what = f"the tensors are those of its entry {show('.'.join(map(str, chosen)))}"
        notes.append(Finding(what + (f"; ignored: {show_all(others)}" if others else ""), where))
    elif trained:
        notes.append(Finding(f"ignored: {len(trained):,} tensors of the optimizer", where))
    if all(name.startswith(PARALLEL) and name != PARALLEL for name in names.values()):
        names = {stored: name.removeprefix(PARALLEL) for stored, name in names.items()}
        notes.append(Finding(f"the prefix {show(PARALLEL)} of all names was removed (the model was a DataParallel)", where))
    return names, tuple(notes)


def _state_dict_of(path: _Path) -> _Path:
    """Keys of the state dict with a value: up to the first that trainers give the model's; () for the top level."""
    return next((path[: k + 1] for k, key in enumerate(path[:-1]) if key in NESTED), ())


def _joined(path: _Path) -> str:
    return ".".join(map(str, path))


def _listed(name: str, entry: Instance, places: Mapping[tuple[int, ...], tuple[str, int, int]]) -> _Listed:
    properties = entry.attribute("properties")
    values = properties.state if type(properties) is Instance else None
    dtype = values[0] if type(values) is tuple and values else None
    torch_name = dtype.name.removeprefix("torch.") if type(dtype) is Global else ""
    if torch_name not in BY_TORCH_NAME:
        raise Unsupported(f"dtype {describe(dtype)} is not supported; supported are {', '.join(BY_TORCH_NAME)}")
    spec = TensorSpec(name, BY_TORCH_NAME[torch_name], _numbers(entry.attribute("size"), "its shape"))
    checked_product(spec.dtype, spec.shape)
    chunks = entry.attribute("chunks")
    parts: dict[tuple[int, ...], _Part] = {}
    for chunk in chunks if type(chunks) is list else ():
        if type(chunk) is not Instance or chunk.kind != _PART:
            raise FormatError(f"one of its parts is {describe(chunk)}", fix=DAMAGED)
        first, shape = (_numbers(chunk.attribute(key), f"the {key} of a part") for key in ("offsets", "sizes"))
        if not len(first) == len(shape) == len(spec.shape):
            raise FormatError(
                f"a part at {show(first)} of shape {show(shape)}, and the tensor is {show(spec.shape)}", fix=DAMAGED
            )
        if 0 in shape:
            continue  # a process with none of its rows
        place = places.get(first) or (None if any(first) else places.get(()))
        if place is None:
            raise FormatError(f"no file is said to have its part at {show(first)}", fix=FIX)
        part = _Part(first, shape, *place)
        if parts.setdefault(first, part) != part:
            raise FormatError(f"two parts are at {show(first)}, of shape {show(shape)} and another", fix=DAMAGED)
    return _Listed(spec, tuple(parts.values()))


def _places(storage: Any, names: Mapping[str, str]) -> Iterator[tuple[str, dict[tuple[int, ...], tuple[str, int, int]]]]:
    """Tensor, and where its parts are: first element → file, offset, length."""
    places: dict[str, dict[tuple[int, ...], tuple[str, int, int]]] = {}
    for index, place in storage.items() if type(storage) is state_pickle.Mapping else ():
        name = index.attribute("fqn") if type(index) is Instance and index.kind == _INDEX else None
        if type(name) is not str or type(place) is not Instance or place.kind != _PLACE:
            what = f"its table of places has {describe(index)} at {describe(place)}"
            raise Unsupported(what, fix="Save it with torch.distributed.checkpoint.save and its own writer of files.")
        if name not in names:
            continue
        with of_tensor(name):
            if place.attribute("transform_descriptors") is not None:
                what = (
                    f"its parts are stored as {describe(place.attribute('transform_descriptors'))}, in a form that is not read"
                )
                raise Unsupported(what, fix="Save the checkpoint without extensions.")
            offset, nbytes = place.attribute("offset"), place.attribute("length")
            path = place.attribute("relative_path")
            if type(path) is not str or not _is_number(offset) or not _is_number(nbytes):
                what = f"a part is in {describe(path)}, at byte {describe(offset)}, of {describe(nbytes)} bytes"
                raise FormatError(what, fix=DAMAGED)
            at = index.attribute("offset")
            first = () if at is None else _numbers(at, "the place of a part")
            places.setdefault(name, {})[first] = (path, offset, nbytes)
    yield from places.items()


def _named(table: Any) -> Iterator[tuple[str, Instance]]:
    """Names and entries of `state_dict_metadata`. Raises FormatError."""
    if type(table) is not state_pickle.Mapping:
        raise FormatError(f"its table of tensors is {describe(table)}", fix=DAMAGED)
    for name, entry in table.items():
        if type(name) is not str or type(entry) is not Instance:
            raise FormatError(f"its table of tensors has {describe(entry)} as {describe(name)}", fix=DAMAGED)
        yield name, entry


def _paths(planned: Any) -> Iterator[tuple[str, _Path]]:
    """The keys that lead to each value in the dict that was saved, if the planner has stored them."""
    for name, path in planned.items() if type(planned) is state_pickle.Mapping else ():
        if type(name) is str and type(path) is tuple and path and all(type(key) in (str, int) for key in path):
            yield name, path


def _numbers(values: Any, what: str) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > MAX_DIMENSIONS or not all(map(_is_number, values)):
        raise FormatError(f"{what} is {describe(values)}, not up to {MAX_DIMENSIONS} integers from 0 to 2^63", fix=DAMAGED)
    return values


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_BYTES


KIND = FileKind("distributed checkpoint", (), (), choose, open_files, joins=True)
