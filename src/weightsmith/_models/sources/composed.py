"""Sources made of others: the weights of a folder and of its subfolders as one, parts of tensors as tensors of their own.

And tensors in memory.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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


# ---- Parts of the tensors of another source as tensors of their own: rows of a joined projection, one layer of a stack


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Elements of a stored tensor that are a tensor.

    stored      the stored tensor's name
    shape       of the tensor, before it is transposed
    runs        (first element, number of elements) of each run, in the tensor's order; none is empty, unless it is the only
                one. (): all of the stored tensor, of any dtype
    transposed  a matrix [rows, columns] that is read as [columns, rows]
    """

    stored: str
    shape: tuple[int, ...]
    runs: tuple[tuple[int, int], ...] = ()
    transposed: bool = False


class PartTensors:
    """A source of parts of the tensors of `source`, which it closes. A transposed part is read as a whole.

    parts  name → where the tensor is; inside a stored one
    where  the model as the user named it, for messages
    """

    def __init__(self, source: Tensors, parts: Mapping[str, TensorPart], where: str) -> None:
        self._source, self._where = source, where
        self._parts = {name: parts[name] for name in sorted(parts, key=natural_key)}
        self.specs: Mapping[str, TensorSpec] = {name: self._spec(name, part) for name, part in self._parts.items()}
        self._ends = {name: list(itertools.accumulate(n for _, n in part.runs)) for name, part in self._parts.items()}
        self.identity = digest([source.identity, *map(repr, self._parts.items())])
        self.paths: tuple[Path, ...] = source.paths
        self.sources = (source,)

    def _spec(self, name: str, part: TensorPart) -> TensorSpec:
        shape = part.shape[::-1] if part.transposed else part.shape
        return replace(self._source.specs[part.stored], name=name, shape=shape)

    @property
    def state(self) -> str:
        return digest([self.identity, self._source.state])

    def natural_dtype(self, name: str) -> DType:
        return self._source.natural_dtype(self._part(name).stored)

    def preferred_rows(self, name: str) -> int:
        part = self._part(name)
        return max(1, part.shape[-1]) if part.transposed else self._source.preferred_rows(part.stored)

    def location(self, name: str) -> tuple[int, int] | None:
        part = self._part(name)
        place = None if part.transposed or len(part.runs) > 1 else self._source.location(part.stored)
        if place is None or not part.runs:
            return place
        return place[0], place[1] + part.runs[0][0] * self.specs[name].dtype.itemsize

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        part = self._part(name)
        if part.transposed and nbytes:
            start_byte, nbytes = 0, self.specs[name].nbytes
        pieces = self._pieces(name, start_byte, nbytes)
        return tuple(extent for stored, n in pieces for extent in self._source.extents(part.stored, stored, n))

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        part, view = self._part(name), byte_view(out)
        check_range(self.specs[name], start_byte, len(view), self._where)
        if part.transposed:
            np.frombuffer(view, np.uint8)[:] = self._transposed(name)[start_byte:][: len(view)]
        else:
            self._read(name, start_byte, view)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._source.close()

    def _part(self, name: str) -> TensorPart:
        return self._parts[spec_of(self.specs, name, self._where).name]

    def _transposed(self, name: str) -> np.ndarray:
        """All bytes of a transposed part."""
        spec = self.specs[name]
        raw = np.empty(spec.nbytes, np.uint8)
        self._read(name, 0, raw.data)
        numbers = raw.view(f"u{spec.dtype.itemsize}").reshape(spec.shape[::-1])  # whatever the bits mean, in any byte order
        return np.ascontiguousarray(numbers.T).reshape(-1).view(np.uint8)

    def _read(self, name: str, start_byte: int, view: memoryview) -> None:
        """Bytes of the part as they are stored."""
        stored_name, done = self._parts[name].stored, 0
        if not len(view):
            self._source.read_into(stored_name, 0, view)  # raises if the source is closed
        for stored, n in self._pieces(name, start_byte, len(view)):
            self._source.read_into(stored_name, stored, view[done : done + n])
            done += n

    def _pieces(self, name: str, start_byte: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """First byte in the stored tensor, and number of bytes, of what the runs have of a range."""
        runs, ends = self._parts[name].runs, self._ends[name]
        if not runs and nbytes:
            yield start_byte, nbytes
        width, end_byte = self.specs[name].dtype.itemsize, start_byte + nbytes
        for k in range(bisect.bisect_right(ends, start_byte // width), len(ends)):
            first, n = runs[k]
            run_start = (ends[k] - n) * width
            if run_start >= end_byte:
                return
            low, high = max(start_byte, run_start), min(end_byte, ends[k] * width)
            yield first * width + low - run_start, high - low


def renamed(source: Tensors, names: Mapping[str, str], where: str) -> PartTensors:
    """Some tensors of `source` under names of their own, as a source that closes it.

    names  name here → name in the source
    where  the model as the user named it, for messages
    """
    parts = {name: TensorPart(stored, source.specs[stored].shape) for name, stored in names.items()}
    return PartTensors(source, parts, where)


WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What torch.compile, FSDP and activation checkpointing add to names, which trainers may have saved."""


def unwrapped(source: Tensors, where: str, *, parallel: bool = False) -> Tensors:
    """The tensors without `WRAPPERS` in their names, as loaders know them; `source` itself if no name has one.

    parallel  without `module.`, too, if all names begin with it: DataParallel adds that

    Raises FormatError if two names become the same.
    """
    shared = "module." if parallel and all(name.startswith("module.") for name in source.specs) else ""
    text = "\n".join(source.specs)  # one search is faster than one for each name
    if not shared and "_module." not in text and "_orig_mod." not in text:
        return source
    names: dict[str, str] = {}
    for name in source.specs:
        plain = WRAPPERS.sub("", name.removeprefix(shared))
        if names.setdefault(plain, name) != name:
            what = f"{show(names[plain])} and {show(name)} are the same tensor for a loader"
            raise FormatError(what, where=where, fix="Save the model again, without the wrapper that added to its names.")
    return source if all(map(str.__eq__, names, names.values())) else renamed(source, names, where)


_OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names that TensorFlow's BERT gave its norms, and those that transformers loads them under, in every model."""


def with_current_norms(source: Tensors, where: str) -> Tensors:
    """The tensors with the current names of BERT's norms.

    `source` itself if no tensor has an old name, or if two would have the same.
    """
    old, text = tuple(_OLD_NORMS), "\n".join(source.specs)
    if not any(end in text for end in old):
        return source
    names = {}
    for name in source.specs:
        end = next((end for end in old if name.endswith(end)), "")
        names[name.removesuffix(end) + _OLD_NORMS.get(end, "")] = name
    return renamed(source, names, where) if len(names) == len(source.specs) else source
