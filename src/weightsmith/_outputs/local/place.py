"""A local folder as the target of an output: a rename makes it visible."""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import OutputExists
from weightsmith._outputs.local import disk
from weightsmith._outputs.local.claim import OLD
from weightsmith._outputs.local.target import absolute, check_out, check_vacant
from weightsmith.abc.output import Target

if TYPE_CHECKING:
    from weightsmith.abc.output import OutputSpec, Progress, Verified


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
        from weightsmith._outputs.local.verify import verify_folder

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
