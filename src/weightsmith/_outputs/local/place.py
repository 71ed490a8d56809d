"""A local folder as an output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith._outputs.local.rename import CAPABILITIES
from weightsmith._outputs.local.target import absolute, check_out, check_vacant

if TYPE_CHECKING:
    from weightsmith._files.containers import Layout
    from weightsmith._plans.parts import Together
    from weightsmith.abc.output import OutputBackend, OutputSpec, Progress, Verified


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A local folder. path: as the user wrote it; it may not be one that can be written."""

    path: str
    capabilities = CAPABILITIES
    spec = url = ""

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

    def backend(self, spec: OutputSpec) -> OutputBackend:
        """Raises StoreError if no output can have this path."""
        from weightsmith._outputs.local.backend import FolderBackend
        from weightsmith._outputs.local.rename import Rename

        out = check_out(self.path)
        return FolderBackend(out, spec, Rename(out))

    def check_free(self, *, overwrite: bool, protected: Sequence[Path], reads: Sequence[str]) -> None:
        """See `Place.check_free`."""
        check_vacant(check_out(self.path), overwrite=overwrite, protected=protected)

    def together(self, layout: Layout) -> Together:
        """Any process may build any tensor."""
        return ()

    def verify(self, *, threads: int, progress: Progress | None) -> Verified:
        """See `Place.verify`."""
        from weightsmith._outputs.local.verify import verify_folder

        return verify_folder(self.path, threads=threads, progress=progress)

    def __str__(self) -> str:
        return self.path
