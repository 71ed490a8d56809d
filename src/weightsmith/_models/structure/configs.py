"""Traverses config.json as nested mappings, and reads its values, which may have any type."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from weightsmith._base.errors import FormatError
from weightsmith._base.files import show

Path = tuple[str, ...]
Config = TypeVar("Config", bound=Mapping[str, Any])

MAX_DEPTH = 6
"""Deeper mappings are ignored: published configs have up to three levels."""

MAX_COUNT = 1 << 24
"""The largest plausible number of layers, heads or columns."""

MAX_LAYERS = 1 << 16

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys for the number of routed experts."""


def of_diffusers(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a model of diffusers: it names its class.

    >>> of_diffusers({"_class_name": "UNet2DConditionModel"}), of_diffusers({"architectures": ["CLIPTextModel"]})
    (True, False)
    """
    return isinstance(config.get("_class_name"), str)


_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def decoded_floats(value: Any) -> Any:
    """The value with floats in place of the objects that transformers 5 writes for those JSON does not have.

    >>> decoded_floats({"time_step_limit": [0.0, {"__float__": "Infinity"}]})
    {'time_step_limit': [0.0, inf]}
    """
    if isinstance(value, Mapping):
        tag = value.get("__float__") if len(value) == 1 else None
        if isinstance(tag, str) and tag in _FLOATS:
            return _FLOATS[tag]
        return {key: decoded_floats(inner) for key, inner in value.items()}
    return [decoded_floats(inner) for inner in value] if isinstance(value, list) else value


def sections(config: Config, path: Path = ()) -> Iterator[tuple[Path, Config]]:
    """The config and every mapping in it, with paths; outer before inner, in file order.

    path  of `config` itself

    >>> [path for path, _ in sections({"text_config": {"rope_scaling": {}}, "vision_config": {}, "layer_types": [{}]})]
    [(), ('text_config',), ('text_config', 'rope_scaling'), ('vision_config',)]
    """
    yield path, config
    for key, value in config.items():
        if isinstance(value, Mapping) and len(path) < MAX_DEPTH:
            yield from sections(value, (*path, key))  # type: ignore[misc]


def text_sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config and its direct text sections: `text_config`, `get_text_config`."""
    return [config, *(value for key, value in config.items() if isinstance(value, Mapping) and "text" in key)]


def section_at(config: Config, path: Path) -> Config:
    """The section at a path from `sections`."""
    for key in path:
        config = config[key]
    return config


def replace_value(config: dict[str, Any], key: str, old: object, new: object) -> None:
    """Set `key` to `new` in every section where it is `old`.

    >>> config = {"vocab_size": 8, "text_config": {"vocab_size": 8}, "audio_config": {"vocab_size": 5}}
    >>> replace_value(config, "vocab_size", 8, 9)
    >>> config
    {'vocab_size': 9, 'text_config': {'vocab_size': 9}, 'audio_config': {'vocab_size': 5}}
    """
    for _, section in sections(config):
        if key in section and section[key] == old:
            section[key] = new


def whole_number(value: object) -> int | None:
    """The value if it is an int; None for a bool, a float or text."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def whole_numbers(value: object) -> list[int]:
    """The ints in a number or a list of numbers."""
    return [n for n in map(whole_number, value if isinstance(value, list) else [value]) if n is not None]


def finite_number(value: object) -> float | None:
    """The value if it is an int or a float, and finite as a float; None for a bool, text, NaN, 10**400."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def count_of(config: Mapping[str, Any], key: str, *, where: str = "", most: int = MAX_COUNT) -> int:
    """A number of layers, heads or columns, 0 to `most`; 0 if missing or null. Raises FormatError.

    >>> count_of({"num_attention_heads": 8, "head_dim": None}, "num_attention_heads")
    8
    """
    value = config.get(key)
    count = 0 if value is None else whole_number(value)
    if count is None or not 0 <= count <= most:
        raise wrong_value(key, value, f"a whole number, 0 to {most:,}", where)
    return count


def number_of(config: Mapping[str, Any], key: str, default: float, *, where: str = "") -> float:
    """A finite number; `default` if missing or null. Raises FormatError.

    >>> number_of({"rope_theta": 1e6}, "rope_theta", 1e4), number_of({}, "rope_theta", 1e4)
    (1000000.0, 10000.0)
    """
    value = config.get(key)
    number = default if value is None else finite_number(value)
    if number is None:
        raise wrong_value(key, value, "a finite number", where)
    return number


def wrong_value(key: str, value: object, valid: str, where: str = "") -> FormatError:
    """The error for an invalid value of config.json. wanted: the valid values."""
    what = f"{key} of config.json is {show(value)}, not {valid}"
    return FormatError(what, where=where, fix="Repair config.json, or download it again.")
