"""Is every byte of a checkpoint what was written? Re-reads all of it and compares with the manifest."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from pathlib import Path

from weightsmith._base.errors import CheckpointError, NotFound
from weightsmith._base.files import expand_user, is_folder, read_all
from weightsmith._outputs.checksum import hash_bytes
from weightsmith._outputs.compare import verdict
from weightsmith._outputs.local import disk
from weightsmith._outputs.manifest import MANIFEST_NAME, Manifest, hash_file, list_files, read_manifest
from weightsmith._outputs.reread import Stored, reread
from weightsmith.abc.output import Progress, Verified


def verify_folder(folder: str | os.PathLike[str], *, threads: int, progress: Progress | None) -> Verified:
    """Re-read a checkpoint in a folder; see `outputs.verify`."""
    root = expand_user(folder)
    if is_folder(root) and not os.access(root, os.X_OK):
        raise CheckpointError("cannot be read: you may not enter it", where=str(root), fix="change its permissions")
    if not os.path.lexists(root / MANIFEST_NAME):
        raise NotFound(
            "there is no manifest, so nothing to compare with" if is_folder(root) else "there is no such folder",
            where=str(root / MANIFEST_NAME if is_folder(root) else root),
            fix="name a folder that weightsmith wrote",
        )
    manifest = read_manifest(root)
    return verdict(root, manifest, list_files(root), differences(root, manifest, threads=threads, progress=progress))


def differences(root: Path, manifest: Manifest, *, threads: int = 2, progress: Progress | None = None) -> list[str]:
    """Where the files in a folder differ from those of a manifest: one line for each difference."""
    problems = []
    for name, record in manifest.files.items():
        problem = _file_problem(root / name, record.nbytes)
        if not problem:
            try:
                same = hash_file(root / name) == record
            except OSError as error:
                problem = f"cannot be read ({error.strerror})"
            else:
                problem = "" if same else "differs from what was written"
        if problem:
            problems.append(f"{name}: {problem}")
    return problems + _weight_problems(root, manifest, threads, progress)


def _file_problem(path: Path, nbytes: int) -> str:
    """What is wrong with a file before it is read, "" if nothing. Links are followed, as in the hub's cache."""
    try:
        about = path.stat()
    except OSError as error:
        return "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
    if not stat.S_ISREG(about.st_mode):
        return "is not a file"
    if about.st_size != nbytes:
        return f"has {about.st_size:,} bytes, not the {nbytes:,} that were written"
    return ""


def _weight_problems(root: Path, manifest: Manifest, threads: int, progress: Progress | None) -> list[str]:
    problems: list[str] = []
    disk.allow_open_files(len(manifest.weights))
    with ExitStack() as opened:
        fds: dict[str, int] = {}
        for name, weight in manifest.weights.items():
            problem = _file_problem(root / name, weight.nbytes)
            if not problem or "bytes" in problem:  # a file of the wrong length still has tensors to name
                try:
                    fds[name] = opened.enter_context((root / name).open("rb", buffering=0)).fileno()
                except OSError as error:
                    problem = f"cannot be read ({error.strerror})"
            if name in fds:
                header = bytearray(min(weight.header_bytes, weight.nbytes))
                read_all(fds[name], memoryview(header), 0)
                if hash_bytes(header) != weight.header_xxh3_128:
                    problems.append(f"{name}: its header differs from what was written")
            if problem:
                problems.append(f"{name}: {problem}")
        stored = [
            Stored(name, fds[record.file], record.offset, record.nbytes, record.grain_bytes)
            for name, record in manifest.tensors.items()
            if record.file in fds
        ]
        found = reread(stored, threads=threads, progress=progress)
    for name, record in manifest.tensors.items():
        if record.file not in fds:
            problems.append(f"tensor {name}: lost with {record.file}")
        elif found[name] != record.checksum:
            problems.append(f"tensor {name}: differs from what was written ({record.file})")
    return problems
