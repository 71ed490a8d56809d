"""What config.json says of quantisation, and checks of the stored tensors that it describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from weightsmith._base.errors import Finding, FormatError, Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import BY_TORCH_NAME, DTYPES, DType, TensorSpec
from weightsmith._models.structure.configs import MAX_DEPTH
from weightsmith.abc.stored import Config, Specs

PLAIN_FIX = "name an unquantised checkpoint of the same model"
DAMAGED_CHECKPOINT = "The checkpoint is damaged or incomplete: download it again."

_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
_WEIGHT_DTYPES = ("BF16", "F16", "F32")

SETTINGS_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files that describe the quantisation in place of config.json → `quant_method`: ModelOpt's, AutoGPTQ's and AutoAWQ's."""


SETTINGS_METADATA = {"_quantization_metadata": "comfyui", "_hqq": "hqq"}
"""Keys of the metadata of weight files that do the same."""


def config_entries(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """What config.json says of quantisation, each with its place: at the top level, then in sub-configs.

    >>> config_entries({"thinker_config": {"text_config": {"quantization_config": {"bits": 4}}}})
    [('thinker_config.text_config.quantization_config', {'bits': 4})]
    """
    return list(_entries(config, "", MAX_DEPTH))


def _entries(config: Mapping[str, Any], where: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in _CONFIG_KEYS:
        if isinstance(entry := config.get(key), Mapping) and entry:
            yield where + key, entry
    for key, value in config.items() if depth else ():
        if isinstance(value, Mapping) and key not in _CONFIG_KEYS:
            yield from _entries(value, f"{where}{key}.", depth - 1)


def without_entries(config: Mapping[str, Any], depth: int = MAX_DEPTH) -> dict[str, Any]:
    """config.json of the same model with plain weights. depth: of the sub-configs that entries are taken from.

    >>> without_entries({"hidden_size": 8, "text_config": {"quantization_config": {"bits": 4}}})
    {'hidden_size': 8, 'text_config': {}}
    """
    return {
        key: without_entries(value, depth - 1) if isinstance(value, Mapping) and depth else value
        for key, value in config.items()
        if key not in _CONFIG_KEYS
    }


def method_of(config: Mapping[str, Any]) -> str:
    """The `quant_method` that config.json names, else "".

    >>> method_of({"text_config": {"quantization_config": {"quant_method": "gptq"}}}), method_of({"quantization": {"bits": 4}})
    ('gptq', '')
    """
    methods = [entry.get("quant_method") for _, entry in config_entries(config)]
    return next((method for method in methods if isinstance(method, str)), "")


def damaged(what: str, where: str) -> FormatError:
    """The error of tensors that contradict each other or config.json."""
    return FormatError(what, where=where, fix=DAMAGED_CHECKPOINT)


def unsupported(what: str, where: str) -> Unsupported:
    """The error of weights that are stored in a way that is not read."""
    return Unsupported(what, where=where, fix=PLAIN_FIX)


def recogniser(codes: Callable[[TensorSpec], bool], *methods: str) -> Callable[[Config, Specs], bool]:
    """`StoredFormat.recognises`: config.json names one of these methods, and some tensors are its codes, or may be."""
    return lambda config, specs: method_of(config) in methods and any(map(codes, specs.values()))


def ending(suffix: str) -> Callable[[TensorSpec], bool]:
    """Whether the name of a tensor ends so."""
    return lambda spec: spec.name.endswith(suffix)


def dropped_scales(dropped: Sequence[str], where: str) -> list[Finding]:
    """A note on stored tensors that are no part of the plain model, if there are any."""
    what = f"{len(dropped)} scale(s) of activations or of the KV cache are dropped: plain weights have none"
    return [Finding(what, where, (f"the first is {show(dropped[0])}",))] if dropped else []


def quantisation_entry(config: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    """What config.json says of quantisation, and its place; it must have an entry. Raises Unsupported if two entries differ."""
    (place, entry), *others = config_entries(config)
    for other, content in others:
        if content != entry:
            raise unsupported(f"{place} and {other} in config.json say different things", where)
    return place, entry


def setting(entry: Mapping[str, Any], key: str, default: object, allowed: Sequence[object], where: str) -> Any:
    """A value of the entry, one of `allowed`; `default` if missing or null. Raises Unsupported for another value or type.

    >>> setting({"bits": 4}, "bits", None, (2, 4, 8), "m")
    4
    """
    value = default if entry.get(key) is None else entry[key]
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        *others, last = map(repr, allowed)
        choices = f"{', '.join(others)} and {last}" if others else last
        raise unsupported(f"weights with {key} {show(value)} are not read, only {choices}", where)
    return value


def plain_dtype(config: Mapping[str, Any], default: DType = DTYPES["BF16"]) -> DType:
    """The dtype in which loaders compute with the weights: config.json's, else `default`.

    >>> plain_dtype({"text_config": {"torch_dtype": "float16"}}).name
    'F16'
    """
    parts = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            dtype = BY_TORCH_NAME.get(value) if isinstance(value := part.get(key), str) else None
            if dtype is not None and dtype.name in _WEIGHT_DTYPES:
                return dtype
    return default
