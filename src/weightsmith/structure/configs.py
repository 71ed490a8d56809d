"""Traverses config.json as nested mappings. Values may have any type, and nesting may be deep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from weightsmith.errors import FormatError
from weightsmith.formats.files import show

Path = tuple[str, ...]
Config = TypeVar("Config", bound=Mapping[str, Any])

MAX_DEPTH = 6
"""Deeper mappings are ignored: published configs have up to three levels."""

MAX_COUNT = 1 << 24
"""The largest plausible number of layers, heads or columns."""

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys for the number of routed experts."""


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


def count_of(config: Mapping[str, Any], key: str) -> int:
    """A number of layers, heads or columns, 0 to 2^24; 0 if missing or null. Raises FormatError.

    >>> count_of({"num_attention_heads": 8, "head_dim": None}, "num_attention_heads")
    8
    """
    value = config.get(key)
    count = 0 if value is None else whole_number(value)
    if count is None or not 0 <= count <= MAX_COUNT:
        raise FormatError(f"{key} of config.json is {show(value)}", fix=f"it must be a whole number, 0 to {MAX_COUNT:,}")
    return count


def texts(value: object) -> Iterator[str]:
    """Every string in a value, including keys."""
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            todo += [*value, *value.values()]
        elif isinstance(value, list):
            todo += value
