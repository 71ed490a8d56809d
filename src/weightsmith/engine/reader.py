"""From a plan and its inputs to bytes and jobs: how a step is cut, what its job is, and what it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weightsmith import methods
from weightsmith.engine.buffers import Buffers
from weightsmith.engine.results import Results
from weightsmith.engine.tiles import ALIGNED_BYTES, INPUTS_BYTES, TILE_BYTES, Cut, cut, tile_grains
from weightsmith.formats.files import Extent
from weightsmith.jobs.job import Bytes, Job, Matrix
from weightsmith.jobs.operations import OPERATIONS
from weightsmith.plans import PRODUCTS, Block, Gather, Plan, Read, Step
from weightsmith.tensors import DType, TensorSpec, grain_elements

MAX_RUNS = 10_000
"""Of rows of a gather that are counted one by one; of more, all that lies between them counts too."""


class Source(Protocol):
    """What the engine needs of an input."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files of the source."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name → dtype and shape."""

    def location(self, name: str) -> tuple[int, int] | None:
        """File descriptor and offset of a tensor that is a run of bytes in a file; None for any other."""

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        """The parts of remote files that are read for these bytes of a tensor; () if all of it is on this disk."""

    def preferred_rows(self, name: str) -> int:
        """Rows that are best read together; 1 where it makes no difference."""

    def read_into(self, name: str, start_byte: int, out: memoryview | Bytes) -> None:
        """Fill `out` with the tensor's bytes from `start_byte` on. Called from many threads."""


class Reader:
    """Cuts and reads the steps of one plan. Thread-safe."""

    def __init__(
        self,
        plan: Plan,
        inputs: Sequence[Source],
        results: Results,
        tile_bytes: int = TILE_BYTES,
        aligned_bytes: int = ALIGNED_BYTES,
    ) -> None:
        """
        tile_bytes     of each input in a tile
        aligned_bytes  the same, of tiles with as many rows as an input prefers

        The result depends on neither.
        """
        self.plan = plan
        self.inputs = inputs
        self.results = results
        self._tile_bytes = tile_bytes
        self._aligned_bytes = aligned_bytes

    def source(self, read: Read) -> Source:
        """Where a read takes its tensor from."""
        return self.results if read.model == PRODUCTS else self.inputs[read.model]

    def dtype(self, read: Read) -> DType:
        """Of the tensor that is read."""
        return self.source(read).specs[read.tensor].dtype

    def cuts(self, step: Step, align_rows: int = 1) -> list[Cut]:
        """The tiles of a step's tensor.

        align_rows  a tile begins at a multiple of so many rows

        A tile has as many rows as an input prefers, or a multiple, rounded up to grains, where that takes no more than
        `aligned_bytes` of each input, and INPUTS_BYTES of all.
        """
        shape = step.out.shape
        grain = grain_elements(shape)
        dtypes = [*map(self.dtype, step.inputs), step.out.dtype]
        rows = max(1, grain // max(1, shape[-1] if shape else 1))
        least = align_rows // math.gcd(align_rows, rows)
        grains = _round_up(tile_grains(grain, dtypes, self._tile_bytes), least)
        preferred = max((self.source(read).preferred_rows(read.tensor) for read in step.inputs), default=1)
        if preferred > 1:
            block = _round_up(-(-preferred // rows), least)
            allowed = min(self._aligned_bytes, INPUTS_BYTES // max(1, len(step.inputs)))
            if block <= max(grains, tile_grains(grain, dtypes, allowed)):
                grains = max(1, grains // block) * block
        return cut(step.out.size, grain, grains)

    def matrix(self, step: Step) -> Matrix:
        """The matrix that the job of a step works on."""
        settings = self.plan.settings[step.settings]
        shape = step.out.shape
        return Matrix(
            name=step.out.name,
            size=step.out.size,
            cols=shape[-1] if shape else 1,
            grain=grain_elements(shape),
            codes=np.array([self.dtype(read).code for read in step.inputs], np.int64),
            out_code=step.out.dtype.code,
            base=step.base,
            shared=settings.shared,
            models=settings.models,
            seed=self.plan.seed,
            inputs=tuple(read.model for read in step.inputs),
            places=settings.places or tuple(range(len(step.inputs))),
            results=tuple(map(self.results.of, step.needs)),
            shape=shape,
            role=step.role,
            layer=step.layer,
        )

    def job(self, step: Step) -> Job:
        """The job of a step that is not copied."""
        return (methods.get(step.op).job if step.merges else OPERATIONS[step.op])(self.matrix(step))

    def read(self, reads: Sequence[Read], first: int, size: int, buffers: Buffers) -> tuple[Bytes, int]:
        """The bytes of elements first … first + size of all of `reads`, and how many were read."""
        widths = [self.dtype(read).itemsize for read in reads]
        raw = buffers.raw(len(widths), size * max(widths, default=0))
        for row, read, width in zip(raw, reads, widths, strict=True):
            self.fill(read, first, row[: size * width])
        return raw, size * sum(widths)

    def fill(self, read: Read, first: int, out: Bytes) -> None:
        """Fill `out` with the bytes of a read's elements first … ."""
        source, view = self.source(read), read.view
        width = source.specs[read.tensor].dtype.itemsize
        if isinstance(view, Gather):
            self._gather(source, read.tensor, view, first, out.reshape(-1, width))
            if view.fallback:
                self._fall_back(read, view, first, out.reshape(-1, width))
        elif view is None or view.whole_rows:
            offset = 0 if view is None else view.offset
            source.read_into(read.tensor, (offset + first) * width, out)
        else:
            _fill_block(source, read.tensor, view, first, out, width)

    def extents(self, read: Read, first: int, size: int) -> tuple[Extent, ...]:
        """The parts of remote files that are read for elements first … first + size of a read; of a gather, for all of it."""
        source, view = self.source(read), read.view
        width = source.specs[read.tensor].dtype.itemsize
        if isinstance(view, Gather):
            block, runs = view.block, [(0, view.block.rows)]
            if view.axis == 0 and not isinstance(view.table, str):
                runs = _runs(self._table(view))
            places = [((block.offset + top * block.cols) * width, (end - top) * block.cols * width) for top, end in runs]
            found = [part for start, nbytes in places for part in source.extents(read.tensor, start, nbytes)]
            return (*found, *(part for other in view.fallback for part in self.extents(other, 0, 0)))
        if view is None or view.whole_rows:
            return source.extents(read.tensor, (first + (0 if view is None else view.offset)) * width, size * width)
        return source.extents(read.tensor, view.offset * width, ((view.rows - 1) * view.stride + view.cols) * width)

    def flat(self, read: Read, index: int) -> int:
        """The flat index in the tensor of element `index` of a read; -1 for one that is not in the tensor."""
        view = read.view
        if view is None:
            return index
        if isinstance(view, Block):
            return view.flat(index)
        table = self._table(view)
        row, col = divmod(index, view.block.cols if view.axis == 0 else len(table))
        row, col = (int(table[row]), col) if view.axis == 0 else (row, int(table[col]))
        return view.block.flat(row * view.block.cols + col) if min(row, col) >= 0 else -1

    def _table(self, view: Gather) -> npt.NDArray[np.int32]:
        table = self.results.array(view.table) if isinstance(view.table, str) else self.plan.tables[view.table].array
        limit = view.block.rows if view.axis == 0 else view.block.cols
        if table.size and not (-1 <= int(table.min()) and int(table.max()) < limit):
            raise IndexError(f"table {view.table} points outside {limit} {'columns' if view.axis else 'rows'}")
        return table

    def _fall_back(self, read: Read, view: Gather, first: int, out: Bytes) -> None:
        """Replace the rows that the table lacks, in elements first … of `out` [elements, width], by those of the fallback."""
        cols, end = view.block.cols, first + len(out)
        lacking = self._table(view)[first // cols : -(-end // cols)] < 0
        missing = np.flatnonzero(lacking)
        if not missing.size:
            return
        lowest, highest = int(missing[0]), int(missing[-1]) + 1  # the rows between are read too
        lacking, lowest = lacking[lowest:highest], lowest + first // cols
        with np.errstate(all="ignore"):  # whoever reads the rows reports what overflows
            rows = self._fallback_rows(view, lowest, lacking, self.dtype(read))
        begin, final = max(first, lowest * cols), min(end, (lowest + len(lacking)) * cols)
        flat = rows.reshape(-1, out.shape[1])[begin - lowest * cols : final - lowest * cols]
        chosen = np.repeat(lacking, cols)[begin - lowest * cols : final - lowest * cols]
        out[begin - first : final - first][chosen] = flat[chosen]

    def _fallback_rows(self, view: Gather, lowest: int, lacking: npt.NDArray[np.bool_], dtype: DType) -> Bytes:
        """uint8 [rows, bytes]: of the rows from number `lowest` on those that are lacking, as `dtype`; the others are zeros."""
        cols, n = view.block.cols, len(lacking)
        tables = [self._table(other.view)[lowest : lowest + n] for other in view.fallback if isinstance(other.view, Gather)]
        found = [(table >= 0) & lacking for table in tables]
        counts = np.asarray(np.sum(found, axis=0, dtype=np.int64))
        several = counts > 1
        sums = np.zeros((int(several.sum()), cols))
        made = np.zeros((n, cols * dtype.itemsize), np.uint8)
        for other, has in zip(view.fallback, found, strict=True):
            if not has.any():
                continue
            kind = self.dtype(other)
            raw = np.empty((n, cols * kind.itemsize), np.uint8)
            self.fill(other, lowest * cols, raw.reshape(-1))
            alone = has & ~several
            made[alone] = raw[alone] if kind is dtype else raw[alone].view(kind.numpy).astype(dtype.numpy).view(np.uint8)
            sums[has[several]] += raw[has & several].view(kind.numpy).astype(np.float64)
        if several.any():
            made[several] = (sums / counts[several, None]).astype(dtype.numpy).view(np.uint8)
        return made

    def _gather(self, source: Source, name: str, view: Gather, first: int, out: Bytes) -> None:
        """Fill `out` [elements, width] with elements first … of rows or columns in the order of a table."""
        table, block, width = self._table(view), view.block, out.shape[1]
        end = first + len(out)
        cols = block.cols if view.axis == 0 else len(table)
        top, bottom = first // cols, -(-end // cols)
        if view.axis == 1:  # whole rows are read, and their columns picked
            rows = np.empty((bottom - top, block.cols, width), np.uint8)
            source.read_into(name, (block.offset + top * block.cols) * width, rows.reshape(-1))
            picked = rows[:, table]
            picked[:, table < 0] = 0
            out[:] = picked.reshape(-1, width)[first - top * cols : end - top * cols]
            return
        numbers = table[top:bottom]
        # Consecutive rows are read at once. A run may begin at 0, but not continue from -1 to 0.
        starts = np.flatnonzero((np.diff(numbers, prepend=np.int32(-2)) != 1) | (numbers <= 0))
        for start, stop in zip(starts.tolist(), [*starts.tolist()[1:], len(numbers)], strict=True):
            begin, final = max(first, (top + start) * cols), min(end, (top + stop) * cols)
            target = out[begin - first : final - first].reshape(-1)
            row = int(numbers[start])
            if row < 0:
                target[:] = 0
            else:
                source.read_into(name, (block.offset + row * cols + begin - (top + start) * cols) * width, target)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _runs(table: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    """The rows that a table names, as runs: first row, and one past the last.

    >>> _runs(np.array([7, -1, 2, 3, 1], np.int32))
    [(1, 4), (7, 8)]
    """
    rows = np.unique(table[table >= 0])
    if not rows.size:
        return []
    cuts = np.flatnonzero(np.diff(rows) > 1)
    starts, ends = rows[np.concatenate(([0], cuts + 1))], rows[np.concatenate((cuts, [rows.size - 1]))] + 1
    if len(starts) > MAX_RUNS:
        return [(int(rows[0]), int(rows[-1]) + 1)]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _fill_block(source: Source, name: str, block: Block, first: int, out: Bytes, width: int) -> None:
    """Fill `out` with elements first … of a block whose rows do not follow each other."""
    cols, stride = block.cols, block.stride
    wanted, done = len(out) // width, 0
    while done < wanted:  # some rows at a time, with what lies between them
        row, col = divmod(first + done, cols)
        rows = min(-(-(col + wanted - done) // cols), max(1, TILE_BYTES // (stride * width)))
        span = np.empty((rows, stride * width), np.uint8)
        flat = span.reshape(-1)[: ((rows - 1) * stride + cols) * width]
        source.read_into(name, (block.offset + row * stride) * width, flat)
        found = span[:, : cols * width].reshape(-1)[col * width :][: (wanted - done) * width]
        out[done * width : done * width + len(found)] = found
        done += len(found) // width
