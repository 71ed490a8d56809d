"""The tests that every kind of product must pass.

    class TestMyProduct(ProductTests):
        @pytest.fixture
        def case(self):
            return ProductCase(plan, lambda: [open_checkpoint(folder) for folder in folders])

Test the numbers separately, against a reference of your own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from weightsmith._engine.local import DiscardedOutput, run
from weightsmith._engine.products import find_kind
from weightsmith._engine.resources import Resources, Workload
from weightsmith._engine.results import Results
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._plans import Plan, plan_from_json


@dataclass(frozen=True, slots=True)
class ProductCase:
    """A plan with products of the kind.

    inputs  opens the plan's models, which have tensors of more than one grain
    """

    plan: Plan
    inputs: Callable[[], Sequence[Checkpoint]]


class ProductTests:
    """The tests. A subclass defines a fixture `case`, a `ProductCase`; pytest does not collect this class itself."""

    def test_a_plan_keeps_it_through_json_and_finds_it_valid(self, case: ProductCase) -> None:
        plan = plan_from_json(json.loads(json.dumps(case.plan.to_json())))
        assert plan.products == case.plan.products
        assert case.plan.products
        for product in plan.products:
            kind = find_kind(product.op)
            assert (kind.reduce is None) != (kind.compute is None)
            assert kind.check(product) == ""
            assert kind.doing.strip()
            assert kind.serves(product, product)

    def test_its_arrays_have_the_dtypes_and_shapes_of_the_plan(self, case: ProductCase) -> None:
        results = _computed(case)
        for product in case.plan.products:
            if not product.transient:
                for out, array in zip(product.outs, results.arrays(product.name), strict=True):
                    assert (array.dtype, array.shape) == (out.dtype.numpy, out.shape)

    def test_tiles_and_threads_do_not_change_a_byte(self, case: ProductCase) -> None:
        first = _bytes(case, _computed(case, threads=1, tile_bytes=1))
        assert first == _bytes(case, _computed(case, threads=4, tile_bytes=1))
        assert first == _bytes(case, _computed(case, threads=2, tile_bytes=1 << 30))


def _computed(case: ProductCase, *, threads: int = 2, tile_bytes: int = 1 << 20) -> Results:
    with ExitStack() as stack:
        inputs = [stack.enter_context(closing(model)) for model in case.inputs()]
        workload = Workload(steps=(), folders=[model.folder for model in inputs])
        return run(case.plan, inputs, DiscardedOutput(), Resources(threads, tile_bytes), workload).results


def _bytes(case: ProductCase, results: Results) -> list[bytes]:
    products = [product for product in case.plan.products if not product.transient]
    return [array.tobytes() for product in products for array in results.arrays(product.name)]
