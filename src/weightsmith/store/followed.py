"""Which tensors other processes finish in a staging folder, while they do."""

from __future__ import annotations

import contextlib
from pathlib import Path

from weightsmith.store.journal import read_further
from weightsmith.store.locks import part_journals


class Followed:
    """Follows the journals of parts as they grow. On a network file system, what they show may be some seconds old."""

    def __init__(self, folder: Path) -> None:
        """folder: the staging folder."""
        self._folder = folder
        self._read: dict[Path, int] = {}

    def look(self) -> set[str]:
        """The tensors that have been finished since the last call; one that two processes finish is there twice."""
        names: set[str] = set()
        for path in part_journals(self._folder):
            with contextlib.suppress(OSError):
                entries, self._read[path] = read_further(path, self._read.get(path, 0))
                names.update(entries.tensors)
        return names
