"""What may be written where: checks of the output folder and of the names inside it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path, PurePosixPath

from weightsmith.errors import NOTHING_WRITTEN, OutputExists, StoreError
from weightsmith.store.manifest import MANIFEST_NAME

_VERSION_CONTROL = (".git", ".hg", ".svn", ".jj")
_SHOWN = 6  # names of an existing folder that a message lists


def check_out(out: str | os.PathLike[str]) -> Path:
    """The absolute path of the output folder, refused where a folder cannot be made. Changes nothing.

    Folders on the way to it need not exist: `Staging.open` makes them.
    """
    given = os.fspath(out)
    if not given or "\0" in given:
        raise StoreError(f"{given!r} is not a path", where="output folder", state=NOTHING_WRITTEN)
    path = Path(os.path.abspath(given))  # noqa: PTH100  Path.resolve would follow a symlink at the output itself
    try:
        _check_place(path)
    except OSError as error:  # a name that is too long, a parent that may not be entered
        raise _refused(path, str(error.strerror), "choose another folder") from error
    return path


def _check_place(path: Path) -> None:
    if path.is_symlink():
        raise _refused(path, f"it is a symbolic link to {path.readlink()}", "name the folder itself; links are never followed")
    reason = _protected(path)
    if reason:
        raise _refused(path, reason, "name a new folder")
    parent = path.parent
    while not parent.exists():
        if parent.is_symlink():
            reason = f"{parent} is a symbolic link to {parent.readlink()}, which does not exist"
            raise _refused(path, reason, "make that folder, or remove the link")
        parent = parent.parent
    if not parent.is_dir():
        raise _refused(path, f"{parent} is a file, not a folder", "name a folder inside a folder")
    if path.exists() and not path.is_dir():
        raise OutputExists(
            "a file has this name, and the output is a folder",
            where=str(path),
            fix="choose another name",
            state=NOTHING_WRITTEN,
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _refused(path, f"you may not write into {parent}", "change its permissions, or write somewhere else")


def _refused(path: Path, reason: str, fix: str) -> StoreError:
    return StoreError(f"cannot be the output folder: {reason}", where=str(path), fix=fix, state=NOTHING_WRITTEN)


def _protected(path: Path) -> str:
    """Why this folder must never be replaced, or an empty string."""
    real = path.resolve()  # the same folder reached through a link in one of its parents
    if real == real.parent:
        return "it is the root of the file system"
    if Path.home().resolve().is_relative_to(real):
        return "it is, or holds, your home folder"
    if Path.cwd().is_relative_to(real):
        return "it is, or holds, the current folder"
    if path.is_mount():
        return "it is a mount point, which cannot be renamed"
    return ""


def check_vacant(path: Path, *, overwrite: bool) -> None:
    """Raise OutputExists if `path` holds anything and may not be replaced.

    With `overwrite`, only what is clearly a checkpoint may be: a folder with weight files, a manifest, or a model's
    config.json, and no version control.
    """
    if not path.is_dir():
        return
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    if not overwrite:
        raise OutputExists(
            "the output folder is there already and is not empty",
            where=str(path),
            details=(f"it holds {shown}",),
            fix="choose another folder, or replace this one with --overwrite (overwrite=True)",
            state=NOTHING_WRITTEN,
        )
    reason = ""
    tracked = [name for name in _VERSION_CONTROL if name in names]
    if tracked:
        reason = f"it holds {tracked[0]}, whose history would be lost"
    elif not _is_checkpoint(path, names):
        reason = "it does not look like a checkpoint (no *.safetensors, weightsmith.json or config.json of a model)"
    if reason:
        raise OutputExists(
            f"will not be overwritten: {reason}",
            where=str(path),
            details=(f"it holds {shown}",),
            fix="choose another folder, or remove this one yourself",
            state=NOTHING_WRITTEN,
        )


def _is_checkpoint(path: Path, names: list[str]) -> bool:
    if MANIFEST_NAME in names or any(name.endswith(".safetensors") for name in names):
        return True
    if "config.json" not in names:
        return False
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and ("model_type" in config or "architectures" in config)


def check_file_name(name: str) -> PurePosixPath:
    """The relative path of a file that is not a weight, refused if it could leave the folder or pass for a weight.

    >>> check_file_name("1_Pooling/config.json")
    PurePosixPath('1_Pooling/config.json')
    """
    parts = name.split("/")
    problem = ""
    if not name or any(part in ("", ".", "..") for part in parts):
        problem = "it must be a relative path without empty, '.' or '..' parts"
    elif "\\" in name or "\0" in name or not name.isprintable():
        problem = "it holds a backslash or a control character"
    elif parts[-1].endswith((".safetensors", ".safetensors.index.json")):
        problem = "weight files and their index are written from the layout alone"
    elif name == MANIFEST_NAME:
        problem = "the manifest is written by publish"
    if problem:
        raise StoreError(f"{name!r} cannot be the name of a file in the output: {problem}", where="file name")
    return PurePosixPath(name)


def create_file(folder: Path, name: PurePosixPath) -> int:
    """A new, empty file under `folder`, open for writing; no link below `folder` is followed.

    Folders on the way are made. A file of that name is replaced, a link of that name is removed and not followed.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
    at = os.open(folder, flags)
    try:
        for part in name.parts[:-1]:
            try:
                os.mkdir(part, dir_fd=at)  # pathlib has no dir_fd
            except FileExistsError:
                pass
            inner = os.open(part, flags, dir_fd=at)
            os.close(at)
            at = inner
        try:
            os.unlink(name.name, dir_fd=at)
        except FileNotFoundError:
            pass
        create = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(name.name, create, 0o666, dir_fd=at)
    except OSError as error:
        if stat_is_link(folder, name):
            raise StoreError("a symbolic link is in the way, and is not followed", where=str(folder / name)) from error
        raise
    finally:
        os.close(at)


def stat_is_link(folder: Path, name: PurePosixPath) -> bool:
    """True if any part of `name` below `folder` is a symbolic link."""
    path = folder
    for part in name.parts:
        path /= part
        try:
            if stat.S_ISLNK(path.lstat().st_mode):
                return True
        except OSError:
            return False
    return False
