"""The models that exllamav3 loads as EXL3, and the config.json that it expects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._models.formats.exl3.layout import VERSION
from weightsmith._models.formats.reader_configs import window_difference

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

_OTHER_NAMES = (
    ("Gemma2ForCausalLM", "sliding_window_size", "sliding_window"),
    ("Qwen3MoeForCausalLM", "num_experts", "num_local_experts"),
)
"""Architecture, the key that exllamav3 reads, and the key of transformers 5 with the same value."""


def contradiction(config: Mapping[str, Any]) -> str:
    """A key of config.json with a value that exllamav3 does not load, or "". The architecture is one of `ARCHITECTURES`.

    >>> contradiction({"architectures": ["LlamaForCausalLM"], "hidden_act": "gelu"})
    'hidden_act'
    """
    wanted = ARCHITECTURES[config["architectures"][0]]
    return next((key for key, value in wanted.items() if config.get(key, value) != value), "")


def differences(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Differences between exllamav3 and transformers that affect this model: (what, where, fix).

    >>> differences({"architectures": ["LlamaForCausalLM"]})
    []
    """
    return window_difference(config, f"exllamav3 {VERSION}")


def loader_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the keys that exllamav3 1.6.5 reads beside those of transformers 5.

    Gemma 2 gets `sliding_window_size`, without which all layers would have full attention. Qwen3-MoE gets `num_experts`.

    >>> loader_config({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 4096})["sliding_window_size"]
    4096
    >>> loader_config({"architectures": ["Qwen3MoeForCausalLM"], "num_local_experts": 8})["num_experts"]
    8
    """
    found = dict(config)
    architecture = config.get("architectures")
    for wanted, key, other in _OTHER_NAMES:
        if architecture == [wanted] and config.get(other) is not None:
            found.setdefault(key, config[other])
    return found
