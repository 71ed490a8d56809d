"""Traverses config.json as nested mappings, reads its values, which may have any type, and adds those that it leaves out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar, cast

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


_WRITERS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""How the classes of transformers end that write texts."""


def writes_texts(config: Mapping[str, Any] | None) -> bool:
    """Whether a config.json names a class that writes texts.

    >>> writes_texts({"architectures": ["LlamaForCausalLM"]}), writes_texts({"architectures": ["BertModel"]})
    (True, False)
    """
    listed = (config or {}).get("architectures")
    return isinstance(listed, list) and any(isinstance(name, str) and name.endswith(_WRITERS) for name in listed)


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


# ---- Settings that config.json leaves out: transformers' classes have defaults for them, and each class has its own.
# `defaults.json` has them for each `model_type`. It is made from the classes, and a test compares it with them:
# `python -m tests.models.formats.gguf.defaults --write`.


_ROPE = "rope_parameters"
_OLDER_ROPE = "rope_scaling"


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    text = files(__package__).joinpath("defaults.json").read_text(encoding="utf-8")
    return cast("Mapping[str, Mapping[str, Mapping[str, Any]]]", json.loads(text))


def with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with the defaults of its class in transformers, and with every setting that has two names under both.

    A setting that is stated as null stays null: some classes infer it then. Types that are not in the table get nothing.

    >>> stated = {"model_type": "mixtral", "num_experts": 4, "num_key_value_heads": None}
    >>> full = with_defaults(stated)
    >>> full["num_local_experts"], full["num_key_value_heads"], full["rms_norm_eps"], full["rope_theta"]
    (4, None, 1e-05, 1000000.0)
    """
    model_type = config.get("model_type")
    entry = _table().get(model_type) if isinstance(model_type, str) else None
    if entry is None:
        return config
    stated = dict(config)
    for alias, name in entry["synonyms"].items():
        for one, other in ((alias, name), (name, alias)):
            if one in config:
                stated.setdefault(other, config[one])
        if None not in (stated.get(alias), stated.get(name)) and stated[alias] != stated[name]:
            what = f"{alias} is {show(stated[alias])}, and {name}, which means the same, is {show(stated[name])}"
            raise FormatError(what, where="config.json", fix="remove the one that is wrong")
    if config.get(_OLDER_ROPE) or config.get(_ROPE) is not None:
        return {**{name: value for name, value in entry["settings"].items() if name != _ROPE}, **stated}
    return {**entry["settings"], **{name: value for name, value in stated.items() if name != _ROPE}}


def rope_settings(config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """The settings of RoPE that take effect: `rope_scaling` where it is stated, else `rope_parameters`, as in transformers.

    `rope_scaling` replaces all of `rope_parameters`, also what it does not state itself. Raises FormatError if the model would
    lose `rope_theta` or `partial_rotary_factor` so, and for values that are no objects. Where layers have their own settings,
    `rope_scaling` may repeat those of `full_attention`, as files for older programs do; else FormatError, too.

    >>> rope_settings({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2}})
    {'type': 'linear', 'factor': 2}
    """
    for name in (_ROPE, _OLDER_ROPE):
        if config.get(name) is not None and not isinstance(config[name], dict):
            raise FormatError(f"{name} is {show(config[name])}, not an object", where=where, fix="repair it")
    newer, older = config.get(_ROPE) or {}, config.get(_OLDER_ROPE) or {}
    if newer and older and _repeats(older, newer.get("full_attention")):
        return newer
    if newer and older and newer != older:
        if any(isinstance(value, dict) for value in (*newer.values(), *older.values())):
            what = f"{_ROPE} and {_OLDER_ROPE} differ, and kinds of layers have their own settings"
            raise FormatError(what, where=where, fix=f"remove {_OLDER_ROPE}, and state all in {_ROPE}")
        for name in ("rope_theta", "partial_rotary_factor"):
            if name not in older and newer.get(name, config.get(name)) != config.get(name):
                what = (
                    f"{name} of {_ROPE} is {show(newer[name])}, and transformers would drop it: it takes {_OLDER_ROPE} instead"
                )
                raise FormatError(what, where=where, fix=f"Move {_OLDER_ROPE} into {_ROPE}, beside {name}.")
    return older or newer


def _repeats(older: Mapping[str, Any], full: object) -> bool:
    """Whether `rope_scaling` says nothing that the settings of the layers that attend to everything do not."""
    if not isinstance(full, dict):
        return False
    stated = {"rope_type": full.get("type"), **full}
    return all(value == stated.get("rope_type" if name == "type" else name, ...) for name, value in older.items())
