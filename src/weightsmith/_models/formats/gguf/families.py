"""The families of models that GGUF files are read and written for: names of tensors, and what llama.cpp changes in them.

llama.cpp stores weights as the Hub does, with three exceptions:

* The rows of q and k of Llama's family are reordered within each head, because its RoPE rotates neighbours: row h·D + 2·i + j
  there is row h·D + j·D/2 + i of the Hub's.
* The norms of Gemma and Nemotron are stored with the 1 added that their code adds when it runs.
* The experts of a layer are one tensor of three dimensions.

A new family is an entry of `FAMILIES`, if it computes what llama.cpp does. An entry in the tests of GGUF files, with a tiny
model in `tests/zoo.py`, compares it with transformers and llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from weightsmith._models.formats.gguf.delta_net import key_head_rows, put_delta_net, take_delta_net
from weightsmith._models.formats.gguf.gemma4 import put_gemma4, take_gemma4
from weightsmith._models.formats.gguf.latent import put_latent, take_latent
from weightsmith._models.formats.gguf.shortconv import put_shortconv, take_shortconv
from weightsmith._models.formats.gguf.values import Config, Floats, Put, Values
from weightsmith._models.structure.projections import MIXTRAL

LAYERS = "model.layers."

_ENDS = MappingProxyType({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
_ATTENTION = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"} | {
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
}
_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_AFTER = {"ffn_norm": "post_attention_layernorm"}
_LLAMA = {**_ATTENTION, **_DENSE, **_AFTER}
_BETWEEN = {"post_attention_norm": "post_attention_layernorm"}
_POST = {**_BETWEEN, "post_ffw_norm": "post_feedforward_layernorm"}
_SANDWICH = {**_POST, "ffn_norm": "pre_feedforward_layernorm"}
_UNGATED = {**_ATTENTION, **_AFTER, "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


Take = Callable[[Values, dict[str, Any], Mapping[str, tuple[int, ...]], Mapping[str, Floats]], None]
"""Completes config.json: (keys, config.json, shapes of the file's tensors, its tensors that are made of config.json)."""


@dataclass(frozen=True, slots=True)
class Key:
    """A number or truth value that both formats have.

    name     of the key in the GGUF file, without the architecture
    field    in config.json
    kind     u32: a whole number; f32: any number above 0; bool
    default  where config.json or the file lacks it; None: it is required
    least    the smallest u32
    times    another field, by which the number is multiplied in the GGUF file; "": none
    """

    name: str
    field: str
    kind: Literal["u32", "f32", "bool"] = "u32"
    default: float | None = None
    least: int = 1
    times: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of llama.cpp's that is a part of one of the Hub's.

    name        in a layer, with its kind: `attn_k_b.weight`
    rows        of each run of rows that it has of a band, by config.json; None: as many as the other parts have
    transposed  whether it is stored as [columns, rows]
    """

    name: str
    rows: Callable[[Config], tuple[int, ...]] | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor of the Hub's that llama.cpp stores as several.

    name     the Hub's, in a layer: `self_attn.kv_b_proj.weight`
    parts    in the order of their rows
    columns  the parts have all rows, and take turns with the columns
    bands    a matrix is several bands, one after the other: a head each, or a row each
    flat     a part is one matrix: the first run of rows of all bands, then the second, and so on; else a matrix for each band
    """

    name: str
    parts: tuple[Part, ...]
    columns: bool = False
    bands: bool = False
    flat: bool = False


def _counted(name: str) -> Callable[[Config], tuple[int, ...]]:
    """`Part.rows` of one setting."""
    return lambda config: (config.count(name),)


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models, under its names in both formats.

    architecture  of the GGUF file: `general.architecture`
    class_name    of transformers' class, in config.json
    model_type    in config.json; "": the architecture
    layer         modules of a layer: llama.cpp's name → the Hub's; defaults to Llama's
    experts       modules of all experts of a layer: llama.cpp's name → the Hub's of one, with `{}` for its number
    bare          tensors of a layer whose names have no `.weight`: llama.cpp's name → the Hub's
    cuts          tensors of a layer that llama.cpp stores in parts
    ends          modules outside of the layers: llama.cpp's name → the Hub's
    rotated       whether the rows of q and k are reordered
    shift         what is added to norms
    also          other model_types that are written as this family
    told_by       key without which, or without whose constant, a file of the architecture is of another family
    count         config.json's number of experts; "": there are none
    used          config.json's number of experts for a token
    either        whether a model may have experts or not, which `put` and `take` say
    layered       settings for which the GGUF file may have a number for each layer; `take` sets them
    ones          tensors of a layer with a dimension of 1 that the GGUF file does not have: llama.cpp's name → its position
    keys          numbers that other families do not have
    constants     numbers that the GGUF file holds, and config.json does not: they are those of the family
    fixed         settings that the GGUF file does not hold: llama.cpp has them in its code
    assumed       those of them that transformers takes to be something else where config.json lacks them
    put, take     set keys that follow from several settings, and the settings from these keys: `delta_net.py`, `latent.py`, …;
                  `put` gives the tensors that exist in GGUF files alone
    rope          its own type of RoPE, which `put` checks; "default": there is none
    widths        whether keys say how wide a head of keys and of values is, and both are `head_dim`
    present       settings of config.json that say whether layers have a tensor: name → llama.cpp's name of the tensor
    implied       checks a setting that llama.cpp infers from others: config.json → its name, its value, llama.cpp's value
    predicting    config.json's number of layers behind the others, which predict several tokens at a time; "": there are none
    eps           key of the number that norms add, and its name in config.json
    partial       share of a head that RoPE turns, where config.json does not say it; 0: all of it, always
    sections      default of mrope_section: how many pairs of a head RoPE turns by time, height and width; (): RoPE is plain
    every         of so many layers, the last attends to the whole context; 0: all do
    stated        whether the file says which layers slide
    scaled        whether Llama 3's scaled frequencies are read
    is_read       whether files of the family are read, too
    tokenizer     llama.cpp's name of tokenizers with a fallback to bytes; those of "llama" have scores, others merges
    defaults      of transformers, on which published config.json files rely
    activation    of the MLP
    """

    architecture: str
    class_name: str
    model_type: str = ""
    layer: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    experts: Mapping[str, str] = field(default_factory=dict)
    bare: Mapping[str, str] = field(default_factory=dict)
    cuts: tuple[Cut, ...] = ()
    ends: Mapping[str, str] = field(default_factory=lambda: _ENDS)
    rotated: bool = False
    shift: float = 0.0
    also: tuple[str, ...] = ()
    told_by: str = ""
    count: str = ""
    used: str = "num_experts_per_tok"
    either: bool = False
    layered: tuple[str, ...] = ()
    ones: Mapping[str, int] = field(default_factory=dict)
    keys: tuple[Key, ...] = ()
    constants: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    put: Callable[[Config, Put], Mapping[str, Floats] | None] | None = None
    take: Take | None = None
    widths: bool = True
    rope: str = "default"
    present: Mapping[str, str] = field(default_factory=dict)
    implied: Callable[[Config], tuple[str, object, object]] | None = None
    predicting: str = ""
    eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    partial: float = 0.0
    sections: tuple[int, ...] = ()
    every: int = 0
    stated: bool = False
    scaled: bool = False
    is_read: bool = True
    tokenizer: str = "llama"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation: str = "silu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_type", self.model_type or self.architecture)


_MIXTRAL = {f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{MIXTRAL[f'{part}_proj']}" for part in ("gate", "down", "up")}
_QWEN_EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
_SHARED_GATED = {**_SHARED, "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_QWEN_MOE: dict[str, Any] = {"experts": _QWEN_EXPERTS, "count": "num_experts"}
_QWEN_MOE_KEYS = (
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_SEVERAL_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_BIASED_ROUTER = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_DEEPSEEK_KEYS = (
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_shared_count", "n_shared_experts", least=0),
    Key("leading_dense_block_count", "first_k_dense_replace", least=0),
    Key("expert_weights_scale", "routed_scaling_factor", "f32", 1.0),
    Key("expert_weights_norm", "norm_topk_prob", "bool"),
    Key("expert_group_count", "n_group", default=1),
    Key("expert_group_used_count", "topk_group", default=1),
)
_DEEPSEEK_MOE: dict[str, Any] = {"experts": _QWEN_EXPERTS, "count": "n_routed_experts", "keys": _DEEPSEEK_KEYS}
"""Fields of the families that have DeepSeek's experts."""
_LATENT: dict[str, Any] = {
    "layer": {
        **{"attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm"},
        **{"attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa"},
        **{"attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"},
        **{**_DENSE, **_AFTER, **_ROUTER, **_SEVERAL_SHARED},
    },
    **_DEEPSEEK_MOE,
    "cuts": (
        Cut(
            "self_attn.kv_b_proj.weight",
            (
                Part("attn_k_b.weight", _counted("qk_nope_head_dim"), transposed=True),
                Part("attn_v_b.weight", _counted("v_head_dim")),
            ),
            bands=True,
        ),
    ),
    "put": put_latent,
    "take": take_latent,
    "widths": False,
}
"""DeepSeek's models from the second version on."""
_COHERE_KEYS = (Key("logit_scale", "logit_scale", "f32", 0.0625),)
_GRANITE_KEYS = (
    Key("attention.scale", "attention_multiplier", "f32", 1.0),
    Key("embedding_scale", "embedding_multiplier", "f32", 1.0),
    Key("residual_scale", "residual_multiplier", "f32", 1.0),
    Key("logit_scale", "logits_scaling", "f32", 1.0),
)
_GRANITE_MOE: dict[str, Any] = {
    "layer": {
        **{**_ATTENTION, **_AFTER, "ffn_gate_inp": "block_sparse_moe.router.layer"},
        **{"ffn_down_exps": "block_sparse_moe.output_linear", "ffn_down_shexp": "shared_mlp.output_linear"},
    },
    "cuts": (
        Cut("block_sparse_moe.input_linear.weight", (Part("ffn_gate_exps.weight"), Part("ffn_up_exps.weight"))),
        Cut("shared_mlp.input_linear.weight", (Part("ffn_gate_shexp.weight"), Part("ffn_up_shexp.weight"))),
    ),
    "count": "num_local_experts",
    "rotated": True,
}
_DELTA_NET = {
    **{**_ATTENTION, **_NORMS, **_BETWEEN},
    **{"ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj"},
}
_DELTA_APART = {
    **{"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z"},
    **{"ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"},
}
_DELTA_KEYS = (
    Key("ssm.conv_kernel", "linear_conv_kernel_dim"),
    Key("ssm.state_size", "linear_key_head_dim"),
    Key("ssm.group_count", "linear_num_key_heads"),
    Key("ssm.time_step_rank", "linear_num_value_heads"),
)
_DELTA_NET_ALL: dict[str, Any] = {
    "bare": {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    "shift": 1.0,
    "put": put_delta_net,
    "partial": 0.25,
    "take": take_delta_net,
    "ones": {"ssm_conv1d.weight": 1},
}
_LFM2 = {
    **{"attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj"},
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"},
    **{"shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj"},
}
_LFM2_DENSE = {"ffn_gate": "feed_forward.w1", "ffn_down": "feed_forward.w2", "ffn_up": "feed_forward.w3"}
_LFM2_ALL: dict[str, Any] = {
    "ends": {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
    "ones": {"shortconv.conv.weight": 1},
    "layered": ("num_key_value_heads",),
    "put": put_shortconv,
    "take": take_shortconv,
    "eps": ("attention.layer_norm_rms_epsilon", "norm_eps"),
    "defaults": {"rope_theta": 1e6},
}
_PREDICTING = "num_nextn_predict_layers"
_SIGMOID = {"expert_gating_func": 2}
_LINEARS = {name: here for name, here in _ATTENTION.items() if name != "attn_norm"}
_LAYER_NORM = ("attention.layer_norm_epsilon", "layer_norm_eps")
_UNTIED, _TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
_GELU = "gelu_pytorch_tanh"


def _rope_of_smollm3(config: Config) -> tuple[str, object, object]:
    expected = [int((i + 1) % 4 != 0) for i in range(config.count("num_hidden_layers"))]
    stated = config.get("no_rope_layers")
    return "no_rope_layers", expected if stated is None else stated, expected


def _norms_of_cohere(config: Config) -> tuple[str, object, object]:
    return "use_qk_norm", bool(config.get("use_qk_norm")), config.count("num_hidden_layers") >= 64


def _as_many_kv_heads(config: Config) -> tuple[str, object, object]:
    heads = config.count("num_attention_heads")
    return "num_key_value_heads", config.count("num_key_value_heads", heads), heads


def _window_of_exaone4(config: Config) -> tuple[str, object, object]:
    """Only the larger of the two sizes, with 64 layers, has a sliding window."""
    stated, large = config.get("sliding_window"), config.count("num_hidden_layers") == 64
    return "sliding_window", stated, (4096 if stated is None else stated) if large else None


def _take_gpt_oss(found: Values, config: dict[str, Any], *_: object) -> None:
    if scaling := config.get("rope_scaling"):
        scaling["truncate"] = False  # as published; the GGUF file does not say it


def _last_layer_of_ernie(config: Config) -> tuple[str, object, object]:
    last = config.count("num_hidden_layers") - 1
    stated = config.get("moe_layer_end_index", -1)
    return "moe_layer_end_index", last if stated == -1 else stated, last


def _groups_of_deepseek2(config: Config) -> tuple[str, object, object]:
    """llama.cpp chooses groups by their two best experts, as DeepSeek-V3 does; V2 by the best one."""
    groups = config.count("n_group", 1)
    return "topk_method", "greedy" if groups == 1 else config.get("topk_method"), "greedy"


FAMILIES = (
    Family("llama", "LlamaForCausalLM", rotated=True, also=("mistral",), scaled=True),
    Family(
        "llama",
        "MixtralForCausalLM",
        model_type="mixtral",
        layer={**_ATTENTION, **_AFTER, "ffn_gate_inp": "block_sparse_moe.gate"},
        experts=_MIXTRAL,
        rotated=True,
        count="num_local_experts",
        scaled=True,
    ),
    Family("mistral3", "Ministral3ForCausalLM", model_type="ministral3", rotated=True),
    Family("qwen2", "Qwen2ForCausalLM"),
    Family(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        layer={**_ATTENTION, **_AFTER, **_ROUTER, **_SHARED_GATED},
        **_QWEN_MOE,
        keys=_QWEN_MOE_KEYS,
        fixed={"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
    Family("qwen3", "Qwen3ForCausalLM", layer={**_ATTENTION, **_NORMS, **_DENSE, **_AFTER}),
    Family(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        layer={**_ATTENTION, **_NORMS, **_AFTER, **_ROUTER},
        **_QWEN_MOE,
        keys=(Key("expert_feed_forward_length", "moe_intermediate_size"),),
        fixed={"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
        assumed={"norm_topk_prob": False},
    ),
    Family(
        "dots1",
        "Dots1ForCausalLM",
        layer={**_ATTENTION, **_NORMS, **_DENSE, **_AFTER, **_ROUTER, **_SEVERAL_SHARED},
        **_DEEPSEEK_MOE,
        bare=_BIASED_ROUTER,
        constants=_SIGMOID,
        fixed={**_UNTIED, "attention_bias": False},
        implied=_as_many_kv_heads,
    ),
    Family(
        "glm4moe",
        "Glm4MoeForCausalLM",
        model_type="glm4_moe",
        layer={**_ATTENTION, **_NORMS, **_DENSE, **_ROUTER, **_SEVERAL_SHARED, **_BETWEEN},
        **_DEEPSEEK_MOE,
        bare=_BIASED_ROUTER,
        constants=_SIGMOID,
        present={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        predicting=_PREDICTING,
        partial=0.5,
    ),
    Family(
        "deepseek2",
        "DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        **_LATENT,
        constants={"expert_gating_func": 1},
        fixed={"attention_bias": False, "scoring_func": "softmax", "norm_topk_prob": False},
        implied=_groups_of_deepseek2,
    ),
    Family(
        "deepseek2",
        "DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        **_LATENT,
        bare=_BIASED_ROUTER,
        also=("glm4_moe_lite",),
        told_by="expert_gating_func",
        constants=_SIGMOID,
        fixed={"attention_bias": False, "scoring_func": "sigmoid", "rope_interleave": True},
        predicting=_PREDICTING,
    ),
    Family("gemma", "GemmaForCausalLM", shift=1.0, fixed=_TIED, activation=_GELU),
    Family(
        "qwen35",
        "Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        layer={**_DELTA_NET, **_DELTA_APART, **_DENSE},
        **_DELTA_NET_ALL,
        keys=_DELTA_KEYS,
        sections=(11, 11, 10),
    ),
    Family(
        "qwen35moe",
        "Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        layer={**_DELTA_NET, **_DELTA_APART, **_ROUTER, **_SHARED_GATED},
        **{**_DELTA_NET_ALL, "bare": {**_DELTA_NET_ALL["bare"], "ffn_down_exps.weight": "mlp.experts.down_proj"}},
        **_QWEN_MOE,
        cuts=(Cut("mlp.experts.gate_up_proj", (Part("ffn_gate_exps.weight"), Part("ffn_up_exps.weight"))),),
        keys=(*_DELTA_KEYS, *_QWEN_MOE_KEYS),
        sections=(11, 11, 10),
    ),
    Family(
        "qwen3next",
        "Qwen3NextForCausalLM",
        model_type="qwen3_next",
        layer={**_DELTA_NET, "ssm_ba": "linear_attn.in_proj_ba", **_DENSE, **_ROUTER, **_SHARED_GATED},
        **_DELTA_NET_ALL,
        **_QWEN_MOE,
        cuts=(
            Cut(
                "linear_attn.in_proj_qkvz.weight",
                (
                    Part("attn_qkv.weight", lambda config: key_head_rows(config)[:3]),
                    Part("attn_gate.weight", lambda config: key_head_rows(config)[3:]),
                ),
                bands=True,
                flat=True,
            ),
        ),
        keys=(*_DELTA_KEYS, *_QWEN_MOE_KEYS),
        fixed={"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
    Family(
        "qwen2vl",
        "Qwen2VLForConditionalGeneration",
        model_type="qwen2_vl_text",
        also=("qwen2_5_vl_text", "qwen2_vl", "qwen2_5_vl"),
        sections=(16, 24, 24),
        is_read=False,
    ),
    Family("gemma2", "Gemma2ForCausalLM", layer={**_ATTENTION, **_DENSE, **_SANDWICH}, shift=1.0, every=2, activation=_GELU),
    Family(
        "gemma3",
        "Gemma3ForCausalLM",
        model_type="gemma3_text",
        layer={**_ATTENTION, **_NORMS, **_DENSE, **_SANDWICH},
        shift=1.0,
        every=6,
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072}
        | {"rope_theta": 1e6, "vocab_size": 262_208, "tie_word_embeddings": True},
        activation=_GELU,
    ),
    Family(
        "gemma4",
        "Gemma4ForCausalLM",
        model_type="gemma4_text",
        layer={
            **{**_ATTENTION, **_NORMS, **_DENSE, **_SANDWICH, "ffn_gate_inp": "router.proj"},
            **{"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"},
            **{f"post_ffw_norm_{i}": f"post_feedforward_layernorm_{i}" for i in (1, 2)},
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        },
        bare={
            **{"layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale"},
            **{"ffn_down_exps.scale": "router.per_expert_scale", "ffn_down_exps.weight": "experts.down_proj"},
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        },
        ends={
            **{**_ENDS, "per_layer_token_embd": "model.embed_tokens_per_layer"},
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        fixed={"attention_bias": False},
        either=True,
        layered=("num_key_value_heads", "intermediate_size"),
        put=put_gemma4,
        take=take_gemma4,
        widths=False,
        rope="proportional",
        tokenizer="gemma4",
        every=6,
        stated=True,
        activation=_GELU,
    ),
    Family(
        "phi2",
        "PhiForCausalLM",
        model_type="phi",
        layer=_ATTENTION | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        ends={**_ENDS, "output_norm": "model.final_layernorm"},
        fixed={**_UNTIED, "qk_layernorm": False},
        eps=_LAYER_NORM,
        partial=0.5,
        activation="gelu_new",
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        layer={"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"}
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj", **_AFTER},
        partial=1.0,
        widths=False,
    ),
    Family("smollm3", "SmolLM3ForCausalLM", rotated=True, fixed={"no_rope_layer_interval": 4}, implied=_rope_of_smollm3),
    Family("olmo2", "Olmo2ForCausalLM", layer={**_LINEARS, **_NORMS, **_DENSE, **_POST}, fixed=_UNTIED),
    Family(
        "olmo2",
        "Olmo3ForCausalLM",
        model_type="olmo3",
        layer={**_LINEARS, **_NORMS, **_DENSE, **_POST},
        told_by="attention.sliding_window",
        fixed=_UNTIED,
        every=4,
        stated=True,
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        layer={**_ATTENTION, **_NORMS, **_AFTER, **_ROUTER},
        **_QWEN_MOE,
        fixed={**_UNTIED, "norm_topk_prob": False, "clip_qkv": None},
        implied=_as_many_kv_heads,
    ),
    Family("granite", "GraniteForCausalLM", rotated=True, keys=_GRANITE_KEYS),
    Family("granitemoe", "GraniteMoeForCausalLM", **_GRANITE_MOE, keys=_GRANITE_KEYS),
    Family(
        "granitemoe",
        "GraniteMoeSharedForCausalLM",
        model_type="granitemoeshared",
        **_GRANITE_MOE,
        keys=(*_GRANITE_KEYS, Key("expert_shared_feed_forward_length", "shared_intermediate_size")),
        told_by="expert_shared_feed_forward_length",
    ),
    Family(
        "gpt-oss",
        "GptOssForCausalLM",
        model_type="gpt_oss",
        layer={**_ATTENTION, **_BETWEEN, "ffn_gate_inp": "mlp.router"},
        bare={"attn_sinks.weight": "self_attn.sinks", "ffn_down_exps.bias": "mlp.experts.down_proj_bias"},
        cuts=(
            Cut(
                "mlp.experts.gate_up_proj",
                (Part("ffn_gate_exps.weight", transposed=True), Part("ffn_up_exps.weight", transposed=True)),
                columns=True,
            ),
            Cut("mlp.experts.down_proj", (Part("ffn_down_exps.weight", transposed=True),)),
            Cut(
                "mlp.experts.gate_up_proj_bias",
                (Part("ffn_gate_exps.bias"), Part("ffn_up_exps.bias")),
                columns=True,
                bands=True,
            ),
        ),
        count="num_local_experts",
        keys=(Key("expert_feed_forward_length", "intermediate_size"),),
        take=_take_gpt_oss,
        fixed={"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        every=2,
    ),
    Family(
        "command-r",
        "CohereForCausalLM",
        model_type="cohere",
        layer={**_ATTENTION, **_NORMS, **_DENSE},
        keys=_COHERE_KEYS,
        fixed={**_TIED, "attention_bias": False},
        implied=_norms_of_cohere,
        eps=_LAYER_NORM,
    ),
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        layer={**_ATTENTION, **_DENSE},
        keys=_COHERE_KEYS,
        fixed={**_TIED, "attention_bias": False},
        eps=_LAYER_NORM,
        every=4,
    ),
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        layer={**_ATTENTION, **_AFTER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        fixed={"use_bias": True},
        eps=("attention.layer_norm_epsilon", "norm_epsilon"),
        activation=_GELU,
    ),
    Family("stablelm", "StableLmForCausalLM", fixed={**_UNTIED, "qk_layernorm": False}, eps=_LAYER_NORM, partial=0.25),
    Family(
        "glm4",
        "Glm4ForCausalLM",
        layer={**_ATTENTION, "post_attention_norm": "post_self_attn_layernorm", "ffn_norm": "post_attention_layernorm"}
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_mlp_layernorm"},
        partial=0.5,
    ),
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        layer={**_ATTENTION, **_DENSE, **_BETWEEN},
        fixed={"attention_out_bias": False, "mlp_bias": False},
    ),
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        layer={**_LINEARS, **_NORMS, **_DENSE, **_POST},
        implied=_window_of_exaone4,
        every=4,
        stated=True,
        scaled=True,
    ),
    Family(
        "ernie4_5-moe",
        "Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        layer={**_ATTENTION, **_DENSE, **_AFTER, **_ROUTER, **_SEVERAL_SHARED},
        experts=_QWEN_EXPERTS,
        bare={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        ones={"exp_probs_b.bias": 0},
        count="moe_num_experts",
        used="moe_k",
        keys=(
            Key("expert_feed_forward_length", "moe_intermediate_size"),
            Key("expert_shared_count", "moe_num_shared_experts", least=0),
            Key("expert_shared_feed_forward_length", "moe_intermediate_size", times="moe_num_shared_experts"),
            Key("leading_dense_block_count", "moe_layer_start_index", least=0),
        ),
        constants={"interleave_moe_layer_step": 1},
        fixed={"use_bias": False, "moe_layer_interval": 1},
        implied=_last_layer_of_ernie,
    ),
    Family(
        "lfm2",
        "Lfm2ForCausalLM",
        layer={**_LFM2, **_LFM2_DENSE},
        **_LFM2_ALL,
        keys=(Key("shortconv.l_cache", "conv_L_cache"),),
        fixed={"conv_bias": False},
    ),
    Family(
        "lfm2moe",
        "Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        layer={**_LFM2, **_LFM2_DENSE, "ffn_gate_inp": "feed_forward.gate"},
        **_LFM2_ALL,
        experts={f"{name}_exps": here.replace(".", ".experts.{}.") for name, here in _LFM2_DENSE.items()},
        bare={"exp_probs_b.bias": "feed_forward.expert_bias"},
        count="num_experts",
        keys=(
            Key("shortconv.l_cache", "conv_L_cache"),
            Key("expert_feed_forward_length", "moe_intermediate_size"),
            Key("leading_dense_block_count", "num_dense_layers", least=0),
        ),
        constants=_SIGMOID,
        fixed={"conv_bias": False, "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0},
    ),
    Family("ernie4_5", "Ernie4_5ForCausalLM", fixed={"use_bias": False}),
    Family(
        "hunyuan-dense",
        "HunYuanDenseV1ForCausalLM",
        model_type="hunyuan_v1_dense",
        layer=_LLAMA | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        fixed={"attention_bias": False, "mlp_bias": False},
    ),
    Family(
        "nemotron",
        "NemotronForCausalLM",
        layer=_UNGATED,
        shift=1.0,
        fixed=_UNTIED,
        eps=("attention.layer_norm_epsilon", "norm_eps"),
        partial=0.5,
        activation="relu2",
    ),
    Family("arcee", "ArceeForCausalLM", layer=_UNGATED, rotated=True, activation="relu2"),
)
"""Every family. Of several with one architecture, `told_by` and the number of experts decide which one a file is of."""

ARCHITECTURES = tuple(dict.fromkeys(family.architecture for family in FAMILIES if family.is_read))
MODEL_TYPES = tuple(name for family in FAMILIES for name in (family.model_type, *family.also))


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """A tensor of the Hub's layout in a GGUF file.

    name    of the tensor in the GGUF file
    expert  its number among the experts that are stored together; -1 for a tensor of its own
    """

    name: str
    expert: int = -1


_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_.0-9]+)\.(weight|bias)")
_HUB_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.([a-z_.0-9]+)\.(weight|bias)")
_HUB_BARE = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.([a-zA-Z_.0-9]+)")
_NUMBER = re.compile(r"(?:blk|model\.layers)\.(0|[1-9][0-9]{0,5})\.")
_BARE = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_.0-9]+)")
_EXPERT = re.compile(r"(\.experts\.)(0|[1-9][0-9]{0,5})(\.)")


def hub_name(family: Family, name: str) -> str | None:
    """The Hub's name of a tensor of a GGUF file, with `{}` for the expert's number; None if the family has no such tensor.

    >>> hub_name(FAMILIES[0], "blk.3.attn_q.weight"), hub_name(FAMILIES[1], "blk.0.ffn_up_exps.weight")
    ('model.layers.3.self_attn.q_proj.weight', 'model.layers.0.block_sparse_moe.experts.{}.w3.weight')
    """
    module, _, kind = name.rpartition(".")
    if module in family.ends and kind in ("weight", "bias"):
        return f"{family.ends[module]}.{kind}"
    match, bare = _LAYER.fullmatch(name), _BARE.fullmatch(name)
    inner = None if match is None else family.layer.get(match[2]) or family.experts.get(match[2])
    if match is not None and inner is not None:
        return f"{LAYERS}{match[1]}.{inner}.{match[3]}"
    return f"{LAYERS}{bare[1]}.{family.bare[bare[2]]}" if bare is not None and bare[2] in family.bare else None


def gguf_place(family: Family, name: str) -> GgufPlace | None:
    """Where a tensor of the Hub's layout is in a GGUF file; None if the family has no such tensor.

    >>> gguf_place(FAMILIES[1], "model.layers.0.block_sparse_moe.experts.7.w3.weight")
    GgufPlace(name='blk.0.ffn_up_exps.weight', expert=7)
    """
    module, _, kind = text_name(name).rpartition(".")
    end = next((there for there, here in family.ends.items() if here == module), None)
    if end is not None and kind in ("weight", "bias"):
        return GgufPlace(f"{end}.{kind}")
    if bare := _HUB_BARE.fullmatch(text_name(name)):
        own = next((there for there, here in family.bare.items() if here == bare[2]), None)
        if own is not None:
            return GgufPlace(f"blk.{bare[1]}.{own}")
    match = _HUB_LAYER.fullmatch(text_name(name))
    if match is None:
        return None
    expert, inner = _EXPERT.search(match[2]), _EXPERT.sub(r"\1{}\3", match[2])
    found = next((there for there, here in (*family.layer.items(), *family.experts.items()) if here == inner), None)
    return None if found is None else GgufPlace(f"blk.{match[1]}.{found}.{match[3]}", int(expert[2]) if expert else -1)


def cut_of(family: Family, name: str) -> tuple[Cut, str] | None:
    """The cut that splits a tensor of the Hub's layout, and its layer number; None if it is stored whole."""
    match = _HUB_BARE.fullmatch(text_name(name))
    found = next((cut for cut in family.cuts if match is not None and cut.name == match[2]), None)
    return None if found is None or match is None else (found, match[1])


def part_of(family: Family, name: str) -> tuple[Cut, str] | None:
    """The tensor that a GGUF tensor is part of, and its layer number; None if it is whole."""
    match = _BARE.fullmatch(name)
    if match is None or match[2].removesuffix(".weight") in family.experts:  # which are read one by one
        return None
    found = next((cut for cut in family.cuts if match[2] in [part.name for part in cut.parts]), None)
    return None if found is None else (found, match[1])


def is_known(family: Family, name: str) -> bool:
    """Whether a family has a tensor of the Hub's layout."""
    return gguf_place(family, name) is not None or cut_of(family, name) is not None


def hub_shape(family: Family, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor of a GGUF file in the Hub's layout."""
    match = _BARE.fullmatch(name)
    at = None if match is None else family.ones.get(match[2])
    if at is None:
        return shape
    whole = [n for n in shape if n != 1] or [1]
    return (*whole[:at], 1, *whole[at:])


def predicts(name: str, layers: float = math.inf) -> bool:
    """Whether a tensor, under either name, belongs to a layer behind the `layers` of the model: it predicts several tokens.

    layers  infinity if only the name tells

    >>> predicts("blk.2.attn_q.weight", 2), predicts("model.layers.1.mlp.up_proj.weight", 2), predicts("mtp.fc.weight", 2)
    (True, False, True)
    """
    match = _NUMBER.match(text_name(name))
    return name.startswith(("mtp.", "model.mtp")) or (match is not None and int(match[1]) >= layers)


def text_name(name: str) -> str:
    """The name of a tensor in the language model alone; unchanged for one of other parts.

    Files of embedding models have the names of the model without its head.

    >>> text_name("model.language_model.layers.0.mlp.up_proj.weight"), text_name("language_model.lm_head.weight")
    ('model.layers.0.mlp.up_proj.weight', 'lm_head.weight')
    >>> text_name("layers.0.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    name = name.removeprefix("language_model.")
    if name.startswith(("layers.", "embed_tokens.", "norm.")):
        return f"model.{name}"
    return name.replace("model.language_model.", "model.", 1).replace("model.text_model.", "model.", 1)


def is_norm(name: str) -> bool:
    """Whether a tensor of a GGUF file is the weight of a norm.

    >>> is_norm("blk.0.attn_q_norm.weight"), is_norm("blk.0.attn_q.weight")
    (True, False)
    """
    return name.endswith("_norm.weight")


def is_decay(name: str) -> bool:
    """Whether -exp of a tensor is stored in a GGUF file."""
    return name.endswith(".ssm_a")


def shift_of(family: Family, name: str) -> float:
    """What is added to a tensor of a GGUF file."""
    return family.shift if is_norm(name) and not name.endswith(".ssm_norm.weight") else 0.0


def is_router(name: str) -> bool:
    """Whether a tensor of a GGUF file is the weight of a router.

    >>> is_router("blk.0.ffn_gate_inp_shexp.weight"), is_router("blk.0.ffn_gate.weight")
    (True, False)
    """
    return ".ffn_gate_inp" in name


def rotated_heads(family: Family, name: str, heads: int, kv_heads: int) -> int:
    """The number of heads whose rows are reordered in a tensor of a GGUF file; 0 if none are."""
    if not family.rotated:
        return 0
    module = name.split(".")[-2]
    return {"attn_q": heads, "attn_k": kv_heads}.get(module, 0)
