"""Shows a method's survey all the tensors that it merges, before the merge."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from weightsmith import methods
from weightsmith.engine.buffers import Buffers
from weightsmith.engine.tiles import Cut
from weightsmith.jobs.job import Matrix, Tile
from weightsmith.jobs.survey import Survey
from weightsmith.planner.steps import Step

if TYPE_CHECKING:
    from weightsmith.engine.local import Run


def conduct(run: Run, threads: int, report: Callable[[], None]) -> Survey | None:
    """The method's survey, all its passes done; None when it has none. `report` is called now and then."""
    plan = run.plan
    merged = [step for step in plan.steps if step.op not in ("copy", "cast") and step.out.size]
    survey = methods.get(plan.method).survey([(step, plan.settings[step.settings]) for step in merged]) if merged else None
    if survey is None:
        return None
    own = threading.local()
    number = 0

    def look(step: Step, matrix: Matrix, place: Cut) -> Any:
        if not hasattr(own, "buffers"):
            own.buffers = Buffers()
        size = min(place.size, matrix.grain) if survey.sampled(number) else place.size
        raw, read = run.read(step, matrix.index + place.start, size, own.buffers)
        run.count(read, 0)
        return survey.statistics(number, matrix, Tile(place.start, size, raw, own.buffers.scratch))

    def results() -> Iterator[Any]:
        """In plan order, and few at a time."""
        waiting: deque[Future[Any]] = deque()
        for step in merged:
            for matrix in run.matrices(step):
                for place in run.cuts(step, matrix.size):
                    waiting.append(pool.submit(look, step, matrix, place))
                    if len(waiting) > 4 * threads:
                        yield waiting.popleft().result()
            report()
        while waiting:
            yield waiting.popleft().result()

    with ThreadPoolExecutor(threads, thread_name_prefix="weightsmith-survey") as pool:
        try:
            while number < survey.passes():
                survey.fold(number, results())
                number += 1
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return survey
