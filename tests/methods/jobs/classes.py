"""One job of each class, and a run of it without the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.cases.case import fine_tunes
from weightsmith._base.tensors import DTYPES, grain_elements
from weightsmith._engine.resources import Cut, cut
from weightsmith._kernels.elementwise import merge_clipped
from weightsmith._methods.crossover import filtered
from weightsmith._methods.jobs.combination import (
    ChangedDeltaJob,
    ColumnJob,
    CombinationJob,
    GramJob,
    OuterColumnJob,
    RowJob,
    SharesJob,
    SpectralDeltaJob,
    SplicedJob,
)
from weightsmith._methods.jobs.elementwise import ActiveJob, ElementwiseJob, FusionJob, SceJob
from weightsmith._methods.jobs.matrix import MatrixJob, mean
from weightsmith._methods.jobs.operations import FillJob, NoiseJob, PerturbedJob
from weightsmith._methods.jobs.task_vectors import Axes, TaskVectorJob
from weightsmith._methods.steps import ColumnsJob, ScaledJob, SpectrumJob
from weightsmith.abc.job import Job, Matrix, Scratch, Tile

BF16 = DTYPES["BF16"]
SHAPE = (700, 300)
"""Four grains, of which the last is short."""

PERTURBED = {
    "expert": 1, "part": "up", "noise_scale": 0.01, "noise_fraction": 0.5, "drop_fraction": 0.3, "factor": 0.5,
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """make: the job of a matrix; inputs: how many it has; base: input 0 is one."""

    make: Callable[[Matrix], Job]
    inputs: int = 3
    base: bool = True


def ties(matrix: Matrix) -> Job:
    """Thresholds of the tensor, and norms."""
    return TaskVectorJob(matrix, Axes("magnitude", [1.0, 0.5], 1.0, [0.3, 0.6], rescale="l1", elect="sum", combine="mean"))


def _equal(grams: np.ndarray) -> np.ndarray:
    """Coefficients from Gram matrices [..., k, k]: of the deltas' squared norms."""
    norms = np.diagonal(grams, axis1=-2, axis2=-1)
    shares = norms / np.maximum(norms.sum(-1, keepdims=True), 1e-30)
    return np.concatenate([1 - shares.sum(-1, keepdims=True), shares], axis=-1)


def _matrix(matrix: Matrix) -> Job:
    return MatrixJob(matrix, mean, np.array([1.0, 0.0, 0.0]), np.ones(2), 0.7)


SHARES = [np.random.default_rng(i).random(SHAPE, np.float32) ** 4 for i in range(2)]

JOBS = {
    "CombinationJob": Made(lambda m: CombinationJob(m, np.array([0.2, 0.3, 0.5])), base=False),
    "GramJob": Made(lambda m: GramJob(m, _equal, deltas=True)),
    "RowJob": Made(lambda m: RowJob(m, _equal, deltas=True)),
    "ColumnJob": Made(lambda m: ColumnJob(m, _equal, deltas=True)),
    "ElementwiseJob": Made(lambda m: ElementwiseJob(m, merge_clipped, 0.001, sums=1), inputs=2),
    "ActiveJob": Made(lambda m: ActiveJob(m, 1e-3, lambda counts: counts.sum(1) / np.maximum(counts[:, 0], 1))),
    "TaskVectorJob": Made(ties),
    "TaskVectorJob, random": Made(lambda m: TaskVectorJob(m, Axes("random", [1, 1], 1.0, [0.3, 0.6], rescale="l1"))),
    "TaskVectorJob, rows": Made(lambda m: TaskVectorJob(m, Axes("magnitude", [1, 1], 1.0, [0.3, 0.6], scope="row"))),
    "SceJob": Made(lambda m: SceJob(m, 0.3, mask_update=True)),
    "FusionJob": Made(lambda m: FusionJob(m, 1e-8), inputs=2),
    "MatrixJob": Made(_matrix),
    "ScaledJob": Made(lambda m: ScaledJob(m, ties, "mean", 1.2)),
    "SpectrumJob": Made(lambda m: SpectrumJob(m, ties, "flatten", 0.5)),
    "ColumnsJob": Made(lambda m: ColumnsJob(m, ties, np.linspace(0.4, 1, SHAPE[1]))),
    "SplicedJob": Made(lambda m: SplicedJob(m, 1, 20, 140, inside=True), inputs=2),
    "OuterColumnJob": Made(
        lambda m: OuterColumnJob(m, lambda grams: grams[:, 0, 0] / np.trace(grams, axis1=1, axis2=2)), inputs=2
    ),
    "ChangedDeltaJob": Made(lambda m: ChangedDeltaJob(m, np.cbrt, 0.5, start=1, ends=(0, 2))),
    "ChangedDeltaJob, with an order": Made(lambda m: ChangedDeltaJob(m, np.multiply, 0.5, start=1, ends=(1, 2), order=0)),
    "SpectralDeltaJob": Made(lambda m: SpectralDeltaJob(m, lambda d: filtered(d, 0.4, 0.5), 1.0, start=1, ends=(1, 2))),
    "SharesJob": Made(lambda m: SharesJob(m, SHARES, [1.0, 0.5], 0.1, 0.9)),
    "PerturbedJob": Made(PerturbedJob, inputs=1, base=False),
    "NoiseJob": Made(lambda m: NoiseJob(m, 0.01), inputs=1, base=False),
    "FillJob": Made(FillJob, inputs=0, base=False),
}


def matrix_of(case: Made, shape: tuple[int, ...] = SHAPE) -> Matrix:
    return Matrix(
        name="w",
        size=int(np.prod(shape)),
        cols=shape[-1],
        grain=grain_elements(shape),
        codes=np.full(case.inputs, BF16.code, np.int64),
        out_code=BF16.code,
        base=case.base,
        shared={"value": 0.5, **PERTURBED},
        models=tuple({} for _ in range(case.inputs)),
        seed=3,
        inputs=tuple(range(case.inputs)),
        places=tuple(range(case.inputs)),
        shape=shape,
    )


def run_job(
    case: Made, *, grains: int, threads: int = 1, shuffle: int | None = None, arrays: Sequence[np.ndarray] | None = None
) -> tuple[Job, bytes]:
    """The job after all passes, and the bytes of its result.

    grains   in a tile
    shuffle  seed of the order of the tiles; None: the plan's. A sequential job has its statistics in the plan's order
    """
    matrix = matrix_of(case)
    arrays = fine_tunes(SHAPE, case.inputs - 1) if arrays is None else arrays
    raw = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays][: case.inputs]
    job, places = case.make(matrix), cut(matrix.size, matrix.grain, grains)
    out = np.empty(matrix.size * 2, np.uint8)
    order = list(range(len(places)))
    if shuffle is not None:
        random.Random(shuffle).shuffle(order)

    def tile(place: Cut) -> Tile:
        rows = np.empty((case.inputs, place.size * 2), np.uint8)
        for row, data in zip(rows, raw, strict=True):
            row[:] = data[place.start * 2 : (place.start + place.size) * 2]
        return Tile(place.start, place.size, rows, Scratch())

    def apply(k: int) -> None:
        place = places[k]
        job.apply(tile(place), out[place.start * 2 : (place.start + place.size) * 2])

    with ThreadPoolExecutor(threads) as pool:
        number = 0
        while number < job.passes():
            results: list[Any] = [None] * len(places)

            def statistics(k: int, number: int = number, results: list[Any] = results) -> None:
                results[k] = job.statistics(number, tile(places[k]))

            if job.sequential:
                for k in range(len(places)):
                    statistics(k)
            else:
                list(pool.map(statistics, order))
            job.finish_pass(number, results)
            number += 1
        list(pool.map(apply, order[::-1]))
    return job, out.tobytes()


def numbers(data: bytes) -> np.ndarray:
    return np.frombuffer(data, ml_dtypes.bfloat16).astype(np.float64)
