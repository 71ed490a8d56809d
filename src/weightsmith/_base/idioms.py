"""Grouping by key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Self, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key. Keys are in the order of their first pairs, values in that of theirs.

    >>> grouped((word[0], word) for word in ("ant", "bee", "ape"))
    {'a': ['ant', 'ape'], 'b': ['bee']}
    """
    values_of_key: dict[K, list[V]] = {}
    for key, value in pairs:
        values_of_key.setdefault(key, []).append(value)
    return values_of_key


# ---- Context managers that end with `close`


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
