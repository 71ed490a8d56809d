"""The `states` product: what enters the layer after one, from what enters that."""

from __future__ import annotations

from weightsmith.plans import Product
from weightsmith.products import Bench, ProductKind
from weightsmith.products.base import Arrays
from weightsmith.quantisation.calibration.work import LayerWork


def compute(bench: Bench) -> Arrays:
    """Run a layer, with its quantised weights if the settings name them."""
    import torch

    from weightsmith.outputs.local.products import release_pages
    from weightsmith.quantisation.calibration.common import (
        NUMBERED_ROW,
        PhaseProgress,
        check_finite,
        decoder_of,
        device_of,
        row_batches,
    )
    from weightsmith.quantisation.calibration.schemes import dequantise, split
    from weightsmith.quantisation.calibration.sums import workers

    work, device = LayerWork.of(bench.product), device_of(bench)
    [before] = bench.arrays(work.states)
    [after] = bench.create()
    given = {}
    if work.made:
        specs = {step.out.name: step.out for step in bench.product.steps}
        for name, stored in split(work.weights, specs, bench.arrays(work.made)):
            given[name] = torch.from_numpy(dequantise(stored, work.weights[name], specs[name].shape))
            for array in stored:
                release_pages(array)
    progress = PhaseProgress(bench, work.base, work.layer, 0.7, 1)
    with (
        workers(bench.threads, device) as pool,
        decoder_of(work.base).layer(work.layer, bench, before.shape[1], device, given) as layer,
    ):

        def run(numbered: NUMBERED_ROW) -> None:
            row, hidden = numbered
            with torch.no_grad():
                out = layer(hidden)
            check_finite(out, f"the output of layer {work.layer}", row, work.base)
            after[row] = out.cpu().numpy()

        for rows in row_batches(before, bench.threads, device, progress, (0, 1)):
            list(pool.map(run, rows))
            release_pages(after)
    return [after]


def check(product: Product) -> str:
    """Why its settings are invalid, or ""."""
    if problem := LayerWork.check(product):
        return problem
    work = LayerWork.of(product)
    if not 0 <= work.layer < work.base.layers:
        return f"there is no layer {work.layer}"
    if len(product.outs) != 1 or product.outs[0].dtype.name != "F32" or len(product.outs[0].shape) != 3:
        return "it does not make states"
    return "" if {work.states, *filter(None, [work.made])} <= set(product.needs) else "it does not need what its settings name"


KIND = ProductKind("quantising layer by layer", compute=compute, check=check, device=True, transient=True)
