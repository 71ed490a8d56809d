"""The `importances` product: for each weight of a layer, the mean square of what each of its columns is multiplied by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weightsmith.plans import Product
from weightsmith.products import ProductContext, ProductKind
from weightsmith.products.base import Arrays
from weightsmith.quantisation.calibration.work import ImportanceWork

if TYPE_CHECKING:
    import numpy.typing as npt

    from weightsmith.quantisation.calibration.common import NUMBERED_ROW

    Squares = dict[str, tuple[int, npt.NDArray[np.float64]]]
    """Of each site that a row reaches: its tokens, and the sum of their squares in each column."""


def _compute(bench: ProductContext) -> Arrays:
    """A row runs on one thread, and rows are added in order: the result is the same for any number of threads."""
    from weightsmith.quantisation.calibration.common import PhaseProgress, decoder_of, device_of, row_batches
    from weightsmith.quantisation.calibration.sums import Inputs, workers

    work, device = ImportanceWork.of(bench.product), device_of(bench)
    [entering] = bench.arrays(work.states)
    progress = PhaseProgress(bench, work.base, work.layer, 0, 0.7)
    with (
        workers(bench.threads, device) as pool,
        decoder_of(work.base).layer(work.layer, bench, entering.shape[1], device) as layer,
    ):
        inputs = Inputs(layer, work.weights, work.base)

        def squares(row: NUMBERED_ROW) -> Squares:
            return {site: (len(x), x.double().square_().sum(0).cpu().numpy()) for site, x in inputs.of(row).items()}

        tokens = dict.fromkeys(inputs.sites, 0)
        sums = {site: np.zeros(inputs.width(site)) for site in inputs.sites}
        try:
            for rows in row_batches(entering, bench.threads, device, progress, (0, 1)):
                for found in pool.map(squares, rows):
                    for site, (count, total) in found.items():
                        tokens[site] += count
                        sums[site] += total
        finally:
            inputs.close()
        mean = {site: total / tokens[site] if tokens[site] else np.ones_like(total) for site, total in sums.items()}
        of_weight = {weight: mean[site] for site, weights in inputs.sites.items() for weight in weights}
    return [of_weight[weight].astype(np.float32) for weight in work.weights]


def _check(product: Product) -> str:
    if problem := ImportanceWork.check(product):
        return problem
    work = ImportanceWork.of(product)
    if not 0 <= work.layer < work.base.layers:
        return f"there is no layer {work.layer}"
    if work.states not in product.needs:
        return "it does not need the states that its settings name"
    shapes = {step.out.name: step.out.shape for step in product.steps}
    wanted = [("F32", shapes.get(weight, ())[1:]) for weight in work.weights]
    if [(out.dtype.name, out.shape) for out in product.outs] != wanted:
        return "its arrays are not those of its weights"
    return ""


KIND = ProductKind("measuring layer by layer", compute=_compute, check=_check, device=True)
