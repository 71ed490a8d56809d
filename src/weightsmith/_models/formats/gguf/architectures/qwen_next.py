"""Qwen3-Next and Qwen3.5, most of whose layers have linear attention (gated delta nets)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from weightsmith._models.formats.gguf.architectures.qwen import ALL_SPARSE, EXPERT_WIDTHS
from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture, GgufFamily, GgufKey
from weightsmith._models.formats.gguf.base.tensors import (
    ATTENTION,
    EXPERTS,
    HEAD_NORMS,
    LAYER_SHAPES,
    MLP,
    NORM_BETWEEN,
    ROUTER,
    SHARED_EXPERT,
    STACK_NAMES,
    WIDTH,
    Dimension,
    Predicting,
    SplitPart,
    SplitTensor,
    TensorShape,
    product_of,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues
from weightsmith._models.formats.gguf.cuts import HeadOrder

_LAYER = {
    **{**ATTENTION, **HEAD_NORMS, **NORM_BETWEEN},
    **{"ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj"},
}
_BARE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_NUMBERS = (
    GgufKey("ssm.conv_kernel", "linear_conv_kernel_dim"),
    GgufKey("ssm.state_size", "linear_key_head_dim"),
    GgufKey("ssm.group_count", "linear_num_key_heads"),
    GgufKey("ssm.time_step_rank", "linear_num_value_heads"),
)
_KEYS, _VALUES = ("ssm.state_size", "ssm.group_count"), ("ssm.state_size", "ssm.time_step_rank")
_SHAPES: Mapping[str, TensorShape] = {
    **LAYER_SHAPES,
    "attn_q": (product_of(2, "attention.head_count", "attention.key_length"), WIDTH),  # and a gate for each
    "attn_qkv": (Dimension(((2, *_KEYS), _VALUES)), WIDTH),
    "attn_gate": (product_of(*_VALUES), WIDTH),
    "ssm_out": (WIDTH, product_of(*_VALUES)),
}
_SECTIONS = "rope.dimension_sections"


_WIDE = (".attn_gate.weight", ".ssm_out.weight", ".attn_qkv.weight", ".ssm_conv1d.weight")
_NARROW = (".ssm_alpha.weight", ".ssm_beta.weight", ".ssm_a", ".ssm_dt.bias")


class DeltaNet(GgufArchitecture):
    """What all have.

    sections  how many pairs of a head RoPE turns by time, height and width, where config.json does not say it; (): it is plain
    tiled     whether llama.cpp has the value heads in another order
    """

    bare = _BARE
    shapes = _SHAPES
    shift = 1.0
    partial = 0.25
    numbers: ClassVar[tuple[GgufKey, ...]] = _NUMBERS
    predicting: ClassVar[Predicting] = Predicting("mtp_num_hidden_layers", stack="mtp.", renamed=STACK_NAMES)
    sections: ClassVar[tuple[int, ...]] = ()
    tiled: ClassVar[bool] = False

    def rope(self, config: GgufConfig) -> dict[str, Any]:
        return without_sections(super().rope(config)) if self.sections else super().rope(config)

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        size, heads = config.count("linear_key_head_dim"), config.count("linear_num_value_heads")
        config.need("linear_value_head_dim", config.count("linear_value_head_dim"), size)
        keys.u32("ssm.inner_size", size * heads)
        every, layers = config.count("full_attention_interval", 4), config.count("num_hidden_layers")
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
        config.need("layer_types", config.get("layer_types") or types, types)
        keys.u32("full_attention_interval", every)
        if self.sections:
            put_sections(config, self.rope(config), self.turned(config), self.sections, keys)

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        inner, heads = values.count("ssm.inner_size"), config["linear_num_value_heads"]
        if inner % heads:
            raise values.wrong("ssm.inner_size", inner, f"not a multiple of the {heads:,} value heads")
        config["linear_value_head_dim"] = inner // heads
        every = values.count("full_attention_interval", 4)
        if sections := take_sections(values):
            config["rope_parameters"] = {
                "rope_type": "default",
                "rope_theta": config["rope_theta"],
                "partial_rotary_factor": config.get("partial_rotary_factor", self.partial),
                "mrope_section": sections,
            }
        layers = range(1, config["num_hidden_layers"] + 1)
        config["layer_types"] = ["linear_attention" if i % every else "full_attention" for i in layers]

    def order(self, name: str, config: GgufConfig) -> HeadOrder | None:
        """As in `GgufArchitecture`.

        >>> heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 1}
        >>> config = GgufConfig({**heads, "linear_value_head_dim": 1})
        >>> [Qwen35().order(f"blk.0.{name}", config).places.tolist() for name in ("ssm_a", "attn_qkv.weight")]
        [[0, 2, 1, 3], [0, 1, 2, 3, 4, 6, 5, 7]]
        """
        if not self.tiled or not name.endswith((*_WIDE, *_NARROW)):
            return None
        if config.count("linear_num_key_heads") == config.count("linear_num_value_heads"):
            return None
        keys, values = _heads(config)
        width = config.count("linear_value_head_dim") if name.endswith(_WIDE) else 1
        before = 2 * keys * config.count("linear_key_head_dim") if name.endswith(_WIDE[2:]) else 0  # queries and keys first
        return HeadOrder(1 if name.endswith(".ssm_out.weight") else 0, before, keys, values, width)


def _key_head_rows(config: GgufConfig) -> tuple[int, int, int, int]:
    """Rows of a key head in Qwen3-Next's `in_proj_qkvz`: of its query, its key, its values, and their gates."""
    keys, values = _heads(config)
    size, rows = config.count("linear_key_head_dim"), values // keys * config.count("linear_value_head_dim")
    return size, size, rows, rows


def _heads(config: GgufConfig) -> tuple[int, int]:
    """Heads of keys and of values. Raises FormatError if they are not shared evenly."""
    keys, values = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    if values % keys:
        raise config.wrong("linear_num_value_heads", values, f"not a multiple of the {keys:,} key heads")
    return keys, values


class Qwen3Next(DeltaNet):
    """Qwen3-Next, whose projections are joined key head by key head."""

    name = "qwen3next"
    class_name = "Qwen3NextForCausalLM"
    model_types = ("qwen3_next",)
    layer = {**_LAYER, "ssm_ba": "linear_attn.in_proj_ba", **MLP, **ROUTER, **SHARED_EXPERT, **EXPERTS}
    splits = (
        SplitTensor(
            "linear_attn.in_proj_qkvz.weight",
            (
                SplitPart("attn_qkv.weight", lambda config: _key_head_rows(config)[:3]),
                SplitPart("attn_gate.weight", lambda config: _key_head_rows(config)[3:]),
            ),
            bands=True,
            flat=True,
        ),
    )
    experts = "num_experts"
    numbers = (*_NUMBERS, *EXPERT_WIDTHS)
    fixed = {"norm_topk_prob": True, **ALL_SPARSE}
    predicting = Predicting("num_nextn_predict_layers", stack="mtp.", renamed=STACK_NAMES)


_APART = {
    **{"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z"},
    **{"ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"},
}
_SECTIONS_35 = (11, 11, 10)


class Qwen35(DeltaNet):
    """Qwen 3.5."""

    name = "qwen35"
    class_name = "Qwen3_5ForCausalLM"
    model_types = ("qwen3_5_text",)
    factored = True
    layer = {**_LAYER, **_APART, **MLP}
    sections = _SECTIONS_35
    tiled = True


class Qwen35Moe(DeltaNet):
    """Qwen 3.5 with experts, which are published one by one, and by newer versions of transformers as one tensor."""

    name = "qwen35moe"
    class_name = "Qwen3_5MoeForCausalLM"
    model_types = ("qwen3_5_moe_text",)
    layer = {**_LAYER, **_APART, **ROUTER, **SHARED_EXPERT, **EXPERTS}
    bare = {**_BARE, "ffn_down_exps.weight": "mlp.experts.down_proj"}
    splits = (SplitTensor("mlp.experts.gate_up_proj", (SplitPart("ffn_gate_exps.weight"), SplitPart("ffn_up_exps.weight"))),)
    experts = "num_experts"
    numbers = (*_NUMBERS, *EXPERT_WIDTHS)
    sections = _SECTIONS_35
    tiled = True


def without_sections(rope: dict[str, Any]) -> dict[str, Any]:
    """The settings of RoPE with the name that newer versions of transformers have for it."""
    return {**rope, "rope_type": "default"} if rope["rope_type"] == "mrope" else rope


def put_sections(config: GgufConfig, rope: dict[str, Any], turned: int, default: tuple[int, ...], keys: GgufKeys) -> None:
    """How many pairs of a head RoPE turns by time, height and width. turned: numbers of a head that it turns."""
    sections = rope.get("mrope_section") or [*default]
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(pairs) is int and pairs >= 0 for pairs in sections):
        raise config.wrong("mrope_section", sections, "not three whole numbers")
    config.need("sum of mrope_section", sum(sections), turned // 2)
    keys.put(_SECTIONS, "i32", [*sections, 0])


def take_sections(values: GgufValues) -> list[int]:
    """How many pairs of a head RoPE turns by time, height and width; [] if the file does not say it."""
    sections = values.get(_SECTIONS)
    return sections.tolist()[:3] if isinstance(sections, np.ndarray) else []


FAMILY = GgufFamily((Qwen3Next(), Qwen35(), Qwen35Moe()))
