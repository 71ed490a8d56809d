"""The `changes` product: the largest change of each of some tensors, for those that are not decomposed."""

from __future__ import annotations

from collections.abc import Sequence

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._plans import Product, Step
from weightsmith.abc.product import Arrays

NAME = "changes of other tensors"


def changes(steps: Sequence[Step]) -> Product:
    """The product. steps: of the differences."""
    return Product(NAME, "changes", (TensorSpec(NAME, DTYPES["F32"], (len(steps),)),), {}, tuple(steps))


def _compute(context: ProductContext) -> Arrays:
    return [context.largest([step.out.name for step in context.product.steps])]


def _check(product: Product) -> str:
    return "" if product.outs == changes(product.steps).outs else "it has not one number for each tensor"


KIND = ProductKind("comparing", compute=_compute, check=_check)
