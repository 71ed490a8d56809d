"""Merged models load with sentence-transformers and diffusers, and compute what a merge of their modules by torch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import weightsmith

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefgh")]
TEXTS = ["abc d", "ef"]


def linear(a: Path, b: Path) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": str(m), "parameters": {"weight": 0.5}} for m in (a, b)]}


def bert(folder: Path, kind: str) -> str:
    """A tiny BERT with a tokenizer."""
    transformers = pytest.importorskip("transformers")
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "num_labels": 1}
    config = transformers.BertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=32, **sizes)
    getattr(transformers, kind)(config).save_pretrained(folder)
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


def dense_embedder(st: Any, base: str, torch: Any) -> Any:
    modules = pytest.importorskip("sentence_transformers.models")
    parts = [modules.Transformer(base), modules.Pooling(16, "cls"), modules.Dense(16, 8, activation_function=torch.nn.Tanh())]
    return st.SentenceTransformer(modules=[*parts, modules.Normalize()], device="cpu")


def sparse_encoder(st: Any, base: str, _torch: Any) -> Any:
    modules = pytest.importorskip("sentence_transformers.sparse_encoder.models")
    return st.SparseEncoder(modules=[modules.MLMTransformer(base), modules.SpladePooling()], device="cpu")


def cross_encoder(st: Any, base: str, _torch: Any) -> Any:
    return st.CrossEncoder(base, device="cpu")


def multi_vector_encoder(st: Any, base: str, _torch: Any) -> Any:
    """ColBERT: a vector for each token, behind a dense module."""
    return st.MultiVectorEncoder(base, device="cpu")


KINDS = {
    "MultiVectorEncoder": ("BertModel", multi_vector_encoder),
    "SentenceTransformer": ("BertModel", dense_embedder),
    "SparseEncoder": ("BertForMaskedLM", sparse_encoder),
    "CrossEncoder": ("BertForSequenceClassification", cross_encoder),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_computes_what_a_merge_by_torch_does(kind: str, tmp_path: Path) -> None:
    torch, st = pytest.importorskip("torch"), pytest.importorskip("sentence_transformers")
    base_kind, build = KINDS[kind]
    base = bert(tmp_path / "bert", base_kind)
    states = []
    for seed, name in enumerate("ab"):
        model, random = build(st, base, torch), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=random))
        model.save_pretrained(str(tmp_path / name))
        states.append(model.state_dict())
    done = weightsmith.merge(linear(tmp_path / "a", tmp_path / "b"), tmp_path / "out", fsync=False)
    model.load_state_dict({k: (v + states[1][k]) / 2 if v.is_floating_point() else v for k, v in states[0].items()})
    merged = getattr(st, kind)(str(done.out), device="cpu")
    assert [type(module).__name__ for module in merged] == [type(module).__name__ for module in model]
    if kind == "CrossEncoder":
        actual, expected = (encoder.predict([TEXTS], convert_to_tensor=True) for encoder in (merged, model))
    elif kind == "MultiVectorEncoder":
        assert [type(module).__name__ for module in merged][1] == "Dense"
        actual, expected = (torch.cat([torch.as_tensor(x) for x in encoder.encode(TEXTS)]) for encoder in (merged, model))
    else:
        actual, expected = (encoder.encode(TEXTS, convert_to_tensor=True) for encoder in (merged, model))
    actual, expected = (vectors.to_dense() if vectors.is_sparse else vectors for vectors in (actual, expected))
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.reader
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_diffusers_loads_its_parts(shard_bytes: int, tmp_path: Path) -> None:
    torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
    sizes = {"block_out_channels": [8, 16], "latent_channels": 4, "norm_num_groups": 4}
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    states = []
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        model = diffusers.AutoencoderKL(in_channels=3, out_channels=3, **sizes, **blocks)
        model.save_pretrained(tmp_path / name)
        states.append(model.state_dict())
    recipe = linear(tmp_path / "a", tmp_path / "b")
    done = weightsmith.merge(recipe, tmp_path / "out", max_shard_bytes=shard_bytes, fsync=False)
    merged = diffusers.AutoencoderKL.from_pretrained(done.out).state_dict()
    for name, weight in states[0].items():
        torch.testing.assert_close(merged[name], (weight + states[1][name]) / 2)
