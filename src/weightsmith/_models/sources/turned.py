"""Matrices of another source, under names of their own: transposed, or those of experts that are stored in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from weightsmith._base.files import Extent
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._files.hf_folder import natural_key
from weightsmith.abc.tensors import Tensors, check_range, digest, spec_of

if TYPE_CHECKING:
    from pathlib import Path

    from weightsmith.abc.tensors import Buffer


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A matrix in a stored tensor.

    stored      the tensor's name
    shape       of the matrix as it is stored: [rows, columns], or [numbers] of a vector
    first       number of its first element in the tensor
    transposed  it is read as [columns, rows]
    """

    stored: str
    shape: tuple[int, ...]
    first: int = 0
    transposed: bool = False


class TurnedMatrices:
    """A source of matrices in the tensors of `source`, which it closes. One that is transposed is read as a whole.

    parts  name → where the matrix is; inside its tensor
    where  the model as the user named it, for messages
    """

    def __init__(self, source: Tensors, parts: Mapping[str, MatrixPart], where: str) -> None:
        self._source, self._where = source, where
        self._parts = {name: parts[name] for name in sorted(parts, key=natural_key)}
        self.specs: Mapping[str, TensorSpec] = {name: self._spec(name, part) for name, part in self._parts.items()}
        self.identity = digest([source.identity, *map(repr, self._parts.items())])
        self.paths: tuple[Path, ...] = source.paths
        self.sources = (source,)

    def _spec(self, name: str, part: MatrixPart) -> TensorSpec:
        shape = part.shape[::-1] if part.transposed else part.shape
        return replace(self._source.specs[part.stored], name=name, shape=shape)

    @property
    def state(self) -> str:
        return digest([self.identity, self._source.state])

    def natural_dtype(self, name: str) -> DType:
        return self._source.natural_dtype(self._part(name).stored)

    def preferred_rows(self, name: str) -> int:
        part = self._part(name)
        return max(1, part.shape[-1]) if part.transposed else 1

    def location(self, name: str) -> tuple[int, int] | None:
        part = self._part(name)
        place = None if part.transposed else self._source.location(part.stored)
        return None if place is None else (place[0], place[1] + part.first * self.specs[name].dtype.itemsize)

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        part, spec = self._part(name), self.specs[name]
        first = part.first * spec.dtype.itemsize
        if part.transposed:
            return self._source.extents(part.stored, first, spec.nbytes) if nbytes else ()
        return self._source.extents(part.stored, first + start_byte, nbytes)

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        part, spec = self._part(name), self.specs[name]
        into = np.frombuffer(out, np.uint8)
        check_range(spec, start_byte, into.size, self._where)
        first = part.first * spec.dtype.itemsize
        if not part.transposed:
            self._source.read_into(part.stored, first + start_byte, out)
            return
        raw = np.empty(spec.nbytes, np.uint8)
        self._source.read_into(part.stored, first, raw)
        numbers = raw.view(f"u{spec.dtype.itemsize}").reshape(part.shape)  # whatever the bits mean, in any byte order
        into[:] = np.ascontiguousarray(numbers.T).reshape(-1).view(np.uint8)[start_byte:][: into.size]

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._source.close()

    def _part(self, name: str) -> MatrixPart:
        return self._parts[spec_of(self.specs, name, self._where).name]
