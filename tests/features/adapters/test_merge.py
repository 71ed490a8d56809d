"""Merges of adapters: a recipe whose models are adapter folders gives an adapter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.cli_help import Cli, cli
from tests.features.adapters.test_extract import applied, config_of, tensors_of
from tests.mini import write_checkpoint
from tests.models.lora.test_lora import DOWN, INNER, TOKENS, H, P, Q, adapter, base, base_tensors, factors, normal
from weightsmith._base.errors import PlanError, WeightsmithError
from weightsmith._engine.products import find_kind
from weightsmith._features.adapters import combinations
from weightsmith._features.adapters.cores import MergedWork

torch = pytest.importorskip("torch")
__all__ = ["cli"]

SHAPES = {Q: (H, H), DOWN: (H, INNER)}


def delta(folder: Path, module: str) -> np.ndarray:
    """What an adapter adds to a weight: float64 [outputs, inputs]; of one that has no factors of the module, zeros."""
    tensors, config = tensors_of(folder), config_of(folder)
    names = [f"{P}{module}.lora_{part}.weight" for part in "AB"]
    if names[0] not in tensors:
        return np.zeros(SHAPES[module])
    a, b = (tensors[name].astype(np.float64) for name in names)
    rank = config.get("rank_pattern", {}).get(f"^{module}", config["r"])
    update: np.ndarray = b @ a * config.get("alpha_pattern", {}).get(f"^{module}", config["lora_alpha"]) / rank
    return update


@pytest.fixture
def adapters(tmp_path: Path) -> tuple[Path, Path]:
    """Two adapters of different ranks and scalings, of which only the first has factors of a second module."""
    one = adapter(tmp_path / "one", factors(Q, H, H, 4, seed=1) | factors(DOWN, H, INNER, 4, seed=3))
    return one, adapter(tmp_path / "two", factors(Q, H, H, 2, seed=5), r=2, lora_alpha=3)


def recipe(
    paths: tuple[Path, ...], method: str = "linear", weights: tuple[float, ...] = (1.0, 1.0), **shared: Any
) -> dict[str, Any]:
    models = [{"model": str(p), "parameters": {"weight": w}} for p, w in zip(paths, weights, strict=True)]
    return {"merge_method": method, "models": models, "parameters": shared}


def merge(what: dict[str, Any], out: Path, **options: Any) -> Path:
    return weightsmith.merge(what, out, progress=False, fsync=False, **options).out


def refusal(what: dict[str, Any], **options: Any) -> WeightsmithError:
    with pytest.raises(PlanError) as caught:
        weightsmith.plan(what, **options)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(("method", "shared"), [("linear", {"normalize": False}), ("task_arithmetic", {"lambda": 0.5})])
def test_a_weighted_sum_is_exact(method: str, shared: dict[str, Any], adapters: tuple[Path, Path], tmp_path: Path) -> None:
    out = merge(recipe(adapters, method, (0.7, -0.2), **shared), tmp_path / "out")
    factor = shared.get("lambda", 1.0)
    for module in SHAPES:
        want = factor * (0.7 * delta(adapters[0], module) - 0.2 * delta(adapters[1], module))
        np.testing.assert_allclose(delta(out, module), want, atol=2e-6 * np.abs(want).max())
    config = config_of(out)
    assert (config["r"], config["rank_pattern"]) == (6, {f"^{DOWN}": 4})
    assert config["target_modules"] == [Q, DOWN]  # the base may have more modules of these names


def test_a_smaller_rank_keeps_the_best(adapters: tuple[Path, Path], tmp_path: Path) -> None:
    out = merge(recipe(adapters, normalize=False), tmp_path / "out", adapter_rank=3)
    want = delta(adapters[0], Q) + delta(adapters[1], Q)
    u, s, vt = np.linalg.svd(want)
    np.testing.assert_allclose(delta(out, Q), (u[:, :3] * s[:3]) @ vt[:3], atol=1e-5 * s[0])
    assert (config_of(out)["r"], config_of(out)["rank_pattern"]) == (3, {})


def test_the_tokenizer_of_the_first_adapter_goes_along(adapters: tuple[Path, Path], tmp_path: Path) -> None:
    """Trainers save it beside an adapter; its chat template is nowhere else if the base has none."""
    (adapters[1] / "tokenizer.json").write_text("{}")
    (adapters[1] / "chat_template.jinja").write_text("second")
    out = merge(recipe(adapters), tmp_path / "second")
    assert (out / "chat_template.jinja").read_text() == "second"
    (adapters[0] / "tokenizer.json").write_text("{}")
    (adapters[0] / "chat_template.jinja").write_text("first")
    plan = weightsmith.plan(recipe(adapters))
    note = f"tokenizer files differ from those beside {adapters[0]}, which are kept: chat_template.jinja"
    (warning,) = plan.warnings
    assert (warning.what, warning.fix) == (note, "Check that both were trained with the same chat template.")
    out = merge(recipe(adapters), tmp_path / "first")
    assert (out / "chat_template.jinja").read_text() == "first"
    assert weightsmith.verify(out)


@pytest.mark.long
def test_the_result_is_an_adapter_like_the_others(adapters: tuple[Path, Path], tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "r.yml").write_text(json.dumps(recipe(adapters, "ties", density=1.0)))
    ran = cli("merge", tmp_path / "r.yml", tmp_path / "out", "--adapter-rank", 5, "--out-dtype", "bfloat16")
    assert ran.code == 0, ran.err
    assert {a.dtype.name for a in tensors_of(tmp_path / "out").values()} == {"bfloat16"}
    assert "library_name: peft" in (tmp_path / "out/README.md").read_text()
    assert cli("verify", tmp_path / "out").code == 0
    model = base(tmp_path / "base", np.float32)
    weights = applied(model, tmp_path / "out", tmp_path / "in")
    want = base_tensors()[f"{Q}.weight"] + delta(tmp_path / "out", Q)
    np.testing.assert_allclose(weights[f"{Q}.weight"], want, atol=1e-5)
    again = merge(recipe((tmp_path / "out", adapters[0])), tmp_path / "again")  # and merges again
    assert config_of(again)["r"] == 9
    ran = cli("plan", tmp_path / "r.yml", "--json")
    assert ran.code == 0, ran.err
    (tmp_path / "plan.json").write_text(ran.out)
    assert cli("run", tmp_path / "plan.json", tmp_path / "run", "--quiet").code == 0
    direct = merge(recipe(adapters, "ties", density=1.0), tmp_path / "direct", threads=1)
    name = "adapter_model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (direct / name).read_bytes()


@pytest.mark.parametrize("method", ["linear", "peft_svd"])
@pytest.mark.parametrize("space", ["core", "knots"])
def test_products_from_elsewhere_are_checked(method: str, space: str, adapters: tuple[Path, Path]) -> None:
    if (method, space) == ("peft_svd", "knots"):
        return
    for product in weightsmith.plan(recipe(adapters, method), adapter_space=space).products:
        check = find_kind(product.op).check
        assert check(product) == ""
        changes: list[dict[str, Any]] = [{"modules": ()}, {"modules": 3}, {}]
        if product.op == "cores":
            module = product.settings["modules"][0]
            wrong = {"ranks": (0,) * len(module["ranks"]), "owners": ()}
            changes = [{"modules": ({**module, key: value},)} for key, value in wrong.items()]
        elif product.op == "combination":
            changes += [
                {"weights": ()},
                {"ranks": (1,) * 9},
                {"combination": {"name": "x", "density": 1.0, "majority": "total"}},
            ]
        else:
            changes += [{"cores": "x"}]
            wide = replace(MergedWork.of(product), ranks=(10**6,) * len(product.settings["ranks"]))
            assert "it has no steps for" in check(wide.product(product.name, product.steps))
        for change in changes:
            assert bool(check(replace(product, settings={**product.settings, **change}))) == bool(change), change
        assert check(replace(product, outs=product.outs[1:]))
        assert check(replace(product, steps=product.steps[1:]))


def cores_of(folders: tuple[Path, ...]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Orthonormal bases of the outputs and the inputs that the differences of Q span, and the differences."""
    deltas = [delta(folder, Q) for folder in folders]
    u, s, _ = np.linalg.svd(np.hstack(deltas))
    v = np.linalg.svd(np.vstack(deltas))[2].T
    rank = int((s > 1e-6 * s[0]).sum())
    return u[:, :rank], v[:, :rank], deltas


def merged_as_models(folders: list[np.ndarray], method: str, tmp_path: Path, **shared: Any) -> np.ndarray:
    """Matrices merged as models of one tensor are, with a base of zeros."""
    name = f"{Q}.weight"
    paths = [write_checkpoint(tmp_path / f"m{i}", {name: np.ascontiguousarray(a, np.float32)}) for i, a in enumerate(folders)]
    zero = write_checkpoint(tmp_path / "zero", {name: np.zeros_like(folders[0], np.float32)})
    models = [{"model": str(path), "parameters": {"weight": 1.0, "density": 0.5}} for path in paths]
    what = {"merge_method": method, "base_model": str(zero), "models": models, "parameters": shared}
    with weightsmith.open_checkpoint(merge(what, tmp_path / "as models")) as checkpoint:
        return checkpoint.read(name).astype(np.float64)


def both(adapters: tuple[Path, Path], **parameters: float) -> dict[str, Any]:
    return {
        "merge_method": "ties",
        "models": [{"model": str(p), "parameters": {"weight": 1.0, **parameters}} for p in adapters],
    }


def test_knots_merges_the_right_singular_vectors_of_all_side_by_side(adapters: tuple[Path, Path], tmp_path: Path) -> None:
    """As published: ties of Σ Vᵢ. Its rows may have any sign, which an election by rows does not see."""
    out = merge(both(adapters, density=0.5), tmp_path / "out", adapter_space="knots")
    u, _, deltas = cores_of(adapters)
    want = u @ merged_as_models([u.T @ delta for delta in deltas], "ties", tmp_path)
    np.testing.assert_allclose(delta(out, Q), want, atol=1e-5 * np.abs(want).max())
    assert config_of(out)["r"] == 6


@pytest.mark.long
def test_compressed_adapters_keep_what_the_shared_bases_hold(adapters: tuple[Path, Path], tmp_path: Path) -> None:
    out = merge(both(adapters), tmp_path / "out", adapter_space="compressed", adapter_rank=3)
    u, v, deltas = cores_of(adapters)
    u, v = u[:, :3], v[:, :3]
    want = u @ merged_as_models([u.T @ delta @ v for delta in deltas], "ties", tmp_path) @ v.T
    trimmed = delta(merge(both(adapters, density=0.5), tmp_path / "trimmed", adapter_space="compressed", adapter_rank=3), Q)
    np.testing.assert_allclose(trimmed, want, atol=1e-5 * np.abs(want).max())
    assert config_of(out)["r"] == 3


@pytest.mark.parametrize("space", ["core", "knots", "compressed"])
def test_a_sum_is_the_same_in_every_space(space: str, adapters: tuple[Path, Path], tmp_path: Path) -> None:
    out = merge(recipe(adapters, normalize=False), tmp_path / "out", adapter_space=space, adapter_rank=6)
    want = delta(adapters[0], Q) + delta(adapters[1], Q)
    np.testing.assert_allclose(delta(out, Q), want, atol=3e-6 * np.abs(want).max())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_peft_s_combinations_are_what_peft_computes(tmp_path: Path) -> None:
    """All of them, with negative weights, by PEFT itself; dare with a density of 1, as its masks are random."""
    peft, transformers = (pytest.importorskip(n) for n in ("peft", "transformers"))
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=TOKENS, hidden_size=H, intermediate_size=INNER, **heads)
    ).double()
    names = ["a", "b", "c"]
    targets = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    tuned = peft.get_peft_model(model, peft.LoraConfig(lora_alpha=5, **targets), adapter_name="a")
    for i, name in enumerate(names[1:]):
        tuned.add_adapter(name, peft.LoraConfig(lora_alpha=6 + i, **targets))
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    tuned.save_pretrained(tmp_path, selected_adapters=names)
    paths = tuple(tmp_path / name for name in names)
    weights = (0.7, -0.4, 0.5)
    module = tuned.base_model.model.model.layers[0].mlp.down_proj
    for name in combinations.NAMES:
        for majority in combinations.MAJORITIES if "ties" in name else ("total",):
            density = 1.0 if name.startswith("dare") else 0.6
            label = f"{name} {majority}"
            tuned.add_weighted_adapter(
                names, list(weights), label, combination_type=name, density=density, majority_sign_method=majority, svd_rank=5
            )
            want = module.get_delta_weight(label).numpy()
            shared = {"density": density} if combinations.PeftCombination(name).prunes() else {}
            shared |= {"majority_sign_method": majority} if "ties" in name else {}
            what = recipe(paths, f"peft_{name}", weights, **shared)
            out = merge(what, tmp_path / label, adapter_rank=5)
            tensors, config = tensors_of(out), config_of(out)
            a, b = (tensors[f"{P}model.layers.0.mlp.down_proj.lora_{part}.weight"].astype(np.float64) for part in "AB")
            np.testing.assert_allclose(b @ a, want, atol=2e-6 * np.abs(want).max(), err_msg=label)
            assert config["r"] == {"cat": 12}.get(name, 5 if "svd" in name else 4)
            assert f"peft_{name}" in (out / "README.md").read_text()


@pytest.mark.long
def test_random_combinations_keep_the_mean_and_are_the_same_again(adapters: tuple[Path, Path], tmp_path: Path) -> None:
    what = recipe((adapters[0], adapter(tmp_path / "c", factors(Q, H, H, 4, seed=7))), "peft_dare_linear_svd", density=0.5)
    one, two, other = (
        tensors_of(merge(what, tmp_path / f"out {n}", seed=seed, threads=threads))
        for n, seed, threads in (("one", 1, 1), ("two", 1, 3), ("other", 2, 1))
    )
    assert all(a.tobytes() == two[n].tobytes() for n, a in one.items())
    assert any(a.tobytes() != other[n].tobytes() for n, a in one.items())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_peft_adds_the_same_and_loads_every_tensor(tmp_path: Path) -> None:
    peft, transformers = (pytest.importorskip(n) for n in ("peft", "transformers"))
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=TOKENS, hidden_size=H, intermediate_size=INNER, **heads)
    )
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])
    tuned = peft.get_peft_model(model, config, adapter_name="a")
    tuned.add_adapter("b", peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=5, target_modules=["q_proj", "down_proj"]))
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    tuned.save_pretrained(tmp_path, selected_adapters=["a", "b"])
    tuned.add_weighted_adapter(["a", "b"], [0.7, -0.4], "both", combination_type="cat")
    tuned.set_adapter("both")
    out = merge(recipe((tmp_path / "a", tmp_path / "b"), weights=(0.7, -0.4), normalize=False), tmp_path / "out")
    assert config_of(out)["target_modules"] == ["down_proj", "q_proj"]
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    wrapped = peft.get_peft_model(fresh, peft.PeftConfig.from_pretrained(out))
    adapter_names = {name for name in wrapped.state_dict() if "lora_" in name}
    loading = peft.set_peft_model_state_dict(wrapped, {n: torch.from_numpy(a) for n, a in tensors_of(out).items()})
    assert loading.unexpected_keys == []
    assert not adapter_names & set(loading.missing_keys)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(wrapped(tokens).logits, tuned(tokens).logits, atol=1e-5, rtol=1e-4)


def test_adapters_with_the_same_targets_keep_their_short_names(tmp_path: Path) -> None:
    pair = tuple(
        adapter(tmp_path / name, factors(Q, H, H, seed=s), target_modules=["q_proj"]) for name, s in (("a", 1), ("b", 4))
    )
    assert config_of(merge(recipe((pair[0], pair[1])), tmp_path / "out"))["target_modules"] == ["q_proj"]


def test_embeddings_are_merged_too(tmp_path: Path) -> None:
    names = [f"{P}model.embed_tokens.lora_embedding_{part}" for part in "AB"]
    pair = [
        adapter(tmp_path / name, dict(zip(names, (normal(4, TOKENS, seed=s), normal(H, 4, seed=s)), strict=True)))
        for name, s in (("a", 1), ("b", 4))
    ]
    tensors = tensors_of(merge(recipe((pair[0], pair[1]), normalize=False), tmp_path / "out"))
    want = sum(2.0 * tensors_of(folder)[names[1]] @ tensors_of(folder)[names[0]] for folder in pair)
    np.testing.assert_allclose(tensors[names[1]] @ tensors[names[0]], want, atol=1e-4)


@pytest.mark.long
def test_what_cannot_be_merged(adapters: tuple[Path, Path], tmp_path: Path) -> None:
    model = base(tmp_path / "base")
    other = adapter(tmp_path / "other", base_model_name_or_path="org/other")
    named = adapter(tmp_path / "named", base_model_name_or_path="./models/Base")
    problem = refusal(recipe((named, other)))
    assert problem.code == "mismatch"
    assert "adapters of different bases" in str(problem)
    same = adapter(tmp_path / "same", base_model_name_or_path="org/base")
    weightsmith.plan(recipe((named, same)))
    wide = adapter(tmp_path / "wide", factors(Q, H, INNER))
    assert "adapters of different bases" in str(refusal(recipe((adapters[0], wide))))
    assert "an adapter is not quantised" in str(refusal(recipe(adapters), quantize="fp8-dynamic"))
    assert "an adapter (LoRA), not a model" in str(refusal(recipe((adapters[0], model))))
    assert "--adapter-rank (adapter_rank): only for merging adapters" in str(
        refusal(recipe((model, base(tmp_path / "base2"))), adapter_rank=3)
    )
    assert "PEFT has no combination 'svt' (did you mean 'svd'" in str(refusal(recipe(adapters, "peft_svt")))
    assert "peft_ties needs one density for all models" in str(refusal(recipe((adapters[0],) * 1, "peft_ties", (1.0,))))
    wrong = {"density": 0.5, "majority_sign_method": "most"}
    assert "majority_sign_method is 'most'" in str(refusal(recipe((adapters[0],), "peft_ties", (1.0,), **wrong)))
    assert "peft_svd has no parameter 'normalize' here" in str(refusal(recipe(adapters, "peft_svd", normalize=True)))
    dense = recipe(adapters[:1], "peft_cat", (1.0,))
    dense["models"][0]["parameters"]["density"] = 0.5
    assert "peft_cat has no parameter 'density' here" in str(refusal(dense))
    problem = str(refusal(recipe(adapters, "peft_linear")))
    assert "peft_linear works on A and on B, and the ranks are [4, 2]" in problem
    wrong_space = "--adapter-space (adapter_space): must be one of core, knots, compressed (did you mean 'core'?), not 'cor'"
    assert wrong_space in str(refusal(recipe(adapters), adapter_space="cor"))
    assert "adapters are compressed to a rank" in str(refusal(recipe(adapters), adapter_space="compressed"))
    assert "not merged in another space" in str(refusal(recipe(adapters, "peft_svd"), adapter_space="knots"))
    assert "--adapter-space (adapter_space): only for merging adapters" in str(
        refusal(recipe((model, base(tmp_path / "base3"))), adapter_space="knots")
    )
    scoped = recipe(adapters, "ties", scope="model", density=0.5)
    assert "looks at the whole model" in str(refusal(scoped))
    assert "densty" in str(refusal(recipe(adapters, "ties", densty=0.5)))
