"""The files of an output that are not weights: copied or written, recorded for the manifest, made durable."""

from __future__ import annotations

import os
from collections.abc import Collection
from io import BytesIO, FileIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from weightsmith._base.errors import StoreError, WeightsmithError
from weightsmith._base.files import open_regular, write_all
from weightsmith._outputs.checksum import byte_view, hash_bytes
from weightsmith._outputs.local import disk
from weightsmith._outputs.local.target import create_file
from weightsmith._outputs.manifest import MANIFEST_NAME, hash_file, list_files
from weightsmith.abc.output import OtherFile

if TYPE_CHECKING:
    from weightsmith.abc.output import BytesLike

_COPY_BYTES = 1 << 20


class OtherFiles:
    """Files in the content folder of a staging area.

    records  size and checksum of each, by relative name
    """

    def __init__(self, content: Path) -> None:
        """Change nothing on disk."""
        self._content = content
        self.records: dict[str, OtherFile] = {}

    def add(self, name: str, data: BytesLike | Path) -> None:
        """Add bytes, or a copy of a file; see `Staging.add_file`. Raises OSError if it cannot be written."""
        with open_source(data) if isinstance(data, Path) else BytesIO(byte_view(data)) as source:
            with os.fdopen(create_file(self._content, PurePosixPath(name)), "wb") as target:
                while piece := read_source(source, str(data) if isinstance(data, Path) else name):
                    target.write(piece)
        self.records[name] = hash_file(self._content / name)

    def write(self, name: str, data: bytes) -> OtherFile:
        """Write the index or the manifest, which `add` refuses; does not enter it in `records`. Raises OSError."""
        fd = create_file(self._content, PurePosixPath(name))
        try:
            write_all(fd, memoryview(data), 0)
        finally:
            os.close(fd)
        return OtherFile(len(data), hash_bytes(data))

    def check_names(self, weights: Collection[str]) -> None:
        """Raise StoreError if the folder holds anything but weight files, manifest and the files in `records`, or lacks one."""
        expected = {MANIFEST_NAME, *weights, *self.records}
        present = set(list_files(self._content))
        if present != expected:
            raise StoreError(
                "not published: the staging folder was changed by someone else",
                where=str(self._content),
                details=[f"not ours: {n}" for n in sorted(present - expected)]
                + [f"missing: {n}" for n in sorted(expected - present)],
                fix="run again: what is not ours is removed, and what is missing is written again",
                state=f"Everything is finished in {self._content.parent}",
            )

    def sync(self) -> None:
        """Make the files, and the names of all files, durable."""
        folders = {self._content}
        for name in (*self.records, MANIFEST_NAME):
            path = self._content / name
            folders |= {parent for parent in path.parents if parent.is_relative_to(self._content)}
            with path.open("rb") as file:
                os.fsync(file.fileno())
        for folder in sorted(folders):
            disk.fsync_folder(folder)


def open_source(path: Path) -> FileIO:
    """Open a file that becomes a file of the output. Raises StoreError."""
    try:
        return open_regular(path)
    except WeightsmithError as error:
        what = error.finding.what
        reason = what if what.startswith("cannot be read") else f"cannot be read: {what}"
        raise StoreError(reason, where=str(path), fix=error.finding.fix) from error


def read_source(source: FileIO | BytesIO, where: str, nbytes: int = _COPY_BYTES) -> bytes | None:
    """The next bytes of a source; -1: all. Raises StoreError, because OSError means that the output cannot be written."""
    try:
        return source.read(nbytes)
    except OSError as error:
        raise StoreError(f"cannot be read: {error.strerror}", where=where) from error
