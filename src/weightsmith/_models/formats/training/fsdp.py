"""FSDP's checkpoints with a file for each process, as verl writes them: `model_world_size_8_rank_0.pt`, …

Each file is a state dict. Its tensors are DTensors: the shape of the whole, how the processes share it, and the part of this
process. They are cut along one dimension as `torch.chunk` does, or whole in each file, with the same values. The pickles are
read as data: of an object of PyTorch only its name and its attributes are kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith._base.errors import Finding, FormatError, Unsupported, raised_at
from weightsmith._base.files import DAMAGED, Opener, open_local, show, show_all
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.text import count
from weightsmith._files import state_pickle
from weightsmith._files.hf_folder import FolderWeights, natural_key
from weightsmith._files.pytorch import read_archive
from weightsmith._files.safetensors import MAX_BYTES, MAX_DIMENSIONS
from weightsmith._files.state_pickle import Global, Instance, Tensor, describe
from weightsmith._models.formats.training.processes import (
    FIX,
    MISSING,
    Box,
    BoxedTensor,
    Classes,
    ProcessFile,
    RankTensors,
    fill,
)
from weightsmith._models.sources.files import SourceFile
from weightsmith.abc.tensors import FileKind, Index, OpenedFiles

_FILE = re.compile(r"model_world_size_(\d{1,6})_rank_(\d{1,6})\.pt", re.ASCII)
_FOLDERS = ("", "actor/")
"""Where verl puts the model of a step."""
_REBUILT = "torch._tensor._rebuild_from_type_v2"
_CLASSES = Classes(("torch.distributed.",), (_REBUILT, "torch._utils._rebuild_wrapper_subclass"))
"""DTensors, their placements, and the mesh of processes."""
_PARTS = 4
"""Arguments of `_REBUILT`: a function, a class, its arguments, and attributes."""
_FLAT = "_flat_param"
"""How names end of parameters that FSDP joined to one row: each process has another part of it."""
_OTHER_MESH = "Make a model of all its files first, with the program that wrote them: `python -m verl.model_merger merge`."


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of a file.

    shape  of the whole tensor; None: that of the part
    axis   that the processes share; None: each has all of it
    local  what this process has
    """

    shape: tuple[int, ...] | None
    axis: int | None
    local: Tensor


@dataclass(slots=True, kw_only=True)
class _File(ProcessFile):
    """rank: of the process."""

    rank: int


def choose(names: Sequence[str], where: str) -> FolderWeights | None:
    """The files of a checkpoint in the folder, or in its subfolder `actor`. Raises FormatError if some are missing."""
    for folder in _FOLDERS:
        ranks: dict[int, dict[int, str]] = {}
        for name in names:
            if name.startswith(folder) and (match := _FILE.fullmatch(name.removeprefix(folder))):
                ranks.setdefault(int(match[1]), {})[int(match[2])] = name
        if len(ranks) > 1:
            what = f"checkpoints of {show_all([f'{world} processes' for world in sorted(ranks)])} in one folder"
            raise FormatError(what, where=where, fix="Name a folder with the files of one.")
        for world, files in ranks.items():
            if missing := [f"{folder}model_world_size_{world}_rank_{rank}.pt" for rank in range(world) if rank not in files]:
                what = f"{len(missing)} of {world} files are missing: {show_all(missing)}"
                raise FormatError(what, where=where, fix=MISSING)
            return FolderWeights(None, tuple(files[rank] for rank in range(world)), ())
    return None


def open_files(paths: Sequence[Path], index: Index | None, where: str, open_file: Opener = open_local) -> OpenedFiles:
    """The tensors of a checkpoint. paths: of all processes. Reads the pickles and zip directories.

    Raises FormatError, Unsupported, NotFound, CheckpointError.
    """
    files = [_read(path, rank, open_file) for rank, path in enumerate(sorted(paths, key=lambda path: natural_key(path.name)))]
    parts = [_parts(file, len(files)) for file in files]
    copies = {name: _joined(name, first, files, parts) for name, first in parts[0].items()}
    for file, of_file in zip(files, parts, strict=True):
        if other := next((name for name in of_file if name not in copies), ""):
            raise FormatError(f"{file.path.name} has the tensor {show(other)}, and {files[0].path.name} has not", fix=FIX)
    if not copies:
        raise FormatError("the checkpoint contains no tensors", where=where, fix=FIX)
    if len(files) > 1 and all(part.shape is None for part in parts[0].values()):
        what = f"none of {count(len(copies), 'tensor')} is a DTensor, which says how {len(files):,} processes share it"
        raise Unsupported(what, where=str(files[0].path), fix=_OTHER_MESH)
    read = [SourceFile(file.path, file.state, file.archive.digest) for file in files]
    note = Finding(f"the weights are in parts of {len(files)} processes", where)
    return OpenedFiles(RankTensors(copies, read, where), notes=(note,))


def _read(path: Path, rank: int, open_file: Opener) -> _File:
    with raised_at(str(path)), open_file(path) as file:
        return _File(path, file.state, read_archive(file, file.state.nbytes, _CLASSES), rank=rank)


def _parts(file: _File, world: int) -> dict[str, _Part]:
    """What a file has of each tensor. Raises FormatError and Unsupported."""
    with raised_at(str(file.path)):
        value = file.archive.value
        if type(value) is not state_pickle.Mapping:
            raise Unsupported(f"it holds {describe(value)}, not a state dict", fix=_OTHER_MESH)
        parts: dict[str, _Part] = {}
        for name, entry in value.items():
            if type(name) is not str or name in parts:
                raise FormatError(f"the state dict has the name {describe(name)}", fix=DAMAGED)
            if name.endswith(_FLAT):
                what = f"the entry {show(name)} has several tensors in one row, in FSDP's first form"
                raise Unsupported(what, fix=_OTHER_MESH)
            if type(entry) is Tensor:
                parts[name] = _Part(None, None, entry)
            elif type(entry) is Instance:
                parts[name] = _part(name, entry, file.rank)
            else:
                raise Unsupported(f"the entry {show(name)} is {describe(entry)}, not a tensor", fix=_OTHER_MESH)
        return parts


def _part(name: str, entry: Instance, rank: int) -> _Part:
    """The part of a process, from the pickle's description of a DTensor."""
    is_rebuilt = entry.kind == _REBUILT and len(entry.args) == _PARTS
    _, kind, whole, state = entry.args if is_rebuilt else (None,) * _PARTS
    values = _attributes(state)
    local, spec = values.get("_local_tensor"), values.get("_spec")
    is_tensor = type(kind) is Global and kind.name.endswith(".DTensor")
    if not is_tensor or type(local) is not Tensor or type(spec) is not Instance or type(whole) is not tuple:
        raise Unsupported(f"tensor {show(name)} is {describe(entry)}, not a DTensor", fix=_OTHER_MESH)
    shape = whole[2] if len(whole) > 2 else None
    if (
        type(shape) is not tuple
        or len(shape) > MAX_DIMENSIONS
        or not all(type(n) is int and 0 <= n <= MAX_BYTES for n in shape)
    ):
        raise FormatError(f"tensor {show(name)} has the shape {describe(shape)}", fix=DAMAGED)
    placements, mesh = spec.attribute("placements"), spec.attribute("mesh")
    if type(placements) is not tuple or len(placements) != 1 or type(placements[0]) is not Instance:
        dimensions = len(placements) if type(placements) is tuple else "no"
        what = f"tensor {show(name)} is on a mesh of processes of {dimensions} dimensions, and only those of one are read"
        raise Unsupported(what, fix=_OTHER_MESH)
    place = mesh.attribute("_coordinate_on_dim") if type(mesh) is Instance else None
    if isinstance(place, tuple | list) and list(place) != [rank]:
        what = f"tensor {show(name)}: process {rank:,} does not have the place {rank:,} of the mesh"
        raise Unsupported(what, fix=_OTHER_MESH)
    (placement,) = placements
    placed = placement.kind.rpartition(".")[2]
    if placed == "Replicate":
        return _Part(shape, None, local)
    axis = placement.attribute("dim")
    if placed != "Shard" or type(axis) is not int or not -len(shape) <= axis < len(shape):
        raise Unsupported(
            f"tensor {show(name)} is placed as {show(placed)} {describe(axis)}, and only shards are read", fix=_OTHER_MESH
        )
    return _Part(shape, axis % len(shape), local)


def _attributes(state: Any) -> dict[str, Any]:
    """Attributes of an object: a dict, or a pair of one, or None, and one of slots."""
    parts = state if type(state) is tuple else (state,)
    mappings = [part for part in parts if type(part) is state_pickle.Mapping]
    return {key: value for mapping in mappings for key, value in mapping.items() if type(key) is str}


def _joined(name: str, first: _Part, files: Sequence[_File], parts: Sequence[Mapping[str, _Part]]) -> tuple[BoxedTensor, ...]:
    """A tensor of the model; of each process, if each has all of it. Raises FormatError if the parts are not of one tensor."""
    with raised_at(str(files[0].path)):
        view = files[0].view(name, first.local)
    dtype, shape = view.spec.dtype, view.spec.shape if first.shape is None else first.shape
    spec = TensorSpec(name, dtype, shape)
    boxes = []
    for file, of_file in zip(files, parts, strict=True):
        with raised_at(str(file.path)):
            part = of_file.get(name)
            if part is None:
                raise FormatError(f"tensor {show(name)} is missing, which {files[0].path.name} has", fix=FIX)
            view = file.view(name, part.local)
            start, expected = _chunk(shape, first.axis, file.rank, len(files))
            if (part.shape, part.axis, view.spec.dtype, view.spec.shape) != (first.shape, first.axis, dtype, expected):
                what = f"tensor {show(name)} is a part {list(view.spec.shape)} {view.spec.dtype} of {list(part.shape or ())}"
                raise FormatError(
                    f"{what}, and that of process {file.rank:,} is {list(expected)} {dtype} of {list(shape)}", fix=FIX
                )
            boxes.append(Box(file.path, view.start, start, expected, view.strides))
    tensors = [boxes] if first.axis is not None else [[box] for box in boxes]
    return tuple(fill(spec, shape, of_tensor, of_tensor[0].file) for of_tensor in tensors)


def _chunk(shape: tuple[int, ...], axis: int | None, rank: int, world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the part of a process begins, and its shape: as `torch.chunk` cuts, the last parts are smaller or empty.

    >>> _chunk((5, 3), 0, 1, 2), _chunk((5, 3), 0, 3, 4), _chunk((5, 3), None, 1, 2)
    (((3, 0), (2, 3)), ((5, 0), (0, 3)), ((0, 0), (5, 3)))
    """
    first = [0] * len(shape)
    if axis is None:
        return tuple(first), shape
    length = -(-shape[axis] // world)
    first[axis] = min(shape[axis], rank * length)
    rows = min(shape[axis], first[axis] + length) - first[axis]
    return tuple(first), (*shape[:axis], rows, *shape[axis + 1 :])


KIND = FileKind("FSDP checkpoint", (), (), choose, open_files, joins=True)
