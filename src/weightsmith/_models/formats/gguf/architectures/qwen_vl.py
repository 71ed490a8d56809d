"""Qwen2-VL and Qwen2.5-VL: their language model, and their vision halves."""

from __future__ import annotations

from typing import Any

from weightsmith._models.formats.gguf.architectures.qwen import Qwen2
from weightsmith._models.formats.gguf.architectures.qwen_next import put_sections, without_sections
from weightsmith._models.formats.gguf.base.architecture import GgufFamily
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys
from weightsmith._models.formats.gguf.base.vision import MOST, TWO_LAYERS, Images, VisionHalf, gated


class Qwen2Vl(Qwen2):
    """Qwen 2 with positions of images."""

    name = "qwen2vl"
    class_name = "Qwen2VLForConditionalGeneration"
    model_types = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_vl", "qwen2_5_vl")
    readable = False

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        put_sections(config, self.rope(config), self.turned(config), (16, 24, 24), keys)

    def rope(self, config: GgufConfig) -> dict[str, Any]:
        return without_sections(super().rope(config))


_LAYER = {"ln1": "norm1", "ln2": "norm2", **dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn.qkv"), "attn_out": "attn.proj"}
_SIZES = {"block_count": "depth", "attention.head_count": "num_heads"}
_DEFAULTS = {"depth": 32, "num_heads": 16, "patch_size": 14, "image_size": 560, "layer_norm_eps": 1e-6}


class Qwen2VlVision(VisionHalf):
    """Qwen2-VL's, whose first convolution has two frames, and whose q, k and v are one tensor."""

    model_type = "qwen2_vl"
    name = "qwen2vl_merger"
    blocks = "visual.blocks."
    layer = {**_LAYER, **TWO_LAYERS}
    ends = {"v.post_ln": "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2"}
    bare = dict.fromkeys(("v.patch_embd.weight", "v.patch_embd.weight.1"), "visual.patch_embed.proj.weight")
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

    def keys_of(self, images: Images) -> dict[str, int | None]:
        """The interval of the layers that attend to the whole image."""
        name = "fullatt_block_indexes"
        layers = images.vision.get(name)
        if not isinstance(layers, list) or not layers or not all(type(layer) is int and 0 <= layer < MOST for layer in layers):
            raise images.vision.wrong(name, layers, "and not a list of layers")
        every = int(layers[0]) + 1
        images.vision.need(name, layers, [every * (i + 1) - 1 for i in range(len(layers))])
        return {"vision.n_wa_pattern": every}


FAMILY = GgufFamily((Qwen2Vl(),), vision=(Qwen2VlVision(), Qwen25VlVision()))
