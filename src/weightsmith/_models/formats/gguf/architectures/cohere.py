"""Cohere's Command R, R+, R7B and A."""

from __future__ import annotations

from weightsmith._models.formats.gguf.base.architecture import LAYER_NORM, TIED, GgufArchitecture, GgufFamily, GgufKey, Windows
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, HEAD_NORMS, MLP
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys


class Cohere(GgufArchitecture):
    """Command R and R+; heads are normalised in models of 64 layers and more."""

    name = "command-r"
    class_name = "CohereForCausalLM"
    model_types = ("cohere",)
    square = True
    layer = {**ATTENTION, **HEAD_NORMS, **MLP}
    numbers = (GgufKey("logit_scale", "logit_scale", "f32"),)
    fixed = {**TIED, "attention_bias": False}
    eps = LAYER_NORM

    def put_sizes(self, config: GgufConfig, keys: GgufKeys) -> None:
        """`max_position_embeddings` of Command R is 8,192; it was trained with the context of its tokenizer."""
        super().put_sizes(config, keys)
        if config.get("model_max_length") is not None:
            keys.u32("context_length", config.count("model_max_length"))

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        config.need("use_qk_norm", bool(config.get("use_qk_norm")), config.count("num_hidden_layers") >= 64)


class Cohere2(GgufArchitecture):
    """Command R7B and A, three of four layers of which have a window."""

    name = "cohere2"
    class_name = "Cohere2ForCausalLM"
    model_types = ("cohere2",)
    square = True
    factored = True
    layer = {**ATTENTION, **MLP}
    numbers = Cohere.numbers
    fixed = Cohere.fixed
    eps = LAYER_NORM
    windows = Windows(4)


FAMILY = GgufFamily((Cohere(), Cohere2()))
