"""save_file and save_model: numpy and torch tensors of any strides, sharing and device, to safetensors.

Nothing is asked of the tensors: no `.contiguous()`, no `.clone()`, no unique storage. Extra memory is one tile, 4 MiB.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from weightsmith._base.errors import NOTHING_WRITTEN, CannotResume, Finding, OutputExists, ParameterError, StoreError
from weightsmith._base.files import FULL, expand_user, write_all
from weightsmith._base.options import parse_size
from weightsmith._files.arrays import TILE_BYTES, View, pieces, view_of
from weightsmith._files.containers import PT_METADATA, Layout, make_layout
from weightsmith._outputs import disk
from weightsmith._outputs.area import staged_plan, staging_folder
from weightsmith._outputs.checksum import GrainHasher, grain_bytes, hash_bytes
from weightsmith._outputs.local import LocalTarget, absolute, check_not_a_file
from weightsmith._outputs.staging import Staging
from weightsmith.abc.output import Finished, OutputSpec

Tied = Literal["copy", "alias"]
_PLAN = "save_model "  # what the plan hash of a save_model begins with


@dataclass(frozen=True, slots=True)
class Saved:
    """What was written.

    path     the file or folder
    files    names of the weight files
    nbytes   their sizes, summed
    aliases  tensors that were not stored a second time -> the name they are stored under
    warnings what could not be cleaned up
    """

    path: Path
    files: tuple[str, ...]
    nbytes: int
    aliases: dict[str, str]
    warnings: tuple[Finding, ...] = ()


def save_file(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    tied: Tied = "copy",
    overwrite: bool = True,
    fsync: bool = True,
) -> Saved:
    """Write tensors to one safetensors file, in one atomic step.

    tensors    name -> numpy array or torch tensor: any strides, overlaps, device; one can have many names
    metadata   `__metadata__` of the file; None means `{"format": "pt"}`
    tied       `copy` stores every name; `alias` stores the first of several identical views, and names the others in
               the metadata (`{"lm_head.weight": "model.embed_tokens.weight"}`), as the safetensors library does
    overwrite  False raises OutputExists if the file exists
    fsync      False does not wait until the bytes are on the disk

    An existing file stays unchanged until the new one is complete. Missing parent folders are created. Raises StoreError for
    tensors that cannot be stored, and NoSpace.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    ...     saved = save_file({"w": matrix, "w_t": matrix.T, "again": matrix}, f"{folder}/m.safetensors", tied="alias")
    >>> saved.files, saved.aliases
    (('m.safetensors',), {'again': 'w'})
    """
    target = expand_user(path)
    views, aliases = _views(tensors, tied)
    layout = make_layout([view.spec for view in views], sys.maxsize, _with_aliases(metadata, aliases))
    _check_file(target, overwrite)
    _make_folder(target)
    _write_whole(target, layout, views, overwrite=overwrite, fsync=fsync)
    return Saved(target, (target.name,), layout.shards[0].nbytes, aliases)


def _write_whole(target: Path, layout: Layout, views: Sequence[View], *, overwrite: bool, fsync: bool) -> None:
    """Write the only file of a layout under a temporary name, and rename it. Nothing is left after an error."""
    temporary = target.parent / f".weightsmith-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        _write_file(temporary, layout, views, fsync=fsync)
        if overwrite:
            temporary.replace(target)
        else:
            disk.rename_new(temporary, target)
        if fsync:
            disk.fsync_folder(target.parent)
    except FileExistsError as error:
        temporary.unlink(missing_ok=True)
        raise _exists(target) from error
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in FULL:
            raise disk.no_space(target.parent, layout.total_bytes, state=NOTHING_WRITTEN, cause=error) from error
        what, fix = f"cannot be written: {error.strerror}", "check its permissions and the disk, or choose another folder"
        raise StoreError(what, where=str(target), fix=fix, state=NOTHING_WRITTEN) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_file(path: Path, layout: Layout, views: Sequence[View], *, fsync: bool) -> None:
    """Write the one file of a layout. Raises OSError, also if it exists."""
    (shard,) = layout.shards
    tile = np.empty(TILE_BYTES, np.uint8)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        disk.reserve(fd, shard.nbytes)
        write_all(fd, memoryview(shard.header), 0)
        for view in views:
            offset = layout.places[view.spec.name].offset
            for piece in pieces(view, tile):
                write_all(fd, piece, offset)
                offset += piece.nbytes
        if fsync:
            disk.sync_data(fd)
    finally:
        os.close(fd)


def save_model(
    tensors: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int | str = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    tied: Tied = "copy",
    config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    fsync: bool = True,
) -> Saved:
    """Write tensors as a checkpoint folder: weight files, manifest, config.json, and an index if there are several files.

    Arguments are as for `save_file`. With several weight files, the index's metadata names the aliases, as in
    huggingface_hub.

    max_shard_bytes  maximum size of a weight file's tensors: a number of bytes, or text such as "2GB"
    config           written as config.json; None writes none
    overwrite        True replaces a checkpoint that weightsmith wrote, but no other folder

    The folder appears complete or not at all, and `verify` can check it. Raises StoreError for tensors that cannot be stored,
    ParameterError for a wrong size, OutputExists, NoSpace, and CannotResume if an interrupted merge into this folder can still
    be resumed.
    """
    max_shard_bytes = _size(max_shard_bytes)
    views, aliases = _views(tensors, tied)
    specs = [view.spec for view in views]
    layout = make_layout(specs, max_shard_bytes, _with_aliases(metadata, aliases))
    if layout.indexes and aliases:
        layout = make_layout(specs, max_shard_bytes, metadata, index_metadata=aliases)
    check_not_a_file(folder)
    _check_unfinished(folder)
    plan = _PLAN + hash_bytes(b"".join(shard.header for shard in layout.shards))
    spec = OutputSpec(layout, plan, resume=False, overwrite=overwrite)
    staging = Staging.open(LocalTarget(os.fspath(folder)), spec)
    try:
        _stage(staging, views)
        if config is not None:
            staging.add_file("config.json", (json.dumps(config, indent=2) + "\n").encode())
        staging.publish({}, fsync=fsync)
    except BaseException as error:
        if staging.is_open:  # nothing to resume: memory is the only source
            try:
                staging.discard()
            except (OSError, StoreError) as second:
                error.add_note(f"{staging.folder} is left: {second}")
        raise
    finally:
        staging.close()
    files = tuple(shard.name for shard in layout.shards)
    return Saved(absolute(folder), files, sum(shard.nbytes for shard in layout.shards), aliases, staging.warnings)


def _check_unfinished(folder: str | os.PathLike[str]) -> None:
    """Raise CannotResume for the unfinished work of anything but `save_model`, which discards its own."""
    unfinished_plan = staged_plan(folder)
    if unfinished_plan and not unfinished_plan.startswith(_PLAN):
        what = "unfinished work of a merge is here"
        fix = "finish the merge, remove that folder, or save to another one"
        raise CannotResume(what, where=str(staging_folder(absolute(folder))), fix=fix, state=NOTHING_WRITTEN)


def _size(max_shard_bytes: int | str) -> int:
    try:
        return parse_size(max_shard_bytes) if isinstance(max_shard_bytes, str) else max_shard_bytes
    except ValueError:
        what = f"must be a size such as 800MB, 5GB or 2GiB, not {max_shard_bytes!r}"
        raise ParameterError(what, where="max_shard_bytes", state=NOTHING_WRITTEN) from None


def _stage(staging: Staging, views: Sequence[View]) -> None:
    """Write all tensors of an output."""
    tile = np.empty(TILE_BYTES, np.uint8)
    for view in views:
        name, start = view.spec.name, 0
        hasher = GrainHasher(grain_bytes(view.spec))
        for piece in pieces(view, tile):
            staging.write(name, start, piece)
            hasher.update(piece)
            start += piece.nbytes
        staging.finish(name, Finished(hasher.checksum()))


def _views(tensors: Mapping[str, Any], tied: Tied) -> tuple[list[View], dict[str, str]]:
    """All the views to store, in order, and the names that are aliases of one of them.

    Every tensor is held until the end: identity is an address, and the address of a freed tensor is reused.
    """
    if tied not in ("copy", "alias"):
        what = f"{tied!r} is neither 'copy' nor 'alias'"
        raise StoreError(what, where="tied", fix="write one of them", state=NOTHING_WRITTEN)
    views: list[View] = []
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise StoreError(
                f"the name of a tensor must be a string, not {name!r}",
                fix="use names as in a state_dict",
                state=NOTHING_WRITTEN,
            )
        view = view_of(name, tensor)
        views.append(view)
        if tied == "alias" and view.identity is not None:
            kept = first.setdefault(view.identity, name)
            if kept != name:
                aliases[name] = kept
    return [view for view in views if view.spec.name not in aliases], aliases


def _with_aliases(metadata: Mapping[str, str] | None, aliases: Mapping[str, str]) -> dict[str, str]:
    stored = dict(PT_METADATA if metadata is None else metadata)
    for name, kept in aliases.items():
        if name in stored:
            what = f"the metadata already says {stored[name]!r} under the name of a tied tensor, stored as {kept!r}"
            fix = "rename that key of the metadata, or save with tied='copy'"
            raise StoreError(what, where=name, fix=fix, state=NOTHING_WRITTEN)
    return {**stored, **aliases}


def _check_file(target: Path, overwrite: bool) -> None:
    if target.is_dir():
        what, fix = "a folder has this name", "name a file, or use save_model"
    elif target.is_symlink():
        what, fix = f"a symbolic link to {target.readlink()}, and links are not followed", "name the file itself"
    elif target.exists() and not target.is_file():
        what, fix = "not a file, but a pipe or device", "name a file"
    elif target.exists() and not overwrite:
        raise _exists(target)
    else:
        return
    raise OutputExists(what, where=str(target), fix=fix, state=NOTHING_WRITTEN)


def _make_folder(target: Path) -> None:
    """The folder of a file, and those on the way to it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "a file has the name of a folder on the way" if isinstance(error, FileExistsError) else error.strerror
        what, fix = f"its folder cannot be created: {reason}", "choose another folder"
        raise StoreError(what, where=str(target), fix=fix, state=NOTHING_WRITTEN) from error


def _exists(target: Path) -> OutputExists:
    what = "the file already exists"
    return OutputExists(what, where=str(target), fix="choose another name, or give overwrite=True", state=NOTHING_WRITTEN)
