"""Products that compute: a thread of their own, and what they work with."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weightsmith.engine.results import Results
from weightsmith.errors import CheckpointError, WeightsmithError
from weightsmith.formats.carried import MAX_CARRIED_BYTES
from weightsmith.formats.files import Extent, read_bounded
from weightsmith.heap import return_freed
from weightsmith.jobs.job import Bytes
from weightsmith.kernels.blocks import block_maxima
from weightsmith.kernels.codecs import BLOCK, decode
from weightsmith.kernels.watch import leave
from weightsmith.outputs.interface import Finished
from weightsmith.plans import Product, Step
from weightsmith.products import find_kind
from weightsmith.products.base import Arrays, Cancelled, Floats
from weightsmith.tensors import TensorSpec


class EngineBench:
    """`products.Bench` of the engine. run_steps: makes steps and hands their bytes to an output; raises as the engine does."""

    def __init__(
        self,
        results: Results,
        create: Callable[[], Arrays | None],
        product: Product,
        folders: Sequence[Path],
        device: str,
        threads: int,
        memory_bytes: int | None,
        run_steps: Callable[[Sequence[Step], MemoryOutput, Callable[[], None]], None],
        report: Callable[[int, int], None],
        cancelled: threading.Event,
    ) -> None:
        self.product = product
        self.device = device
        self.threads = threads
        self.memory_bytes = memory_bytes
        self._results = results
        self._create = create
        self._folders = folders
        self._steps = {step.out.name: step for step in product.steps}
        self._run_steps = run_steps
        self._report = report
        self._cancelled = cancelled

    def fill(self, arrays: Mapping[str, Floats]) -> None:
        """See `products.Bench`."""
        self._make({name: _Whole(self._steps[name].out, array) for name, array in arrays.items()})

    def rows(self, name: str, numbers: Sequence[int]) -> Floats:
        """See `products.Bench`."""
        spec = self._steps[name].out
        found = np.empty((len(numbers), spec.shape[1]), np.float32)
        self._make({name: _Rows(spec, np.array(numbers, np.int64), found)})
        return found

    def largest(self, names: Sequence[str]) -> Floats:
        """See `products.Bench`."""
        targets = {name: _Largest(self._steps[name].out) for name in names}
        self._make(targets)
        return np.array([targets[name].found for name in names], np.float32)

    def _make(self, targets: Mapping[str, _Target]) -> None:
        self.check()
        own = dict(targets)
        try:
            self._run_steps([self._steps[name] for name in targets], MemoryOutput(own), self.check)
        finally:
            own.clear()  # a run is in reference cycles, which would keep whole matrices until the next garbage collection

    def arrays(self, name: str) -> Arrays:
        """See `products.Bench`."""
        assert name in self.product.needs, (self.product.name, name)
        return self._results.arrays(name)

    def create(self) -> Arrays:
        """See `products.Bench`."""
        found = self._create()
        return [np.zeros(out.shape, out.dtype.numpy) for out in self.product.outs] if found is None else found

    def folder(self, model: int) -> Path:
        """See `products.Bench`."""
        folder = self._folders[model]
        for file in self.product.files:
            if file.model == model:
                _check_file(folder / file.name, file.sha256)
        return folder

    def progress(self, done: int, total: int) -> None:
        """See `products.Bench`."""
        self.check()
        self._report(done, total)

    def check(self) -> None:
        """Raise Cancelled if the result is no longer needed."""
        if self._cancelled.is_set():
            raise Cancelled


def _check_file(path: Path, sha256: str) -> None:
    found = hashlib.sha256(read_bounded(path, MAX_CARRIED_BYTES)).hexdigest()
    if found != sha256:
        raise CheckpointError("the file has changed since the plan was made", where=str(path), fix="plan again")


class Computing:
    """Computes products, one after another, in one thread."""

    def __init__(self, bench: Callable[[Product], EngineBench], done: Callable[[Product, Arrays], None]) -> None:
        """done: called with each finished product, from the thread."""
        self._bench = bench
        self._done = done
        self._queue: list[Product] = []
        self._condition = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._on_error: Callable[[BaseException], None] = lambda error: None

    def start(self, on_error: Callable[[BaseException], None]) -> None:
        """Begin. on_error: called with what a computation raises."""
        self._on_error = on_error

    def add(self, product: Product) -> None:
        """Compute this one too."""
        with self._condition:
            self._queue.append(product)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="weightsmith-product", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                product = self._queue.pop(0)
            try:
                compute = find_kind(product.op).compute
                assert compute is not None
                self._done(product, compute(self._bench(product)))
                return_freed()
            except Cancelled:
                return
            except BaseException as error:
                if isinstance(error, WeightsmithError):
                    error.product = product.name
                self._on_error(error)
                return

    def close(self) -> None:
        """End the thread, and wait for it. A computation ends when it next reports its progress."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not None:
            leave([self._thread])


class _Target(Protocol):
    """Takes the numbers of one tensor."""

    def take(self, start_byte: int, data: Bytes) -> None:
        """Some of its bytes as they are stored: whole elements. Called from many threads."""


class _Whole:
    def __init__(self, spec: TensorSpec, array: Floats) -> None:
        assert array.shape == spec.shape, (spec, array.shape)
        self._spec = spec
        self._flat = array.reshape(-1)
        assert not self._flat.size or np.shares_memory(self._flat, array)

    def take(self, start_byte: int, data: Bytes) -> None:
        width = self._spec.dtype.itemsize
        first, count = start_byte // width, len(data) // width
        _decode(self._spec, data, 0, count, self._flat[first : first + count])


class _Rows:
    def __init__(self, spec: TensorSpec, numbers: npt.NDArray[np.int64], found: Floats) -> None:
        self._spec = spec
        self._numbers = numbers
        self._found = found

    def take(self, start_byte: int, data: Bytes) -> None:
        cols, width = self._spec.shape[1], self._spec.dtype.itemsize
        first, end = start_byte // width, (start_byte + len(data)) // width
        for k in range(*np.searchsorted(self._numbers, [first // cols, -(-end // cols)])):
            row = int(self._numbers[k]) * cols
            start, stop = max(first, row), min(end, row + cols)
            _decode(self._spec, data, start - first, stop - start, self._found[k, start - row : stop - row])


class _Largest:
    """found: the largest magnitude so far; a NaN does not count."""

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self.found = 0.0

    def take(self, start_byte: int, data: Bytes) -> None:
        count, row, top = len(data) // self._spec.dtype.itemsize, np.empty(BLOCK, np.float32), np.empty(1, np.float32)
        found = 0.0
        for start in range(0, count, BLOCK):
            n = min(BLOCK, count - start)
            _decode(self._spec, data, start, n, row[:n])
            block_maxima(row[:n], n, 1, n, top)
            found = max(found, float(top[0]))
        with self._lock:
            self.found = max(self.found, found)


def _decode(spec: TensorSpec, data: Bytes, start: int, count: int, out: Floats) -> None:
    """out = elements start … start + count of the bytes of a tensor."""
    if spec.dtype.code >= 0:
        decode(data, spec.dtype.code, start, count, out)
    else:
        out[:] = data.view(spec.dtype.numpy)[start : start + count]


class Unkept:
    """The products of an engine output without files: they stay in memory."""

    def equal(self, name: str, start_byte: int, extent: Extent) -> None:
        """Memory copies nothing itself."""

    def create(self, product: Product) -> None:
        """There is no file."""

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """Nothing is kept."""
        return arrays

    def forget(self, product: Product) -> None:
        """Nothing was kept."""


class MemoryOutput(Unkept):
    """An engine output: what each tensor is for takes its bytes."""

    def __init__(self, targets: Mapping[str, _Target]) -> None:
        self._targets = targets

    def location(self, name: str) -> None:
        """They are in no file."""

    def write(self, name: str, start_byte: int, buffer: memoryview | Bytes) -> None:
        """Hand over some bytes."""
        self._targets[name].take(start_byte, np.frombuffer(buffer, np.uint8))

    def finish(self, name: str, done: Finished) -> None:
        """Nothing is to be done."""
