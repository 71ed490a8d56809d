"""A product's workbench without a run around it."""

from __future__ import annotations

from collections.abc import Callable

from weightsmith.engine.bench import EngineBench, MemoryOutput
from weightsmith.engine.local import Resources, Run, run
from weightsmith.engine.reader import Reader
from weightsmith.mixture.assembly import Assembly, Donor
from weightsmith.plans import PlanDraft, Product


def bench_of(donor: Donor, assembly: Assembly, progress: Callable[[object], None] | None = None) -> EngineBench:
    """What a product that looks at all tensors of a donor works with; the products of merges on the way are made."""
    product = Product("shown", "router", (), {}, steps=tuple(donor.steps.values()))
    draft = PlanDraft.of(assembly.draft)
    draft.products.append(product)
    plan, output = draft.finish(), MemoryOutput({})
    results = run(plan, assembly.inputs, output, products=plan.products[:-1], progress=progress).results
    return Run(Reader(plan, assembly.inputs, results), (), (), output, Resources())._bench(product)
