"""The `quantised_states` product: what leaves a layer whose weights are quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from weightsmith._activations.states import check, run
from weightsmith._activations.work import LayerWork
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._features.quantisation.calibration.common import split
from weightsmith._features.quantisation.calibration.layer import LAYER_BY_LAYER
from weightsmith._models.formats import find_encoding
from weightsmith.abc.product import Arrays


@dataclass(frozen=True, slots=True)
class QuantisedStatesWork(LayerWork):
    """Settings of the product.

    weights  the encoding of each quantised weight, by name
    made     the product that makes them
    """

    weights: Mapping[str, str]
    made: str

    @property
    def needs(self) -> set[str]:
        """The products that the settings name."""
        return {self.states, self.made}


def _compute(bench: ProductContext) -> Arrays:
    import torch

    from weightsmith._files.mapped import release_pages

    work = QuantisedStatesWork.of(bench.product)
    specs = {step.out.name: step.out for step in bench.product.steps}
    given = {}
    for name, stored in split(work.weights, specs, bench.arrays(work.made)):
        given[name] = torch.from_numpy(find_encoding(work.weights[name]).dequantise(stored, specs[name].shape))
        for array in stored:
            release_pages(array)
    return run(bench, work, given)


_check = partial(check, kind=QuantisedStatesWork)
KIND = ProductKind(LAYER_BY_LAYER, compute=_compute, check=_check, device=True, transient=True)
