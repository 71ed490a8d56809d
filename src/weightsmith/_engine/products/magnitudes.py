"""The largest magnitude of weights, or of weights that share a scale, before the first of their rows is encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._plans import Product, Step
from weightsmith._plans.codec import has_type
from weightsmith.abc.product import Arrays, ProductContext, ProductKind

OP = "magnitudes"


def magnitudes(
    of: str, steps: Sequence[Step], sets: Sequence[Sequence[str]], arrays: Mapping[str, str], needs: Sequence[str]
) -> Product:
    """The product that finds the largest magnitude of each set of tensors.

    of      what the tensors belong to, for the product's name
    steps   for the tensors, with plain values
    sets    names of tensors; each tensor is in one set, and gets the largest magnitude of its set: float32 [1]
    arrays  tensor → name of its array
    needs   products that the steps need
    """
    outs = tuple(TensorSpec(arrays[name], DTYPES["F32"], (1,)) for name in chain.from_iterable(sets))
    return Product(f"largest magnitudes of {of}", OP, outs, {"sets": [list(s) for s in sets]}, tuple(steps), needs=tuple(needs))


def _compute(context: ProductContext) -> Arrays:
    names = [step.out.name for step in context.product.steps]
    largest = dict(zip(names, context.largest(names), strict=True))
    return [
        np.array([max(largest[name] for name in names)], np.float32)
        for names in context.product.settings["sets"]
        for _ in names
    ]


def _check(product: Product) -> str:
    sets = product.settings.get("sets")
    if sets is None or not has_type(sets, tuple[tuple[str, ...], ...]):
        return "its sets are not lists of names"
    names = list(chain.from_iterable(sets))
    if sorted(names) != sorted(step.out.name for step in product.steps):
        return "its sets are not a partition of its tensors"
    if any((out.dtype.name, out.shape) != ("F32", (1,)) for out in product.outs) or len(product.outs) != len(names):
        return "it does not make one float32 for each tensor"
    return ""


KIND = ProductKind("finding the largest weights", compute=_compute, check=_check)
