"""Mixtures saved in transformers' in-memory layout, with the experts of a layer in two tensors.

transformers 5 joins the experts of these models on loading and splits them on saving. A state dict saved any other way
(torch.save, FSDP, a trainer) keeps `experts.gate_up_proj`. It is read like the files on the Hub, with a matrix per expert.

    experts.gate_up_proj  [experts, 2 · inner, hidden], the rows of each gate before those of its up
    experts.down_proj     [experts, hidden, inner]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsmith._base.errors import FormatError
from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.sources.composed import PartTensors, TensorPart
from weightsmith._models.structure.projections import MIXTRAL
from weightsmith.abc.stored import Specs
from weightsmith.abc.tensors import Tensors

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
_USUAL = ("gate_proj", "up_proj", "down_proj")
_OF_MIXTRAL = tuple(MIXTRAL[name] for name in _USUAL)


@dataclass(frozen=True, slots=True)
class _Family:
    """How files on the Hub name what transformers has joined.

    projections  gate, up and down of an expert
    renamed      ends of other names: in memory → in files
    parent       of the experts: in memory, in files. Layers without experts keep the name that it has in memory
    begins       beginnings of names: in memory → in files; the first that fits counts
    split        ends of names in memory → ends of their equal parts, by rows, in files
    """

    projections: tuple[str, ...] = _USUAL
    renamed: Mapping[str, str] = field(default_factory=dict)
    parent: tuple[str, str] = ("mlp", "mlp")
    begins: Mapping[str, str] = field(default_factory=dict)
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_QWEN = _Family()
_MIXTRAL = _Family(_OF_MIXTRAL, parent=("mlp", "block_sparse_moe"))
_BIAS = "e_score_correction_bias"
_COMPRESSOR = {"position_bias": "ape", "kv_proj.weight": "wkv.weight", "gate_proj.weight": "wgate.weight"}
_COMPRESSOR |= {"kv_norm.weight": "norm.weight"}
_DEEPSEEK_V4 = _Family(
    _OF_MIXTRAL,
    {
        **{"input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight"},
        **{f"{part}_hc.{name}": f"hc_{part}_{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")},
        **{"self_attn.sinks": "attn.attn_sink", "self_attn.q_a_norm.weight": "attn.q_norm.weight"},
        **{"self_attn.kv_norm.weight": "attn.kv_norm.weight", "self_attn.kv_proj.weight": "attn.wkv.weight"},
        **{f"self_attn.{part}_proj.weight": f"attn.w{part}.weight" for part in ("q_a", "q_b", "o_a", "o_b")},
        **{f"self_attn.compressor.{name}": f"attn.compressor.{stored}" for name, stored in _COMPRESSOR.items()},
        **{f"self_attn.compressor.indexer.{name}": f"attn.indexer.compressor.{end}" for name, end in _COMPRESSOR.items()},
        "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
        "self_attn.compressor.indexer.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
        f"mlp.gate.{_BIAS}": "ffn.gate.bias",
        **{f"mlp.shared_experts.{name}.weight": f"ffn.shared_experts.{MIXTRAL[name]}.weight" for name in _USUAL},
    },
    ("mlp", "ffn"),
    {"model.embed_tokens.": "embed.", "model.hc_head.hc_": "hc_head_", "model.": "", "lm_head.": "head."},
)
_KIMI_LINEAR = _Family(
    _OF_MIXTRAL,
    {
        f"self_attn.forget_gate.{name}": f"self_attn.{name}"
        for name in ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight")
    },
    ("mlp", "block_sparse_moe"),
    split={"self_attn.conv1d.weight": tuple(f"self_attn.{part}_conv1d.weight" for part in "qkv")},
)
_THINKER = "thinker.model."

FAMILIES: Mapping[str, _Family] = {
    **dict.fromkeys(
        (
            "afmoe cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 flex_olmo glm4_moe glm4_moe_lite glm4v_moe "
            "glm_moe_dsa hunyuan_v1_moe mellum olmoe qwen2_moe qwen3_moe qwen3_next sarvam_mla solar_open"
        ).split(),
        _QWEN,
    ),
    "deepseek_v4": _DEEPSEEK_V4,
    "ernie4_5_moe": _Family(renamed={f"mlp.gate.moe_statics.{_BIAS}": f"mlp.moe_statics.{_BIAS}"}),
    "exaone_moe": _Family(renamed={f"mlp.gate.{_BIAS}": f"mlp.{_BIAS}"}),
    "hy_v3": _Family(
        renamed={"mlp.gate.weight": "mlp.router.gate.weight", f"mlp.{_BIAS}": "mlp.expert_bias"}
        | {f"mlp.shared_experts.{name}.weight": f"mlp.shared_mlp.{name}.weight" for name in _USUAL}
    ),
    "jamba": _Family(parent=("feed_forward", "feed_forward")),
    "kimi_linear": _KIMI_LINEAR,
    "laguna": _Family(
        renamed={f"mlp.gate.{_BIAS}": f"mlp.experts.{_BIAS}"}
        | {f"mlp.shared_experts.{name}.weight": f"mlp.shared_expert.{name}.weight" for name in _USUAL}
    ),
    "lfm2_moe": _Family(_OF_MIXTRAL, parent=("feed_forward", "feed_forward")),
    "mimo_v2_flash": _Family(renamed={"self_attn.sinks": "self_attn.attention_sink_bias"}),
    "minimax": _MIXTRAL,
    "minimax_m2": _MIXTRAL,
    "mixtral": _MIXTRAL,
    "phimoe": _Family(_OF_MIXTRAL, {"mlp.router.weight": "block_sparse_moe.gate.weight"}, ("mlp", "block_sparse_moe")),
    "qwen3_omni_moe": _Family(
        begins={f"{_THINKER}{part}.": f"thinker.{part}." for part in ("audio_tower", "visual")}
        | {f"{_THINKER}language_model.": _THINKER}
    ),
}
"""Values of `model_type` whose files have a matrix per expert, from `conversion_mapping` of transformers 5.24. It joins the
experts of other types too, but renames more of their tensors, or has room for experts without any (LongCat Flash)."""


def names_in_files(model_type: str) -> Mapping[str, str]:
    """Ends of names in transformers' memory that files on the Hub have under other names, outside the experts.

    >>> names_in_files("mimo_v2_flash"), names_in_files("llama")
    ({'self_attn.sinks': 'self_attn.attention_sink_bias'}, {})
    """
    return FAMILIES.get(model_type, _QWEN).renamed


def with_single_experts(source: Tensors, config: Mapping[str, Any], where: str) -> Tensors:
    """The tensors as the model's files on the Hub have them; `source` itself if no experts are joined, or in another layout.

    where  the model as the user named it, for messages

    Raises FormatError if two names become the same.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return source
    ends = tuple(f".{family.parent[0]}.{end}" for end in (GATE_UP, DOWN))
    joined = {name[: name.rindex("experts.")] for name in source.specs if name.endswith(ends)}
    if not joined or not all(_fits(source.specs, prefix) for prefix in joined):
        return source
    beside = tuple(f"{prefix}{end}{mark}" for prefix in joined for end in (GATE_UP, DOWN) for mark in "._")
    if any(name.startswith(beside) for name in source.specs):  # scales, biases or factors
        return source
    parts: dict[str, TensorPart] = {}
    for name, spec in source.specs.items():
        prefix = name[: name.rindex("experts.")] if name.endswith(ends) else ""
        if prefix:
            new = _experts(name, spec.shape, _in_files(prefix, family, joined), family.projections)
        elif end := next((end for end in family.split if name.endswith(f".{end}")), ""):
            new = _equal_parts(
                name, spec, [_in_files(name.removesuffix(end) + part, family, joined) for part in family.split[end]]
            )
        else:
            new = {_in_files(name, family, joined): TensorPart(name, spec.shape)}
        if (same := next(filter(parts.__contains__, new), None)) is not None:
            what = f"{show(parts[same].stored)} and {show(name)} are the same tensor for a loader ({show(same)})"
            raise FormatError(what, where=where, fix="remove one of them, or save the model again")
        parts |= new
    return PartTensors(source, parts, where)


_MOST_EXPERTS = 4096
"""Eight times as many as in published models. A few bytes of a header can claim any number, and each expert gets names."""


def _fits(specs: Specs, prefix: str) -> bool:
    """Whether both tensors are there and unquantised, with shapes that match only in this layout."""
    pair = [specs[name] for end in (GATE_UP, DOWN) if (name := prefix + end) in specs]
    if len(pair) < 2 or any(spec.dtype.name not in _PLAIN or len(spec.shape) != 3 for spec in pair):
        return False
    (experts, both, hidden), down = (spec.shape for spec in pair)
    return experts <= _MOST_EXPERTS and experts * both * hidden > 0 and both % 2 == 0 and down == (experts, hidden, both // 2)


_PLAIN = ("F16", "BF16", "F32", "F64")


def _in_files(name: str, family: _Family, joined: Collection[str]) -> str:
    """What files call a tensor. joined: beginnings of the names of modules with joined experts."""
    for begin, stored in family.begins.items():
        if name.startswith(begin):
            in_files = stored + name.removeprefix(begin)
            break
    else:
        in_files = name
    for end, stored in family.renamed.items():
        if in_files.endswith(f".{end}"):
            return in_files.removesuffix(end) + stored
    here, there = family.parent
    before, found, _ = name.partition(f".{here}.")
    return in_files.replace(f".{here}.", f".{there}.", 1) if before + found in joined else in_files


def _equal_parts(name: str, spec: TensorSpec, names: Sequence[str]) -> dict[str, TensorPart]:
    """Tensors that are as many rows of a joined one each; the tensor itself if they cannot be."""
    if not spec.shape or spec.shape[0] % len(names) or not spec.size:
        return {name: TensorPart(name, spec.shape)}
    shape, size = (spec.shape[0] // len(names), *spec.shape[1:]), spec.size // len(names)
    return {part: TensorPart(name, shape, ((k * size, size),)) for k, part in enumerate(names)}


def _experts(name: str, shape: tuple[int, ...], prefix: str, projections: tuple[str, ...]) -> dict[str, TensorPart]:
    """The matrices of the experts of one joined tensor."""
    gate, up, down = projections
    of_tensor = (gate, up) if name.endswith(GATE_UP) else (down,)
    experts, rows, cols = shape
    rows //= len(of_tensor)
    size = rows * cols
    names = [f"{prefix}experts.{expert}.{projection}.weight" for expert in range(experts) for projection in of_tensor]
    return {single: TensorPart(name, (rows, cols), ((k * size, size),)) for k, single in enumerate(names)}
