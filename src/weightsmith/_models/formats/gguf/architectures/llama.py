"""Llama and Mixtral, whose GGUF files have one name."""

from __future__ import annotations

from typing import Any, ClassVar

from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture, GgufFamily, all_or_none
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, MIXTRAL_EXPERTS, MLP_NORM
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys


class Llama(GgufArchitecture):
    """Llama, and Mistral's first models, which llama.cpp calls so, too."""

    name = "llama"
    class_name = "LlamaForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral")
    factored = True
    rotated = True
    scaled = True

    def put_heads(self, config: GgufConfig, keys: GgufKeys) -> None:
        if config.get("head_dim") is not None:
            super().put_heads(config, keys)

    def take_tensors(self, config: dict[str, Any], contents: Contents, where: str) -> None:
        attention, mlp = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")
        config["attention_bias"] = all_or_none(contents.shapes, attention, where)
        config["mlp_bias"] = all_or_none(contents.shapes, mlp, where)


class Mixtral(Llama):
    """Llama with experts."""

    class_name = "MixtralForCausalLM"
    model_types = ("mixtral",)
    layer = {**ATTENTION, **MLP_NORM, "ffn_gate_inp": "block_sparse_moe.gate", **MIXTRAL_EXPERTS}
    experts = "num_local_experts"

    def take_tensors(self, config: dict[str, Any], contents: Contents, where: str) -> None:
        """Mixtral has no biases."""


FAMILY = GgufFamily((Llama(), Mixtral()))
