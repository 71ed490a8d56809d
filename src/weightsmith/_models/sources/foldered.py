"""The weights of a model's folder and of its subfolders as one source, as sentence-transformers stores its modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from weightsmith._base.errors import FormatError
from weightsmith._base.files import Extent, show
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._files.hf_folder import natural_key
from weightsmith.abc.tensors import Tensors, byte_view, check_range, digest, spec_of

if TYPE_CHECKING:
    from pathlib import Path

    from weightsmith.abc.tensors import Buffer


class Foldered:
    """A source `main` with the sources of subfolders: `2_Dense/linear.weight` is `linear.weight` of the subfolder `2_Dense`.

    main        closed with this one, as are the others
    subfolders  by path, relative to the folder of `main`
    where       the model as the user named it, for messages

    Raises FormatError if `main` has a tensor of the same name.
    """

    def __init__(self, main: Tensors, subfolders: Mapping[str, Tensors], where: str) -> None:
        self._sources, self._where = (main, *subfolders.values()), where
        self._places = {name: (main, name) for name in main.specs}
        for folder, source in subfolders.items():
            inner = {f"{folder}/{name}": (source, name) for name in source.specs}
            if taken := inner.keys() & self._places.keys():
                what = f"the model's own files have a tensor {show(min(taken))}, as if it were in {folder}"
                raise FormatError(what, where=where, fix="Download the model again from a source you trust.")
            self._places |= inner
        named = sorted(self._places, key=natural_key)
        self.specs: Mapping[str, TensorSpec] = {name: self._spec(name) for name in named}
        self.identity = digest([main.identity, *((folder, source.identity) for folder, source in subfolders.items())])
        self.paths: tuple[Path, ...] = tuple(path for source in self._sources for path in source.paths)

    def _spec(self, name: str) -> TensorSpec:
        source, inner_name = self._places[name]
        spec = source.specs[inner_name]
        return spec if inner_name == name else replace(spec, name=name)

    @property
    def state(self) -> str:
        return digest([self.identity, *(source.state for source in self._sources)])

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
        for source in self._sources:
            source.check_unchanged()

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _place(self, name: str) -> tuple[Tensors, str]:
        return self._places[spec_of(self.specs, name, self._where).name]
