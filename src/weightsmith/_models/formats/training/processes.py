"""What checkpoints of several processes have in common: tensors of which each part is elsewhere, and a file for each process.

A tensor is a set of boxes that fill it, each a strided view in a file. Its elements may also be counted as one row, and then
its boxes are runs of elements, which need not be whole rows.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import FormatError, raised_at
from weightsmith._base.files import DAMAGED, Extent, FileState, of_tensor, show
from weightsmith._base.tensors import TensorSpec
from weightsmith._files.pytorch import Archive, StoredView, boxes_of_range, gather_box, simplify, view_of
from weightsmith._files.state_pickle import Storage, Tensor, describe
from weightsmith._models.sources.files import FileTensors, SourceFile

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_CELLS = 1 << 20
"""The most cells of the grid that the edges of a tensor's boxes make: 8 dimensions cut in 5, one dimension cut in a million."""
FIX = "Copy the checkpoint again, with the files of all processes: some are damaged, or of another run."


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor.

    file     it is in
    start    offset of its first element in the file, in bytes
    first    place of its first element in the tensor's grid
    shape    of the part, with as many dimensions
    strides  in elements, none negative
    """

    file: Path
    start: int
    first: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """Its bytes follow each other in the file."""
        return math.prod(self.shape) <= 1 or simplify(self.shape, self.strides)[1] == (1,)


@dataclass(frozen=True, slots=True)
class BoxedTensor:
    """A tensor in parts.

    spec   name, dtype, shape
    grid   the shape that the boxes are parts of: the tensor's, or (its size,)
    boxes  that fill the grid, sorted; `fill` makes sure of it
    file   the first file with a part, for messages
    """

    spec: TensorSpec
    grid: tuple[int, ...]
    boxes: tuple[Box, ...]
    file: Path


def fill(spec: TensorSpec, grid: tuple[int, ...], boxes: Sequence[Box], file: Path) -> BoxedTensor:
    """The tensor of these boxes. Raises FormatError unless each element is in exactly one.

    >>> from weightsmith._base.tensors import DTYPES
    >>> path = Path("w.pt")
    >>> fill(TensorSpec("w", DTYPES["F32"], (2, 2)), (4,), [Box(path, 0, (0,), (3,), (1,))], path)
    Traceback (most recent call last):
    weightsmith._base.errors.FormatError: tensor 'w': its parts have 3 of 4 elements
      -> Copy the checkpoint again, with the files of all processes: some are damaged, or of another run.
    """
    parts = sorted((box for box in boxes if 0 not in box.shape), key=lambda box: box.first)
    for box in parts:
        if any(start < 0 or start + n > end for start, n, end in zip(box.first, box.shape, grid, strict=True)):
            what = f"tensor {show(spec.name)}: its part at {show(box.first)} of shape {show(box.shape)} is not in {show(grid)}"
            raise FormatError(what, where=str(box.file), fix=FIX)
    count = sum(math.prod(box.shape) for box in parts)
    if count != math.prod(grid):
        raise FormatError(f"tensor {show(spec.name)}: its parts have {count:,} of {math.prod(grid):,} elements", fix=FIX)
    if len(parts) > 1 and _overlap(grid, parts):
        raise FormatError(f"tensor {show(spec.name)}: two of its {len(parts):,} parts overlap", where=str(file), fix=FIX)
    return BoxedTensor(spec, grid, tuple(parts), file)


def _overlap(grid: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether two boxes share an element: each is a run of cells of the grid that all edges make."""
    if len(grid) == 1:
        return any(a.first[0] + a.shape[0] > b.first[0] for a, b in itertools.pairwise(boxes))
    import numpy as np

    edges = [sorted({edge for box in boxes for edge in (box.first[k], box.first[k] + box.shape[k])}) for k in range(len(grid))]
    if math.prod(map(len, edges)) > MAX_CELLS:
        return True  # no program cuts a tensor so
    taken = np.zeros([len(axis) for axis in edges], np.bool_)
    for box in boxes:
        cells = tuple(
            slice(bisect.bisect_left(axis, start), bisect.bisect_left(axis, start + n))
            for axis, start, n in zip(edges, box.first, box.shape, strict=True)
        )
        if taken[cells].any():
            return True
        taken[cells] = True
    return False


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a box has of a range.

    box     the box
    start   offset of the first element in the file, in bytes
    shape   of the piece
    target  where it goes: elements of the range from the first on, in the form of the box of the range
    """

    box: Box
    start: int
    shape: tuple[int, ...]
    target: tuple[int, tuple[int, ...], tuple[slice, ...]]


class BoxedTensors(FileTensors[BoxedTensor]):
    """A source of tensors in parts."""

    def preferred_rows(self, name: str) -> int:
        tensor = self._find(name)
        if all(box.contiguous for box in tensor.boxes):
            return 1
        row_bytes = max(1, tensor.spec.nbytes // max(1, tensor.spec.shape[0]))
        return max(1, min(tensor.spec.nbytes, 2 << 20) // row_bytes)  # a read of scattered rows may scan a whole box

    def location(self, name: str) -> tuple[int, int] | None:
        boxes = self._find(name).boxes
        return self._files.location(boxes[0].file, boxes[0].start) if len(boxes) == 1 and boxes[0].contiguous else None

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        return self._extents(self._find(name), start_byte, nbytes)

    def _extents(self, tensor: BoxedTensor, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        width = tensor.spec.dtype.itemsize
        extents: list[Extent] = []
        for piece in _pieces(tensor, start_byte // width, -(-(start_byte + nbytes) // width)):
            steps = sum((n - 1) * stride for n, stride in zip(piece.shape, piece.box.strides, strict=True))
            extents += self._files.extents(piece.box.file, piece.start, (steps + 1) * width)
        return tuple(extents)

    def _read(self, tensor: BoxedTensor, start_byte: int, out: memoryview) -> None:
        import numpy as np

        if not len(out):
            return
        width = tensor.spec.dtype.itemsize
        first, skip = divmod(start_byte, width)
        n = -(-(skip + len(out)) // width)
        if skip == 0 and n * width == len(out):
            self._fill(tensor, first, np.frombuffer(out, f"u{width}"))
            return
        whole = np.empty(n, f"u{width}")
        self._fill(tensor, first, whole)
        out[:] = whole.data.cast("B")[skip : skip + len(out)]

    def _fill(self, tensor: BoxedTensor, first: int, out: npt.NDArray[np.unsignedinteger[Any]]) -> None:
        for piece in _pieces(tensor, first, first + len(out)):
            at, shape, slices = piece.target
            places: list[Any] = [..., *slices]  # an array even without dimensions
            view = out[at : at + math.prod(shape)].reshape(shape)[tuple(places)]
            read = partial(self._files.read, piece.box.file, tensor.spec.name)
            simple = view.size <= 1 or simplify(piece.shape, piece.box.strides)[1] == (1,)
            if simple and view.flags.c_contiguous:
                read(piece.start, view.reshape(-1).data.cast("B"))
            else:
                gather_box(read, piece.start, tuple(stride * out.itemsize for stride in piece.box.strides), view)


def _pieces(tensor: BoxedTensor, first: int, last: int) -> Iterator[_Piece]:
    """What the boxes have of elements first … last of a tensor."""
    done, width = 0, tensor.spec.dtype.itemsize
    for index, shape in boxes_of_range(tensor.grid, first, last):
        ends = tuple(map(sum, zip(index, shape, strict=True)))
        for box in tensor.boxes:
            if shape and box.first[0] >= ends[0]:
                break  # they are sorted
            low = tuple(map(max, index, box.first))
            high = tuple(min(end, start + n) for end, start, n in zip(ends, box.first, box.shape, strict=True))
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            steps = sum((a - start) * stride for a, start, stride in zip(low, box.first, box.strides, strict=True))
            slices = tuple(slice(a - i, b - i) for a, b, i in zip(low, high, index, strict=True))
            size = tuple(b - a for a, b in zip(low, high, strict=True))
            yield _Piece(box, box.start + steps * width, size, (done, shape, slices))
        done += math.prod(shape)


# ---- A file for each process


MISSING = "Get the missing files: each process of the run has written its own."
_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Classes:
    """Names of classes that pickles may have besides tensors: those that begin so, and single ones."""

    starts: tuple[str, ...]
    single: tuple[str, ...] = ()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name.startswith(self.starts) or name in self.single)


@dataclass(slots=True)
class ProcessFile:
    """A file of a process: what it holds, and the storages that were named in it."""

    path: Path
    state: FileState
    archive: Archive
    seen: dict[str, Storage] = field(default_factory=dict)

    def view(self, name: str, tensor: Any) -> StoredView:
        """A tensor of the file, checked. Raises FormatError and Unsupported."""
        with raised_at(str(self.path)):
            if type(tensor) is not Tensor:
                raise FormatError(f"{show(name)} is {describe(tensor)}, not a tensor", fix=DAMAGED)
            with of_tensor(name):
                return view_of(name, tensor, self.path, self.archive, self.seen)


class RankTensors(BoxedTensors):
    """The tensors of all processes. Where each has all of a tensor, reading it compares what they have.

    copies  name → the tensor, of each process that has all of it
    """

    def __init__(self, copies: Mapping[str, tuple[BoxedTensor, ...]], files: Sequence[SourceFile], where: str) -> None:
        super().__init__({name: tensors[0] for name, tensors in copies.items()}, files, where)
        self._copies = copies

    def location(self, name: str) -> tuple[int, int] | None:
        location = super().location(name)
        return location if len(self._copies[name]) == 1 else None

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        self._find(name)
        return tuple(extent for tensor in self._copies[name] for extent in self._extents(tensor, start_byte, nbytes))

    def _read(self, tensor: BoxedTensor, start_byte: int, out: memoryview) -> None:
        super()._read(tensor, start_byte, out)
        for copy in self._copies[tensor.spec.name][1:]:
            for i in range(0, len(out), _COMPARED_BYTES):
                values = out[i : i + _COMPARED_BYTES]
                others = memoryview(bytearray(len(values)))
                super()._read(copy, start_byte + i, others)
                if values != others:
                    what = f"tensor {show(tensor.spec.name)} has other values than in {tensor.file.name}"
                    raise FormatError(f"{what}, and each file has all of it", where=str(copy.file), fix=FIX)
