"""Models that hold an adapter which was never merged: read as the base with it, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests.mini import write_checkpoint
from tests.models.lora.test_lora import CONFIG, DOWN, INNER, LLAMA, TOKENS, H, P, Q, base_tensors, factors, normal
from weightsmith._base.errors import PlanError, WeightsmithError

Arrays = dict[str, np.ndarray]


def wrapped(adapter: str = "default", prefix: str = "", *modules: str) -> Arrays:
    """A model's tensors, with the factors of some modules beside their weights."""
    tensors = base_tensors()
    for module, shape in {Q: (H, H), DOWN: (H, INNER)}.items():
        tensors[f"{module}.base_layer.weight"] = tensors.pop(f"{module}.weight")
        for name, array in factors(module, *shape).items():
            named = name.removeprefix(P).replace(".weight", f".{adapter}.weight")
            tensors[named] = array
    return {f"{prefix}{name}": array for name, array in tensors.items()}


def write(folder: Path, tensors: Arrays, config: dict[str, Any] | None = CONFIG) -> Path:
    write_checkpoint(folder, tensors, {**LLAMA, "num_hidden_layers": 2})
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def expected(scaling: float = 2.0) -> Arrays:
    tensors = {name: array.astype(float) for name, array in base_tensors().items()}
    for module, shape in {Q: (H, H), DOWN: (H, INNER)}.items():
        a, b = factors(module, *shape).values()
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + scaling * (b.astype(float) @ a)
    return tensors


def dequantised(folder: Path, out: Path) -> Arrays:
    weightsmith.dequantize(folder, out, fsync=False)
    with weightsmith.open_checkpoint(out) as opened:
        return {name: opened.read(name) for name in opened}


def close(weights: Arrays, want: Arrays) -> None:
    assert weights.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_allclose(weights[name], array, rtol=1e-6, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("adapter", "prefix"), [("default", ""), ("my-lora", ""), ("default", P)])
def test_it_is_read_with_the_adapter_applied(adapter: str, prefix: str, tmp_path: Path) -> None:
    close(dequantised(write(tmp_path / "half", wrapped(adapter, prefix)), tmp_path / "out"), expected())


def test_factors_beside_weights_without_base_layer(tmp_path: Path) -> None:
    tensors = {name.replace(".base_layer", ""): array for name, array in wrapped().items()}
    close(dequantised(write(tmp_path / "half", tensors), tmp_path / "out"), expected())


def test_a_merge_counts_it_as_the_model_with_the_adapter(tmp_path: Path) -> None:
    half, plain = write(tmp_path / "half", wrapped()), write(tmp_path / "plain", base_tensors(), None)
    models = [{"model": str(path), "parameters": {"weight": 0.5}} for path in (half, plain)]
    plan = weightsmith.plan({"merge_method": "linear", "models": models})
    assert any("an adapter that was never merged, and is read with it applied" in warning.what for warning in plan.warnings)
    weightsmith.merge({"merge_method": "linear", "models": models}, tmp_path / "out", fsync=False)
    weights, want = load_file(tmp_path / "out/model.safetensors"), base_tensors()
    close(weights, {name: (expected()[name] + want[name]) / 2 for name in want})


def test_modules_that_are_saved_whole(tmp_path: Path) -> None:
    tensors, saved = wrapped(), normal(TOKENS, H, seed=77)
    tensors["lm_head.original_module.weight"] = tensors.pop("lm_head.weight")
    tensors["lm_head.modules_to_save.default.weight"] = saved
    folder = write(tmp_path / "half", tensors, {**CONFIG, "modules_to_save": ["lm_head"]})
    close(dequantised(folder, tmp_path / "out"), expected() | {"lm_head.weight": saved})


def refusal(folder: Path) -> WeightsmithError:
    for ran in (lambda: weightsmith.dequantize(folder, folder.parent / "no"), lambda: weightsmith.inspect(folder)):
        with pytest.raises(PlanError) as caught:
            ran()
    assert not (folder.parent / "no").exists()
    (problem,) = caught.value.problems
    return problem


def test_a_scale_that_is_nowhere(tmp_path: Path) -> None:
    problem = refusal(write(tmp_path / "half", wrapped(), None))
    assert "an adapter that was never merged, and lora_alpha / r, which is part of it, is in no file" in problem.finding.what
    assert "adapter_config.json" in problem.finding.fix
    assert "merge_and_unload" in problem.finding.fix


def test_one_file_is_not_compared_with_a_config(tmp_path: Path) -> None:
    """A single file is opened without what lies beside it."""
    assert "is in no file" in str(refusal(write(tmp_path / "half", wrapped()) / "model.safetensors"))


OTHER = {"model.other.lora_A.default.weight": normal(4, H), "model.other.lora_B.default.weight": normal(H, 4)}


def two() -> Arrays:
    return wrapped() | {name.replace("default", "other"): array for name, array in wrapped().items() if "default" in name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: two(), "it holds 2 adapters that were never merged: 'default', 'other'"),
        (lambda t: {n: a for n, a in t.items() if ".lora_" not in n}, "an adapter, whose factors are not in it"),
        (lambda t: t | {f"{Q}.lora_embedding_A.other": normal(4, H)}, "a tensor of its adapter is not understood"),
        (lambda t: t | {f"{Q}.weight": normal(H, H)}, "two tensors of it are one of the base"),
        (lambda t: t | {f"{Q}.hada_w1_a.default": normal(4, H)}, "it holds an adapter that is LoHa, not plain LoRA"),
        (lambda t: t | {f"{Q}.lora_A.default.weight": normal(3, H)}, "has rank 4 by the config"),
        (lambda t: t | OTHER, "the base has no such tensor"),
    ],
)
def test_what_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    assert message in str(refusal(write(tmp_path / "half", change(wrapped()))))


def test_peft_s_settings_are_checked(tmp_path: Path) -> None:
    folder = write(tmp_path / "half", wrapped(), {**CONFIG, "use_qalora": True})
    assert "the adapter does more than LoRA" in str(refusal(folder))


def phi(folder: Path, seed: int) -> Path:
    """A model with adapters of its own, as Phi-4-multimodal has: it uses one for images, and one for speech."""
    tensors = {"model.embed_tokens.weight": normal(12, 8, seed=seed), "model.norm.weight": normal(8, seed=seed)}
    module = "model.layers.0.mlp.down_proj"
    tensors[f"{module}.base_layer.weight"] = normal(8, 16, seed=seed)
    for name in ("speech", "vision"):
        tensors[f"{module}.lora_A.{name}.weight"] = normal(2, 16, seed=seed)
        tensors[f"{module}.lora_B.{name}.weight"] = normal(8, 2, seed=seed)
    loras = {f"{name}_lora": {"r": 2, "lora_alpha": 4} for name in ("speech", "vision")}
    return write_checkpoint(folder, tensors, {"model_type": "phi4mm", "num_hidden_layers": 1, "vocab_size": 12, **loras})


def test_adapters_of_the_architecture_stay_as_they_are_and_are_not_averaged(tmp_path: Path) -> None:
    one, other = phi(tmp_path / "one", 1), phi(tmp_path / "other", 2)
    stored = load_file(one / "model.safetensors")
    weights = dequantised(one, tmp_path / "out")
    assert all((weights[name] == array).all() for name, array in stored.items())
    models: list[dict[str, Any]] = [{"model": str(path), "parameters": {"weight": 0.5}} for path in (one, other)]
    with pytest.raises(PlanError, match=r"factors of 1 module, such as '.*down_proj' would be merged as weights"):
        weightsmith.plan({"merge_method": "linear", "models": models})
    for model, share in zip(models, (1, 0), strict=True):
        model["parameters"]["weight"] = [{"filter": "lora_", "value": share}, {"value": 0.5}]
    weightsmith.merge({"merge_method": "linear", "models": models}, tmp_path / "merged", fsync=False)
    merged, second = load_file(tmp_path / "merged/model.safetensors"), load_file(other / "model.safetensors")
    for name, array in stored.items():
        np.testing.assert_allclose(merged[name], array if "lora_" in name else (array + second[name]) / 2, atol=1e-6)


def test_factors_that_a_model_computes_its_weights_from_stay_too(tmp_path: Path) -> None:
    """As jina-embeddings-v3 has them: torch's parametrizations, a pair of factors for each task."""
    module = "encoder.layers.0.Wqkv.parametrizations.weight"
    paths = []
    for seed, name in enumerate(("one", "other")):
        tensors = {f"{module}.original": normal(8, 8, seed=seed), "norm.weight": normal(8, seed=seed)}
        tensors |= {f"{module}.0.lora_A": normal(5, 2, 8, seed=seed), f"{module}.0.lora_B": normal(5, 8, 2, seed=seed)}
        paths.append(write_checkpoint(tmp_path / name, tensors, {"model_type": "xlm-roberta", "num_hidden_layers": 1}))
    stored = load_file(paths[0] / "model.safetensors")
    weights = dequantised(paths[0], tmp_path / "out")
    assert all((weights[name] == array).all() for name, array in stored.items())
    models = [{"model": str(path), "parameters": {"weight": 0.5}} for path in paths]
    with pytest.raises(PlanError, match="would be merged as weights"):
        weightsmith.plan({"merge_method": "linear", "models": models})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dora", [False, True])
def test_peft_is_the_judge(dora: bool, tmp_path: Path) -> None:
    torch, peft, transformers = (pytest.importorskip(name) for name in ("torch", "peft", "transformers"))
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(vocab_size=TOKENS, hidden_size=H, intermediate_size=INNER, **heads)
    tuned = peft.get_peft_model(
        transformers.LlamaForCausalLM(config),
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=4,
            lora_alpha=6,
            use_rslora=True,
            use_dora=dora,
            target_modules=["q_proj", "up_proj"],
            modules_to_save=["lm_head"],
        ),
    )
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.1
    (tmp_path / "half").mkdir()
    config.save_pretrained(tmp_path / "half")
    tuned.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter/adapter_config.json").rename(tmp_path / "half/adapter_config.json")
    save_file({name: tensor.numpy() for name, tensor in tuned.state_dict().items()}, tmp_path / "half/model.safetensors")
    want = {name: tensor.numpy() for name, tensor in tuned.merge_and_unload().state_dict().items()}
    weights = dequantised(tmp_path / "half", tmp_path / "out")
    assert weights.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_allclose(weights[name], array, rtol=2e-5, atol=1e-6, err_msg=name)
