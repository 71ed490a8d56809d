"""State dicts: tensors in memory, read without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from weightsmith._base.files import Extent
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._files.views import View, read_into
from weightsmith.abc.tensors import check_range, closed, digest, spec_of

if TYPE_CHECKING:
    from pathlib import Path

    from weightsmith.abc.tensors import Buffer


class StateDict:
    """A source of numpy arrays or torch tensors with any strides and device. Nothing is copied before it is read.

    views  of the tensors, by name, in model order
    where  the model, for messages
    """

    paths: tuple[Path, ...] = ()

    def __init__(self, views: Mapping[str, View], where: str) -> None:
        self.specs: Mapping[str, TensorSpec] = {name: view.spec for name, view in views.items()}
        self._views = views
        self._where = where
        self._closed = False

    @property
    def identity(self) -> str:
        """A digest of names, dtypes and shapes."""
        return digest([str(spec) for spec in self.specs.values()])

    @property
    def state(self) -> str:
        """The identity. Work on tensors in memory is never resumed."""
        return self.identity

    def natural_dtype(self, name: str) -> DType:
        return spec_of(self.specs, name, self._where).dtype

    def preferred_rows(self, name: str) -> int:
        spec_of(self.specs, name, self._where)
        return 1

    def location(self, name: str) -> None:
        """No file."""
        spec_of(self.specs, name, self._where)

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        """No file."""
        spec_of(self.specs, name, self._where)
        return ()

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        spec = spec_of(self.specs, name, self._where)
        into = np.frombuffer(out, np.uint8)
        check_range(spec, start_byte, into.size, self._where)
        if self._closed:
            raise closed(self._where)
        width = spec.dtype.itemsize
        first, skip = divmod(start_byte, width)
        if skip == 0 and into.size % width == 0:
            read_into(self._views[name], first, into)
            return
        whole = np.empty(-(-(skip + into.size) // width) * width, np.uint8)
        read_into(self._views[name], first, whole)
        into[:] = whole[skip : skip + into.size]

    def check_unchanged(self) -> None:
        """No file to check."""

    def close(self) -> None:
        self._closed = True
