"""GLM-4.5: DeepSeek-V3's experts with grouped-query attention, which most dense models have."""

from __future__ import annotations

from typing import Any

from weightsmith._features.mixture.layouts.deepseek_family import one_group, sigmoid_layout
from weightsmith._features.mixture.layouts.dense_config import rotary_share
from weightsmith.abc.layout import ATTENTION, NORMS, QK_NORMS, QKV_BIASES, Facts


def _keys(facts: Facts) -> dict[str, Any]:
    # The default rotates half of each head.
    share, rope = {"partial_rotary_factor": rotary_share(facts.config)}, facts.config.get("rope_parameters")
    return {
        **one_group(facts),
        "attention_bias": facts.biased,
        "use_qk_norm": facts.present >= QK_NORMS,
        "num_nextn_predict_layers": 0,
        "output_router_logits": False,
        **(share if rope is None else {"rope_parameters": {**rope, **share}}),
    }


LAYOUT = sigmoid_layout(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    title="GLM-4-MoE",
    dense=("llama", "mistral", "ministral", "phi3", "smollm3", "qwen2", "qwen3", "seed_oss"),
    layer=ATTENTION | NORMS,
    optional=(QKV_BIASES, QK_NORMS),
    partial=True,
    take=("head_dim",),
    keys=_keys,
    llama_cpp="the same; requires a shared expert, and GLM's special tokens in the tokenizer",
)
