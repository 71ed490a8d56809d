"""StableLM 2 and 3."""

from __future__ import annotations

from weightsmith._models.formats.gguf.base.architecture import LAYER_NORM, UNTIED, GgufArchitecture, GgufFamily


class StableLm(GgufArchitecture):
    """StableLM."""

    name = "stablelm"
    class_name = "StableLmForCausalLM"
    model_types = ("stablelm",)
    square = True
    fixed = {**UNTIED, "qk_layernorm": False}
    eps = LAYER_NORM
    partial = 0.25


FAMILY = GgufFamily((StableLm(),))
