"""The `quantised_layer` product: the weights of a layer, quantised for what enters it.

Attention is quantised first, then the MLP for what it receives from the quantised attention. Inputs of both are those of
unquantised weights in the module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from weightsmith.encodings import find_encoding
from weightsmith.plans import Product
from weightsmith.products import ProductContext, ProductKind
from weightsmith.products.base import Arrays
from weightsmith.quantisation.calibration import schemes
from weightsmith.quantisation.calibration.sites import is_attention, site_of
from weightsmith.quantisation.calibration.work import LayerWork

if TYPE_CHECKING:
    from weightsmith.decoder.forward import Decoder, Layer
    from weightsmith.quantisation.calibration.common import PhaseProgress

_LAST = ("o_proj", "down_proj")
"""Inputs of these come last in their block."""


def stages(weights: Mapping[str, str]) -> list[dict[str, str]]:
    """The weights of the attention, and the others.

    >>> [list(stage) for stage in stages({"l.0.mlp.up_proj.weight": "", "l.0.self_attn.q_proj.weight": ""})]
    [['l.0.self_attn.q_proj.weight'], ['l.0.mlp.up_proj.weight']]
    """
    first = {name: setting for name, setting in weights.items() if is_attention(name)}
    rest = {name: setting for name, setting in weights.items() if name not in first}
    return [stage for stage in (first, rest) if stage]


def _compute(bench: ProductContext) -> Arrays:
    from weightsmith.quantisation.calibration.common import PhaseProgress, decoder_of, device_of

    work, device = LayerWork.of(bench.product), device_of(bench)
    progress = PhaseProgress(bench, work.base, work.layer, 0, 0.7)
    decoder = decoder_of(work.base)
    [entering] = bench.arrays(work.states)
    found: dict[str, Arrays] = {}
    if work.layer == work.base.layers:
        return _head(bench, work, decoder, entering, device)
    with decoder.layer(work.layer, bench, entering.shape[1], device) as layer:
        parts = stages(work.weights)
        for number, stage in enumerate(parts):
            if number:
                _give(layer, parts[number - 1], found, bench.threads, device)
            _quantise(bench, work, stage, entering, layer, device, progress, (number / len(parts), 1 / len(parts)), found)
    return [array for name in work.weights for array in found[name]]


def _quantise(
    bench: ProductContext,
    work: LayerWork,
    stage: Mapping[str, str],
    entering: Any,
    layer: Layer,
    device: str,
    progress: PhaseProgress,
    span: tuple[float, float],
    found: dict[str, Arrays],
) -> None:
    """Quantise some weights of a layer, which itself remains as it is."""
    from weightsmith.quantisation.calibration.common import Room, budget, located
    from weightsmith.quantisation.calibration.sums import Inputs, use_hessians
    from weightsmith.quantisation.exl2.matrix import PREPARE_BYTES, prepare

    routed = any("experts" in name.split(".") for name in stage)
    last = [site_of(name) for name in stage if not routed and name.split(".")[-2] in _LAST]
    room = Room(budget(bench))

    def quantise(inputs: Inputs, site: str, finish: Callable[[str], Any]) -> None:
        with located(f"{site}, {work.base.label}"):
            sort = not any(schemes.keeps_order(stage[name]) for name in inputs.sites[site])
            with room(PREPARE_BYTES * inputs.width(site) ** 2):
                hessian = finish(site)
                prepared = None if hessian is None else prepare(hessian, sort=sort)
                del hessian
            for name in inputs.sites[site]:
                weight = layer.linear(name).weight.detach().cpu().numpy()
                found[name] = schemes.quantise(weight, stage[name], prepared)

    at_end = last[0] if last else ""
    use_hessians(layer, list(stage), work.base, entering, bench, device, progress, span, quantise, last=at_end)


def _give(layer: Layer, stage: Mapping[str, str], made: Mapping[str, Arrays], threads: int, device: str) -> None:
    """Give a layer its quantised weights."""
    import torch

    from weightsmith.quantisation.calibration.sums import workers

    def give(name: str) -> None:
        weight = layer.linear(name).weight
        decoded = schemes.dequantise(made[name], stage[name], tuple(weight.shape))
        with torch.no_grad():
            weight.copy_(torch.from_numpy(decoded))

    with workers(threads, device) as pool:
        list(pool.map(give, stage))


def _head(bench: ProductContext, work: LayerWork, decoder: Decoder, entering: Any, device: str) -> Arrays:
    """Quantise the head for what leaves the final norm."""
    import torch

    from weightsmith.quantisation.calibration.common import NUMBERED_ROW, PhaseProgress, check_finite, located, row_batches
    from weightsmith.quantisation.calibration.sums import Hessians, workers
    from weightsmith.quantisation.exl2.matrix import Unread, prepare

    progress = PhaseProgress(bench, work.base, work.layer, 0, 0)
    [(name, encoding)] = work.weights.items()
    sums = Hessians({name: entering.shape[2]}, device)
    with workers(bench.threads, device) as pool, decoder.final_norm(bench, device) as norm:

        def run(numbered: NUMBERED_ROW) -> dict[str, Any]:
            row, hidden = numbered
            with torch.no_grad():
                x = norm(hidden)
            check_finite(x, "the input of the head", row, work.base)
            return {name: x}

        for rows in row_batches(entering, bench.threads, device, progress, (0, 1)):
            sums.add(list(pool.map(run, rows)), pool)
    n, k = next(step.out.shape for step in bench.product.steps if step.out.name == name)
    weight = Unread((n, k), lambda array: bench.fill({name: array}))
    with located(f"{name}, {work.base.label}"):
        return schemes.quantise(weight, encoding, prepare(sums.finish(name)))


def _check(product: Product) -> str:
    if problem := LayerWork.check(product):
        return problem
    work = LayerWork.of(product)
    specs = {step.out.name: step.out for step in product.steps}
    if not 0 <= work.layer <= work.base.layers or (work.layer == work.base.layers and len(work.weights) != 1):
        return f"there is no layer {work.layer}, or it has other weights"
    if problem := schemes.problem(work.weights.items(), specs):
        return problem
    outs = [out for name, encoding in work.weights.items() for out in find_encoding(encoding).outs(specs[name])]
    if [(out.dtype, out.shape) for out in outs] != [(out.dtype, out.shape) for out in product.outs]:
        return "its arrays are not those of its encodings"
    return "" if work.states in product.needs else "it does not need the states that its settings name"


KIND = ProductKind("quantising layer by layer", compute=_compute, check=_check, device=True)
