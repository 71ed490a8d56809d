"""Limits and tasks of a run; how tensors are cut to keep them: runs of whole grains, the same result for any length."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import NOTHING_WRITTEN, ParameterError
from weightsmith._base.tensors import DType
from weightsmith._base.text import count, size
from weightsmith._engine.results import JobMemory, Results
from weightsmith._files.remote import STREAM_CACHE_BYTES
from weightsmith._outputs.weight_files import PAGE_BYTES
from weightsmith._plans import Product, Step
from weightsmith.abc.job import Bytes, Scratch
from weightsmith.abc.output import Finished
from weightsmith.abc.product import StreamingReduction, Tasks

TILE_BYTES = 1 << 20
"""Size of a tile in each input: large enough that the cost of a call is negligible, small enough to stay in the cache."""

ALIGNED_BYTES = 4 << 20
"""Limit for each input when a tile has the rows that an input prefers: reading a transposed tensor may sweep its storage."""

INPUTS_BYTES = 8 << 20
"""Limit for all inputs of a tile together. With more than eight, each gets less, so thirty need no more memory than eight."""

MIN_TILE_BYTES = 128 << 10
"""A grain of a 16-bit tensor: no tile is smaller."""

KERNEL_BYTES = 8 << 20
"""A thread's other memory: rows, sums and two histograms."""

RESIDENT_BYTES = 1 << 30
"""Default limit of the memory that jobs hold between their passes. Most hold almost nothing."""

PROCESS_BYTES = 150 << 20
"""The interpreter, numpy, numba and its compiled kernels, as measured after an empty merge."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A run of grains: elements start … start + size of a matrix."""

    start: int
    size: int


def tile_grains(grain: int, dtypes: Sequence[DType], tile_bytes: int = TILE_BYTES) -> int:
    """Grains in a tile: as many as fit `tile_bytes` of the widest dtype, at least one.

    >>> from weightsmith._base.tensors import DTYPES
    >>> tile_grains(65536, [DTYPES["BF16"]], 1 << 20)
    8
    """
    return max(1, tile_bytes // (grain * max(d.itemsize for d in dtypes)))


def cut(size: int, grain: int, grains: int) -> list[Cut]:
    """The tiles of a matrix of `size` elements.

    >>> cut(10, grain=2, grains=2)
    [Cut(start=0, size=4), Cut(start=4, size=4), Cut(start=8, size=2)]
    """
    step = grain * grains
    return [Cut(start, min(step, size - start)) for start in range(0, size, step)]


def fit_tile_bytes(max_memory_bytes: int | None, threads: int, inputs: int, levels: int = 1, *, tensors_bytes: int = 0) -> int:
    """Bytes of one input in a tile so that all threads together stay within the memory given.

    levels         `Plan.levels`
    tensors_bytes  that the records of the tensors take

    Raises ParameterError when not even tiles of 128 KiB fit.

    >>> fit_tile_bytes(None, 2, 3) == TILE_BYTES, fit_tile_bytes(None, 2, 32) == TILE_BYTES // 4
    (True, True)
    """
    usual_bytes = max(MIN_TILE_BYTES, min(TILE_BYTES, INPUTS_BYTES // max(1, inputs)))
    if max_memory_bytes is None:
        return usual_bytes
    free_bytes = max_memory_bytes - PROCESS_BYTES - tensors_bytes - threads * levels * KERNEL_BYTES
    tile_bytes = free_bytes // (threads * (inputs + 1))
    if tile_bytes < MIN_TILE_BYTES:
        needed = peak_memory_bytes(MIN_TILE_BYTES, threads, inputs, levels) + tensors_bytes
        records = f" ({size(tensors_bytes)} of it for the records of its tensors)" if tensors_bytes >= 10_000_000 else ""
        raise ParameterError(
            f"a merge of {count(inputs, 'input')} on {count(threads, 'thread')} needs {math.ceil(needed / 1e6)} MB{records}, "
            f"but max_memory is {max_memory_bytes / 1e6:.0f} MB",
            fix=f"write --max-memory {math.ceil(needed / 1e6)}MB or more{', or fewer --threads' if threads > 1 else ''}",
            state=NOTHING_WRITTEN,
        )
    return min(usual_bytes, tile_bytes)


def fit_resident_bytes(
    max_memory_bytes: int | None, threads: int, inputs: int, levels: int = 1, *, tensors_bytes: int = 0
) -> int:
    """What tiles of `fit_tile_bytes` leave of the memory for jobs that hold whole matrices; `RESIDENT_BYTES` if unbound."""
    if max_memory_bytes is None:
        return RESIDENT_BYTES
    tile_bytes = fit_tile_bytes(max_memory_bytes, threads, inputs, levels, tensors_bytes=tensors_bytes)
    return max(0, max_memory_bytes - tensors_bytes - peak_memory_bytes(tile_bytes, threads, inputs, levels))


def peak_memory_bytes(tile_bytes: int, threads: int, inputs: int, levels: int = 1) -> int:
    """What a run is expected to take at most, resident, without the records of its tensors."""
    return PROCESS_BYTES + threads * (levels * KERNEL_BYTES + (inputs + 1) * tile_bytes)


class Buffers:
    """One thread's memory: raw tiles of the inputs, the encoded tile of the output, kernel scratch."""

    def __init__(self) -> None:
        self.scratch = Scratch()
        self._held: dict[str, Bytes] = {}
        self._out_address = 0

    def _at_least(self, use: str, nbytes: int) -> Bytes:
        """Memory for one use, as long as it ever was."""
        if use not in self._held or self._held[use].size < nbytes:
            self._held[use] = np.empty(nbytes, np.uint8)
        return self._held[use]

    def raw(self, inputs: int, nbytes: int) -> Bytes:
        """uint8 [inputs, >= nbytes], rows aligned to 64 bytes."""
        width = -(-nbytes // 64) * 64
        return self._at_least("raw", inputs * width)[: inputs * width].reshape(inputs, width)

    def out(self, nbytes: int, offset: int) -> Bytes:
        """uint8 [nbytes], at an address that equals `offset` (in its file) modulo a page, as direct writes want it."""
        before = self._held.get("out")
        held = self._at_least("out", nbytes + PAGE_BYTES)
        if held is not before:
            self._out_address = held.ctypes.data  # asking takes a microsecond
        first = (offset - self._out_address) % PAGE_BYTES
        return held[first : first + nbytes]

    def numbers(self, nbytes: int) -> Bytes:
        """uint8 [nbytes]: a tile before it is encoded."""
        return self._at_least("numbers", nbytes)[:nbytes]

    def rows(self, count: int) -> npt.NDArray[np.float32]:
        """float32 [count]: rows of such a tile, to be encoded."""
        return self._at_least("rows", 4 * count)[: 4 * count].view(np.float32)


# ---- limits and tasks


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a run.

    threads         default: the processors this process may use
    tile_bytes      of each input; the result does not depend on it
    aligned_bytes   the same, of tiles with as many rows as an input prefers
    product_bytes   that a product that computes may hold besides its arrays; None: no limit
    resident_bytes  that methods of whole matrices may hold; a matrix that needs more is merged alone
    device          for products that compute and for whole matrices, as torch names it, or auto
    cache_bytes     on disk, for bytes of remote files
    """

    threads: int = 0
    tile_bytes: int = TILE_BYTES
    resident_bytes: int = RESIDENT_BYTES
    device: str = "cpu"
    aligned_bytes: int = ALIGNED_BYTES
    product_bytes: int | None = None
    cache_bytes: int = STREAM_CACHE_BYTES

    @property
    def workers(self) -> int:
        """Number of threads."""
        return self.threads or processors()


DEFAULTS = Resources()


def processors() -> int:
    """The processors that this process may use; where the system does not say which, all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Workload:
    """The part of a plan to run, and what exists already.

    steps     of the plan; None: all
    products  of the plan, including all that these and the steps need; None: all
    skip      output tensors (`Step.out`) that are finished already
    results   with the products that are finished already; None: none
    folders   of each model's files, for products that read them
    release   remove the arrays of a product (`ProductKind.released`) once all steps and products that need it are finished;
              False where another run reads them
    allow_nonfinite  merge NaN and infinities like any number; False raises NonFinite
    memory    for runs of plans that merge the same inputs in other ways: what the jobs of a tensor remember. None: nothing
    reduction  used for the products that stream, in place of those of their kinds
    tasks     board of tasks of products, for other processes; None: there is none
    later     transient products that are kept, because other processes make products that need them
    """

    steps: Sequence[Step] | None = None
    products: Sequence[Product] | None = None
    skip: Mapping[str, Finished] | None = None
    results: Results | None = None
    folders: Sequence[Path] = ()
    allow_nonfinite: bool = False
    release: bool = False
    memory: JobMemory | None = None
    reduction: StreamingReduction | None = None
    tasks: Tasks | None = None
    later: Collection[str] = ()


WHOLE = Workload()
