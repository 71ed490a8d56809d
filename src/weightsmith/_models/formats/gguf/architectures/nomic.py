"""Nomic Embed 1 and 1.5: BERT with RoPE and a gated MLP.

Published files have names of their own in config.json, as GPT-2's; transformers has those of BERT.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._models.formats.gguf.architecture import GgufFamily
from weightsmith._models.formats.gguf.encoder import Encoder
from weightsmith._models.formats.gguf.values import GgufConfig, GgufKeys

_PUBLISHED = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "activation_function": "hidden_act",
}
_ASSUMED: Mapping[str, object] = {
    **dict.fromkeys(("prenorm", "causal", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm"), False),
    **dict.fromkeys(("parallel_block", "rotary_emb_interleaved"), False),
    **dict.fromkeys(("rotary_emb_scale_base", "rotary_scaling_factor"), None),
    "rotary_emb_fraction": 1.0,
    "moe_every_n_layers": 0,
}
"""Settings of published files, and what llama.cpp takes for granted."""


class NomicBert(Encoder):
    """Nomic Embed without experts."""

    name = "nomic-bert"
    class_name = "NomicBertModel"
    model_types = ("nomic_bert",)
    modules = ("bert.", "nomic_bert.")
    layers = "encoder.layers."
    layer = {
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc11",
        "ffn_gate": "mlp.fc12",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
    }
    ends = {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
    }
    activation = "silu"
    activations = {"swiglu": "silu", "swish": "silu"}
    rotary = True

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        alike = {name: config[stated] for stated, name in _PUBLISHED.items() if stated in config}
        return {**config, **alike}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        for name, value in _ASSUMED.items():
            config.need(name, config.get(name, value), value)

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        super().put_more(config, keys)
        positions = config.count("max_position_embeddings")
        keys.u32("context_length", min(positions, config.count("max_trained_positions", positions)))


FAMILY = GgufFamily((NomicBert(),))
