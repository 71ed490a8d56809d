"""Where weight files are cut into parts of an upload. Pure.

A **group** is a run of whole tensors of one file, at least `PART_BYTES` long. Its parts contain no bytes of other groups, so a
group is finished, resumed and computed again alone. A tensor larger than that begins at most one group and is cut into many
parts; small tensors share one. The header belongs to the first group.

Some stores want parts of one size, the last one aside. For these a file is one group, because a cut at equal distances goes
through tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from weightsmith._files.containers import Layout, ShardLayout

PART_BYTES = 8 << 20
"""The smallest part, except the last of a file; stores accept 5 MiB and more. The largest is less than twice as long."""
MAX_PARTS = 10_000


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a weight file that are uploaded together.

    number  in its file, from 1
    start   in the file
    filled  bytes that are in the header or a tensor; the others are zeros
    """

    number: int
    start: int
    nbytes: int
    filled: int


class GroupKey(NamedTuple):
    """A group of a file, by its first part, first byte and length: another cut gives the same numbers to other bytes."""

    file: str
    first_part: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors and their parts. header: it contains the file's header."""

    shard: int
    tensors: tuple[str, ...]
    parts: tuple[Part, ...]
    header: bool

    def key(self, file: str) -> GroupKey:
        """What it is known by in a journal. file: the name of its file."""
        first, last = self.parts[0], self.parts[-1]
        return GroupKey(file, first.number, first.start, last.start + last.nbytes - first.start)


_last: tuple[Layout, int, bool, tuple[Group, ...]] | None = None
"""The last layout that was cut, and how: a process that does several parts of a plan needs it again for each."""


def cut(layout: Layout, part_bytes: int | None = None, *, equal: bool = False) -> tuple[Group, ...]:
    """The groups of all files, in file order. equal: all parts of a file but the last are of one size.

    Cost: 6 us for each tensor; nothing for the same layout again.
    """
    global _last
    least, last = part_bytes or PART_BYTES, _last
    if last is None or last[0] is not layout or last[1:3] != (least, equal):
        _last = last = layout, least, equal, tuple(_groups(layout, least, equal))
    return last[3]


def _groups(layout: Layout, part_bytes: int, equal: bool) -> Iterator[Group]:
    for number, shard in enumerate(layout.shards):
        first = 1
        least = _least(shard.nbytes, part_bytes)
        for begin, end, names in _runs(layout, shard, shard.nbytes if equal else least):
            inside = [(0, len(shard.header))] if begin == 0 else []
            inside += [(place.offset, place.offset + place.nbytes) for name in names for place in (layout.places[name],)]
            borders = [*range(0, end, least), end] if equal else _borders(begin, end, least)
            parts = tuple(_parts(first, borders, inside))
            yield Group(number, names, parts, begin == 0)
            first += len(parts)


def _least(nbytes: int, part_bytes: int) -> int:
    """The least size of a part, with which a file has no more than `MAX_PARTS`."""
    return max(part_bytes, -(-nbytes // (MAX_PARTS - 1)))


def _runs(layout: Layout, shard: ShardLayout, least: int) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """First byte, end and tensors of each group of a file, of `least` bytes and more. Padding is of the tensor before it."""
    begin, names = 0, list[str]()
    for spec in sorted(shard.tensors, key=lambda spec: layout.places[spec.name].offset):
        offset = layout.places[spec.name].offset
        if names and offset - begin >= least and shard.nbytes - offset >= least:
            yield begin, offset, tuple(names)
            begin, names = offset, []
        names.append(spec.name)
    yield begin, shard.nbytes, tuple(names)


def _borders(begin: int, end: int, least: int) -> list[int]:
    """Where a group is cut into parts of nearly the same size."""
    count = max(1, (end - begin) // least)
    return [begin + (end - begin) * i // count for i in range(count + 1)]


def _parts(first: int, borders: list[int], inside: list[tuple[int, int]]) -> Iterator[Part]:
    for number, (start, stop) in enumerate(pairwise(borders), first):
        filled = sum(max(0, min(stop, b) - max(start, a)) for a, b in inside)
        yield Part(number, start, stop - start, filled)
