"""Multi-head latent attention: low-rank keys and values. Grouped-query models cannot be converted to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weightsmith.mixture.layouts.base import NORMS

_LOW_RANK = frozenset(f"self_attn.{name}.weight" for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"))

LAYER = _LOW_RANK | NORMS
OPTIONAL = (
    frozenset({"self_attn.q_proj.weight"}),
    frozenset(f"self_attn.{name}.weight" for name in ("q_a_proj", "q_a_layernorm", "q_b_proj")),
    frozenset({"self_attn.kv_a_proj_with_mqa.bias", "self_attn.o_proj.bias"}),
    frozenset({"self_attn.q_a_proj.bias"}),
)
"""Queries may be low-rank too."""

KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_bias")


def check(config: Mapping[str, Any]) -> Iterable[str]:
    """A problem if the base has other attention."""
    if not config.get("kv_lora_rank"):
        yield "it has latent attention (low-rank keys and values), but the base does not"
