"""DBRX, whose settings are in two parts of config.json, and whose experts are one matrix of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._base.errors import Unsupported
from weightsmith._models.formats.gguf.base.architecture import UNTIED, Contents, GgufArchitecture, GgufFamily
from weightsmith._models.formats.gguf.base.rope import USE_ORIGINAL
from weightsmith._models.formats.gguf.base.tensors import LAYERS, SplitPart, SplitTensor
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_EPS = 1e-5
"""What the norms add, in transformers' code."""
_CLAMP = "attention.clamp_kqv"
_ATTENTION: Mapping[str, tuple[str, Any]] = {"num_key_value_heads": ("kv_n_heads", 1), "clip_qkv": ("clip_qkv", None)}
_FFN: Mapping[str, tuple[str, Any]] = {
    **{"intermediate_size": ("ffn_hidden_size", 3584), "num_experts": ("moe_num_experts", 4), "moe_top_k": ("moe_top_k", 1)},
    "moe_normalize_expert_weights": ("moe_normalize_expert_weights", 1.0),
}
_SIZES = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"} | {
    "max_position_embeddings": "max_seq_len"
}
"""Names of sizes under which transformers' class passes them on to its parts."""
_PARTS = {"attn_config": _ATTENTION, "ffn_config": _FFN}
"""Parts of config.json: the name here of each setting → its name there, and the default of transformers' class."""


def _rows(config: GgufConfig) -> tuple[int]:
    """The rows of an expert; config.json of a file that is read has them in a part alone."""
    return (config.count("intermediate_size", (config.get("ffn_config") or {}).get("ffn_hidden_size")),)


def _experts(name: str, part: str, *, transposed: bool = False) -> SplitTensor:
    """The experts' weights of one kind, one below the other."""
    return SplitTensor(f"ffn.experts.mlp.{name}", (SplitPart(part, _rows, transposed=transposed),), bands=True)


class Dbrx(GgufArchitecture):
    """DBRX."""

    name = "dbrx"
    class_name = "DbrxForCausalLM"
    model_types = ("dbrx",)
    square = True
    layer = {
        **{"attn_norm": "norm_attn_norm.norm_1", "attn_output_norm": "norm_attn_norm.norm_2"},
        **{"attn_qkv": "norm_attn_norm.attn.Wqkv", "attn_output": "norm_attn_norm.attn.out_proj"},
        "ffn_gate_inp": "ffn.router.layer",
    }
    splits = (
        _experts("w1", "ffn_gate_exps.weight"),
        _experts("v1", "ffn_up_exps.weight"),
        _experts("w2", "ffn_down_exps.weight", transposed=True),
    )
    prefixes = (("transformer.blocks.", LAYERS), ("transformer.", "model."))
    ends = {"token_embd": "model.wte", "output_norm": "model.norm_f", "output": "lm_head"}
    setting_names = {
        **{"attention.head_count_kv": "kv_n_heads of attn_config", "feed_forward_length": "ffn_hidden_size of ffn_config"},
        "expert_count": "moe_num_experts of ffn_config",
    }
    eps = ("attention.layer_norm_epsilon", "layer_norm_eps")
    experts = "num_experts"
    experts_used = "moe_top_k"
    fixed = {**UNTIED, "layer_norm_eps": _EPS, "moe_normalize_expert_weights": 1.0}

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """config.json with the settings of its parts outside of them, and with those that are transformers' own."""
        added: dict[str, Any] = {"layer_norm_eps": _EPS}
        parts = {name: config[name] if isinstance(config.get(name), dict) else {} for name in _PARTS}
        for name, settings in _PARTS.items():
            added |= {here: parts[name].get(there, default) for here, (there, default) in settings.items()}
        if (base := parts["attn_config"].get("rope_theta")) is not None and not config.get("rope_parameters"):
            added["rope_theta"] = base
        if isinstance(activation := parts["ffn_config"].get("ffn_act_fn"), dict):
            added["hidden_act"] = activation.get("name")
        return {**added, **config}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        weights = config.get("moe_normalize_expert_weights", "none")
        config.need("moe_normalize_expert_weights", weights, 1.0)

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.f32(_CLAMP, 0.0 if config.get("clip_qkv") is None else config.number("clip_qkv"))

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        if (stated := config.pop("layer_norm_eps")) != _EPS:
            what = f"{self.name}.{self.eps[0]} is {stated}, and transformers takes {_EPS} for granted"
            raise Unsupported(what, where=values.where, fix=USE_ORIGINAL)
        config["clip_qkv"] = values.float32(_CLAMP) if _CLAMP in values else None
        for name, settings in _PARTS.items():
            config[name] = {there: config.pop(here) for here, (there, _) in settings.items()}
        config |= {there: config[here] for here, there in _SIZES.items()}
        del config["head_dim"]
        config["attn_config"]["rope_theta"] = base = config.pop("rope_theta")
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": base}


FAMILY = GgufFamily((Dbrx(),))
