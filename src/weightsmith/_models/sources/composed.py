"""Sources as one: the weights of a folder and of its subfolders. And tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from weightsmith._base.errors import FormatError
from weightsmith._base.files import Extent, show
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._files.arrays import View, read_into
from weightsmith._files.hf_folder import natural_key
from weightsmith.abc.tensors import Tensors, byte_view, check_range, closed, digest, spec_of

if TYPE_CHECKING:
    from pathlib import Path

    from weightsmith.abc.tensors import Buffer


# ---- The weights of a model's folder and of its subfolders as one source, as sentence-transformers stores its modules, and
# diffusers the parts of a pipeline


class Foldered:
    """A source `main` with the sources of subfolders: `2_Dense/linear.weight` is `linear.weight` of the subfolder `2_Dense`.

    main        closed with this one, as are the others; None: the folder itself has no weights
    subfolders  by path, relative to the folder of `main`; "": tensors that are in the folder too
    where       the model as the user named it, for messages

    Raises FormatError if `main` has a tensor of the same name.
    """

    def __init__(self, main: Tensors | None, subfolders: Mapping[str, Tensors], where: str) -> None:
        self.sources, self._where = (*([] if main is None else [main]), *subfolders.values()), where
        self._places = {} if main is None else {name: (main, name) for name in main.specs}
        for folder, source in subfolders.items():
            inner = {f"{folder}/{name}" if folder else name: (source, name) for name in source.specs}
            if taken := inner.keys() & self._places.keys():
                what = f"the model's own files have a tensor {show(min(taken))}, as if it were in {folder}"
                raise FormatError(what, where=where, fix="Download the model again from a source you trust.")
            self._places |= inner
        named = sorted(self._places, key=natural_key)
        self.specs: Mapping[str, TensorSpec] = {name: self._spec(name) for name in named}
        outer = "" if main is None else main.identity
        self.identity = digest([outer, *((folder, source.identity) for folder, source in subfolders.items())])
        self.paths: tuple[Path, ...] = tuple(path for source in self.sources for path in source.paths)

    def _spec(self, name: str) -> TensorSpec:
        source, inner_name = self._places[name]
        spec = source.specs[inner_name]
        return spec if inner_name == name else replace(spec, name=name)

    @property
    def state(self) -> str:
        return digest([self.identity, *(source.state for source in self.sources)])

    def natural_dtype(self, name: str) -> DType:
        source, inner_name = self._place(name)
        return source.natural_dtype(inner_name)

    def preferred_rows(self, name: str) -> int:
        source, inner_name = self._place(name)
        return source.preferred_rows(inner_name)

    def location(self, name: str) -> tuple[int, int] | None:
        source, inner_name = self._place(name)
        return source.location(inner_name)

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        source, inner_name = self._place(name)
        return source.extents(inner_name, start_byte, nbytes)

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        source, inner_name = self._place(name)
        if inner_name != name:  # an error names the tensor as this source does
            check_range(self.specs[name], start_byte, len(byte_view(out)), self._where)
        source.read_into(inner_name, start_byte, out)

    def check_unchanged(self) -> None:
        for source in self.sources:
            source.check_unchanged()

    def close(self) -> None:
        for source in self.sources:
            source.close()

    def _place(self, name: str) -> tuple[Tensors, str]:
        return self._places[spec_of(self.specs, name, self._where).name]


# ---- State dicts: tensors in memory, read without a copy


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
