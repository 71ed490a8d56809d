"""EuroBERT: the layers of Llama, whose tokens attend to what follows them, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture, GgufFamily
from weightsmith._models.formats.gguf.base.encoder import MASKED_HEADS, classifies
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues


class EuroBert(GgufArchitecture):
    """EuroBERT without a head."""

    name = "eurobert"
    class_name = "EuroBertModel"
    model_types = ("eurobert",)
    square = True
    encodes = True
    fixed = {"attention_bias": False, "mlp_bias": False}
    unused = MASKED_HEADS

    def fits(self, config: Mapping[str, Any]) -> bool:
        return not classifies(config)

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.put("attention.causal", "bool", False)

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        config |= {"tie_word_embeddings": False, "hidden_act": self.activation}
        mask = values.elsewhere("tokenizer.ggml.mask_token_id")
        if type(mask) is int and 0 <= mask < config["vocab_size"]:  # EuroBertConfig's default is a token of the published model
            config["mask_token_id"] = mask

    def hub_name(self, name: str) -> str | None:
        canonical = super().hub_name(name)
        return None if canonical is None else canonical.removeprefix("model.")


FAMILY = GgufFamily((EuroBert(),))
