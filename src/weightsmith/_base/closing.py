"""Context managers that end with `close`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager that calls `close` when its block ends."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release its resources. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
