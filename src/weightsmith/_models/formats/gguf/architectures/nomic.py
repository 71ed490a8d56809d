"""Nomic Embed 1 and 1.5: BERT with RoPE and a gated MLP. Nomic Embed 2: with experts in every second layer.

Published files have names of their own in config.json, as GPT-2's; transformers has those of BERT.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from weightsmith._models.formats.gguf.base.architecture import NOT_ADDED, Contents, GgufFamily, GgufKey
from weightsmith._models.formats.gguf.base.encoder import Encoder
from weightsmith._models.formats.gguf.base.tensors import SplitPart, SplitTensor
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

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
_BIASED = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
_ASSUMED_OF_EXPERTS: Mapping[str, object] = {
    **{name: value for name, value in _ASSUMED.items() if name != "moe_every_n_layers"},
    **dict.fromkeys(_BIASED, True),
    **{"moe_normalize_expert_weights": False, "expert_choice_router": False, "num_shared_experts": 0, "ffn_div": 1},
}
"""Settings of published files, and what llama.cpp takes for granted."""


_LAYER = {
    **{"attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "attn_output_norm": "norm1"},
    **{"ffn_down": "mlp.fc2", "layer_output_norm": "norm2"},
}
_STATED_POSITIONS, _TRAINED_POSITIONS = 2048, 512
"""The context of Nomic Embed 2: in config.json, and in llama.cpp's converter, after the texts that it was trained on."""
_CODE = {
    "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
    "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
}


def _rows_of_expert(config: GgufConfig) -> tuple[int]:
    return (config.count("intermediate_size"),)


class _Nomic(Encoder):
    """What both have in common.

    assumed  settings that llama.cpp takes for granted
    """

    class_name = "NomicBertModel"
    model_types = ("nomic_bert",)
    assumed: ClassVar[Mapping[str, object]] = _ASSUMED
    modules = ("bert.", "nomic_bert.")
    layers = "encoder.layers."
    ends = {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
    }
    rotary = True

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        alike = {name: config[stated] for stated, name in _PUBLISHED.items() if stated in config}
        return {**config, **alike}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        for name, value in self.assumed.items():
            stated = config.get(name, value)
            config.need(name, False if stated is None and value is False else stated, value)

    def setting_of(self, key: str, config: GgufConfig) -> str:
        setting = super().setting_of(key, config)
        published = (name for name, meant in _PUBLISHED.items() if meant == setting and config.get(name) is not None)
        return next(published, setting)

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        super().put_more(config, keys)
        positions = config.count("max_position_embeddings")
        keys.u32("context_length", min(positions, config.count("max_trained_positions", positions)))


class NomicBert(_Nomic):
    """Nomic Embed without experts."""

    name = "nomic-bert"
    layer = {**_LAYER, "ffn_up": "mlp.fc11", "ffn_gate": "mlp.fc12"}
    activation = "silu"
    activations = {"swiglu": "silu", "swish": "silu"}

    def fits(self, config: Mapping[str, Any]) -> bool:
        return super().fits(config) and not config.get("moe_every_n_layers")


class NomicBertMoe(_Nomic):
    """Nomic Embed 2. transformers has no class; config.json names the authors' code."""

    name = "nomic-bert-moe"
    layer = {**_LAYER, "ffn_up": "mlp.fc1", "ffn_gate_inp": "mlp.router.layer"}
    splits = (
        SplitTensor("mlp.experts.mlp.w1", (SplitPart("ffn_up_exps.weight", _rows_of_expert),), bands=True),
        SplitTensor("mlp.experts.mlp.w2", (SplitPart("ffn_down_exps.weight", _rows_of_expert, transposed=True),), bands=True),
    )
    experts = "num_experts"
    experts_used = "moe_top_k"
    numbers = (GgufKey("moe_every_n_layers", "moe_every_n_layers", least=2),)
    assumed = _ASSUMED_OF_EXPERTS
    unused = {**Encoder.unused, r"model\.layers\.\d+\.mlp\.experts\.bias": NOT_ADDED}

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        super().put_more(config, keys)
        if keys.values["context_length"].value == _STATED_POSITIONS:
            keys.u32("context_length", _TRAINED_POSITIONS)

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        super().take_more(values, config, contents)
        config |= {**{name: value for name, value in self.assumed.items() if value is not None}, "auto_map": _CODE}
        config |= {stated: config[name] for stated, name in _PUBLISHED.items() if name in config}  # the code reads these


FAMILY = GgufFamily((NomicBert(), NomicBertMoe()))
