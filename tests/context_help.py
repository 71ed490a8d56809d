"""What a product that computes works with, without a run around it."""

from __future__ import annotations

from collections.abc import Callable

from weightsmith._engine.local import DiscardedOutput, Run, run
from weightsmith._engine.reader import Reader
from weightsmith._engine.resources import Resources, Workload
from weightsmith._features.mixture.assembly import Assembly, Donor
from weightsmith._plans import PlanDraft, Product
from weightsmith.abc.product import ProductContext


def context_of(
    donor: Donor, assembly: Assembly, progress: Callable[[object], None] | None = None, *, cancelled: bool = False
) -> ProductContext:
    """What a product that reads all tensors of a donor works with; the products of merges on the way are made.

    cancelled  nobody waits for the product
    """
    product = Product("shown", "router", (), {}, steps=tuple(donor.steps.values()))
    draft = PlanDraft.of(assembly.draft)
    draft.products.append(product)
    plan, output = draft.finish(), DiscardedOutput()
    workload = Workload(products=plan.products[:-1])
    results = run(plan, assembly.inputs, output, workload=workload, progress=progress).results
    graph = Run(Reader(plan, assembly.inputs, results), (), (), output, Resources()).products
    context = graph.context(product, {})
    if cancelled:
        graph.close()
    return context
