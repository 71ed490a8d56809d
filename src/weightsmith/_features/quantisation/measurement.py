"""The measurement of a model: a product for each layer, and the error of each option of each block.

The square of an error is the loss that an option causes, in nats for each token: the sum of the losses of the block's weights.
A full measurement computes ExLlamaV2's errors instead. measurement.json is ExLlamaV2's exchange format; it is reused between
bit rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith._base.errors import FormatError
from weightsmith._base.files import show
from weightsmith._base.strict_json import read_object
from weightsmith._features.quantisation.calibration.plan import Chain
from weightsmith._models.formats.exl2.blocks import BlockParams, Sublayer
from weightsmith._models.formats.exl2.layout import params_from_json
from weightsmith._models.structure.configs import finite_number
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays

MAX_BYTES = 256 << 20
MAX_OPTIONS = 64
LEAST_ERROR = 1e-6
_MEASURE = "measure the model again"


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting of a block. params: by role. error: 1 - accuracy."""

    params: BlockParams
    error: float


def products_for(blocks: Sequence[Sublayer], chain: Chain, *, full: bool) -> tuple[Product, ...]:
    """The products of a measurement."""
    layers = {name: layer for layer in range(chain.layers) for name in chain.names(layer)}
    own: dict[int, dict[str, tuple[Mapping[str, str], ...]]] = {layer: {} for layer in range(chain.layers)}
    for block in blocks:
        own[layers[next(iter(block.encodings[0]))]][block.key] = block.encodings
    if full:
        return chain.forward(lambda layer, states: [chain.errors(layer, states, own[layer])])
    tried = {layer: dict(each for options in found.values() for each in _candidates(options)) for layer, found in own.items()}

    def losses(layer: int, states: Product, gradients: Product, _leaving: Product) -> list[Product]:
        return [chain.losses(layer, states, gradients, tried[layer])]

    return chain.backward(losses, lambda layer: tuple(tried[layer]))


def _candidates(options: Sequence[Mapping[str, str]]) -> list[tuple[str, tuple[str, ...]]]:
    """The names of the weights of a block, and the encodings to try for each."""
    return [(name, tuple(dict.fromkeys(option[name] for option in options))) for name in options[0]]


def errors_of(blocks: Sequence[Sublayer], products: Iterable[tuple[Product, Arrays]]) -> list[tuple[Sublayer, list[Measured]]]:
    """The error of every option. products: the measured layers, with their arrays. Raises FormatError if they are others."""
    errors: dict[str, list[float]] = {}
    losses: dict[tuple[str, str], float] = {}
    for product, (array,) in products:
        settings, rows = product.settings, array.tolist()
        if product.op == "measured_blocks":
            errors |= {key: [min(1.0, error) for error in row] for key, row in zip(settings["blocks"], rows, strict=True)}
        else:
            for (name, tried), row in zip(settings["candidates"].items(), rows, strict=True):
                losses |= {(name, encoding): loss for encoding, loss in zip(tried, row, strict=False)}
    found = []
    for block in blocks:
        options = [option.items() for option in block.encodings]
        if all(losses.keys() >= option for option in options):
            errors[block.key] = [math.sqrt(sum(losses[each] for each in option)) for option in options]
        if len(errors.get(block.key, ())) < len(options):
            what = "not a plan that can be run: it does not measure every weight"
            raise FormatError(what, where="products", fix="make the plan again")
        measured = zip(block.options, errors[block.key], strict=False)
        found.append((block, [Measured(option, max(LEAST_ERROR, error)) for option, error in measured]))
    return found


def read_measurement(path: Path, blocks: Sequence[Sublayer]) -> list[tuple[Sublayer, list[Measured]]]:
    """The settings that were measured for each block of a model. Raises FormatError for a file of another model, or damaged."""
    where = str(path)
    data = read_object(path, MAX_BYTES, "measurement.json", _MEASURE).get("measurement")
    if not isinstance(data, Mapping):
        raise FormatError("it has no object 'measurement'", where=where, fix=_MEASURE)
    return [(block, _options(data.get(block.key), block, where)) for block in blocks]


def _options(value: object, block: Sublayer, where: str) -> list[Measured]:
    where = f"{where}: {block.key}"
    if not isinstance(value, list) or not 0 < len(value) <= MAX_OPTIONS:
        what = f"it has {show(value) if not isinstance(value, list) else len(value)} for this block, not a list of settings"
        raise FormatError(what, where=where, fix=_MEASURE)
    found = []
    for each in value:
        if not isinstance(each, Mapping):
            raise FormatError(f"a setting is {show(each)}, not an object", where=where, fix=_MEASURE)
        params = {role: params_from_json(each.get(name), f"{where}.{name}") for role, name in block.names.items()}
        accuracy, bits = finite_number(each.get("accuracy")), each.get("total_bits")
        if accuracy is None or accuracy > 1:
            raise FormatError(f"accuracy is {show(each.get('accuracy'))}, not a number up to 1", where=where, fix=_MEASURE)
        if bits != block.bits(params):
            what = f"total_bits is {show(bits)}, and the setting takes {block.bits(params):,} bits in this model"
            raise FormatError(what, where=where, fix="name a measurement of this very model")
        found.append(Measured(params, max(LEAST_ERROR, 1 - accuracy)))
    return found


def measurement_json(measured: Sequence[tuple[Sublayer, Sequence[Measured]]]) -> dict[str, Any]:
    """measurement.json as ExLlamaV2 writes it. measured: in model order, attention and MLP of each layer."""
    entries: dict[str, Any] = {
        block.key: [
            {
                "accuracy": 1 - option.error,
                "total_bits": block.bits(option.params),
                **{name: option.params[role].to_json() for role, name in block.names.items()},
            }
            for option in options
        ]
        for block, options in measured
    }
    # Modules are counted as ExLlamaV2 counts them: embedding, blocks, norm, head.
    return {"measurement": entries | {"model.norm.norm": None, "lm_head.linear": None}, "last_module_idx": len(measured) + 2}
