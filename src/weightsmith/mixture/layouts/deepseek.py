"""The first DeepSeek-MoE: Llama with experts. Its classes are the Python files of deepseek-ai/deepseek-moe-16b-base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weightsmith.mixture.layouts.base import (
    ATTENTION,
    NORMS,
    PER_EXPERT,
    UNDIVIDED,
    ExpertLayout,
    Facts,
    moe_config,
    warn_undivided,
)
from weightsmith.mixture.layouts.deepseek_family import SHARED, keys, warn_shared
from weightsmith.mixture.layouts.dense_config import rope_scaling, rope_type

_CODE = "deepseek-ai/deepseek-moe-16b-base"


def _config(facts: Facts) -> dict[str, Any]:
    config = moe_config(
        facts,
        ("DeepseekForCausalLM", "deepseek"),
        **keys(facts) | ({} if facts.shared else {"n_shared_experts": None}),
        moe_layer_freq=1,
        scoring_func="softmax",
        attention_bias=False,
        auto_map={
            "AutoConfig": f"{_CODE}--configuration_deepseek.DeepseekConfig",
            "AutoModel": f"{_CODE}--modeling_deepseek.DeepseekModel",
            "AutoModelForCausalLM": f"{_CODE}--modeling_deepseek.DeepseekForCausalLM",
        },
    )
    # The Python files predate `rope_parameters`.
    rope = dict(rope_scaling(facts.config))
    theta = rope.pop("rope_theta", facts.config.get("rope_theta", 10_000.0))
    config.pop("rope_parameters", None)
    kind = rope_type(facts.config)
    return config | {
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {"type": kind, "factor": rope["factor"]},
    }


def _check(config: Mapping[str, Any]) -> Iterable[str]:
    heads, size = config.get("num_attention_heads") or 0, config.get("head_dim") or 0
    if heads * size != config.get("hidden_size"):
        yield f"its heads together are as wide as the hidden state; the base has {heads} heads of {size}"
    if rope_type(config) not in ("default", "linear", "dynamic"):
        yield f"it supports linear and dynamic RoPE scaling; the base uses {rope_type(config)}"


def _warnings(facts: Facts) -> Iterable[str]:
    yield f"loading this requires the Python files of {_CODE}; transformers has no class for it"
    if facts.per_token == 1 and facts.experts > 1:
        yield (
            "with one expert per token, its weight is its softmax score, not 1, so the output is smaller than the base's:"
            " write experts_per_token: 2"
        )
    yield from warn_shared(facts)
    yield from warn_undivided(facts)


LAYOUT = ExpertLayout(
    name="deepseek",
    architecture="DeepseekForCausalLM",
    model_type="deepseek",
    title="DeepSeek MoE",
    dense=("llama", "mistral", "ministral", "phi3", "smollm3"),
    layer=ATTENTION | NORMS,
    router="mlp.gate.weight",
    routing="softmax; the weights of two or more chosen experts are divided by their sum (`norm_topk_prob: true`)",
    tensors=PER_EXPERT,
    shared=SHARED,
    shared_experts=(0, 1),
    config=_config,
    check=_check,
    warnings=_warnings,
    llama_cpp=f"{UNDIVIDED}; requires a shared expert",
    note=f"transformers has no class for it; `auto_map` names the files of {_CODE}",
)
