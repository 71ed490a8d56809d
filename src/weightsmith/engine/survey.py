"""Shows the survey of a method all the tensors that the method merges, before the merge."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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


def conduct(run: Run, threads: int, report: Callable[[], None]) -> dict[str, Survey]:
    """The surveys of the plan's methods that have one, by method, all passes done. `report` is called now and then."""
    merged: dict[str, list[Step]] = {}
    for leaf in (leaf for step in run.plan.steps for leaf in step.leaves if leaf.merges and leaf.out.size):
        merged.setdefault(leaf.op, []).append(leaf)
    surveys = {}
    for method, steps in merged.items():
        survey = methods.get(method).survey([(step, run.plan.settings[step.settings]) for step in steps])
        if survey is not None:
            _conduct(run, survey, steps, threads, report)
            surveys[method] = survey
    return surveys


def _conduct(run: Run, survey: Survey, merged: Sequence[Step], threads: int, report: Callable[[], None]) -> None:
    """Show a survey its tensors, as often as it wants."""
    own = threading.local()
    number = 0

    def look(step: Step, matrix: Matrix, place: Cut) -> Any:
        if not hasattr(own, "buffers"):
            own.buffers = Buffers()
        size = min(place.size, matrix.grain) if survey.sampled(number) else place.size
        raw, read = run.read(step, place.start, size, own.buffers)
        run.count(read, 0)
        return survey.statistics(number, matrix, Tile(place.start, size, raw, own.buffers.scratch))

    def results() -> Iterator[Any]:
        """In plan order, and few at a time."""
        waiting: deque[Future[Any]] = deque()
        for step in merged:
            matrix = run.matrix(step)
            for place in run.cuts(step):
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
