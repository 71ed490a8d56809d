"""The measurement of a model: a product for each layer, and the error of each option of each block.

The square of an error is the loss that an option causes, in nats for each token: the sum of the losses of the block's weights.
A full measurement computes ExLlamaV2's errors instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from weightsmith._base.errors import FormatError
from weightsmith._features.quantisation.calibration.plan import Chain
from weightsmith._features.quantisation.exl2.blocks import Sublayer
from weightsmith._features.quantisation.exl2.measurement import LEAST_ERROR, Measured
from weightsmith._features.quantisation.exl2.model import Model
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays

_NOT_ALL = "not a plan that can be run: it does not measure every weight"


def products_for(model: Model, chain: Chain, *, full: bool) -> tuple[Product, ...]:
    """The products of a measurement."""
    layers = {name: layer for layer in range(chain.layers) for name in chain.names(layer)}
    blocks: dict[int, dict[str, tuple[Mapping[str, str], ...]]] = {}
    for block in model.blocks:
        options = _encodings(block)
        blocks.setdefault(layers[next(iter(options[0]))], {})[block.key] = options
    if full:
        return chain.forward(lambda layer, states: [chain.measured_blocks(layer, states, blocks.get(layer, {}))])
    tried = {
        layer: {name: candidates for options in own.values() for name, candidates in _candidates(options).items()}
        for layer, own in blocks.items()
    }

    def losses(layer: int, states: Product, gradients: Product, _leaving: Product) -> list[Product]:
        return [chain.measured(layer, states, gradients, tried.get(layer, {}))]

    return chain.backward(losses, lambda layer: tuple(tried.get(layer, ())))


def _encodings(block: Sublayer) -> tuple[Mapping[str, str], ...]:
    """The encoding of each weight of a block, for each option."""
    return tuple(
        {spec.name: f"exl2 {option.params[role]}" for role, specs in block.linears.items() for spec in specs}
        for option in block.options
    )


def _candidates(options: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    """The encodings to try for each weight of a block."""
    return {name: tuple(dict.fromkeys(option[name] for option in options)) for name in options[0]}


def errors_of(model: Model, products: Iterable[tuple[Product, Arrays]]) -> list[tuple[Sublayer, list[Measured]]]:
    """The error of every option. products: the measured layers, with their arrays. Raises FormatError if they are others."""
    products = list(products)
    if any(product.op == "measured_blocks" for product, _ in products):
        return _measured_errors(model, products)
    lost: dict[str, dict[str, float]] = {}
    for product, (losses,) in products:
        for i, (name, tried) in enumerate(product.settings["candidates"].items()):
            lost[name] = {encoding: float(losses[i, k]) for k, encoding in enumerate(tried)}
    wanted = [each for block in model.blocks for each in _candidates(_encodings(block)).items()]
    if any(lost.get(name, {}).keys() != set(tried) for name, tried in wanted):
        raise FormatError(_NOT_ALL, where="products", fix="make the plan again")
    found = []
    for block in model.blocks:
        losses_of = [sum(lost[name][encoding] for name, encoding in option.items()) for option in _encodings(block)]
        options = zip(block.options, losses_of, strict=True)
        found.append((block, [Measured(option.params, max(LEAST_ERROR, math.sqrt(loss))) for option, loss in options]))
    return found


def _measured_errors(model: Model, products: Iterable[tuple[Product, Arrays]]) -> list[tuple[Sublayer, list[Measured]]]:
    """As `errors_of`, for a full measurement."""
    errors = {key: row for product, (rows,) in products for key, row in zip(product.settings["blocks"], rows, strict=True)}
    if any(len(errors.get(block.key, ())) < len(block.options) for block in model.blocks):
        raise FormatError(_NOT_ALL, where="products", fix="make the plan again")
    return [
        (
            block,
            [
                Measured(option.params, min(1.0, max(LEAST_ERROR, float(error))))
                for option, error in zip(block.options, errors[block.key], strict=False)
            ],
        )
        for block in model.blocks
    ]
