"""Qwen2-MoE: routed experts plus a shared expert, which is multiplied by a sigmoid of the hidden state."""

from __future__ import annotations

from collections.abc import Iterable

from weightsmith.abc.layout import ATTENTION, DIVIDED, NORMS, QKV_BIASES, UNDIVIDED, ExpertLayout, Facts, Fixed, warn_undivided


def _fixed(facts: Facts) -> list[Fixed]:
    """Zero biases: the original models have biases, so programs expect them."""
    if facts.biased:
        return []
    size = facts.config["head_dim"]
    heads = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}
    return [Fixed(f"self_attn.{part}_proj.bias", (facts.config[key] * size,), 0.0) for part, key in heads.items()]


def _warnings(facts: Facts) -> Iterable[str]:
    if any(facts.scales[1]):
        yield (
            "the shared expert's output, times a sigmoid, is added to the routed experts', so the output is up to twice the"
            " base's: write residual_scale: 0 for the shared expert to start from the base's output"
        )
    yield from warn_undivided(facts)


LAYOUT = ExpertLayout(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    title="Qwen2-MoE",
    aliases=("Qwen MoE",),
    dense=("qwen2", "llama", "mistral", "ministral", "phi3", "smollm3", "seed_oss"),
    layer=ATTENTION | NORMS | QKV_BIASES,
    fillable=QKV_BIASES,
    fixed=_fixed,
    windows="any",
    routing=DIVIDED,
    shared=tuple((f"mlp.shared_expert.{part}_proj.weight", (part,)) for part in ("gate", "up", "down")),
    shared_router="mlp.shared_expert_gate.weight",
    shared_experts=(1, 1),
    take=("head_dim", "sliding_window", "layer_types"),
    keys=lambda facts: {
        "use_sliding_window": facts.config["sliding_window"] is not None,
        "num_experts": facts.experts,
        "num_experts_per_tok": facts.per_token,
        "norm_topk_prob": True,
        "intermediate_size": facts.intermediate,
        "moe_intermediate_size": facts.intermediate,
        "shared_expert_intermediate_size": facts.intermediate,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": True,
        "output_router_logits": False,
    },
    warnings=_warnings,
    llama_cpp=f"{UNDIVIDED}; tied embeddings are not supported",
    note="if the base has no biases of queries, keys and values, they are zero",
)
