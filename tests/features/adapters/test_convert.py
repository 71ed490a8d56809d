"""Adapters for other programs: llama.cpp's own library, PEFT and transformers are the judges."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests import llama_cpp, zoo
from tests.cli_help import Cli, cli
from tests.gguf_help import BYTE_LEVEL, tokenizer_files
from tests.llama_cpp import needs_llama_cpp
from weightsmith._base.errors import PlanError, WeightsmithError
from weightsmith._models.formats.gguf.header import read_gguf_header
from weightsmith._models.lora import open_adapter
from weightsmith._planning.planner.reopen import reopen

__all__ = ["cli"]

TOKENS = 262
SIZES = {"vocab_size": TOKENS, "max_position_embeddings": 64}
P = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"
RANK = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tiny models by name, each with a tokenizer."""
    known: dict[str, Path] = {}

    def model(name: str) -> Path:
        if name not in known:
            known[name] = zoo.save(name, tmp_path_factory.mktemp("models") / name, 1, dtype="float32", **SIZES)
            for file, content in tokenizer_files(BYTE_LEVEL).items():
                (known[name] / file).write_bytes(content)
        return known[name]

    return model


def trained(model: Path, folder: Path, name: str = "llama", dtype: str = "float32", **config: Any) -> Any:
    """An adapter that PEFT has saved, with numbers as after a training; returns the model with it."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    torch.manual_seed(0)
    base, _ = zoo.load(name, model)
    settings = {"r": RANK, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": "all-linear", **config}
    tuned = peft.get_peft_model(base, peft.LoraConfig(**settings))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data = (torch.randn_like(parameter) * 0.2).to(getattr(torch, dtype))
    tuned.peft_config["default"].base_model_name_or_path = str(model)
    tuned.save_pretrained(folder)
    return tuned.float().eval()


def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].numpy()


def converted(adapter: Path, out: Path, layout: str = "llama.cpp", **options: Any) -> Path:
    weightsmith.convert_lora(adapter, out, layout=layout, progress=False, fsync=False, **options)
    return out / "adapter.gguf" if layout == "llama.cpp" else out


def stored_bytes(path: Path) -> dict[str, bytes]:
    data = path.read_bytes()
    return {tensor.name: data[tensor.offset : tensor.offset + tensor.nbytes] for tensor in read_gguf_header(path).tensors}


def refusal(adapter: Path, layout: str = "llama.cpp", **options: Any) -> WeightsmithError:
    with pytest.raises(PlanError) as caught:
        weightsmith.convert_lora(adapter, adapter.parent / "refused", layout=layout, progress=False, **options)
    assert not (adapter.parent / "refused").exists()
    return caught.value.problems[0]


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all linear layers": ("llama", {}),
    "embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "patterns, rsLoRA": (
        "llama",
        {"use_rslora": True, "rank_pattern": {"q_proj": 8, "down_proj": 2}, "alpha_pattern": {"k_proj": 3}},
    ),
    "tied": ("llama-tied", {}),
    "no reordered rows": ("qwen2", {}),
    "heads of their own width": ("qwen3", {}),
    "fused matrices": ("phi3-tied", {}),
    "one matrix in two parts": ("granite-moe-shared", {}),
    "value heads in another order": ("qwen3.5", {}),
    "two norms after": ("glm4", {}),
    "rows of a part of a head": ("phi", {}),
    "convolutions beside": ("lfm2", {}),
    "multiplied weights": (
        "falcon-h1",
        {"target_modules": "q_proj k_proj v_proj o_proj in_proj gate_proj down_proj lm_head".split()},
    ),
    "experts of a parameter": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts, other ranks and scales": (
        "qwen2-moe",
        {
            "target_modules": ["q_proj", "v_proj"],
            "target_parameters": EXPERTS,
            "rank_pattern": {"experts.gate_up_proj": 2, "v_proj": 3},
            "alpha_pattern": {"experts.down_proj": 5},
        },
    ),
    "fused experts": ("qwen3.5-moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
}


@pytest.mark.matrix("all linear layers", "fused experts", "value heads*")
@needs_llama_cpp
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_what_peft_does(case: str, models: Any, tmp_path: Path) -> None:
    name, config = CASES[case]
    model = models(name)
    tuned = trained(model, tmp_path / "adapter", name, **config)
    tokens = np.random.default_rng(0).integers(0, 256, 24).tolist()
    expected = logits_of(tuned, tokens)
    path = converted(tmp_path / "adapter", tmp_path / "out", base=str(model))
    weightsmith.quantize(model, tmp_path / "gguf", "gguf-f32", progress=False, fsync=False)
    merged = f"{model}+{tmp_path / 'adapter'}"
    weightsmith.quantize(merged, tmp_path / "merged", "gguf-f32", progress=False, fsync=False)
    with llama_cpp.Judge(tmp_path / "gguf/model.gguf") as judge:
        plain, adapted = judge.logits(tokens), judge.logits(tokens, path)
    with llama_cpp.Judge(tmp_path / "merged/model.gguf") as judge:
        as_one = judge.logits(tokens)
    largest = np.abs(expected).max()
    assert np.abs(plain - expected).max() > 0.1 * largest  # the adapter does something
    assert np.abs(adapted - expected).max() < 2e-3 * largest
    assert np.abs(adapted - as_one).max() < 2e-3 * largest
    if name == "falcon-h1":  # its GGUF file does not say what its weights are multiplied by
        return
    of_gguf = converted(tmp_path / "adapter", tmp_path / "again", base=str(tmp_path / "gguf/model.gguf"))
    assert stored_bytes(of_gguf) == stored_bytes(path)  # the base may be a GGUF file, too


def of_llama_cpp(folder: Path, tensors: Mapping[str, np.ndarray], alpha: float | None = 8.0, **keys: str) -> Path:
    """A GGUF file as llama.cpp's converter writes it: without the number of heads."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / "theirs.gguf", keys.pop("architecture", "llama"))
    writer.add_type(keys.pop("type", "adapter"))
    writer.add_string("adapter.type", keys.pop("kind", "lora"))
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for key, value in keys.items():
        writer.add_string(key.replace("__", "."), value)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "theirs.gguf"


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([*shape, seed]).standard_normal(shape).astype(np.float32)


def turned(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows in llama.cpp's order: pairs of the two halves of each head."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


FACTORS = {"q": normal(32, RANK, seed=1), "k": normal(16, RANK, seed=2), "v": normal(16, RANK, seed=3)}
THEIRS = {
    "blk.0.attn_q.weight.lora_a": normal(RANK, 32, seed=4),
    "blk.0.attn_q.weight.lora_b": turned(FACTORS["q"], 4),
    "blk.0.attn_k.weight.lora_a": normal(RANK, 32, seed=5),
    "blk.0.attn_k.weight.lora_b": turned(FACTORS["k"], 2),
    "blk.1.attn_v.weight.lora_a": normal(RANK, 32, seed=6),
    "blk.1.attn_v.weight.lora_b": FACTORS["v"],
    "token_embd.weight.lora_a": normal(TOKENS, RANK, seed=7),
    "token_embd.weight.lora_b": normal(32, RANK, seed=8),
}
NAMES = {
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q.weight",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k.weight",
    "model.layers.1.self_attn.v_proj": "blk.1.attn_v.weight",
}


def baked(model: Path, lora: Path, out: Path) -> dict[str, np.ndarray]:
    weightsmith.dequantize(f"{model}+{lora}", out, progress=False, fsync=False)
    with weightsmith.open_checkpoint(out) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.specs}


@pytest.mark.parametrize("folder", [False, True])
def test_a_gguf_file_is_an_adapter_as_any_other(folder: bool, models: Any, tmp_path: Path) -> None:
    """Files of llama.cpp's converter lack the number of heads: the base has it."""
    path = of_llama_cpp(tmp_path / "a", THEIRS)
    weights = baked(models("llama"), tmp_path / "a" if folder else path, tmp_path / "out")
    with weightsmith.open_checkpoint(models("llama")) as base:
        before = {name: base.read(name) for name in base.specs}
    changed = {name for name in before if not np.array_equal(before[name], weights[name])}
    assert changed == {*(f"{module}.weight" for module in NAMES), "model.embed_tokens.weight"}
    for (module, name), part in zip(NAMES.items(), "qkv", strict=True):
        expected = before[f"{module}.weight"] + 2 * FACTORS[part] @ THEIRS[f"{name}.lora_a"]
        np.testing.assert_allclose(weights[f"{module}.weight"], expected, rtol=1e-5, atol=1e-5)
    embedding = 2 * THEIRS["token_embd.weight.lora_a"] @ THEIRS["token_embd.weight.lora_b"].T
    name = "model.embed_tokens.weight"
    np.testing.assert_allclose(weights[name], before[name] + embedding, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alpha", [None, 0.0, 4.0])
def test_without_an_alpha_the_scale_is_1(alpha: float | None, tmp_path: Path) -> None:
    with open_adapter(str(of_llama_cpp(tmp_path, THEIRS, alpha))).checkpoint:
        adapter = open_adapter(str(of_llama_cpp(tmp_path, THEIRS, alpha)))
        assert {factors.scaling for factors in adapter.updates.values()} == {1.0}
        adapter.checkpoint.close()


def test_a_gguf_file_becomes_a_folder_of_peft(models: Any, tmp_path: Path) -> None:
    path = of_llama_cpp(tmp_path / "a", THEIRS)
    out = converted(path, tmp_path / "out", "peft", base=str(models("llama")))
    stored = load_file(out / "adapter_model.safetensors")
    for (module, name), part in zip(NAMES.items(), "qkv", strict=True):
        assert np.array_equal(stored[f"{P}{module}.lora_A.weight"], THEIRS[f"{name}.lora_a"])
        assert np.array_equal(stored[f"{P}{module}.lora_B.weight"], FACTORS[part])
    embedding = f"{P}model.embed_tokens.lora_embedding_"
    assert np.array_equal(stored[f"{embedding}A"], THEIRS["token_embd.weight.lora_a"].T)
    assert np.array_equal(stored[f"{embedding}B"], THEIRS["token_embd.weight.lora_b"])
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["alpha_pattern"]) == (RANK, 8.0, {})
    assert config["base_model_name_or_path"] == str(models("llama"))
    direct, through = (baked(models("llama"), lora, tmp_path / f"baked-{i}") for i, lora in enumerate((path, out)))
    assert all(np.array_equal(direct[name], through[name]) for name in direct)


def test_a_gguf_file_says_whose_adapter_it_is_and_so_does_the_way_back(models: Any, tmp_path: Path) -> None:
    """As llama.cpp's converter, which reads the card of the adapter, too."""
    path = of_llama_cpp(tmp_path / "a", THEIRS, **{"general.license": "mit", "general.author": "Jo Doe"})
    back = converted(path, tmp_path / "back", "peft", base=str(models("llama")))
    assert "license: mit" in (back / "README.md").read_text()
    again = read_gguf_header(converted(path, tmp_path / "again", base=str(models("llama")))).keys
    assert (again["general.license"], again["general.author"], again["general.type"]) == ("mit", "Jo Doe", "adapter")
    (back / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n")
    keys = read_gguf_header(converted(back, tmp_path / "out", base=str(models("llama")))).keys
    assert (keys["general.license"], keys["general.languages"]) == ("apache-2.0", ["en"])
    assert keys["general.base_model.count"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_peft_computes_the_same_after_both_ways(models: Any, tmp_path: Path) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    model = models("llama")
    case = {
        "target_modules": ["q_proj", "k_proj", "embed_tokens"],
        "rank_pattern": {"q_proj": 8},
        "alpha_pattern": {"k_proj": 3},
    }
    tuned = trained(model, tmp_path / "adapter", dtype="bfloat16", **case)
    path = converted(tmp_path / "adapter", tmp_path / "out", base=str(model), out_dtype=torch.float32)
    back = converted(path, tmp_path / "back", "peft", base=str(model))
    base, _ = zoo.load("llama", model)
    again = peft.PeftModel.from_pretrained(base, back).float().eval()
    tokens = list(range(20))
    expected = logits_of(tuned, tokens)
    assert np.abs(logits_of(again, tokens) - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.long
def test_a_file_of_ours_needs_no_base(models: Any, tmp_path: Path) -> None:
    """It has the number of heads, and the name of the base."""
    theirs = of_llama_cpp(tmp_path / "a", THEIRS)
    ours = converted(theirs, tmp_path / "ours", base=str(models("llama")))
    first, second = read_gguf_header(theirs), read_gguf_header(ours)
    assert {t.name: t.shape for t in first.tensors} == {t.name: t.shape for t in second.tensors}
    assert second.keys["llama.attention.head_count"] == 4
    assert second.keys["llama.attention.head_count_kv"] == 2
    assert second.keys["adapter.lora.alpha"] == 8
    direct, through = (baked(models("llama"), lora, tmp_path / f"baked-{i}") for i, lora in enumerate((theirs, ours)))
    assert all(np.array_equal(direct[name], through[name]) for name in direct)
    recipe = {"merge_method": "linear", "models": [{"model": str(ours), "parameters": {"weight": 1}}]}
    weightsmith.merge(recipe, tmp_path / "merged", progress=False, fsync=False)
    assert (tmp_path / "merged/adapter_config.json").exists()
    with reopen(weightsmith.plan(recipe)):
        pass


@pytest.mark.long
def test_experts_that_are_named_become_one_tensor(tmp_path: Path) -> None:
    model = zoo.save("mixtral", tmp_path / "m", 1, dtype="float32", **SIZES)
    shapes = {"w1": (48, 32), "w2": (32, 48), "w3": (48, 32)}
    tensors = {}
    for expert in range(4):
        for name, (rows, cols) in shapes.items():
            module = f"{P}model.layers.1.block_sparse_moe.experts.{expert}.{name}"
            tensors[f"{module}.lora_A.weight"] = normal(RANK, cols, seed=10 * expert)
            tensors[f"{module}.lora_B.weight"] = normal(rows, RANK, seed=10 * expert + 1)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["w1", "w2", "w3"]}
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    path = converted(tmp_path / "adapter", tmp_path / "out", base=str(model))
    stored = {tensor.name: tensor.shape for tensor in read_gguf_header(path).tensors}
    assert stored["blk.1.ffn_down_exps.weight.lora_a"] == (4, RANK, 48)
    assert stored["blk.1.ffn_gate_exps.weight.lora_b"] == (4, 48, RANK)
    direct, through = (baked(model, lora, tmp_path / f"baked-{i}") for i, lora in enumerate((tmp_path / "adapter", path)))
    assert all(np.array_equal(direct[name], through[name]) for name in direct)
    some = {name: values for name, values in tensors.items() if ".experts.3." not in name}
    save_file(some, tmp_path / "adapter/adapter_model.safetensors")
    assert "factors of 3 of 4 experts" in str(refusal(tmp_path / "adapter", base=str(model)))


def stacked(inner: str, rows: int, cols: int, *, seed: int) -> dict[str, np.ndarray]:
    """Factors of four experts at once."""
    a, b = normal(4 * RANK, cols, seed=seed), normal(rows, 4 * RANK, seed=seed + 1)
    module = f"{P}model.layers.1.mlp.experts{inner}"
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


@pytest.mark.parametrize("marks", [{}, {"lora_B_layout": "grouped_by_expert"}, {"use_rslora": True}])
def test_factors_of_all_experts_become_one_tensor_for_each_matrix(marks: dict[str, Any], tmp_path: Path) -> None:
    """Gate and up share A. Read back, they give the same weights."""
    model = zoo.save("mixtral", tmp_path / "m", 1, dtype="float32", **SIZES)
    tensors = {**stacked(".base_layer", 96, 32, seed=1), **stacked("", 32, 48, seed=3), **pair(Q)}
    config = {"target_parameters": EXPERTS, "alpha_pattern": {"down_proj": 3}, "peft_version": "0.21.2", **marks}
    folder = peft_folder(tmp_path / "adapter", tensors, **config)
    path = converted(folder, tmp_path / "out", base=str(model))
    shapes = {tensor.name: tensor.shape for tensor in read_gguf_header(path).tensors if "exps" in tensor.name}
    sides = {"ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}
    expected = {f"blk.1.{name}_exps.weight.lora_a": (4, RANK, cols) for name, (_, cols) in sides.items()}
    expected |= {f"blk.1.{name}_exps.weight.lora_b": (4, rows, RANK) for name, (rows, _) in sides.items()}
    assert shapes == expected
    before = weightsmith.open_checkpoint(model)
    direct, through = (baked(model, lora, tmp_path / f"baked-{i}") for i, lora in enumerate((folder, path)))
    assert sum(bool((direct[name] != before.read(name)).any()) for name in direct) == 13
    for name, array in direct.items():
        np.testing.assert_allclose(through[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def test_experts_the_other_way_round_are_merged_instead(tmp_path: Path) -> None:
    model = zoo.save("mixtral", tmp_path / "m", 1, dtype="float32", **SIZES)
    turned = {**stacked(".base_layer", 32, 96, seed=1), **stacked("", 48, 32, seed=3)}
    folder = peft_folder(tmp_path / "adapter", turned, target_parameters=EXPERTS, peft_version="0.18.0")
    problem = refusal(folder, base=str(model))
    assert "factors of experts that are stored [inputs, outputs]" in str(problem)
    assert f"weightsmith quantize BASE+{folder} OUT" in problem.finding.fix
    assert "factors of all experts of a parameter" in str(refusal(folder, "peft"))


# ---- what is refused


def peft_folder(folder: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def pair(module: str, rows: int = 32, cols: int = 32) -> dict[str, np.ndarray]:
    return {f"{P}{module}.lora_A.weight": normal(RANK, cols), f"{P}{module}.lora_B.weight": normal(rows, RANK)}


def test_what_llama_cpp_does_not_read_is_refused_with_the_way_out(models: Any, tmp_path: Path) -> None:
    llama, tied = str(models("llama")), str(models("llama-tied"))
    dora = peft_folder(tmp_path / "dora", {**pair(Q), f"{P}{Q}.lora_magnitude_vector": normal(32)}, use_dora=True)
    problem = refusal(dora, base=llama)
    assert "it is DoRA, and llama.cpp has no norms of rows" in str(problem)
    assert f"weightsmith quantize BASE+{dora} OUT --format gguf-q8_0" in problem.finding.fix
    saved = peft_folder(tmp_path / "saved", {**pair(Q), f"{P}model.norm.weight": normal(32)}, modules_to_save=["norm"])
    assert "it saves 1 tensors whole" in str(refusal(saved, base=llama))
    head = peft_folder(tmp_path / "head", pair("lm_head", TOKENS))
    assert "factors of the head, which the base ties" in str(refusal(head, base=tied))
    embedding = {f"{P}model.embed_tokens.lora_embedding_A": normal(RANK, TOKENS)}
    embedding[f"{P}model.embed_tokens.lora_embedding_B"] = normal(32, RANK)
    folder = peft_folder(tmp_path / "embedding", embedding)
    assert "factors of the embedding, which the base ties" in str(refusal(folder, base=tied))
    plain = peft_folder(tmp_path / "plain", pair(Q))
    assert "names, shapes and the order of rows depend on the base" in str(refusal(plain))
    assert "llama.cpp reads no float64" in str(refusal(plain, base=llama, out_dtype="float64"))
    assert "this is a model with an adapter" in str(refusal(Path(f"{llama}+{plain}"), base=llama))
    with pytest.raises(PlanError, match=r"weightsmith convert-lora .*plain OUT --for llama\.cpp"):
        weightsmith.quantize(plain, tmp_path / "q", "gguf-f16", progress=False)


def test_the_command_says_each_problem_in_full(models: Any, tmp_path: Path, cli: Cli) -> None:
    folder = peft_folder(tmp_path / "head", pair("lm_head", TOKENS))
    ran = cli("convert-lora", folder, tmp_path / "out", "--for", "llama.cpp", "--base", models("llama-tied"))
    assert ran.code != 0
    assert "error[unsupported]: lm_head: factors of the head, which the base ties" in ran.err
    assert "error[plan]" not in ran.err


def test_patterns_name_whole_modules(tmp_path: Path) -> None:
    """PEFT compares the ends of names: a module of another tower ends alike."""
    inside, outside = "layers.0.q_proj", "vision.layers.0.q_proj"
    tensors = {f"{P}{inside}.lora_A.weight": normal(2, 32), f"{P}{inside}.lora_B.weight": normal(32, 2), **pair(outside)}
    config = {"rank_pattern": {f"^{inside}": 2}, "alpha_pattern": {f"^{inside}": 3}}
    folder = converted(peft_folder(tmp_path / "a", tensors | pair("vision.k_proj"), **config), tmp_path / "out", "peft")
    written = json.loads((folder / "adapter_config.json").read_text())
    with open_adapter(str(folder)).checkpoint:
        updates = open_adapter(str(folder)).updates
    assert {module: factors.scaling for module, factors in updates.items()} == {inside: 1.5, outside: 2, "vision.k_proj": 2}
    peft = pytest.importorskip("peft.utils.other")
    for key, expected in (("rank_pattern", 2), ("alpha_pattern", 3)):
        patterns = written[key]
        assert patterns[peft.get_pattern_key(patterns, inside)] == expected
        assert peft.get_pattern_key(patterns, outside) not in patterns


BAD: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], str]] = {
    "a control vector": ({"kind": "cvec"}, {}, "adapter.type 'cvec', not adapter and lora"),
    "another architecture": ({"architecture": "nonsense"}, {}, "an adapter of the architecture 'nonsense'"),
    "a norm": ({}, {"blk.0.attn_norm.weight": normal(32)}, "is no factor of a LoRA, and llama.cpp leaves it out"),
    "no B": ({}, {"blk.1.ffn_up.weight.lora_a": normal(RANK, 32)}, "has an lora_a alone"),
    "an unknown tensor": (
        {},
        {"blk.0.nothing.weight.lora_a": normal(RANK, 32), "blk.0.nothing.weight.lora_b": normal(32, RANK)},
        "factors of 'blk.0.nothing.weight'",
    ),
    "two ranks": (
        {},
        {"blk.1.ffn_up.weight.lora_a": normal(3, 32), "blk.1.ffn_up.weight.lora_b": normal(48, RANK)},
        "no factors of a matrix",
    ),
    "an infinite alpha": ({"alpha": float("inf")}, {}, "adapter.lora.alpha is inf, not a finite number"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_gguf_file_that_is_no_lora_says_so(case: str, tmp_path: Path) -> None:
    keys, tensors, what = BAD[case]
    path = of_llama_cpp(tmp_path, {**THEIRS, **tensors}, **keys)
    with pytest.raises(WeightsmithError, match=what):
        open_adapter(str(path))


def test_heads_that_do_not_fit_are_refused(models: Any, tmp_path: Path) -> None:
    odd = {**THEIRS, "blk.0.attn_k.weight.lora_b": normal(18, RANK)}
    path = of_llama_cpp(tmp_path, odd)
    with pytest.raises(PlanError, match=r"18 rows for 2 heads|and the adapter is for"):
        weightsmith.dequantize(f"{models('llama')}+{path}", tmp_path / "out", progress=False)


def test_a_file_with_other_heads_than_its_base_is_refused(models: Any, tmp_path: Path) -> None:
    path = converted(of_llama_cpp(tmp_path / "a", THEIRS), tmp_path / "ours", base=str(models("llama")))
    base = tmp_path / "base"
    shutil.copytree(models("llama"), base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2, "num_key_value_heads": 1}))
    said = "it is for 4 heads of q and 2 of k, and the base has 2 and 1"
    assert said in str(refusal(path, "peft", base=str(base)))
    with pytest.raises(PlanError, match=said):
        weightsmith.dequantize(f"{base}+{path}", tmp_path / "out", progress=False)


def test_adapters_in_llama_cpp_s_order_merge_after_a_conversion(tmp_path: Path) -> None:
    path = of_llama_cpp(tmp_path, THEIRS)
    with pytest.raises(PlanError, match=r"rows of q and k are in llama.cpp's order") as caught:
        weightsmith.plan({"merge_method": "linear", "models": [{"model": str(path), "parameters": {"weight": 1}}]})
    assert f"weightsmith convert-lora {path} OUT --for peft --base BASE" in caught.value.problems[0].finding.fix


def test_a_gguf_adapter_is_no_model(tmp_path: Path) -> None:
    path = of_llama_cpp(tmp_path, THEIRS)
    with pytest.raises(PlanError, match="an adapter"):
        weightsmith.dequantize(path, tmp_path / "out", progress=False)
    assert weightsmith.inspect(path).elements == sum(values.size for values in THEIRS.values())


@pytest.mark.long
def test_damaged_files_raise_errors_of_ours(tmp_path: Path) -> None:
    data = of_llama_cpp(tmp_path, THEIRS).read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.gguf"
    for _ in range(300):
        damaged = bytearray(data[: rng.integers(8, len(data))] if rng.random() < 0.2 else data)
        for place in rng.integers(0, 1200, rng.integers(1, 4)):
            damaged[place % len(damaged)] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            open_adapter(str(path)).checkpoint.close()
        except WeightsmithError:
            pass


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek-v2", "dots1", "ernie4-5-moe", "glm4-moe", "mixtral"])
def test_experts_are_counted_as_their_models_do(name: str, tmp_path: Path) -> None:
    """Factors of one expert are float32, of the others bfloat16: one tensor holds all."""
    model = zoo.save(name, tmp_path / "m", 1, dtype="float32", **SIZES)
    with weightsmith.open_checkpoint(model) as base:
        up = {key.removesuffix(".weight"): spec.shape for key, spec in base.specs.items() if re.search(_UP, key)}
    tensors: dict[str, np.ndarray] = {}
    for i, (module, (rows, cols)) in enumerate(up.items()):
        a, b = normal(RANK, cols, seed=i), normal(rows, RANK, seed=i + 1)
        dtype = np.float16 if i % 2 else np.float32
        tensors |= {f"{P}{module}.lora_A.weight": a.astype(dtype), f"{P}{module}.lora_B.weight": b.astype(dtype)}
    assert tensors
    folder = peft_folder(tmp_path / "adapter", tensors, target_modules=["up_proj", "w3"])
    path = converted(folder, tmp_path / "out", base=str(model))
    assert {tensor.dtype.name for tensor in read_gguf_header(path).tensors} == {"F32"}
    direct, through = (baked(model, lora, tmp_path / f"baked-{i}") for i, lora in enumerate((folder, path)))
    assert all(np.array_equal(direct[key], through[key]) for key in direct)


_UP = r"experts\.\d+\.(up_proj|w3)\.weight$"


def test_an_alpha_that_is_no_float32_leaves_the_factors_alone(models: Any, tmp_path: Path) -> None:
    tensors = {name: values.astype(np.float16) for name, values in pair(Q.replace("q_proj", "o_proj")).items()}
    folder = peft_folder(tmp_path / "a", tensors, target_modules=["o_proj"], lora_alpha=0.3)
    path = converted(folder, tmp_path / "out", base=str(models("llama")))
    assert read_gguf_header(path).keys["adapter.lora.alpha"] == np.float32(0.3)
    assert {*stored_bytes(path).values()} == {values.tobytes() for values in tensors.values()}


def test_numbers_that_a_dtype_cannot_hold_name_the_option(models: Any, tmp_path: Path) -> None:
    tensors = {name: values * 1e5 for name, values in pair(Q).items()}
    with pytest.raises(WeightsmithError, match="--out-dtype bfloat16"):
        converted(peft_folder(tmp_path / "a", tensors), tmp_path / "out", base=str(models("llama")), out_dtype="float16")


OF_MLX: dict[str, tuple[str, ...]] = {
    "gpt-neox": ("query_key_value", "dense_h_to_4h", "embed_in", "embed_out"),
    "lfm2-moe": ("q_proj", "w1", "w2", "w3"),
    "llama": ("q_proj", "down_proj"),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OF_MLX)
def test_peft_loads_an_adapter_of_mlx_by_the_names_of_the_base(name: str, models: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = models(name)
    tuned = trained(model, tmp_path / "adapter", name, target_modules=[*OF_MLX[name]])
    tokens = np.random.default_rng(0).integers(0, 256, 24).tolist()
    expected = logits_of(tuned, tokens)
    of_mlx = converted(tmp_path / "adapter", tmp_path / "mlx", "mlx", base=str(model))
    back = converted(of_mlx, tmp_path / "back", "peft")
    base, _ = zoo.load(name, model)
    plain = logits_of(base.float().eval(), tokens)
    loaded = peft.PeftModel.from_pretrained(base, back)
    stored = set(load_file(back / "adapter_model.safetensors"))
    assert stored <= {key.replace(".default", "") for key in loaded.state_dict()}  # PEFT ignores what it does not know
    logits = logits_of(loaded.float().eval(), tokens)
    assert np.abs(logits - expected).max() < 1e-3 * np.abs(plain - expected).max()


@pytest.mark.long
@pytest.mark.loading
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("gpt-neox", ["gpt_neox.layers.0.attention.dense", "embed_out"]),
        ("mixtral", [f"model.layers.1.block_sparse_moe.experts.{e}.{w}" for e in range(4) for w in ("w1", "w2", "w3")]),
        ("lfm2-moe", ["model.layers.0.feed_forward.w1", "model.layers.1.self_attn.q_proj"]),
        ("lfm2-moe", [f"model.layers.1.feed_forward.experts.{e}.w2" for e in range(4)]),
    ],
    ids=["head", "experts", "dense", "unknown experts"],
)
def test_peft_applies_all_of_an_adapter_of_mlx_or_it_is_refused(
    name: str, modules: list[str], models: Any, tmp_path: Path
) -> None:
    """transformers calls GPT-NeoX's head `lm_head`. PEFT knows single experts of Mixtral, and none of LFM2-MoE."""
    peft = pytest.importorskip("peft")
    model, tensors = models(name), dict[str, np.ndarray]()
    shapes = {tensor: values.shape for tensor, values in load_file(model / "model.safetensors").items()}
    for seed, module in enumerate(modules):
        rows, cols = shapes[f"{module}.weight"]
        tensors[f"{P}{module}.lora_A.weight"] = normal(RANK, cols, seed=seed)
        tensors[f"{P}{module}.lora_B.weight"] = normal(rows, RANK, seed=seed + 99)
    folder = peft_folder(tmp_path / "a", tensors, target_modules=modules, base_model_name_or_path=str(model))
    of_mlx = converted(folder, tmp_path / "mlx", "mlx")
    if name == "lfm2-moe" and "experts" in modules[0]:
        problem = refusal(of_mlx, "peft")
        assert "PEFT would ignore factors of single experts" in str(problem)
        assert problem.finding.fix.startswith("Make factors of the whole: weightsmith extract-lora")
        return
    back = converted(of_mlx, tmp_path / "back", "peft")
    weightsmith.merge(
        {"merge_method": "passthrough", "models": [{"model": f"{model}+{folder}"}]}, tmp_path / "baked", progress=False
    )
    tokens = np.random.default_rng(0).integers(0, 256, 24).tolist()
    with_adapter = peft.PeftModel.from_pretrained(zoo.load(name, model)[0], back)
    plain, applied, expected = (
        logits_of(loaded.float().eval(), tokens)
        for loaded in (zoo.load(name, model)[0], with_adapter, zoo.load(name, tmp_path / "baked")[0])
    )
    assert np.abs(applied - expected).max() < 1e-3 * np.abs(plain - expected).max()


@pytest.mark.long
@pytest.mark.loading
@pytest.mark.parametrize("known", [True, False])
def test_decoders_of_vision_models_get_transformers_names(known: bool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = zoo.save("gemma3-vl", tmp_path / "base", 1, dtype="float32")
    if not known:
        base_config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**base_config, "model_type": "unheard_of"}))
    module = "language_model.model.layers.0.self_attn.q_proj"
    rows, cols = load_file(model / "model.safetensors")[f"{module}.weight"].shape
    factors = {f"{module}.lora_a": normal(cols, RANK), f"{module}.lora_b": normal(RANK, rows)}
    save_file(factors, tmp_path / "adapters.safetensors")
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": RANK, "scale": 2.0}, "model": str(model)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    result = weightsmith.convert_lora(tmp_path, tmp_path / "out", progress=False, fsync=False)
    name = "model.language_model.layers.0.self_attn.q_proj" if known else module
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert set(stored) == {f"{P}{name}.lora_{part}.weight" for part in "AB"}
    warned = any("whether PEFT finds all that the adapter has was not checked" in str(note) for note in result.warnings)
    assert warned == (not known)
