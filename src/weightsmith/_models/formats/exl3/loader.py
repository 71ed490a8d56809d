"""Which models exllamav3 loads as EXL3, and the config.json that it expects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SILU, _TANH = {"hidden_act": "silu"}, {"hidden_act": "gelu_pytorch_tanh"}

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": _SILU,
    "MistralForCausalLM": _SILU,
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": _SILU,
    "Gemma2ForCausalLM": _TANH,
    "Phi3ForCausalLM": _SILU,
    "MixtralForCausalLM": _SILU,
    "Qwen3MoeForCausalLM": {**_SILU, "norm_topk_prob": True},
}
"""`architectures` of config.json for which names and layout have been checked, and what config.json must say where it says it.

Of Gemma3ForCausalLM, exllamav3 1.6.5 looks for tensors with names that begin with a dot.
"""


def contradiction(config: Mapping[str, Any]) -> str:
    """A key of config.json with a value that exllamav3 does not load, or "". The architecture is one of `ARCHITECTURES`.

    >>> contradiction({"architectures": ["LlamaForCausalLM"], "hidden_act": "gelu"})
    'hidden_act'
    """
    wanted = ARCHITECTURES[config["architectures"][0]]
    return next((key for key, value in wanted.items() if config.get(key, value) != value), "")


def loader_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the keys that exllamav3 reads: for Gemma 2, `sliding_window_size` beside `sliding_window`.

    Without it, exllamav3 1.6.5 gives all layers full attention.

    >>> loader_config({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 4096})["sliding_window_size"]
    4096
    """
    found = dict(config)
    if config.get("architectures") == ["Gemma2ForCausalLM"] and config.get("sliding_window") is not None:
        found.setdefault("sliding_window_size", config["sliding_window"])
    return found
