"""The `states` product: what enters the layer after one, from what enters that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from weightsmith._activations.work import LayerWork
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays, Floats

if TYPE_CHECKING:
    from torch import Tensor

    from weightsmith._activations.running import NumberedRow

FORWARD = "measuring layer by layer"
"""The progress of states and statistics."""


def compute(context: ProductContext) -> Arrays:
    """Run a layer with the model's weights."""
    return run(context, LayerWork.of(context.product), {})


def made_beside(context: ProductContext, work: LayerWork) -> Floats | None:
    """An array for the states that leave a layer, if they are to be computed by its own weights, and nobody has."""
    own = LayerWork(work.base, work.packages, work.layer, work.states).to_json()

    def same(product: Product) -> bool:
        return product.op == "states" and product.settings == own and product.steps == context.product.steps

    found = context.also(same)
    return None if found is None else found[0]


def run(context: ProductContext, work: LayerWork, given: Mapping[str, Tensor]) -> Arrays:
    """Run a layer. given: weights to use instead of the model's, by name."""
    import torch

    from weightsmith._activations.running import layer_rows

    [after] = context.create()
    with layer_rows(context, work, 0.7, 1, given=given) as rows:

        def leaving(numbered: NumberedRow) -> Tensor:
            with torch.no_grad():
                return rows.layer(numbered[1])

        rows.fill(after, leaving, f"the output of layer {work.layer}")
    return [after]


def check(product: Product, kind: type[LayerWork] = LayerWork) -> str:
    """Why its settings are invalid, or ""."""
    if problem := kind.check(product):
        return problem
    makes = len(product.outs) == 1 and product.outs[0].dtype.name == "F32" and len(product.outs[0].shape) == 3
    return "" if makes else "it does not make states"


KIND = ProductKind(FORWARD, compute=compute, check=check, device=True, transient=True)
