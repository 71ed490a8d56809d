"""What transformers' classes take where config.json says nothing: the table of the GGUF writer, made from them.

`python -m tests.models.formats.gguf.defaults --write` writes it anew, after a version of transformers changed it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import MISSING, fields
from importlib.resources import files
from typing import Any

from weightsmith._models.formats.gguf.architectures import architectures

TABLE = "_models/structure/defaults.json"
_READ_AS = {"kimi_k2": "deepseek_v3"}
"""Types that transformers reads as another one."""

_NOT_OF_INFERENCE = re.compile(
    r".*(dropout|_pdrop|initializer|aux_loss|jitter|_token_id|sparse_pred|use_cache|output_router|pretraining_tp|deterministic).*"
)
"""Settings of training and of tokens, of which a GGUF file takes nothing from a default."""
_BASES = {
    "rope_theta": ("rope_theta", "global_rope_theta"),
    "rope_local_base_freq": ("rope_local_base_freq", "local_rope_theta"),
}
"""Settings in which the bases of RoPE are stated beside `rope_parameters`: of all layers, and of those that slide."""


def config_class(model_type: str) -> Any:
    """transformers' class of a language model. model_type: in config.json, of the model or of one whose part it is."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = CONFIG_MAPPING[_READ_AS.get(model_type, model_type)]
    part = whole.sub_configs_defaults.get("text_config")
    return whole if part is None else getattr(part, "config_class", part)


def defaults_of(model_type: str) -> dict[str, Any]:
    """The settings that a class of transformers has by itself, those of RoPE as config.json may state them.

    Settings that follow from others, such as `layer_types`, are not there. A setting with two names has both.
    """
    from transformers import PreTrainedConfig

    config = config_class(model_type)
    general = {field.name for field in fields(PreTrainedConfig)}
    settings = {
        field.name: field.default if field.default is not MISSING else field.default_factory()
        for field in fields(config)
        if field.name not in general and not _NOT_OF_INFERENCE.fullmatch(field.name) and field.name != "time_step_limit"
    }
    settings = {name: value for name, value in settings.items() if value is not None} | _rope_of(config)
    for alias, name in config.attribute_map.items():
        for one, other in ((alias, name), (name, alias)):
            if one in settings:
                settings[other] = settings[one]
    return settings


def _rope_of(config: Any) -> dict[str, Any]:
    """The settings of RoPE: those stated beside `rope_parameters` where they take effect there, and what is then left."""
    rope = deepcopy(config().rope_parameters) if hasattr(config(), "rope_parameters") else None
    if not rope:
        return {}
    nested = "full_attention" in rope
    settings = dict[str, Any]()
    for setting, stated in _BASES.items():
        layers = "full_attention" if setting == "rope_theta" else "sliding_attention"
        part = rope[layers] if nested else rope
        for name in stated:
            changed = config(**{name: 12_345.0}).rope_parameters
            if (changed[layers] if nested else changed).get("rope_theta") == 12_345.0 and setting not in settings:
                settings[setting] = part["rope_theta"]
        if setting in settings:
            part.pop("rope_theta", None)
    if nested and "rope_local_base_freq" not in settings and "rope_theta" in settings:  # one base for all layers
        rope["sliding_attention"].pop("rope_theta")
    if "partial_rotary_factor" in rope and config(partial_rotary_factor=0.75).rope_parameters["partial_rotary_factor"] == 0.75:
        settings["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    longer = config(max_position_embeddings=12_345).rope_parameters
    rope = {name: value for name, value in rope.items() if nested or longer.get(name) == value or name not in longer}
    plain = [{"rope_type": "default"}, {}]
    return (
        settings
        if rope in plain or (nested and all(part in plain for part in rope.values()))
        else settings | {"rope_parameters": rope}
    )


def table() -> dict[str, Mapping[str, Any]]:
    """The defaults of each `model_type` that the GGUF writer knows, with its synonyms."""
    types = dict.fromkeys(name for architecture in architectures() for name in architecture.model_types)
    return {name: {"settings": defaults_of(name), "synonyms": config_class(name).attribute_map} for name in types}


def text(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """The table as it is stored, a line for each `model_type`."""
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def stored() -> str:
    """The table of the installed package."""
    return (files("weightsmith") / TABLE).read_text(encoding="utf-8")


if __name__ == "__main__":
    if "--write" in sys.argv:
        from pathlib import Path

        Path(str(files("weightsmith") / TABLE)).write_text(text(table()), encoding="utf-8")
    else:
        print(text(table()), end="")
