"""measurement.json, ExLlamaV2's exchange format: the accuracy of each setting of each block. Reused between bit rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith._base.errors import FormatError
from weightsmith._base.files import show
from weightsmith._base.strict_json import read_object
from weightsmith._features.quantisation.exl2.blocks import Sublayer
from weightsmith._models.formats.exl2.layout import Params, params_from_json
from weightsmith._models.structure.configs import finite_number

MAX_BYTES = 256 << 20
MAX_OPTIONS = 64
LEAST_ERROR = 1e-6
_MEASURE = "measure the model again"


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting of a block. params: by role. error: 1 - accuracy."""

    params: Mapping[str, Params]
    error: float


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
