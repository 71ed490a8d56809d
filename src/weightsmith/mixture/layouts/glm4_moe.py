"""GLM-4.5: DeepSeek-V3's experts with grouped-query attention, which most dense models have."""

from __future__ import annotations

from typing import Any

from weightsmith.mixture.layouts.base import (
    ATTENTION,
    NORMS,
    PER_EXPERT,
    QK_NORMS,
    QKV_BIASES,
    ExpertLayout,
    Facts,
    moe_config,
)
from weightsmith.mixture.layouts.deepseek_family import SHARED, SIGMOID, correction, one_group, warn_none_shared, warn_shared
from weightsmith.mixture.layouts.dense_config import rotary_share


def _config(facts: Facts) -> dict[str, Any]:
    config = moe_config(
        facts,
        ("Glm4MoeForCausalLM", "glm4_moe"),
        ("head_dim",),
        **one_group(facts),
        attention_bias=facts.biased,
        use_qk_norm=facts.present >= QK_NORMS,
        num_nextn_predict_layers=0,
        output_router_logits=False,
    )
    # The default rotates half of each head.
    share = {"partial_rotary_factor": rotary_share(facts.config)}
    return config | ({"rope_parameters": {**config["rope_parameters"], **share}} if "rope_parameters" in config else share)


LAYOUT = ExpertLayout(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    title="GLM-4-MoE",
    dense=("llama", "mistral", "ministral", "phi3", "smollm3", "qwen2", "qwen3", "seed_oss"),
    layer=ATTENTION | NORMS,
    optional=(QKV_BIASES, QK_NORMS),
    partial=True,
    router="mlp.gate.weight",
    routing=SIGMOID,
    sigmoid=True,
    tensors=PER_EXPERT,
    shared=SHARED,
    shared_experts=(0, 1),
    min_experts=2,
    config=_config,
    fixed=correction,
    warnings=lambda facts: (*warn_shared(facts), *warn_none_shared(facts)),
    llama_cpp="the same; requires a shared expert, and GLM's special tokens in the tokenizer",
)
