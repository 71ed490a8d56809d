"""Adapters of MLX: mlx-lm trains and fuses them, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests.mini import write_checkpoint
from tests.models.lora.test_lora import DOWN, INNER, H, P, Q, adapter, baked, base, normal, refusal
from tests.zoo import save
from weightsmith._base.errors import FormatError, PlanError, Unsupported
from weightsmith._models.lora import open_adapter

PYTHON = os.environ.get("WEIGHTSMITH_MLX") or (sys.executable if find_spec("mlx_lm") else "")
SCRIPT = Path(__file__).with_name("mlx_script.py")
SETTINGS = {"rank": 4, "scale": 20.0, "dropout": 0.0}
WIDTH, TOKENS, EXPERTS = 64, 96, 3


def tiny(folder: Path, *, tie: bool = False, experts: bool = False) -> Path:
    """A Llama or a Qwen3-MoE of two layers that mlx-lm loads."""
    vocabulary = ("model.embed_tokens.weight",) if tie else ("model.embed_tokens.weight", "lm_head.weight")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(vocabulary, (TOKENS, WIDTH))
    shapes["model.norm.weight"] = (WIDTH,)
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{layer}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
        modules = [f"{layer}.mlp"]
        if experts:
            shapes |= {f"{layer}.self_attn.{name}_norm.weight": (32,) for name in "qk"}
            shapes[f"{layer}.mlp.gate.weight"] = (EXPERTS, WIDTH)
            modules = [f"{layer}.mlp.experts.{e}" for e in range(EXPERTS)]
        for module in modules:
            shapes |= {f"{module}.{name}_proj.weight": (2 * WIDTH, WIDTH) for name in ("gate", "up")}
            shapes[f"{module}.down_proj.weight"] = (WIDTH, 2 * WIDTH)
    config: dict[str, Any] = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 1e4},
        **{"rms_norm_eps": 1e-5, "vocab_size": TOKENS, "max_position_embeddings": 64, "tie_word_embeddings": tie},
    }
    if experts:
        config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS}
        config |= {"num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
        config |= {"moe_intermediate_size": 2 * WIDTH}
    tensors = {name: normal(*shape, seed=k) / 4 for k, (name, shape) in enumerate(shapes.items())}
    return write_checkpoint(folder, tensors, config)


CASES: dict[str, dict[str, Any]] = {
    "all layers": {"num_layers": -1, "rank": 8, "scale": 10.0},
    "the last layer": {"num_layers": 1, "scale": 0.3, "keys": ["self_attn.q_proj", "mlp.down_proj"]},
    "DoRA": {"num_layers": 2, "fine_tune_type": "dora", "keys": ["self_attn.v_proj", "mlp.up_proj"]},
    "embedding and head": {"keys": ["model.embed_tokens", "lm_head", "self_attn.o_proj"]},
    "tied": {"tie": True, "keys": ["model.embed_tokens", "self_attn.o_proj"]},
    "quantised": {"quantised": True, "num_layers": -1, "scale": 2.0},
    "quantised, DoRA": {"quantised": True, "fine_tune_type": "dora", "keys": ["self_attn.q_proj", "mlp.down_proj"]},
    "experts": {"experts": True, "num_layers": -1, "scale": 1.5},
    "quantised experts": {"experts": True, "quantised": True, "num_layers": -1, "scale": 1.5},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The base and the adapter of each case, after mlx-lm has run."""
    root = tmp_path_factory.mktemp("mlx")
    folders, asked = {}, []
    for name, case in CASES.items():
        folder = tiny(root / name / "plain", tie=case.get("tie", False), experts=case.get("experts", False))
        if case.get("quantised"):
            weightsmith.quantize(folder, root / name / "quantised", "mlx-4bit", progress=False)
            folder = root / name / "quantised"
        folders[name] = folder, root / name / "adapters"
        settings = {**SETTINGS, **{key: case[key] for key in ("rank", "scale", "keys") if key in case}}
        others = {"num_layers": case.get("num_layers", 2), "fine_tune_type": case.get("fine_tune_type", "lora")}
        asked.append({"base": str(folder), "out": str(root / name / "adapters"), "lora_parameters": settings, **others})
    run_mlx(asked, root)
    return folders


def run_mlx(asked: list[dict[str, Any]], folder: Path) -> None:
    env = {**os.environ, "TMPDIR": str(folder)}  # MLX leaves a folder there
    done = subprocess.run([PYTHON, SCRIPT], input=json.dumps(asked), text=True, capture_output=True, env=env, check=False)
    assert done.returncode == 0, done.stderr


def apart(fused: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of mlx-lm under the names of the Hub."""
    stacked = [name for name in fused if ".switch_mlp." in name]
    for name in stacked:
        for e, matrix in enumerate(fused.pop(name)):
            fused[name.replace("switch_mlp", f"experts.{e}")] = matrix
    return fused


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason="needs MLX")
@pytest.mark.parametrize("name", CASES)
def test_mlx_lm_is_the_judge(name: str, trained: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    folder, lora = trained[name]
    expected = apart(load_file(lora / "fused.safetensors"))
    weights = baked(folder, lora, tmp_path / "out", dtype="float32")
    assert weights.keys() == expected.keys()
    weightsmith.dequantize(folder, tmp_path / "plain", out_dtype="float32", progress=False)
    with weightsmith.open_checkpoint(tmp_path / "plain") as plain:
        changed = sum(bool((plain[key] != array).any()) for key, array in weights.items())
        assert changed == sum(bool((plain[key] != array).any()) for key, array in expected.items())
        assert changed >= 3 - (name in ("tied", "the last layer"))
    for key, array in weights.items():
        np.testing.assert_allclose(array, expected[key], rtol=3e-6, atol=3e-6, err_msg=key)


def mlx(folder: Path, tensors: dict[str, np.ndarray] | None = None, name: str = "adapters.safetensors", **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    factors = {f"{Q}.lora_a": normal(H, 4, seed=1), f"{Q}.lora_b": normal(4, H, seed=2)}
    save_file(factors if tensors is None else tensors, folder / name)
    parameters = {**SETTINGS, **config.pop("parameters", {})}
    whole = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters, "model": "org/base", **config}
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    return folder


def test_the_update_is_scale_times_a_b_transposed(tmp_path: Path) -> None:
    model, lora = base(tmp_path / "base", np.float32), mlx(tmp_path / "a", parameters={"scale": 0.7})
    before, weights = load_file(model / "model.safetensors"), baked(model, lora, tmp_path / "out")
    factors = load_file(lora / "adapters.safetensors")
    update = 0.7 * (factors[f"{Q}.lora_a"].astype(float) @ factors[f"{Q}.lora_b"]).T
    np.testing.assert_allclose(weights[f"{Q}.weight"], before[f"{Q}.weight"] + update, rtol=2e-6, atol=2e-6)


def test_a_file_of_an_earlier_step_is_named_itself(tmp_path: Path) -> None:
    model, lora = base(tmp_path / "base", np.float32), mlx(tmp_path / "a")
    expected = baked(model, lora, tmp_path / "out")
    other = {name: 2 * array for name, array in load_file(lora / "adapters.safetensors").items()}
    (lora / "adapters.safetensors").rename(lora / "0000100_adapters.safetensors")
    mlx(lora, other)
    weights = baked(model, lora / "0000100_adapters.safetensors", tmp_path / "earlier")
    assert {n: t.tobytes() for n, t in weights.items()} == {n: t.tobytes() for n, t in expected.items()}
    last = baked(model, lora, tmp_path / "last")
    assert (last[f"{Q}.weight"] != weights[f"{Q}.weight"]).any()


def as_peft(folder: Path, lora: Path) -> Path:
    """The same adapter as PEFT has it."""
    factors = load_file(lora / "adapters.safetensors")
    turned = {
        f"{P}{name.replace('lora_a', 'lora_A.weight').replace('lora_b', 'lora_B.weight')}": np.ascontiguousarray(array.T)
        for name, array in factors.items()
    }
    scale = json.loads((lora / "adapter_config.json").read_text())["lora_parameters"]["scale"]
    return adapter(folder, turned, lora_alpha=scale * 4, base_model_name_or_path="org/base")


def test_adapters_of_mlx_and_of_peft_are_merged_with_each_other(tmp_path: Path) -> None:
    first = mlx(tmp_path / "a")
    second = mlx(tmp_path / "b", {f"{DOWN}.lora_a": normal(INNER, 4, seed=5), f"{DOWN}.lora_b": normal(4, H, seed=6)})
    outs = []
    for other in (second, as_peft(tmp_path / "peft", second)):
        recipe = {
            "merge_method": "task_arithmetic",
            "models": [{"model": str(m), "parameters": {"weight": 0.5}} for m in (first, other)],
        }
        outs.append(tmp_path / f"out{len(outs)}")
        weightsmith.merge(recipe, outs[-1], fsync=False)
    one, two = (load_file(out / "adapter_model.safetensors") for out in outs)
    assert {n: t.tobytes() for n, t in one.items()} == {n: t.tobytes() for n, t in two.items()}


def test_an_embedding_that_is_the_head_stays_one_tensor_in_a_merge(tmp_path: Path) -> None:
    """mlx-lm has one module for both; PEFT saves the factors of both if they were trained as one."""
    model = base(tmp_path / "base", np.float32, tie=True)
    name, a, b = "model.embed_tokens", normal(50, 4, seed=3), normal(4, H, seed=4)
    ours = mlx(tmp_path / "a", {f"{name}.lora_a": a, f"{name}.lora_b": b})
    factors = {f"{P}{name}.lora_embedding_A": a.T.copy(), f"{P}{name}.lora_embedding_B": b.T.copy()}
    factors |= {f"{P}lm_head.lora_A.weight": b, f"{P}lm_head.lora_B.weight": a}
    settings = {"lora_alpha": 80, "base_model_name_or_path": "org/base"}
    theirs = adapter(tmp_path / "b", factors, ensure_weight_tying=True, **settings)
    models = [{"model": str(lora), "parameters": {"weight": weight}} for lora, weight in ((ours, 0.5), (theirs, -0.25))]
    weightsmith.merge({"merge_method": "task_arithmetic", "models": models}, tmp_path / "merged", fsync=False)
    weights = baked(model, tmp_path / "merged", tmp_path / "out")
    assert "lm_head.weight" not in weights
    before = load_file(model / "model.safetensors")
    np.testing.assert_allclose(weights[f"{name}.weight"], before[f"{name}.weight"] + 0.25 * 20 * (a @ b), rtol=1e-5, atol=1e-4)
    apart = adapter(tmp_path / "c", factors, **settings)
    models[1]["model"] = str(apart)
    with pytest.raises(PlanError, match="trained as one here"):
        weightsmith.plan({"merge_method": "task_arithmetic", "models": models})


def test_an_adapter_of_mlx_becomes_one_of_peft(tmp_path: Path) -> None:
    lora = mlx(tmp_path / "a", parameters={"scale": 0.1})
    weightsmith.convert_lora(lora, tmp_path / "out", progress=False)
    model = base(tmp_path / "base", np.float32)
    expected, weights = (baked(model, a, tmp_path / f"{a.name} applied") for a in (lora, tmp_path / "out"))
    assert {n: t.tobytes() for n, t in weights.items()} == {n: t.tobytes() for n, t in expected.items()}
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"


def peft(folder: Path, ranks: dict[str, int], base: Path, **config: Any) -> Path:
    """An adapter of PEFT with these ranks of modules."""
    tensors: dict[str, np.ndarray] = {}
    shapes = {name: array.shape for name, array in load_file(base / "model.safetensors").items()}
    for k, (module, rank) in enumerate(ranks.items()):
        rows, cols = shapes[f"{module}.weight"]
        a, b = normal(rank, cols, seed=100 + k) / 8, normal(rows, rank, seed=200 + k) / 8
        names = "lora_A.weight", "lora_B.weight"
        if module.endswith(("embed_tokens", "embed_in")):
            names, a, b = ("lora_embedding_A", "lora_embedding_B"), b.T.copy(), a.T.copy()
        tensors |= {f"{P}{module}.{name}": array for name, array in zip(names, (a, b), strict=True)}
        if config.get("use_dora"):
            tensors[f"{P}{module}.lora_magnitude_vector"] = np.abs(normal(rows, seed=300 + k)) + 1
    patterns = {"rank_pattern": {f"^{module}": rank for module, rank in ranks.items()}}
    return adapter(folder, tensors, **{"lora_alpha": 4, "base_model_name_or_path": str(base), **patterns, **config})


L = "model.layers"
EXPERT_MODULES = {f"{L}.1.mlp.experts.{e}.{name}_proj": 3 for e in range(EXPERTS) for name in ("up", "down")}
CONVERTED: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "one rank": ({f"{L}.0.self_attn.q_proj": 4, f"{L}.1.mlp.down_proj": 4}, {}, {}),
    "several ranks": ({f"{L}.0.self_attn.q_proj": 4, f"{L}.1.mlp.up_proj": 2, f"{L}.0.mlp.up_proj": 1}, {}, {}),
    "rsLoRA": ({f"{L}.0.self_attn.q_proj": 4, f"{L}.1.mlp.up_proj": 9}, {"use_rslora": True}, {}),
    "DoRA": ({f"{L}.0.self_attn.q_proj": 4, f"{L}.1.mlp.up_proj": 2}, {"use_dora": True, "lora_alpha": 2}, {}),
    "vocabulary": ({"model.embed_tokens": 4, "lm_head": 4, f"{L}.0.self_attn.q_proj": 4}, {}, {}),
    "tied": ({"model.embed_tokens": 4, f"{L}.0.self_attn.q_proj": 4}, {"ensure_weight_tying": True}, {"tie": True}),
    "experts": ({f"{L}.0.self_attn.q_proj": 4, **EXPERT_MODULES}, {}, {"experts": True}),
}


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason="needs MLX")
def test_mlx_lm_computes_what_a_converted_adapter_says(tmp_path: Path) -> None:
    asked, expected = [], {}
    for name, (ranks, config, options) in CONVERTED.items():
        folder = tiny(tmp_path / name / "base", **options)
        lora = peft(tmp_path / name / "peft", ranks, folder, **config)
        out = tmp_path / name / "mlx"
        weightsmith.convert_lora(lora, out, layout="mlx", base=folder, progress=False)
        asked.append({"base": str(folder), "out": str(out)})
        expected[name] = baked(folder, lora, tmp_path / name / "expected", dtype="float32")
        again = baked(folder, out, tmp_path / name / "again", dtype="float32")
        weightsmith.convert_lora(out, tmp_path / name / "back", progress=False)
        back = baked(folder, tmp_path / name / "back", tmp_path / name / "back applied", dtype="float32")
        assert again.keys() == back.keys() == expected[name].keys()
        for key, array in again.items():
            np.testing.assert_allclose(array, expected[name][key], rtol=2e-6, atol=1e-6, err_msg=f"{name}: {key}")
            np.testing.assert_allclose(back[key], array, rtol=1e-6, atol=1e-7, err_msg=f"{name}: {key}")
    run_mlx(asked, tmp_path)
    for name, arrays in expected.items():
        fused = apart(load_file(tmp_path / name / "mlx" / "fused.safetensors"))
        assert fused.keys() == arrays.keys()
        for key, array in arrays.items():
            np.testing.assert_allclose(fused[key], array, rtol=3e-6, atol=3e-6, err_msg=f"{name}: {key}")


def test_experts_of_several_scales_keep_their_numbers_in_16_bits(tmp_path: Path) -> None:
    """Factors of one that is scaled become float32, and so do those of the others: all are one tensor."""
    folder = tiny(tmp_path / "base", experts=True)
    ranks = {f"{L}.1.mlp.experts.{e}.up_proj": rank for e, rank in enumerate((2, 4, 4))}
    lora = peft(tmp_path / "peft", ranks, folder)
    file = lora / "adapter_model.safetensors"
    halves = {name: array.astype(ml_dtypes.bfloat16) for name, array in load_file(file).items()}
    save_file(halves, file)
    weightsmith.convert_lora(lora, tmp_path / "mlx", layout="mlx", base=folder, progress=False)
    expected, weights = (baked(folder, a, tmp_path / f"{a.name} applied", dtype="float32") for a in (lora, tmp_path / "mlx"))
    for name, array in expected.items():
        np.testing.assert_allclose(weights[name], array, rtol=2e-6, atol=1e-6, err_msg=name)


def test_what_an_adapter_of_mlx_cannot_hold_is_refused(tmp_path: Path) -> None:
    tied, plain = tiny(tmp_path / "tied", tie=True), tiny(tmp_path / "plain")
    q, some = f"{L}.0.self_attn.q_proj", {f"{L}.1.mlp.experts.{e}.up_proj": 4 for e in (0, 2)}
    mixed = peft(tmp_path / "mixed", {q: 4, f"{L}.1.mlp.up_proj": 4}, plain, use_dora=False)
    cases = {
        "alone, where the base ties embedding and head": (peft(tmp_path / "a", {"model.embed_tokens": 4}, tied), tied),
        "factors of some experts of": (peft(tmp_path / "b", some, tiny(tmp_path / "experts", experts=True)), None),
        "depend on the base, and the adapter names none": (
            peft(tmp_path / "c", {"lm_head": 4}, plain, base_model_name_or_path=None),
            None,
        ),
    }
    tensors = load_file(mixed / "adapter_model.safetensors")
    config = json.loads((mixed / "adapter_config.json").read_text())
    adapter(mixed, {**tensors, f"{P}lm_head.weight": normal(TOKENS, WIDTH)}, **config, modules_to_save=["lm_head"])
    cases["saves 1 tensors whole"] = (mixed, None)
    for words, (lora, model) in cases.items():
        with pytest.raises(PlanError) as caught:
            weightsmith.convert_lora(lora, tmp_path / "out", layout="mlx", base=model, progress=False)
        (problem,) = caught.value.problems
        assert words in problem.finding.what


RENAMED = {
    "lfm2-moe": {f"{L}.0.feed_forward.w1": 4, f"{L}.0.feed_forward.w2": 4, f"{L}.0.feed_forward.w3": 2}
    | {f"{L}.1.feed_forward.experts.{e}.w2": 4 for e in range(4)},
    "gpt-neox": {
        "gpt_neox.layers.0.attention.dense": 4,
        "gpt_neox.layers.1.mlp.dense_h_to_4h": 4,
        "gpt_neox.embed_in": 4,
        "embed_out": 4,
    },
}


def hub_name(name: str) -> str:
    """The Hub's name of a tensor that MLX renames."""
    for there, here in {
        "model.h.": "gpt_neox.layers.",
        "model.embed_out": "embed_out",
        "model.embed_in": "gpt_neox.embed_in",
    }.items():
        name = name.replace(there, here)
    for there, here in {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}.items():
        name = name.replace(there, here)
    return name


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason="needs MLX")
def test_modules_that_mlx_renames_get_its_names_and_are_read_by_them(tmp_path: Path) -> None:
    asked, expected = [], {}
    for name, ranks in RENAMED.items():
        wider = {"intermediate_size": 128} if name == "gpt-neox" else {}  # four times the width, as mlx-lm assumes
        save(name, tmp_path / name / "base", 1, dtype="float32", **wider)
        folder, out = tmp_path / name / "base", tmp_path / name / "mlx"
        config = json.loads((folder / "config.json").read_text())
        config |= {"rotary_emb_base": 10000, "rotary_pct": 0.25}  # mlx-lm reads GPT-NeoX's old keys alone
        (folder / "config.json").write_text(json.dumps(config))
        lora = peft(tmp_path / name / "peft", ranks, folder)
        weightsmith.convert_lora(lora, out, layout="mlx", progress=False)
        asked.append({"base": str(folder), "out": str(out)})
        expected[name] = baked(folder, lora, tmp_path / name / "expected")
        again = baked(folder, out, tmp_path / name / "again")
        assert again.keys() == expected[name].keys()
        for key, array in again.items():
            np.testing.assert_allclose(array, expected[name][key], rtol=2e-6, atol=1e-6, err_msg=f"{name}: {key}")
    run_mlx(asked, tmp_path)
    for name, ranks in RENAMED.items():
        fused = {hub_name(key): array for key, array in apart(load_file(tmp_path / name / "mlx" / "fused.safetensors")).items()}
        for module in ranks:
            key = f"{module}.weight"
            np.testing.assert_allclose(fused[key], expected[name][key], rtol=3e-6, atol=3e-6, err_msg=f"{name}: {key}")


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason="needs MLX")
def test_decoders_of_vision_models_get_the_names_of_mlx(tmp_path: Path) -> None:
    folder = save("gemma3-vl", tmp_path / "base", 1, dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": config["text_config"]["vocab_size"]}  # where mlx-lm looks for it
    (folder / "config.json").write_text(json.dumps(config))
    module, there = (f"{home}.layers.0.mlp.down_proj" for home in ("model.language_model", "language_model.model"))
    rows, cols = load_file(folder / "model.safetensors")[f"{there}.weight"].shape
    tensors = {f"{P}{module}.lora_A.weight": normal(4, cols), f"{P}{module}.lora_B.weight": normal(rows, 4)}
    lora = adapter(tmp_path / "peft", tensors, lora_alpha=4, base_model_name_or_path=str(folder))
    weightsmith.convert_lora(lora, tmp_path / "mlx", layout="mlx", progress=False)
    assert set(load_file(tmp_path / "mlx" / "adapters.safetensors")) == {f"{there}.lora_a", f"{there}.lora_b"}
    expected = baked(folder, lora, tmp_path / "expected")
    run_mlx([{"base": str(folder), "out": str(tmp_path / "mlx")}], tmp_path)
    fused = load_file(tmp_path / "mlx" / "fused.safetensors")
    np.testing.assert_allclose(fused[f"{there}.weight"], expected[f"{there}.weight"], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("name", "module"),
    [("deepseek-v3", f"{L}.0.self_attn.kv_b_proj"), ("granite-hybrid", f"{L}.0.shared_mlp.input_linear")],
)
def test_modules_that_mlx_splits_are_refused(name: str, module: str, tmp_path: Path) -> None:
    save(name, tmp_path / "base", 1, dtype="float32")
    lora = peft(tmp_path / "peft", {module: 4}, tmp_path / "base")
    with pytest.raises(PlanError, match=f"mlx-lm has no module {module}: it splits the matrix"):
        weightsmith.convert_lora(lora, tmp_path / "out", layout="mlx", progress=False)


def test_a_module_of_mlx_that_the_base_lacks_is_no_slip_of_the_pen(tmp_path: Path) -> None:
    names = {f"{L}.0.mlp.gate_projs.lora_a": normal(H, 4), f"{L}.0.mlp.gate_projs.lora_b": normal(4, INNER)}
    message = str(refusal(base(tmp_path / "base"), mlx(tmp_path / "a", names)))
    assert "MLX renames or splits these modules: fuse it with mlx_lm.fuse" in message
    assert "did you mean" not in message


def test_a_vocabulary_of_mlx_is_one_for_peft_too(tmp_path: Path) -> None:
    """PEFT follows `ensure_weight_tying` only where a target is `embed_tokens` or `lm_head`."""
    lora = mlx(tmp_path / "a", {"transformer.wte.lora_a": normal(50, 4), "transformer.wte.lora_b": normal(4, H)})
    weightsmith.convert_lora(lora, tmp_path / "out", progress=False)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["ensure_weight_tying"] is True
    assert config["target_modules"] == ["transformer.wte", "lm_head"]
    assert open_adapter(str(tmp_path / "out")).as_one


REFUSED: dict[str, tuple[dict[str, Any], str, type[Exception]]] = {
    "full": ({"fine_tune_type": "full"}, "a full fine-tune of MLX", Unsupported),
    "other type": ({"fine_tune_type": "oft"}, "fine_tune_type is 'oft', neither lora nor dora", Unsupported),
    "no parameters": ({"lora_parameters": None}, "lora_parameters is None, not an object", FormatError),
    "early mlx-vlm": ({"lora_parameters": None, "rank": 4, "alpha": 8}, "an adapter of mlx-vlm before", Unsupported),
    "alpha": ({"parameters": {"alpha": 16.0}}, "mlx-lm before 0.21 multiplies scale with alpha / rank", Unsupported),
    "unknown": ({"parameters": {"use_rslora": True}}, "keys of lora_parameters that weightsmith does not know", Unsupported),
    "rank": ({"parameters": {"rank": 0}}, "rank is 0; a rank must be a positive integer", FormatError),
    "scale": ({"parameters": {"scale": None}}, "scale is None, not a finite number", FormatError),
    "other rank": ({"parameters": {"rank": 8}}, "lora_a [24, 4] and lora_b [4, 24] are no factors of rank 8", FormatError),
    "no norms": ({"fine_tune_type": "dora"}, "has no norms, and fine_tune_type is dora", FormatError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configs_that_are_refused(name: str, tmp_path: Path) -> None:
    config, words, kind = REFUSED[name]
    problem = refusal(base(tmp_path / "base"), mlx(tmp_path / "a", **config))
    assert isinstance(problem, kind)
    assert words in str(problem)


FILES: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any], str]] = {
    "no b": ({f"{Q}.lora_a": (H, 4)}, {}, f"{Q} has no lora_b"),
    "others": ({f"{Q}.lora_a": (H, 4), f"{Q}.lora_b": (4, H), f"{Q}.scales": (H, 2)}, {}, "neither factors nor norms"),
    "norms": (
        {f"{Q}.lora_a": (H, 4), f"{Q}.lora_b": (4, H), f"{Q}.m": (5,)},
        {"fine_tune_type": None},
        "has not one number for each of 24 outputs",
    ),
    "norms of an embedding": (
        {"model.embed_tokens.lora_a": (50, 4), "model.embed_tokens.lora_b": (4, H), "model.embed_tokens.m": (50,)},
        {"fine_tune_type": "dora"},
        "DoRA of an embedding is not applied",
    ),
    "experts elsewhere": (
        {f"{Q}.lora_a": (3, 4, H), f"{Q}.lora_b": (3, H, 4)},
        {},
        "are of experts, and where model.layers.0.self_attn.q_proj has these is not known",
    ),
    "uneven experts": (
        {"model.layers.0.mlp.switch_mlp.up_proj.lora_a": (2, 4, H), "model.layers.0.mlp.switch_mlp.up_proj.lora_b": (3, H, 4)},
        {},
        "are no factors of experts of rank 4",
    ),
    "no such module": ({f"{Q}x.lora_a": (H, 4), f"{Q}x.lora_b": (4, H)}, {}, f"{Q}x.weight: the base has no such tensor"),
    "other shape": ({f"{Q}.lora_a": (INNER, 4), f"{Q}.lora_b": (4, H)}, {}, "and the adapter is for [24, 40]"),
}


@pytest.mark.parametrize("name", FILES)
def test_tensors_that_are_refused(name: str, tmp_path: Path) -> None:
    shapes, config, words = FILES[name]
    lora = mlx(tmp_path / "a", {key: normal(*shape) for key, shape in shapes.items()}, **config)
    assert words in str(refusal(base(tmp_path / "base"), lora))


def test_experts_as_early_versions_stored_them(tmp_path: Path) -> None:
    """A of all experts was [experts · rank, inputs]."""
    name = "model.layers.0.mlp.switch_mlp.up_proj"
    a, b = normal(3, 4, H, seed=1), normal(3, INNER, 4, seed=2)
    read = []
    for k, stored in enumerate((a, a.reshape(12, H))):
        with open_adapter(str(mlx(tmp_path / str(k), {f"{name}.lora_a": stored, f"{name}.lora_b": b}))).checkpoint as opened:
            read.append({key: opened.read(key) for key in opened.specs})
    assert read[0].keys() == read[1].keys()
    for key, array in read[0].items():
        np.testing.assert_array_equal(array, read[1][key])
    np.testing.assert_array_equal(read[0][f"{P}model.layers.0.mlp.experts.2.up_proj.lora_A.weight"], a[2])


def test_factors_of_absurdly_many_experts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsmith._models.lora.mlx_and_gguf._MAX_PARTS", 10)
    a, b = normal(3, 4, H), normal(3, INNER, 4)
    modules = [f"model.layers.{i}.mlp.switch_mlp.up_proj" for i in range(2)]
    lora = mlx(tmp_path, {f"{name}.{part}": array for name in modules for part, array in (("lora_a", a), ("lora_b", b))})
    with pytest.raises(FormatError, match="more than 10 factors of experts"):
        open_adapter(str(lora))
