"""The families of models that GGUF files are read and written for: names of tensors, and what llama.cpp changes in them.

llama.cpp stores weights as the Hub does, with three exceptions:

* The rows of q and k of Llama's family are reordered within each head, because its RoPE rotates neighbours: row h·D + 2·i + j
  there is row h·D + j·D/2 + i of the Hub's.
* The norms of Gemma's family are stored with the 1 added that its code adds when it runs.
* The experts of a layer are one tensor of three dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType

from weightsmith._base.dataclass import dataclass
from weightsmith._models.structure.projections import MIXTRAL

LAYERS = "model.layers."

_ENDS = MappingProxyType({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
_HUB_ENDS = {here: there for there, here in _ENDS.items()}
_ATTENTION = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"} | {
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
}
_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_AFTER = {"ffn_norm": "post_attention_layernorm"}
_SANDWICH = {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"} | {
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models, under its names in both formats.

    architecture  of the GGUF file: `general.architecture`
    model_type    in config.json
    class_name    of transformers' class, in config.json
    layer         modules of a layer: llama.cpp's name → the Hub's
    experts       modules of all experts of a layer: llama.cpp's name → the Hub's of one, with `{}` for its number
    rotated       whether the rows of q and k are reordered
    shift         what is added to norms
    also          other model_types that are written as this family
    """

    architecture: str
    model_type: str
    class_name: str
    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    rotated: bool = False
    shift: float = 0.0
    also: tuple[str, ...] = ()


_MIXTRAL = {f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{MIXTRAL[f'{part}_proj']}" for part in ("gate", "down", "up")}
_QWEN_EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}

FAMILIES = (
    Family("llama", "llama", "LlamaForCausalLM", {**_ATTENTION, **_DENSE, **_AFTER}, rotated=True, also=("mistral",)),
    Family(
        "llama",
        "mixtral",
        "MixtralForCausalLM",
        {**_ATTENTION, **_AFTER, "ffn_gate_inp": "block_sparse_moe.gate"},
        experts=_MIXTRAL,
        rotated=True,
    ),
    Family("qwen2", "qwen2", "Qwen2ForCausalLM", {**_ATTENTION, **_DENSE, **_AFTER}),
    Family("qwen3", "qwen3", "Qwen3ForCausalLM", {**_ATTENTION, **_NORMS, **_DENSE, **_AFTER}),
    Family(
        "qwen3moe",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_ATTENTION, **_NORMS, **_AFTER, "ffn_gate_inp": "mlp.gate"},
        experts=_QWEN_EXPERTS,
    ),
    Family("gemma2", "gemma2", "Gemma2ForCausalLM", {**_ATTENTION, **_DENSE, **_SANDWICH}, shift=1.0),
    Family("gemma3", "gemma3_text", "Gemma3ForCausalLM", {**_ATTENTION, **_NORMS, **_DENSE, **_SANDWICH}, shift=1.0),
    Family(
        "phi3",
        "phi3",
        "Phi3ForCausalLM",
        {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"}
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj", **_AFTER},
    ),
)
"""Every family. Of two with one architecture, the one with experts has `expert_count` in its files."""

ARCHITECTURES = tuple(dict.fromkeys(family.architecture for family in FAMILIES))
MODEL_TYPES = tuple(name for family in FAMILIES for name in (family.model_type, *family.also))


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """A tensor of the Hub's layout in a GGUF file.

    name    of the tensor in the GGUF file
    expert  its number among the experts that are stored together; -1 for a tensor of its own
    """

    name: str
    expert: int = -1


_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
_HUB_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.([a-z_.0-9]+)\.(weight|bias)")
_EXPERT = re.compile(r"(\.experts\.)(0|[1-9][0-9]{0,5})(\.)")


def hub_name(family: Family, name: str) -> str | None:
    """The Hub's name of a tensor of a GGUF file, with `{}` for the expert's number; None if the family has no such tensor.

    >>> hub_name(FAMILIES[0], "blk.3.attn_q.weight"), hub_name(FAMILIES[1], "blk.0.ffn_up_exps.weight")
    ('model.layers.3.self_attn.q_proj.weight', 'model.layers.0.block_sparse_moe.experts.{}.w3.weight')
    """
    module, _, kind = name.rpartition(".")
    if module in _ENDS and kind in ("weight", "bias"):
        return f"{_ENDS[module]}.{kind}"
    match = _LAYER.fullmatch(name)
    inner = None if match is None else family.layer.get(match[2]) or family.experts.get(match[2])
    return None if match is None or inner is None else f"{LAYERS}{match[1]}.{inner}.{match[3]}"


def gguf_place(family: Family, name: str) -> GgufPlace | None:
    """Where a tensor of the Hub's layout is in a GGUF file; None if the family has no such tensor.

    >>> gguf_place(FAMILIES[1], "model.layers.0.block_sparse_moe.experts.7.w3.weight")
    GgufPlace(name='blk.0.ffn_up_exps.weight', expert=7)
    """
    module, _, kind = name.rpartition(".")
    if module in _HUB_ENDS and kind in ("weight", "bias"):
        return GgufPlace(f"{_HUB_ENDS[module]}.{kind}")
    match = _HUB_LAYER.fullmatch(name)
    if match is None:
        return None
    expert, inner = _EXPERT.search(match[2]), _EXPERT.sub(r"\1{}\3", match[2])
    found = next((there for there, here in (*family.layer.items(), *family.experts.items()) if here == inner), None)
    return None if found is None else GgufPlace(f"blk.{match[1]}.{found}.{match[3]}", int(expert[2]) if expert else -1)


def is_norm(name: str) -> bool:
    """Whether a tensor of a GGUF file is the weight of a norm.

    >>> is_norm("blk.0.attn_q_norm.weight"), is_norm("blk.0.attn_q.weight")
    (True, False)
    """
    return name.endswith("_norm.weight")


def rotated_heads(family: Family, name: str, heads: int, kv_heads: int) -> int:
    """The number of heads whose rows are reordered in a tensor of a GGUF file; 0 if none are."""
    if not family.rotated:
        return 0
    module = name.split(".")[-2]
    return {"attn_q": heads, "attn_k": kv_heads}.get(module, 0)
