"""Sliding windows of attention that ExLlamaV2 0.3.2 and exllamav3 1.6.5 ignore: they have those of Gemma alone.

Read in ExLlamaV2's architecture.py, where `swa` is always false, and in exllamav3's architecture/, where gemma2.py alone reads
the size of a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
