"""The vision half of InternVL, whose language models are Qwen's and others'."""

from __future__ import annotations

from weightsmith._models.formats.gguf.base.architecture import GgufFamily
from weightsmith._models.formats.gguf.base.vision import (
    GELU_OR_SILU,
    MOST,
    TWO_LAYERS,
    VIT_LARGE,
    Images,
    VisionHalf,
    attention,
)


class InternVl(VisionHalf):
    """InternVL."""

    model_type = "internvl"
    name = "internvl"
    blocks = "vision_tower.encoder.layer."
    layer = {
        **{"ln1": "layernorm_before", "ln2": "layernorm_after", **attention("attention", "projection_layer"), **TWO_LAYERS},
        **{"attn_q_norm": "attention.q_norm", "attn_k_norm": "attention.k_norm"},
    }
    ends = {
        "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
        "mm.model.mlp.0": "multi_modal_projector.layer_norm",
        "mm.model.mlp.1": "multi_modal_projector.linear_1",
        "mm.model.mlp.3": "multi_modal_projector.linear_2",
    }
    bare = {
        "v.class_embd": "vision_tower.embeddings.cls_token",
        "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
        "v.blk.{}.ls1.weight": "vision_tower.encoder.layer.{}.lambda_1",
        "v.blk.{}.ls2.weight": "vision_tower.encoder.layer.{}.lambda_2",
    }
    activations = GELU_OR_SILU
    defaults = {**VIT_LARGE, "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6}

    def check(self, images: Images) -> None:
        fixed = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu"}
        images.whole.need_all(fixed)

    def keys_of(self, images: Images) -> dict[str, int | None]:
        ratio = images.whole.number("downsample_ratio", 0.5)
        if not 1 / MOST < ratio <= 1:
            raise images.whole.wrong("downsample_ratio", ratio, "not a share")
        tiles = {
            f"vision.preproc_{end}_tiles": images.whole.count(f"{end}_dynamic_patch")
            for end in ("min", "max")
            if images.whole.get(f"{end}_dynamic_patch")
        }
        return {"vision.projector.scale_factor": int(1 / ratio), **tiles}


FAMILY = GgufFamily((), vision=(InternVl(),))
