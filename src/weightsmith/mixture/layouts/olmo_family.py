"""What OLMoE and FlexOlmo have in common: queries and keys are normalised over all heads together."""

from __future__ import annotations

from typing import Any

from weightsmith.mixture.layouts.base import Facts, moe_config

ROUTING = "softmax; the chosen experts' weights are divided by their sum (`norm_topk_prob: true`)"


def config(facts: Facts, layout: tuple[str, str], **new: Any) -> dict[str, Any]:
    """config.json of either (architecture, model type)."""
    return moe_config(
        facts,
        layout,
        ("head_dim",),
        attention_bias=facts.biased,
        num_experts=facts.experts,
        num_experts_per_tok=facts.per_token,
        norm_topk_prob=True,
        intermediate_size=facts.intermediate,
        output_router_logits=False,
        **new,
    )
