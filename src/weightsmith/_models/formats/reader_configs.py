"""config.json as programs with readers of their own take it: ExLlamaV2 0.3.2, exllamav3 1.6.5 and mlx-lm 0.32.2.

**Older keys.** ExLlamaV2 and most models of mlx-lm know no `rope_parameters`: without `rope_theta` they take a default, and the
model computes something else. So the keys of transformers 4 stand beside those of transformers 5.

**Sliding windows.** ExLlamaV2 and exllamav3 have those of Gemma alone, and ignore others: read in ExLlamaV2's architecture.py,
where `swa` is always false, and in exllamav3's architecture/, where gemma2.py alone reads the size of a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsmith._base.errors import FormatError, PlanError
from weightsmith._models.structure.defaults import rope_settings
from weightsmith._plans import PlanDraft

_DROPPED = ("rope_theta", "type", "rope_type", "partial_rotary_factor")


def older_config(config: Mapping[str, Any], scaling_key: str = "rope_type") -> dict[str, Any]:
    """A config.json with `rope_theta`, `rope_scaling` and other older keys, also of its `text_config`.

    Keys that it has are kept, but for those of RoPE where it states `rope_parameters`: they get what transformers takes.

    scaling_key  of the type in `rope_scaling`. Some models of mlx-lm require `type`; ExLlamaV2 refuses both at once

    Raises PlanError for settings of RoPE that contradict each other.

    >>> older_config({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}})["rope_theta"]
    100000.0
    >>> older_config({"model_type": "qwen3_moe", "num_local_experts": 8})["num_experts"]
    8
    """
    older = dict(config)
    if isinstance(config.get("text_config"), Mapping):
        older["text_config"] = older_config(config["text_config"], scaling_key)
    older |= _rope(config, scaling_key)  # None as well: some models of mlx-lm require the key
    for key, value in _layers(config).items():
        if older.get(key) is None:
            older[key] = value
    return older


def _rope(config: Mapping[str, Any], scaling_key: str) -> dict[str, Any]:
    """The older keys for the settings that take effect; {} if config.json has the older keys alone."""
    try:
        rope = rope_settings(config)
    except FormatError as error:
        raise PlanError([error]) from None
    if not config.get("rope_parameters"):
        return {}
    full, sliding = rope.get("full_attention"), rope.get("sliding_attention")
    main = full if isinstance(full, Mapping) else rope
    older = {key: main[key] for key in ("rope_theta", "partial_rotary_factor") if key in main}
    if isinstance(full, Mapping) and isinstance(sliding, Mapping) and "rope_theta" in sliding:
        older["rope_local_base_freq"] = sliding["rope_theta"]
    if config.get("model_type") == "gpt_neox":
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        older |= {name: older[key] for key, name in names.items() if key in older}
    kind = main.get("rope_type", main.get("type"))
    older["rope_scaling"] = None
    if kind not in (None, "default"):
        rest = {key: value for key, value in main.items() if key not in _DROPPED}
        older["rope_scaling"] = {scaling_key: kind, **rest}
        original = "original_max_position_embeddings"
        if kind == "longrope" and original in main and config.get(original) is None:  # ExLlamaV2 asserts that it is there
            older[original] = main[original]
    return older


def _layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The older keys for the pattern of full attention and the number of experts."""
    older = {}
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "sliding_attention" in kinds and (pattern := full_attention_every(kinds)) is not None:
        older["sliding_window_pattern"] = pattern
    if str(config.get("model_type")).startswith("qwen") and "num_local_experts" in config:
        older["num_experts"] = config["num_local_experts"]
    return older


def full_attention_every(kinds: Sequence[Any]) -> int | None:
    """n if every n-th layer has full attention, and no other; else None. kinds: `layer_types` of config.json.

    >>> full_attention_every(["sliding_attention", "full_attention"] * 2)
    2
    """
    full = [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"]
    pattern = full[0] if full else len(kinds) + 1
    return pattern if full == list(range(pattern, len(kinds) + 1, pattern)) else None


def adapt_to_mlx_lm(draft: PlanDraft) -> None:
    """Give a draft the older keys. Warn of a Gemma 3 whose full attention mlx-lm expects in other layers, as after layers were
    stacked."""
    config = draft.config = older_config(draft.config or {}, scaling_key="type")
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    kinds = text.get("layer_types")
    if str(text.get("model_type")).startswith("gemma3") and isinstance(kinds, list) and full_attention_every(kinds) is None:
        what = "full attention is not in every n-th layer, where mlx-lm expects it: it computes something else"
        draft.warn(what, "layer_types in config.json")


# ---- sliding windows

_WINDOWED = ("MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM")
_IF_USED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures with a window only if `use_sliding_window` says so; but for Qwen3-MoE, in some layers."""

_MISTRAL_WINDOW = 4096
_FULL_LAYERS = 28
"""Defaults of transformers if config.json lacks `sliding_window` (Mistral) or `max_window_layers` (Qwen)."""


def window_difference(config: Mapping[str, Any], reader: str) -> list[tuple[str, str, str]]:
    """A finding if `reader` ignores a window that transformers applies: (what, where, fix), else nothing.

    >>> config = {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "max_position_embeddings": 32768}
    >>> [where for _, where, _ in window_difference(config, "ExLlamaV2 0.3.2")]
    ['sliding_window in config.json']
    """
    window, longest = _window(config), config.get("max_position_embeddings")
    if window is None or (isinstance(longest, int) and window >= longest):
        return []
    what = f"{reader} ignores the sliding window of {window:,} tokens, and transformers applies it"
    return [(what, "sliding_window in config.json", f"keep texts within {window:,} tokens")]


def _window(config: Mapping[str, Any]) -> int | None:
    """The window of the layers that have one, in tokens, including the current one; None if no layer does."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    window = config.get("sliding_window", _MISTRAL_WINDOW if name == _WINDOWED[0] else None)
    if not isinstance(window, int) or name not in (*_WINDOWED, *_IF_USED):
        return None
    if name in _IF_USED and not (config.get("use_sliding_window") and (name == _IF_USED[2] or _some_slide(config))):
        return None
    return window


def _some_slide(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return "sliding_attention" in kinds
    return bool(config.get("num_hidden_layers", 0) > config.get("max_window_layers", _FULL_LAYERS))
