"""Settings that config.json leaves out: transformers' classes have defaults for them, and each class has its own.

`defaults.json` has them for each `model_type`. It is made from the classes, and a test compares it with them:
`python -m tests.models.formats.gguf.defaults --write`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, cast

from weightsmith._base.errors import FormatError
from weightsmith._base.files import show

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
