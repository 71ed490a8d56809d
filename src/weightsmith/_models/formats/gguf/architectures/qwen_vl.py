"""Qwen2-VL to Qwen3-VL: their language models, and the vision halves of these and of Qwen3.5.

transformers has no class for such a language model alone. It is a Qwen 2 or 3 for a text, whose tokens have one place each: a
file is read as that. The setting `mrope_section`, which transformers ignores there, tells it from a Qwen 2 or 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeGuard

import numpy as np

from weightsmith._models.formats.gguf.architectures.qwen import Qwen2, Qwen3, Qwen3Moe
from weightsmith._models.formats.gguf.architectures.qwen_next import put_sections, take_sections, without_sections
from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture, GgufFamily
from weightsmith._models.formats.gguf.base.tensors import SplitPart, SplitTensor
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues
from weightsmith._models.formats.gguf.base.vision import MOST, TANH_ONLY, TWO_LAYERS, Images, VisionHalf, gated

_SECTIONS = "mrope_section"


_DEEP, _DEEP_LAYERS, _DEEP_KEY = "num_deepstack_layers", "deepstack_visual_indexes", "n_deepstack_layers"
_DEEP_DEFAULT = [8, 16, 24]
_NO_LAYERS = "not a list of layers"


def _are_layers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(layer) is int and 0 <= layer < MOST for layer in value)


class PlacedInImages(GgufArchitecture):
    """What all have: positions of time, height and width.

    sections  how many pairs of a head RoPE turns by each, where config.json does not say it
    deep      whether the first layers each get what one layer of the vision half makes of an image. A file that is read says
              how many as `num_deepstack_layers`
    """

    sections: ClassVar[tuple[int, ...]]
    deep: ClassVar[bool] = False

    def fits(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") != self.model_types[0] or _SECTIONS in config

    def uses_window(self, config: GgufConfig) -> bool:
        return bool(config.get("use_sliding_window", False))

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        put_sections(config, self.rope(config), self.turned(config), self.sections, keys)
        if not self.deep:
            return
        vision = config.get("vision_config")
        layers = vision.get(_DEEP_LAYERS, _DEEP_DEFAULT) if isinstance(vision, dict) else []
        if not _are_layers(layers):
            raise config.wrong(f"vision_config.{_DEEP_LAYERS}", layers, _NO_LAYERS)
        keys.u32(_DEEP_KEY, config.count(_DEEP, len(layers), least=0))

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        config[_SECTIONS] = take_sections(values) or [*self.sections]
        if self.deep:
            config[_DEEP] = values.count(_DEEP_KEY, 0, least=0)

    def rope(self, config: GgufConfig) -> dict[str, Any]:
        rope = without_sections(super().rope(config))
        return {_SECTIONS: config.get(_SECTIONS), **rope} if rope.get(_SECTIONS) is None else rope


class Qwen2Vl(PlacedInImages):
    """Qwen 2 with positions of images."""

    name = "qwen2vl"
    class_name = Qwen2.class_name
    model_types = ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_vl", "qwen2_5_vl")
    square = True
    sections = (16, 24, 24)


class Qwen3Vl(PlacedInImages):
    """Qwen 3 with positions of images."""

    name = "qwen3vl"
    class_name = Qwen3.class_name
    model_types = ("qwen3", "qwen3_vl_text", "qwen3_vl")
    layer = Qwen3.layer
    sections = (24, 20, 20)
    deep = True


class Qwen3VlMoe(PlacedInImages):
    """Qwen 3 with experts and positions of images.

    A layer's experts are two tensors: as published, their rows are llama.cpp's columns; newer versions of transformers write
    them as llama.cpp has them.
    """

    name = "qwen3vlmoe"
    class_name = Qwen3Moe.class_name
    model_types = ("qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_moe")
    layer = Qwen3Moe.layer
    experts = Qwen3Moe.experts
    numbers = Qwen3Moe.numbers
    fixed = Qwen3Moe.fixed
    sections = (24, 20, 20)
    deep = True
    splits = (
        SplitTensor(
            "mlp.experts.gate_up_proj",
            (SplitPart("ffn_gate_exps.weight", transposed=True), SplitPart("ffn_up_exps.weight", transposed=True)),
            columns="runs",
        ),
        SplitTensor("mlp.experts.down_proj", (SplitPart("ffn_down_exps.weight", transposed=True),)),
    )

    def cut(self, split: SplitTensor, config: GgufConfig, shape: tuple[int, ...]) -> SplitTensor:
        width, inner = config.count("hidden_size"), config.count("moe_intermediate_size")
        newer = (2 * inner, width) if len(split.parts) > 1 else (width, inner)
        if shape[-2:] != newer:  # as transformers decides it
            return split
        return SplitTensor(split.name, tuple(SplitPart(part.name) for part in split.parts))


_LAYER = {"ln1": "norm1", "ln2": "norm2", **dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn.qkv"), "attn_out": "attn.proj"}
_FRAMES = dict.fromkeys(("v.patch_embd.weight", "v.patch_embd.weight.1"), "visual.patch_embed.proj.weight")
_SIZES = {"block_count": "depth", "attention.head_count": "num_heads"}
_DEFAULTS = {"depth": 32, "num_heads": 16, "patch_size": 14, "image_size": 560, "layer_norm_eps": 1e-6}


class Qwen2VlVision(VisionHalf):
    """Qwen2-VL's, whose first convolution has two frames, and whose q, k and v are one tensor."""

    model_type = "qwen2_vl"
    name = "qwen2vl_merger"
    blocks = "visual.blocks."
    layer = {**_LAYER, **TWO_LAYERS}
    ends = {"v.post_ln": "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2"}
    bare = _FRAMES
    activations = {"quick_gelu": ""}
    sizes = {**_SIZES, "embedding_length": "embed_dim", "feed_forward_length": "hidden_size"}
    defaults = {**_DEFAULTS, "embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu"}

    def check(self, images: Images) -> None:
        images.vision.need_all({"spatial_merge_size": 2})


class Qwen25VlVision(Qwen2VlVision):
    """Qwen2.5-VL's, most of whose layers attend to windows of the image."""

    model_type = "qwen2_5_vl"
    name = "qwen2.5vl_merger"
    layer = {**_LAYER, **gated("mlp")}
    activations = {"silu": "use_silu"}
    sizes = _SIZES
    defaults = {**_DEFAULTS, "hidden_size": 3584, "intermediate_size": 3420, "hidden_act": "silu"} | {
        "fullatt_block_indexes": [7, 15, 23, 31]
    }

    def check(self, images: Images) -> None:
        images.vision.need_all({"spatial_merge_size": 2, "window_size": 112})

    def keys_of(self, images: Images) -> dict[str, int | list[bool] | None]:
        """The interval of the layers that attend to the whole image."""
        name = "fullatt_block_indexes"
        if not (layers := _layers(images, name)):
            raise images.vision.wrong(name, layers, _NO_LAYERS)
        every = layers[0] + 1
        images.vision.need(name, layers, [every * (i + 1) - 1 for i in range(len(layers))])
        return {"vision.n_wa_pattern": every}


def _layers(images: Images, name: str) -> list[int]:
    """Numbers of layers that vision_config lists. Raises FormatError."""
    layers = images.vision.get(name)
    if not _are_layers(layers):
        raise images.vision.wrong(name, layers, _NO_LAYERS)
    return layers


_MERGER = re.compile(
    r"(?:model\.)?visual\.deepstack_merger_list\.(0|[1-9][0-9]{0,3})\.(norm|linear_fc1|linear_fc2)\.(weight|bias)"
)


class Qwen35Vision(VisionHalf):
    """Qwen3.5's, whose embedding of positions is stretched to the size of the image."""

    model_type = "qwen3_5"
    name = "qwen3vl_merger"
    blocks = "visual.blocks."
    layer = {
        **{"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj"},
        **{"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
    }
    ends = {
        **{"v.post_ln": "visual.merger.norm", "mm.0": "visual.merger.linear_fc1", "mm.2": "visual.merger.linear_fc2"},
        "v.position_embd": "visual.pos_embed",
    }
    bare = {**_FRAMES, "v.patch_embd.bias": "visual.patch_embed.proj.bias"}
    activations = TANH_ONLY
    sizes = _SIZES
    defaults: ClassVar[Mapping[str, Any]] = {
        **{"depth": 27, "num_heads": 16, "patch_size": 16, "hidden_size": 1152, "intermediate_size": 4304},
        **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "spatial_merge_size": 2, "num_position_embeddings": 2304},
    }

    def images(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Images:
        """As in `VisionHalf`; the size of an image follows from the number of places that have an embedding."""
        images = super().images(config, processor)
        places, patch = images.vision.count("num_position_embeddings"), images.vision.count("patch_size")
        side = math.isqrt(places)
        images.vision.need("num_position_embeddings", places, side * side)
        return super().images({**config, "vision_config": {"image_size": side * patch, **config["vision_config"]}}, processor)

    def keys_of(self, images: Images) -> dict[str, int | list[bool] | None]:
        """How many patches become one, and the layers whose output the language model gets, too."""
        return {
            "vision.spatial_merge_size": images.vision.count("spatial_merge_size"),
            "vision.is_deepstack_layers": np.isin(np.arange(self.size(images, "block_count")), self.deep(images)).tolist(),
        }

    def deep(self, images: Images) -> list[int]:
        """The layers whose output the first layers of the language model get."""
        return []


class Qwen35MoeVision(Qwen35Vision):
    """That of Qwen3.5 with experts, which is the same."""

    model_type = "qwen3_5_moe"


class Qwen3VlVision(Qwen35Vision):
    """Qwen3-VL's, some of whose layers have a merger of their own."""

    model_type = "qwen3_vl"
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen35Vision.defaults, _DEEP_LAYERS: _DEEP_DEFAULT}

    def deep(self, images: Images) -> list[int]:
        layers, count = _layers(images, _DEEP_LAYERS), self.size(images, "block_count")
        if layers != sorted({*layers}) or layers[-1:] >= [count]:
            raise images.vision.wrong(_DEEP_LAYERS, layers, f"not a rising list of its {count:,} layers")
        return layers

    def names(self, name: str, images: Images) -> tuple[str, ...] | None:
        if (match := _MERGER.fullmatch(name)) is None:
            return super().names(name, images)
        layers = self.deep(images)
        module = match[2].removeprefix("linear_")
        return (f"v.deepstack.{layers[int(match[1])]}.{module}.{match[3]}",) if int(match[1]) < len(layers) else None


class Qwen3VlMoeVision(Qwen3VlVision):
    """That of Qwen3-VL with experts, which is the same."""

    model_type = "qwen3_vl_moe"


FAMILY = GgufFamily(
    (Qwen2Vl(), Qwen3Vl(), Qwen3VlMoe()),
    vision=(Qwen2VlVision(), Qwen25VlVision(), Qwen3VlVision(), Qwen3VlMoeVision(), Qwen35Vision(), Qwen35MoeVision()),
)
