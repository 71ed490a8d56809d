"""The `quantised_states` product: what leaves a layer whose weights are quantised."""

from __future__ import annotations

from functools import partial

from weightsmith._activations.states import check, run
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._features.quantisation.calibration.layer import LAYER_BY_LAYER
from weightsmith._features.quantisation.calibration.schemes import dequantise, split
from weightsmith._features.quantisation.calibration.work import QuantisedStatesWork
from weightsmith.abc.product import Arrays


def _compute(bench: ProductContext) -> Arrays:
    import torch

    from weightsmith._outputs.local.products import release_pages

    work = QuantisedStatesWork.of(bench.product)
    specs = {step.out.name: step.out for step in bench.product.steps}
    given = {}
    for name, stored in split(work.weights, specs, bench.arrays(work.made)):
        given[name] = torch.from_numpy(dequantise(stored, work.weights[name], specs[name].shape))
        for array in stored:
            release_pages(array)
    return run(bench, work, given)


_check = partial(check, kind=QuantisedStatesWork)
KIND = ProductKind(LAYER_BY_LAYER, compute=_compute, check=_check, device=True, transient=True)
