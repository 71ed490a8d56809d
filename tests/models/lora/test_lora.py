"""LoRA adapters: against peft's own merge, in bytes that no tiling changes, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests.mini import as_bytes, write_checkpoint
from weightsmith._base.errors import (
    CheckpointError,
    FormatError,
    NotFound,
    PlanError,
    ShapeError,
    Unsupported,
    WeightsmithError,
)
from weightsmith._base.installation import install
from weightsmith._models.lora import apply_adapter, open_adapter
from weightsmith._models.tokenizers.files import templates_of
from weightsmith._planning.recipe.values import parse_reference

BF16 = np.dtype(ml_dtypes.bfloat16)
H, INNER, TOKENS = 24, 40, 50
P = "base_model.model."
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": TOKENS, "tie_word_embeddings": False}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([*shape, seed]).standard_normal(shape).astype(np.float32)


def base_tensors(layers: int = 2, *, head: bool = True) -> dict[str, np.ndarray]:
    tensors = {"model.embed_tokens.weight": normal(TOKENS, H, seed=9), "model.norm.weight": normal(H)}
    for i in range(layers):
        for k, (name, shape) in enumerate(
            {
                "self_attn.q_proj": (H, H),
                "self_attn.k_proj": (H, H),
                "self_attn.v_proj": (H, H),
                "self_attn.o_proj": (H, H),
                "mlp.gate_proj": (INNER, H),
                "mlp.up_proj": (INNER, H),
                "mlp.down_proj": (H, INNER),
            }.items()
        ):
            tensors[f"model.layers.{i}.{name}.weight"] = normal(*shape, seed=10 * i + k)
        tensors |= {f"model.layers.{i}.{name}.weight": normal(H) for name in ("input_layernorm", "post_attention_layernorm")}
    return tensors | ({"lm_head.weight": normal(TOKENS, H, seed=8)} if head else {})


def base(folder: Path, dtype: Any = BF16, *, tie: bool = False, **keys: Any) -> Path:
    tensors = {name: a.astype(dtype) for name, a in base_tensors(head=not tie).items()}
    return write_checkpoint(folder, tensors, {**LLAMA, "num_hidden_layers": 2, "tie_word_embeddings": tie, **keys})


def factors(module: str, rows: int, cols: int, rank: int = 4, seed: int = 1) -> dict[str, np.ndarray]:
    a, b = normal(rank, cols, seed=seed), normal(rows, rank, seed=seed + 1)
    return {f"{P}{module}.lora_A.weight": a, f"{P}{module}.lora_B.weight": b}


Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def adapter(folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(factors(Q, H, H) if tensors is None else tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def baked(model: Path, lora: Path, out: Path, **options: Any) -> dict[str, np.ndarray]:
    weightsmith.merge({"merge_method": "passthrough", "models": [{"model": f"{model}+{lora}"}], **options}, out, fsync=False)
    with weightsmith.open_checkpoint(out) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.specs}


def refusal(model: Path, lora: Path) -> WeightsmithError:
    with pytest.raises(PlanError) as caught:
        weightsmith.plan({"merge_method": "passthrough", "models": [{"model": f"{model}+{lora}"}]})
    (problem,) = caught.value.problems
    return problem


# ---- peft is the judge

CASES: dict[str, dict[str, Any]] = {
    "three targets": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "patterns, rsLoRA": {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 8, r"layers\.1\.mlp\.down_proj": 2},
        "alpha_pattern": {"k_proj": 3, "model.layers.1.self_attn.o_proj": 5, "q_proj": 2.5},
        "use_rslora": True,
    },
    "modules to save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "up_proj"]},
    "DoRA": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "DoRA of embedding and head": {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    "biases": {"target_modules": ["q_proj", "down_proj"], "bias": "all"},
    "biases of targets": {"target_modules": ["q_proj", "down_proj"], "bias": "lora_only"},
    "biases of factors": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True, "bias": "none"},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in (*CASES, "gpt2", "gpt2 DoRA")), ("DoRA", "bfloat16"), ("head", "bfloat16")],
)
def test_baking_in_an_adapter_is_peft_s_merge(name: str, dtype: str, tmp_path: Path) -> None:
    """To float32 rounding; the adapter itself is kept in float32 or bf16."""
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    if name.startswith("gpt2"):
        settings = transformers.GPT2Config(vocab_size=TOKENS, n_embd=H, n_layer=2, n_head=2, n_positions=32)
        model = transformers.GPT2LMHeadModel(settings)
        case: dict[str, Any] = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": name != "gpt2"}
    else:
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
        sizes = {"vocab_size": TOKENS, "hidden_size": H, "intermediate_size": INNER, "attention_bias": "bias" in CASES[name]}
        settings = transformers.LlamaConfig(**sizes, **heads)
        model, case = transformers.LlamaForCausalLM(settings), CASES[name]
    model.save_pretrained(tmp_path / "base")
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, **case))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data = (torch.randn_like(parameter) * 0.1).to(getattr(torch, dtype))
    tuned.save_pretrained(tmp_path / "adapter")
    assert any(t.dtype.name == dtype for t in load_file(tmp_path / "adapter/adapter_model.safetensors").values())
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "peft")
    expected, before = (load_file(tmp_path / f"{folder}/model.safetensors") for folder in ("peft", "base"))
    weights = baked(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert weights.keys() == expected.keys()
    assert any((expected[n] != before[n]).any() for n in expected)
    for tensor, want in expected.items():
        np.testing.assert_allclose(weights[tensor], want, rtol=2e-6, atol=1e-7, err_msg=tensor)
        if (want == before[tensor]).all():
            assert as_bytes(weights[tensor]) == as_bytes(want)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dora", [False, True])
def test_convolutions_are_those_of_peft(dora: bool, tmp_path: Path) -> None:
    """Whisper's two. Rank and alpha differ by module."""
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    torch.manual_seed(0)
    sizes = {"d_model": H, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER, "vocab_size": TOKENS, "num_mel_bins": 8}
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 2))}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **layers, **tokens, max_source_positions=8, max_target_positions=8)
    model = transformers.WhisperForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "base")
    settings = {"target_modules": ["conv1", "conv2", "fc1"], "rank_pattern": {"conv2": 3}, "alpha_pattern": {"conv1": 5}}
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, use_dora=dora, **settings))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + torch.randn_like(parameter) * 0.1
    tuned.save_pretrained(tmp_path / "adapter")
    fresh = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "base", dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").merge_and_unload()
    expected = {name: tensor.detach().numpy() for name, tensor in merged.state_dict().items()}
    before = load_file(tmp_path / "base/model.safetensors")
    weights = baked(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert sum(bool((expected[name] != array).any()) for name, array in before.items()) == 4
    for name, array in weights.items():
        np.testing.assert_allclose(array, expected[name], rtol=3e-6, atol=1e-6, err_msg=name)
    if dora:
        return
    recipe = {"merge_method": "linear", "models": [{"model": str(tmp_path / "adapter"), "parameters": {"weight": 0.5}}]}
    weightsmith.merge({**recipe, "parameters": {"normalize": False}}, tmp_path / "half", fsync=False)
    fresh = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "base", dtype=torch.float32)
    halved = peft.PeftModel.from_pretrained(fresh, tmp_path / "half").merge_and_unload().state_dict()
    for name, array in before.items():
        np.testing.assert_allclose(halved[name].numpy(), (array + expected[name]) / 2, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "stated"), [("llama", True), ("gpt2", False)])
def test_the_base_says_which_way_round_square_matrices_are(family: str, stated: bool, tmp_path: Path) -> None:
    """As PEFT does, whatever `fan_in_fan_out` says: trainings in 4 bits leave it true for Llama."""
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    torch.manual_seed(0)
    if family == "gpt2":
        settings = transformers.GPT2Config(vocab_size=TOKENS, n_embd=H, n_layer=1, n_head=2, n_positions=16)
        model, target = transformers.GPT2LMHeadModel(settings), "attn.c_proj"
    else:
        settings = transformers.LlamaConfig(vocab_size=TOKENS, hidden_size=H, num_hidden_layers=1, num_attention_heads=2)
        model, target = transformers.LlamaForCausalLM(settings), "q_proj"
    model.save_pretrained(tmp_path / "base")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = peft.LoraConfig(r=4, target_modules=[target], init_lora_weights=False, fan_in_fan_out=family == "gpt2")
    tuned = peft.get_peft_model(model, config)
    tuned.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fan_in_fan_out": stated}))
    fresh = type(model).from_pretrained(tmp_path / "base")
    expected = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").merge_and_unload().state_dict()
    weights = baked(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    (changed,) = [name for name, array in weights.items() if (array != before[name].numpy()).any()]
    assert target in changed
    np.testing.assert_allclose(weights[changed], expected[changed].numpy(), rtol=2e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [{"modules_to_save": ["wte"]}, {"target_modules": ["wte", "c_attn"]}, {}])
def test_the_head_of_gpt2_stays_as_it_was_trained(case: dict[str, Any], tmp_path: Path) -> None:
    """The embedding alone was trained: PEFT keeps the head, which is one tensor with it in the base."""
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    torch.manual_seed(0)
    sizes = {"vocab_size": TOKENS, "n_embd": H, "n_layer": 1, "n_head": 2, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    model.save_pretrained(tmp_path / "base")
    settings = {"target_modules": ["c_attn"], "fan_in_fan_out": True, **case}
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **settings))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + torch.randn_like(parameter) * 0.1
    tuned.save_pretrained(tmp_path / "adapter")
    tokens = torch.arange(9)[None]
    baked(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(again.eval()(tokens).logits, tuned.eval()(tokens).logits, rtol=1e-4, atol=1e-4)
    assert again.config.tie_word_embeddings == (not case)


def test_an_embedding_that_is_a_head_of_another_name(tmp_path: Path) -> None:
    tensors = {"bert.embeddings.word_embeddings.weight": normal(TOKENS, H), "bert.q.weight": normal(H, H)}
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": TOKENS}
    model, name = write_checkpoint(tmp_path / "base", tensors, config), f"{P}bert.embeddings.word_embeddings"
    pair = {f"{name}.lora_embedding_A": normal(4, TOKENS), f"{name}.lora_embedding_B": normal(H, 4)}
    head = adapter(tmp_path / "head", factors("cls.predictions.decoder", TOKENS, H))
    assert "a head that is one tensor with the embedding in the base. Merge it with peft" in str(refusal(model, head))
    for number, (lora, notes) in enumerate(((pair, 1), (factors("bert.q", H, H), 0))):
        folder = adapter(tmp_path / str(number), lora)
        with weightsmith.open_checkpoint(model) as opened, apply_adapter(opened, open_adapter(str(folder)), "x") as applied:
            assert len(applied.notes) == notes
            assert all("is also the head of BertForMaskedLM: both change here" in note.what for note in applied.notes)


def test_biases_that_were_trained_and_not_saved(tmp_path: Path) -> None:
    """PEFT left them out for a while."""
    tensors = {name: array.astype(np.float32) for name, array in base_tensors().items()} | {f"{Q}.bias": normal(H)}
    model = write_checkpoint(tmp_path / "base", tensors, {**LLAMA, "num_hidden_layers": 2})
    lora = adapter(tmp_path / "a", bias="lora_only")
    with weightsmith.open_checkpoint(model) as checkpoint, apply_adapter(checkpoint, open_adapter(str(lora)), "x") as applied:
        (note,) = applied.notes
    assert note.what == f"biases were trained, and the adapter has none: those of the base stay, such as {Q}.bias"
    saved = adapter(tmp_path / "b", factors(Q, H, H) | {f"{P}{Q}.base_layer.bias": normal(H, seed=5)}, bias="lora_only")
    np.testing.assert_array_equal(baked(model, saved, tmp_path / "out")[f"{Q}.bias"], normal(H, seed=5))


# ---- what it computes


@pytest.mark.parametrize("stored", [np.float32, np.float16, BF16])
def test_the_update_is_alpha_over_rank_times_b_a(stored: Any, tmp_path: Path) -> None:
    tensors = {n: a.astype(stored) for n, a in (factors(Q, H, H) | factors(DOWN, H, INNER)).items()}
    weights = baked(base(tmp_path / "base"), adapter(tmp_path / "a", tensors), tmp_path / "out", dtype="float32")
    for module in (Q, DOWN):
        a, b = (tensors[f"{P}{module}.lora_{part}.weight"].astype(np.float64) for part in "AB")
        plain = base_tensors()[f"{module}.weight"].astype(BF16).astype(np.float64)
        assert as_bytes(weights[f"{module}.weight"]) == as_bytes((plain + 2.0 * (b @ a)).astype(np.float32))


def test_any_run_of_bytes_is_that_run_of_the_whole(tmp_path: Path) -> None:
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "a", factors(DOWN, H, INNER))
    with weightsmith.open_checkpoint(model) as checkpoint, apply_adapter(checkpoint, open_adapter(str(lora)), "x") as applied:
        whole = as_bytes(applied.read(f"{DOWN}.weight"))
        for start, end in [(0, 4), (3, 90), (INNER * 4 - 4, INNER * 4 + 8), (1, len(whole)), (777, 777)]:
            buffer = np.empty(end - start, np.uint8)
            applied.read_into(f"{DOWN}.weight", start, buffer)
            assert buffer.tobytes() == whole[start:end]
        assert as_bytes(applied.read(f"{DOWN}.weight", slice(3, 9))) == whole[3 * INNER * 4 : 9 * INNER * 4]


def dora(folder: Path, magnitude: np.ndarray | None = None, **config: Any) -> Path:
    tensors = factors(DOWN, H, INNER)
    tensors[f"{P}{DOWN}.lora_magnitude_vector"] = np.abs(normal(H)) + 1 if magnitude is None else magnitude
    return adapter(folder, tensors, **{"use_dora": True, **config})


def test_the_rows_of_dora_have_the_norms_that_it_names(tmp_path: Path) -> None:
    model, lora = base(tmp_path / "base"), dora(tmp_path / "a")
    with weightsmith.open_checkpoint(model) as checkpoint, apply_adapter(checkpoint, open_adapter(str(lora)), "x") as applied:
        whole = applied.read(f"{DOWN}.weight")
        np.testing.assert_allclose(np.linalg.norm(whole, axis=1), np.abs(normal(H)) + 1, rtol=1e-6)
        data = as_bytes(whole)
        for start, end in [(0, 4), (3, 90), (INNER * 4 - 4, INNER * 4 + 8), (1, len(data))]:
            buffer = np.empty(end - start, np.uint8)
            applied.read_into(f"{DOWN}.weight", start, buffer)
            assert buffer.tobytes() == data[start:end]


@pytest.mark.parametrize(
    ("magnitude", "config", "words"),
    [
        (None, {"use_dora": False}, "has a magnitude, and use_dora is False"),
        (np.ones(H + 1, np.float32), {}, "has not one number for each of 24 outputs"),
    ],
)
def test_dora_that_cannot_be_read(magnitude: Any, config: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in str(refusal(base(tmp_path / "base"), dora(tmp_path / "a", magnitude, **config)))


def test_dora_without_magnitudes_is_refused(tmp_path: Path) -> None:
    problem = refusal(base(tmp_path / "base"), adapter(tmp_path / "a", use_dora=True))
    assert "has no magnitude, and use_dora is true" in str(problem).lower()


@pytest.mark.matrix
@pytest.mark.slow
def test_bytes_do_not_depend_on_threads_or_memory(tmp_path: Path) -> None:
    big = {"w.weight": normal(700, 900).astype(BF16), "v.weight": normal(900).astype(BF16)}
    model = write_checkpoint(tmp_path / "base", big, {"model_type": "x"})
    lora = adapter(tmp_path / "a", factors("w", 700, 900, 16), r=16)
    recipe = {
        "merge_method": "ties",
        "base_model": str(model),
        "models": [{"model": f"{model}+{lora}", "parameters": {"weight": 1.0, "density": 0.4}}],
    }
    sums = set()
    for threads, memory in ((1, None), (2, None), (3, 210_000_000)):
        out = tmp_path / f"{threads}"
        weightsmith.merge(recipe, out, threads=threads, max_memory_bytes=memory, fsync=False)
        sums.add((out / "model.safetensors").read_bytes())
    assert len(sums) == 1


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "passthrough"])
def test_the_output_has_the_base_s_dtype_unless_another_is_asked_for(method: str, tmp_path: Path) -> None:
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "a")
    entry = {"model": f"{model}+{lora}", "parameters": {} if method == "passthrough" else {"weight": 0.5}}
    recipe: dict[str, Any] = {"merge_method": method, "models": [entry]}
    if method == "task_arithmetic":
        recipe["base_model"] = str(model)
    for asked, dtype in ((None, "BF16"), ("float32", "F32"), ("bfloat16", "BF16")):
        plan = weightsmith.plan(recipe | ({"dtype": asked} if asked else {}))
        assert {step.out.dtype.name for step in plan.steps} == {dtype}
        assert plan.warnings == ()


def test_float32_tensors_of_a_16_bit_base_stay_float32_beside_an_adapter(tmp_path: Path) -> None:
    tensors = {n: a.astype(BF16) for n, a in base_tensors().items()} | {"model.norm.weight": normal(H)}
    every = [n.removesuffix(".weight") for n, a in tensors.items() if a.ndim == 2 and "layers" in n]
    updates = {k: v for module in every for k, v in factors(module, *tensors[f"{module}.weight"].shape).items()}
    model, lora = write_checkpoint(tmp_path / "base", tensors, LLAMA), adapter(tmp_path / "a", updates)
    plan = weightsmith.plan({"merge_method": "passthrough", "models": [{"model": f"{model}+{lora}"}], "dtype": "bfloat16"})
    assert {s.out.name for s in plan.steps if s.out.dtype.name == "F32"} == {"model.norm.weight"}


def test_a_merge_sees_the_update_before_it_is_rounded(tmp_path: Path) -> None:
    """An update far below the base's last bit: lost when baked in, there when the difference alone is scaled up."""
    tiny = {n: a * np.float32(1e-4) for n, a in factors(Q, H, H).items()}
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "a", tiny)
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(model),
        "models": [{"model": f"{model}+{lora}", "parameters": {"weight": 1e4}}],
        "dtype": "float32",
    }
    weightsmith.merge(recipe, tmp_path / "out", fsync=False)
    a, b = (tiny[f"{P}{Q}.lora_{part}.weight"].astype(np.float64) for part in "AB")
    plain = base_tensors()[f"{Q}.weight"].astype(BF16).astype(np.float64)
    with weightsmith.open_checkpoint(tmp_path / "out") as out:
        np.testing.assert_allclose(out.read(f"{Q}.weight"), plain + 1e4 * 2 * (b @ a), rtol=0, atol=2e-3)


# ---- names


def test_the_mapping_form_means_the_same(tmp_path: Path) -> None:
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "a")
    text = f"merge_method: passthrough\nmodels: [{{model: {{model: {{path: {model}}}, lora: {{path: {lora}}}}}}}]\n"
    weightsmith.merge(text, tmp_path / "out", fsync=False)
    baked(model, lora, tmp_path / "other")
    one, two = ((tmp_path / f"{out}/model.safetensors").read_bytes() for out in ("out", "other"))
    assert one == two


def test_a_reference_holds_two_revisions() -> None:
    ref = parse_reference("org/base@v1+org/adapter@v2", "here")
    assert not isinstance(ref, WeightsmithError)
    assert ref.lora is not None
    assert (ref.path, ref.revision, ref.lora.path, ref.lora.revision) == ("org/base", "v1", "org/adapter", "v2")
    assert str(ref) == "org/base@v1+org/adapter@v2"


def test_one_base_with_two_adapters_is_two_models_and_one_with_one_is_one(tmp_path: Path) -> None:
    model = base(tmp_path / "base")
    a, b = adapter(tmp_path / "a"), adapter(tmp_path / "b", factors(Q, H, H, seed=5))
    models = [{"model": f"{model}+{lora}", "parameters": {"weight": 1}} for lora in (a, f"{b}/", b)]
    plan = weightsmith.plan({"merge_method": "linear", "models": models[:2]})
    assert [m.ref for m in plan.models] == [f"{model}+{a}", f"{model}+{b}/"]
    with pytest.raises(PlanError, match="is listed twice"):
        weightsmith.plan({"merge_method": "linear", "models": models})
    weightsmith.merge({"merge_method": "linear", "models": models[:2]}, tmp_path / "out", fsync=False)
    assert f"* `{model}+{a}`" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("beginning", ["", "model.language_model.", "language_model.model."])
def test_the_base_s_names_may_begin_otherwise(beginning: str, tmp_path: Path) -> None:
    tensors = {n.replace("model.", beginning, 1): a for n, a in base_tensors().items()}
    model = write_checkpoint(tmp_path / "base", tensors, LLAMA)
    weights = baked(model, adapter(tmp_path / "a"), tmp_path / "out")
    name = f"{Q}.weight".replace("model.", beginning, 1)
    assert {n for n in weights if (weights[n] != tensors[n]).any()} == {name}


def test_names_that_could_be_two_modules_are_not_guessed(tmp_path: Path) -> None:
    tensors = {f"{tower}.layers.0.self_attn.q_proj.weight": normal(H, H) for tower in ("vision", "text")}
    model = write_checkpoint(tmp_path / "base", tensors, LLAMA)
    assert "the base has no such tensor" in str(refusal(model, adapter(tmp_path / "a")))


# ---- embedding and head


def test_a_tied_head_keeps_its_numbers_when_the_embedding_alone_is_trained(tmp_path: Path) -> None:
    a, b = normal(4, TOKENS, seed=1), normal(H, 4, seed=2)
    tensors = {f"{P}model.embed_tokens.lora_embedding_A": a, f"{P}model.embed_tokens.lora_embedding_B": b}
    model = base(tmp_path / "base", np.float32, tie=True)
    weights = baked(model, adapter(tmp_path / "a", tensors), tmp_path / "out")
    plain = base_tensors()["model.embed_tokens.weight"]
    assert as_bytes(weights["lm_head.weight"]) == as_bytes(plain)
    np.testing.assert_allclose(weights["model.embed_tokens.weight"], plain + 2 * (b @ a).T, rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


def test_a_tied_head_that_is_trained_starts_from_the_embedding(tmp_path: Path) -> None:
    tensors = factors("lm_head", TOKENS, H)
    model, lora = base(tmp_path / "base", tie=True), adapter(tmp_path / "a", tensors)
    weights = baked(model, lora, tmp_path / "out", dtype="float32")
    plain = base_tensors()["model.embed_tokens.weight"].astype(BF16).astype(np.float32)
    a, b = tensors.values()
    np.testing.assert_allclose(weights["lm_head.weight"], plain + 2 * (b @ a), rtol=1e-5, atol=1e-5)
    assert as_bytes(weights["model.embed_tokens.weight"]) == as_bytes(plain)
    plan = weightsmith.plan({"merge_method": "passthrough", "models": [{"model": f"{model}+{lora}"}]})
    assert [w.what for w in plan.warnings] == [
        "the adapter was trained on the head, which the base ties to its embedding: they are two tensors now"
    ]
    assert {s.out.dtype.name for s in plan.steps} == {"BF16"}


def test_a_tied_head_that_is_saved_whole_has_the_base_s_dtype(tmp_path: Path) -> None:
    head = normal(TOKENS, H, seed=3)
    model, lora = base(tmp_path / "base", tie=True), adapter(tmp_path / "a", {f"{P}lm_head.weight": head})
    weights = baked(model, lora, tmp_path / "out")
    assert as_bytes(weights["lm_head.weight"]) == as_bytes(head.astype(BF16))
    assert as_bytes(weights["model.embed_tokens.weight"]) == as_bytes(base_tensors()["model.embed_tokens.weight"].astype(BF16))


def test_tokens_that_the_adapter_adds_are_in_the_output_and_its_config(tmp_path: Path) -> None:
    new = {f"{P}{name}.weight": normal(TOKENS + 3, H) for name in ("lm_head", "model.embed_tokens")}
    model, lora = base(tmp_path / "base", np.float32), adapter(tmp_path / "a", factors(Q, H, H) | new)
    weights = baked(model, lora, tmp_path / "out")
    assert as_bytes(weights["lm_head.weight"]) == as_bytes(normal(TOKENS + 3, H))
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == TOKENS + 3
    del new[f"{P}lm_head.weight"]
    problem = refusal(model, adapter(tmp_path / "b", new))
    assert f"lm_head.weight: would have {TOKENS} rows, and embedding and head need as many" in str(problem)


def test_added_tokens_go_by_other_names_too(tmp_path: Path) -> None:
    """InternLM's names, in a model whose config has a part for text."""
    names = {"model.embed_tokens.weight": "model.tok_embeddings.weight", "lm_head.weight": "output.weight"}
    tensors = {names.get(name, name): a for name, a in base_tensors().items()}
    text = {"vocab_size": TOKENS, "num_hidden_layers": 2}
    model = write_checkpoint(tmp_path / "base", tensors, {**LLAMA, "num_hidden_layers": 2, "text_config": text})
    new = {f"{P}{name}": normal(TOKENS + 3, H) for name in names.values()}
    weights = baked(model, adapter(tmp_path / "a", factors(Q, H, H) | new), tmp_path / "out")
    assert as_bytes(weights["output.weight"]) == as_bytes(normal(TOKENS + 3, H))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["vocab_size"] == config["text_config"]["vocab_size"] == TOKENS + 3
    assert json.loads((tmp_path / "base/config.json").read_text())["vocab_size"] == TOKENS


def test_a_tokenizer_that_differs_is_noted(tmp_path: Path) -> None:
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "a")
    recipe = {"merge_method": "passthrough", "models": [{"model": f"{model}+{lora}"}]}
    for folder in (model, lora):
        (folder / "tokenizer.json").write_text("{}")
    assert weightsmith.plan(recipe).warnings == ()
    (lora / "tokenizer.json").write_text("[]")
    (warning,) = weightsmith.plan(recipe).warnings
    assert warning.what.endswith("are not used: tokenizer.json")


def vocabulary(*tokens: str) -> str:
    return json.dumps({"model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}}})


@pytest.mark.parametrize("rows", [TOKENS, TOKENS - 1, 0])
def test_the_tokenizer_of_an_adapter_that_trained_other_tokens_is_taken(rows: int, tmp_path: Path) -> None:
    """The base has rows to spare for added tokens, or such tokens in reserve, so the embedding need not grow."""
    names = ("lm_head", "model.embed_tokens")
    tensors = factors(Q, H, H) | {f"{P}{name}.weight": normal(rows, H) for name in names}
    if not rows:
        embedding = f"{P}model.embed_tokens.lora_embedding_"
        tensors = factors(Q, H, H) | {f"{embedding}A": normal(4, TOKENS), f"{embedding}B": normal(H, 4)}
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "a", tensors)
    (model / "tokenizer.json").write_text(vocabulary("a", "b"))
    recipe = {"merge_method": "passthrough", "models": [{"model": f"{model}+{lora}"}]}
    (lora / "tokenizer.json").write_text(vocabulary("a", "b", "<im>"))
    note = "the adapter has trained other tokens than the base's: the tokenizer is the one beside it: tokenizer.json"
    assert note in [w.what for w in weightsmith.plan(recipe).warnings]
    weightsmith.merge(recipe, tmp_path / "out", progress=False)
    assert (tmp_path / "out/tokenizer.json").read_text() == vocabulary("a", "b", "<im>")
    (lora / "tokenizer.json").write_text(f"{vocabulary('a', 'b')} ")  # the same tokens
    weightsmith.merge(recipe, tmp_path / "same", progress=False)
    assert (tmp_path / "same/tokenizer.json").read_text() == vocabulary("a", "b")
    (lora / "tokenizer.json").write_text("not json")
    assert any("are not used: tokenizer.json" in w.what for w in weightsmith.plan(recipe).warnings)


def chat(folder: Path, tokens: Sequence[str] = ("a", "b"), *, end: str = "b", template: str = "", file: str = "") -> None:
    """A tokenizer, with a chat template in its settings or in a file of its own."""
    settings = {"eos_token": end, **({"chat_template": template} if template and not file else {})}
    (folder / "tokenizer.json").write_text(vocabulary(*tokens))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if file:
        (folder / file).write_text(template)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("file", ["", "chat_template.jinja"])
def test_a_base_without_a_chat_template_gets_the_tokenizer_that_a_chat_was_trained_with(file: str, tmp_path: Path) -> None:
    """SFT of a base: the template, and the token that ends its turns, are beside the adapter alone."""
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "a")
    chat(model, end="a")
    chat(lora, end="b", template="chat", file=file)
    (model / "generation_config.json").write_text('{"eos_token_id": 0, "top_p": 0.5}')
    (model / "special_tokens_map.json").write_text('{"eos_token": "a"}')
    (model / "tokenizer.model").write_text("the base's")
    recipe = {"merge_method": "passthrough", "models": [{"model": f"{model}+{lora}"}]}
    notes = [warning.what for warning in weightsmith.plan(recipe).warnings]
    assert any(
        note.startswith("the adapter has a chat template, and the base has none: the tokenizer is the one") for note in notes
    )
    assert "texts end with 'b' too, as the tokenizer beside the adapter says" in notes
    assert not any("are not used" in note for note in notes)
    baked(model, lora, tmp_path / "out")
    assert read_json(tmp_path / "out/tokenizer_config.json") == read_json(lora / "tokenizer_config.json")
    assert (tmp_path / "out/chat_template.jinja").exists() == bool(file)
    assert read_json(tmp_path / "out/generation_config.json") == {"eos_token_id": [0, 1], "top_p": 0.5}
    assert not (tmp_path / "out/special_tokens_map.json").exists()
    assert not (tmp_path / "out/tokenizer.model").exists()


@pytest.mark.parametrize("case", ["other tokens", "a template", "no template", "unreadable"])
def test_the_tokenizer_of_the_base_stays_unless_it_lacks_a_chat_template(case: str, tmp_path: Path) -> None:
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "a")
    chat(model, template="the base's" if case == "a template" else "")
    chat(
        lora, ("a", "b", "<pad>") if case == "other tokens" else ("a", "b"), end="a", template=case.removeprefix("no template")
    )
    if case == "unreadable":
        (lora / "tokenizer.json").write_text("not json")
    baked(model, lora, tmp_path / "out")
    assert read_json(tmp_path / "out/tokenizer_config.json") == read_json(model / "tokenizer_config.json")


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json", "additional_chat_templates/tool.jinja"])
def test_a_tokenizer_that_is_taken_comes_with_its_own_chat_template(file: str, tmp_path: Path) -> None:
    """Loaders read these files before the settings, where the adapter has its template."""
    names = ("lm_head", "model.embed_tokens")
    tensors = factors(Q, H, H) | {f"{P}{name}.weight": normal(TOKENS + 1, H) for name in names}
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "a", tensors)
    chat(model, end="a", template="the base's")
    (model / "additional_chat_templates").mkdir()
    (model / file).write_text(json.dumps({"chat_template": "the base's"}))
    (model / "added_tokens.json").write_text('{"b": 1}')
    chat(lora, ("a", "b", "<im>"), end="<im>", template="the adapter's")
    baked(model, lora, tmp_path / "out")
    with weightsmith.open_checkpoint(tmp_path / "out") as checkpoint:
        assert templates_of(checkpoint.folder, checkpoint.files) == "the adapter's"
        assert {file, "added_tokens.json"}.isdisjoint(checkpoint.files)


def test_a_tokenizer_without_a_chat_template_leaves_the_base_s(tmp_path: Path) -> None:
    names = ("lm_head", "model.embed_tokens")
    tensors = factors(Q, H, H) | {f"{P}{name}.weight": normal(TOKENS + 1, H) for name in names}
    model, lora = base(tmp_path / "base", eos_token_id=0), adapter(tmp_path / "a", tensors)
    chat(model, end="a", template="the base's")
    chat(lora, ("a", "b", "<im>"), end="<im>")
    baked(model, lora, tmp_path / "out")
    with weightsmith.open_checkpoint(tmp_path / "out") as checkpoint:
        assert templates_of(checkpoint.folder, checkpoint.files) == "the base's"
        assert checkpoint.config is not None
        assert checkpoint.config["eos_token_id"] == [0, 2]
    assert read_json(tmp_path / "out/tokenizer_config.json")["eos_token"] == "<im>"


@pytest.mark.long
@pytest.mark.parametrize("method", ["linear", "ties"])
def test_modules_that_are_saved_whole_are_merged_as_those_of_models(method: str, tmp_path: Path) -> None:
    model = base(tmp_path / "base", np.float32)
    loras = [
        adapter(tmp_path / n, factors(Q, H, H, seed=s) | {f"{P}lm_head.weight": normal(TOKENS, H, seed=s)})
        for n, s in (("a", 1), ("b", 5))
    ]
    baked_in = [tmp_path / f"baked {lora.name}" for lora in loras]
    for lora, out in zip(loras, baked_in, strict=True):
        baked(model, lora, out)

    def merged(names: list[str], out: Path) -> bytes:
        models = [{"model": name, "parameters": {"weight": 0.5}} for name in names]
        options = {"base_model": str(model)} if method == "ties" else {}
        weightsmith.merge({"merge_method": method, "models": models, **options}, out, fsync=False)
        return (out / "model.safetensors").read_bytes()

    applied = merged([f"{model}+{lora}" for lora in loras], tmp_path / "one")
    assert applied == merged([str(out) for out in baked_in], tmp_path / "two")


# ---- what is refused


def test_all_reasons_are_told_at_once(tmp_path: Path) -> None:
    problem = refusal(base(tmp_path / "base"), adapter(tmp_path / "a", use_qalora=True, kasa_config={"a": 1}, use_bdlora=True))
    assert len(problem.finding.details) == 3


def test_biases_of_factors_need_a_bias_of_the_layer(tmp_path: Path) -> None:
    """PEFT does not merge them without one either."""
    model, biased = base(tmp_path / "base"), factors(Q, H, H) | {f"{P}{Q}.lora_B.bias": normal(H)}
    words = {
        f"the base has no {Q}.bias": biased,
        f"{Q} has no bias of B, and lora_bias is true": factors(Q, H, H),
        "is of a module without A and B": biased | {f"{P}{DOWN}.lora_B.bias": normal(H)},
    }
    for k, (words_of_problem, tensors) in enumerate(words.items()):
        assert words_of_problem in str(refusal(model, adapter(tmp_path / str(k), tensors, lora_bias=True)))


def test_targets_that_the_base_has_not_are_listed_together(tmp_path: Path) -> None:
    tensors = factors(Q, H, H + 1) | factors("model.layers.7.mlp.up_proj", INNER, H) | {f"{P}score.weight": normal(2, H)}
    problem = refusal(base(tmp_path / "base"), adapter(tmp_path / "a", tensors, base_model_name_or_path="org/other"))
    assert isinstance(problem, ShapeError)
    assert "3 of its targets have no place there" in str(problem)
    assert "score.weight: the base has no such tensor" in str(problem)
    assert f"{Q}.weight: [24, 24] BF16 in the base, and the adapter is for [24, 25]" in str(problem)
    assert "'org/other'" in problem.finding.fix


def test_an_adapter_for_the_parts_of_a_fused_tensor_is_refused(tmp_path: Path) -> None:
    tensors = {"model.layers.0.self_attn.qkv_proj.weight": normal(3 * H, H), "model.embed_tokens.weight": normal(TOKENS, H)}
    problem = refusal(write_checkpoint(tmp_path / "base", tensors, LLAMA), adapter(tmp_path / "a"))
    assert "the base keeps it inside model.layers.0.self_attn.qkv_proj.weight" in str(problem)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({f"{P}{Q}.lora_A.weight": None}, "has an B and no A"),
        ({f"{P}{Q}.lora_A.weight": normal(5, H)}, "has rank 4 by the config, and A [5, 24] and B [24, 4]"),
        ({f"{P}{Q}.lora_ga_vector.weight": normal(H)}, "is no A or B of a LoRA"),
        ({f"{P}{DOWN}.lora_magnitude_vector.weight": normal(H)}, "is of a module without A and B"),
        ({f"{P}{Q}.lora_A.weight": normal(4, H, 1, 1)}, "and A [4, 24, 1, 1] and B [24, 4]"),
        ({f"{P}{Q}.lora_A.weight": normal(4, H, 1, 1, 1, 1)}, "is no matrix of floating numbers"),
        ({f"{P}{Q}.lora_A.weight": np.ones((4, H), np.int32)}, "is no matrix of floating numbers"),
    ],
)
def test_tensors_that_make_no_adapter_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    tensors = {n: a for n, a in (factors(Q, H, H) | change).items() if a is not None}
    problem = refusal(base(tmp_path / "base"), adapter(tmp_path / "a", tensors))
    assert isinstance(problem, FormatError)
    assert words in str(problem)


def test_tensors_that_zero_3_left_empty_are_called_so(tmp_path: Path) -> None:
    empty = np.zeros(0, np.float32)
    model = base(tmp_path / "base")
    problem = refusal(model, adapter(tmp_path / "a", dict.fromkeys(factors(Q, H, H) | factors(DOWN, H, INNER), empty)))
    assert isinstance(problem, FormatError)
    assert "4 of 4 tensors are empty: DeepSpeed's ZeRO-3 saved the adapter without gathering its weights" in str(problem)
    assert "stage3_gather_16bit_weights_on_model_save" in problem.finding.fix
    assert "and 1 more" in problem.finding.details
    saved = factors(Q, H, H) | {f"{P}lm_head.weight": np.zeros((0, H), np.float32)}
    problem = refusal(model, adapter(tmp_path / "b", saved))
    assert "1 of 3 tensors are empty" in str(problem)
    assert problem.finding.details == (f"'{P}lm_head.weight'",)


@pytest.mark.parametrize("zeros", ["A", "B"])
def test_an_adapter_that_changes_nothing_is_said_to(zeros: str, tmp_path: Path) -> None:
    lora_tensors = factors(Q, H, H) | factors(DOWN, H, INNER)
    idle = {name: np.zeros_like(a) if f"lora_{zeros}" in name else a for name, a in lora_tensors.items()}
    partly = {name: np.zeros_like(a) if f"lora_{zeros}" in name and DOWN in name else a for name, a in lora_tensors.items()}
    saved = idle | {f"{P}lm_head.weight": normal(TOKENS, H)}
    model, messages = base(tmp_path / "base"), []
    for k, tensors in enumerate((idle, partly, saved)):
        ref = f"{model}+{adapter(tmp_path / str(k), tensors)}"
        warnings = weightsmith.plan({"merge_method": "passthrough", "models": [{"model": ref}]}).warnings
        messages.append([warning.what for warning in warnings if "changes nothing" in warning.what])
    assert messages == [["the adapter changes nothing: B @ A of its 2 modules is all zeros"], [], []]


@pytest.mark.parametrize("missing", [True, False])
def test_names_that_only_transformers_knows_are_said_to_need_it(
    missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for LFM2-MoE and DeepSeek V4, whose experts have other names on disk."""
    from weightsmith._planning.planner import inputs, loading

    monkeypatch.setattr(inputs, "installed", lambda: not missing)
    monkeypatch.setattr(loading, "installed", lambda: False)
    problem = refusal(base(tmp_path / "base"), adapter(tmp_path / "a", factors("model.layers.0.other.q_proj", H, H)))
    assert "model.layers.0.other.q_proj.weight: the base has no such tensor" in str(problem)
    assert (install("lora") in problem.finding.fix) == missing


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"r": 0}, "r is 0; a rank must be a positive integer"),
        ({"r": True}, "r is True; a rank must be a positive integer"),
        ({"r": 4.0}, "r is 4.0; a rank must be a positive integer"),
        ({"lora_alpha": "8"}, "lora_alpha is '8', not a finite number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, not a finite number"),
        ({"alpha_pattern": [1]}, "alpha_pattern is [1], not an object"),
        ({"lora_alpha": 10**4000}, "adapter_config.json has an integer of 4,001 digits"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern of 'q_proj' is None, not a finite number"),
        ({"rank_pattern": {"q_proj": 2**31}}, "rank_pattern of 'q_proj' is 2147483648; a rank must be"),
        ({"alpha_pattern": {r"(a)\1": 1}}, r"alpha_pattern has a pattern '(a)\\1' that is not read: '\1' is not read"),
        ({"rank_pattern": {"[": 4}}, "rank_pattern has a pattern '[' that is not read: missing ]"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    problem = refusal(base(tmp_path / "base"), adapter(tmp_path / "a", **config))
    assert isinstance(problem, FormatError)
    assert words in str(problem)


def test_an_adapter_as_peft_saved_it_before_safetensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "a")
    expected = baked(model, lora, tmp_path / "expected")
    torch.save({n: torch.from_numpy(t) for n, t in factors(Q, H, H).items()}, lora / "adapter_model.bin")
    (lora / "adapter_model.safetensors").unlink()
    weights = baked(model, lora, tmp_path / "out")
    assert {n: t.tobytes() for n, t in weights.items()} == {n: t.tobytes() for n, t in expected.items()}


def test_factors_of_mlx_without_their_config_are_refused_by_name(tmp_path: Path) -> None:
    save_file({f"{Q}.lora_a": normal(H, 4), f"{Q}.lora_b": normal(4, H)}, tmp_path / "adapters.safetensors")
    assert "LoRA of MLX" in str(refusal(base(tmp_path / "base"), tmp_path / "adapters.safetensors"))


def test_the_folder_of_a_training_run_names_its_checkpoints(tmp_path: Path) -> None:
    model = base(tmp_path / "base")
    for step in (100, 200):
        adapter(tmp_path / "run" / f"checkpoint-{step}")
    message = str(refusal(model, tmp_path / "run"))
    assert "subfolders with an adapter: checkpoint-100, checkpoint-200" in message
    assert f"-> Name one of them, such as {tmp_path / 'run'}/checkpoint-200." in message


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "a")
    (lora / "adapter_config.json").write_text("{")
    assert isinstance(refusal(model, lora), FormatError)
    (lora / "adapter_config.json").unlink()
    assert "it has no adapter_config.json" in str(refusal(model, lora))
    (lora / "adapter_config.json").write_text(json.dumps(CONFIG))
    (lora / "adapter_model.safetensors").rename(lora / "adapter_model.bin")
    assert "rename it to .safetensors" in refusal(model, lora).finding.fix
    (lora / "adapter_model.bin").rename(lora / "old.bin")
    assert "it has no adapter_model.safetensors or adapter_model.bin" in str(refusal(model, lora))
    (lora / "old.bin").rename(lora / "adapter_model.bin")
    assert isinstance(refusal(model, tmp_path / "nowhere/here/at/all"), NotFound)
    assert "rename it to .safetensors" in refusal(model, lora / "adapter_model.bin").finding.fix
    assert isinstance(refusal(lora, lora), Unsupported)


def test_an_adapter_that_holds_no_numbers_ends_the_merge_with_its_name(tmp_path: Path) -> None:
    tensors = factors(Q, H, H)
    tensors[f"{P}{Q}.lora_B.weight"][3, 1] = np.inf
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "a", tensors)
    recipe = {"merge_method": "linear", "models": [{"model": f"{model}+{lora}", "parameters": {"weight": 0.5}}]}
    with pytest.raises(CheckpointError, match=re.escape(f"{model}+{lora}, tensor {Q}.weight")):
        weightsmith.merge(recipe, tmp_path / "out", fsync=False)


def test_the_output_is_not_the_adapter_s_folder(tmp_path: Path) -> None:
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "a")
    with pytest.raises(WeightsmithError, match="would be lost with the output folder"):
        baked(model, lora, lora)


# ---- embedding and head that share what is trained


TYING: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "a saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("case", TYING)
def test_ensured_tying_gives_the_model_that_was_trained(case: str, tie: bool, tmp_path: Path) -> None:
    """By the logits of PEFT's model: its merge_and_unload adds shared factors twice, and computes another model."""
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "tie_word_embeddings": tie}
    settings = transformers.LlamaConfig(vocab_size=TOKENS, hidden_size=H, intermediate_size=INNER, **heads)
    model = transformers.LlamaForCausalLM(settings)
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, ensure_weight_tying=True, **TYING[case])
    tuned = peft.get_peft_model(model, config)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn_like(parameter) * 0.2)
    tuned.save_pretrained(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    weights = baked(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert ("lm_head.weight" in weights) == (not tie)
    with weightsmith.open_checkpoint(tmp_path / "out") as out:
        assert out.config is not None
        assert out.config["tie_word_embeddings"] == tie
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        expected, logits = tuned(tokens).logits, ours(tokens).logits
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


def tied_factors(**changed: np.ndarray) -> dict[str, np.ndarray]:
    a, b = normal(4, TOKENS, seed=1), normal(H, 4, seed=2)
    embedding, head = f"{P}model.embed_tokens.lora_embedding_", f"{P}lm_head.lora_"
    tensors = {"A": a, "B": b, "head_A": np.ascontiguousarray(b.T), "head_B": np.ascontiguousarray(a.T), **changed}
    names = {"A": f"{embedding}A", "B": f"{embedding}B", "head_A": f"{head}A.weight", "head_B": f"{head}B.weight"}
    return {names[part]: values for part, values in tensors.items() if values.size}


def test_shared_factors_are_applied_once(tmp_path: Path) -> None:
    model = base(tmp_path / "base", np.float32, tie=True)
    expected = base_tensors()["model.embed_tokens.weight"] + 2 * (normal(H, 4, seed=2) @ normal(4, TOKENS, seed=1)).T
    nothing = np.zeros(0, np.float32)
    for name, tensors in {
        "both": tied_factors(),
        "the embedding's": tied_factors(head_A=nothing, head_B=nothing),
        "the head's": tied_factors(A=nothing, B=nothing),
    }.items():
        lora = adapter(tmp_path / name, tensors, target_modules=["embed_tokens"], ensure_weight_tying=True)
        weights = baked(model, lora, tmp_path / f"{name} out")
        assert "lm_head.weight" not in weights, name
        np.testing.assert_allclose(weights["model.embed_tokens.weight"], expected, rtol=1e-5, atol=1e-5)


def test_one_tensor_does_not_have_the_norms_of_two(tmp_path: Path) -> None:
    tensors = tied_factors() | {
        f"{P}model.embed_tokens.lora_magnitude_vector": normal(H),
    }
    tensors |= {f"{P}lm_head.lora_magnitude_vector": normal(TOKENS)}
    lora = adapter(tmp_path / "a", tensors, use_dora=True, ensure_weight_tying=True)
    assert "one tensor cannot have the norms of both" in str(refusal(base(tmp_path / "base", tie=True), lora))


def test_shared_factors_that_differ_are_refused(tmp_path: Path) -> None:
    model = base(tmp_path / "base", np.float32, tie=True)
    tensors = tied_factors(head_A=normal(4, H, seed=5))
    lora = adapter(tmp_path / "lora", tensors, target_modules=["embed_tokens"], ensure_weight_tying=True)
    problem = refusal(model, lora)
    assert "lm_head has other factors than the embedding" in str(problem)
    adapter(lora, tensors, target_modules=["embed_tokens"], ensure_weight_tying=False)
    assert "lm_head.weight" in baked(model, lora, tmp_path / "out")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("targets", [["wte"], ["wte", "lm_head"], r".*wte"])
def test_tying_that_peft_does_not_ensure_is_not_assumed(targets: list[str] | str, tmp_path: Path) -> None:
    """PEFT follows `ensure_weight_tying` for `embed_tokens` and `lm_head` alone; of other names the head stays as it was."""
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    torch.manual_seed(0)
    settings = transformers.GPT2Config(vocab_size=TOKENS, n_embd=H, n_layer=1, n_head=2, n_positions=32)
    model = transformers.GPT2LMHeadModel(settings)
    model.save_pretrained(tmp_path / "base")
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, ensure_weight_tying=True)).eval()
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn_like(parameter) * 0.2)
    tuned.save_pretrained(tmp_path / "adapter")
    baked(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        expected = tuned(tokens).logits
        logits = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(tokens).logits
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
