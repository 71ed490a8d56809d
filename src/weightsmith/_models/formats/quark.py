"""AMD Quark's weights: quant_method quark. They are read: FP8, INT8 and MXFP4.

X.weight             F8_E4M3 or I8 [rows, cols], with a scale for the matrix or for each row
                     U8 [rows, cols / 2]: two float4 in a byte, the first in the low half, with a scale for 32 elements
X.weight_scale       by which codes are multiplied; of float4: U8, an exponent of 2 with 127 added
X.weight_zero_point  of I8: zeros, because the codes are symmetric

Modules may have settings of their own (layer_quant_config, layer_type_quant_config).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weightsmith._base.errors import Finding
from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.config import recogniser, setting, unsupported
from weightsmith._models.formats.matrices import MXFP4_GROUP
from weightsmith._models.formats.scaled import TENSOR, ZEROS, Scheme, read_scaled
from weightsmith.abc.stored import Config, StoredFormat, Wrapped
from weightsmith.abc.tensors import Tensors

_SCHEMES = {
    ("fp8_e4m3", "per_tensor"): Scheme("float8", "F8_E4M3", TENSOR),
    ("fp8_e4m3", "per_channel"): Scheme("float8", "F8_E4M3", (1, None)),
    ("int8", "per_tensor"): Scheme("int8", "I8", TENSOR),
    ("int8", "per_channel"): Scheme("int8", "I8", (1, None)),
    ("fp4", "per_group"): Scheme("float4", "U8", (1, MXFP4_GROUP), scales=("U8",)),
}

_ROTATIONS = ("r4", "online_r1_rotation")
"""Keys of algo_config: the inputs of a layer are rotated while it runs, and so is its weight."""
_ROTATED = (".input_rotation", ".input_prescale")


def is_codes(spec: TensorSpec) -> bool:
    return spec.dtype.name in ("F8_E4M3", "I8", "U8", "I32") and spec.name.endswith(".weight")


def read_entry(entry: Mapping[str, Any], place: str, where: str) -> tuple[list[Scheme], list[Finding]]:
    """How weights are stored, from the entry in config.json; see `scaled.read_scaled`."""
    export = entry.get("export")
    if isinstance(export, Mapping):
        setting(export, "weight_format", "real_quantized", ("real_quantized",), where)
    algorithms = entry.get("algo_config")
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        if isinstance(algorithm, Mapping) and (rotation := next((key for key in _ROTATIONS if algorithm.get(key)), "")):
            raise unsupported(f"Quark's weights with algo_config.{rotation} are not read: their inputs are rotated", where)
    return [_scheme(label, weights, where) for label, weights in _weights(entry, where)], []


def _weights(entry: Mapping[str, Any], where: str) -> Iterator[tuple[str, object]]:
    """The settings of weights, each with its place in the entry."""
    settings: dict[str, object] = {"global_quant_config": entry.get("global_quant_config")}
    for key in ("layer_quant_config", "layer_type_quant_config"):
        if isinstance(section := entry.get(key), Mapping):
            settings |= {f"{key}.{name}": value for name, value in section.items()}
    for label, value in settings.items():
        if isinstance(value, Mapping) and value.get("bias") is not None:
            raise unsupported(f"Quark's quantised biases are not read ({show(label)})", where)
        if isinstance(value, Mapping) and value.get("weight") is not None:
            yield label, value["weight"]


def _scheme(label: str, weights: object, where: str) -> Scheme:
    if not isinstance(weights, Mapping):
        raise unsupported(f"Quark's weights in several stages are not read ({show(label)})", where)
    scheme = _SCHEMES.get((str(weights.get("dtype")), str(weights.get("qscheme"))))
    if scheme is None:
        kinds = ", ".join(f"{dtype} {kind}" for dtype, kind in _SCHEMES)
        what = f"Quark's weights with dtype {show(weights.get('dtype'))} {show(weights.get('qscheme'))} are not read"
        raise unsupported(f"{what}, only {kinds} ({show(label)})", where)
    required: dict[str, dict[str, object]] = {
        "fp4": {"group_size": MXFP4_GROUP, "scale_format": "e8m0"},
        "int8": {"symmetric": True},
    }
    for key, value in required.get(str(weights["dtype"]), {}).items():
        setting(weights, key, None, (value,), where)
    if weights["qscheme"] == "per_channel":
        setting(weights, "ch_axis", 0, (0,), where)
    return scheme


_READ = read_scaled(read_entry, unused=(f"weight{ZEROS}",))


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
    if rotation := next((n for n in stored.specs if n.endswith(_ROTATED) or ".shared_input_rotation_" in f".{n}"), ""):
        raise unsupported(f"tensor {show(rotation)} changes the inputs of its layer: such weights are not read", where)
    return _READ(stored, config, where)


FORMAT = StoredFormat("quark", "Quark", recogniser(is_codes, "quark"), read)
