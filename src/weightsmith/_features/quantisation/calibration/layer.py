"""Two products: `quantised_layer`, the weights of a layer quantised for what enters it, and `quantised_states`, what leaves the
layer with them.

Attention is quantised first, then the MLP for what it receives from the quantised attention. Inputs of both are those of
unquantised weights in the module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from weightsmith._activations.states import check, run
from weightsmith._activations.work import LayerWork
from weightsmith._base.tensors import TensorSpec
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._features.quantisation.calibration import common
from weightsmith._features.quantisation.calibration.common import CalibratedWork, split
from weightsmith._models.formats import find_encoding
from weightsmith._models.structure.projections import is_attention, site_of
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays
from weightsmith.abc.stored import Unread

if TYPE_CHECKING:
    from torch import Tensor

    from weightsmith._activations.running import LayerRows, NumberedRow
    from weightsmith._activations.sums import Inputs

LAYER_BY_LAYER = "quantising layer by layer"
"""The progress of quantised weights, and of what leaves their layers."""

_LAST = ("o_proj", "down_proj")
"""Inputs of these come last in their block."""


@dataclass(frozen=True, slots=True)
class QuantisedWork(CalibratedWork):
    """Settings of the product: a layer, or the head.

    weights  the encoding of each weight to quantise, by name
    """

    HEAD = True

    weights: Mapping[str, str]

    def encodings(self) -> Iterable[tuple[str, str]]:
        """The names of the weights, and their encodings."""
        return self.weights.items()

    def shapes(self, specs: Mapping[str, TensorSpec]) -> common.Shapes:
        """The stored tensors of each weight."""
        outs = [out for name, encoding in self.weights.items() for out in find_encoding(encoding).outs(specs[name])]
        return [(out.dtype.name, out.shape) for out in outs]

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """A head has one weight."""
        if self.layer == self.base.layers and len(self.weights) != 1:
            return f"there is no layer {self.layer}, or it has other weights"
        return CalibratedWork.problem(self, product, shapes)


def stages(weights: Mapping[str, str]) -> list[dict[str, str]]:
    """The weights of the attention, and the others.

    >>> [list(stage) for stage in stages({"l.0.mlp.up_proj.weight": "", "l.0.self_attn.q_proj.weight": ""})]
    [['l.0.self_attn.q_proj.weight'], ['l.0.mlp.up_proj.weight']]
    """
    first = {name: setting for name, setting in weights.items() if is_attention(name)}
    rest = {name: setting for name, setting in weights.items() if name not in first}
    return [stage for stage in (first, rest) if stage]


def _compute(context: ProductContext) -> Arrays:
    from weightsmith._activations.running import layer_rows

    work = QuantisedWork.of(context.product)
    if work.layer == work.base.layers:
        return _head(context, work)
    quantised: dict[str, Arrays] = {}
    with layer_rows(context, work, 0, 0.7) as rows:
        parts = stages(work.weights)
        for number, stage in enumerate(parts):
            if number:
                _give(rows, parts[number - 1], quantised)
            _quantise(rows, stage, (number / len(parts), (number + 1) / len(parts)), quantised)
    return [array for name in work.weights for array in quantised[name]]


def _quantise(rows: LayerRows, stage: Mapping[str, str], span: tuple[float, float], quantised: dict[str, Arrays]) -> None:
    """Quantise some weights of a layer, which itself remains as it is. span: of the progress."""
    from weightsmith._activations.running import budget
    from weightsmith._activations.sums import Forward, use_sums

    routed = any("experts" in name.split(".") for name in stage)
    last = [site_of(name) for name in stage if not routed and name.split(".")[-2] in _LAST]
    factors = common.Factors(budget(rows.context))

    def quantise(inputs: Inputs, site: str, finish: Callable[[str], Any]) -> None:
        encodings = {name: find_encoding(stage[name]) for name in inputs.sites[site]}
        with (
            common.located(f"{site}, {rows.base.label}"),
            factors.hessian(inputs, site, finish, encodings.values()) as hessian,
        ):
            for name, encoding in encodings.items():
                weight = rows.layer.linear(name).weight.detach().cpu().numpy()
                quantised[name] = encoding.quantise(weight, hessian, rows.context.threads)

    use_sums(rows, list(stage), quantise, span=span, forward=Forward(last=last[0] if last else ""))


def _give(rows: LayerRows, stage: Mapping[str, str], quantised: Mapping[str, Arrays]) -> None:
    """Give a layer its quantised weights."""
    from weightsmith._activations.running import workers

    def give(name: str) -> None:
        shape = tuple(rows.layer.linear(name).weight.shape)
        common.set_weight(rows.layer, name, find_encoding(stage[name]).dequantise(quantised[name], shape))

    with workers(rows.context.threads, "cpu") as pool:
        list(pool.map(give, stage))


def _head(context: ProductContext, work: QuantisedWork) -> Arrays:
    """Quantise the head for what leaves the final norm."""
    import torch

    from weightsmith._activations.running import decoder_of, rows_of_states, workers
    from weightsmith._activations.statistics.gram import STATISTIC as GRAM
    from weightsmith._activations.sums import Sums

    rows = rows_of_states(context, work, 0, 0)
    [(name, setting)] = work.weights.items()
    encoding = find_encoding(setting)
    n, k = next(step.out.shape for step in context.product.steps if step.out.name == name)
    sums = Sums(GRAM, {name: (n, k)}, rows.device)
    with workers(context.threads, rows.device) as pool, decoder_of(work.base).final_norm(context, rows.device) as norm:

        def run(numbered: NumberedRow) -> dict[str, tuple[Tensor, ...]]:
            row, hidden = numbered
            with torch.no_grad():
                x = norm(hidden)
            rows.check_finite(x, "the input of the head", row)
            return {name: (x,)}

        for some in rows.batches():
            sums.add(list(pool.map(run, some)), pool)
    weight = Unread((n, k), lambda array: context.fill({name: array}))
    with common.located(f"{name}, {work.base.label}"):
        hessian = common.factorised(sums.finish(name), encoding.hessian, context.threads)
        return encoding.quantise(weight, hessian, context.threads)


KIND = ProductKind(LAYER_BY_LAYER, compute=_compute, check=QuantisedWork.check, device=True)


# ---- what leaves the layer


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


def _compute_states(context: ProductContext) -> Arrays:
    import torch

    from weightsmith._files.arrays import release_pages

    work = QuantisedStatesWork.of(context.product)
    specs = {step.out.name: step.out for step in context.product.steps}
    dequantised = {}
    for name, stored in split(work.weights, specs, context.arrays(work.made)):
        dequantised[name] = torch.from_numpy(find_encoding(work.weights[name]).dequantise(stored, specs[name].shape))
        for array in stored:
            release_pages(array)
    return run(context, work, dequantised)


_check_states = partial(check, kind=QuantisedStatesWork)
STATES = ProductKind(LAYER_BY_LAYER, compute=_compute_states, check=_check_states, device=True, transient=True)
