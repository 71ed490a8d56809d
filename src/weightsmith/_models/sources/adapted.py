"""A source with an adapter applied, computed on read: W + scaling · B @ A; with DoRA, its rows scaled to given norms; or the
change of another kind of adapter, row by row.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import FormatError
from weightsmith._base.files import Extent
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._files.hf_folder import natural_key
from weightsmith.abc.adapter import AdapterKind, AdapterModule
from weightsmith.abc.tensors import StoredAs, Tensors, check_range, digest, read, spec_of

if TYPE_CHECKING:
    from pathlib import Path

    from weightsmith.abc.tensors import Buffer

FACTORS_BYTES = 128 << 20
"""Limit of the factors that an adapted source keeps in memory, besides those in use."""

NORM_ELEMENTS = 1 << 18
"""Elements whose squares are summed at once for the norms of columns: a fixed number, as the sum depends on it."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Update:
    """scaling · B @ A, or its transpose, to add to a matrix.

    a, b        the adapter's tensors A [rank, inputs] and B [outputs, rank]
    scaling     factor on the product
    transposed  the matrix is [inputs, outputs]: (B @ A)ᵀ is added
    magnitude   the adapter's tensor of the norms that the rows of the sum are scaled to (DoRA); "": they remain as they are
    columns     the norms are of columns instead; of a convolution, of all columns of an input channel together
    rows        first row and number of rows of the matrix in its tensor, whose last dimension is the columns; None: all of it
    expert      number, and how many there are: A is [experts · rank, inputs], B [outputs, rank · experts], the factors of all
    part        first row and number of rows of the product that are added; None: all
    grouped     B is [outputs, experts · rank]
    """

    a: str
    b: str
    scaling: float
    transposed: bool
    magnitude: str = ""
    rows: tuple[int, int] | None = None
    expert: tuple[int, int] = (0, 1)
    part: tuple[int, int] | None = None
    grouped: bool = False
    columns: bool = False


@dataclass(frozen=True, slots=True)
class RowChange:
    """What an adapter of another kind than LoRA does to the rows of a matrix.

    kind        which function does it; `code` is the identity of one that an installed package brings
    module      what the function is told; the names of its parts are those of the adapter's tensors
    transposed  the matrix is stored [inputs, outputs]
    rows        first row and number of rows of the matrix in its tensor; None: all of it
    """

    kind: AdapterKind
    module: AdapterModule
    transposed: bool = False
    rows: tuple[int, int] | None = None
    code: str = ""

    def __repr__(self) -> str:
        return f"RowChange({self.kind.title!r}, {self.module!r}, {self.transposed}, {self.rows}, {self.code!r})"

    @property
    def tensors(self) -> tuple[str, ...]:
        """The adapter's tensors that it needs."""
        return tuple(spec.name for spec in self.module.parts.values())


@dataclass(frozen=True, slots=True)
class AdaptedTensor:
    """The origin of a tensor of an adapted source.

    base         the corresponding tensor of the base, which determines the output dtype
    replacement  the adapter's tensor that replaces it; "" for none
    updates      what is added to it, or to matrices in it: in the order of their rows, which do not overlap
    changes      what changes its rows after that; matrices in it, or all of it
    """

    base: str
    replacement: str = ""
    updates: tuple[Update, ...] = ()
    changes: tuple[RowChange, ...] = ()

    @property
    def computed(self) -> bool:
        """Whether its numbers are not those of a file."""
        return bool(self.updates or self.changes)


class Adapted:
    """A source `base` with an adapter applied.

    Tensors with updates are F32 (F64 if the base tensor is F64): base plus update, rounded once, so a merge does not lose
    the part of the update that 16 bits cannot hold. All others are read unchanged.

    base, adapter  the sources; closed with this one
    origins        name → origin of the tensor
    where          the model as the user named it, for messages
    """

    def __init__(self, base: Tensors, adapter: Tensors, origins: Mapping[str, AdaptedTensor], where: str) -> None:
        self._base, self._adapter, self._where = base, adapter, where
        self.sources = base, adapter
        self._origins = {name: origins[name] for name in sorted(origins, key=natural_key)}
        self.specs: Mapping[str, TensorSpec] = {name: self._spec(name, origin) for name, origin in self._origins.items()}
        changes = [repr((name, origin)) for name, origin in self._origins.items() if origin != AdaptedTensor(name)]
        self.identity = digest([base.identity, adapter.identity, changes])
        self.paths: tuple[Path, ...] = tuple(dict.fromkeys((*base.paths, *adapter.paths)))
        self._kept = _Recent(FACTORS_BYTES)

    @property
    def state(self) -> str:
        return digest([self.identity, self._base.state, self._adapter.state])

    def stored_as(self, of_base: Callable[[str], StoredAs | None], name: str) -> StoredAs | None:
        """How the base's files have a tensor; of one that the adapter changes, only in which types."""
        origin = self._origin(name)
        in_file = of_base(origin.base)
        return in_file if in_file is None or origin == AdaptedTensor(origin.base) else replace(in_file, encoding="")

    def natural_dtype(self, name: str) -> DType:
        return self._base.natural_dtype(self._origin(name).base)

    def preferred_rows(self, name: str) -> int:
        source, stored = self._stored(self._origin(name))
        return source.preferred_rows(stored)

    def location(self, name: str) -> tuple[int, int] | None:
        origin = self._origin(name)
        source, stored = self._stored(origin)
        return None if origin.computed else source.location(stored)

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        origin, spec = self._origin(name), self.specs[name]
        source, stored = self._stored(origin)
        if not origin.computed:
            return source.extents(stored, start_byte, nbytes)
        width, before = spec.dtype.itemsize, source.specs[stored].dtype.itemsize
        extents = source.extents(stored, start_byte // width * before, -(-nbytes // width) * before)
        factors = dict.fromkeys(part for u in origin.updates for part in (u.a, u.b, u.magnitude) if part)
        factors |= dict.fromkeys(part for change in origin.changes for part in change.tensors)
        specs = self._adapter.specs
        return (*extents, *(part for factor in factors for part in self._adapter.extents(factor, 0, specs[factor].nbytes)))

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        origin, spec = self._origin(name), self.specs[name]
        source, stored = self._stored(origin)
        into = np.frombuffer(out, np.uint8)
        check_range(spec, start_byte, into.size, self._where)
        if not origin.computed:
            source.read_into(stored, start_byte, out)
            return
        if origin.changes:
            self._read_changed(name, start_byte, into)
            return
        width, cols = spec.dtype.itemsize, _columns(spec, origin.updates[0])
        first, end = start_byte // width, -(-(start_byte + into.size) // width)
        magnitude = origin.updates[0].magnitude
        if magnitude:  # a norm is of a whole row
            first, end = first // cols * cols, -(-end // cols) * cols
        values = self._sum(origin, spec, first, end)
        if magnitude:
            rows = values.reshape(-1, cols)
            if origin.updates[0].columns:
                rows *= self._column_scales(name, origin, spec)
            else:
                norms = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1))
                rows *= (self._norms(magnitude)[first // cols : end // cols] / np.where(norms > 0, norms, 1.0))[:, None]
        into[:] = values.view(np.uint8)[start_byte - first * width :][: into.size]

    def _sum(self, origin: AdaptedTensor, spec: TensorSpec, first: int, end: int) -> Array:
        """Elements `first` to `end` of a tensor with its updates."""
        source, stored = self._stored(origin)
        before = source.specs[stored].dtype
        raw = np.empty((end - first) * before.itemsize, np.uint8)
        source.read_into(stored, first * before.itemsize, raw)
        values = np.empty(end - first, spec.dtype.numpy)
        self._add(origin, raw, before, first, _columns(spec, origin.updates[0]), values)
        return values

    def _norms(self, magnitude: str) -> Array:
        """The norms of DoRA, float64 [rows or input channels]."""
        return read(self._adapter, magnitude).astype(np.float64).reshape(-1)

    def _column_scales(self, name: str, origin: AdaptedTensor, spec: TensorSpec) -> Array:
        """What each column is multiplied with so that columns have their norms. Reads the whole tensor once, block by block."""

        def make() -> tuple[Array]:
            cols = spec.size // spec.shape[0]
            squares = np.zeros(cols)
            block_rows = max(1, NORM_ELEMENTS // cols)
            for first in range(0, spec.shape[0], block_rows):
                end = min(first + block_rows, spec.shape[0])
                rows = self._sum(origin, spec, first * cols, end * cols).reshape(-1, cols)
                squares += np.square(rows, dtype=np.float64).sum(axis=0)
            norms = np.sqrt(squares.reshape(spec.shape[1], -1).sum(axis=1))
            scales = self._norms(origin.updates[0].magnitude) / np.where(norms > 0, norms, 1.0)
            return (np.repeat(scales, cols // len(scales)),)

        return self._kept.get((name, "columns"), make)[0]

    def _read_changed(self, name: str, start_byte: int, into: Array) -> None:
        """Fill `into` with bytes of a tensor whose rows change: computes whole rows, or all of one stored [inputs, outputs]."""
        origin, spec = self._origin(name), self.specs[name]
        (source, stored), width = self._stored(origin), spec.dtype.itemsize
        cols = spec.size // (spec.shape[0] if spec.shape else 1) if origin.changes[0].rows is None else spec.shape[-1]
        if any(change.transposed for change in origin.changes):
            whole = self._kept.get((name, "whole"), lambda: (self._changed(origin, read(source, stored), 0, spec),))[0]
            into[:] = whole.reshape(-1).view(np.uint8)[start_byte:][: into.size]
            return
        if spec.size == spec.shape[0]:  # a bias: its elements are rows
            cols = 1
        first, end = start_byte // width // cols, -(-(start_byte + into.size) // (width * cols))
        before = source.specs[stored].dtype
        raw = np.empty((end - first) * cols * before.itemsize, np.uint8)
        source.read_into(stored, first * cols * before.itemsize, raw)
        rows = self._changed(origin, raw.view(before.numpy).reshape(-1, cols), first, spec)
        into[:] = rows.reshape(-1).view(np.uint8)[start_byte - first * cols * width :][: into.size]

    def _changed(self, origin: AdaptedTensor, stored: Array, first: int, spec: TensorSpec) -> Array:
        """Rows of a tensor from number `first` on, changed, in the dtype of the result."""
        values = np.ascontiguousarray(stored, np.float64)
        for change in origin.changes:
            begin, count = change.rows or (0, first + len(values))
            start, stop = max(begin, first), min(begin + count, first + len(values))
            if start >= stop:
                continue
            rows = np.ascontiguousarray(values.T) if change.transposed else values[start - first : stop - first]
            change.kind.apply(change.module, self._arrays_of(change), rows, start - begin)
            if change.transposed:
                values = np.ascontiguousarray(rows.T)
        return values.astype(spec.dtype.numpy, copy=False)

    def _arrays_of(self, change: RowChange) -> tuple[Array, ...]:
        def make() -> tuple[Array, ...]:
            parts = {part: read(self._adapter, spec.name).astype(np.float64) for part, spec in change.module.parts.items()}
            try:
                return change.kind.prepare(change.module, parts)
            except ValueError as error:
                fix = "Repair it, or download the adapter again."
                raise FormatError(f"{change.module.name}: {error}", where=str(self._adapter.paths[0]), fix=fix) from None

        return self._kept.get((change.kind.title, change.module.name, change.module.tensor), make)

    def _add(self, origin: AdaptedTensor, raw: Array, before: DType, first: int, cols: int, values: Array) -> None:
        """values = the elements `raw` from number `first` of a tensor, stored as `before`, with its updates."""
        from weightsmith._kernels.codecs import BLOCK, Encoded
        from weightsmith._kernels.combine import LowRank, add_low_rank

        row, total = np.empty(BLOCK, values.dtype), np.empty(BLOCK)
        nothing = np.empty((0, 0)), np.empty((0, cols), np.float32)
        done, size = 0, before.itemsize

        def fill(start: int, n: int, left: Array, right: Array, scaling: float) -> None:
            """The next `n` values, which begin at element `start` of the matrix that left @ right is added to."""
            nonlocal done
            weight = Encoded(raw[done * size :], before.code)
            add_low_rank(weight, start, n, LowRank(left, right, float(scaling)), values[done:], row, total)
            done += n

        for update in origin.updates:
            begin, rows = update.rows or (0, -1)
            start, stop = begin * cols - first, (begin + rows) * cols - first if rows >= 0 else values.size
            if stop <= done or start >= values.size:
                continue
            if start > done:
                fill(0, start - done, *nothing, 0.0)
            fill(done - start, min(stop, values.size) - done, *self._factors_of(update), update.scaling)
        if done < values.size:
            fill(0, values.size - done, *nothing, 0.0)

    def check_unchanged(self) -> None:
        self._base.check_unchanged()
        self._adapter.check_unchanged()

    def close(self) -> None:
        self._base.close()
        self._adapter.close()

    def _origin(self, name: str) -> AdaptedTensor:
        return self._origins[spec_of(self.specs, name, self._where).name]

    def _stored(self, origin: AdaptedTensor) -> tuple[Tensors, str]:
        """The source of the unmodified tensor, and its name there."""
        return (self._adapter, origin.replacement) if origin.replacement else (self._base, origin.base)

    def _spec(self, name: str, origin: AdaptedTensor) -> TensorSpec:
        source, stored = self._stored(origin)
        spec = replace(source.specs[stored], name=name)
        return spec if not origin.computed or spec.dtype.name == "F64" else replace(spec, dtype=DTYPES["F32"])

    def _factors_of(self, update: Update) -> tuple[Array, Array]:
        """The factors of an update to a matrix [rows, cols]: left, float64 [rows, rank], and right, float32 [rank, cols]."""

        def make() -> tuple[Array, Array]:
            number, experts = update.expert
            a, b = (self._factor(name, keep=experts > 1) for name in (update.a, update.b))
            a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)  # a convolution's are matrices too
            rank = a.shape[0] // experts
            expert_ranks = slice(number * rank, (number + 1) * rank)
            a, b = a[expert_ranks], b[:, expert_ranks] if update.grouped else b[:, number::experts]
            left, right = (a.T, b.T) if update.transposed else (b, a)
            if update.part is not None:
                left = left[update.part[0] :][: update.part[1]]
            return np.ascontiguousarray(left, np.float64), np.ascontiguousarray(right)

        left, right = self._kept.get(update, make)
        return left, right

    def _factor(self, name: str, *, keep: bool) -> Array:
        """A tensor of the adapter. keep: others are made of it, too."""

        def make() -> tuple[Array]:
            return (read(self._adapter, name).astype(np.float32, copy=False),)

        (array,) = self._kept.get(name, make) if keep else make()
        return array


def _columns(spec: TensorSpec, update: Update) -> int:
    """Columns of the matrix that is updated: of a whole tensor, such as the kernel of a convolution, all of a row."""
    return spec.shape[-1] if update.rows is not None else spec.size // spec.shape[0]


class _Recent:
    """The arrays that were asked for last, of a limited size together. Threads share them."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes
        self._kept: OrderedDict[Any, tuple[Array, ...]] = OrderedDict()
        self._lock = threading.RLock()  # arrays are made of others that are kept here

    def get(self, key: object, make: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = arrays = make()
                self._left -= sum(array.nbytes for array in arrays)
                while self._left < 0 and len(self._kept) > 1:
                    oldest = next(iter(self._kept))
                    self._left += sum(array.nbytes for array in self._kept.pop(oldest))
            self._kept.move_to_end(key)
            return self._kept[key]
