"""The `embedded_rows` product: what enters the first layer, for given rows of tokens."""

from __future__ import annotations

from weightsmith._activations.embedding import embedded
from weightsmith._activations.states import FORWARD
from weightsmith._activations.states import check as check_states
from weightsmith._activations.work import LayerWork
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._models.structure.vocabulary import is_embedding
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays


def _compute(context: ProductContext) -> Arrays:
    work = LayerWork.of(context.product)
    return embedded(context, work.base, context.arrays(work.states)[0])


def _check(product: Product) -> str:
    if problem := check_states(product):
        return problem
    return "" if any(is_embedding(step.out) for step in product.steps) else "it has no step for an embedding"


KIND = ProductKind(FORWARD, compute=_compute, check=_check, transient=True)
