"""The `measured_layer` product: the error that each candidate setting causes in the output of each linear layer.

No forward pass is needed but that for the Hessians: with Δ the error of a weight W, tr(Δ H Δᵀ) / tr(W H Wᵀ) is the share of
the output's energy on the calibration text. Settings are tried on `FEATURES` output features, spread over the weight.

Each token counts by the size of its error in relation to the residual stream, because that is how the norms of later layers
see it. Otherwise the few tokens with massive activations (Sun et al. 2024, https://arxiv.org/abs/2402.17762) hide the errors
of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith.plans import Product
from weightsmith.products import Bench, ProductKind
from weightsmith.products.base import Arrays, Floats
from weightsmith.quantisation.calibration import schemes
from weightsmith.quantisation.calibration.work import MeasureWork

if TYPE_CHECKING:
    from weightsmith.quantisation.exl2.matrix import FactoredHessian

FEATURES = 128


def _compute(bench: Bench) -> Arrays:
    from weightsmith.quantisation.calibration.common import PhaseProgress, Room, budget, decoder_of, device_of
    from weightsmith.quantisation.calibration.sums import Inputs, use_hessians
    from weightsmith.quantisation.exl2.matrix import PREPARE_BYTES, prepare

    work, device = MeasureWork.of(bench.product), device_of(bench)
    progress = PhaseProgress(bench, work.base, work.layer, 0, 0.7)
    [entering] = bench.arrays(work.states)
    errors = np.zeros(bench.product.outs[0].shape)
    energies = np.zeros(bench.product.outs[1].shape)
    energies[-1] = entering.shape[0] * entering.shape[1]
    room = Room(budget(bench))
    places = {name: i for i, name in enumerate(work.candidates)}
    with decoder_of(work.base).layer(work.layer, bench, entering.shape[1], device) as layer:

        def measure(inputs: Inputs, site: str, finish: Callable[[], Any]) -> None:
            with room(PREPARE_BYTES * inputs.width(site) ** 2):
                hessian = finish()
                prepared = None if hessian is None else prepare(hessian)
            for name in inputs.sites[site]:
                weight = layer.linear(name).weight.detach().cpu().numpy()
                energies[places[name]] = _energy(weight, hessian)
                found = _errors(weight, hessian, prepared, work.candidates[name])
                errors[places[name], : len(found)] = found

        use_hessians(layer, list(work.candidates), work.base, entering, bench, device, progress, (0, 1), measure, relative=True)
    return errors, energies


def _errors(weight: Floats, hessian: Any, prepared: FactoredHessian | None, encodings: tuple[str, ...]) -> list[float]:
    """The error of each encoding, on some of the output features."""
    some = np.linspace(0, len(weight) - 1, min(FEATURES, len(weight))).astype(np.int64)
    part = np.ascontiguousarray(weight[some])
    whole = _energy(part, hessian)
    found = []
    for encoding in encodings:
        delta = part - schemes.dequantise(schemes.quantise(part, encoding, prepared), encoding, part.shape)
        found.append(_energy(delta, hessian) / whole if whole else 0.0)
    return found


def _energy(weight: Floats, hessian: Any) -> float:
    """tr(W H Wᵀ), H = I if no input reached the layer. The product in float32, on one thread; the sum in float64."""
    import torch

    if hessian is None:
        return float(np.square(weight, dtype=np.float64).sum())
    with torch.no_grad():
        product = (torch.from_numpy(weight) @ torch.from_numpy(hessian)).numpy()
    return float((product.astype(np.float64) * weight).sum())


def _check(product: Product) -> str:
    if problem := MeasureWork.check(product):
        return problem
    work = MeasureWork.of(product)
    if not 0 <= work.layer < work.base.layers:
        return f"there is no layer {work.layer}"
    if work.states not in product.needs:
        return "it does not need the states that its settings name"
    specs = {step.out.name: step.out for step in product.steps}
    if problem := schemes.problem(((name, each) for name, tried in work.candidates.items() for each in tried), specs):
        return problem
    shapes = shapes_of(work.candidates)
    return "" if tuple(out.shape for out in product.outs) == shapes else "its arrays are not those of its candidates"


def shapes_of(candidates: Mapping[str, tuple[str, ...]]) -> tuple[tuple[int, ...], ...]:
    """Errors [weights, candidates], and energies [weights + 1]: of each output, and the number of tokens."""
    return (len(candidates), max(map(len, candidates.values()), default=0)), (len(candidates) + 1,)


KIND = ProductKind("measuring layer by layer", compute=_compute, check=_check, device=True)
