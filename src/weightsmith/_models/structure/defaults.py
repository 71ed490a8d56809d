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

_ROPE = "rope_parameters"


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
    if config.get("rope_scaling") or config.get(_ROPE) is not None:
        return {**{name: value for name, value in entry["settings"].items() if name != _ROPE}, **stated}
    return {**entry["settings"], **{name: value for name, value in stated.items() if name != _ROPE}}
