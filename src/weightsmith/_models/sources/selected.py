"""Some tensors of another source, under names of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from weightsmith._base.files import Extent
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._files.hf_folder import natural_key
from weightsmith.abc.tensors import Tensors, check_range, digest, spec_of

if TYPE_CHECKING:
    from pathlib import Path

    from weightsmith.abc.tensors import Buffer


class Selected:
    """A source of some tensors of `source`, which it closes.

    names  name here → name in the source
    where  the model as the user named it, for messages
    """

    def __init__(self, source: Tensors, names: Mapping[str, str], where: str) -> None:
        self._source, self._where = source, where
        self._names = {name: names[name] for name in sorted(names, key=natural_key)}
        self.specs: Mapping[str, TensorSpec] = {
            name: replace(source.specs[stored], name=name) for name, stored in self._names.items()
        }
        self.identity = digest([source.identity, *map(repr, self._names.items())])
        self.paths: tuple[Path, ...] = source.paths

    @property
    def state(self) -> str:
        return digest([self.identity, self._source.state])

    def natural_dtype(self, name: str) -> DType:
        return self._source.natural_dtype(self._stored(name))

    def preferred_rows(self, name: str) -> int:
        return self._source.preferred_rows(self._stored(name))

    def location(self, name: str) -> tuple[int, int] | None:
        return self._source.location(self._stored(name))

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        return self._source.extents(self._stored(name), start_byte, nbytes)

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        stored = self._stored(name)
        check_range(self.specs[name], start_byte, np.frombuffer(out, np.uint8).size, self._where)
        self._source.read_into(stored, start_byte, out)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._source.close()

    def _stored(self, name: str) -> str:
        return self._names[spec_of(self.specs, name, self._where).name]
