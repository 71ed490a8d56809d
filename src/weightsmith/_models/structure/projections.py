"""The projections of a decoder layer by their names: their roles, which have the same input, which are stored as one matrix.

    q, k, v, o      of the attention            q_proj, k_proj, v_proj, o_proj; wq, wk, wv; query, key, value; …
    gate, up, down  of a gated MLP or expert    gate_proj, up_proj, down_proj; w1, w3, w2 (Mixtral's); gate_linear, up_linear; …

A new spelling is one line here, for every stored format. (llama.cpp's names are in `formats/gguf/base/tensors.py`.)

Tensors may hold several matrices, fused projections and stacked experts:

    qkv_proj, qkv, Wqkv                        [(heads + 2 kv_heads) · head_dim, H]   q, k, v
    query_key_value with one kv head           as above
    gate_up_proj, input_linear, Wi, dense_h_to_4h   [2I, H]                           gate, up
    experts [E, rows, cols]                    contiguous, each fused or not

The name suggests the matrices, and the shape confirms them: the rows of q, k and v must match config.json, gate and up must
each fit the matrix that follows them (`down_proj` [H, I]). Otherwise the tensor counts as one matrix. So does a tensor whose
matrices are not, or may not be, contiguous: `query_key_value` with several kv heads (GPT-NeoX and Bloom interleave the heads
of q, k and v, Falcon groups of heads, ChatGLM neither), and tensors fused along the columns (GPT-2's `c_attn` [H, 3H];
experts [E, H, 2I] of Llama 4 and gpt-oss, one matrix for each expert).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weightsmith._base.idioms import grouped
from weightsmith._base.tensors import MAX_STACKED, TensorSpec
from weightsmith._models.structure.configs import whole_number
from weightsmith._models.structure.model import Structure
from weightsmith._models.structure.vocabulary import is_vocabulary
from weightsmith._plans import Block, Role

# ---- names of projections

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

_LINEAR_ATTENTION = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
"""Projections of Qwen3.5, as vLLM and SGLang join them."""

ENGINES_FUSED = {**FUSED, **_LINEAR_ATTENTION}
"""Module of engines → the modules of a file that it joins."""


def in_both_orders(name: str) -> str:
    """A regular expression for a module of a model with towers, wherever engines put its decoder.

    Files have `model.language_model.layers`, and Qwen-Omni's `thinker.model.layers`; vLLM and SGLang build
    `language_model.model.layers`. They translate names in config.json, but not regular expressions.

    >>> in_both_orders("model.language_model.layers.0"), in_both_orders("model.layers.0")
    ('language_model\\\\.(model\\\\.)?layers\\\\.0', 'model\\\\.layers\\\\.0')
    """
    prefix = re.match(r"(model\.)?language_model\.(model\.)?|thinker\.model\.", name)
    if prefix is None:
        return re.escape(name)
    home = r"(thinker|language_model)\.model\." if prefix[0].startswith("thinker") else r"language_model\.(model\.)?"
    return home + re.escape(name[prefix.end() :])


MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Mixtral's names of the matrices of an expert."""

TRANSPOSED_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Values of `model_type` whose layers store [inputs, outputs] (transformers' Conv1D)."""

UNMIXTRAL = {there: here for here, there in MIXTRAL.items()}
"""The usual names of Mixtral's."""

ProjectionRole = Literal["q", "k", "v", "o", "gate", "up", "down"]
"""What a projection does, also the beginning of its usual name: `q_proj`."""

_META, _MIXTRAL = ("wq", "wk", "wv"), ("w1", "w3", "w2")
_ATTENTION_ROLES: tuple[ProjectionRole, ...] = ("q", "k", "v")
_MLP_ROLES: tuple[ProjectionRole, ...] = ("gate", "up", "down")
_ROLES: Mapping[str, ProjectionRole] = {
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
    **dict.fromkeys(("c_fc_0", "c_fc_1"), "gate_up"),
    **dict.fromkeys(_LINEAR_ATTENTION["in_proj_qkvz"], "in_proj_qkvz"),
    **dict.fromkeys(_LINEAR_ATTENTION["in_proj_ba"], "in_proj_ba"),
}
"""Projection → the input that it shares with others, or the matrix that engines join them into."""

_DELTA = ("b_proj", "f_a_proj")
"""Projections of Kimi Delta Attention that vLLM joins with q, k and v, in layers that have the second (`in_proj_qkvgfab`)."""

_OUTPUT_GATE = ("linear_attn", "g_proj")
"""OLMo Hybrid's module, and the projection in it that engines join with q, k and v."""

GATES_OF_LINEAR_ATTENTION = frozenset({*_LINEAR_ATTENTION["in_proj_ba"], "in_proj_ba"})
"""Projections to one or two numbers for each head: how much of the state decays, and how much is written to it."""


def projection_role(module: str) -> ProjectionRole | None:
    """What a module of a layer does, by the last component of its name; None for one that is no projection.

    >>> [projection_role(name) for name in ("model.layers.0.self_attn.q_proj", "block_sparse_moe.experts.3.w2", "model.norm")]
    ['q', 'down', None]
    """
    return _ROLES.get(module.rpartition(".")[2])


_ORDER = {name: i for i, name in enumerate((*JOINED, *_DELTA, _OUTPUT_GATE[1]))}


def _joined(parent: str, projection: str) -> str:
    """The matrix that a projection is joined into; its own name if engines do not join it."""
    if (parent.rpartition(".")[2], projection) == _OUTPUT_GATE:
        return "qkv"
    return JOINED.get(projection, projection)


def joined_sets(names: Iterable[str]) -> list[list[str]]:
    """Weights in sets: those that engines join into one matrix are together, in the order of its rows.

    >>> joined_sets(["0.attn.k_proj.weight", "0.attn.o_proj.weight", "0.attn.q_proj.weight"])
    [['0.attn.q_proj.weight', '0.attn.k_proj.weight'], ['0.attn.o_proj.weight']]
    """
    sets: dict[tuple[str, str], list[tuple[int, str]]] = {}
    parts = {name: name.removesuffix(".weight").rpartition(".") for name in names}
    delta = {parent for parent, _, projection in parts.values() if projection == _DELTA[1]}
    for name, (parent, _, projection) in parts.items():
        joined = "qkv" if parent in delta and projection in _DELTA else _joined(parent, projection)
        sets.setdefault((parent, joined), []).append((_ORDER.get(projection, 0), name))
    return [[name for _, name in sorted(projection)] for projection in sets.values()]


_ATTENTION = frozenset({"self_attn", "attention", "attn"})


def site_of(weight: str) -> str:
    """The input that a linear layer shares with others, by the name of its weight.

    >>> site_of("model.layers.0.self_attn.k_proj.weight"), site_of("model.layers.0.mlp.down_proj.weight")
    ('model.layers.0.self_attn.qkv', 'model.layers.0.mlp.down_proj')
    """
    owner, _, leaf = weight.removesuffix(".weight").rpartition(".")
    return f"{owner}.{_joined(owner, leaf)}"


def by_site(weights: Iterable[str]) -> dict[str, list[str]]:
    """The weights of each input."""
    return grouped((site_of(weight), weight) for weight in weights)


def is_attention(weight: str) -> bool:
    """Whether a weight of a layer is one of the attention's."""
    return not _ATTENTION.isdisjoint(weight.split("."))


# ---- How methods treat a tensor: the weight of a linear layer inside a block, one row per token, or anything else


NOT_LINEAR = ("embed", "norm", "conv", "bias", "router", "lm_head")
"""A tensor with one of these anywhere in its name is not a linear layer of a block."""

_NOT_LINEAR = re.compile("|".join(NOT_LINEAR))

COMPONENTS = frozenset({"wpe", "gate", "shared_expert_gate", "score", "classifier", "A_log"})
"""The same for these as a whole component: `mlp.gate.weight` is a router, `mlp.gate_proj.weight` is not."""


def role_of(spec: TensorSpec) -> Role:
    """The role of a tensor: `linear` for a weight matrix of a linear layer inside a block.

    >>> from weightsmith._base.tensors import DTYPES
    >>> names = ("lm_head.weight", "layers.0.mlp.gate_proj.weight", "layers.0.mlp.gate.weight")
    >>> [role_of(TensorSpec(name, DTYPES["BF16"], (64, 8))) for name in names]
    ['vocabulary', 'linear', 'other']
    """
    name = spec.name
    if is_vocabulary(spec):
        return "vocabulary"
    other = len(spec.shape) != 2 or min(spec.shape) < 2 or _NOT_LINEAR.search(name) is not None
    return "linear" if not other and COMPONENTS.isdisjoint(name.split(".")) else "other"


Specs = Mapping[str, TensorSpec]
Rows = tuple[tuple[str, int], ...]
"""For each matrix, the component that names it, and its rows."""

INTERLEAVED = frozenset({"query_key_value"})
"""Projections whose heads some models interleave. With one kv head they cannot be interleaved."""


@dataclass(frozen=True, slots=True)
class SubMatrix:
    """A matrix or vector in a tensor: its name in an unfused model, its first element, its shape."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def block(self) -> Block:
        """Its block of the tensor."""
        cols = self.shape[-1]
        return Block(self.offset, math.prod(self.shape[:-1]), cols, cols)


def fused_names(name: str) -> list[str]:
    """The possible names of the fused tensor that contains a matrix.

    >>> fused_names("layers.0.mlp.up_proj.weight")
    ['layers.0.mlp.gate_up_proj.weight', 'layers.0.mlp.dense_h_to_4h.weight']
    """
    head, leaf, _ = _components(name)
    return [f"{head}{fused}{name[len(head) + len(leaf) :]}" for fused, named in PARTS.items() if leaf in named]


def fused_parts(
    spec: TensorSpec, specs: Specs, structure: Structure, config: Mapping[str, Any] | None, name: str = ""
) -> tuple[SubMatrix, ...]:
    """The matrices of a tensor, in storage order; () if it is a single matrix.

    specs   of all tensors of the model; structure and config are the model's
    name    the tensor's name in the output, if its number or prefix differs there; the parts are named after it

    >>> from weightsmith._models.structure import analyse
    >>> from weightsmith._base.tensors import DTYPES
    >>> shapes = {"gate_up_proj": (2, 6, 4), "down_proj": (2, 4, 3)}
    >>> specs = [TensorSpec(f"layers.{i}.mlp.experts.{n}", DTYPES["BF16"], s) for i in (0, 1) for n, s in shapes.items()]
    >>> for part in fused_parts(specs[0], {s.name: s for s in specs}, analyse(specs, None), None):
    ...     print(part.offset, part.shape, part.name)
    0 (3, 4) layers.0.mlp.experts.0.gate_proj.weight
    12 (3, 4) layers.0.mlp.experts.0.up_proj.weight
    24 (3, 4) layers.0.mlp.experts.1.gate_proj.weight
    36 (3, 4) layers.0.mlp.experts.1.up_proj.weight
    """
    dims = len(spec.shape)
    experts = structure.experts(spec) if dims == 3 else 1
    experts = experts if experts <= MAX_STACKED else 1
    if not spec.size or dims not in (1, 2, 3) or (dims == 3 and experts == 1):
        return ()
    _, leaf, kind = _components(spec.name)
    if experts == 1 and leaf not in ATTENTION and leaf not in GATED:
        return ()
    rows = _rows(spec, specs, structure, config or {})
    if experts == 1 and not rows:
        return ()
    rows = rows or ((leaf, spec.shape[1]),)
    cols = spec.shape[-1:] if dims > 1 else ()
    head, _, _ = _components(name or spec.name)
    parts, offset = [], 0
    for e in range(experts):
        place = f"{head}{e}." if experts > 1 else head
        for part, height in rows:
            parts.append(SubMatrix(f"{place}{part}.{kind}", offset, (height, *cols)))
            offset += height * math.prod(cols)
    assert offset == spec.size
    return tuple(parts)


def _components(name: str) -> tuple[str, str, str]:
    """The part before the component that names the matrix, that component, and `weight` or `bias`.

    >>> _components("layers.0.mlp.gate_up_proj.bias"), _components("layers.0.mlp.experts.down_proj")
    (('layers.0.mlp.', 'gate_up_proj', 'bias'), ('layers.0.mlp.experts.', 'down_proj', 'weight'))
    """
    rest, _, last = name.rpartition(".")
    if last not in ("weight", "bias"):
        return f"{rest}." if rest else "", last, "weight"
    head, dot, leaf = rest.rpartition(".")
    return head + dot, leaf, last


def _rows(spec: TensorSpec, specs: Specs, structure: Structure, config: Mapping[str, Any]) -> Rows:
    """The rows of each matrix in a fused projection (of one expert); () if it is not fused. A bias is like its weight."""
    head, leaf, kind = _components(spec.name)
    if kind == "bias":
        weight = specs.get(f"{head}{leaf}.weight")
        if weight is None or len(weight.shape) != 2 or spec.shape != weight.shape[:1]:
            return ()
        return _rows(weight, specs, structure, config)
    if len(spec.shape) == 2 and leaf in ATTENTION:
        return _attention(leaf, spec.shape, _section(spec.name, structure, config))
    if len(spec.shape) > 1 and leaf in GATED:
        *halves, after = GATED[leaf]
        following = specs.get(head + after + spec.name[len(head) + len(leaf) :])
        *stack, height, width = spec.shape
        if height % 2 == 0 and following is not None and following.shape == (*stack, width, height // 2):
            return tuple((half, height // 2) for half in halves)
    return ()


def _attention(leaf: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Rows:
    """The rows of q, k and v by the numbers of heads in config.json; () if they do not add up to the tensor's."""
    heads = _count(config, "num_attention_heads") or _count(config, "num_heads")
    if not heads:
        return ()
    kv_heads = 1 if leaf in INTERLEAVED else _count(config, "num_key_value_heads") or heads
    head_dim = _count(config, "head_dim") or (shape[1] // heads if shape[1] % heads == 0 else 0)
    if not head_dim or shape[0] != (heads + 2 * kv_heads) * head_dim:
        return ()
    return tuple(zip(ATTENTION[leaf], (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), strict=True))


def _section(name: str, structure: Structure, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of config.json that describes the tensor's stack: the one with its number of layers."""
    position = structure.locate(name) or structure.extra(name)
    return position[0].section(config) if position is not None and position[0].config_paths else {}


def _count(config: Mapping[str, Any], key: str) -> int:
    return max(whole_number(config.get(key)) or 0, 0)
