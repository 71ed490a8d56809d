"""DeepSeek's models from the second version on, whose keys and values are made of a common latent vector.

llama.cpp multiplies queries into the latent space instead. There, the model has one head of keys and values: the latent vector
and what RoPE turns. Of `kv_b_proj`, the rows of keys are stored transposed, apart from those of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from weightsmith._base.errors import Unsupported
from weightsmith._models.formats.gguf.base.architecture import SIGMOID_ROUTER, Contents, GgufArchitecture, GgufFamily, GgufKey
from weightsmith._models.formats.gguf.base.rope import ATTENTION_FACTOR, USE_ORIGINAL
from weightsmith._models.formats.gguf.base.tensors import (
    EXPERTS,
    LAYER_SHAPES,
    MLP,
    MLP_NORM,
    ROUTER,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    WIDTH,
    Dimension,
    Predicting,
    SplitPart,
    SplitTensor,
    TensorShape,
    product_of,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

EXPERT_NUMBERS = (
    GgufKey("expert_feed_forward_length", "moe_intermediate_size"),
    GgufKey("expert_shared_count", "n_shared_experts", least=0),
    GgufKey("leading_dense_block_count", "first_k_dense_replace", default=0, least=0),
    GgufKey("expert_weights_scale", "routed_scaling_factor", "f32", 1.0),
    GgufKey("expert_weights_norm", "norm_topk_prob", "bool", default=False),  # llama.cpp's converter writes only true
    GgufKey("expert_group_count", "n_group", default=1),
    GgufKey("expert_group_used_count", "topk_group", default=1),
)
"""`GgufArchitecture.numbers` of models that have DeepSeek's experts."""
PREDICTING = Predicting("num_nextn_predict_layers")
_LOG = "rope.scaling.yarn_log_multiplier"
_HEADS = product_of("attention.head_count")
_QUERIES = product_of("attention.head_count", "attention.key_length_mla")
_RANK, _QUERY_RANK = "attention.kv_lora_rank", product_of("attention.q_lora_rank")
LATENT_SHAPES: Mapping[str, TensorShape] = {
    "attn_q": (_QUERIES, WIDTH),
    "attn_q_a": (_QUERY_RANK, WIDTH),
    "attn_q_b": (_QUERIES, _QUERY_RANK),
    "attn_kv_a_mqa": (Dimension(((_RANK,), ("rope.dimension_count",))), WIDTH),
    "attn_v_b": (_HEADS, product_of("attention.value_length_mla"), product_of(_RANK)),
    "attn_output": (WIDTH, product_of("attention.head_count", "attention.value_length_mla")),
}
LATENT = {
    **{"attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm"},
    **{"attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa"},
    **{"attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_output": "self_attn.o_proj"},
}
"""`GgufArchitecture.layer` of attention by a common latent vector."""
LATENT_PARTS = (
    SplitTensor(
        "self_attn.kv_b_proj.weight",
        (
            SplitPart("attn_k_b.weight", lambda config: (config.count("qk_nope_head_dim"),), transposed=True),
            SplitPart("attn_v_b.weight", lambda config: (config.count("v_head_dim"),)),
        ),
        bands=True,
    ),
)
"""Its `splits`."""

_INDEXER_HEADS, _INDEXER_WIDTH = "attention.indexer.head_count", "attention.indexer.key_length"
INDEXER = {
    **{"indexer.attn_q_b": "self_attn.indexer.wq_b", "indexer.attn_k": "self_attn.indexer.wk"},
    **{"indexer.k_norm": "self_attn.indexer.k_norm", "indexer.proj": "self_attn.indexer.weights_proj"},
}
"""`GgufArchitecture.layer` of what chooses the tokens that a layer attends to."""
INDEXER_SHAPES: Mapping[str, TensorShape] = {
    "indexer.attn_q_b": (product_of(_INDEXER_HEADS, _INDEXER_WIDTH), _QUERY_RANK),
    **{"indexer.attn_k": (product_of(_INDEXER_WIDTH), WIDTH), "indexer.proj": (product_of(_INDEXER_HEADS), WIDTH)},
}
INDEXER_NUMBERS = (
    GgufKey(_INDEXER_HEADS, "index_n_heads"),
    GgufKey(_INDEXER_WIDTH, "index_head_dim"),
    GgufKey("attention.indexer.top_k", "index_topk"),
)
"""Its `numbers`."""
_ROTATED = 64
"""How many numbers of an indexer's head llama.cpp rotates at a time."""


def check_indexer(config: GgufConfig) -> None:
    """Raise FormatError for an indexer whose heads llama.cpp cannot rotate."""
    if (width := config.count("index_head_dim")) % _ROTATED:
        raise config.wrong("index_head_dim", width, f"which is not a multiple of {_ROTATED}, as llama.cpp needs it")


class DeepseekV2(GgufArchitecture):
    """DeepSeek-V2, and the base of V3, V3.2 and GLM 5."""

    name = "deepseek2"
    class_name = "DeepseekV2ForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v2",)
    layer = {**LATENT, "attn_norm": "input_layernorm", **MLP, **MLP_NORM, **ROUTER, **SHARED_EXPERTS, **EXPERTS}
    splits: ClassVar[tuple[SplitTensor, ...]] = LATENT_PARTS
    shapes = {**LAYER_SHAPES, **LATENT_SHAPES}
    setting_names = {
        **{_RANK: "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank", "rope.dimension_count": "qk_rope_head_dim"},
        **{"attention.key_length_mla": "(qk_nope_head_dim + qk_rope_head_dim)", "attention.value_length_mla": "v_head_dim"},
    }
    experts = "n_routed_experts"
    numbers: ClassVar[tuple[GgufKey, ...]] = EXPERT_NUMBERS
    constants = {"expert_gating_func": 1}
    fixed = {"attention_bias": False, "scoring_func": "softmax", "norm_topk_prob": False}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        self.check_groups(config)

    def check_groups(self, config: GgufConfig) -> None:
        """llama.cpp chooses groups by their two best experts, as DeepSeek-V3 does; V2 by the best one."""
        groups = config.count("n_group", 1)
        config.need("topk_method", "greedy" if groups == 1 else config.get("topk_method"), "greedy")

    def put_heads(self, config: GgufConfig, keys: GgufKeys) -> None:
        heads, rank, turned = (config.count(name) for name in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim"))
        config.need("num_key_value_heads", config.count("num_key_value_heads", heads), heads)
        layers, tokens = config.count("num_hidden_layers"), config.count("vocab_size")
        light = self.has_plain_queries(layers, tokens)
        stated, expected = ("none" if is_absent else "a number" for is_absent in (config.get("q_lora_rank") is None, light))
        config.need("q_lora_rank", stated, expected)
        keys.u32("vocab_size", tokens)
        keys.u32("attention.head_count_kv", 1)
        keys.u32("attention.kv_lora_rank", rank)
        if not light:
            keys.u32("attention.q_lora_rank", config.count("q_lora_rank"))
        keys.u32("attention.key_length", rank + turned)
        keys.u32("attention.value_length", rank)
        keys.u32("attention.key_length_mla", config.count("qk_nope_head_dim") + turned)
        keys.u32("attention.value_length_mla", config.count("v_head_dim"))
        keys.u32("rope.dimension_count", turned)
        rope = self.rope(config)
        if rope["rope_type"] == "yarn":
            config.need("mscale", rope.get("mscale"), rope.get("mscale_all_dim"))
            if self.name != DeepseekV2.name:  # of which alone llama.cpp does not take 1 for `mscale`
                config.need("mscale_all_dim", rope.get("mscale_all_dim"), 1)
            if rope.get("attention_factor") is not None:  # llama.cpp's scale of attention would follow it
                config.need("attention_factor", rope["attention_factor"], 1)
            keys.f32(_LOG, 0.1 * config.number("mscale_all_dim", None, rope))

    def has_plain_queries(self, layers: int, tokens: int) -> bool:
        """Whether llama.cpp takes it for granted that queries are not made of a latent vector of their own."""
        return layers in (26, 27) or (layers, tokens) == (48, 128_256)

    def turned_by(self, config: GgufConfig, rope: Mapping[str, Any]) -> float | None:
        return 1.0  # as both numbers of `mscale` are equal

    def take_heads(self, values: GgufValues, config: dict[str, Any], default: int) -> int:
        return default

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        config["num_key_value_heads"] = config["num_attention_heads"]
        turned = config["qk_rope_head_dim"] = config["head_dim"] = values.count("rope.dimension_count")
        config["kv_lora_rank"] = values.count("attention.kv_lora_rank")
        config["q_lora_rank"] = values.count("attention.q_lora_rank") if "attention.q_lora_rank" in values else None
        whole = values.count("attention.key_length_mla", least=turned + 1)
        config["qk_nope_head_dim"] = whole - turned
        config["v_head_dim"] = values.count("attention.value_length_mla")
        if scaling := config.get("rope_scaling"):
            if ATTENTION_FACTOR in values:
                raise Unsupported(f"{ATTENTION_FACTOR} beside {_LOG}", where=values.where, fix=USE_ORIGINAL)
            scaling["mscale"] = scaling["mscale_all_dim"] = float(str(np.float32(10 * values.number(_LOG))))


class DeepseekV3(DeepseekV2):
    """DeepSeek-V3, and Kimi K2 and GLM 4.7 Flash, which llama.cpp calls so, too."""

    class_name = "DeepseekV3ForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3", "kimi_k2", "glm4_moe_lite")
    bare = ROUTER_BIAS
    constants = SIGMOID_ROUTER
    fixed = {"attention_bias": False, "scoring_func": "sigmoid", "rope_interleave": True}
    predicting = PREDICTING

    def owns(self, values: GgufValues) -> bool:
        return super().owns(values) and values.equals("expert_gating_func", 2)

    def of_model(self, config: Mapping[str, Any], names: Iterable[str]) -> Self:
        """As in `GgufArchitecture`; llama.cpp's converter leaves out the predictors of DeepSeek-V3."""
        return super().of_model(config, names) if config.get("model_type") == "glm4_moe_lite" else self

    def check_groups(self, config: GgufConfig) -> None:
        """llama.cpp chooses groups as V3 does."""


class DeepseekV32(DeepseekV2):
    """DeepSeek-V3.2: an indexer in each layer chooses the tokens that it attends to."""

    name = "deepseek32"
    class_name = "DeepseekV32ForCausalLM"
    model_types = ("deepseek_v32",)
    bare = ROUTER_BIAS
    layer = {**DeepseekV2.layer, **INDEXER}
    shapes = {**DeepseekV2.shapes, **INDEXER_SHAPES}
    numbers = (*EXPERT_NUMBERS, *INDEXER_NUMBERS)
    constants = SIGMOID_ROUTER
    fixed = {**DeepseekV3.fixed, "mlp_bias": False}
    predicting = PREDICTING

    def check_groups(self, config: GgufConfig) -> None:
        """llama.cpp chooses groups as V3 does."""

    def has_plain_queries(self, layers: int, tokens: int) -> bool:
        return False

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        check_indexer(config)


FAMILY = GgufFamily((DeepseekV3(), DeepseekV2(), DeepseekV32()))
