"""Encoders of which transformers has no class, as GGUF files. What they compute is written here, after their authors' code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional

import weightsmith
from tests import encoder_help, llama_cpp
from tests.encoder_help import BERT_NAMES, ROBERTA_NAMES, unigram, wordpiece
from tests.gguf_help import stored
from tests.llama_cpp import needs_llama_cpp
from tests.mini import write_checkpoint
from tests.tokenizer_help import SAMPLES
from weightsmith._base.errors import PlanError

Tensors = Mapping[str, torch.Tensor]
HEADS = 4


def norm(x: torch.Tensor, tensors: Tensors, name: str, eps: float = 1e-12) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], eps)


def linear(x: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def embedded(tokens: Sequence[int], tensors: Tensors) -> torch.Tensor:
    return tensors["embeddings.word_embeddings.weight"][list(tokens)] + tensors["embeddings.token_type_embeddings.weight"][0]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Attention to the whole text. q, k, v: [tokens, hidden]; bias: [heads, tokens, tokens]"""
    q, k, v = (x.view(len(x), HEADS, -1).transpose(0, 1) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q[None], k[None], v[None], None if bias is None else bias[None])[0]
    return out.transpose(0, 1).reshape(out.shape[1], -1)


# ---- Jina Embeddings 2


def jina(tokens: Sequence[int], tensors: Tensors) -> torch.Tensor:
    """JinaBertModel of jinaai/jina-bert-implementation."""
    at = torch.arange(len(tokens))
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)])
    alibi = -slopes[:, None, None] * (at[:, None] - at).abs()
    x = norm(embedded(tokens, tensors), tensors, "embeddings.LayerNorm")
    for layer in (f"encoder.layer.{number}." for number in range(2)):
        q, k, v = (linear(x, tensors, f"{layer}attention.self.{name}") for name in ("query", "key", "value"))
        attended = linear(attend(q, k, v, alibi), tensors, f"{layer}attention.output.dense")
        x = norm(x + attended, tensors, f"{layer}attention.output.LayerNorm")
        gate, up = linear(x, tensors, f"{layer}mlp.gated_layers").chunk(2, -1)
        x = norm(x + linear(functional.gelu(gate) * up, tensors, f"{layer}mlp.wo"), tensors, f"{layer}mlp.layernorm")
    return x


def save_jina(folder: Path) -> Path:
    encoder_help.save("BertModel", "BertConfig", wordpiece(), folder, BERT_NAMES)
    with weightsmith.open_checkpoint(folder) as opened:
        bert, config = {name: opened.read(name) for name in opened.specs}, dict(opened.config or {})
    random = np.random.default_rng(3)
    tensors = {}
    for name, values in bert.items():
        if ".intermediate.dense.weight" in name:
            gated = np.concatenate([values, random.normal(0, 0.05, values.shape)]).astype(np.float32)
            tensors[name.replace("intermediate.dense", "mlp.gated_layers")] = gated
        elif ".intermediate." not in name and "position_embeddings" not in name:
            inside = name if ".attention." in name else name.replace("output.dense", "mlp.wo")
            tensors[inside if ".attention." in name else inside.replace("output.LayerNorm", "mlp.layernorm")] = values
    config |= {"architectures": ["JinaBertForMaskedLM"], "position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    config |= {"max_position_embeddings": 8192, "layer_norm_eps": 1e-12}
    return write_checkpoint(folder, tensors, config)


# ---- Nomic Embed 2

EXPERTS, USED, BASE = 4, 2, 700.0


def rotated(x: torch.Tensor) -> torch.Tensor:
    """RoPE, of halves. x: [tokens, hidden]"""
    heads = x.view(len(x), HEADS, -1)
    half = heads.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / BASE ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).reshape(x.shape)


def experts(x: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    """The sum of the best experts, with weights that are not normalised."""
    weights, best = linear(x, tensors, f"{name}.router.layer").softmax(-1).topk(USED, -1)
    w1, w2 = (tensors[f"{name}.experts.mlp.{part}"].view(EXPERTS, -1, x.shape[-1]) for part in ("w1", "w2"))
    rows = []
    for row, row_weights, numbers in zip(x, weights, best, strict=True):
        outs = [functional.gelu(row @ w1[number].T) @ w2[number] for number in numbers.tolist()]
        rows.append(sum(weight * out for weight, out in zip(row_weights, outs, strict=True)))
    return torch.stack(rows)


def nomic(tokens: Sequence[int], tensors: Tensors) -> torch.Tensor:
    """NomicBertModel of nomic-ai/nomic-bert-2048, with experts in every second layer."""
    x = norm(embedded(tokens, tensors), tensors, "emb_ln", 1e-5)
    for number in range(4):
        layer = f"encoder.layers.{number}."
        q, k, v = linear(x, tensors, f"{layer}attn.Wqkv").chunk(3, -1)
        attended = linear(attend(rotated(q), rotated(k), v), tensors, f"{layer}attn.out_proj")
        x = norm(x + attended, tensors, f"{layer}norm1", 1e-5)
        if number % 2:
            out = experts(x, tensors, f"{layer}mlp")
        else:
            out = linear(functional.gelu(linear(x, tensors, f"{layer}mlp.fc1")), tensors, f"{layer}mlp.fc2")
        x = norm(x + out, tensors, f"{layer}norm2", 1e-5)
    return x


def save_nomic(folder: Path) -> Path:
    hidden, inner, layers = 32, 48, 4
    encoder_help.save("NomicBertModel", "NomicBertConfig", unigram(), folder, ROBERTA_NAMES)
    with weightsmith.open_checkpoint(folder) as opened:
        tokens = opened.specs["embeddings.word_embeddings.weight"].shape[0]
    random = np.random.default_rng(4)
    tensors: dict[str, Any] = {}

    def add(name: str, *shape: int, size: float = 0.3) -> None:
        tensors[name] = random.normal(0, size, shape).astype(np.float32)

    def add_norm(name: str) -> None:
        add(f"{name}.bias", hidden, size=0.1)
        tensors[f"{name}.weight"] = random.normal(1, 0.1, hidden).astype(np.float32)

    add("embeddings.word_embeddings.weight", tokens, hidden)
    add("embeddings.token_type_embeddings.weight", 1, hidden)
    add_norm("emb_ln")
    for number in range(layers):
        layer = f"encoder.layers.{number}."
        modules = {"attn.Wqkv": (3 * hidden, hidden), "attn.out_proj": (hidden, hidden)}
        if number % 2:
            add(f"{layer}mlp.router.layer.weight", EXPERTS, hidden)
            add(f"{layer}mlp.experts.mlp.w1", EXPERTS * inner, hidden)
            add(f"{layer}mlp.experts.mlp.w2", EXPERTS * inner, hidden)
        else:
            modules |= {"mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}
        for module, shape in modules.items():
            add(f"{layer}{module}.weight", *shape)
            add(f"{layer}{module}.bias", shape[0], size=0.1)
        add_norm(f"{layer}norm1")
        add_norm(f"{layer}norm2")
    config = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": tokens, "type_vocab_size": 1}
    config |= {"n_layer": layers, "n_head": HEADS, "n_embd": hidden, "n_inner": inner, "layer_norm_epsilon": 1e-5}
    config |= {"rotary_emb_base": BASE, "activation_function": "gelu", "n_positions": 2048, "max_trained_positions": 2048}
    config |= {"moe_every_n_layers": 2, "moe_top_k": USED, "num_experts": EXPERTS, "moe_normalize_expert_weights": False}
    config |= dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True) | {"pad_token_id": 1, "prenorm": False}
    return write_checkpoint(folder, tensors, config)


# ---- all of them

ENCODERS: dict[str, tuple[Callable[[Path], Path], Callable[[Sequence[int], Tensors], torch.Tensor], str]] = {
    "jina-bert-v2": (save_jina, jina, "JINA_BERT_V2"),
    "nomic-bert-moe": (save_nomic, nomic, "NOMIC_BERT_MOE"),
}


def quantize(source: Path, out: Path) -> Path:
    weightsmith.quantize(source, out, "gguf-f32", progress=False)
    return out / "model.gguf"


@pytest.mark.long
@needs_llama_cpp
@pytest.mark.parametrize("name", ENCODERS)
def test_llama_cpp_computes_what_the_authors_code_does(name: str, tmp_path: Path) -> None:
    save, compute, _ = ENCODERS[name]
    source = save(tmp_path / "m")
    path = quantize(source, tmp_path / "q")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    with weightsmith.open_checkpoint(source) as opened:
        tensors = {tensor: torch.from_numpy(opened.read(tensor).copy()) for tensor in opened.specs}
    with llama_cpp.Judge(path) as judge:
        assert [judge.tokens(text, around=True) for text in SAMPLES] == [tokenizer.encode(text).ids for text in SAMPLES]
        for text in SAMPLES:
            if tokens := tokenizer.encode(text).ids[:50]:
                expected = compute(tokens, tensors).numpy()
                # llama.cpp's GELU is an approximation, and its attention rounds to float16
                assert np.abs(judge.vectors(tokens) - expected).max() < 1e-2 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("name", ENCODERS)
def test_what_comes_back_is_what_was_written(name: str, tmp_path: Path) -> None:
    save, _, architecture = ENCODERS[name]
    source = save(tmp_path / "m")
    written = stored(quantize(source, tmp_path / "q"))
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], 8)
    with weightsmith.open_checkpoint(source) as here, weightsmith.open_checkpoint(tmp_path / "q") as back:
        kept = [tensor for tensor in here.specs if not tensor.startswith("pooler.")]
        assert list(back.specs) == kept
        for tensor in kept:
            assert np.array_equal(here.read(tensor), back.read(tensor)), tensor
            assert known.get_name(tensor, (".weight", ".bias")) in {stored_as.rpartition(".")[0] for stored_as in written} | {
                *written
            }
        before, after = here.config or {}, back.config or {}
    unlike = ("architectures", "transformers_version", "initializer_range", "use_cache", "classifier_dropout")
    unlike += ("attention_probs_dropout_prob", "hidden_dropout_prob")
    unlike += ("n_positions", "max_trained_positions") if name == "nomic-bert-moe" else ()  # the file has 512
    for key, value in before.items():
        if key not in unlike and value is not None:
            expected: Any = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            assert after.get(key, value if key in ("is_decoder", "add_cross_attention") else None) == expected, key
    assert stored(quantize(tmp_path / "q", tmp_path / "again")) == written


@pytest.mark.long
@needs_llama_cpp
@pytest.mark.parametrize("name", ENCODERS)
def test_types_and_bytes_are_those_of_llama_cpps_quantiser(name: str, tmp_path: Path) -> None:
    source = ENCODERS[name][0](tmp_path / "m")
    plain = quantize(source, tmp_path / "f32")
    for mixture, number in (("q4_k_m", 15), ("q8_0", 7)):
        weightsmith.quantize(source, tmp_path / mixture, f"gguf-{mixture}", progress=False)
        assert llama_cpp.quantize(plain, tmp_path / "theirs.gguf", number)
        ours, theirs = stored(tmp_path / mixture / "model.gguf"), stored(tmp_path / "theirs.gguf")
        assert {tensor: (kind, data) for tensor, (kind, _, data) in ours.items()} == {
            tensor: (kind, data) for tensor, (kind, _, data) in theirs.items()
        }  # a matrix of one row is a vector there


@pytest.mark.long
def test_nomics_settings_that_llama_cpp_does_not_know(tmp_path: Path) -> None:
    source = save_nomic(tmp_path / "m")
    assert gguf.GGUFReader(quantize(source, tmp_path / "q")).fields["nomic-bert-moe.context_length"].contents() == 512
    with weightsmith.open_checkpoint(source) as opened:
        tensors, config = {name: opened.read(name) for name in opened.specs}, dict(opened.config or {})
    changes = {
        "moe_normalize_expert_weights": True,
        "num_shared_experts": 1,
        "qkv_proj_bias": False,
        "activation_function": "silu",
    }
    for name, value in changes.items():
        write_checkpoint(source, tensors, {**config, name: value})
        with pytest.raises(PlanError, match=f"is {value!r}, and llama.cpp takes"):
            quantize(source, tmp_path / "x")
    biases = {f"encoder.layers.{number}.mlp.experts.bias": np.zeros(32, np.float32) for number in (1, 3)}
    write_checkpoint(source, {**tensors, **biases}, config)
    quantised = weightsmith.quantize(source, tmp_path / "biased", "gguf-f32", progress=False)
    (warning,) = (warning for warning in quantised.warnings if "left out" in str(warning))
    assert "left out, 2 tensors: biases that llama.cpp does not add" in str(warning)
    assert "they differ unless the biases are near 0" in str(warning)


def test_jinas_other_mlps_are_refused(tmp_path: Path) -> None:
    source = save_jina(tmp_path / "m")
    with weightsmith.open_checkpoint(source) as opened:
        tensors, config = {name: opened.read(name) for name in opened.specs}, dict(opened.config or {})
    for kind in ("reglu", None):
        changed = {name: value for name, value in {**config, "feed_forward_type": kind}.items() if value is not None}
        write_checkpoint(source, tensors, changed)
        with pytest.raises(PlanError, match=f"feed_forward_type is '{kind or 'original'}', and llama.cpp takes 'geglu'"):
            quantize(source, tmp_path / "q")
