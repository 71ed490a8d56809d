"""The `given` product: arrays that whoever runs the plan has already, such as the tokens of a text."""

from __future__ import annotations

from collections.abc import Mapping

from weightsmith._base.errors import CheckpointError
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._plans import Product
from weightsmith._plans.codec import has_type
from weightsmith.abc.product import Arrays


def _compute(context: ProductContext) -> Arrays:
    what = "this plan continues from arrays that only the command that made it has"
    raise CheckpointError(what, where=f"product {context.product.name}", fix="run that command again: weightsmith eval")


def _check(product: Product) -> str:
    known = has_type(product.settings, Mapping[str, str]) and set(product.settings) == {"sha256"}
    return "" if known else "its settings are not the hash of its arrays"


KIND = ProductKind("reading arrays", compute=_compute, check=_check)
