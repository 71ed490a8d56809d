"""The operations of steps other than merging. The engine itself copies bytes and joins pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from weightsmith._plans import CAST, COPY, FILL, PERTURB
from weightsmith.abc.job import Job, Matrix


def _cast(matrix: Matrix) -> Job:
    from weightsmith._methods.jobs.combination import CombinationJob

    return CombinationJob(matrix, np.ones(1))


def _perturbed(matrix: Matrix) -> Job:
    from weightsmith._methods.jobs.perturbed import PerturbedJob

    return PerturbedJob(matrix)


def _fill(matrix: Matrix) -> Job:
    from weightsmith._methods.jobs.fill import FillJob

    return FillJob(matrix)


def _no_job(matrix: Matrix) -> Job:
    raise AssertionError(f"{matrix.name} is copied without a job")


OPERATIONS: Mapping[str, Callable[[Matrix], Job]] = {
    COPY: _no_job,
    CAST: _cast,
    FILL: _fill,
    PERTURB: _perturbed,
}
"""Name of the op → function that creates the job of one logical matrix."""
