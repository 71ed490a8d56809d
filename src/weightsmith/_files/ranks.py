"""Checkpoints of distributed training: each file holds what one process had of every tensor, so none of them is a model.

They are not read. The error says what they are, and which command makes a model of them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a program stores the parts of a model.

    pattern  of the end of a file's path, in lower case
    what     for messages
    command  that makes a model of it: `{folder}` is the folder with the files, `{parent}` the one above it
    """

    pattern: str
    what: str
    command: str

    def matches(self, path: str) -> bool:
        """Whether a file is one of its files."""
        return re.fullmatch(rf"(?:.*/)?(?:{self.pattern})", path.lower(), re.ASCII) is not None


_DCP = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} MODEL.pt"
_LAYOUTS = (
    _Layout(
        r"(?:\w*zero_pp_rank_\d+|mp_rank_\d+)_\w*states\.pt",
        "a DeepSpeed checkpoint",
        "python {parent}/zero_to_fp32.py {parent} OUT --safe_serialization",
    ),
    _Layout(
        r"\w*model_world_size_(?:[2-9]|[1-9]\d+)_rank_\d+\.pt",
        "an FSDP checkpoint of verl, with a file for each process",
        "python -m verl.model_merger merge --backend fsdp --local_dir {folder} --target_dir OUT",
    ),
    _Layout(
        r"(?<=fsdp_\d/)(?:\.metadata|\w+\.distcp)",
        "an FSDP checkpoint of accelerate or transformers, which is sharded",
        "accelerate merge-weights {folder} OUT",
    ),
    _Layout(
        r"mp_rank_\d+(?:_\d+)*/(?:model_optim_rng|model_rng|distrib_optim)\.pt",
        "a Megatron checkpoint, with slices of each tensor (AutoBridge of Megatron-Bridge converts it)",
        "AutoBridge.from_hf_pretrained(ITS_BASE).export_ckpt({folder}, OUT)",
    ),
    _Layout(r"\.metadata|\w+\.distcp", "a distributed checkpoint of PyTorch (DCP)", _DCP),
)
_RANK = re.compile(r"(.*[_-])?rank[_-]?(\d+)((?:[_-]part[_-]\d+)?\.(?:safetensors|pt|pth|bin))", re.ASCII)
_OTHERS = _Layout("", "a checkpoint with a file for each process", "")


def of_ranks(names: Iterable[str], where: str) -> Unsupported | None:
    """The error for files of single processes; None if none of these is one.

    names  of files, relative, `/` between folders
    where  the folder or repository

    >>> print(of_ranks(["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"], "c").finding)
    c: an FSDP checkpoint of verl, with a file for each process: no file holds the model
      'model_world_size_2_rank_0.pt', 'model_world_size_2_rank_1.pt'
      -> Make a model of all its files first: `python -m verl.model_merger merge --backend fsdp --local_dir c --target_dir OUT`.
    """
    listed = sorted(names)
    for layout in _LAYOUTS:
        if files_of_layout := [name for name in listed if layout.matches(f"{where}/{name}")]:
            return _error(layout, files_of_layout, where)
    ranks: dict[tuple[str, str], dict[str, str]] = {}
    for name in listed:
        if match := _RANK.fullmatch(name.lower()):
            ranks.setdefault((match[1] or "", match[3]), {})[match[2].lstrip("0")] = name
    for files in ranks.values():
        if {"", "1"} <= files.keys():  # one file alone may be an adapter whose name states its rank
            return _error(_OTHERS, list(files.values()), where)
    return None


def _error(layout: _Layout, files: list[str], where: str) -> Unsupported:
    inner = files[0].rpartition("/")[0]
    folder = f"{where}/{inner}" if inner else where
    parent = folder.rpartition("/")[0] or "."
    fix = "Use the model that it was made from, or one that the program which wrote it exports."
    if layout.command:
        command = layout.command.format(folder=shlex.quote(folder), parent=shlex.quote(parent))
        fix = f"Make a model of all its files first: `{command}`"
    others = f", … ({len(files):,} in all)" if len(files) > _SHOWN else ""
    details = (", ".join(map(show, files[:_SHOWN])) + others,)
    return Unsupported(f"{layout.what}: no file holds the model", where=where, details=details, fix=fix)
