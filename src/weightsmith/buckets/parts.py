"""Where weight files are cut into parts of an upload. Pure.

A **group** is a run of whole tensors of one file, at least `PART_BYTES` long. Its parts contain no bytes of other groups, so a
group is finished, resumed and computed again alone. A tensor larger than that begins at most one group and is cut into many
parts; small tensors share one. The header belongs to the first group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from weightsmith.containers import Layout, ShardLayout

PART_BYTES = 8 << 20
"""Of the smallest part, except the last of a file; stores accept parts from 5 MiB on. The largest is shorter than two of it."""
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


_last: tuple[Layout, int, tuple[Group, ...]] | None = None
"""The last layout that was cut, and how: a process that does several parts of a plan needs it again for each."""


def cut(layout: Layout, part_bytes: int | None = None) -> tuple[Group, ...]:
    """The groups of all files, in file order. Cost: 6 us for each tensor; nothing for the same layout again."""
    global _last
    least, last = part_bytes or PART_BYTES, _last
    if last is None or last[0] is not layout or last[1] != least:
        _last = last = layout, least, tuple(_groups(layout, least))
    return last[2]


def _groups(layout: Layout, part_bytes: int) -> Iterator[Group]:
    for number, shard in enumerate(layout.shards):
        first = 1
        for begin, end, names in _runs(layout, shard, part_bytes):
            least = _least(shard.nbytes, part_bytes)
            inside = [(0, len(shard.header))] if begin == 0 else []
            inside += [(place.offset, place.offset + place.nbytes) for name in names for place in (layout.places[name],)]
            parts = tuple(_parts(first, begin, end, least, inside))
            yield Group(number, names, parts, begin == 0)
            first += len(parts)


def _least(nbytes: int, part_bytes: int) -> int:
    """The least size of a part, with which a file has no more than `MAX_PARTS`."""
    return max(part_bytes, -(-nbytes // (MAX_PARTS - 1)))


def _runs(layout: Layout, shard: ShardLayout, part_bytes: int) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """First byte, end and tensors of each group of a file. Padding after a tensor is of its group."""
    least = _least(shard.nbytes, part_bytes)
    begin, names = 0, list[str]()
    for spec in sorted(shard.tensors, key=lambda spec: layout.places[spec.name].offset):
        offset = layout.places[spec.name].offset
        if names and offset - begin >= least and shard.nbytes - offset >= least:
            yield begin, offset, tuple(names)
            begin, names = offset, []
        names.append(spec.name)
    yield begin, shard.nbytes, tuple(names)


def _parts(first: int, begin: int, end: int, least: int, inside: list[tuple[int, int]]) -> Iterator[Part]:
    count = max(1, (end - begin) // least)
    for i in range(count):
        start, stop = (begin + (end - begin) * k // count for k in (i, i + 1))
        filled = sum(max(0, min(stop, b) - max(start, a)) for a, b in inside)
        yield Part(first + i, start, stop - start, filled)
