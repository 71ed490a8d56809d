"""Computes parts of a plan without writing anything: one product, or the distance of a merge from its base."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from weightsmith._base.options import RunOptions
from weightsmith._execution.distance import Moved, distance_by_layer
from weightsmith._execution.run import reports_of, resources_of
from weightsmith._execution.stages import check_computable
from weightsmith._planning.planner.prepared import Prepared, download, stream

if TYPE_CHECKING:
    from weightsmith._engine.local import Progress
    from weightsmith._engine.products import Report


def make_product(
    prepared: Prepared, name: str, options: RunOptions, progress: Callable[[Progress], None] | None = None
) -> Report | None:
    """Compute one product of a plan and its dependencies in memory. Returns its report; writes nothing."""
    from weightsmith._engine.local import Workload, run
    from weightsmith._engine.unwritten import DiscardedOutput

    check_computable(prepared)
    if options.stream:
        stream(prepared.inputs)
    download(prepared.inputs)
    plan = prepared.plan
    products = plan.products_for((), {name})
    outcome = run(
        plan,
        prepared.inputs,
        DiscardedOutput(),
        resources_of(plan, options),
        Workload(steps=(), products=products, folders=[model.folder for model in prepared.inputs]),
        progress=progress,
    )
    return reports_of(products, outcome.results).get(name)


def measure_distance(
    prepared: Prepared, options: RunOptions, progress: Callable[[Progress], None] | None = None
) -> tuple[Moved, ...]:
    """The distance of the merge from its base: in total, then per layer; () without a base.

    Computes like `execute`, without writing anything. Cost: that of the merge without writing.
    """
    from weightsmith._engine.local import Workload, run
    from weightsmith._engine.unwritten import DiscardedOutput

    check_computable(prepared)
    if options.stream:
        stream(prepared.inputs)
    download(prepared.inputs)
    plan = prepared.plan
    steps = [step for step in plan.steps if any(leaf.base and leaf.merges for leaf in step.leaves)]
    outcome = run(
        plan,
        prepared.inputs,
        DiscardedOutput(),
        resources_of(plan, options),
        Workload(steps=steps, products=plan.products_for(steps)),
        progress=progress,
    )
    return distance_by_layer(plan, outcome.distances)
