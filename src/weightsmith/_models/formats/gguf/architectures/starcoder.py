"""StarCoder 2."""

from __future__ import annotations

from weightsmith._models.formats.gguf.base.architecture import GELU, GgufArchitecture, GgufFamily
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, MLP_NORM


class StarCoder2(GgufArchitecture):
    """StarCoder 2."""

    name = "starcoder2"
    class_name = "Starcoder2ForCausalLM"
    model_types = ("starcoder2",)
    square = True
    layer = {**ATTENTION, **MLP_NORM, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    fixed = {"use_bias": True}
    eps = ("attention.layer_norm_epsilon", "norm_epsilon")
    activation = GELU


FAMILY = GgufFamily((StarCoder2(),))
