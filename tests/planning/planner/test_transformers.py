"""Real models of many architectures, merged and loaded by transformers with no missing, unexpected or mismatched key."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests import zoo

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says of tiny models is not our concern


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def merged(recipe: dict[str, Any], out: Path) -> weightsmith.Merged:
    return weightsmith.merge(recipe, out, fsync=False)


def tensors(folder: Path) -> dict[str, np.ndarray]:
    with weightsmith.open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.specs}


SAMPLE = frozenset("bart bert gemma3-vl gpt2 gpt-oss llama llama-tied mamba mixtral qwen2-vl t5 whisper".split())
"""Models that every run merges: one of each kind. The others are merged in a sweep."""


def some(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.sweep) for name in names]


def test_the_sample_is_of_models() -> None:
    assert SAMPLE <= zoo.ZOO.keys()


@pytest.mark.matrix("llama", "mixtral", "t5", "gemma3-vl")
@pytest.mark.slow
@pytest.mark.parametrize("name", some(zoo.ZOO))
def test_the_mean_of_two_models_loads_and_is_the_mean(name: str, tmp_path: Path) -> None:
    a, b = zoo.save(name, tmp_path / "a", 1), zoo.save(name, tmp_path / "b", 2)
    models = [{"model": str(m), "parameters": {"weight": 0.5}} for m in (a, b)]
    done = merged({"merge_method": "linear", "models": models}, tmp_path / "out")
    _, info = zoo.load(name, tmp_path / "out")
    assert info == {}
    first, second, out = tensors(a), tensors(b), tensors(tmp_path / "out")
    assert out.keys() == first.keys()
    assert done.plan.dropped == ()
    assert done.warnings == ()
    for key, value in out.items():
        assert value.dtype == first[key].dtype
        mean = (first[key].astype(np.float64) + second[key].astype(np.float64)) / 2
        assert np.array_equal(value, mean.astype(value.dtype)), key


def cut(model: Path, start: int, end: int) -> dict[str, Any]:
    return {"model": str(model), "layer_range": [start, end]}


def passthrough(*slices: list[dict[str, Any]] | dict[str, Any], **options: Any) -> dict[str, Any]:
    return {
        "merge_method": "passthrough",
        "slices": [{"sources": s if isinstance(s, list) else [s]} for s in slices],
        **options,
    }


STACKS = "llama qwen2 qwen3 gemma2 gemma3-text mixtral qwen3-moe gpt-oss gpt2 gpt-neox mamba bert".split()


@pytest.mark.long
@pytest.mark.parametrize("name", some(STACKS))
def test_a_stack_of_two_models_loads_with_the_right_layers(name: str, tmp_path: Path) -> None:
    a, b = zoo.save(name, tmp_path / "a", 1), zoo.save(name, tmp_path / "b", 2)
    merged(passthrough(cut(a, 0, 2), cut(b, 1, 2), cut(a, 0, 1), cut(b, 1, 2)), tmp_path / "out")
    model, info = zoo.load(name, tmp_path / "out")
    assert info == {}
    first, second = zoo.load(name, a)[0], zoo.load(name, b)[0]
    expected = [layers(first)[0], layers(first)[1], layers(second)[1], layers(first)[0], layers(second)[1]]
    assert len(layers(model)) == 5
    for layer, source in zip(layers(model), expected, strict=True):
        assert layer.state_dict().keys() == source.state_dict().keys()
        assert all(torch.equal(t, source.state_dict()[n]) for n, t in layer.state_dict().items())


def layers(model: Any) -> Any:
    """The longest list of layers of a model."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(lists, key=lambda m: (len(m), sum(1 for _ in m.modules())))


@pytest.mark.reader
@pytest.mark.slow
def test_a_stack_has_the_embedding_of_the_first_model_and_the_head_of_the_last(tmp_path: Path) -> None:
    a, b = zoo.save("llama", tmp_path / "a", 1), zoo.save("llama", tmp_path / "b", 2)
    merged(passthrough(cut(a, 0, 2), cut(b, 0, 2)), tmp_path / "out")
    first, second, out = (zoo.load("llama", folder)[0] for folder in (a, b, tmp_path / "out"))
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        hidden = first.model.embed_tokens(tokens)
        position = first.model.rotary_emb(hidden, torch.arange(8)[None])
        mask = torch.full((1, 1, 8, 8), -torch.inf, dtype=hidden.dtype).triu(1)
        for layer in [*first.model.layers, *second.model.layers]:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=position)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        expected = second.lm_head(second.model.norm(hidden))
        assert torch.allclose(out(tokens).logits.float(), expected.float(), atol=1e-2)


@pytest.mark.reader
@pytest.mark.slow
def test_slices_that_merge_two_models_load(tmp_path: Path) -> None:
    a, b = zoo.save("qwen2", tmp_path / "a", 1), zoo.save("qwen2", tmp_path / "b", 2)
    recipe = passthrough([cut(a, 0, 2), cut(b, 0, 2)], [cut(a, 1, 2), cut(b, 1, 2)])
    recipe |= {"merge_method": "slerp", "base_model": str(a), "parameters": {"t": [0, 1]}}
    merged(recipe, tmp_path / "out")
    model, info = zoo.load("qwen2", tmp_path / "out")
    assert (info, len(model.model.layers)) == ({}, 3)
    first, second, out = tensors(a), tensors(b), tensors(tmp_path / "out")
    q = "model.layers.{}.self_attn.q_proj.weight"
    assert np.array_equal(out[q.format(0)], first[q.format(0)])  # t = 0
    assert np.array_equal(out[q.format(1)], second[q.format(1)])  # t = 1
    assert np.array_equal(out[q.format(2)], second[q.format(1)])  # a slice of one layer: t = 1
    assert np.array_equal(out["lm_head.weight"], first["lm_head.weight"])  # outside the layers: t = 0


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-vl", "gemma3-vl", "llava"])
def test_slices_of_a_vision_language_model_load(name: str, tmp_path: Path) -> None:
    a, b = zoo.save(name, tmp_path / "a", 1), zoo.save(name, tmp_path / "b", 2)
    done = merged(passthrough(cut(a, 0, 2), cut(b, 0, 2)), tmp_path / "out")
    model, info = zoo.load(name, tmp_path / "out")
    assert info == {}
    assert model.config.text_config.num_hidden_layers == 4
    first, out = tensors(a), tensors(tmp_path / "out")
    towers = [n for n in out if "vis" in n]
    assert towers
    assert all(np.array_equal(out[n], first[n]) for n in towers)
    assert any("'slices' is about the layers of one module" in str(w) for w in done.warnings)


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plain", "config_class"),
    [("llava", "LlamaForCausalLM", "LlamaConfig"), ("gemma3-vl", "Gemma3ForCausalLM", "Gemma3TextConfig")],
)
@pytest.mark.parametrize("how", ["models", "first", "modules"])
def test_a_plain_language_model_merges_into_a_vision_language_model(
    name: str, plain: str, config_class: str, how: str, tmp_path: Path
) -> None:
    a = zoo.save(name, tmp_path / "a", 1)
    sizes = {k: v for k, v in zoo.ZOO[name][2]["text_config"].items() if k != "model_type"}
    b = zoo.save_as(plain, config_class, sizes, tmp_path / "b", 2)
    models = [{"model": str(a)}, {"model": str(b)}]
    recipe: dict[str, Any] = {"merge_method": "linear", "parameters": {"weight": 1}}
    recipe |= {
        "models": {"models": models},
        "first": {"models": models[::-1]},
        "modules": {"modules": {"text_decoder": {"models": models}}},
    }[how]
    merged(recipe, tmp_path / "out")
    _, info = zoo.load(name, tmp_path / "out")
    assert info == {}
    vlm, text, out = tensors(a), tensors(b), tensors(tmp_path / "out")
    assert out.keys() == vlm.keys()
    halves = 0
    for key, value in out.items():
        ends = [n for n in text if f".{key}".endswith(f".{n.removeprefix('model.')}") and "vision" not in key]
        other = text[ends[0]] if ends else None
        expected = vlm[key] if other is None else (vlm[key].astype(np.float64) + other.astype(np.float64)) / 2
        halves += other is not None
        assert np.array_equal(value, expected.astype(value.dtype)), key
    assert halves == len(text)


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.parametrize("tied_base", [True, False])
def test_a_tied_and_an_untied_model_have_the_logits_of_both(tied_base: bool, tmp_path: Path) -> None:
    tied = zoo.save("llama-tied", tmp_path / "a", 1, dtype="float32")
    untied = zoo.save("llama", tmp_path / "b", 2, dtype="float32")
    models = (tied, untied) if tied_base else (untied, tied)
    recipe = {"merge_method": "linear", "models": [{"model": str(m)} for m in models], "parameters": {"weight": 1}}
    merged(recipe, tmp_path / "out")
    model, info = zoo.load("llama", tmp_path / "out")
    assert info == {}
    assert model.config.tie_word_embeddings is False
    a, b = tensors(tied), tensors(untied)
    head = (a["model.embed_tokens.weight"] + b["lm_head.weight"]) / 2
    assert np.allclose(model.lm_head.weight.detach().numpy(), head)
    # The same by another road: the mean of the two loaded models, untied.
    reference = zoo.load("llama", untied)[0]
    state = {n: (torch.from_numpy(a.get(n, a["model.embed_tokens.weight"])) + torch.from_numpy(b[n])) / 2 for n in b}
    reference.load_state_dict(state)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, reference(tokens).logits, atol=1e-5)


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-vl", "gemma3-vl"])
def test_a_flag_in_the_text_part_of_a_vision_language_model_is_followed(name: str, tmp_path: Path) -> None:
    arguments = zoo.ZOO[name][2]
    text = arguments["text_config"]

    def save(folder: Path, seed: int, tie: bool) -> Path:
        changed = {"tie_word_embeddings": tie, "text_config": {**text, "tie_word_embeddings": tie}}
        return zoo.save(name, folder, seed, **changed)

    a, b = save(tmp_path / "a", 1, True), save(tmp_path / "b", 2, False)
    head, embedding = (next(n for n in tensors(b) if n.endswith(e)) for e in ("lm_head.weight", "embed_tokens.weight"))
    assert head not in tensors(a)
    recipe = {"merge_method": "linear", "models": [{"model": str(m)} for m in (a, b)], "parameters": {"weight": 1}}
    merged(recipe, tmp_path / "out")
    model, info = zoo.load(name, tmp_path / "out")
    assert info == {}
    out = tensors(tmp_path / "out")
    assert not np.array_equal(out[head], out[embedding])
    assert torch.equal(model.lm_head.weight.float(), torch.from_numpy(out[head].astype(np.float32)))


@pytest.mark.reader
@pytest.mark.slow
def test_modules_of_an_encoder_decoder_load(tmp_path: Path) -> None:
    a, b = zoo.save("t5", tmp_path / "a", 1), zoo.save("t5", tmp_path / "b", 2)
    both = {"models": [{"model": str(m)} for m in (a, b)]}
    stack = [{"sources": [cut(a, 0, 2), cut(b, 0, 2)]}, {"sources": [cut(a, 1, 2), cut(b, 1, 2)]}]
    recipe = {"merge_method": "linear", "modules": {"encoder": both, "decoder": {"slices": stack}}, "parameters": {"weight": 1}}
    done = merged(recipe, tmp_path / "out")
    model, info = zoo.load("t5", tmp_path / "out")
    assert info == {}
    assert (len(model.encoder.block), len(model.decoder.block)) == (2, 3)
    assert any("module shared is not mentioned, and copied from" in str(w) for w in done.warnings)
    assert np.array_equal(tensors(tmp_path / "out")["shared.weight"], tensors(a)["shared.weight"])


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.parametrize("method", ["ties", "task_arithmetic"])
def test_task_vectors_of_experts_load(method: str, tmp_path: Path) -> None:
    a, b, c = (zoo.save("gpt-oss", tmp_path / n, i) for i, n in enumerate("abc"))
    models = [{"model": str(m), "parameters": {"density": 0.5} if method == "ties" else {}} for m in (b, c)]
    recipe = {"merge_method": method, "base_model": str(a), "models": models, "parameters": {"weight": 1}}
    done = merged(recipe, tmp_path / "out")
    assert zoo.load("gpt-oss", tmp_path / "out")[1] == {}
    stacked = [s for s in done.plan.steps if len(s.out.shape) == 3]
    assert stacked
    # A piece for each expert where statistics are of matrices; one position at a time needs none.
    assert {len(s.leaves) for s in stacked} == ({4} if method == "ties" else {1})


@pytest.mark.slow
def test_a_classifier_and_a_language_model_keep_the_classifiers_head(tmp_path: Path) -> None:
    arguments = {**zoo.SIZES, "num_labels": 3}
    a = zoo.save_as("LlamaForSequenceClassification", "LlamaConfig", arguments, tmp_path / "a", 1)
    b = zoo.save_as("LlamaForSequenceClassification", "LlamaConfig", arguments, tmp_path / "b", 2)
    bare = zoo.save_as("LlamaModel", "LlamaConfig", zoo.SIZES, tmp_path / "c", 3)
    for models, owner in (((a, bare), a), ((a, b), None)):
        recipe = {"merge_method": "linear", "models": [{"model": str(m)} for m in models], "parameters": {"weight": 1}}
        done = weightsmith.merge(recipe, tmp_path / "out", fsync=False, overwrite=True)
        assert zoo.load_as("LlamaForSequenceClassification", tmp_path / "out")[1] == {}
        if owner:
            assert np.array_equal(tensors(tmp_path / "out")["score.weight"], tensors(owner)["score.weight"])
            assert "1 tensor that only" in str(done.warnings[0])


# ---- files of one architecture that store different tensors

GEMMA = {
    "gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {"global_head_dim": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
    ),
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 3,
    "sliding_window": 16,
}


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.parametrize("name", GEMMA)
@pytest.mark.parametrize("base", ["full", "bare"])
def test_gemma_merges_with_files_that_hold_keys_and_values_of_sharing_layers(name: str, base: str, tmp_path: Path) -> None:
    model_class, config_class, arguments = GEMMA[name]
    bare = [zoo.save_as(model_class, config_class, {**SMALL, **arguments}, tmp_path / f"m{k}", k) for k in range(2)]
    full = tmp_path / "full"
    shutil.copytree(bare[0], full)
    held = safetensors_torch.load_file(full / "model.safetensors")
    for i in (3, 4, 5):  # as in Google's files
        for part in ("k_proj", "v_proj", "k_norm"):
            source = held[f"model.layers.{2 if i == 5 else 1}.self_attn.{part}.weight"]
            held[f"model.layers.{i}.self_attn.{part}.weight"] = torch.randn_like(source)
    safetensors_torch.save_file(held, full / "model.safetensors", metadata={"format": "pt"})
    order = [full, bare[1]] if base == "full" else [bare[1], full]
    models = [{"model": str(m), "parameters": {"weight": 0.5}} for m in order]
    merged({"merge_method": "linear", "models": models, "dtype": "float32"}, tmp_path / "out")
    model, info = zoo.load_as(model_class, tmp_path / "out")
    assert info == {}
    expected, _ = zoo.load_as(model_class, bare[1])
    first, _ = zoo.load_as(model_class, bare[0])
    mean = {key: (value.float() + first.state_dict()[key].float()) / 2 for key, value in expected.state_dict().items()}
    ids = torch.arange(1, 13)[None]
    expected.float().load_state_dict(mean)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=1e-4, rtol=1e-4)
