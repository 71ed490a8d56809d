"""What DeepSeek's mixtures and those built like them have in common: names, keys, shared experts, routers of sigmoids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weightsmith.mixture.layouts.base import Facts, Fixed

SHARED = tuple((f"mlp.shared_experts.{part}_proj.weight", (part,)) for part in ("gate", "up", "down"))

SIGMOID = (
    "sigmoid plus `e_score_correction_bias` (zero) chooses; the chosen experts' sigmoids are divided by their sum"
    " (`norm_topk_prob: true`)"
)


def keys(facts: Facts) -> dict[str, Any]:
    """Keys of config.json that all of them have. Every layer is a mixture, and the weights of its experts sum to 1."""
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
    """Keys of those that choose by sigmoids, first groups of experts: all experts are one group.

    transformers reads no `scoring_func`: its classes know. vLLM and llama.cpp do, as the configs on the hub have it.
    """
    return {**keys(facts), "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid"}


def no_shared(facts: Facts) -> list[Fixed]:
    """Tensors of no elements where there is no shared expert: transformers' models have the module all the same."""
    wide, high = (0, facts.hidden), (facts.hidden, 0)
    shapes = {"gate": wide, "up": wide, "down": high}
    return [Fixed(name, shapes[parts[0]], 0.0) for name, parts in SHARED] if not facts.shared else []


def correction(facts: Facts) -> list[Fixed]:
    """What balances the load of the experts in training: zero. float32 in any model."""
    return [*no_shared(facts), Fixed("mlp.gate.e_score_correction_bias", (facts.experts,), 0.0, "F32")]


def warn_shared(facts: Facts) -> Iterable[str]:
    """What is known of the size of the output when a shared expert is added to routed ones whose weights sum to 1."""
    routed, shared = facts.scales
    if shared and abs(sum(routed) / len(routed) + sum(shared) - 1) > 0.01:
        yield (
            "the shared expert is added to the routed ones, whose weights sum to 1, so experts like the base's MLPs give twice"
            " what those do: write residual_scale: 0.5 for every expert, shared and routed, to begin where the base is"
        )


def warn_none_shared(facts: Facts) -> Iterable[str]:
    """That programs may not expect this."""
    if not facts.shared:
        yield (
            "there is no shared expert, so config.json says n_shared_experts: 0 and its tensors have no elements: transformers"
            " reads that, llama.cpp does not; a shared expert with residual_scale: 0 puts out nothing, and all can read it"
        )
