"""Mamba, Falcon Mamba and Mamba 2, whose layers have nothing else: neither attention nor MLPs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture, GgufFamily, GgufKey
from weightsmith._models.formats.gguf.base.mamba import INNER, MAMBA_SHAPES, mamba_bare, mamba_flat, mamba_layer
from weightsmith._models.formats.gguf.base.tensors import LAYER_SHAPES, WIDTH, Dimension, TensorShape, product_of
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_RANK, _STATE, _NORMED = "ssm.time_step_rank", "ssm.state_size", "ssm.dt_b_c_rms"
_CONTEXT = 1 << 20
"""What llama.cpp's converter writes for the length of texts, which is not limited."""
_HEADS = "num_attention_heads"
_NO_LIMIT = (None, [0, math.inf], [0, {"__float__": "Infinity"}])
_PUBLISHED, _CANONICAL = "backbone.", "model."
_SHAPES: Mapping[str, TensorShape] = {
    **LAYER_SHAPES,
    "ssm_in": (product_of(2, INNER), WIDTH),
    "ssm_x": (Dimension(((_RANK,), (2, _STATE))), product_of(INNER)),
    "ssm_dt": (product_of(INNER), product_of(_RANK)),
    "ssm_out": (WIDTH, product_of(INNER)),
}


class Mamba(GgufArchitecture):
    """Mamba."""

    name = "mamba"
    class_name = "MambaForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("mamba",)
    layer: ClassVar[Mapping[str, str]] = {
        **{"attn_norm": "norm", "ssm_conv1d": "mixer.conv1d"},
        **{f"ssm_{part}": f"mixer.{part}_proj" for part in ("in", "x", "dt", "out")},
    }
    bare: ClassVar[Mapping[str, str]] = {"ssm_a": "mixer.A_log", "ssm_d": "mixer.D"}
    ends = {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"}
    shapes: ClassVar[Mapping[str, TensorShape]] = _SHAPES
    setting_names: ClassVar[Mapping[str, str]] = {INNER: "expand * hidden_size", _RANK: "time_step_rank"}
    sizes = {"block_count": "num_hidden_layers", "embedding_length": "hidden_size"}
    rotary = False
    eps = ("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")
    numbers: ClassVar[tuple[GgufKey, ...]] = (GgufKey("ssm.conv_kernel", "conv_kernel"), GgufKey(_STATE, "state_size"))
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
        width = config.count("hidden_size")
        keys.u32(INNER, self.inner(config))
        keys.u32(_RANK, -(-width // 16) if config.get("time_step_rank", "auto") == "auto" else config.count("time_step_rank"))
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
            raise values.wrong(INNER, inner, f"and not a multiple of {width:,}, the width of the model")
        config["expand"] = inner // width
        config["time_step_rank"] = values.count(_RANK)

    # ---- tensors

    def canonical(self, name: str) -> str:
        return super().canonical(f"{_CANONICAL}{name.removeprefix(_PUBLISHED)}" if name.startswith(_PUBLISHED) else name)

    def published(self, canonical: str) -> str:
        return f"{_PUBLISHED}{canonical.removeprefix(_CANONICAL)}" if canonical.startswith(_CANONICAL) else canonical


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
    numbers = (*Mamba.numbers, GgufKey("ssm.group_count", "n_groups"), GgufKey(_RANK, "num_heads"))
    fixed = {"use_bias": False, "use_conv_bias": True}
    flat = mamba_flat(Mamba.inner, "n_groups")

    def check(self, config: GgufConfig) -> None:
        GgufArchitecture.check(self, config)
        limit = config.get("time_step_limit")
        config.need("time_step_limit", None if limit in _NO_LIMIT else limit, None)
        config.need("num_heads * head_dim", config.count("num_heads") * config.count("head_dim"), self.inner(config))

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.u32(INNER, self.inner(config))

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        super().take_more(values, config, contents)
        del config["time_step_rank"]
        inner, heads = values.count(INNER), config["num_heads"]
        if inner % heads:
            raise values.wrong(INNER, inner, f"and not a multiple of {heads:,} heads")
        config["head_dim"] = inner // heads


FAMILY = GgufFamily((FalconMamba(), Mamba(), Mamba2()))
