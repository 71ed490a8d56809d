"""Copies tiles of tensors that are not merged."""

from __future__ import annotations

import os

import numpy as np

from weightsmith._engine.active import LeafPass
from weightsmith._engine.buffers import Buffers
from weightsmith._engine.constants import Finite
from weightsmith._engine.encoder import Encoder
from weightsmith._engine.measurer import Measurer
from weightsmith._engine.reader import Reader
from weightsmith._engine.tiles import Cut
from weightsmith._outputs.local.disk import copies_by_reference
from weightsmith._plans import Gather
from weightsmith.abc.output import Output


class Copier:
    """The work on one tile of a leaf without a job: its first input is copied, and compared with the others."""

    def __init__(self, reader: Reader, finite: Finite, output: Output, encoder: Encoder, measure: Measurer) -> None:
        self._reader = reader
        self._finite = finite
        self._output = output
        self._encoder = encoder
        self._measure = measure
        self._sharing: dict[int, bool] = {}  # by file descriptor of an output file

    def copy(self, leaf: LeafPass, place: Cut, buffers: Buffers) -> tuple[int, int]:
        """Copy one tile. Returns the bytes read and written."""
        source, *others = leaf.leaf.inputs
        out = self._encoder.memory(leaf, place, buffers)
        self._reader.fill(source, place.start, out)
        self._finite.check_copied(leaf.leaf, place, out, encoded=leaf.active.encoded)
        self._offer(leaf, place.start, out.size)
        written = self._encoder.write(leaf, place, out, buffers, copied=self._share(leaf, place.start, out.size))
        self._measure(leaf, place, out[None], out, buffers)
        if others:
            raw, _ = self._reader.read(others, place.start, place.size, buffers)
            if any(not np.array_equal(out, other[: out.size]) for other in raw):
                leaf.active.differing = True
        return out.size * len(leaf.leaf.inputs), written

    def _share(self, leaf: LeafPass, first: int, nbytes: int) -> bool:
        """Let the file system share or copy bytes of the first input; False if it would only move them through memory."""
        read, width, view = leaf.leaf.inputs[0], leaf.leaf.out.dtype.itemsize, leaf.leaf.inputs[0].view
        if leaf.active.encoded or isinstance(view, Gather) or not (view is None or view.whole_rows):
            return False
        source = self._reader.source(read).location(read.tensor)
        target = self._output.location(leaf.active.step.out.name)
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

    def _offer(self, leaf: LeafPass, first: int, nbytes: int) -> None:
        """Tell the output where bytes of the first input are, if they are a run of a remote file."""
        width, read = leaf.leaf.out.dtype.itemsize, leaf.leaf.inputs[0]
        if not leaf.active.encoded and not isinstance(read.view, Gather):
            extents = self._reader.extents(read, first, nbytes // width)
            if len(extents) == 1 and extents[0].nbytes == nbytes:
                self._output.equal(leaf.active.step.out.name, (leaf.origin + first) * width, extents[0])
