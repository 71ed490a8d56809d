"""The work on one tile: merging or copying it, measuring how far a merge moves, encoding, writing.

NaN and infinities are constants of the model if all inputs have the same ones, as bounds that clip nothing; else errors.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Finding, MismatchError, NonFinite
from weightsmith._base.tensors import GRAIN_ELEMENTS, DType, TensorSpec
from weightsmith._engine.reader import InputReads, Reader
from weightsmith._engine.resources import Buffers, Cut
from weightsmith._engine.schedule import ActiveStep, Gathered, LeafPass
from weightsmith._kernels.codecs import Encoded, any_nonfinite, decode, first_nonfinite
from weightsmith._kernels.combine import distance
from weightsmith._models.formats import Encoding, find_encoding
from weightsmith._models.structure.vocabulary import must_agree
from weightsmith._outputs.disk import copies_by_reference
from weightsmith._plans import CAST, PRODUCTS, Gather, Read, Step
from weightsmith.abc.job import Bytes, Job, Tile
from weightsmith.abc.output import Finished, Output
from weightsmith.abc.stored import WHOLE, maximum_name

# ---- NaN and infinities

UNPUBLISHED = (
    "Nothing was published. Finished tensors are kept: with --allow-nonfinite the same command resumes from them; "
    "with a changed model or recipe, add --no-resume."
)
"""The same command meets the same number again."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Elements of a tile that are copied, whatever the merge method makes of the others.

    where   int64 [k], their places in the tile
    values  float64 [k], NaN or infinite
    """

    where: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    def put(self, out: Bytes, dtype: DType) -> None:
        """Write them into an encoded tile."""
        out.view(dtype.numpy)[self.where] = self.values.astype(dtype.numpy)


def equal_constants(raw: Bytes, dtypes: Sequence[DType], size: int) -> Constants | None:
    """Replace every NaN and infinity of the inputs by zero, if all the inputs have the same ones at the same places.

    raw   uint8 [inputs, >= bytes of size elements]; modified, unless the answer is None
    size  elements

    Returns what was replaced, or None when two inputs differ in one, by a bit.

    >>> from weightsmith._base.tensors import DTYPES
    >>> tile = np.array([[1, np.inf, 2], [3, np.inf, 4]], np.float32)
    >>> equal_constants(tile.view(np.uint8), [DTYPES["F32"]] * 2, 3)
    Constants(where=array([1]), values=array([inf]))
    >>> tile
    array([[1., 0., 2.],
           [3., 0., 4.]], dtype=float32)
    """
    tiles = [row[: size * dtype.itemsize].view(dtype.numpy) for row, dtype in zip(raw, dtypes, strict=False)]
    with np.errstate(invalid="ignore"):  # a signalling NaN
        wide_tiles = [tile.astype(np.float64) for tile in tiles]
    where = np.flatnonzero(~np.isfinite(wide_tiles[0]))
    values = wide_tiles[0][where]
    for other in wide_tiles[1:]:
        if not np.array_equal(np.flatnonzero(~np.isfinite(other)), where):
            return None
        if not np.array_equal(other[where].view(np.uint64), values.view(np.uint64)):
            return None
    for tile in tiles:
        tile[where] = 0
    return Constants(where, values)


def copied(finished: Mapping[str, Finished]) -> tuple[Finding, ...]:
    """The warning that tensors of a merge hold such constants; () for none.

    >>> print(*copied({f"audio.layers.0.input_{bound}": Finished("", nonfinite=True) for bound in ("max", "min")}))
    audio.layers.0.input_max: 2 tensors hold a NaN or an infinity that is the same in all the models: it is copied
    """
    names = [name for name, done in finished.items() if done.nonfinite]
    if not names:
        return ()
    holding = f"{len(names):,} tensors hold" if len(names) > 1 else "this tensor holds"
    return (Finding(f"{holding} a NaN or an infinity that is the same in all the models: it is copied", names[0]),)


class Finite:
    """What becomes of NaN and infinities in the tiles of a plan. allow: they are merged like any number."""

    def __init__(self, reader: Reader, allow: bool) -> None:
        self._reader = reader
        self._allow = allow

    def take_constants(
        self, step: Step, place: Cut, inputs: InputReads, raw: Bytes, *, encoded: bool = False
    ) -> Constants | None:
        """Take every NaN and infinity out of what was read, where all the inputs have the same ones; the job sees zeros.

        encoded  the output is stored as codes: an infinity would spoil its whole row

        Returns None when there is none. Raises NonFinite for one that is not the same in all of two or more inputs.
        """
        if self._allow:
            return None
        if not any_nonfinite(raw, inputs.codes, place.size):
            return None
        dtypes = inputs.dtypes
        constants = equal_constants(raw, dtypes, place.size) if len(dtypes) > 1 and not encoded else None
        if constants is None:
            for i, data in enumerate(raw[: len(dtypes)]):
                self.check_input(step, i, place, data)
        return constants

    def check_copied(self, step: Step, place: Cut, data: Bytes, *, encoded: bool = False) -> None:
        """Raise NonFinite for a NaN or infinity in numbers that are copied, if they were computed from codes or factors.

        Stored numbers are copied as they are: an infinity may be a constant of the model. A computed one is damage.

        encoded  the output is stored as codes: an infinity would spoil its whole row
        """
        read = step.inputs[0]
        source = self._reader.source(read)
        if not self._allow and (encoded or source.natural_dtype(read.tensor) is not source.specs[read.tensor].dtype):
            self.check_input(step, 0, place, data)

    def check_input(self, step: Step, i: int, place: Cut, data: Bytes) -> None:
        """Raise NonFinite for a NaN or infinity among the elements read of one input."""
        read = step.inputs[i]
        spec, dtype = self._reader.source(read).specs[read.tensor], self._reader.dtype(read)
        at = first_nonfinite(data, dtype.code, place.size)
        if at >= 0:
            value = data[at * dtype.itemsize : (at + 1) * dtype.itemsize].view(dtype.numpy)[0]
            flat = self._reader.flat(read, place.start + at)
            taken = f"{_place(place.start + at, step.out.shape)}, taken from other models,"
            element = _place(flat, spec.shape) if flat >= 0 else taken
            label = self._reader.plan.label(read)
            raise NonFinite(
                f"element {element} is {float(value)}",
                where=f"{label}, tensor {read.tensor}",
                details=self._ways_out(step, i, label),
                fix="download or convert the model again, leave it out, or merge all the same with --allow-nonfinite "
                "(allow_nonfinite=True)",
                state=UNPUBLISHED,
            )

    def _ways_out(self, step: Step, i: int, label: str) -> list[str]:
        """How to look at a tensor of an input, and how to merge it without that input, where these can be done."""
        plan, read = self._reader.plan, step.inputs[i]
        steps = []
        if read.model != PRODUCTS and plan.models[read.model].plan is None and self._reader.source(read).paths:
            steps.append(f"to look at it:       weightsmith inspect {shlex.join([label, read.tensor])} --stats")
        if step.merges and "weight" in plan.settings[step.settings].models[i]:
            entry = f"{{filter: {json.dumps(read.tensor)}, value: 0}}"
            steps.append(f"to merge without it: weight: [{entry}, ...] in the parameters of {label}")
        return steps

    def check_result(self, leaf: Step, out: TensorSpec, origin: int, place: Cut, raw: Bytes, data: Bytes) -> None:
        """Raise NonFinite for a result that the output's dtype cannot hold.

        out     the tensor, whose elements from `origin` on are the leaf's
        raw     what it was computed from: a cast may pass on what it read
        data    the elements of the tile
        """
        if self._allow:
            return
        if leaf.op == CAST and first_nonfinite(raw[0], self._reader.dtype(leaf.inputs[0]).code, place.size) >= 0:
            self.check_copied(leaf, place, raw[0])
            return
        if any_nonfinite(data[None], self._reader.codes((out.dtype,)), place.size):
            at = first_nonfinite(data, out.dtype.code, place.size)
            flat = origin + place.start + at
            raise NonFinite(
                f"element {_place(flat, out.shape)} of the result is not a number that {out.dtype.torch} can hold",
                where=f"output tensor {out.name}",
                fix="choose a wider dtype, smaller weights or another method, or continue with --allow-nonfinite "
                "(allow_nonfinite=True)",
                state=UNPUBLISHED,
            )


def _place(flat: int, shape: tuple[int, ...]) -> str:
    """A flat index as the indices of an element."""
    return str([int(i) for i in np.unravel_index(flat, shape)])


# ---- merging, encoding, writing

_NO_NUMBERS = np.empty(0, np.float32)
WHOLE_BYTES = 6
"""Memory for each element of a tensor that is encoded as a whole: float32, the codes, and a group of rows."""


def measure(reader: Reader, leaf: LeafPass, place: Cut, raw: Bytes, out: Bytes, buffers: Buffers) -> bool:
    """Enter a tile's squared norms of output - base and of the base into `LeafPass.distances`, if the leaf has a base.

    raw  bytes of the inputs, the base first
    out  bytes of the result, in the tensor's dtype

    Returns True if the norms are finite: then all numbers of the result are.
    """
    if not len(leaf.distances):
        return False
    first = place.start // leaf.grain
    totals = leaf.distances[first : first + -(-place.size // leaf.grain)]
    dtype, out_code = reader.dtype(leaf.leaf.inputs[0]), leaf.leaf.out.dtype.code
    rows, sums = buffers.scratch.rows(2, reader.codes((dtype,)), out_code), buffers.scratch.sums(2)
    distance(Encoded(raw[0], dtype.code), Encoded(out, out_code), place.size, leaf.grain, totals, rows, sums)
    return bool(np.isfinite(totals).all())


class Merger:
    """The work on one tile of a leaf with a job. Thread-safe; each thread has its own buffers.

    measures  each result is measured, before constants that are not finite are put into it
    """

    def __init__(self, reader: Reader, finite: Finite, *, measures: bool = False) -> None:
        self._reader = reader
        self._finite = finite
        self._measures = measures

    def statistics(self, leaf: LeafPass, place: Cut, buffers: Buffers) -> tuple[Any, int]:
        """Statistics of a tile in the pass that is under way, and the bytes that were read."""
        job, tile, read, _ = self._read(leaf, place, buffers)
        return job.statistics(leaf.phase, tile), read

    def apply(self, leaf: LeafPass, place: Cut, out: Bytes, buffers: Buffers) -> int:
        """Fill `out` with a tile of the result, in the tensor's dtype. Returns the bytes that were read."""
        job, tile, read, constants = self._read(leaf, place, buffers)
        job.apply(tile, out)
        if not (self._measures and measure(self._reader, leaf, place, tile.raw, out, buffers)):
            self._finite.check_result(leaf.leaf, leaf.active.step.out, leaf.origin, place, tile.raw, out)
        if constants is not None:
            constants.put(out, leaf.leaf.out.dtype)
            leaf.active.nonfinite = True
        return read

    def _read(self, leaf: LeafPass, place: Cut, buffers: Buffers) -> tuple[Job, Tile, int, Constants | None]:
        """The job, a tile of its inputs without constants that are not finite, the bytes read, and these constants."""
        assert leaf.job is not None
        inputs = leaf.inputs
        if inputs is None:
            inputs = leaf.inputs = self._reader.inputs_of(leaf.leaf.inputs)
        raw, read = self._reader.read(inputs, place.start, place.size, buffers)
        constants, encoded = None, leaf.active.encoded
        # Every tile is checked in the first pass. Later ones need that only where it found constants.
        if (leaf.number == 0 or leaf.constants) and (leaf.leaf.op != CAST or encoded):
            constants = self._finite.take_constants(leaf.leaf, place, inputs, raw, encoded=encoded)
            leaf.constants |= constants is not None
        return leaf.job, Tile(place.start, place.size, raw, buffers.scratch), read, constants


class Copier:
    """The work on one tile of a leaf without a job: its first input is copied, and compared with the others."""

    def __init__(self, reader: Reader, finite: Finite, output: Output, encoder: TileEncoder) -> None:
        self._reader = reader
        self._finite = finite
        self._output = output
        self._encoder = encoder
        self._sharing: dict[int, bool] = {}  # by file descriptor of an output file

    def copy(self, leaf: LeafPass, place: Cut, buffers: Buffers) -> tuple[int, int]:
        """Copy one tile. Returns the bytes read, as stored, and written."""
        source, others = leaf.leaf.inputs[0], leaf.leaf.inputs[1:]
        out = self._encoder.memory(leaf, place, buffers)
        self._reader.fill(source, place.start, out)
        self._finite.check_copied(leaf.leaf, place, out, encoded=leaf.active.encoded)
        written = self._encoder.write(leaf, place, out, buffers, copied=self._share(leaf, place.start, out.size))
        measure(self._reader, leaf, place, out[None], out, buffers)
        read = round(out.size * self._reader.share(source))
        if others:
            if leaf.inputs is None:
                leaf.inputs = self._reader.inputs_of(others)
            raw, others_read = self._reader.read(leaf.inputs, place.start, place.size, buffers)
            read += others_read
            differing = [read for read, other in zip(others, raw, strict=True) if not np.array_equal(out, other[: out.size])]
            if differing:
                leaf.active.differing = True
                self._check_may_differ(leaf.leaf, differing[0])
        return read, written

    def _check_may_differ(self, step: Step, other: Read) -> None:
        """Raise MismatchError if rows of other tensors are found by these integers."""
        if must_agree(step.out.name):
            label = self._reader.plan.label
            raise MismatchError(
                "the models differ in these integers, which say what the rows of other tensors stand for",
                where=step.out.name,
                details=[f"{label(read)}: {read.tensor} {step.out.dtype}" for read in (step.inputs[0], other)],
                fix="merge models that agree in this tensor",
                state="Nothing was published.",
            )

    def _share(self, leaf: LeafPass, first: int, nbytes: int) -> bool:
        """Let the file system share or copy bytes of the first input; False if it would only move them through memory."""
        read, width, view = leaf.leaf.inputs[0], leaf.leaf.out.dtype.itemsize, leaf.leaf.inputs[0].view
        if leaf.active.encoded or isinstance(view, Gather) or not (view is None or view.whole_rows):
            return False
        source = self._reader.source(read).location(read.tensor)
        target = self._output.location(leaf.active.step.outs[leaf.target].name)
        if source is None or target is None or not self._shares(target[0]):
            return False
        from_offset = source[1] + (first + (0 if view is None else view.offset)) * width
        to_offset = target[1] + (first + leaf.origin) * width
        done = 0
        try:
            while done < nbytes:
                n = os.copy_file_range(source[0], target[0], nbytes - done, from_offset + done, to_offset + done)
                if n == 0:
                    return False
                done += n
        except OSError:  # another file system, or a kernel without it; a real error shows again in write
            return False
        return True

    def _shares(self, fd: int) -> bool:
        """Whether the file system of an output file may copy without moving bytes through memory; asked once per file."""
        if fd not in self._sharing:
            self._sharing[fd] = copies_by_reference(fd)
        return self._sharing[fd]


class TileEncoder:
    """Turns tiles of a tensor into stored bytes and hands them to an output. Thread-safe."""

    def __init__(self, reader: Reader, output: Output, *, allow_nonfinite: bool) -> None:
        self._reader = reader
        self._output = output
        self._allow_nonfinite = allow_nonfinite

    def begin(self, active: ActiveStep) -> int:
        """Prepare for a step. Returns the number of rows to which its tiles must be aligned."""
        if not active.encoded:
            return 1
        align = find_encoding(active.step.encoding).align_rows
        if align != WHOLE:
            return align
        active.gathered = Gathered(active.step.out.size)
        return 1

    def reserve(self, leaf: LeafPass) -> LeafPass:
        """Count the memory that the encoding holds for a leaf."""
        if leaf.active.gathered is not None:
            leaf.resident_bytes += WHOLE_BYTES * leaf.leaf.out.size
        return leaf

    def memory(self, leaf: LeafPass, place: Cut, buffers: Buffers) -> Bytes:
        """Memory for a tile of the result, before it is encoded."""
        step, width = leaf.active.step, leaf.leaf.out.dtype.itemsize
        if leaf.active.encoded:
            return buffers.numbers(place.size * width)
        at = self._output.location(step.outs[leaf.target].name)
        return buffers.out(place.size * width, (at[1] if at else 0) + (leaf.origin + place.start) * width)

    def write(self, leaf: LeafPass, place: Cut, data: Bytes, buffers: Buffers, *, copied: bool = False) -> int:
        """Encode, write and hash a tile; copied: it is written already. Returns the bytes written."""
        active, first = leaf.active, leaf.origin + place.start
        if active.gathered is not None:
            return self._gather(active, active.gathered, first, data)
        if active.encoded:
            return self._write_encoded(active, first, data, buffers)
        start = first * leaf.leaf.out.dtype.itemsize
        if not copied:
            self._output.write(active.step.outs[leaf.target].name, start, data)
        active.hashes[leaf.target].update(start, data)
        return data.size

    def _gather(self, active: ActiveStep, gathered: Gathered, first: int, numbers: Bytes) -> int:
        """Enter some elements of a tensor; with the last of them, encode and write it. Returns the bytes written."""
        spec = active.step.out
        count = numbers.size // spec.dtype.itemsize
        decode(numbers, spec.dtype.code, 0, count, gathered.values[first : first + count])
        if not gathered.entered(count):
            return 0
        outs = [np.empty(stored.nbytes, np.uint8) for stored in active.step.outs]
        encoding = find_encoding(active.step.encoding)
        encoding.encode(spec, gathered.values.reshape(spec.shape), 0, outs, self._about(active.step, encoding))
        active.gathered = None
        for stored, hashed, data in zip(active.step.outs, active.hashes, outs, strict=True):
            if stored.dtype.name == "F16" and not self._allow_nonfinite:
                _check_stored(active.step, stored, 0, data)
            self._output.write(stored.name, 0, data)
            hashed.update(0, data)
        return sum(data.size for data in outs)

    def _write_encoded(self, active: ActiveStep, first: int, numbers: Bytes, buffers: Buffers) -> int:
        """Encode and write whole rows, about a grain at a time. Extra memory: the codes of one tile."""
        step, encoding = active.step, find_encoding(active.step.encoding)
        spec, align = step.out, encoding.align_rows
        cols = spec.shape[-1] if len(spec.shape) > 1 else 1  # a vector may be cut anywhere
        top, count, height = first // cols, numbers.size // (cols * spec.dtype.itemsize), spec.size // cols
        rowed = len(step.outs) - encoding.whole

        def span(i: int, row: int, n: int) -> tuple[int, int]:
            return _span(step.outs[i], height, align, row, n) if i < rowed else (0, step.outs[i].nbytes)

        spans = [span(i, top, count) for i in range(len(step.outs))]
        place = self._output.location(step.outs[0].name)  # memory is aligned for the first, which has most of the bytes
        memory = buffers.out(sum(size + 64 for _, size in spans), (place[1] if place else 0) + spans[0][0])
        outs, at = [], 0
        for _, size in spans:
            outs.append(memory[at : at + size])
            at += size + -(memory.ctypes.data + at + size) % 64  # the others begin where numbers of any dtype may
        most = -(-max(1, GRAIN_ELEMENTS // cols) // align) * align
        about = self._about(step, encoding)
        for row in range(0, count, most):
            n = min(most, count - row)
            rows = buffers.rows(n * cols)
            if spec.dtype.floating:
                decode(numbers, spec.dtype.code, row * cols, rows.size, rows)
            else:  # a table of small whole numbers
                rows[:] = numbers.view(spec.dtype.numpy)[row * cols : row * cols + rows.size]
            runs = [span(i, top + row, n) for i in range(len(step.outs))]
            views = [out[a - start :][:size] for out, (start, _), (a, size) in zip(outs, spans, runs, strict=True)]
            encoding.encode(spec, rows.reshape(n, cols), top + row, views, about)
        count_written = len(outs) if top == 0 else rowed  # the first tile writes what belongs to the whole tensor
        for stored, hashed, (start, _), data in list(zip(step.outs, active.hashes, spans, outs, strict=True))[:count_written]:
            if stored.dtype.name == "F16" and not self._allow_nonfinite:
                _check_stored(step, stored, start, data)
            self._output.write(stored.name, start, data)
            hashed.update(start, data)
        return sum(size for _, size in spans[:count_written])

    def _about(self, step: Step, encoding: Encoding) -> np.ndarray:
        """The numbers of the whole tensor that its encoding needs: from the plan, or from a product."""
        if step.weighted >= 0:
            return self._reader.plan.tables[step.weighted].floats
        return self._reader.results.array(maximum_name(step.out.name)) if encoding.maxima else _NO_NUMBERS


def _check_stored(step: Step, stored: TensorSpec, start: int, data: Bytes) -> None:
    """Raise NonFinite for a number that the type of a stored tensor cannot hold."""
    at = first_nonfinite(data, stored.dtype.code, data.size // stored.dtype.itemsize)
    if at >= 0:
        raise NonFinite(
            f"an element of row {(start // stored.dtype.itemsize + at) // stored.shape[-1]:,} is not a number that "
            f"{stored.dtype} can hold",
            where=f"output tensor {step.out.name}",
            fix="choose a dtype or format with a wider range, such as --out-dtype bfloat16 or gguf-bf16",
            state=UNPUBLISHED,
        )


def _span(stored: TensorSpec, rows: int, align: int, first: int, count: int) -> tuple[int, int]:
    """Start and length in bytes of `count` rows from `first` on, in a stored tensor.

    A stored tensor has something for each row, or for each band of `align` rows. A tile begins at a band.

    >>> from weightsmith._base.tensors import DTYPES
    >>> _span(TensorSpec("codes", DTYPES["U8"], (8, 3)), 8, 4, 4, 3)
    (12, 9)
    >>> _span(TensorSpec("scales", DTYPES["F32"], (2,)), 8, 4, 4, 3)
    (4, 4)
    """
    unit, units = (1, rows) if stored.nbytes % rows == 0 and stored.shape[0] == rows else (align, -(-rows // align))
    unit_bytes = stored.nbytes // units
    start, end = first // unit, -(-(first + count) // unit)
    return start * unit_bytes, (end - start) * unit_bytes
