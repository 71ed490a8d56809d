"""A local folder as the target of an output: which folder may be written or replaced, the rename that publishes, `verify`."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import NOTHING_WRITTEN, CheckpointError, NotFound, OutputExists, StoreError
from weightsmith._base.files import FileState, expand_user, is_folder, real_path, show
from weightsmith._files.remote import addresses
from weightsmith._outputs import disk
from weightsmith._outputs.checksum import PIECE_BYTES, read_at
from weightsmith._outputs.locks import OLD
from weightsmith._outputs.manifest import (
    MANIFEST_NAME,
    Manifest,
    Read,
    check_ours,
    compare,
    damaged,
    differences,
    list_files,
    read_manifest,
)
from weightsmith.abc.output import Progress, Target, Verified

if TYPE_CHECKING:
    from weightsmith.abc.output import OutputSpec, Progress, Verified


_VERSION_CONTROL = (".git", ".hg", ".svn", ".jj")
_SHOWN = 6  # names of an existing folder that a message lists
_LOOKED_AT = 10_000  # entries of it that are read for this
_MAX_LINKS = 40  # in a row, as in Linux
_compared: set[tuple[str, FileState]] = set()
"""Files newer than their manifest that this process has read as a whole, and found to be what was written."""
_MOVE = "move what you need out of it, and remove it"


_FILES = {
    ".gguf": "with {flag} gguf-q4_k_m, it will hold model.gguf",
    ".safetensors": "it will hold the weights and what belongs to them",
}
"""Ends of file names that a user may write for the output → what a folder will hold instead. {flag}: chooses the format."""


def check_not_a_file(out: str | os.PathLike[str], flag: str = "") -> None:
    """Raise StoreError for an output that a user named like a file of weights. flag: chooses the format; "" if nothing does.

    Only for names that a user wrote: folders beside the output have the names of models and recipes in theirs.
    """
    path = Path(out)
    if is_address(out) or (held := _FILES.get(path.suffix.lower())) is None:
        return
    folder = path
    while folder.suffix.lower() in _FILES:
        folder = folder.with_suffix("")
    holds = f": {held.format(flag=flag)}" if flag or "{flag}" not in held else ""
    what = f"the output is a folder, and {path.name} is the name of a file"
    raise StoreError(what, where=str(out), fix=f"name a folder, such as {folder}{holds}", state=NOTHING_WRITTEN)


def check_out(out: str | os.PathLike[str]) -> Path:
    """The absolute path of the output folder. Raises StoreError if it cannot be created. Changes nothing.

    Parent folders need not exist: `Staging.open` creates them.
    """
    text = os.fspath(out)
    if not text or "\0" in text:
        raise StoreError(f"{text!r} is not a path", where="output folder", fix="name a new folder", state=NOTHING_WRITTEN)
    if is_address(text):
        what = "cannot be the output folder: it is an address"
        raise StoreError(what, where=text, fix="name a local folder", state=NOTHING_WRITTEN)
    if text.startswith("~") and str(expand_user(text)) == str(Path(text)):
        what = f"{text!r} is in a home folder that does not exist"
        fix = f"write ./{text} for a folder of this name, or name another"
        raise StoreError(what, where="output folder", fix=fix, state=NOTHING_WRITTEN)
    path = absolute(text)
    try:
        path.name.encode()
    except UnicodeEncodeError:  # the model card and the messages hold it
        what = f"{text!r} is not UTF-8"
        raise StoreError(what, where="output folder", fix="choose another name", state=NOTHING_WRITTEN) from None
    try:
        _check_place(path)
    except OSError as error:  # a name that is too long, a parent that may not be entered
        raise _refused(path, str(error.strerror), "choose another folder") from error
    return path


def is_address(out: str | os.PathLike[str]) -> bool:
    """True for an address, which is no local folder."""
    return isinstance(out, str) and addresses.is_address(out)


def absolute(out: str | os.PathLike[str]) -> Path:
    """The absolute path of an output: `~` is the home folder, links are not followed."""
    return Path(os.path.abspath(expand_user(out)))  # noqa: PTH100  Path.resolve would follow a link at the output itself


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
            raise _refused(path, reason, "create that folder, or remove the link")
        parent = parent.parent
    if not parent.is_dir():
        raise _refused(path, f"{parent} is a file, not a folder", "name a folder inside a folder")
    if path.exists() and not path.is_dir():
        what = "a file has this name, but the output is a folder"
        raise OutputExists(what, where=str(path), fix="choose another name", state=NOTHING_WRITTEN)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _refused(path, f"you may not write into {parent}", "change its permissions, or write somewhere else")


def _refused(path: Path, reason: str, fix: str) -> StoreError:
    return StoreError(f"cannot be the output folder: {reason}", where=str(path), fix=fix, state=NOTHING_WRITTEN)


def _protected(path: Path) -> str:
    """Why this folder must never be replaced, or ""."""
    real = real_path(path)  # the same folder reached through a link in one of its parents
    if real == real.parent:
        return "it is the root of the file system"
    home = absolute("~") if os.path.expanduser("~") != "~" else None  # noqa: PTH111
    if home is not None and real_path(home).is_relative_to(real):
        return "it is, or contains, your home folder"
    if Path.cwd().is_relative_to(real):
        return "it is, or contains, the current folder"
    if path.is_mount():
        return "it is a mount point, which cannot be renamed"
    return ""


def check_vacant(path: Path, *, overwrite: bool, protected: Sequence[Path] = ()) -> None:
    """Raise OutputExists if `path` holds anything and may not be replaced, StoreError if the run reads from it.

    protected  every file and folder that the run reads

    With `overwrite`, a folder is replaced only if `check_made_here` accepts it; never if it is under version control.
    """
    try:
        if not path.is_dir():
            return
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, _LOOKED_AT))
    except OSError as error:
        raise _refused(path, str(error.strerror), "change its permissions, or choose another folder") from error
    if not names:
        return
    check_not_read(path, protected)
    if not overwrite:
        fix = "choose another folder, or replace this one with --overwrite (overwrite=True)"
        raise occupied("the output folder already exists and is not empty", path, fix, holds=names)
    fix = "choose another folder, or remove this one yourself"

    def refused(why: str, lost: Sequence[str]) -> OutputExists:
        return occupied(f"will not be overwritten: {why}", path, fix, holds=names, lost=lost)

    if tracked := [name for name in _VERSION_CONTROL if (path / name).exists()]:
        raise refused(f"it holds {tracked[0]}, whose history would be lost", ())
    check_made_here(path, refused)


def occupied(what: str, where: object, fix: str, *, holds: Sequence[str] = (), lost: Sequence[str] = ()) -> OutputExists:
    """The error for an output that already exists. Names the files that would be `lost`, or else those that it `holds`."""
    details = [f"would be lost: {some(lost)}"] if lost else [f"it holds {some(holds)}"] if holds else []
    return OutputExists(what, where=str(where), details=details, fix=fix, state=NOTHING_WRITTEN)


def check_made_here(path: Path, refused: Callable[[str, Sequence[str]], Exception]) -> Manifest:
    """The manifest of a folder that holds what weightsmith has written, and nothing else; see `manifest.check_ours`.

    Every file must be in the manifest, and be what was written: its size, the checksums of headers and of all files that are
    not weights. A weight file is read as a whole only if it, or what the file system knows of it, was changed after the
    manifest, which is written last. A listed file may be missing, or be a link, of which nothing but the link would be lost.
    """
    return check_ours(
        lambda: read_manifest(path),
        lambda manifest: list(itertools.islice(_unlisted(path, manifest), _SHOWN + 1)),
        lambda manifest: _changed(path, manifest),
        refused,
    )


def _changed(path: Path, manifest: Manifest) -> list[str]:
    written = (path / MANIFEST_NAME).lstat()
    there = {name: about for name in (*manifest.weights, *manifest.files) if (about := _file(path / name)) is not None}
    manifest_checksum = str(manifest.data["checksum"])
    states = {name: (manifest_checksum, FileState.of(about)) for name, about in there.items() if _is_later(about, written)}
    later = {name for name, state in states.items() if state not in _compared}
    read_again = replace(manifest, tensors={name: tensor for name, tensor in manifest.tensors.items() if tensor.file in later})
    present = file_states(path, there)
    with reading(path, manifest) as read:
        problems = differences(manifest, present, read) + damaged(read_again, present, read, threads=2, piece_bytes=PIECE_BYTES)
    if not problems:
        _compared.update(states.values())
    return problems


def _is_later(about: os.stat_result, written: os.stat_result) -> bool:
    """Whether a file was changed after another was. Times of contents are kept by `mv` and `cp -p`; the others are not."""
    return about.st_mtime_ns > written.st_mtime_ns or about.st_ctime_ns > written.st_ctime_ns


def _file(path: Path) -> os.stat_result | None:
    """The state of what has this name; None for nothing, and for a link."""
    try:
        about = path.lstat()
    except OSError:
        return None
    return None if stat.S_ISLNK(about.st_mode) else about


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint that weightsmith made: the files in its manifest, and no others. The manifest is deleted last.

    Does nothing if there is no folder, or an empty one is left of it. Raises StoreError if anything else is in it, and for what
    cannot be deleted.
    """

    def refused(why: str, lost: Sequence[str]) -> StoreError:
        return StoreError(f"it is not removed: {why}", where=str(path), details=[some(lost)] if lost else [], fix=_MOVE)

    try:
        if path.is_symlink() or not path.is_dir():
            return
        if any(path.iterdir()):
            manifest = check_made_here(path, refused)
            names = [*map(PurePosixPath, (*manifest.weights, *manifest.files))]
            for name in names:
                (path / name).unlink(missing_ok=True)
            for folder in sorted({parent for name in names for parent in name.parents if parent.name}, reverse=True):
                with suppress(FileNotFoundError):
                    (path / folder).rmdir()
            (path / MANIFEST_NAME).unlink()
        path.rmdir()
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else str(path)
        raise StoreError(f"cannot be removed: {error.strerror}", where=where, fix=f"remove {path} yourself") from error


def check_not_read(path: Path, protected: Sequence[Path]) -> None:
    """Raise StoreError if a non-empty folder is, contains, or lies in anything the run reads. Links are resolved."""
    if not path.is_dir() or not any(path.iterdir()):
        return
    identity, around = _identity(path), _surroundings(path)
    for place in protected:
        if _identity(place) in around:
            how = "is" if _identity(place) == identity else "lies in"
            raise _is_read(path, f"the output folder {how} the input {place}")
        for name in (place, *_links_in(place)):
            if any(identity in _surroundings(step.parent) or _identity(step) == identity for step in _steps(name)):
                leads = f", which leads to {os.path.realpath(name)}" if name.is_symlink() else ""
                raise _is_read(path, f"the input {name}{leads} would be lost with the output folder")


def _is_read(path: Path, what: str) -> StoreError:
    return StoreError(what, where=str(path), fix="choose another output folder", state=NOTHING_WRITTEN)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode: equal for two names of one folder, through any links and mounts."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _surroundings(path: Path) -> set[tuple[int, int]]:
    """Identities of a folder and of all its parents."""
    real = real_path(path)
    return {identity for place in (real, *real.parents) if (identity := _identity(place)) is not None}


def _links_in(folder: Path) -> list[Path]:
    """The links at the top level of a folder, such as the weight files of hub snapshots."""
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if entry.is_symlink()]
    except OSError:
        return []


def _steps(path: Path) -> Iterator[Path]:
    """The path, and the target of each link if it is a chain of links."""
    for _ in range(_MAX_LINKS):
        yield path
        if not path.is_symlink():
            return
        path = Path(os.path.realpath(path.parent)) / path.readlink()


def some(names: Sequence[str]) -> str:
    r"""The first few names of files, for a message; those that are not printable are quoted, escaped and shortened.

    >>> some(["a.txt", "b\x1b[2J"])
    "a.txt, 'b\\x1b[2J'"
    """
    shown = (name if name.isprintable() else show(name) for name in names[:_SHOWN])
    return ", ".join(shown) + (" and more" if len(names) > _SHOWN else "")


def _unlisted(path: Path, manifest: Manifest) -> Iterator[str]:
    """Relative names of the files, and folders (with a `/`), that a manifest does not list."""
    listed = manifest.names
    folders = {parent.as_posix() for name in listed for parent in PurePosixPath(name).parents}

    def walk(folder: Path, prefix: str) -> Iterator[str]:
        try:
            with os.scandir(folder) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except OSError:  # if it cannot be read, it does not count as ours
            yield prefix
            return
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                if name in folders:
                    yield from walk(folder / entry.name, f"{name}/")
                else:
                    yield f"{name}/"
            elif name not in listed:
                yield name

    return walk(path, "")


def create_file(folder: Path, name: PurePosixPath) -> int:
    """A new, empty file under `folder`, open for writing; no link below `folder` is followed.

    Missing parent folders are created. An existing file or link of that name is replaced; the link is not followed.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
    at = os.open(folder, flags)
    try:
        for part in name.parts[:-1]:
            try:
                os.mkdir(part, dir_fd=at)  # pathlib has no dir_fd
            except FileExistsError:
                pass
            outer, at = at, os.open(part, flags, dir_fd=at)
            os.close(outer)
        try:
            os.unlink(name.name, dir_fd=at)
        except FileNotFoundError:
            pass
        create = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(name.name, create, 0o666, dir_fd=at)
    except OSError as error:
        if stat_is_link(folder, name):
            what = "a symbolic link is in the way, and is not followed"
            raise StoreError(what, where=str(folder / name), fix="remove it and run again") from error
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


def verify_folder(folder: str | os.PathLike[str], *, threads: int, progress: Progress | None) -> Verified:
    """Re-read a checkpoint in a folder; see `places.verify`."""
    root = expand_user(folder)
    if is_folder(root) and not os.access(root, os.X_OK):
        raise CheckpointError("cannot be read: you may not enter it", where=str(root), fix="change its permissions")
    if not os.path.lexists(root / MANIFEST_NAME):
        what = "there is no manifest to compare with" if is_folder(root) else "there is no such folder"
        fix = "name a folder that weightsmith wrote"
        raise NotFound(what, where=str(root / MANIFEST_NAME if is_folder(root) else root), fix=fix)
    manifest = read_manifest(root)
    present = file_states(root, {*list_files(root), *manifest.names})
    with reading(root, manifest) as read:
        return compare(root, manifest, present, read, progress, threads=threads, piece_bytes=PIECE_BYTES)


def file_states(root: Path, names: Iterable[str]) -> dict[str, int | str]:
    """The sizes of files, or why one cannot be read; those that are missing are left out.

    Links are followed, as in the Hub's cache.
    """
    states: dict[str, int | str] = {}
    for name in names:
        path = root / name
        try:
            about = path.stat()
        except FileNotFoundError:
            if path.is_symlink():
                states[name] = "is missing"
        except OSError as error:
            states[name] = f"cannot be read ({error.strerror})"
        else:
            states[name] = about.st_size if stat.S_ISREG(about.st_mode) else "is not a file"
    return states


@contextmanager
def reading(root: Path, manifest: Manifest) -> Iterator[Read]:
    """What reads the files of a checkpoint, each of which is opened once."""
    disk.allow_open_files(len(manifest.names))
    with ExitStack() as opened:

        @cache
        def fd(name: str) -> int:
            return opened.enter_context((root / name).open("rb", buffering=0)).fileno()

        yield lambda name, start, nbytes: read_at(fd(name), start, nbytes)


class LocalTarget(Target):
    """A local folder. path: as the user wrote it; it may not be one that can be written."""

    streams, publication, parts = False, "rename", True

    def __init__(self, path: str) -> None:
        """Change nothing on disk."""
        self.path = path
        self._overwrite = False

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return Path(self.path).name

    @property
    def absolute(self) -> str:
        """The path from the root; links and `~` are left in it."""
        return str(Path(self.path).absolute())

    @property
    def local(self) -> Path:
        """The absolute path."""
        return absolute(self.path)

    def check_free(self, *, overwrite: bool, protected: Sequence[Path], reads: Sequence[str], notes: Mapping[str, Any]) -> None:
        check_vacant(check_out(self.path), overwrite=overwrite, protected=protected)

    def verify(self, *, threads: int, progress: Progress | None) -> Verified:
        return verify_folder(self.path, threads=threads, progress=progress)

    def connect(self, spec: OutputSpec, notes: MutableMapping[str, Any], files: Mapping[str, Any]) -> Collection[str]:
        self._overwrite = spec.overwrite
        return ()

    def publish(self, content: Path, files: Mapping[str, Any], *, fsync: bool) -> None:
        """Give a folder the final name. With `overwrite`, the checkpoint there takes its place, or that of `old` beside it."""
        out = self.local
        try:
            content.rename(out)  # fails if there is a folder with anything in it
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not self._overwrite:
                raise OutputExists(
                    "the output folder was created by another program meanwhile",
                    where=str(out),
                    fix="move it away and run again: all that is left to do is the rename",
                    state=f"Everything is finished in {content.parent}",
                ) from None
        if disk.exchange(content, out):
            return
        old = content.parent / OLD
        out.rename(old)
        try:
            content.rename(out)
        except OSError:
            old.rename(out)
            raise
