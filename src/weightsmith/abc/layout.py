"""The interface of an expert layout: how an architecture stores its experts, and which dense models it can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ATTENTION = frozenset(f"self_attn.{part}_proj.weight" for part in "qkvo")
NORMS = frozenset({"input_layernorm.weight", "post_attention_layernorm.weight"})
POST_NORMS = frozenset({"post_attention_layernorm.weight", "post_feedforward_layernorm.weight"})
QKV_BIASES = frozenset(f"self_attn.{part}_proj.bias" for part in "qkv")
ATTENTION_BIASES = frozenset(f"self_attn.{part}_proj.bias" for part in "qkvo")
QK_NORMS = frozenset({"self_attn.q_norm.weight", "self_attn.k_norm.weight"})

PER_EXPERT = tuple((f"mlp.experts.{{e}}.{part}_proj.weight", (part,)) for part in ("gate", "up", "down"))
"""One tensor for each matrix of each expert, with the names that Qwen, OLMo and DeepSeek use."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a layout's config.json depends on.

    config        of the base, with every key that affects what it computes
    present       names of the base's tensors inside a layer, without the MLP's
    experts       routed experts
    shared        shared experts
    per_token     experts that each token is sent to
    intermediate  rows of an expert's gate
    hidden        hidden size
    scales        factors on the outputs of the routed experts and of the shared ones
    """

    config: Mapping[str, Any]
    present: frozenset[str]
    experts: int
    shared: int
    per_token: int
    intermediate: int
    hidden: int
    scales: tuple[tuple[float, ...], tuple[float, ...]]

    @property
    def biased(self) -> bool:
        """Queries, keys and values have biases."""
        return QKV_BIASES <= self.present


@dataclass(frozen=True, slots=True)
class Fixed:
    """A tensor of a layer that no donor has, filled with `value`. dtype: None for the output's."""

    suffix: str
    shape: tuple[int, ...]
    value: float
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """One architecture.

    name          `model_type` in config.json; also `architecture` in recipes
    architecture  class in config.json
    title         a few words
    aliases       further names in recipes
    dense         model types that compute the same apart from the experts
    layer         required names inside a layer, without the experts'
    optional      groups of names inside a layer; all of a group are present or none
    norms         what `q_norm` and `k_norm` normalise, if present: each head, or all heads together
    windows       which layers may have a sliding window: none, all of them, or any
    partial       rotary embeddings may rotate only part of a head
    multipliers   it has Granite's factors on embeddings, residuals, attention and logits
    router        name inside a layer of the router's rows [experts, hidden]
    routing       how scores become the experts' weights, for the documentation
    sigmoid       scores are sigmoids, so rows must be short: if all logits are far below 0, the weights no longer sum to 1
    tensors       expert tensors: (name inside a layer, parts). `{e}` in the name is the expert; without it, one tensor
                  [experts, rows, cols] holds all experts. Parts are joined along the rows, in this order
    shared        the same for the shared expert; () if it has none
    shared_router name of the gate row [1, hidden] of the shared expert; "" if it has none
    shared_experts  minimum and maximum number of shared experts
    min_experts   minimum number of routed experts
    keys          keys of the mixture in config.json
    take          keys of the base to keep in config.json, beyond those that every architecture has
    drop          keys that every other architecture has, and this one does not
    fixed         further tensors of a layer
    fillable      names of `layer` that `fixed` supplies if the base lacks them
    check         one sentence for each part of the base's config it cannot express
    warnings      warnings for users of this layout, given the facts
    llama_cpp     how llama.cpp's result compares with transformers', and what it requires
    note          further remarks for the table of layouts
    """

    name: str
    architecture: str
    title: str
    dense: tuple[str, ...]
    layer: frozenset[str]
    routing: str
    keys: Callable[[Facts], dict[str, Any]]
    router: str = "mlp.gate.weight"
    tensors: tuple[tuple[str, tuple[str, ...]], ...] = PER_EXPERT
    take: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    optional: tuple[frozenset[str], ...] = ()
    norms: Literal["each head", "all heads"] = "each head"
    windows: Literal["none", "all", "any"] = "none"
    partial: bool = False
    multipliers: bool = False
    sigmoid: bool = False
    shared: tuple[tuple[str, tuple[str, ...]], ...] = ()
    shared_router: str = ""
    shared_experts: tuple[int, int] = (0, 0)
    min_experts: int = 1
    fixed: Callable[[Facts], Sequence[Fixed]] = lambda facts: ()
    fillable: frozenset[str] = field(default=frozenset())
    check: Callable[[Mapping[str, Any]], Iterable[str]] = lambda config: ()
    warnings: Callable[[Facts], Iterable[str]] = lambda facts: ()
    llama_cpp: str = "the same"
    note: str = ""


DIVIDED = "softmax; the chosen experts' weights are divided by their sum (`norm_topk_prob: true`)"
"""The routing of Qwen and OLMo."""

UNDIVIDED = "the chosen experts' weights are not divided by their sum"
"""What llama.cpp does for architectures whose first models did so, whatever config.json says."""


def warn_undivided(facts: Facts) -> Iterable[str]:
    """Warn that the experts' weights sum to less than 1 in llama.cpp."""
    if facts.per_token < facts.experts:
        yield (
            "llama.cpp ignores norm_topk_prob for this architecture: the weights of the chosen experts sum to less than 1,"
            " so the output is smaller than the base's; transformers applies it"
        )


def check_heads(config: Mapping[str, Any]) -> Iterable[str]:
    """A problem if the base's heads are not as wide together as its hidden state."""
    heads, size = config.get("num_attention_heads") or 0, config.get("head_dim") or 0
    if heads * size != config.get("hidden_size"):
        yield f"its heads together are as wide as the hidden state; the base has {heads} heads of {size}"
