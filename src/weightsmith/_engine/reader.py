"""From a plan and its inputs to bytes and jobs: how a step is cut, what its job is, and what it reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith import _methods as methods
from weightsmith._base.files import Extent, read_into
from weightsmith._base.tensors import DType, grain_elements
from weightsmith._base.torch_use import named_device
from weightsmith._engine.resources import DEFAULTS, INPUTS_BYTES, TILE_BYTES, Buffers, Cut, Resources, cut, tile_grains
from weightsmith._engine.results import Results
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.sources.files import copied_share, files_behind
from weightsmith._plans import COPY, PRODUCTS, Block, Gather, Plan, Read, Step
from weightsmith.abc.job import Bytes, Job, Matrix
from weightsmith.abc.tensors import Tensors

MAX_RUNS = 10_000
"""Up to so many rows of a gather are counted one by one. If there are more, the bytes between them count too."""

MAX_SHAPES = 1_000
"""Tensors of so many shapes share their cuts."""

Source = Tensors | Results
"""What a step reads: a model, or the arrays of products."""


@dataclass(frozen=True, slots=True)
class InputReads:
    """How the inputs of a step are read: looked up once for all its tiles.

    dtypes  of each
    codes   int64 [inputs], `DType.code` of each
    places  of each: the open file, and the offset of the first byte; None unless it is one run of plain bytes in a file
    stored_width  bytes of an element of all of them together, as they are stored
    """

    reads: tuple[Read, ...]
    dtypes: tuple[DType, ...]
    codes: npt.NDArray[np.int64]
    places: tuple[tuple[int, int] | None, ...]
    stored_width: float


class Reader:
    """Cuts and reads the steps of one plan. Thread-safe."""

    def __init__(self, plan: Plan, inputs: Sequence[Tensors], results: Results, resources: Resources = DEFAULTS) -> None:
        """resources: sizes of tiles; and the device for whole matrices, on which the result depends, by its rounding."""
        self.plan = plan
        self.inputs = inputs
        self.results = results
        self._resources = resources
        self._device = named_device(resources.device)
        self._facts: dict[tuple[object, ...], tuple[int, int]] = {}
        self._shares: dict[int, float] = {}
        self._copied: dict[tuple[int, str], float] = {}
        self._has_copies = any(files.copied_share(None) for source in inputs for files in files_behind(source))
        self._codes: dict[tuple[str, ...], npt.NDArray[np.int64]] = {}
        self._cuts: dict[tuple[object, ...], list[Cut]] = {}
        self._checked: set[tuple[int | str, int]] = set()

    def source(self, read: Read) -> Source:
        """Where a read takes its tensor from."""
        return self.results if read.model == PRODUCTS else self.inputs[read.model]

    def dtype(self, read: Read) -> DType:
        """The dtype of the tensor that is read."""
        return self.source(read).specs[read.tensor].dtype

    def cuts(self, step: Step, align_rows: int = 1) -> list[Cut]:
        """The tiles of a step's tensor.

        align_rows  a tile begins at a multiple of so many rows

        A tile has as many rows as an input prefers, or a multiple, rounded up to grains, where that takes no more than
        `aligned_bytes` of each input, and INPUTS_BYTES of all.
        """
        preferred = max((self.source(read).preferred_rows(read.tensor) for read in step.inputs), default=1)
        names = tuple([self.dtype(read).name for read in step.inputs])
        key = step.out.shape, names, step.out.dtype.name, align_rows, preferred
        cuts = self._cuts.get(key)
        if cuts is None:
            cuts = self._new_cuts(step, align_rows, preferred)
            if len(self._cuts) < MAX_SHAPES:
                self._cuts[key] = cuts
        return cuts

    def _new_cuts(self, step: Step, align_rows: int, preferred: int) -> list[Cut]:
        """The tiles, computed. preferred: rows."""
        shape = step.out.shape
        grain = grain_elements(shape)
        dtypes = [*map(self.dtype, step.inputs), step.out.dtype]
        rows = max(1, grain // max(1, shape[-1] if shape else 1))
        least = align_rows // math.gcd(align_rows, rows)
        grains = _round_up(tile_grains(grain, dtypes, self._resources.tile_bytes), least)
        if preferred > 1:
            block = _round_up(-(-preferred // rows), least)
            allowed = min(self._resources.aligned_bytes, INPUTS_BYTES // max(1, len(step.inputs)))
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
            codes=self.codes(tuple(map(self.dtype, step.inputs))),
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
            device=self._device,
            method=step.op,
            statistics=self._statistics(step),
        )

    def _statistics(self, step: Step) -> dict[str, dict[int, npt.NDArray[Any]]]:
        """The statistics of a step's inputs, by kind and input; zeros while they are not made."""
        by_kind: dict[str, dict[int, npt.NDArray[Any]]] = {}
        for statistic in step.statistics:
            array, view = self.results.array_or_zeros(statistic.read.tensor), statistic.read.view
            if isinstance(view, Block):
                array = array.reshape(-1)[view.offset : view.offset + view.rows * view.cols].reshape(-1, array.shape[-1])
            by_kind.setdefault(statistic.kind, {})[statistic.input] = array
        return by_kind

    def job(self, step: Step) -> Job:
        """The job of a step that is not copied."""
        if step.merges:
            return methods.get(step.op).job(self.matrix(step))
        from weightsmith._methods.jobs.operations import OPERATIONS  # no merge needs them

        return OPERATIONS[step.op](self.matrix(step))

    def job_facts(self, step: Step) -> tuple[int, int]:
        """Statistics passes, and bytes held between passes, of the job of a step; asked once for each kind of step."""
        if step.op == COPY or not step.out.size:
            return 0, 0
        key = step.op, step.settings, step.base, step.out.shape, step.role, bool(step.statistics)
        if key not in self._facts:
            job = self.job(step)
            self._facts[key] = job.passes(), job.resident_bytes
        return self._facts[key]

    def codes(self, dtypes: tuple[DType, ...]) -> npt.NDArray[np.int64]:
        """`DType.code` of each: int64 [dtypes], the same array for equal ones."""
        key = tuple([dtype.name for dtype in dtypes])
        codes = self._codes.get(key)
        if codes is None:
            codes = self._codes[key] = np.array([dtype.code for dtype in dtypes], np.int64)
        return codes

    def inputs_of(self, reads: tuple[Read, ...]) -> InputReads:
        """How these are read. Opens their files. Raises as `Tensors.location`."""
        dtypes, places = [], list[tuple[int, int] | None]()
        for read in reads:
            source, view = self.source(read), read.view
            dtype = source.specs[read.tensor].dtype
            place = None
            if view is None or (isinstance(view, Block) and view.whole_rows):
                place = source.location(read.tensor)
                if place is not None and view is not None:
                    place = place[0], place[1] + view.offset * dtype.itemsize
            dtypes.append(dtype)
            places.append(place)
        width = sum([dtype.itemsize * self.share(read) for dtype, read in zip(dtypes, reads, strict=True)])
        return InputReads(reads, tuple(dtypes), self.codes(tuple(dtypes)), tuple(places), width)

    def share(self, read: Read) -> float:
        """Bytes that are read of files for each byte of the tensor: less than 1 of a quantised model, on average over it."""
        if read.model == PRODUCTS:
            return 1.0
        if read.model not in self._shares:
            source = self.inputs[read.model]
            self._shares[read.model] = source.stored_share if isinstance(source, Checkpoint) else 1.0
        return self._shares[read.model]

    def copied_share(self, step: Step) -> float:
        """The share of the bytes of a step's inputs that is read from local copies. Opens their files."""
        if not self._has_copies:
            return 0.0
        reads, copied, total = step.inputs[:1] if step.op == COPY else step.inputs, 0.0, 0.0
        for read in reads:
            if read.model != PRODUCTS:
                key, source = (read.model, read.tensor), self.inputs[read.model]
                if key not in self._copied:
                    self._copied[key] = copied_share(source, read.tensor)
                width = source.specs[read.tensor].dtype.itemsize * self.share(read)
                copied, total = copied + self._copied[key] * width, total + width
        return copied / total if total else 0.0

    def read(self, inputs: InputReads, first: int, size: int, buffers: Buffers) -> tuple[Bytes, int]:
        """The bytes of elements first … first + size of all inputs, uint8 [inputs, >= bytes]; and how many were read.

        Plain bytes are read without going through their source, which checks each read: with a hundred models that takes
        longer than the merge.
        """
        widths = [dtype.itemsize for dtype in inputs.dtypes]
        raw = buffers.raw(len(widths), size * max(widths, default=0))
        flat, stride = raw.reshape(-1).data, raw.shape[1]
        for i, (width, place) in enumerate(zip(widths, inputs.places, strict=True)):
            nbytes = size * width
            if place is None or not _is_read(place[0], flat[i * stride : i * stride + nbytes], place[1] + first * width):
                self.fill(inputs.reads[i], first, raw[i, :nbytes])  # or it says what is wrong
        return raw, round(size * inputs.stored_width)

    def fill(self, read: Read, first: int, out: Bytes) -> None:
        """Fill `out` with the bytes of a read's elements first … ."""
        source, view = self.source(read), read.view
        width = source.specs[read.tensor].dtype.itemsize
        if isinstance(view, Gather) and view.axis:
            self._fill_columns(source, read.tensor, view, first, out.reshape(-1, width))
        elif isinstance(view, Gather):
            self._fill_rows(read, view, first, out.reshape(-1, width))
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
            parts = [part for start, nbytes in places for part in source.extents(read.tensor, start, nbytes)]
            return (*parts, *(part for other in view.fallback for part in self.extents(other, 0, 0)))
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
        if (view.table, limit) not in self._checked:
            if table.size and not (-1 <= int(table.min()) and int(table.max()) < limit):
                raise IndexError(f"table {view.table} points outside {limit} {'columns' if view.axis else 'rows'}")
            self._checked.add((view.table, limit))
        return table

    def _fill_columns(self, source: Source, name: str, view: Gather, first: int, out: Bytes) -> None:
        """Fill `out` [elements, width] with elements first … of columns in the order of a table: whole rows are read."""
        table, block, width = self._table(view), view.block, out.shape[1]
        cols, end = len(table), first + len(out)
        top, bottom = first // cols, -(-end // cols)
        rows = np.empty((bottom - top, block.cols, width), np.uint8)
        source.read_into(name, (block.offset + top * block.cols) * width, rows.reshape(-1))
        picked = rows[:, table]
        picked[:, table < 0] = 0
        out[:] = picked.reshape(-1, width)[first - top * cols : end - top * cols]

    def _fill_rows(self, read: Read, view: Gather, first: int, out: Bytes) -> None:
        """Fill `out` [elements, width] with elements first … of rows in the order of a table, or for -1 of the fallback."""
        cols, width, end = view.block.cols, out.shape[1], first + len(out)
        top, bottom = first // cols, -(-end // cols)
        whole = len(out) == (bottom - top) * cols
        rows = out.reshape(-1, cols * width) if whole else np.empty((bottom - top, cols * width), np.uint8)
        numbers = self._table(view)[top:bottom]
        self._read_rows(read, view, numbers, rows)
        missing = np.flatnonzero(numbers < 0)
        rows[missing] = 0
        if view.fallback and missing.size:
            with np.errstate(all="ignore"):  # whoever reads the rows reports what overflows
                self._fall_back(view, top, missing, rows, self.dtype(read))
        if not whole:
            out[:] = rows.reshape(-1, width)[first - top * cols : end - top * cols]

    def _fall_back(self, view: Gather, top: int, missing: npt.NDArray[np.int64], rows: Bytes, dtype: DType) -> None:
        """Replace the rows that the table lacks by those of the fallback: of the only tensor that has it, else by the mean.

        top      number of the first of `rows`
        missing  indices of the rows that the table lacks
        rows     uint8 [rows, bytes]
        dtype    of the rows
        """
        others = [(read, read.view) for read in view.fallback if isinstance(read.view, Gather)]
        tables = [self._table(other)[top + missing] for _, other in others]
        counts = np.asarray(np.sum([table >= 0 for table in tables], axis=0, dtype=np.int64))
        several = counts > 1
        sums = np.zeros((int(several.sum()), view.block.cols))
        for (read, other), table in zip(others, tables, strict=True):
            kind, alone, shared = self.dtype(read), (table >= 0) & (counts == 1), (table >= 0) & several
            if kind is dtype:
                numbers = np.full(len(rows), -1, np.int32)
                numbers[missing[alone]] = table[alone]
                self._read_rows(read, other, numbers, rows)
            else:
                raw = self._new_rows(read, other, table[alone])
                rows[missing[alone]] = raw.view(kind.numpy).astype(dtype.numpy).view(np.uint8)
            if shared.any():
                sums[shared[several]] += self._new_rows(read, other, table[shared]).view(kind.numpy).astype(np.float64)
        if several.any():
            rows[missing[several]] = (sums / counts[several, None]).astype(dtype.numpy).view(np.uint8)

    def _new_rows(self, read: Read, view: Gather, numbers: npt.NDArray[np.int32]) -> Bytes:
        rows = np.empty((len(numbers), view.block.cols * self.dtype(read).itemsize), np.uint8)
        self._read_rows(read, view, numbers, rows)
        return rows

    def _read_rows(self, read: Read, view: Gather, numbers: npt.NDArray[np.int32], rows: Bytes) -> None:
        """Fill rows of `rows` [n, bytes] with those of these numbers; those of number -1 stay as they are.

        Consecutive rows are read at once. Rows of a file are read without going through its source, which checks each read:
        most runs are of one row, and the checks would take four times as long as the reading.
        """
        source, name, size = self.source(read), read.tensor, rows.shape[1]
        # A run may begin at 0, but not continue from -1 to 0.
        starts = np.flatnonzero((np.diff(numbers, prepend=np.int32(-2)) != 1) | (numbers <= 0))
        if not starts.size:
            return
        spec = source.specs[name]
        begin = view.block.offset * spec.dtype.itemsize
        inside = begin + (int(numbers.max()) + 1) * size <= spec.nbytes
        fd, offset = (source.location(name) if inside else None) or (-1, 0)
        flat = rows.reshape(-1).data
        for start, stop, row in zip(
            starts.tolist(), [*starts.tolist()[1:], len(numbers)], numbers[starts].tolist(), strict=True
        ):
            if row < 0:
                continue
            target, at = flat[start * size : stop * size], begin + row * size
            if fd < 0 or not _is_read(fd, target, offset + at):
                source.read_into(name, at, target)  # or it says what is wrong


def _is_read(fd: int, out: memoryview, offset: int) -> bool:
    try:
        return read_into(fd, out, offset) == len(out)
    except OSError:
        return False


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
    count, done = len(out) // width, 0
    while done < count:  # some rows at a time, with what lies between them
        row, col = divmod(first + done, cols)
        rows = min(-(-(col + count - done) // cols), max(1, TILE_BYTES // (stride * width)))
        span = np.empty((rows, stride * width), np.uint8)
        flat = span.reshape(-1)[: ((rows - 1) * stride + cols) * width]
        source.read_into(name, (block.offset + row * stride) * width, flat)
        elements = span[:, : cols * width].reshape(-1)[col * width :][: (count - done) * width]
        out[done * width : done * width + len(elements)] = elements
        done += len(elements) // width
