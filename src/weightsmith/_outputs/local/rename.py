"""Publishes a finished folder by giving it its final name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith._base.errors import StoreError
from weightsmith._outputs.local import disk
from weightsmith._outputs.local.area import left_behind
from weightsmith._outputs.local.weight_file import Weights
from weightsmith.abc.output import Capabilities

if TYPE_CHECKING:
    from weightsmith._outputs.journal import Entries, Journal
    from weightsmith._outputs.local.backend import FolderBackend
    from weightsmith.abc.output import Address

CAPABILITIES = Capabilities(in_order=False, copies=False, publication="rename", parts=True, shared_locks=True)


class Rename:
    """See `local.backend.Destination`. out: the final name, in the same folder as the staging folder."""

    capabilities = CAPABILITIES
    kept = "Finished tensors are kept in {folder}; run again to resume."

    def __init__(self, out: Path) -> None:
        """Change nothing on disk."""
        self.out = out

    def weights(self, backend: FolderBackend, entries: Entries) -> Weights:
        """All weight files are in the folder until the end."""
        return Weights(backend.area.content, backend.spec.layout)

    def connect(self, backend: FolderBackend) -> None:
        """Nothing else is needed."""

    def publish(self, backend: FolderBackend, journal: Journal, *, fsync: bool) -> Path | Address:
        """Rename the content. With `overwrite`, it changes places with the checkpoint there, which is then removed."""
        area = backend.area
        if fsync:
            backend.weights.sync()
            backend.files.sync()
        backend.check_vacant()  # syncing may have taken minutes
        about = area.content.stat()
        journal.publish(about.st_dev, about.st_ino)
        area.rename(overwrite=backend.spec.overwrite)
        backend.published = True
        backend.close_files()
        try:
            if fsync:
                disk.fsync_folder(self.out.parent)
            area.remove_replaced()
            area.remove()
        except (OSError, StoreError) as error:
            backend.left = (left_behind(error, backend.folder),)
            area.locks.close()
        return self.out

    def close(self) -> None:
        """Nothing is open."""
