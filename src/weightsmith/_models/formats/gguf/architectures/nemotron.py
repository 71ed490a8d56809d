"""Nemotron 3 and 4, whose MLPs have no gate, and Nemotron-H, whose layers are Mamba 2, attention, an MLP or experts each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from weightsmith._base.files import show
from weightsmith._models.formats.gguf.base.architecture import UNTIED, Contents, GgufArchitecture, GgufFamily, GgufKey
from weightsmith._models.formats.gguf.base.mamba import (
    INNER,
    KV_HEADS,
    MAMBA_SHAPES,
    mamba_bare,
    mamba_flat,
    mamba_layer,
    need_no_limit,
    put_kv_heads,
)
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, ENDS, LAYER_SHAPES, MLP_NORM, UNGATED_MLP
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues


class Nemotron(GgufArchitecture):
    """Nemotron, and Minitron."""

    name = "nemotron"
    class_name = "NemotronForCausalLM"
    model_types = ("nemotron",)
    square = True
    layer = {**ATTENTION, **MLP_NORM, **UNGATED_MLP}
    shift = 1.0
    fixed = UNTIED
    eps = ("attention.layer_norm_epsilon", "norm_eps")
    partial = 0.5
    activation = "relu2"


_LAYERS = {
    **{"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"},
    **{"mamba": "linear_attention", "attention": "full_attention"},
}
"""What published files call kinds of layers, as letters or in a list, and what newer versions of transformers call them."""
_KINDS = ("linear_attention", "full_attention", "mlp", "moe")
_WIDTHS = "feed_forward_length"


def _inner(config: GgufConfig) -> int:
    return config.count("mamba_num_heads") * config.count("mamba_head_dim")


class NemotronH(GgufArchitecture):
    """Nemotron-H and Nemotron Nano 2, without experts. Attention has no RoPE."""

    name = "nemotron_h"
    class_name = "NemotronHForCausalLM"
    model_types = ("nemotron_h",)
    layer: ClassVar[Mapping[str, str]] = {
        **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
        **{"attn_norm": "norm", "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"},
        **mamba_layer("mixer"),
    }
    bare: ClassVar[Mapping[str, str]] = mamba_bare("mixer")
    prefixes = (("backbone.", "model."),)
    ends = {**ENDS, "token_embd": "model.embeddings", "output_norm": "model.norm_f"}
    shapes = {**LAYER_SHAPES, **MAMBA_SHAPES}
    setting_names: ClassVar[Mapping[str, str]] = {
        KV_HEADS: "num_key_value_heads (0 in layers without attention)",
        INNER: "mamba_num_heads * mamba_head_dim",
        _WIDTHS: "intermediate_size (0 in layers without an MLP)",
    }
    rotated = True
    rotary = False
    eps = ("attention.layer_norm_epsilon", "layer_norm_epsilon")
    numbers: ClassVar[tuple[GgufKey, ...]] = (
        GgufKey("ssm.conv_kernel", "conv_kernel"),
        GgufKey("ssm.state_size", "ssm_state_size"),
        GgufKey("ssm.group_count", "n_groups"),
        GgufKey("ssm.time_step_rank", "mamba_num_heads"),
    )
    fixed: ClassVar[Mapping[str, Any]] = {
        **{"attention_bias": False, "mlp_bias": False, "use_bias": False, "mamba_proj_bias": False, "use_conv_bias": True},
        **{"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"},
    }
    activation = "relu2"
    flat = mamba_flat(_inner, "n_groups")
    wide: ClassVar[str] = "intermediate_size"

    def fits(self, config: Mapping[str, Any]) -> bool:
        stated = self.complete(config)
        types = stated.get("layer_types", stated.get("layers_block_type"))
        return isinstance(types, list) and ("moe" in types) == bool(self.experts)

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """`layer_types`, the number of layers and the width of a head, which have had several names."""
        stated = {"head_dim": config.get("head_dim", config.get("attention_head_dim"))}
        for name, synonym in (("layer_types", "hybrid_override_pattern"), ("layers_block_type", "")):
            types = config.get(name, config.get(synonym))
            kinds = [*types] if isinstance(types, str | list) else types
            if isinstance(kinds, list):
                stated[name] = [_LAYERS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
        layers = stated.get("layer_types", stated.get("layers_block_type"))
        stated["num_hidden_layers"] = config.get("num_hidden_layers", None if layers is None else len(layers))
        return {**config, **{name: value for name, value in stated.items() if value is not None}}

    # ---- keys from config.json

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        need_no_limit(config)

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        layers, types = config.count("num_hidden_layers"), config.get("layer_types")
        known = [kind for kind in _KINDS if kind != ("mlp" if self.experts else "moe")]
        if not isinstance(types, list) or len(types) != layers or not all(kind in known for kind in types):
            raise config.wrong("layer_types", types, f"not one of {', '.join(known)} for each of {layers:,} layers")
        heads = config.count("num_key_value_heads", config.count("num_attention_heads"))
        put_kv_heads([kind == "full_attention" for kind in types], heads, keys)
        width = config.count(self.wide)
        keys.put(_WIDTHS, "i32", [width if kind in ("mlp", "moe") else 0 for kind in types])
        keys.u32(INNER, _inner(config))
        keys.put("rope.scaling.finetuned", "bool", False)

    # ---- config.json from the keys

    def take_size(self, values: GgufValues, config: dict[str, Any], name: str, setting: str) -> None:
        if name not in (KV_HEADS, _WIDTHS):  # one for each layer
            super().take_size(values, config, name, setting)

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        layers = config["num_hidden_layers"]
        heads, widths = (_by_layer(values, name, layers) for name in (KV_HEADS, _WIDTHS))
        if any(head and width for head, width in zip(heads, widths, strict=True)):
            raise values.wrong(_WIDTHS, widths, f"and a layer would have an MLP and the attention of {KV_HEADS}")
        config["num_key_value_heads"] = max(heads) or config["num_attention_heads"]
        if any(widths):
            config[self.wide] = max(widths)
        rest = "moe" if self.experts else "mlp"
        config["layer_types"] = [
            "full_attention" if head else rest if width else "linear_attention"
            for head, width in zip(heads, widths, strict=True)
        ]
        inner, count = values.count(INNER), config["mamba_num_heads"]
        if inner % count:
            raise values.wrong(INNER, inner, f"not a multiple of {count:,} heads")
        config["mamba_head_dim"] = inner // count

    # ---- tensors


def _by_layer(values: GgufValues, name: str, layers: int) -> list[int]:
    """0 or one number for each layer. Raises FormatError."""
    numbers = values.get(name)
    if not isinstance(numbers, np.ndarray) or numbers.shape != (layers,) or numbers.dtype.kind not in "iu":
        raise values.wrong(name, show(numbers), f"not a whole number for each of {layers:,} layers")
    if not np.isin(numbers, (0, max(0, int(numbers.max())))).all():
        raise values.wrong(name, numbers, "not one number in all layers that have one")
    return [int(number) for number in numbers]


class NemotronHMoe(NemotronH):
    """Nemotron 3 Nano, with experts instead of MLPs."""

    name = "nemotron_h_moe"
    layer = {
        **{name: module for name, module in NemotronH.layer.items() if name not in UNGATED_MLP},
        **{"ffn_gate_inp": "mixer.gate", "ffn_up_exps": "mixer.experts.{}.up_proj"},
        **{"ffn_down_exps": "mixer.experts.{}.down_proj", "ffn_up_shexp": "mixer.shared_experts.up_proj"},
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
    }
    bare = {**mamba_bare("mixer"), "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"}
    experts = "n_routed_experts"
    numbers = (
        *NemotronH.numbers,
        GgufKey("expert_feed_forward_length", "moe_intermediate_size"),
        GgufKey("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"),
        GgufKey("expert_shared_count", "n_shared_experts"),
        GgufKey("expert_weights_norm", "norm_topk_prob", "bool"),
        GgufKey("expert_weights_scale", "routed_scaling_factor", "f32"),
        GgufKey("expert_group_count", "n_group", default=1),
    )
    fixed = {**NemotronH.fixed, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_latent_size": None}
    wide = "moe_intermediate_size"


FAMILY = GgufFamily((Nemotron(), NemotronH(), NemotronHMoe()))
