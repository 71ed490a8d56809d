"""Granite-MoE: all experts of a layer in two tensors, and factors on embeddings, residuals, attention and logits."""

from __future__ import annotations

from typing import Any

from weightsmith._features.mixture.layouts.dense_config import neutral_factors
from weightsmith.abc.layout import ATTENTION, ATTENTION_BIASES, NORMS, ExpertLayout, Facts


def _keys(facts: Facts) -> dict[str, Any]:
    return {
        **{key: facts.config.get(key, value) for key, value in neutral_factors(facts.config).items()},
        "attention_bias": facts.biased,
        "num_local_experts": facts.experts,
        "num_experts_per_tok": facts.per_token,
        "intermediate_size": facts.intermediate,
        "output_router_logits": False,
    }


LAYOUT = ExpertLayout(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    title="Granite-MoE",
    dense=("granite", "llama", "mistral", "ministral", "phi3", "smollm3"),
    layer=ATTENTION | NORMS,
    optional=(ATTENTION_BIASES,),
    multipliers=True,
    router="block_sparse_moe.router.layer.weight",
    routing="softmax over the chosen experts",
    tensors=(
        ("block_sparse_moe.input_linear.weight", ("gate", "up")),
        ("block_sparse_moe.output_linear.weight", ("down",)),
    ),
    take=("head_dim",),
    keys=_keys,
)
