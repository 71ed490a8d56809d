"""Jina Embeddings 3: XLM-RoBERTa with RoPE, in the form of transformers, without the adapters of its tasks."""

from __future__ import annotations

from weightsmith._models.formats.gguf.base.architecture import GgufFamily
from weightsmith._models.formats.gguf.base.encoder import Encoder


class JinaEmbeddings3(Encoder):
    """Jina Embeddings 3."""

    name = "jina-bert-v3"
    class_name = "JinaEmbeddingsV3Model"
    model_types = ("jina_embeddings_v3",)
    modules = ("roberta.",)
    layers = "encoder.layers."
    layer = {
        "attn_qkv": "mixer.Wqkv",
        "attn_output": "mixer.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
    }
    ends = {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
    }
    defaults = {"layer_norm_eps": 1e-5, "pad_token_id": 1, "type_vocab_size": 1, "rope_theta": 20_000.0}
    rotary = True
    padded = True


FAMILY = GgufFamily((JinaEmbeddings3(),))
