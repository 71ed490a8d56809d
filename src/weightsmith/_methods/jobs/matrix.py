"""The job of methods that need a whole matrix at once: singular vectors, polar factors, solutions of linear systems.

The statistics pass copies the inputs into memory (in the dtype of rows); `finish_pass` computes an update with torch, in
float64; the apply pass adds it to a combination of the inputs. The scheduler limits the number of matrices in memory
(`Job.resident_bytes`).

The bytes do not depend on tiles and threads: a single thread does each computation, on arrays that torch aligns. Several
matrices are computed in parallel, on as many threads as the merge has, memory permitting. torch's number of threads is global,
so it is set to 1 while any update is being computed and restored afterwards. `--device` says where they are computed. Other
processors, other versions of torch, and GPUs round differently: the last bits of a float32 merge may differ between machines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping, Sequence
from copy import copy
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith._base.errors import ParameterError
from weightsmith._base.torch_use import Tensor, load_linear_algebra, needs_torch, one_thread
from weightsmith._kernels.codecs import Encoded, EncodedInputs
from weightsmith._kernels.combine import combine_with, copy_rows
from weightsmith.abc.job import Bytes, Job, Matrix, Tile

Vector = npt.NDArray[np.float64]

WORK_SQUARES = 4
"""Square float64 matrices in memory during a computation: a Gram matrix, its eigenvectors, and eigh's workspace."""


Origin = Literal["base", "mean", "zero"]


class Deltas(Sequence[Tensor]):
    """Deltas as float64 tensors on the device, computed one at a time on access."""

    def __init__(
        self,
        rows: Tensor,
        weights: Vector,
        device: str,
        *,
        from_mean: bool = False,
        memory: MutableMapping[object, Any] | None = None,
    ) -> None:
        """
        rows       [models, rows, cols]
        weights    a factor on each
        from_mean  rows are models, and their mean is the base
        memory     of `Job.recall`
        """
        import torch

        self.memory = memory
        self._rows, self._weights, self._device, self._kind = rows, weights, device, torch.float64
        self._mean = None
        if from_mean:
            self._mean = sum(self._wide(i) for i in range(len(rows))) / len(rows)

    def _wide(self, i: int) -> Tensor:
        return self._rows[i].to(self._device, self._kind)

    def weighted(self, weights: Vector) -> Deltas:
        """The same deltas with other factors."""
        deltas = copy(self)
        deltas._weights = weights
        return deltas

    def recall(self, key: object, compute: Callable[[], Tensor]) -> Tensor:
        """What compute returns: from the memory, if it has it. key: of all that it depends on, besides the inputs."""
        import torch

        if self.memory is None:
            return compute()
        known = self.memory.get(key)
        if known is not None:
            return torch.from_numpy(known).to(self._device)
        result = compute()
        self.memory[key] = result.cpu().numpy()
        return result

    @property
    def weights(self) -> tuple[float, ...]:
        """The factor on each."""
        return tuple(float(weight) for weight in self._weights)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Tensor:  # type: ignore[override]  # no slices
        if i >= len(self):
            raise IndexError(i)
        wide, factor = self._wide(i), float(self._weights[i])
        if wide.dtype == self._rows.dtype and wide.device == self._rows.device:  # it is the row itself
            delta = wide if self._mean is None else wide - self._mean
            return delta if factor == 1.0 else delta * factor
        delta = wide if self._mean is None else wide.sub_(self._mean)  # a copy: another one is memory that must be cleared
        return delta if factor == 1.0 else delta.mul_(factor)


class MatrixJob(Job):
    """Σ coefficients[i] · input[i] + factor · merge(deltas), for one logical matrix.

    merge         deltas (a sequence of torch float64 [rows, cols]) → merged delta, of the same form
    coefficients  float64 [inputs]
    weights       float64, of each delta
    factor        lambda
    origin        what deltas are inputs minus: the base, their mean, or nothing: they are all inputs, as they are
    copies        maximum number of float64 matrices that merge holds, besides square ones
    side          side of the largest square matrix in merge; None: the shorter side of the matrix
    identity      of merge: with the same inputs and statistics, equal ones return equal matrices. "": it is not known

    If a delta is not finite (only with allow_nonfinite), it cannot be decomposed: the update is factor times the mean.
    """

    portable = False
    identity = ""

    def __init__(
        self,
        matrix: Matrix,
        merge: Callable[[Deltas], Tensor],
        coefficients: Vector,
        weights: Vector,
        factor: float,
        *,
        origin: Origin = "base",
        copies: int = 8,
        side: int | None = None,
    ) -> None:
        super().__init__(matrix)
        if missing := needs_torch():
            raise ParameterError(missing)
        self.merge = merge
        self.coefficients = np.asarray(coefficients, np.float64)
        self.weights = weights
        self.factor = factor
        self.origin = origin
        self.rows = matrix.size // matrix.cols if matrix.cols else 0
        self.width = 8 if matrix.wide else 4
        square = min(self.rows, matrix.cols) if side is None else side
        held = (len(weights) + 1) * self.width + copies * 8
        self.resident_bytes = held * matrix.size + WORK_SQUARES * 8 * square * square
        self._lock = threading.Lock()
        self._held: Tensor = None
        self._update: npt.NDArray[Any] = np.empty(0)
        self._memory: MutableMapping[object, Any] | None = None

    def recall(self, memory: MutableMapping[object, Any]) -> None:
        self._memory = memory

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, tile: Tile) -> None:
        m = self.matrix
        with self._lock:
            if self._held is None:
                self._held = self._empty(len(self.weights), m.size)
        rows = tile.scratch.rows(1, m.codes, m.out_code)
        copy_rows(tile.raw, m.codes, tile.size, tile.start, self.origin == "base", self._held.numpy(), rows)

    def _empty(self, *shape: int) -> Tensor:
        import torch

        return torch.empty(shape, dtype=torch.float64 if self.width == 8 else torch.float32)  # aligned, unlike numpy's

    def finish_pass(self, number: int, results: list[Any]) -> None:
        held = self._held.view(len(self.weights), self.rows, self.matrix.cols)
        self._held = None
        update = self._empty(self.rows, self.matrix.cols)
        with one_thread():
            load_linear_algebra(self.matrix.device)
            deltas = Deltas(held, self.weights, self.matrix.device, from_mean=self.origin == "mean", memory=self._memory)
            merge = self.merged if _is_finite(held) else mean
            whole = merge(deltas)
            for start in range(0, self.rows, step := max(1, _SMALL_ELEMENTS // self.matrix.cols)):
                part = slice(start, start + step)
                update[part] = (whole[part] * self.factor).to("cpu", update.dtype)
        self._update = update.view(-1).numpy()

    def merged(self, deltas: Deltas) -> Tensor:
        """merge(deltas). λ does not change it: it is computed once for all jobs that share a memory."""
        if not self.identity:
            return self.merge(deltas)
        return deltas.recall((self.identity, statistics_digest(self.matrix)), lambda: self.merge(deltas))

    def update(self, tile: Tile) -> npt.NDArray[Any]:
        """The tile's elements of factor · merge(deltas)."""
        return self._update[tile.start : tile.start + tile.size]

    def apply(self, tile: Tile, out: Bytes) -> None:
        write_with(self.matrix, tile, out, self.coefficients, self.update(tile))


_SMALL_ELEMENTS = 1 << 16
"""Elements that are multiplied at once: 0.5 MiB, which malloc keeps. A whole matrix comes from the system, which clears it."""


def statistics_digest(matrix: Matrix) -> str:
    """A digest of a matrix's statistics, for `Deltas.recall`."""
    digest = xxhash.xxh3_128()
    for kind, arrays in sorted(matrix.statistics.items()):
        for number, array in sorted(arrays.items()):
            digest.update(f"{kind} {number}\0".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _is_finite(rows: Tensor) -> bool:
    """Whether all elements are finite. A finite sum says so in a tenth of the time of a look at each; that of finite ones may
    overflow.
    """
    return bool(rows.sum().isfinite()) or bool(rows.isfinite().all())


def write_with(matrix: Matrix, tile: Tile, out: Bytes, coefficients: Vector, update: npt.NDArray[Any]) -> None:
    """Write Σ coefficients[i] · input[i] + update, of the first inputs, of which there are coefficients."""
    k, m = len(coefficients), matrix
    rows, sums = tile.scratch.rows(1, m.codes, m.out_code), tile.scratch.sums(1)
    inputs, encoded = EncodedInputs(tile.raw[:k], m.codes[:k]), Encoded(out, m.out_code)
    combine_with(inputs, coefficients, update, tile.size, encoded, rows, sums)


def mean(deltas: Sequence[Tensor]) -> Tensor:
    return sum(deltas[i] for i in range(len(deltas))) / len(deltas)
