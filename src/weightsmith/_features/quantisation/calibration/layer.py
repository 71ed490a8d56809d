"""The `quantised_layer` product: the weights of a layer, quantised for what enters it.

Attention is quantised first, then the MLP for what it receives from the quantised attention. Inputs of both are those of
unquantised weights in the module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from weightsmith._activations.sites import is_attention, site_of
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._features.quantisation.calibration import schemes
from weightsmith._features.quantisation.calibration.work import QuantisedWork
from weightsmith._models.formats import find_encoding
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays

if TYPE_CHECKING:
    from torch import Tensor

    from weightsmith._activations.running import LayerRows, NumberedRow
    from weightsmith._activations.sums import Inputs

LAYER_BY_LAYER = "quantising layer by layer"
"""The progress of quantised weights, and of what leaves their layers."""

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
    from weightsmith._activations.running import layer_rows

    work = QuantisedWork.of(bench.product)
    if work.layer == work.base.layers:
        return _head(bench, work)
    found: dict[str, Arrays] = {}
    with layer_rows(bench, work, 0, 0.7) as rows:
        parts = stages(work.weights)
        for number, stage in enumerate(parts):
            if number:
                _give(rows, parts[number - 1], found)
            _quantise(rows, stage, (number / len(parts), (number + 1) / len(parts)), found)
    return [array for name in work.weights for array in found[name]]


def _quantise(rows: LayerRows, stage: Mapping[str, str], span: tuple[float, float], found: dict[str, Arrays]) -> None:
    """Quantise some weights of a layer, which itself remains as it is. span: of the progress."""
    from weightsmith._activations.running import budget
    from weightsmith._activations.sums import use_sums
    from weightsmith._features.quantisation.calibration.common import Room, located
    from weightsmith._features.quantisation.exl2.matrix import PREPARE_BYTES, prepare

    routed = any("experts" in name.split(".") for name in stage)
    last = [site_of(name) for name in stage if not routed and name.split(".")[-2] in _LAST]
    room = Room(budget(rows.bench))

    def quantise(inputs: Inputs, site: str, finish: Callable[[str], Any]) -> None:
        with located(f"{site}, {rows.base.label}"):
            sort = not any(schemes.keeps_order(stage[name]) for name in inputs.sites[site])
            with room(PREPARE_BYTES * inputs.width(site) ** 2):
                hessian = finish(site)
                prepared = None if hessian is None else prepare(hessian, sort=sort)
                del hessian
            for name in inputs.sites[site]:
                weight = rows.layer.linear(name).weight.detach().cpu().numpy()
                found[name] = schemes.quantise(weight, stage[name], prepared)

    use_sums(rows, list(stage), quantise, span=span, last=last[0] if last else "")


def _give(rows: LayerRows, stage: Mapping[str, str], made: Mapping[str, Arrays]) -> None:
    """Give a layer its quantised weights."""
    import torch

    from weightsmith._activations.running import workers

    def give(name: str) -> None:
        weight = rows.layer.linear(name).weight
        decoded = schemes.dequantise(made[name], stage[name], tuple(weight.shape))
        with torch.no_grad():
            weight.copy_(torch.from_numpy(decoded))

    with workers(rows.bench.threads, rows.device) as pool:
        list(pool.map(give, stage))


def _head(bench: ProductContext, work: QuantisedWork) -> Arrays:
    """Quantise the head for what leaves the final norm."""
    import torch

    from weightsmith._activations.running import decoder_of, rows_of_states, workers
    from weightsmith._activations.statistics.gram import STATISTIC as GRAM
    from weightsmith._activations.sums import Sums
    from weightsmith._features.quantisation.calibration.common import located
    from weightsmith._features.quantisation.exl2.matrix import Unread, prepare

    rows = rows_of_states(bench, work, 0, 0)
    [(name, encoding)] = work.weights.items()
    n, k = next(step.out.shape for step in bench.product.steps if step.out.name == name)
    sums = Sums(GRAM, {name: (n, k)}, rows.device)
    with workers(bench.threads, rows.device) as pool, decoder_of(work.base).final_norm(bench, rows.device) as norm:

        def run(numbered: NumberedRow) -> dict[str, tuple[Tensor, ...]]:
            row, hidden = numbered
            with torch.no_grad():
                x = norm(hidden)
            rows.check_finite(x, "the input of the head", row)
            return {name: (x,)}

        for some in rows.batches():
            sums.add(list(pool.map(run, some)), pool)
    weight = Unread((n, k), lambda array: bench.fill({name: array}))
    with located(f"{name}, {work.base.label}"):
        return schemes.quantise(weight, encoding, prepare(sums.finish(name)))


def _check(product: Product) -> str:
    if problem := QuantisedWork.check(product):
        return problem
    work = QuantisedWork.of(product)
    specs = {step.out.name: step.out for step in product.steps}
    if work.layer == work.base.layers and len(work.weights) != 1:
        return f"there is no layer {work.layer}, or it has other weights"
    if problem := schemes.problem(work.weights.items(), specs):
        return problem
    outs = [out for name, encoding in work.weights.items() for out in find_encoding(encoding).outs(specs[name])]
    same = [(out.dtype, out.shape) for out in outs] == [(out.dtype, out.shape) for out in product.outs]
    return "" if same else "its arrays are not those of its encodings"


KIND = ProductKind(LAYER_BY_LAYER, compute=_compute, check=_check, device=True)
