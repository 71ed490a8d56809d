"""Computes parts of a plan without writing anything: one product, or the distance of a merge from its base."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from weightsmith.distance import Moved, distance_by_layer
from weightsmith.execution.run import reports_of, resources_of
from weightsmith.execution.stages import check_computable
from weightsmith.options import RunOptions
from weightsmith.planner.build import Prepared

if TYPE_CHECKING:
    from weightsmith.engine.local import Progress
    from weightsmith.outputs.interface import Finished
    from weightsmith.products import Report
    from weightsmith.products.base import Arrays


def make_product(
    prepared: Prepared, name: str, options: RunOptions, progress: Callable[[Progress], None] | None = None
) -> Report | None:
    """Compute one product of a plan and its dependencies in memory. Returns its report; writes nothing."""
    from weightsmith.engine.local import run

    check_computable(prepared)
    if options.stream:
        prepared.stream()
    prepared.download()
    plan = prepared.plan
    products = plan.products_for((), {name})
    outcome = run(
        plan,
        prepared.inputs,
        _Discarded(),
        resources_of(plan, options),
        steps=(),
        products=products,
        progress=progress,
        folders=[model.folder for model in prepared.inputs],
    )
    return reports_of(products, outcome.results).get(name)


def measure_distance(
    prepared: Prepared, options: RunOptions, progress: Callable[[Progress], None] | None = None
) -> tuple[Moved, ...]:
    """The distance of the merge from its base: in total, then per layer; () without a base.

    Computes like `execute`, without writing anything. Cost: that of the merge without writing.
    """
    from weightsmith.engine.local import run

    check_computable(prepared)
    if options.stream:
        prepared.stream()
    prepared.download()
    plan = prepared.plan
    steps = [step for step in plan.steps if any(leaf.base and leaf.merges for leaf in step.leaves)]
    outcome = run(
        plan,
        prepared.inputs,
        _Discarded(),
        resources_of(plan, options),
        steps=steps,
        products=plan.products_for(steps),
        progress=progress,
    )
    return distance_by_layer(plan, outcome.distances)


class _Discarded:
    """An engine output that discards everything."""

    def location(self, name: str) -> None:
        return None

    def write(self, name: str, start_byte: int, buffer: object) -> None:
        pass

    def equal(self, name: str, start_byte: int, extent: object) -> None:
        pass

    def finish(self, name: str, done: Finished) -> None:
        pass

    def create(self, product: object) -> None:
        pass

    def keep(self, product: object, arrays: Arrays) -> Arrays:
        return arrays

    def forget(self, product: object) -> None:
        pass
