"""Grouping by key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

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
