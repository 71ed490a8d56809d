"""The `sampled_states` product: the first rows of what leaves a layer, kept to compare it with another model's."""

from __future__ import annotations

import numpy as np

from weightsmith._activations.states import FORWARD
from weightsmith._activations.states import check as check_states
from weightsmith._activations.work import LayerWork
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith.abc.product import Arrays


def _compute(context: ProductContext) -> Arrays:
    rows = context.product.outs[0].shape[0]
    return [np.array(context.arrays(LayerWork.of(context.product).states)[0][:rows])]


KIND = ProductKind(FORWARD, compute=_compute, check=check_states)
