"""OLMoE: norms before attention and MLP, queries and keys normalised over all heads."""

from __future__ import annotations

from typing import Any

from weightsmith.abc.layout import (
    ATTENTION,
    ATTENTION_BIASES,
    DIVIDED,
    NORMS,
    QK_NORMS,
    UNDIVIDED,
    ExpertLayout,
    Facts,
    check_heads,
    warn_undivided,
)


def keys(facts: Facts) -> dict[str, Any]:
    """Keys that FlexOlmo has too."""
    return {
        "attention_bias": facts.biased,
        "num_experts": facts.experts,
        "num_experts_per_tok": facts.per_token,
        "norm_topk_prob": True,
        "intermediate_size": facts.intermediate,
        "output_router_logits": False,
    }


LAYOUT = ExpertLayout(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    title="OLMoE",
    dense=(),
    layer=ATTENTION | NORMS | QK_NORMS,
    optional=(ATTENTION_BIASES,),
    norms="all heads",
    routing=DIVIDED,
    take=("head_dim",),
    keys=lambda facts: {**keys(facts), "clip_qkv": facts.config.get("clip_qkv")},
    warnings=warn_undivided,
    llama_cpp=f"{UNDIVIDED} (by its source)",
    check=check_heads,
    note="no dense model in transformers has its norms; OLMo 2 has norms after attention and MLP, so it becomes FlexOlmo",
)
