"""Is a checkpoint quantised? Then its numbers are codes, and arithmetic on them is meaningless without their scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith.formats.files import show
from weightsmith.tensors import TensorSpec

_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
_SUFFIXES = {
    ".weight_scale_inv": "fp8 in blocks",
    ".qweight": "GPTQ or AWQ",
    ".q_weight": "EXL2",
    ".weight_packed": "compressed-tensors",
    ".absmax": "bitsandbytes 4-bit",
    ".SCB": "bitsandbytes int8",
}


def describe_quantisation(config: Mapping[str, Any] | None, specs: Mapping[str, TensorSpec]) -> str | None:
    """What the weights are quantised with and how that shows, or None when they are plain numbers.

    config  the model's config.json; a multi-modal one may keep the entry in a sub-config
    specs   all tensors by name

    >>> describe_quantisation({"quantization_config": {"quant_method": "gptq", "bits": 4}}, {})
    "'gptq', 4 bits (quantization_config in config.json)"
    """
    for where, entry in config_entries(config or {}):
        method = entry.get("quant_method") or entry.get("mode") or "unnamed method"
        bits = f", {show(entry['bits'])} bits" if "bits" in entry else ""
        return f"{show(method)}{bits} ({where} in config.json)"
    suffixes = tuple(_SUFFIXES)
    for name in specs:
        if name.endswith(suffixes):
            kind = next(kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix))
            return f"{kind} (tensor {show(name)})"
        if name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in specs:
            return f"MXFP4 (tensor {show(name)})"
        if name.endswith(".weight_scale"):  # a learned scale of a plain weight may bear the same name
            weight = specs.get(name.removesuffix("_scale"))
            if weight is not None and weight.dtype.itemsize == 1:
                return f"{weight.dtype} with scales (tensor {show(name)})"
    return None


def config_entries(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """What config.json says of quantisation, each with its place: at the top level, then in sub-configs.

    >>> config_entries({"text_config": {"quantization_config": {"bits": 4}}})
    [('text_config.quantization_config', {'bits': 4})]
    """
    parts = [("", config), *((f"{key}.", value) for key, value in config.items() if isinstance(value, Mapping))]
    found = [(where + key, part.get(key)) for where, part in parts for key in _CONFIG_KEYS]
    return [(where, entry) for where, entry in found if isinstance(entry, Mapping) and entry]


def without_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the same model with plain weights.

    >>> without_entries({"hidden_size": 8, "text_config": {"quantization_config": {"bits": 4}}})
    {'hidden_size': 8, 'text_config': {}}
    """
    return {
        key: {k: v for k, v in value.items() if k not in _CONFIG_KEYS} if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in _CONFIG_KEYS
    }
