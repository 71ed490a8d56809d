"""Tensors that are runs of elements of stored ones, under other names: rows of a joined projection, layers of a stack."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weightsmith._base.files import Extent
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._files.hf_folder import natural_key
from weightsmith.abc.tensors import Tensors, byte_view, check_range, digest, spec_of

if TYPE_CHECKING:
    from pathlib import Path

    from weightsmith.abc.tensors import Buffer


@dataclass(frozen=True, slots=True)
class Runs:
    """A tensor in a stored one.

    stored  the stored tensor's name
    shape   of the tensor
    runs    first element and number of elements of each run, in the order in which they make the tensor; none is empty
    """

    stored: str
    shape: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]


class RunTensors:
    """A source of runs of elements of the tensors of `source`, which it closes.

    parts  name → where the tensor is; inside a stored one
    where  the model as the user named it, for messages
    """

    def __init__(self, source: Tensors, parts: Mapping[str, Runs], where: str) -> None:
        self._source, self._where = source, where
        self._parts = {name: parts[name] for name in sorted(parts, key=natural_key)}
        self.specs: Mapping[str, TensorSpec] = {
            name: replace(source.specs[part.stored], name=name, shape=part.shape) for name, part in self._parts.items()
        }
        self._ends = {name: list(itertools.accumulate(n for _, n in part.runs)) for name, part in self._parts.items()}
        self.identity = digest([source.identity, *map(repr, self._parts.items())])
        self.paths: tuple[Path, ...] = source.paths
        self.sources = (source,)

    @property
    def state(self) -> str:
        return digest([self.identity, self._source.state])

    def natural_dtype(self, name: str) -> DType:
        return self._source.natural_dtype(self._part(name).stored)

    def preferred_rows(self, name: str) -> int:
        return self._source.preferred_rows(self._part(name).stored)

    def location(self, name: str) -> tuple[int, int] | None:
        part = self._part(name)
        place = self._source.location(part.stored) if len(part.runs) == 1 else None
        return None if place is None else (place[0], place[1] + part.runs[0][0] * self.specs[name].dtype.itemsize)

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        part = self._part(name)
        pieces = self._pieces(name, start_byte, nbytes)
        return tuple(extent for stored, n in pieces for extent in self._source.extents(part.stored, stored, n))

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        part, view = self._part(name), byte_view(out)
        check_range(self.specs[name], start_byte, len(view), self._where)
        done = 0
        if not len(view):
            self._source.read_into(part.stored, 0, view)
        for stored, n in self._pieces(name, start_byte, len(view)):
            self._source.read_into(part.stored, stored, view[done : done + n])
            done += n

    def _pieces(self, name: str, start_byte: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """First byte in the stored tensor, and number of bytes, of what the runs have of a range."""
        width, ends, end_byte = self.specs[name].dtype.itemsize, self._ends[name], start_byte + nbytes
        for k in range(bisect.bisect_right(ends, start_byte // width), len(ends)):
            first, n = self._parts[name].runs[k]
            run_start = (ends[k] - n) * width
            if run_start >= end_byte:
                return
            low, high = max(start_byte, run_start), min(end_byte, ends[k] * width)
            yield first * width + low - run_start, high - low

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._source.close()

    def _part(self, name: str) -> Runs:
        return self._parts[spec_of(self.specs, name, self._where).name]
