"""Mamba, Falcon Mamba and Mamba 2, whose layers have nothing else: neither attention nor MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture, GgufFamily, GgufKey
from weightsmith._models.formats.gguf.base.mamba import (
    INNER,
    MAMBA_1_SHAPES,
    MAMBA_SHAPES,
    RANK,
    STATE,
    mamba_1_layer,
    mamba_bare,
    mamba_flat,
    mamba_layer,
    need_no_limit,
    put_rank,
)
from weightsmith._models.formats.gguf.base.tensors import LAYER_SHAPES, TensorShape
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_NORMED = "ssm.dt_b_c_rms"
_CONTEXT = 1 << 20
"""What llama.cpp's converter writes for the length of texts, which is not limited."""
_HEADS = "num_attention_heads"


class Mamba(GgufArchitecture):
    """Mamba."""

    name = "mamba"
    class_name = "MambaForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("mamba",)
    layer: ClassVar[Mapping[str, str]] = {
        "attn_norm": "norm",
        **mamba_1_layer("mixer"),
    }
    bare: ClassVar[Mapping[str, str]] = {"ssm_a": "mixer.A_log", "ssm_d": "mixer.D"}
    prefixes = (("backbone.", "model."),)
    ends = {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"}
    shapes: ClassVar[Mapping[str, TensorShape]] = {**LAYER_SHAPES, **MAMBA_1_SHAPES}
    setting_names: ClassVar[Mapping[str, str]] = {INNER: "expand * hidden_size", RANK: "time_step_rank"}
    sizes = {"block_count": "num_hidden_layers", "embedding_length": "hidden_size"}
    rotary = False
    eps = ("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")
    numbers: ClassVar[tuple[GgufKey, ...]] = (GgufKey("ssm.conv_kernel", "conv_kernel"), GgufKey(STATE, "state_size"))
    fixed: ClassVar[Mapping[str, Any]] = {"use_bias": False, "use_conv_bias": True, "expand": 2}
    normed: ClassVar[bool] = False

    def owns(self, values: GgufValues) -> bool:
        return super().owns(values) and values.truth(_NORMED, False) == self.normed

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """A number of heads, which other architectures have."""
        return {**config, _HEADS: 1}

    # ---- keys from config.json

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        config.need("intermediate_size", config.get("intermediate_size", self.inner(config)), self.inner(config))

    def put_heads(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.u32("context_length", _CONTEXT)
        keys.u32("feed_forward_length", 0)
        keys.u32("attention.head_count", 0)

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.u32(INNER, self.inner(config))
        put_rank(config, "time_step_rank", keys)
        keys.put(_NORMED, "bool", self.normed)

    @staticmethod
    def inner(config: GgufConfig) -> int:
        """The width of all heads together."""
        return config.count("expand", 2) * config.count("hidden_size")

    # ---- config.json from the keys

    def take_sizes(self, values: GgufValues, config: dict[str, Any]) -> None:
        super().take_sizes(values, config)
        config[_HEADS] = 1

    def take_heads(self, values: GgufValues, config: dict[str, Any], default: int) -> int:
        return default

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        del config[_HEADS]
        inner, width = values.count(INNER), config["hidden_size"]
        if inner % width:
            raise values.wrong(INNER, inner, f"not a multiple of {width:,}, the width of the model")
        config["expand"] = inner // width
        config["time_step_rank"] = values.count(RANK)


class FalconMamba(Mamba):
    """Falcon Mamba, which has norms without weights."""

    class_name = "FalconMambaForCausalLM"
    model_types = ("falcon_mamba",)
    normed = True


class Mamba2(Mamba):
    """Mamba 2."""

    name = "mamba2"
    class_name = "Mamba2ForCausalLM"
    model_types = ("mamba2",)
    layer = {"attn_norm": "norm", **mamba_layer("mixer")}
    bare = mamba_bare("mixer")
    shapes = {**LAYER_SHAPES, **MAMBA_SHAPES}
    setting_names = {INNER: "expand * hidden_size"}
    numbers = (*Mamba.numbers, GgufKey("ssm.group_count", "n_groups"), GgufKey(RANK, "num_heads"))
    fixed = {"use_bias": False, "use_conv_bias": True}
    flat = mamba_flat(Mamba.inner, "n_groups")

    def check(self, config: GgufConfig) -> None:
        GgufArchitecture.check(self, config)
        need_no_limit(config)
        config.need("num_heads * head_dim", config.count("num_heads") * config.count("head_dim"), self.inner(config))

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.u32(INNER, self.inner(config))

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        super().take_more(values, config, contents)
        del config["time_step_rank"]
        inner, heads = values.count(INNER), config["num_heads"]
        if inner % heads:
            raise values.wrong(INNER, inner, f"not a multiple of {heads:,} heads")
        config["head_dim"] = inner // heads


FAMILY = GgufFamily((FalconMamba(), Mamba(), Mamba2()))
