"""Megatron-LM's checkpoints with a file for each process: `mp_rank_01_003/model_optim_rng.pt`, …

A file has the slice of a tensor-parallel rank (01) of the layers of a pipeline stage (003). If experts are spread over
processes, one more number is that of the expert-parallel rank. They are read as one model, in Megatron's names and order of
rows: what Megatron itself would save with one process. Tensor-parallel slices are joined as Megatron's converter joins them
(tools/checkpoint/loader_base.py):

dimension 0  query, key and value; the first layer of an MLP; embeddings; the head. Each slice of a gated first layer has parts
             of gate and of up, so all parts of gate come first
dimension 1  the projection after attention, the second layer of an MLP
not at all   norms, position embeddings, routers, biases of the layers that are joined along dimension 1: each file has them

The down projections of multi-latent attention are joined along dimension 0 or not at all: the ranks that the run had tell.

Experts are numbered through all expert-parallel ranks, each of which has as many. Everything else is in the files of all these
ranks, and must be the same.

Layers are numbered through all stages: those of a stage follow those of the one before. With virtual stages (`model0`,
`model1`), the first ones of all stages come first. A model of one slice may have any names. Where there are several, tensors
under other names than those below are refused, and so are experts with slices of their own (`expert_tensor_parallel_size`).

The pickles are read as data: of an object only its name and its attributes are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from weightsmith._base.errors import Finding, FormatError, Unsupported, raised_at
from weightsmith._base.files import DAMAGED, Opener, open_local, show, show_all
from weightsmith._base.tensors import TensorSpec
from weightsmith._files import state_pickle
from weightsmith._files.hf_folder import FolderWeights, natural_key
from weightsmith._files.pytorch import StoredView, read_archive
from weightsmith._files.state_pickle import Instance, Tensor, describe
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

_PATH = re.compile(r"((?:iter_\d+|release)/)?mp_rank_(\d{2,6})((?:_\d{3,6})*)/(?:model_optim_rng|model_rng)\.pt", re.ASCII)
_CONVERT = "Write it for one process first, with Megatron's tools/checkpoint/convert.py, and name the result."

_CHUNK = re.compile(r"model(\d{1,4})?", re.ASCII)
"""Entries of a file: the layers of a stage, or of a virtual stage."""
_LAYER = re.compile(r"((?:.*\.)?(encoder|decoder)\.layers)\.(\d{1,6})\.(.+)", re.ASCII)
_EXTRA = "_extra_state"
"""How names of Transformer Engine's settings end: no weights."""

_JOINED_ROWS = frozenset(
    "linear_qkv query_key_value linear_q linear_kv linear_q_proj linear_q_up_proj linear_kv_up_proj linear_fc1 dense_h_to_4h "
    "word_embeddings output_layer word_embeddings_for_head eh_proj".split()
)
_JOINED_COLUMNS = frozenset("linear_proj dense linear_fc2 dense_4h_to_h".split())
_WHOLE = frozenset("position_embeddings tokentype_embeddings router rotary_pos_emb".split())
"""Last names of modules: how the slices of their tensors are joined."""
_GATED = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
"""First layer of an MLP → the second, whose columns tell whether the first one is gated."""
_DOWN = {
    "linear_q_down_proj": ("q_lora_rank",),
    "linear_kv_down_proj": ("kv_lora_rank", "qk_pos_emb_head_dim"),
    "linear_qkv_down_proj": ("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim"),
}
"""Down projection of multi-latent attention → the arguments of the run whose sum is the number of its rows."""
_EXPERT = re.compile(r"(.*\.experts\.)(?:local_experts\.(\d{1,5})\.(.+)|(.+\.(?:weight|bias))(\d{1,5}))")
"""A tensor of one expert: in a module of its own, or with the number of the expert at the end of its name."""
_EMBEDDING, _HEADS = "embedding.word_embeddings.weight", ("output_layer.weight", "word_embeddings_for_head.weight")

_UNLIKE_HUB = (
    *("apply_layernorm_1p", "rotary_interleaved", "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"),
    "attention_output_gate",
)
"""Arguments of a run that make norms, rotary embeddings or layers differ from the Hub's models (`megatron_names`)."""

_CLASSES = Classes(
    (
        *("argparse.", "megatron.", "numpy.", "transformer_engine.", "enum.", "pathlib.", "signal.", "types.", "_io."),
        *("torch.distributed.", "torch.optim."),
    )
)
"""Arguments of the run, states of random generators, settings of layers."""
_MAX_NAMES, _MAX_DEPTH = 1_000_000, 8
_FIRST_VERSION = 2.0
"""The first `checkpoint_version` that stores query, key and value of a head one after the other."""


@dataclass(slots=True, kw_only=True)
class _File(ProcessFile):
    """rank: of its slice. expert: its expert-parallel rank. chunks: virtual stage → tensors by name."""

    args: Instance | None
    version: float
    rank: int = 0
    stage: int = 0
    expert: int = 0
    chunks: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def count(self, name: str) -> int | None:
        """An argument of the run that is a positive number."""
        value = None if self.args is None else self.args.attribute(name)
        return value if type(value) is int and value > 0 else None


@dataclass(frozen=True, slots=True)
class _Slice:
    """What a file has of a tensor, under the name that it has in the whole model."""

    file: _File
    view: StoredView


class MegatronTensors(RankTensors):
    """The tensors of a checkpoint. unlike_hub: arguments of the run that make its numbers differ from a Hub model's."""

    def __init__(
        self,
        copies: Mapping[str, tuple[BoxedTensor, ...]],
        files: Sequence[SourceFile],
        where: str,
        unlike_hub: tuple[str, ...] = (),
    ) -> None:
        super().__init__(copies, files, where)
        self.unlike_hub = unlike_hub


def choose(names: Sequence[str], where: str) -> FolderWeights | None:
    """The files of a checkpoint in the folder, or in its one subfolder `iter_…`. Raises FormatError for several."""
    steps: dict[str, list[str]] = {}
    for name in names:
        if match := _PATH.fullmatch(name):
            steps.setdefault(match[1] or "", []).append(name)
    if len(steps) > 1 and "" not in steps:
        folders = sorted(step.rstrip("/") for step in steps)
        raise FormatError(f"checkpoints of {show_all(folders)} in one folder", where=where, fix="Name the folder of one.")
    files = steps.get("") or next(iter(steps.values()), None)
    return None if files is None else FolderWeights(None, tuple(sorted(files, key=natural_key)), ())


def open_files(paths: Sequence[Path], index: Index | None, where: str, open_file: Opener = open_local) -> OpenedFiles:
    """The tensors of a checkpoint. paths: of all processes. Reads the pickles and zip directories.

    Raises FormatError, Unsupported, NotFound, CheckpointError.
    """
    files = [_read(path, open_file) for path in sorted(paths, key=lambda path: natural_key(path.parent.name))]
    slices, stages = len({file.rank for file in files}), len({file.stage for file in files})
    _check_complete(files, slices, stages, where)
    parts = _numbered(files, where)
    if not parts:
        raise FormatError("the checkpoint contains no tensors", where=where, fix=FIX)
    notes = [Finding(f"the weights are in parts of {len(files):,} processes", where)]
    _join_tied(parts, files[0], notes, where)
    copies = {name: _joined(name, places, slices, parts) for name, places in parts.items()}
    read = [SourceFile(file.path, file.state, file.archive.digest) for file in files]
    unlike_hub = tuple(key for key in _UNLIKE_HUB if files[0].args is not None and files[0].args.attribute(key))
    return OpenedFiles(MegatronTensors(copies, read, where, unlike_hub), notes=tuple(notes))


# ---- one file


def _read(path: Path, open_file: Opener) -> _File:
    with raised_at(str(path)), open_file(path) as file:
        archive = read_archive(file, file.state.nbytes, _CLASSES)
        value = archive.value
        if type(value) is not state_pickle.Mapping:
            raise Unsupported(f"it holds {describe(value)}, not a checkpoint of Megatron", fix=DAMAGED)
        entries = {key: entry for key, entry in value.items() if type(key) is str}
        args, version = entries.get("args"), entries.get("checkpoint_version", 0)
        read = _File(
            path,
            file.state,
            archive,
            args=args if type(args) is Instance else None,
            version=float(version) if type(version) in (int, float) else 0.0,
        )
        read.rank, read.stage, read.expert = _place(read)
        for key, entry in entries.items():
            if (match := _CHUNK.fullmatch(key)) and type(entry) is state_pickle.Mapping:
                read.chunks[int(match[1] or 0)] = dict(_tensors(entry))
        if not read.chunks:
            raise Unsupported(f"it has no entry `model`, only {show_all(list(entries)) or 'none'}", fix=_CONVERT)
        return read


def _place(file: _File) -> tuple[int, int, int]:
    """Slice, stage and expert-parallel rank of a file, from the name of its folder.

    Raises FormatError for a name that does not fit the arguments of the run.
    """
    match = _PATH.fullmatch(f"{file.path.parent.name}/{file.path.name}")
    assert match is not None  # `choose` has taken it
    others = [int(number) for number in match[3].split("_")[1:]]
    spread = (file.count("expert_model_parallel_size") or 1) > 1 or (file.args is None and len(others) > 1)
    if len(others) > 1 + spread or (spread and not others):
        what = f"the folder {show(file.path.parent.name)} has {len(others):,} numbers after that of the slice"
        what += ", and the experts of the run " + ("are spread over processes" if spread else "are not spread over processes")
        raise FormatError(what, fix="Name the folder as Megatron has written it.")
    expert = others.pop() if spread else 0
    return int(match[2]), others[0] if others else 0, expert


def _tensors(state_dict: state_pickle.Mapping) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a state dict, of the dicts in it, too. Raises FormatError and Unsupported."""
    stack, count, names = [("", state_dict, 0)], 0, set()
    while stack:
        prefix, mapping, depth = stack.pop()
        for key, entry in mapping.items():
            count += 1
            if type(key) is not str or count > _MAX_NAMES:
                raise FormatError(f"the state dict has the name {describe(key)}, or more than {_MAX_NAMES:,}", fix=DAMAGED)
            name = prefix + key
            if name.endswith(_EXTRA) or entry is None:
                continue
            if type(entry) is state_pickle.Mapping and depth < _MAX_DEPTH:
                stack.append((f"{name}.", entry, depth + 1))
            elif type(entry) is not Tensor:
                raise Unsupported(f"the entry {show(name)} is {describe(entry)}, not a tensor", fix=_CONVERT)
            elif name in names:
                raise FormatError(f"two tensors have the name {show(name)}", fix=DAMAGED)
            else:
                names.add(name)
                yield name, entry


# ---- all files


def _check_complete(files: Sequence[_File], slices: int, stages: int, where: str) -> None:
    """Raise FormatError unless there is a file for each slice of each stage, as the arguments of the run say."""
    expected_slices = files[0].count("tensor_model_parallel_size") or slices
    expected_stages = files[0].count("pipeline_model_parallel_size") or stages
    expected_ranks = files[0].count("expert_model_parallel_size") or len({file.expert for file in files})
    places = {(file.rank, file.stage, file.expert) for file in files}
    # the numbers first: those of a damaged file may be billions
    is_complete = len(places) == expected_slices * expected_stages * expected_ranks and places == {
        (rank, stage, expert)
        for rank in range(expected_slices)
        for stage in range(expected_stages)
        for expert in range(expected_ranks)
    }
    if not is_complete:
        parts = f"{expected_slices:,} slices of {expected_stages:,} stages"
        parts += f", for {expected_ranks:,} groups of experts" if expected_ranks > 1 else ""
        what = f"files of {len(places):,} processes, and the model is in {parts}"
        raise FormatError(what, where=where, fix=MISSING)
    for file in files:
        if file.chunks.keys() != files[0].chunks.keys() or file.version != files[0].version:
            raise FormatError(
                f"{file.path.parent.name} and {files[0].path.parent.name} are of different runs", where=where, fix=FIX
            )


def _numbered(files: Sequence[_File], where: str) -> dict[str, list[_Slice]]:
    """What the files have of each tensor, with layers numbered through all stages. Raises FormatError."""
    parts: dict[str, list[_Slice]] = {}
    stages, before = sorted({file.stage for file in files}), 0
    for chunk in sorted(files[0].chunks):
        for stage in stages:
            of_stage = [file for file in files if file.stage == stage]
            counts = {_layers(file.chunks[chunk], file, before) for file in of_stage}
            if len(counts) > 1:
                raise FormatError(f"the slices of stage {stage:,} have different layers", where=where, fix=FIX)
            (layers,) = counts
            local_experts = _local_experts(of_stage, chunk, where)
            for file in of_stage:
                for name, tensor in file.chunks[chunk].items():
                    match = _LAYER.fullmatch(name)
                    whole = f"{match[1]}.{before + int(match[3])}.{match[4]}" if match else name
                    whole = _numbered_expert(whole, file, local_experts)
                    parts.setdefault(whole, []).append(_Slice(file, file.view(whole, tensor)))
            before += layers
    expected = files[0].count("num_layers")
    if expected is not None and before and before != expected:
        raise FormatError(f"the stages have {before:,} layers, and the run had {expected:,}", where=where, fix=FIX)
    return parts


def _local_experts(files: Sequence[_File], chunk: int, where: str) -> int:
    """The number of experts that each file of a stage has of a layer. Raises FormatError if they differ."""
    numbers = [
        {int(match[2] or match[5]) for name in file.chunks[chunk] if (match := _EXPERT.fullmatch(name))} for file in files
    ]
    counts = {len(of_file) for of_file in numbers}
    if len(counts) > 1 or any(of_file != set(range(len(of_file))) for of_file in numbers):
        raise FormatError("the files of a stage have different experts", where=where, fix=FIX)
    (local_experts,) = counts
    total = files[0].count("num_experts")
    ranks = len({file.expert for file in files})
    if local_experts and total is not None and total != local_experts * ranks:
        what = f"the files have {local_experts * ranks:,} experts, and the run had {total:,}"
        raise FormatError(what, where=where, fix=FIX)
    return local_experts


def _numbered_expert(name: str, file: _File, local_experts: int) -> str:
    """A tensor's name, with its expert numbered as in the whole model. Raises Unsupported for a tensor of several experts."""
    if ".experts." not in name:
        return name
    match = _EXPERT.fullmatch(name)
    if match is None:
        if file.expert or (file.count("expert_model_parallel_size") or 1) > 1:
            _refuse(name, "the experts of a process are one tensor", file)
        return name
    number = file.expert * local_experts + int(match[2] or match[5])
    return f"{match[1]}local_experts.{number}.{match[3]}" if match[2] else f"{match[1]}{match[4]}{number}"


def _layers(tensors: Mapping[str, Tensor], file: _File, before: int) -> int:
    """The number of layers of a stage. Raises FormatError and Unsupported."""
    matches = [match for name in tensors if (match := _LAYER.fullmatch(name))]
    numbers = {int(match[3]) for match in matches}
    if before and len({match[2] for match in matches}) > 1:
        raise Unsupported("an encoder and a decoder in stages are not read", where=str(file.path), fix=_CONVERT)
    if numbers != set(range(len(numbers))):
        what = f"the layers of a stage are {show_all(list(map(str, sorted(numbers))))}, not all from 0"
        raise FormatError(what, where=str(file.path), fix=FIX)
    return len(numbers)


def _join_tied(parts: dict[str, list[_Slice]], file: _File, notes: list[Finding], where: str) -> None:
    """Take the last stage's copy of a tied embedding for what it is."""
    if file.args is None or file.args.attribute("untie_embeddings_and_output_weights") is not False:
        return
    embedding = next((name for name in parts if name.endswith(_EMBEDDING)), "")
    for name in [name for name in parts if name.endswith(_HEADS) and embedding]:
        parts[embedding] += parts.pop(name)
        notes.append(Finding(f"the head {show(name)} is tied to the embedding: it is left out", where))


def _joined(name: str, places: Sequence[_Slice], slices: int, parts: Mapping[str, Sequence[_Slice]]) -> tuple[BoxedTensor, ...]:
    """A tensor of the model, from what the files have of it; more than one if some have the same of it."""
    first = places[0].view.spec
    for place in places:
        spec = place.view.spec
        if (spec.dtype, spec.shape) != (first.dtype, first.shape):
            what = f"tensor {show(name)} is {list(spec.shape)} {spec.dtype}"
            raise FormatError(
                f"{what}, and in {places[0].file.path.parent.name} {list(first.shape)} {first.dtype}",
                where=str(place.file.path),
                fix=FIX,
            )
    axis = _axis(name, first, places[0].file, slices)
    if axis is None:
        groups = [[place] for place in places]
        if len(places) % slices:
            raise FormatError(f"tensor {show(name)} is in {len(places):,} of {slices:,} slices", where=name, fix=FIX)
    else:
        by_rank: dict[int, list[_Slice]] = {}
        for place in places:
            by_rank.setdefault(place.file.rank, []).append(place)
        if len(by_rank) != slices or len(set(map(len, by_rank.values()))) > 1:
            what = f"tensor {show(name)} is in {len(by_rank):,} of {slices:,} slices"
            raise FormatError(what, where=str(places[0].file.path), fix=FIX)
        groups = [list(group) for group in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)]
    shape = first.shape if axis is None else (*first.shape[:axis], slices * first.shape[axis], *first.shape[axis + 1 :])
    runs = 2 if axis == 0 and slices > 1 and _is_gated(name, first, parts, places[0]) else 1
    spec = TensorSpec(name, first.dtype, shape)
    return tuple(fill(spec, shape, list(_boxes(group, shape, axis, runs)), group[0].file.path) for group in groups)


def _boxes(group: Sequence[_Slice], shape: tuple[int, ...], axis: int | None, runs: int) -> Iterator[Box]:
    """Where the slices are in the whole tensor. runs: what a slice has along the axis: 1, or 2 for gate and up."""
    for rank, place in enumerate(group):
        view, start = place.view, [0] * len(shape)
        if axis is None:
            yield Box(place.file.path, view.start, tuple(start), view.spec.shape, view.strides)
            continue
        length = view.spec.shape[axis] // runs
        size = (*view.spec.shape[:axis], length, *view.spec.shape[axis + 1 :])
        for run in range(runs):
            start[axis] = run * (shape[axis] // runs) + rank * length
            offset = view.start + run * length * view.strides[axis] * view.spec.dtype.itemsize
            yield Box(place.file.path, offset, tuple(start), size, view.strides)


def _axis(name: str, spec: TensorSpec, file: _File, slices: int) -> int | None:
    """The dimension along which slices are joined; None if each has all of the tensor. Raises FormatError and Unsupported."""
    *modules, leaf = name.split(".")
    module = modules[-1] if modules else ""
    if "experts" in modules and file.count("expert_tensor_parallel_size") not in (None, slices):
        _refuse(name, "experts have slices of their own (expert_tensor_parallel_size)", file)
    if slices == 1 or leaf == "gate_weight":  # each process has all of the shared experts' gate
        return None
    kind = leaf.rstrip("0123456789")
    if kind not in ("weight", "bias") or "norm" in module or module in _WHOLE or not spec.shape:
        if "norm" in module or module in _WHOLE or leaf in ("layer_norm_weight", "layer_norm_bias"):
            return None
        _refuse(name, "its slices may be joined in several ways", file)
    if module in _DOWN:
        return _down_axis(name, spec, file, slices)
    if module in ("query_key_value", "linear_qkv") and file.version < _FIRST_VERSION:
        _refuse(name, f"checkpoint_version {file.version:g} has another order of query, key and value", file)
    if module in _JOINED_ROWS:
        return 0
    if module in _JOINED_COLUMNS and kind == "bias":
        return None
    if module in _JOINED_COLUMNS:
        if len(spec.shape) < 2:
            what = f"tensor {show(name)} is {list(spec.shape)}, and its slices are columns of a matrix"
            raise FormatError(what, where=str(file.path), fix=DAMAGED)
        return 1
    _refuse(name, "its slices may be joined in several ways", file)


def _down_axis(name: str, spec: TensorSpec, file: _File, slices: int) -> int | None:
    """The dimension along which a down projection of multi-latent attention is joined. Raises Unsupported."""
    counts = [file.count(key) for key in _DOWN[name.split(".")[-2]]]
    rows = sum(count for count in counts if count is not None)
    if None not in counts and spec.shape[0] == rows:
        return None
    if None not in counts and spec.shape[0] * slices == rows:
        return 0
    _refuse(name, f"it has {spec.shape[0]:,} rows, and the arguments of the run do not say whether these are all", file)


def _is_gated(name: str, spec: TensorSpec, parts: Mapping[str, Sequence[_Slice]], place: _Slice) -> bool:
    """Whether the first layer of an MLP has gate and up: twice as many rows as its second layer has columns.

    Raises Unsupported.
    """
    head, _, leaf = name.rpartition(".")
    parent, _, module = head.rpartition(".")
    if module not in _GATED:
        return False
    second = parts.get(f"{parent}.{_GATED[module]}.{leaf.replace('bias', 'weight')}".lstrip("."))
    width = second[0].view.spec.shape[-1] if second and len(second[0].view.spec.shape) == 2 else 0
    if width and spec.shape[0] == width:
        return False
    if not width:
        _refuse(name, "no second layer of its MLP tells whether it is gated", place.file)
    if spec.shape[0] != 2 * width:
        _refuse(name, f"it has {spec.shape[0]:,} rows, and the layer after it {width:,} columns", place.file)
    args = place.file.args
    for key in ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"):
        if args is not None and args.attribute(key) is not None:
            _refuse(name, f"gate and up are interleaved ({key})", place.file)
    return True


def _refuse(name: str, why: str, file: _File) -> NoReturn:
    raise Unsupported(f"slices of the tensor {show(name)} are not joined: {why}", where=str(file.path), fix=_CONVERT)


KIND = FileKind("Megatron checkpoint", (), (), choose, open_files, joins=True)
