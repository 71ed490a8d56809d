"""Is every byte of a checkpoint in a folder what was written?"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from weightsmith._base.errors import CheckpointError, NotFound
from weightsmith._base.files import expand_user, is_folder
from weightsmith._outputs.compare import Read, compare
from weightsmith._outputs.local import disk
from weightsmith._outputs.manifest import MANIFEST_NAME, Manifest, list_files, read_manifest
from weightsmith._outputs.reread import PIECE_BYTES, read_at
from weightsmith.abc.output import Progress, Verified


def verify_folder(folder: str | os.PathLike[str], *, threads: int, progress: Progress | None) -> Verified:
    """Re-read a checkpoint in a folder; see `places.verify`."""
    root = expand_user(folder)
    if is_folder(root) and not os.access(root, os.X_OK):
        raise CheckpointError("cannot be read: you may not enter it", where=str(root), fix="change its permissions")
    if not os.path.lexists(root / MANIFEST_NAME):
        what = "there is no manifest, so nothing to compare with" if is_folder(root) else "there is no such folder"
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
