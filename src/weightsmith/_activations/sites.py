"""The inputs of the linear layers of a layer, by the names of their weights: which share one, and which are the attention's."""

from __future__ import annotations

from collections.abc import Iterable

from weightsmith._base.idioms import grouped
from weightsmith._models.structure.fused import JOINED

_ATTENTION = frozenset({"self_attn", "attention", "attn"})


def site_of(weight: str) -> str:
    """The input that a linear layer shares with others, by the name of its weight.

    >>> site_of("model.layers.0.self_attn.k_proj.weight"), site_of("model.layers.0.mlp.down_proj.weight")
    ('model.layers.0.self_attn.qkv', 'model.layers.0.mlp.down_proj')
    """
    owner, _, leaf = weight.removesuffix(".weight").rpartition(".")
    return f"{owner}.{JOINED.get(leaf, leaf)}"


def by_site(weights: Iterable[str]) -> dict[str, list[str]]:
    """The weights of each input."""
    return grouped((site_of(weight), weight) for weight in weights)


def is_attention(weight: str) -> bool:
    """Whether a weight of a layer is one of the attention's."""
    return not _ATTENTION.isdisjoint(weight.split("."))
