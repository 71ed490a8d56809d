"""Which tensors other processes finish in a staging folder, while they do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from weightsmith._outputs.journal import read_further
from weightsmith._outputs.local.claim import PARTS


class FollowedJournals:
    """Follows the journals of parts as they grow. On a network file system, what they show may be some seconds old."""

    def __init__(self, folder: Path) -> None:
        """folder: the staging folder."""
        self._folder = folder
        self._read: dict[str, int] = {}

    def look(self, parts: Iterable[str]) -> set[str]:
        """The tensors of these parts (labels) that have been finished since the last call for them."""
        names: set[str] = set()
        for part in parts:
            with contextlib.suppress(OSError):
                entries, self._read[part] = read_further(self._folder / PARTS / f"journal-{part}", self._read.get(part, 0))
                names.update(entries.tensors)
        return names
