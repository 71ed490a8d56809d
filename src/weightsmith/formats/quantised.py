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
    for where, part in _parts(config or {}):
        for key in _CONFIG_KEYS:
            if isinstance(entry := part.get(key), Mapping) and entry:
                method = entry.get("quant_method") or entry.get("mode") or "unnamed method"
                bits = f", {show(entry['bits'])} bits" if "bits" in entry else ""
                return f"{show(method)}{bits} ({where}{key} in config.json)"
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


def _parts(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [("", config), *((f"{key}.", value) for key, value in config.items() if isinstance(value, Mapping))]
