"""GPT-NeoX and Pythia, whose queries, keys and values are one tensor, head by head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._models.formats.gguf.base.architecture import (
    COMPUTED,
    LAYER_NORM,
    UNTIED,
    Contents,
    GgufArchitecture,
    GgufFamily,
    GgufKey,
    as_many_kv_heads,
    head_dim,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufValues
from weightsmith._models.formats.gguf.cuts import HeadOrder

_ROPE, _SHARE = "rope_parameters", "partial_rotary_factor"


class GptNeoX(GgufArchitecture):
    """GPT-NeoX."""

    name = "gptneox"
    class_name = "GPTNeoXForCausalLM"
    model_types = ("gpt_neox",)
    square = True
    layer = {
        **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
        **{"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"},
        **{"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"},
    }
    prefixes = (("gpt_neox.", "model."),)
    ends = {"token_embd": "model.embed_in", "output_norm": "model.final_layer_norm", "output": "embed_out"}
    numbers = (GgufKey("use_parallel_residual", "use_parallel_residual", "bool", 1),)
    fixed = {**UNTIED, "attention_bias": True}
    eps = LAYER_NORM
    partial = 0.25
    activation = "gelu"
    unused = {r"model\.layers\.[0-9]+\.attention\.(masked_)?bias": COMPUTED}

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings of RoPE in one place, as transformers collects them: it does not read `rope_theta` outside of it."""
        stated = config.get("rope_scaling") or config.get(_ROPE) or {}
        older = {"rope_theta": config.get("rotary_emb_base", 1e4), _SHARE: config.get("rotary_pct", self.partial)}
        rope = {**older, **stated} if isinstance(stated, dict) else stated
        return {name: value for name, value in config.items() if name not in ("rope_scaling", "rope_theta", _SHARE)} | {
            _ROPE: rope
        }

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        as_many_kv_heads(config)

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        rope = {"rope_theta": config.pop("rope_theta"), _SHARE: config.pop(_SHARE, self.partial)}
        config[_ROPE] = {"rope_type": "default", **rope, **config.pop("rope_scaling", {})}

    def order(self, name: str, config: GgufConfig) -> HeadOrder | None:
        """The Hub has query, key and value of the first head first; llama.cpp has the queries of all heads first.

        >>> config = GgufConfig({"num_attention_heads": 2, "hidden_size": 2})
        >>> GptNeoX().order("blk.0.attn_qkv.bias", config).places.tolist()
        [0, 3, 1, 4, 2, 5]
        """
        if ".attn_qkv." not in name:
            return None
        heads = config.count("num_attention_heads")
        return HeadOrder(0, 0, heads, 3 * heads, head_dim(config), "heads of q, k and v", "num_attention_heads and hidden_size")


FAMILY = GgufFamily((GptNeoX(),))
