"""Every class of job, whatever method uses it: the result depends neither on tiles nor on threads nor on order."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache

import numpy as np
import pytest

import weightsmith._methods.jobs
from tests.cases.case import fine_tunes
from tests.methods.jobs.classes import JOBS, SHAPE, Made, matrix_of, numbers, run_job
from weightsmith._methods.jobs.elementwise import SceJob
from weightsmith.abc.job import Job


@cache
def whole(name: str) -> bytes:
    """The result of one tile, in one thread."""
    return run_job(JOBS[name], grains=100)[1]


def test_each_class_of_job_has_a_case() -> None:
    for module in pkgutil.iter_modules(weightsmith._methods.jobs.__path__):
        importlib.import_module(f"weightsmith._methods.jobs.{module.name}")

    def below(kind: type[Job]) -> set[type[Job]]:
        return {kind, *(deeper for subclass in kind.__subclasses__() for deeper in below(subclass))}

    ours = {
        kind for kind in below(Job) if kind.__module__.startswith(("weightsmith._methods.jobs.", "weightsmith._methods.steps"))
    }
    assert {name.partition(",")[0] for name in JOBS} == {kind.__name__ for kind in ours if not inspect.isabstract(kind)}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(("grains", "threads", "shuffle"), [(1, 1, None), (1, 1, 5), (3, 1, 1), (1, 4, 2)])
def test_tiles_order_and_threads_do_not_change_a_byte(name: str, grains: int, threads: int, shuffle: int | None) -> None:
    job, data = run_job(JOBS[name], grains=grains, threads=threads, shuffle=shuffle)
    assert type(job).__name__ == name.partition(",")[0]
    assert data == whole(name)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_can_be_asked_for_its_passes_before_it_has_seen_a_tile(name: str) -> None:
    job = JOBS[name].make(matrix_of(JOBS[name]))
    assert 0 <= job.passes() <= 4
    assert job.resident_bytes >= 0


def test_positions_are_not_counted_where_all_are_selected() -> None:
    matrix = matrix_of(JOBS["SceJob"])
    assert SceJob(matrix, 1.0, mask_update=True).passes() == 1
    assert SceJob(matrix, 0.9, mask_update=True).passes() > 1


@pytest.mark.parametrize("name", JOBS)
def test_a_job_does_not_change_what_it_reads_and_its_result_is_finite(name: str) -> None:
    arrays = fine_tunes(SHAPE, JOBS[name].inputs - 1)
    before = [array.copy() for array in arrays]
    _, data = run_job(JOBS[name], grains=2, arrays=arrays)
    assert all(array.tobytes() == old.tobytes() for array, old in zip(arrays, before, strict=True))
    assert np.isfinite(numbers(data)).all()


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, case in JOBS.items() if case.inputs > 1 and case.base])
def test_models_equal_to_the_base_leave_it_as_it_is(name: str) -> None:
    case = JOBS[name]
    base = fine_tunes(SHAPE, 0)[0]
    _, data = run_job(case, grains=2, arrays=[base] * case.inputs)
    assert data == base.tobytes()


def test_the_driver_would_see_a_job_that_depends_on_its_tiles() -> None:
    class Careless(Job):
        """Adds up in the order in which the tiles come."""

        def __init__(self, matrix: object) -> None:
            super().__init__(matrix)  # type: ignore[arg-type]
            self.seen = 0

        def apply(self, tile: object, out: np.ndarray) -> None:
            self.seen += 1
            out[:] = self.seen

    case = Made(Careless, inputs=1, base=False)
    assert run_job(case, grains=1)[1] != run_job(case, grains=1, shuffle=5)[1]
