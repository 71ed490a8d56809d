"""SmolLM3, and the vision halves of SmolVLM and Idefics 3."""

from __future__ import annotations

from weightsmith._models.formats.gguf.base.architecture import GELU, GgufArchitecture, GgufFamily
from weightsmith._models.formats.gguf.base.values import GgufConfig
from weightsmith._models.formats.gguf.base.vision import SIGLIP, TANH_ONLY, Images, VisionHalf


class SmolLm3(GgufArchitecture):
    """SmolLM3, every fourth layer of which has no RoPE."""

    name = "smollm3"
    class_name = "SmolLM3ForCausalLM"
    model_types = ("smollm3",)
    rotated = True
    fixed = {"no_rope_layer_interval": 4}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        expected = [int((i + 1) % 4 != 0) for i in range(config.count("num_hidden_layers"))]
        config.need("no_rope_layers", config.get("no_rope_layers", expected), expected)


class Idefics3(VisionHalf):
    """SigLIP, whose patches become rows in squares; a large image is cut into tiles."""

    model_type = "idefics3"
    name = "idefics3"
    blocks = "vision_model.encoder.layers."
    layer = SIGLIP
    ends = {
        "v.patch_embd": "vision_model.embeddings.patch_embedding",
        "v.position_embd": "vision_model.embeddings.position_embedding",
        "v.post_ln": "vision_model.post_layernorm",
        "mm.model.fc": "connector.modality_projection.proj",
    }
    activations = TANH_ONLY
    types = {"v.patch_embd.weight": "F32"}
    defaults = {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16} | {
        **{"image_size": 224, "patch_size": 32, "hidden_act": GELU, "layer_norm_eps": 1e-6}
    }

    def keys_of(self, images: Images) -> dict[str, int | None]:
        longest = images.vision.count("image_size")  # the side to which an image is scaled before it is cut
        if isinstance(size := images.processor.get("size"), dict):
            longest = images.processor.count("longest_edge", longest, size)
        scale = images.whole.count("scale_factor", 2)
        return {"vision.projector.scale_factor": scale, "vision.preproc_image_size": longest}


class SmolVlm(Idefics3):
    """Idefics 3 under another name."""

    model_type = "smolvlm"


FAMILY = GgufFamily((SmolLm3(),), vision=(Idefics3(), SmolVlm()))
