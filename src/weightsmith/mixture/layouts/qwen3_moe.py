"""Qwen3-MoE: like Qwen2-MoE, but without a shared expert and with normalised queries and keys."""

from __future__ import annotations

from typing import Any

from weightsmith.mixture.layouts.base import (
    ATTENTION,
    ATTENTION_BIASES,
    NORMS,
    PER_EXPERT,
    QK_NORMS,
    ExpertLayout,
    Facts,
    moe_config,
)


def _config(facts: Facts) -> dict[str, Any]:
    return moe_config(
        facts,
        ("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("head_dim", "sliding_window"),
        use_sliding_window=facts.config["sliding_window"] is not None,
        attention_bias=facts.biased,
        num_experts=facts.experts,
        num_experts_per_tok=facts.per_token,
        norm_topk_prob=True,
        intermediate_size=facts.intermediate,
        moe_intermediate_size=facts.intermediate,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        output_router_logits=False,
    )


LAYOUT = ExpertLayout(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    title="Qwen3-MoE",
    dense=("qwen3",),
    layer=ATTENTION | NORMS | QK_NORMS,
    optional=(ATTENTION_BIASES,),
    windows="all",
    router="mlp.gate.weight",
    routing="softmax; the chosen experts' weights are divided by their sum (`norm_topk_prob: true`)",
    tensors=PER_EXPERT,
    config=_config,
)
