"""Mistral's models after Mixtral, and Pixtral's vision half."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._base.errors import Unsupported
from weightsmith._models.formats.gguf.architectures.deepseek import DeepseekV2
from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture, GgufFamily
from weightsmith._models.formats.gguf.base.rope import ATTENTION_FACTOR, USE_ORIGINAL, share_turned, stated_factor, yarn_growth
from weightsmith._models.formats.gguf.base.tensors import EXPERTS
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues
from weightsmith._models.formats.gguf.base.vision import GELU_OR_SILU, VIT_LARGE, Images, VisionHalf, attention, gated

_YARN = {"rope.scaling.yarn_log_multiplier": "mscale_all_dim", "attention.temperature_scale": "llama_4_scaling_beta"}
"""Numbers of Ministral's YaRN, and how its queries grow with the position."""


class Ministral3(GgufArchitecture):
    """Ministral 3, whose RoPE is always YaRN's."""

    name = "mistral3"
    class_name = "Ministral3ForCausalLM"
    model_types = ("ministral3",)
    factored = True
    rotated = True

    def put_rope(self, config: GgufConfig, keys: GgufKeys) -> None:
        rope = self.rope(config)
        config.need("rope_type", rope["rope_type"], "yarn")
        config.need("mscale", rope.get("mscale"), rope.get("mscale_all_dim"))
        for name, setting in _YARN.items():
            keys.f32(name, config.number(setting, None, rope))
        super().put_rope(config, keys)

    def turned_by(self, config: GgufConfig, rope: Mapping[str, Any]) -> float | None:
        return _turned_by(config.number("factor", None, rope), config.number("mscale_all_dim", None, rope))

    def take_rope(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        super().take_rope(values, config, contents)
        if (scaling := config.get("rope_scaling", {})) and scaling["rope_type"] == "yarn":
            scaling |= {setting: values.float32(name) for name, setting in _YARN.items()}
            scaling["mscale"] = scaling["mscale_all_dim"]
            if ATTENTION_FACTOR in values:
                theirs = _turned_by(scaling["factor"], scaling["mscale_all_dim"])
                scaling["attention_factor"] = stated_factor(values.number(ATTENTION_FACTOR), theirs)


def _turned_by(factor: float, share: float) -> float:
    """What llama.cpp multiplies sines and cosines by; it takes 1 for `mscale`."""
    return yarn_growth(factor) / yarn_growth(factor, share)


_SCALE, _LENGTH = "attention.temperature_scale", "attention.temperature_length"
_BETA, _SHARE = "llama_4_scaling_beta", "partial_rotary_factor"


class Mistral4(DeepseekV2):
    """Mistral Small 4: DeepSeek-V2's attention with Ministral's YaRN, and stacked experts."""

    name = "mistral4"
    class_name = "Mistral4ForCausalLM"
    model_types = ("mistral4",)
    layer = {name: module for name, module in DeepseekV2.layer.items() if name not in EXPERTS}
    bare = {"ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj", "ffn_down_exps.weight": "mlp.experts.down_proj"}
    fixed = {"attention_bias": False, "rope_interleave": True}

    def check_groups(self, config: GgufConfig) -> None:
        """llama.cpp chooses groups as Mistral 4 does."""

    def put_rope(self, config: GgufConfig, keys: GgufKeys) -> None:
        rope = self.rope(config)
        config.need("rope_type", rope["rope_type"], "yarn")
        super().put_rope(config, keys)
        if rope.get(_BETA) != 0:  # llama.cpp's converter leaves it out
            keys.f32(_SCALE, config.number(_BETA, None, rope))
            keys.u32(_LENGTH, config.count("original_max_position_embeddings", within=rope))

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        super().take_more(values, config, contents)
        turned = config["qk_rope_head_dim"]
        width = config["head_dim"] = config["qk_nope_head_dim"] + turned
        rope = {"rope_theta": config.pop("rope_theta"), **config.pop("rope_scaling", {"rope_type": "default"})}
        beta = values.float32(_SCALE) if _SCALE in values else 0.0
        if beta and not values.equals(_LENGTH, rope.get("original_max_position_embeddings", 0)):
            what = f"{values.prefix}{_LENGTH} is not the context before YaRN, as transformers has it"
            raise Unsupported(what, where=values.where, fix=USE_ORIGINAL)
        config["rope_parameters"] = {**rope, _BETA: beta, _SHARE: share_turned(turned, width)}


class Pixtral(VisionHalf):
    """Pixtral, as LLaVA's classes have it."""

    model_type = "llava"
    vision_type = "pixtral"
    name = "pixtral"
    blocks = "vision_tower.transformer.layers."
    layer = {"ln1": "attention_norm", "ln2": "ffn_norm", **attention("attention", "o_proj"), **gated("feed_forward")}
    ends = {
        "v.patch_embd": "vision_tower.patch_conv",
        "v.pre_ln": "vision_tower.ln_pre",
        "mm.1": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
    }
    activations = GELU_OR_SILU
    rotated = True
    token = "[IMG_BREAK]"
    defaults = {**VIT_LARGE, "image_size": 1024, "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-5}

    def check(self, images: Images) -> None:
        whole = images.whole
        whole.need("vision_feature_layer", whole.get("vision_feature_layer", -2), -1)  # transformers' default is another
        whole.need("vision_feature_select_strategy", whole.get("vision_feature_select_strategy", "default"), "full")
        whole.need_all({"projector_hidden_act": "gelu"})


class Mistral3Vision(Pixtral):
    """Pixtral in Mistral Small 3.1 and later, where several patches become one row."""

    model_type = "mistral3"
    ends = {
        **Pixtral.ends,
        "mm.input_norm": "multi_modal_projector.norm",
        "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
    }

    def check(self, images: Images) -> None:
        images.whole.need_all({"vision_feature_layer": -1, "projector_hidden_act": "gelu"})

    def keys_of(self, images: Images) -> dict[str, int | None]:
        return {"vision.spatial_merge_size": images.whole.count("spatial_merge_size", 2)}


FAMILY = GgufFamily((Ministral3(), Mistral4()), vision=(Pixtral(), Mistral3Vision()))
