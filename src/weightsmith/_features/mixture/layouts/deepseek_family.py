"""What DeepSeek's mixtures and similar ones have in common: names, keys, shared experts, sigmoid routers, latent attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from weightsmith.abc.layout import NORMS, ExpertLayout, Facts, Fixed

SHARED = tuple((f"mlp.shared_experts.{part}_proj.weight", (part,)) for part in ("gate", "up", "down"))


def keys(facts: Facts) -> dict[str, Any]:
    """config.json keys that all of them have. Every layer is a mixture, and its experts' weights sum to 1."""
    return {
        "n_routed_experts": facts.experts,
        "n_shared_experts": facts.shared,
        "num_experts_per_tok": facts.per_token,
        "intermediate_size": facts.intermediate,
        "moe_intermediate_size": facts.intermediate,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def one_group(facts: Facts) -> dict[str, Any]:
    """Keys of sigmoid routers that first choose groups of experts: all experts are one group.

    transformers ignores `scoring_func`; vLLM and llama.cpp read it.
    """
    return {**keys(facts), "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid"}


def no_shared(facts: Facts) -> list[Fixed]:
    """Empty tensors if there is no shared expert: transformers' models have the module regardless."""
    wide, high = (0, facts.hidden), (facts.hidden, 0)
    shapes = {"gate": wide, "up": wide, "down": high}
    return [Fixed(name, shapes[parts[0]], 0.0) for name, parts in SHARED] if not facts.shared else []


def correction(facts: Facts) -> list[Fixed]:
    """The load-balancing bias that training updates: zero, always float32."""
    return [*no_shared(facts), Fixed("mlp.gate.e_score_correction_bias", (facts.experts,), 0.0, "F32")]


def warn_shared(facts: Facts) -> Iterable[str]:
    """Warn that a shared expert, added to routed ones whose weights sum to 1, makes the output larger than the base's."""
    routed, shared = facts.scales
    if shared and abs(sum(routed) / len(routed) + sum(shared) - 1) > 0.01:
        yield (
            "the shared expert is added to the routed ones, whose weights sum to 1, so the output is about twice the base's:"
            " write residual_scale: 0.5 for every expert, shared and routed, to start from the base's output"
        )


def warn_none_shared(facts: Facts) -> Iterable[str]:
    """Warn that some programs cannot load a model without a shared expert."""
    if not facts.shared:
        yield (
            "without a shared expert, config.json has n_shared_experts: 0 and its tensors are empty: transformers loads"
            " this, llama.cpp does not; a shared expert with residual_scale: 0 has no effect and works in both"
        )


sigmoid_layout = partial(
    ExpertLayout,
    routing=(
        "experts chosen by sigmoid plus `e_score_correction_bias` (zero); their sigmoids are divided by their sum"
        " (`norm_topk_prob: true`)"
    ),
    sigmoid=True,
    shared=SHARED,
    shared_experts=(0, 1),
    min_experts=2,
    fixed=correction,
    warnings=lambda facts: (*warn_shared(facts), *warn_none_shared(facts)),
)
"""An architecture with DeepSeek-V3's experts."""


# ---- multi-head latent attention: low-rank keys and values. Grouped-query models cannot be converted to it

LATENT = NORMS | {f"self_attn.{name}.weight" for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")}
LATENT_OPTIONAL = (
    frozenset({"self_attn.q_proj.weight"}),
    frozenset(f"self_attn.{name}.weight" for name in ("q_a_proj", "q_a_layernorm", "q_b_proj")),
    frozenset({"self_attn.kv_a_proj_with_mqa.bias", "self_attn.o_proj.bias"}),
    frozenset({"self_attn.q_a_proj.bias"}),
)
"""Queries may be low-rank too."""

LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_bias")


def check_latent(config: Mapping[str, Any]) -> Iterable[str]:
    """A problem if the base has other attention."""
    if not config.get("kv_lora_rank"):
        yield "it has latent attention (low-rank keys and values), but the base does not"
