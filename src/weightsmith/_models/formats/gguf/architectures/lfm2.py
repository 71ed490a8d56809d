"""LFM2, whose layers are short convolutions or attention, with and without experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from weightsmith._base.files import show
from weightsmith._models.formats.gguf.base.architecture import SIGMOID_ROUTER, Contents, GgufArchitecture, GgufFamily, GgufKey
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

CONVOLUTION, ATTENTION = "conv", "full_attention"
_HEADS = "attention.head_count_kv"
_MLP = {"ffn_gate": "feed_forward.w1", "ffn_down": "feed_forward.w2", "ffn_up": "feed_forward.w3"}


class Lfm2(GgufArchitecture):
    """LFM2."""

    name = "lfm2"
    class_name = "Lfm2ForCausalLM"
    model_types = ("lfm2",)
    square = True
    layer = {
        **{"attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj"},
        **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
        **{f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"},
        **{"shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj"},
        **_MLP,
    }
    ends = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
    eps = ("attention.layer_norm_rms_epsilon", "norm_eps")
    setting_names = {_HEADS: "num_key_value_heads (0 in convolutions, which layer_types states)"}
    numbers: ClassVar[tuple[GgufKey, ...]] = (GgufKey("shortconv.l_cache", "conv_L_cache"),)
    fixed: ClassVar[Mapping[str, Any]] = {"conv_bias": False}

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Two settings had other names, which transformers prefers."""
        renamed = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
        return {**config, **{name: config[older] for older, name in renamed.items() if older in config}}

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        layers, heads = config.count("num_hidden_layers"), config.count("num_attention_heads")
        types, kv_heads = config.get("layer_types"), config.count("num_key_value_heads", heads)
        if types is None and isinstance(attends := config.get("full_attn_idxs"), list):
            types = [ATTENTION if i in attends else CONVOLUTION for i in range(layers)]
        if not isinstance(types, list) or len(types) != layers or not all(kind in (CONVOLUTION, ATTENTION) for kind in types):
            raise config.wrong("layer_types", types, f"not {CONVOLUTION} or {ATTENTION} for each of {layers:,} layers")
        keys.put(_HEADS, "i32", [kv_heads if kind == ATTENTION else 0 for kind in types])
        keys.u32("vocab_size", config.count("vocab_size"))
        if config.get("block_auto_adjust_ff_dim", False):
            width = 2 * config.count("intermediate_size") // 3
            if config.get("block_ffn_dim_multiplier") is not None:
                width = int(config.number("block_ffn_dim_multiplier") * width)
            unit = config.count("block_multiple_of")
            keys.u32("feed_forward_length", -(-width // unit) * unit)

    def take_size(self, values: GgufValues, config: dict[str, Any], name: str, setting: str) -> None:
        if name != _HEADS:  # one for each layer
            super().take_size(values, config, name, setting)

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        heads, layers = values.get(_HEADS), config["num_hidden_layers"]
        if not isinstance(heads, np.ndarray) or heads.shape != (layers,) or heads.dtype.kind not in "iu" or not heads.any():
            raise values.wrong(_HEADS, show(heads), f"not a whole number for each of {layers:,} layers")
        most = int(heads.max())
        if not np.isin(heads, (0, most)).all():
            raise values.wrong(_HEADS, heads, "not one number in all layers with attention")
        config["num_key_value_heads"] = most
        config["layer_types"] = [ATTENTION if count else CONVOLUTION for count in heads.tolist()]
        config["block_auto_adjust_ff_dim"] = False


class Lfm2Moe(Lfm2):
    """LFM2 with experts behind its first layers."""

    name = "lfm2moe"
    class_name = "Lfm2MoeForCausalLM"
    model_types = ("lfm2_moe",)
    layer = {
        **{**Lfm2.layer, "ffn_gate_inp": "feed_forward.gate"},
        **{f"{name}_exps": module.replace(".", ".experts.{}.") for name, module in _MLP.items()},
    }
    bare = {"exp_probs_b.bias": "feed_forward.expert_bias"}
    experts = "num_experts"
    numbers = (
        *Lfm2.numbers,
        GgufKey("expert_feed_forward_length", "moe_intermediate_size"),
        GgufKey("leading_dense_block_count", "num_dense_layers", default=0, least=0),
    )
    constants = SIGMOID_ROUTER
    fixed = {"conv_bias": False, "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0}


FAMILY = GgufFamily((Lfm2(), Lfm2Moe()))
