"""The `token_row` product: one row of the embedding, as the output has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._plans import Product, Step
from weightsmith._plans.forms import ProductSettings
from weightsmith.abc.product import Arrays, ProductContext, ProductKind

OP = "token_row"


@dataclass(frozen=True, slots=True)
class TokenRow(ProductSettings):
    """The settings of the product.

    row  its number
    """

    row: int

    def product(self, name: str, embedding: Step, needs: tuple[str, ...]) -> Product:
        """The product. needs: the products of the embedding. Its array, float32 [columns], has its name."""
        outs = (TensorSpec(name, DTYPES["F32"], embedding.out.shape[1:]),)
        return Product(name, OP, outs, self.to_json(), (embedding,), needs=needs)

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """See `ProductSettings`."""
        if len(shapes) != 1:
            return "it is of one tensor"
        [shape] = shapes.values()
        if len(shape) != 2 or not 0 <= self.row < shape[0]:
            return f"there is no row {self.row:,}"
        fits = [(out.dtype.name, out.shape) for out in product.outs] == [("F32", shape[1:])]
        return "" if fits else "its array is not a row of its tensor"


def _compute(context: ProductContext) -> Arrays:
    [embedding] = context.product.steps
    return [context.rows(embedding.out.name, [TokenRow.of(context.product).row])[0]]


KIND = ProductKind("reading the row of a token", compute=_compute, check=TokenRow.check)
