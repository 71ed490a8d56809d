"""Tensors of GGUF files: names that architectures share, tensors that llama.cpp stores in parts, and shapes.

llama.cpp stores weights as the Hub does, with these exceptions:

* The rows of q and k of Llama and its relatives are reordered within each head, because its RoPE rotates neighbours: row
  h·D + 2·i + j there is row h·D + j·D/2 + i of the Hub's.
* The norms of Gemma and Nemotron are stored with the 1 added that their code adds when it runs.
* The experts of a layer are one tensor of three dimensions, and other tensors are several (`SplitTensor`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weightsmith._base.errors import FormatError
from weightsmith._base.text import count
from weightsmith._models.formats.gguf.base.values import GgufConfig
from weightsmith._models.structure.projections import MIXTRAL, ProjectionRole

LAYERS = "model.layers."

ROLES: Mapping[ProjectionRole, str] = {
    **{"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"},
    **{"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"},
}
"""llama.cpp's name of each projection."""

# llama.cpp's name of a module → the Hub's; of a layer, but for ENDS
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PROJECTIONS = {ROLES[role]: f"self_attn.{role}_proj" for role in ROLES if role in "qkvo"}
ATTENTION = PROJECTIONS | {"attn_norm": "input_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {ROLES[role]: f"mlp.{role}_proj" for role in ROLES if role not in "qkvo"}
UNGATED_MLP = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
MLP_NORM = {"ffn_norm": "post_attention_layernorm"}
NORM_BETWEEN = {"post_attention_norm": "post_attention_layernorm"}
NORMS_AFTER = {**NORM_BETWEEN, "post_ffw_norm": "post_feedforward_layernorm"}
NORMS_AROUND = {**NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
LLAMA_LAYER = {**ATTENTION, **MLP, **MLP_NORM}
ROUTER = {"ffn_gate_inp": "mlp.gate"}
_MLP_ROLES: tuple[ProjectionRole, ...] = ("gate", "up", "down")
EXPERTS = {f"{ROLES[role]}_exps": f"mlp.experts.{{}}.{role}_proj" for role in _MLP_ROLES}
MIXTRAL_EXPERTS = {f"{ROLES[role]}_exps": f"block_sparse_moe.experts.{{}}.{MIXTRAL[f'{role}_proj']}" for role in _MLP_ROLES}
SHARED_EXPERT = {f"{ROLES[role]}_shexp": f"mlp.shared_expert.{role}_proj" for role in _MLP_ROLES} | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate"
}
SHARED_EXPERTS = {f"{ROLES[role]}_shexp": f"mlp.shared_experts.{role}_proj" for role in _MLP_ROLES}

# tensors whose names are not a module's with `.weight` or `.bias`
ROUTER_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}


@dataclass(frozen=True, slots=True)
class SplitPart:
    """A tensor of llama.cpp's that is a part of one of the Hub's.

    name        in a layer, with its kind: `attn_k_b.weight`
    rows        of each run of rows that it has of a band, by config.json; None: as many as the other parts have
    transposed  whether it is stored as [columns, rows]
    """

    name: str
    rows: Callable[[GgufConfig], tuple[int, ...]] | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class SplitTensor:
    """A tensor of the Hub's that llama.cpp stores as several.

    name     the Hub's, in a layer: `self_attn.kv_b_proj.weight`
    parts    in the order of their rows
    columns  how parts that have all rows share the columns: they take turns, or have one run each; "": parts are of rows
    bands    a matrix is several bands, one after the other: a head each, or a row each
    flat     a part is one matrix: the first run of rows of all bands, then the second, and so on; else a matrix for each band
    """

    name: str
    parts: tuple[SplitPart, ...]
    columns: Literal["", "alternate", "runs"] = ""
    bands: bool = False
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Predicting:
    """Layers behind the others, which predict several tokens at a time, as the Hub has them.

    setting  config.json's number of them
    stack    how their names begin in a stack of their own; "": they are numbered on, `model.layers.46.` of 46 layers
    renamed  modules of `NEXTN` → their names: in the stack, where they are not in its layers; or in numbered layers
    """

    setting: str
    stack: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)


NEXTN = {
    **{f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{"nextn.shared_head_norm": "shared_head.norm", "nextn.shared_head_head": "shared_head.head"},
}
"""Modules that only layers that predict have."""
STACK_NAMES = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}
"""`Predicting.renamed` of stacks with Qwen3-Next's names."""
LAST_NORM = "layer_output_norm"
"""The name that a few architectures have for `nextn.shared_head_norm`."""
_NEEDED = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")


def first_incomplete(layers: Mapping[int, Iterable[str]], trunk: int) -> int | None:
    """The first layer behind the model's that llama.cpp would not load; None if there is none.

    layers  the names of the tensors of each layer: `attn_q.weight`
    trunk   the number of the model's own layers

    >>> plain, needed = {"attn_q.weight"}, {"nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight"}
    >>> first_incomplete({0: plain, 1: plain | needed}, 1), first_incomplete({0: plain, 1: needed}, 1)
    (None, 1)
    """
    alike_sets = [{*names} for number, names in layers.items() if number < trunk]
    for number, names in sorted(layers.items()):
        alike = {name for name in names if not name.startswith(("nextn.", LAST_NORM))}
        if number >= trunk and not (alike in alike_sets and {*names}.issuperset(_NEEDED)):
            return number
    return None


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """A tensor of the Hub's layout in a GGUF file.

    name    of the tensor in the GGUF file
    expert  its number among the experts that are stored together; -1 for a tensor of its own
    """

    name: str
    expert: int = -1


_NUMBER = re.compile(r"(?:blk|model\.layers)\.(0|[1-9][0-9]{0,5})\.")


def predicts(name: str, layers: float = math.inf) -> bool:
    """Whether a tensor, under either name, belongs to a layer behind the `layers` of the model: it predicts several tokens.

    layers  infinity if only the name tells

    >>> predicts("blk.2.attn_q.weight", 2), predicts("model.layers.1.mlp.up_proj.weight", 2), predicts("mtp.fc.weight", 2)
    (True, False, True)
    """
    match = _NUMBER.match(text_name(name))
    return name.startswith(("mtp.", "model.mtp")) or (match is not None and int(match[1]) >= layers)


def layer_number(name: str) -> int:
    """The layer that a tensor belongs to, under its name on the Hub or in llama.cpp; -1 if it belongs to none.

    >>> layer_number("model.layers.12.mlp.up_proj.weight"), layer_number("blk.0.attn_q.weight"), layer_number("lm_head.weight")
    (12, 0, -1)
    """
    match = _NUMBER.match(name)
    return int(match[1]) if match is not None else -1


def text_name(name: str) -> str:
    """The name of a tensor in the language model alone; unchanged for one of other parts.

    Files of embedding models have the names of the model without its head.

    >>> text_name("model.language_model.layers.0.mlp.up_proj.weight"), text_name("language_model.lm_head.weight")
    ('model.layers.0.mlp.up_proj.weight', 'lm_head.weight')
    >>> text_name("layers.0.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    name = name.removeprefix("language_model.")
    if name.startswith(("layers.", "embed_tokens.", "norm.")):
        return f"model.{name}"
    return name.replace("model.language_model.", "model.", 1).replace("model.text_model.", "model.", 1)


def is_norm(name: str) -> bool:
    """Whether a tensor of a GGUF file is the weight of a norm.

    >>> is_norm("blk.0.attn_q_norm.weight"), is_norm("blk.0.attn_q.weight")
    (True, False)
    """
    return name.endswith(("_norm.weight", ".enorm.weight", ".hnorm.weight"))


def is_router(name: str) -> bool:
    """Whether a tensor of a GGUF file is the weight of a router.

    >>> is_router("blk.0.ffn_gate_inp_shexp.weight"), is_router("blk.0.ffn_gate.weight")
    (True, False)
    """
    return ".ffn_gate_inp" in name


# ---- Shapes that follow from the keys of a file: llama.cpp does not load a file with others.
#
# A dimension is a sum of products of keys. A key may have a number for each layer, and heads of layers with a window may have
# widths of their own (`…_swa`); keys that the file lacks have llama.cpp's defaults.


WINDOWS = "attention.sliding_window_pattern"
"""The key that says which layers have a window."""

_SWA = "_swa"
_UNSTATED_HEADS = "(hidden_size / num_attention_heads)"
"""The width of a head in a file that does not state it."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A sum of products.

    terms  the factors of each product: keys without the architecture, and numbers
    """

    terms: tuple[tuple[str | int, ...], ...]


TensorShape = tuple[Dimension, ...]
"""The shape of a tensor in numpy's order: [rows, columns], after the experts of a stack."""


def product_of(*factors: str | int) -> Dimension:
    """A dimension that is one product."""
    return Dimension((factors,))


# ---- what most architectures have

WIDTH = product_of("embedding_length")
_HEADS, _KV_HEADS = "attention.head_count", "attention.head_count_kv"
_KEY, _VALUE = "attention.key_length", "attention.value_length"
_QUERIES, _KEYS, _VALUES = (_HEADS, _KEY), (_KV_HEADS, _KEY), (_KV_HEADS, _VALUE)
_MLP, _EXPERT, _SHARED = "feed_forward_length", "expert_feed_forward_length", "expert_shared_feed_forward_length"
_EXPERTS = product_of("expert_count")
EMBEDDINGS = ("token_embd", "output")
"""Tensors outside of the layers, whose columns are checked."""

LAYER_SHAPES: Mapping[str, TensorShape] = {
    "attn_q": (Dimension((_QUERIES,)), WIDTH),
    "attn_k": (Dimension((_KEYS,)), WIDTH),
    "attn_v": (Dimension((_VALUES,)), WIDTH),
    "attn_qkv": (Dimension((_QUERIES, _KEYS, _VALUES)), WIDTH),
    "attn_output": (WIDTH, product_of(_HEADS, _VALUE)),
    **dict.fromkeys(("ffn_gate", "ffn_up"), (product_of(_MLP), WIDTH)),
    "ffn_down": (WIDTH, product_of(_MLP)),
    "ffn_gate_inp": (_EXPERTS, WIDTH),
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (_EXPERTS, product_of(_EXPERT), WIDTH)),
    "ffn_gate_up_exps": (_EXPERTS, product_of(2, _EXPERT), WIDTH),
    "ffn_down_exps": (_EXPERTS, WIDTH, product_of(_EXPERT)),
    **dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), (product_of(_SHARED), WIDTH)),
    "ffn_down_shexp": (WIDTH, product_of(_SHARED)),
}
"""Weights of a layer."""
GATE_IN_UP: Mapping[str, TensorShape] = {"ffn_up": (product_of(2, _MLP), WIDTH)}
"""Where the gate of an MLP is stored with its other rows."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Numbers of one layer, by keys.

    keys      of the file, without the architecture
    layer     its number
    settings  the key → what config.json calls it
    """

    keys: Mapping[str, Any]
    layer: int
    settings: Callable[[str], str]

    def of(self, dimension: Dimension) -> tuple[int, str] | None:
        """The number that a dimension is, and what says so; None if the keys do not say it."""
        terms, texts = list[int](), list[str]()
        for term in dimension.terms:
            factors = [factor for key in term for factor in self._factors(key)]
            numbers = [number for number, _ in factors if number is not None]
            if len(numbers) < len(factors):
                return None
            terms.append(math.prod(numbers))
            texts.append(" * ".join(name for _, name in factors))
        return sum(terms), " + ".join(texts)

    def _factors(self, key: str | int) -> list[tuple[int | None, str]]:
        """A key's number and name; two if it is a product itself."""
        if isinstance(key, int):
            return [(key, str(key))]
        if key == _SHARED and key not in self.keys:
            return [*self._factors("expert_shared_count"), *self._factors(_EXPERT)]
        if key == _EXPERT and key not in self.keys:
            return self._factors(_MLP)
        if key == _KV_HEADS and key not in self.keys:
            return self._factors(_HEADS)
        if key in (_KEY, _VALUE):
            if f"{key}{_SWA}" in self.keys and self._at(WINDOWS):
                key += _SWA
            elif key not in self.keys:
                width, heads = self._at("embedding_length"), self._at(_HEADS)
                return [(width // heads if width and heads else None, _UNSTATED_HEADS)]
        return [(self._at(key), self.settings(key))]

    def _at(self, key: str) -> int | None:
        """A key's number in this layer; None if it has none."""
        value = self.keys.get(key)
        if isinstance(value, list):
            value = value[self.layer] if self.layer < len(value) else None
        return int(value) if isinstance(value, int) else None


def check_shape(
    shape: tuple[int, ...], dimensions: Iterable[Dimension | None], sizes: LayerSizes, where: str, program_name: str
) -> None:
    """Raise FormatError if a tensor has another shape than the keys say.

    shape         as numpy has it; a stack of one may lack its dimension
    dimensions    None for one that is not checked
    where         the tensor's name in the Hub's layout
    program_name  its name in the GGUF file
    """
    expected = list(dimensions)
    stored = (1,) * (len(expected) - len(shape)) + shape
    if len(stored) > len(expected):
        what = f"its shape is {list(shape)}, and llama.cpp has {count(len(expected), 'dimension')} for {program_name}"
        raise FormatError(what, where=where, fix="download the model again")
    kinds = ("matrices", "rows", "columns")[-len(expected) :]
    for size, dimension, kind in zip(stored, expected, kinds, strict=True):
        stated = None if dimension is None else sizes.of(dimension)
        if stated is not None and stated[0] != size:
            number, name = stated
            what = f"{name} is {number:,} in config.json, and {program_name} would have {size:,} {kind}"
            other = "add head_dim, if the heads have another width" if _UNSTATED_HEADS in name else "download the model again"
            raise FormatError(what, where=where, fix=f"repair this in config.json, or {other}")
