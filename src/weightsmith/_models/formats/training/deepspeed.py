"""DeepSpeed's checkpoints: ZeRO 1, 2 and 3. Weights are the float32 ones of the optimizer, as in DeepSpeed's zero_to_fp32.py.

    mp_rank_00_model_states.pt                         ZeRO 1 and 2: `param_shapes` of each group, buffers, what is not trained
    zero_pp_rank_R_mp_rank_00_model_states.pt          ZeRO 3: the same, with parts of what is not trained
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   flat parts of the weights of each group

ZeRO 1 and 2 lay the weights of a group one after another, and cut that into as many runs as there are processes. ZeRO 3 cuts
each weight, the last part padded; a process has its parts of all weights one after another, in one array or several.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith._base.errors import Finding, FormatError, Unsupported, raised_at
from weightsmith._base.files import DAMAGED, Opener, open_local, show, show_all
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._files import state_pickle
from weightsmith._files.hf_folder import FolderWeights, natural_key
from weightsmith._files.pytorch import StoredView, read_archive
from weightsmith._files.safetensors import MAX_BYTES, MAX_DIMENSIONS, checked_product
from weightsmith._files.state_pickle import Instance, describe
from weightsmith._models.formats.training.processes import FIX, Box, BoxedTensor, BoxedTensors, Classes, ProcessFile, fill
from weightsmith._models.sources.files import SourceFile
from weightsmith.abc.tensors import FileKind, Index, OpenedFiles

_RANK = re.compile(r"(?:\w*zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt", re.ASCII)
_PARTS = re.compile(r"layer_\d+-model_\d+-model_states\.pt|layer_\w*expert_\w*states\.pt", re.ASCII)
_FOLDER = re.compile(r"global_step\d+", re.ASCII)
_CLASSES = Classes(("deepspeed.", "numpy."), ("argparse.Namespace",))
"""DeepSpeed's own settings and scalers, arguments and counts of the trainer."""
_OTHER_PARALLEL = "Save it from one pipeline stage and one tensor-parallel rank, or with the program's own export."


@dataclass(slots=True)
class _File(ProcessFile):
    def get(self, *keys: str) -> Any:
        """The value under keys of nested dicts; None if there is none."""
        value = self.archive.value
        for key in keys:
            items = value.items() if type(value) is state_pickle.Mapping else ()
            value = next((inner for name, inner in items if type(name) is str and name == key), None)
        return value

    def flat(self, name: str, tensor: Any) -> StoredView:
        """A tensor whose elements follow each other, as one row."""
        view = self.view(name, tensor)
        if not view.contiguous:
            raise Unsupported(f"tensor {show(name)}: its elements are not in one run", where=str(self.path))
        return view


class _Run:
    """Flat arrays, one after another, as one row of elements."""

    def __init__(self, views: Sequence[StoredView]) -> None:
        self.views = [view for view in views if view.spec.size]
        self.starts = [0]
        for view in self.views:
            self.starts.append(self.starts[-1] + view.spec.size)

    @property
    def size(self) -> int:
        return self.starts[-1]

    def boxes(self, start: int, count: int, first: int) -> Iterator[Box]:
        """Elements start … start + count, which are those of a tensor from `first` on."""
        at = bisect.bisect_right(self.starts, start) - 1
        end = start + count
        while start < end:
            view, skip = self.views[at], start - self.starts[at]
            n = min(end - start, view.spec.size - skip)
            yield Box(view.file, view.start + skip * view.spec.dtype.itemsize, (first,), (n,), (1,))
            start, first, at = start + n, first + n, at + 1


def choose(names: Sequence[str], where: str) -> FolderWeights | None:
    """The files of a checkpoint in the folder, or in the one subfolder `global_step…` that has some.

    Raises FormatError for several such subfolders, Unsupported for pipeline stages, experts and tensor-parallel slices.
    """
    in_folder: dict[str, list[str]] = {}
    for name in names:
        folder, _, base = name.rpartition("/")
        if (not folder or _FOLDER.fullmatch(folder)) and (_RANK.fullmatch(base) or _PARTS.fullmatch(base)):
            in_folder.setdefault(folder, []).append(name)
    folders = sorted(folder for folder, files in in_folder.items() if any("_optim_states" in name for name in files))
    if not folders:
        return None
    if len(folders) > 1 and "" not in folders:
        what = f"checkpoints of {len(folders)} steps: {show_all(folders)}"
        raise FormatError(what, where=where, fix="Name the folder of one, with config.json and the tokenizer in it.")
    files = sorted(in_folder[folders[0]], key=natural_key)
    ranks = [_RANK.fullmatch(name.rpartition("/")[2]) for name in files]
    if any(match is None or int(match[2]) for match in ranks):
        what = "a DeepSpeed checkpoint of pipeline stages, experts or tensor-parallel slices"
        raise Unsupported(what, where=where, details=(show_all(files),), fix=_OTHER_PARALLEL)
    return FolderWeights(None, tuple(files), ())


def open_files(paths: Sequence[Path], index: Index | None, where: str, open_file: Opener = open_local) -> OpenedFiles:
    """The tensors of a checkpoint. paths: of one folder, as `choose` lists them. Reads their pickles and zip directories.

    Raises FormatError, Unsupported, NotFound, CheckpointError.
    """
    folder = str(paths[0].parent)
    files = {kind: [_read(path, open_file) for path in paths if f"_{kind}_states" in path.name] for kind in ("model", "optim")}
    with raised_at(folder):
        stage, world = _partitions(files["optim"])
        models = files["model"]
        if len(models) != (world if stage == 3 else 1):
            n_files = f"{world} files" if stage == 3 else "1 file"
            raise FormatError(
                f"{n_files} with model_states are expected for ZeRO {stage}, and {len(models)} are there", fix=FIX
            )
        for other in models[1:]:
            if _groups(other) != _groups(models[0]):
                raise FormatError(f"{other.path.name} names other weights than {models[0].path.name}", fix=FIX)
        stored = dict(_buffers(models[0]))
        make = _stage_3 if stage == 3 else _stages_1_and_2
        stored |= _frozen(models) | make(models[0], files["optim"])
        for name, same in _shared(models[0]):
            if same in stored:
                spec = stored[same].spec
                stored[name] = BoxedTensor(
                    TensorSpec(name, spec.dtype, spec.shape), stored[same].grid, stored[same].boxes, stored[same].file
                )
        if not stored:
            raise FormatError("the checkpoint contains no tensors", fix=FIX)
    read = [SourceFile(file.path, file.state, file.archive.digest) for kind in files.values() for file in kind]
    note = Finding(
        f"the weights are the optimizer's, which DeepSpeed's ZeRO {stage} keeps in parts of {world} processes", where
    )
    return OpenedFiles(BoxedTensors(stored, read, where), notes=(note,))


def _read(path: Path, open_file: Opener) -> _File:
    with raised_at(str(path)), open_file(path) as file:
        return _File(path, file.state, read_archive(file, file.state.nbytes, _CLASSES))


def _partitions(files: Sequence[_File]) -> tuple[int, int]:
    """The stage of ZeRO, and the number of processes, of which all files must be there."""
    stage = files[0].get("optimizer_state_dict", "zero_stage")
    if type(stage) is Instance and len(stage.args) == 1:  # an enum
        stage = stage.args[0]
    flat = files[0].get("optimizer_state_dict", "fp32_flat_groups") is not None
    stage = (3 if flat else 1) if stage is None else stage
    counts = files[0].get("optimizer_state_dict", "partition_count")
    listed = counts if type(counts) is list else [counts]
    if type(stage) is not int or not 1 <= stage <= 3 or not listed or not all(type(n) is int and n > 0 for n in listed):
        what = f"no parts of ZeRO 1, 2 or 3: its stage is {describe(stage)}, of {describe(counts)} processes"
        raise Unsupported(what, where=str(files[0].path), fix="Load it with DeepSpeed, and save the model.")
    world = max(listed)
    if world != len(files):
        raise FormatError(f"{world} files with optim_states are expected, and {len(files)} are there", fix=FIX)
    return stage, world


# ---- what the model's files say


def _shapes(table: Any, what: str, file: _File) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in order. Raises FormatError."""
    with raised_at(str(file.path)):
        if type(table) is not state_pickle.Mapping:
            raise FormatError(f"{what} is {describe(table)}, not a dict of shapes", fix=DAMAGED)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, value in table.items():
            shape = tuple(value) if type(value) in (tuple, list) and len(value) <= MAX_DIMENSIONS else None
            if type(name) is not str or shape is None or not all(type(n) is int and 0 <= n <= MAX_BYTES for n in shape):
                raise FormatError(f"{what}: {describe(name)} has the shape {describe(value)}", fix=DAMAGED)
            if name in shapes:
                raise FormatError(f"{what}: the name {show(name)} is in it twice", fix=DAMAGED)
            shapes[name] = shape
        return list(shapes.items())


def _groups(file: _File) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Names and shapes of the weights of each group."""
    groups = file.get("param_shapes")
    if type(groups) is not list:
        what = f"param_shapes is {describe(groups)}: DeepSpeed writes a list since 0.4"
        raise Unsupported(what, where=str(file.path), fix="Load it with DeepSpeed, and save the model.")
    return [_shapes(group, "param_shapes", file) for group in groups]


def _shared(file: _File) -> Iterator[tuple[str, str]]:
    """(name, name of the tensor that it is)."""
    table = file.get("shared_params")
    for name, other in table.items() if type(table) is state_pickle.Mapping else ():
        if type(name) is str and type(other) is str:
            yield name, other


def _buffers(file: _File) -> Iterator[tuple[str, BoxedTensor]]:
    """Tensors that no optimizer changes, and that the model saves: means of batch norms, counts of experts."""
    names = file.get("buffer_names")
    listed = {name for name in names if type(name) is str} if type(names) is list else set()
    module = file.get("module")
    for name, tensor in module.items() if type(module) is state_pickle.Mapping else ():
        if type(name) is str and name in listed:
            view = file.view(name, tensor)
            box = Box(view.file, view.start, (0,) * len(view.spec.shape), view.spec.shape, view.strides)
            yield name, fill(view.spec, view.spec.shape, [box], file.path)


def _frozen(models: Sequence[_File]) -> dict[str, BoxedTensor]:
    """Weights that are not trained, in as many parts as there are files of the model."""
    if models[0].get("frozen_param_shapes") is None:
        return {}
    stored: dict[str, BoxedTensor] = {}
    tables = [file.get("frozen_param_fragments") for file in models]
    parts = [
        {name: tensor for name, tensor in table.items() if type(name) is str} if type(table) is state_pickle.Mapping else {}
        for table in tables
    ]
    for name, shape in _shapes(models[0].get("frozen_param_shapes"), "frozen_param_shapes", models[0]):
        views = [file.flat(name, of_process.get(name)) for file, of_process in zip(models, parts, strict=True)]
        run = _Run(views)
        spec = _spec(name, shape, _dtype(name, views))
        if not spec.size <= run.size < spec.size + len(models):
            raise FormatError(f"tensor {show(name)}: its parts have {run.size:,} of {spec.size:,} elements", fix=FIX)
        stored[name] = fill(spec, (spec.size,), list(run.boxes(0, spec.size, 0)), models[0].path)
    return stored


def _dtype(what: str, views: Iterable[StoredView]) -> DType:
    """The one dtype of these arrays. Raises FormatError."""
    dtypes = dict.fromkeys(view.spec.dtype.name for view in views)
    if len(dtypes) != 1:
        raise FormatError(f"{show(what)}: its parts are {' and '.join(dtypes) or 'none'}", fix=FIX)
    return DTYPES[next(iter(dtypes))]


def _spec(name: str, shape: tuple[int, ...], dtype: DType) -> TensorSpec:
    """Raises FormatError for a shape of too many bytes."""
    checked_product(dtype, shape)
    return TensorSpec(name, dtype, shape)


# ---- the weights


def _stages_1_and_2(model: _File, processes: Sequence[_File]) -> dict[str, BoxedTensor]:
    groups = _groups(model)
    lists = [_flat_groups(file, "single_partition_of_fp32_groups", len(groups)) for file in processes]
    stored: dict[str, BoxedTensor] = {}
    for number, shapes in enumerate(groups):
        run, at, align = _Run([views[number] for views in lists]), 0, 2 * len(processes)
        needed = sum(math.prod(shape) for _, shape in shapes)
        if run.size < needed or -(-run.size // align) != -(-needed // align):
            raise FormatError(f"group {number} has {run.size:,} elements, and its weights have {needed:,}", fix=FIX)
        dtype = _dtype(f"group {number}", (views[number] for views in lists))
        for name, shape in shapes:
            spec = _spec(name, shape, dtype)
            stored[name] = fill(spec, (spec.size,), list(run.boxes(at, spec.size, 0)), processes[0].path)
            at += spec.size
    return stored


def _stage_3(model: _File, processes: Sequence[_File]) -> dict[str, BoxedTensor]:
    weights = dict(weight for group in _groups(model) for weight in group)
    runs = [_Run(_flat_groups(file, "fp32_flat_groups")) for file in processes]
    world, at = len(processes), 0
    needed = sum(-(-math.prod(shape) // world) for shape in weights.values())
    for file, run in zip(processes, runs, strict=True):
        if run.size != needed:
            what = f"its arrays have {run.size:,} elements, and its parts of the weights have {needed:,}"
            raise FormatError(what, where=str(file.path), fix=FIX)
    stored: dict[str, BoxedTensor] = {}
    dtype = _dtype("fp32_flat_groups", (view for run in runs for view in run.views))
    for name, shape in weights.items():
        spec = _spec(name, shape, dtype)
        part = -(-spec.size // world)
        boxes: list[Box] = []
        for rank, run in enumerate(runs):
            boxes += run.boxes(at, max(0, min(part, spec.size - rank * part)), rank * part)
        stored[name] = fill(spec, (spec.size,), boxes, processes[0].path)
        at += part
    return stored


def _flat_groups(file: _File, key: str, count: int | None = None) -> list[StoredView]:
    """The flat arrays of a process. Raises FormatError for another number than `count`."""
    arrays = file.get("optimizer_state_dict", key)
    if type(arrays) is not list or (count is not None and len(arrays) != count):
        number = "" if count is None else f"{count} "
        what = f"{key} is {describe(arrays)}, not a list of {number}arrays"
        raise FormatError(what, where=str(file.path), fix=DAMAGED)
    return [file.flat(f"{key}[{number}]", array) for number, array in enumerate(arrays)]


KIND = FileKind("DeepSpeed checkpoint", (), (), choose, open_files, joins=True)
