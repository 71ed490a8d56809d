"""GLM 4, GLM 4.5 to 4.7 and Solar Open with DeepSeek's experts, and GLM 5: DeepSeek-V3 with attention to chosen tokens."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, ClassVar

import numpy as np

from weightsmith._models.formats.gguf.architectures.deepseek import (
    EXPERT_NUMBERS,
    INDEXER,
    INDEXER_NUMBERS,
    INDEXER_SHAPES,
    PREDICTING,
    DeepseekV2,
    DeepseekV3,
    check_indexer,
)
from weightsmith._models.formats.gguf.base.architecture import (
    SIGMOID_ROUTER,
    Contents,
    GgufArchitecture,
    GgufFamily,
    head_dim,
)
from weightsmith._models.formats.gguf.base.tensors import (
    ATTENTION,
    EXPERTS,
    GATE_IN_UP,
    HEAD_NORMS,
    LAYER_SHAPES,
    MLP,
    NORM_BETWEEN,
    ROUTER,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    Predicting,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues


class Glm4(GgufArchitecture):
    """GLM 4."""

    name = "glm4"
    class_name = "Glm4ForCausalLM"
    model_types = ("glm4",)
    layer = {
        **{**ATTENTION, "post_attention_norm": "post_self_attn_layernorm", "ffn_norm": "post_attention_layernorm"},
        **{"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_mlp_layernorm"},
    }
    shapes = {**LAYER_SHAPES, **GATE_IN_UP}
    partial = 0.5


class Glm4Moe(GgufArchitecture):
    """GLM 4.5, 4.6 and 4.7; biases and norms of heads are there or not."""

    name = "glm4moe"
    class_name = "Glm4MoeForCausalLM"
    model_types = ("glm4_moe",)
    layer = {**ATTENTION, **HEAD_NORMS, **MLP, **ROUTER, **SHARED_EXPERTS, **NORM_BETWEEN, **EXPERTS}
    bare = ROUTER_BIAS
    experts = "n_routed_experts"
    numbers = EXPERT_NUMBERS
    constants = SIGMOID_ROUTER
    predicting: ClassVar[Predicting | None] = PREDICTING
    partial = 0.5

    def take_tensors(self, config: dict[str, Any], contents: Contents, where: str) -> None:
        for setting, name in {"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"}.items():
            config[setting] = any(stored.endswith(f".{name}") for stored in contents.shapes)


class SolarOpen(Glm4Moe):
    """Solar Open: all layers have experts, and RoPE turns whole heads. llama.cpp calls it GLM 4.5, too."""

    class_name = "SolarOpenForCausalLM"
    model_types = ("solar_open",)
    fixed = {"use_qk_norm": False}
    predicting = None
    partial = 1.0

    def owns(self, values: GgufValues) -> bool:
        width = values.get("attention.key_length")
        whole = width is not None and values.get("rope.dimension_count", width) == width
        others = [name for name in ("leading_dense_block_count", "nextn_predict_layers") if name in values]
        return super().owns(values) and whole and not others

    def holds(self, tensors: Container[str]) -> bool:
        return "blk.0.attn_q_norm.weight" not in tensors

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        config.need("partial_rotary_factor", self.turned(config) / head_dim(config), 1)


_TYPES = "attention.indexer.types"


class GlmDsa(DeepseekV2):
    """GLM 5 to 5.2: an indexer chooses the tokens that a layer attends to, or those of a layer before it are taken."""

    name = "glm-dsa"
    class_name = "GlmMoeDsaForCausalLM"
    model_types = ("glm_moe_dsa",)
    bare = ROUTER_BIAS
    layer = {**DeepseekV2.layer, **INDEXER}
    shapes = {**DeepseekV2.shapes, **INDEXER_SHAPES}
    numbers = (*EXPERT_NUMBERS, *INDEXER_NUMBERS)
    constants = SIGMOID_ROUTER
    fixed = {**DeepseekV3.fixed, "mlp_bias": False}
    predicting = PREDICTING

    def check_groups(self, config: GgufConfig) -> None:
        """llama.cpp chooses groups as GLM does."""

    def has_plain_queries(self, layers: int, tokens: int) -> bool:
        return False

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        check_indexer(config)
        rope = self.rope(config)
        config.need("rope_type", rope["rope_type"], "default")
        config.need("partial_rotary_factor", rope.get("partial_rotary_factor", 1), 1)

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.put(_TYPES, "bool", _has_indexer(config))

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        super().take_more(values, config, contents)
        layers = config["num_hidden_layers"]
        stated = values.get(_TYPES)
        if stated is None:  # as llama.cpp takes it, which tells GLM 5.2 by its context
            every = 4 if config["max_position_embeddings"] >= 1 << 20 else 1
            stated = np.array([max(i - 2, 0) % every == 0 for i in range(layers)])
        if not isinstance(stated, np.ndarray) or stated.shape != (layers,):
            raise values.wrong(_TYPES, stated, f"not a truth value for each of {layers:,} layers")
        config["indexer_types"] = ["full" if has_indexer else "shared" for has_indexer in stated]


def _has_indexer(config: GgufConfig) -> list[bool]:
    """Whether each layer of GLM 5 has an indexer, as one of three settings says."""
    layers = config.count("num_hidden_layers")
    types = config.get("indexer_types", config.get("index_topk_pattern"))
    if types is None:
        every, first = config.count("index_topk_freq", 1), config.count("index_skip_topk_offset", 2, least=0)
        return [max(i - first + 1, 0) % every == 0 for i in range(layers)]
    kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in types] if isinstance(types, list | str) else []
    if len(kinds) != layers or not all(kind in ("full", "shared") for kind in kinds) or kinds[0] != "full":
        raise config.wrong("indexer_types", types, f"not full or shared for each of {layers:,} layers, the first one full")
    return [kind == "full" for kind in kinds]


FAMILY = GgufFamily((Glm4(), SolarOpen(), Glm4Moe(), GlmDsa()))
