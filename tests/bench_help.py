"""What a product that computes works with, without a run around it."""

from __future__ import annotations

from collections.abc import Callable

from weightsmith.engine.local import Resources, Run, Workload, run
from weightsmith.engine.reader import Reader
from weightsmith.engine.unwritten import DiscardedOutput
from weightsmith.mixture.assembly import Assembly, Donor
from weightsmith.plans import Made, Plan, Product
from weightsmith.products import ProductContext


def bench_of(
    donor: Donor, assembly: Assembly, progress: Callable[[object], None] | None = None, *, cancelled: bool = False
) -> ProductContext:
    """What a product that reads all tensors of a donor works with; the products of merges on the way are made.

    cancelled  nobody waits for the product
    """
    product = Product("shown", "router", (), {}, steps=tuple(donor.steps.values()))
    plan = Plan(Made("test"), tuple(assembly.models), (), tuple(assembly.settings), (*assembly.products, product))
    output = DiscardedOutput()
    workload = Workload(products=assembly.products)
    results = run(plan, assembly.inputs, output, workload=workload, progress=progress).results
    graph = Run(Reader(plan, assembly.inputs, results), (), (), output, Resources()).products
    context = graph.context(product)
    if cancelled:
        graph.close()
    return context
