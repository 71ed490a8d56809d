"""Apertus, whose MLPs have no gate, and an activation with numbers that are trained in each layer (xIELU)."""

from __future__ import annotations

from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture, GgufFamily, KeyTensor
from weightsmith._models.formats.gguf.base.tensors import HEAD_NORMS, PROJECTIONS, UNGATED_MLP


class Apertus(GgufArchitecture):
    """Apertus."""

    name = "apertus"
    class_name = "ApertusForCausalLM"
    model_types = ("apertus",)
    layer = {
        **{**PROJECTIONS, **HEAD_NORMS, **UNGATED_MLP},
        **{"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    }
    in_keys = {
        **{f"xielu.{name}": KeyTensor(f"mlp.act_fn.{name}", (1,)) for name in ("alpha_n", "alpha_p")},
        **{f"xielu.{name}": KeyTensor(f"mlp.act_fn.{name}") for name in ("beta", "eps")},
    }
    fixed = {"attention_bias": False, "mlp_bias": False, "qk_norm": True, "post_norm": False}
    activation = "xielu"
    scaled = True


FAMILY = GgufFamily((Apertus(),))
