"""The first DeepSeek-MoE: Llama with experts. Its classes are the Python files of deepseek-ai/deepseek-moe-16b-base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weightsmith._features.mixture.layouts.deepseek_family import SHARED, keys, warn_shared
from weightsmith._features.mixture.layouts.dense_config import rope_scaling, rope_type
from weightsmith.abc.layout import ATTENTION, NORMS, UNDIVIDED, ExpertLayout, Facts, check_heads, warn_undivided

_CODE = "deepseek-ai/deepseek-moe-16b-base"


def _keys(facts: Facts) -> dict[str, Any]:
    rope, kind = dict(rope_scaling(facts.config)), rope_type(facts.config)
    return {
        **keys(facts),
        **({} if facts.shared else {"n_shared_experts": None}),
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "attention_bias": False,
        "auto_map": {
            "AutoConfig": f"{_CODE}--configuration_deepseek.DeepseekConfig",
            "AutoModel": f"{_CODE}--modeling_deepseek.DeepseekModel",
            "AutoModelForCausalLM": f"{_CODE}--modeling_deepseek.DeepseekForCausalLM",
        },
        "rope_theta": rope.get("rope_theta", facts.config.get("rope_theta", 10_000.0)),
        "rope_scaling": None if kind == "default" else {"type": kind, "factor": rope["factor"]},
    }


def _check(config: Mapping[str, Any]) -> Iterable[str]:
    yield from check_heads(config)
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
    title="DeepSeek MoE",
    dense=("llama", "mistral", "ministral", "phi3", "smollm3"),
    layer=ATTENTION | NORMS,
    routing="softmax; the weights of two or more chosen experts are divided by their sum (`norm_topk_prob: true`)",
    shared=SHARED,
    shared_experts=(0, 1),
    drop=("rope_parameters",),  # the Python files predate it
    keys=_keys,
    check=_check,
    warnings=_warnings,
    llama_cpp=f"{UNDIVIDED}; requires a shared expert",
    note=f"transformers has no class for it; `auto_map` names the files of {_CODE}",
)
