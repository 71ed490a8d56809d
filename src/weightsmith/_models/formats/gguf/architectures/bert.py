"""BERT, and models that are it: MiniLM, BGE, E5, GTE; RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT. With a head that scores.

llama.cpp has one architecture for all of them. Of a model without a head, a file holds what makes the vectors of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from weightsmith._models.formats.gguf.base.architecture import Contents, GgufFamily
from weightsmith._models.formats.gguf.base.encoder import COUNTED, EMBEDDINGS, MASKED_HEADS, POSITIONS, Encoder, classifies
from weightsmith._models.formats.gguf.base.tensors import GATE_IN_UP, LAYER_SHAPES
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufValues

_LAYER = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_ENDS = EMBEDDINGS | POSITIONS
_FIXED = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
_DEFAULTS = {"layer_norm_eps": 1e-12, "hidden_act": "gelu", "type_vocab_size": 2}
_PADDED = {**_DEFAULTS, "pad_token_id": 1}
_HEAD = {"cls": "classifier.dense", "cls.output": "classifier.out_proj"}
_JINA_CODE = {
    "AutoConfig": "jinaai/jina-bert-implementation--configuration_bert.JinaBertConfig",
    "AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel",
}
_SCORED = {**COUNTED, **MASKED_HEADS}


class Bert(Encoder):
    """BERT, and the base of its relatives."""

    name = "bert"
    class_name = "BertModel"
    model_types: ClassVar[tuple[str, ...]] = ("bert",)
    modules: ClassVar[tuple[str, ...]] = ("bert.",)
    layer = _LAYER
    ends = _ENDS
    fixed = _FIXED
    defaults = _DEFAULTS
    vocabulary = "bert"


class JinaBert(Bert):
    """Jina Embeddings 2: BERT with ALiBi and a gated MLP. transformers has no class; config.json names the authors' code."""

    name = "jina-bert-v2"
    class_name = "JinaBertModel"
    layer = {**_LAYER, "ffn_up": "mlp.gated_layers", "ffn_down": "mlp.wo", "layer_output_norm": "mlp.layernorm"}
    shapes = {**LAYER_SHAPES, **GATE_IN_UP}
    ends = EMBEDDINGS
    fixed = {**_FIXED, "position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    defaults = {**_DEFAULTS, "feed_forward_type": "original", "position_embedding_type": "absolute"}
    vocabulary = ""

    def fits(self, config: Mapping[str, Any]) -> bool:
        names = config.get("architectures")
        jina = isinstance(names, list) and any(isinstance(name, str) and name.startswith("JinaBert") for name in names)
        return jina and super().fits(config)

    def check(self, config: GgufConfig) -> None:
        config.need("feed_forward_type", config.get("feed_forward_type"), "geglu")
        super().check(config)

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        super().take_more(values, config, contents)
        config["auto_map"] = _JINA_CODE  # without it, transformers would compute something else with its BertModel


class BertRanks(Bert):
    """BERT with a pooler and a classifier, as cross-encoders have it."""

    class_name = "BertForSequenceClassification"
    prefix = "bert."
    head = ("classifier.",)
    ranks = True
    ends = {**_ENDS, "cls": "pooler.dense", "cls.output": "classifier"}
    unused = _SCORED


class DistilBert(Encoder):
    """DistilBERT: BERT without types of tokens. Its head has another activation than llama.cpp's."""

    name = "bert"
    class_name = "DistilBertModel"
    model_types = ("distilbert",)
    modules = ("distilbert.",)
    layers = "transformer.layer."
    layer = {
        "attn_q": "attention.q_lin",
        "attn_k": "attention.k_lin",
        "attn_v": "attention.v_lin",
        "attn_output": "attention.out_lin",
        "attn_output_norm": "sa_layer_norm",
        "ffn_up": "ffn.lin1",
        "ffn_down": "ffn.lin2",
        "layer_output_norm": "output_layer_norm",
    }
    ends = {name: module for name, module in _ENDS.items() if name != "token_types"}
    renamed = {
        "num_hidden_layers": "n_layers",
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_attention_heads": "n_heads",
        "hidden_act": "activation",
    }
    defaults = {"intermediate_size": 3072}
    fixed = {"sinusoidal_pos_embds": False}
    vocabulary = "bert"

    def fits(self, config: Mapping[str, Any]) -> bool:
        return True

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**super().complete(config), "layer_norm_eps": 1e-12, "type_vocab_size": 1}

    def check(self, config: GgufConfig) -> None:
        if classifies({"architectures": config.get("architectures")}):
            config.need("the activation in the head of DistilBertForSequenceClassification", "relu", "tanh")
        super().check(config)


class XlmRoberta(Bert):
    """XLM-RoBERTa and CamemBERT, whose tokenizer is SentencePiece's Unigram."""

    class_name = "XLMRobertaModel"
    model_types = ("xlm-roberta", "camembert")
    modules = ("roberta.",)
    defaults = _PADDED
    padded = True
    vocabulary = "t5"


class XlmRobertaRanks(Bert):
    """XLM-RoBERTa with a head."""

    class_name = "XLMRobertaForSequenceClassification"
    model_types = ("xlm-roberta", "camembert")
    modules = ("roberta.",)
    prefix = "roberta."
    head = ("classifier.",)
    ranks = True
    ends = _ENDS | _HEAD
    unused = _SCORED
    defaults = _PADDED
    padded = True
    vocabulary = "t5"


class Roberta(Bert):
    """RoBERTa, whose tokenizer is GPT-2's."""

    class_name = "RobertaModel"
    model_types = ("roberta",)
    modules = ("roberta.",)
    defaults = _PADDED
    padded = True
    vocabulary = "gpt2"


class RobertaRanks(Bert):
    """RoBERTa with a head."""

    class_name = "RobertaForSequenceClassification"
    model_types = ("roberta",)
    modules = ("roberta.",)
    prefix = "roberta."
    head = ("classifier.",)
    ranks = True
    ends = _ENDS | _HEAD
    unused = _SCORED
    defaults = _PADDED
    padded = True
    vocabulary = "gpt2"


FAMILY = GgufFamily((JinaBert(), Bert(), BertRanks(), DistilBert(), XlmRoberta(), XlmRobertaRanks(), Roberta(), RobertaRanks()))
