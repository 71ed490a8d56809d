"""The projections of a decoder layer by their names: their roles, which have the same input, which are stored as one matrix.

    q, k, v, o      of the attention            q_proj, k_proj, v_proj, o_proj; wq, wk, wv; query, key, value; …
    gate, up, down  of a gated MLP or expert    gate_proj, up_proj, down_proj; w1, w3, w2 (Mixtral's); gate_linear, up_linear; …

A new spelling is one line here, for every stored format. (llama.cpp's names of the roles are in `formats/gguf/tensors.py`.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from weightsmith._base.idioms import grouped

ATTENTION = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "qkv": ("q", "k", "v"),
    "Wqkv": ("Wq", "Wk", "Wv"),
    "query_key_value": ("query", "key", "value"),
}
"""Fused attention projections, by the last component before `weight`, with the names of their matrices."""

GATED = {
    "gate_up_proj": ("gate_proj", "up_proj", "down_proj"),
    "input_linear": ("gate_linear", "up_linear", "output_linear"),
    "Wi": ("Wgate", "Wup", "Wo"),
    "dense_h_to_4h": ("gate_proj", "up_proj", "dense_4h_to_h"),
}
"""Fused projections of a gated MLP, with the names of their halves and of the matrix that follows them."""

PARTS = {**ATTENTION, **{fused: (gate, up) for fused, (gate, up, _) in GATED.items()}}
"""Fused projections, with the names of their matrices."""

FUSED = {name: PARTS[name] for name in ("qkv_proj", "gate_up_proj")}
"""Phi-3's, whose matrices follow each other in every model that has them."""

MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Mixtral's names of the matrices of an expert."""

UNMIXTRAL = {there: here for here, there in MIXTRAL.items()}
"""The usual names of Mixtral's."""

Role = Literal["q", "k", "v", "o", "gate", "up", "down"]
"""What a projection does, also the beginning of its usual name: `q_proj`."""

_META, _MIXTRAL = ("wq", "wk", "wv"), ("w1", "w3", "w2")
_ATTENTION_ROLES: tuple[Role, ...] = ("q", "k", "v")
_MLP_ROLES: tuple[Role, ...] = ("gate", "up", "down")
_ROLES: Mapping[str, Role] = {
    **{name: role for names in (*ATTENTION.values(), _META) for role, name in zip(_ATTENTION_ROLES, names, strict=True)},
    "o_proj": "o",
    **{name: role for names in (*GATED.values(), _MIXTRAL) for role, name in zip(_MLP_ROLES, names, strict=True)},
}
"""Name of a module in its parent → what it does."""

BEFORE_DOWN = {down: (gate, up) for gate, up, down in (*GATED.values(), _MIXTRAL)}
"""Projections whose outputs enter another."""

_LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
"""DeepSeek's: the attention's input enters both."""

JOINED = {
    **dict.fromkeys([name for names in ATTENTION.values() for name in names] + [*_META], "qkv"),
    **dict.fromkeys([name for gate, up, _ in GATED.values() for name in (gate, up)] + ["w1", "w3"], "gate_up"),
    **dict.fromkeys(_LATENT, "qkv_a"),
}
"""Projection → the input that it shares with others, or the matrix that engines join them into."""


def role_of(module: str) -> Role | None:
    """What a module of a layer does, by the last component of its name; None for one that is no projection.

    >>> role_of("model.layers.0.self_attn.q_proj"), role_of("block_sparse_moe.experts.3.w2"), role_of("model.norm")
    ('q', 'down', None)
    """
    return _ROLES.get(module.rpartition(".")[2])


_ORDER = {name: i for i, name in enumerate(JOINED)}


def joined_sets(names: Iterable[str]) -> list[list[str]]:
    """Weights in sets: those that engines join into one matrix are together, in the order of its rows.

    >>> joined_sets(["0.attn.k_proj.weight", "0.attn.o_proj.weight", "0.attn.q_proj.weight"])
    [['0.attn.q_proj.weight', '0.attn.k_proj.weight'], ['0.attn.o_proj.weight']]
    """
    sets: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in names:
        parent, _, projection = name.removesuffix(".weight").rpartition(".")
        sets.setdefault((parent, JOINED.get(projection, projection)), []).append((_ORDER.get(projection, 0), name))
    return [[name for _, name in sorted(projection)] for projection in sets.values()]


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
