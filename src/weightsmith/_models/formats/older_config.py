"""config.json with the keys of transformers 4 beside those of transformers 5, for programs that read the older ones.

ExLlamaV2 0.3.2 and most models of mlx-lm 0.32.2 know no `rope_parameters`: without `rope_theta` they take a default, and the
model computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_DROPPED = ("rope_theta", "type", "rope_type", "partial_rotary_factor")


def older_config(config: Mapping[str, Any], scaling_key: str = "rope_type") -> dict[str, Any]:
    """A config.json with `rope_theta`, `rope_scaling` and other older keys, also of its `text_config`. Those it has are kept.

    scaling_key  of the type in `rope_scaling`. Some models of mlx-lm require `type`; ExLlamaV2 refuses both at once

    >>> older_config({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}})["rope_theta"]
    100000.0
    >>> older_config({"model_type": "qwen3_moe", "num_local_experts": 8})["num_experts"]
    8
    """
    found = dict(config)
    if isinstance(config.get("text_config"), Mapping):
        found["text_config"] = older_config(config["text_config"], scaling_key)
    for key, value in {**_rope(config, scaling_key), **_layers(config)}.items():
        if found.get(key) is None:
            found[key] = value  # None as well: some models of mlx-lm require the key
    return found


def _rope(config: Mapping[str, Any], scaling_key: str) -> dict[str, Any]:
    """The older keys for the values in `rope_parameters`."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return {}
    full, sliding = rope.get("full_attention"), rope.get("sliding_attention")
    main = full if isinstance(full, Mapping) else rope
    found = {key: main[key] for key in ("rope_theta", "partial_rotary_factor") if key in main}
    if isinstance(full, Mapping) and isinstance(sliding, Mapping) and "rope_theta" in sliding:
        found["rope_local_base_freq"] = sliding["rope_theta"]
    if config.get("model_type") == "gpt_neox":
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        found |= {name: found[key] for key, name in names.items() if key in found}
    kind = main.get("rope_type", main.get("type"))
    found["rope_scaling"] = None
    if kind not in (None, "default"):
        rest = {key: value for key, value in main.items() if key not in _DROPPED}
        found["rope_scaling"] = {scaling_key: kind, **rest}
        if kind == "longrope" and "original_max_position_embeddings" in main:  # ExLlamaV2 asserts that it is there
            found["original_max_position_embeddings"] = main["original_max_position_embeddings"]
    return found


def _layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The older keys for the pattern of full attention and the number of experts."""
    found = {}
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "sliding_attention" in kinds and (pattern := full_attention_every(kinds)) is not None:
        found["sliding_window_pattern"] = pattern
    if str(config.get("model_type")).startswith("qwen") and "num_local_experts" in config:
        found["num_experts"] = config["num_local_experts"]
    return found


def full_attention_every(kinds: Sequence[Any]) -> int | None:
    """n if every n-th layer has full attention, and no other; else None. kinds: `layer_types` of config.json.

    >>> full_attention_every(["sliding_attention", "full_attention"] * 2)
    2
    """
    full = [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"]
    pattern = full[0] if full else len(kinds) + 1
    return pattern if full == list(range(pattern, len(kinds) + 1, pattern)) else None
