"""Encodes, writes and hashes tiles of the result."""

from __future__ import annotations

import numpy as np

from weightsmith._base.errors import NonFinite
from weightsmith._base.tensors import GRAIN_ELEMENTS, TensorSpec
from weightsmith._engine.active import ActiveStep, Gathered, LeafPass
from weightsmith._engine.buffers import Buffers
from weightsmith._engine.constants import UNPUBLISHED
from weightsmith._engine.reader import Reader
from weightsmith._engine.tiles import Cut
from weightsmith._kernels.codecs import decode, first_nonfinite
from weightsmith._models.formats import Encoding, find_encoding
from weightsmith._plans import Step
from weightsmith.abc.job import Bytes
from weightsmith.abc.output import Output
from weightsmith.abc.stored import WHOLE, array_name

_NO_NUMBERS = np.empty(0, np.float32)
WHOLE_BYTES = 6
"""Memory for each element of a tensor that is encoded as a whole: float32, the codes, and a group of rows."""


class Encoder:
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
        step = leaf.active.step
        width = step.out.dtype.itemsize
        if leaf.active.encoded:
            return buffers.numbers(place.size * width)
        at = self._output.location(step.out.name)
        return buffers.out(place.size * width, (at[1] if at else 0) + (leaf.origin + place.start) * width)

    def write(self, leaf: LeafPass, place: Cut, data: Bytes, buffers: Buffers, *, copied: bool = False) -> int:
        """Encode, write and hash a tile; copied: it is written already. Returns the bytes written."""
        active, first = leaf.active, leaf.origin + place.start
        if active.gathered is not None:
            return self._gather(active, active.gathered, first, data)
        if active.encoded:
            return self._write_encoded(active, first, data, buffers)
        spec = active.step.out
        start = first * spec.dtype.itemsize
        if not copied:
            self._output.write(spec.name, start, data)
        active.hashes[0].update(start, data)
        return data.size

    def _gather(self, active: ActiveStep, gathered: Gathered, first: int, numbers: Bytes) -> int:
        """Enter some elements of a tensor; with the last of them, encode and write it. Returns the bytes written."""
        spec = active.step.out
        count = numbers.size // spec.dtype.itemsize
        decode(numbers, spec.dtype.code, 0, count, gathered.values[first : first + count])
        if not gathered.entered(count):
            return 0
        outs = [np.empty(stored.nbytes, np.uint8) for stored in active.step.outs]
        find_encoding(active.step.encoding).encode(spec, gathered.values.reshape(spec.shape), 0, outs, _NO_NUMBERS)
        active.gathered = None
        for stored, hashed, data in zip(active.step.outs, active.hashes, outs, strict=True):
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
            decode(numbers, spec.dtype.code, row * cols, rows.size, rows)
            runs = [span(i, top + row, n) for i in range(len(step.outs))]
            views = [out[a - start :][:size] for out, (start, _), (a, size) in zip(outs, spans, runs, strict=True)]
            encoding.encode(spec, rows.reshape(n, cols), top + row, views, about)
        made = len(outs) if top == 0 else rowed  # the first tile writes what belongs to the whole tensor
        for stored, hashed, (start, _), data in list(zip(step.outs, active.hashes, spans, outs, strict=True))[:made]:
            if stored.dtype.name == "F16" and not self._allow_nonfinite:
                _check_stored(step, stored, start, data)
            self._output.write(stored.name, start, data)
            hashed.update(start, data)
        return sum(size for _, size in spans[:made])

    def _about(self, step: Step, encoding: Encoding) -> np.ndarray:
        """The numbers of the whole tensor that its encoding needs: from the plan, or from a product."""
        if step.weighted >= 0:
            return self._reader.plan.tables[step.weighted].floats
        return self._reader.results.array(array_name(encoding, step.out.name)) if encoding.product else _NO_NUMBERS


def _check_stored(step: Step, stored: TensorSpec, start: int, data: Bytes) -> None:
    """Raise NonFinite for a number that the type of a stored tensor cannot hold."""
    at = first_nonfinite(data, stored.dtype.code, data.size // stored.dtype.itemsize)
    if at >= 0:
        raise NonFinite(
            f"an element of row {(start // stored.dtype.itemsize + at) // stored.shape[-1]:,} is not a number that "
            f"{stored.dtype} can hold",
            where=f"output tensor {step.out.name}",
            fix="choose a format with a wider range, such as gguf-bf16",
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
    each = stored.nbytes // units
    start, end = first // unit, -(-(first + count) // unit)
    return start * each, (end - start) * each
