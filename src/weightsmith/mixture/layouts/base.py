"""What an architecture says of its mixture of experts: names, config.json, and which dense models it can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ATTENTION = frozenset(f"self_attn.{part}_proj.weight" for part in "qkvo")
NORMS = frozenset({"input_layernorm.weight", "post_attention_layernorm.weight"})
QKV_BIASES = frozenset(f"self_attn.{part}_proj.bias" for part in "qkv")
HEAD_NORMS = frozenset({"self_attn.q_norm.weight", "self_attn.k_norm.weight"})


@dataclass(frozen=True, slots=True)
class Facts:
    """What config.json must say.

    config        of the base, its model type's defaults filled in (see `semantics`)
    experts       routed experts
    shared        shared experts
    per_token     experts that each token is sent to
    intermediate  rows of an expert's gate
    hidden        hidden size
    """

    config: Mapping[str, Any]
    experts: int
    shared: int
    per_token: int
    intermediate: int
    hidden: int


@dataclass(frozen=True, slots=True)
class Fixed:
    """A tensor of a layer that no donor gives: filled with `value`. dtype: None for the output's."""

    suffix: str
    shape: tuple[int, ...]
    value: float
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """One architecture.

    name          as `architecture` in recipes
    architecture  class in config.json
    model_type    in config.json
    title         a few words
    dense         model types that it computes the same as, but for the experts
    layer         names inside a layer that are no expert's and that it has
    optional      names inside a layer that it may have
    router        name inside a layer of the router's rows [experts, hidden]
    tensors       expert tensors: (name inside a layer, parts). `{e}` in the name is the expert; without it all experts are one
                  tensor [experts, rows, cols]. Several parts are joined along the rows, in this order
    shared        the same for the shared expert; () when it has none
    shared_router name of the row [1, hidden] that the shared expert is multiplied with; "" when it has none
    shared_experts  least and most shared experts
    max_experts   None: any number
    config        config.json of the output
    fixed         further tensors of a layer, given the names inside it that the base has
    fillable      names of `layer` that `fixed` gives where the base has them not
    check         what in the base's config it cannot express, one sentence each
    warnings      what a user of this layout should know, given the facts
    """

    name: str
    architecture: str
    model_type: str
    title: str
    dense: tuple[str, ...]
    layer: frozenset[str]
    router: str
    tensors: tuple[tuple[str, tuple[str, ...]], ...]
    config: Callable[[Facts], dict[str, Any]]
    optional: frozenset[str] = field(default=frozenset())
    shared: tuple[tuple[str, tuple[str, ...]], ...] = ()
    shared_router: str = ""
    shared_experts: tuple[int, int] = (0, 0)
    max_experts: int | None = None
    fixed: Callable[[Facts, frozenset[str]], Sequence[Fixed]] = lambda facts, present: ()
    fillable: frozenset[str] = field(default=frozenset())
    check: Callable[[Mapping[str, Any]], list[str]] = lambda config: []
    warnings: Callable[[Facts], Sequence[str]] = lambda facts: ()


# What a key means when config.json does not have it: another class has other defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "max_position_embeddings": 2048},
    "mistral": {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "head_dim": 128,
    },
}


def semantics(config: Mapping[str, Any]) -> dict[str, Any]:
    """A dense config in which everything that decides what the model computes is written out.

    >>> semantics({"model_type": "llama", "num_attention_heads": 4, "hidden_size": 64})["head_dim"]
    16
    """
    full = {**_DEFAULTS.get(str(config.get("model_type")), {}), **config}
    if "rope_parameters" in config:
        full.pop("rope_theta", None)
    heads = int(full.get("num_attention_heads") or 0)
    if not full.get("num_key_value_heads"):
        full["num_key_value_heads"] = heads
    if not full.get("head_dim") and heads:
        full["head_dim"] = int(full["hidden_size"]) // heads
    full.setdefault("tie_word_embeddings", False)
    full.setdefault("hidden_act", "silu")
    return full


def moe_config(facts: Facts, layout: tuple[str, str], drop: Sequence[str] = (), **new: Any) -> dict[str, Any]:
    """The base's config as the config of `layout` (architecture, model type): without `drop`, with `new`."""
    kept = {key: value for key, value in facts.config.items() if key not in (*drop, "auto_map", "quantization_config")}
    return {**kept, "architectures": [layout[0]], "model_type": layout[1], **new}
