"""Qwen3-MoE: like Qwen2-MoE, but without a shared expert and with normalised queries and keys."""

from __future__ import annotations

from weightsmith.abc.layout import ATTENTION, ATTENTION_BIASES, DIVIDED, NORMS, QK_NORMS, ExpertLayout

LAYOUT = ExpertLayout(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    title="Qwen3-MoE",
    dense=("qwen3",),
    layer=ATTENTION | NORMS | QK_NORMS,
    optional=(ATTENTION_BIASES,),
    windows="all",
    routing=DIVIDED,
    take=("head_dim", "sliding_window"),
    keys=lambda facts: {
        "use_sliding_window": facts.config["sliding_window"] is not None,
        "attention_bias": facts.biased,
        "num_experts": facts.experts,
        "num_experts_per_tok": facts.per_token,
        "norm_topk_prob": True,
        "intermediate_size": facts.intermediate,
        "moe_intermediate_size": facts.intermediate,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
    },
)
