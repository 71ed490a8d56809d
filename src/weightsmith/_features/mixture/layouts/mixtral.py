"""Mixtral: `block_sparse_moe.experts.{e}.w1/w3/w2`."""

from __future__ import annotations

from weightsmith.abc.layout import ATTENTION, NORMS, ExpertLayout

_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}

LAYOUT = ExpertLayout(
    name="mixtral",
    architecture="MixtralForCausalLM",
    title="Mixtral",
    dense=("llama", "mistral", "ministral", "phi3", "smollm3"),
    layer=ATTENTION | NORMS,
    windows="all",
    router="block_sparse_moe.gate.weight",
    routing="softmax; the chosen experts' weights are always divided by their sum",
    tensors=tuple((f"block_sparse_moe.experts.{{e}}.{name}.weight", (part,)) for part, name in _NAMES.items()),
    take=("head_dim", "sliding_window"),
    keys=lambda facts: {
        "num_local_experts": facts.experts,
        "num_experts_per_tok": facts.per_token,
        "intermediate_size": facts.intermediate,
        "output_router_logits": False,
    },
)
