"""Merges of adapters that are more than factors of linear layers: experts, tensors saved whole, DoRA."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightsmith
from tests import moe_zoo
from tests.features.adapters.test_extract import applied, config_of, extract, tensors_of
from tests.features.adapters.test_merge import merge, recipe, refusal
from tests.mini import as_bytes, write_checkpoint
from tests.models.lora.test_experts import CONFIG, MLP, TARGETS, E, R, apart, fused, stacked
from tests.models.lora.test_layouts import by_expert, up_and_down
from tests.models.lora.test_lora import DOWN, INNER, TOKENS, H, P, Q, adapter, base, factors, normal
from tests.sampling import sampled
from weightsmith._engine.products import find_kind

pytest.importorskip("torch")

EXPERTS = f"{MLP}.experts"
WEIGHTS = (0.7, -0.2)
HEAD, NORM = "lm_head.weight", "model.norm.weight"


def models_merged(
    model: Path, adapters: tuple[Path, ...], out: Path, method: str, weights: tuple[float, ...] = WEIGHTS, **shared: Any
) -> dict[str, np.ndarray]:
    """The same merge, of models that the adapters are applied to: float32."""
    what = recipe(tuple(Path(f"{model}+{adapter}") for adapter in adapters), method, weights, **shared)
    merged_folder = merge({**what, "base_model": str(model), "dtype": "float32"}, out)
    with weightsmith.open_checkpoint(merged_folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.specs}


def assert_same(weights: dict[str, np.ndarray], want: dict[str, np.ndarray], atol: float = 2e-5) -> None:
    assert weights.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_allclose(weights[name], array, atol=atol, err_msg=name)


# ---- factors of experts


def expert_adapters(folder: Path, *, swapped: bool = False, second: list[str] = TARGETS, rank: int = 3) -> tuple[Path, Path]:
    """Two adapters of different ranks and scalings; the second has factors of the parameters named."""
    tensors = fused()
    first = stacked(tensors, swapped=swapped) | factors(Q, H, H, 8)
    one = adapter(folder / "one", first, r=R, rank_pattern={"q_proj": 8}, target_parameters=TARGETS)
    expert_factors = {}
    levels = {"gate_up_proj": ".base_layer" if len(second) == 2 else "", "down_proj": ""}
    for name, level in levels.items():
        if any(target.endswith(name) for target in second):
            rows, cols = tensors[f"{EXPERTS}.{name}"].shape[1:]
            inputs, outputs = (rows, cols) if swapped else (cols, rows)
            expert_factors[f"{P}{EXPERTS}{level}.lora_A.weight"] = normal(E * rank, inputs, seed=21)
            expert_factors[f"{P}{EXPERTS}{level}.lora_B.weight"] = normal(outputs, rank * E, seed=22)
    return one, adapter(folder / "two", expert_factors, r=rank, lora_alpha=2, target_parameters=second)


def expert_base(folder: Path, *, transposed: bool = False) -> Path:
    return write_checkpoint(folder, fused(transposed=transposed) | {f"{Q}.weight": normal(H, H)}, CONFIG)


@pytest.mark.long
@pytest.mark.parametrize("swapped", [False, True], ids=["modern", "legacy"])
@pytest.mark.parametrize("second", [TARGETS, TARGETS[1:]], ids=["both", "down"])
def test_a_sum_of_factors_of_fused_experts_is_exact(swapped: bool, second: list[str], tmp_path: Path) -> None:
    """In the layout of the adapters; ranks of all experts are equal, with zeros beyond the sum of the ranks."""
    pair, model = expert_adapters(tmp_path, swapped=swapped, second=second), expert_base(tmp_path / "base")
    out = merge(recipe(pair, "task_arithmetic", WEIGHTS), tmp_path / "out")
    assert_same(applied(model, out, tmp_path / "in"), models_merged(model, pair, tmp_path / "as models", "task_arithmetic"))
    config = config_of(out)
    assert (config["r"], config["rank_pattern"]) == (R + 3, {f"^{Q}": 8})  # PEFT stacks experts by `r`
    assert [f"model.layers.0.{name}" for name in TARGETS] == config["target_parameters"]
    again = merge(recipe((out, pair[0]), weights=(1.0, 0.0)), tmp_path / "again")
    assert_same(applied(model, again, tmp_path / "in again"), applied(model, out, tmp_path / "in 2"), 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("space", ["core", "knots", "compressed"])
def test_experts_are_merged_one_by_one(space: str, tmp_path: Path) -> None:
    """As adapters are that name each expert: by the same method, in the same space."""
    pair = expert_adapters(tmp_path, second=TARGETS)
    single = tuple(one_by_one(adapter, tmp_path / f"single {i}") for i, adapter in enumerate(pair))
    options: dict[str, Any] = {"adapter_space": space} | ({"adapter_rank": 3} if space == "compressed" else {})
    model = expert_base(tmp_path / "base")
    weights, want = (
        applied(model, merge(recipe(adapters, "ties", density=0.6), tmp_path / f"out {i}", **options), tmp_path / f"in {i}")
        for i, adapters in enumerate((pair, single))
    )
    for name in (f"{EXPERTS}.down_proj",):  # gate and up are one matrix for the first, two for the others
        np.testing.assert_allclose(weights[name], want[name], atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("versions", [("0.21.2", "0.20.0"), ("0.21.2", "0.18.1"), (None, "0.20.0")])
def test_a_b_that_is_grouped_by_expert_is_merged_with_one_that_is_not(versions: tuple[Any, Any], tmp_path: Path) -> None:
    """The result has PEFT's order. It says whose layout of inputs and outputs it has, if that is one."""
    pair, model = expert_adapters(tmp_path), expert_base(tmp_path / "base")
    want = models_merged(model, pair, tmp_path / "as models", "task_arithmetic")
    config = config_of(pair[0]) | {"lora_B_layout": "grouped_by_expert", "peft_version": versions[0]}
    other = config_of(pair[1]) | {"peft_version": versions[1]}
    for path, written_config in zip(pair, (config, other), strict=True):
        (path / "adapter_config.json").write_text(json.dumps(written_config))
    save_file(by_expert(tensors_of(pair[0])), pair[0] / "adapter_model.safetensors")
    out = merge(recipe(pair, "task_arithmetic", WEIGHTS), tmp_path / "out")
    assert_same(applied(model, out, tmp_path / "in"), want)
    assert "lora_B_layout" not in config_of(out)
    assert config_of(out).get("peft_version") == (versions[0] if versions == ("0.21.2", "0.20.0") else None)


@pytest.mark.long
@pytest.mark.parametrize("swapped", [False, True], ids=["modern", "legacy"])
def test_experts_without_gates_are_merged_and_applied(swapped: bool, tmp_path: Path) -> None:
    """Up and down are each other's transpose, so the result has to say which layout it has."""
    tensors = up_and_down()
    model = write_checkpoint(tmp_path / "base", tensors, CONFIG)
    config = {"r": R, "target_parameters": ["experts.up_proj", "experts.down_proj"]}
    config["peft_version"] = "0.18.1" if swapped else "0.21.2"
    pair = tuple(adapter(tmp_path / str(k), rolled(stacked(tensors, swapped=swapped), k), **config) for k in range(2))
    out = merge(recipe(pair, "task_arithmetic", WEIGHTS), tmp_path / "out")
    assert config_of(out)["peft_version"] == config["peft_version"]
    assert_same(
        applied(model, out, tmp_path / "in"),
        models_merged(model, (pair[0], pair[1]), tmp_path / "as models", "task_arithmetic"),
    )


def rolled(factors_of: dict[str, np.ndarray], steps: int) -> dict[str, np.ndarray]:
    """Other factors of the same shapes."""
    return {name: np.roll(array, steps, axis=1) for name, array in factors_of.items()}


def test_classifiers_heads_are_merged_with_adapters(tmp_path: Path) -> None:
    """The result has the task of its inputs. There are no differences from a head that the base has not."""
    model = base(tmp_path / "base", np.float32)
    heads = [normal(1, H, seed=31), normal(1, H, seed=32)]
    pair = tuple(
        adapter(tmp_path / str(k), factors(Q, H, H, seed=k) | {f"{P}score.weight": head}, task_type="SEQ_CLS")
        for k, head in enumerate(heads)
    )
    out = merge(recipe(pair, "linear", (0.5, 0.5), normalize=False), tmp_path / "out")
    assert config_of(out)["task_type"] == "SEQ_CLS"
    weights = applied(model, out, tmp_path / "in")
    np.testing.assert_allclose(weights["score.weight"], (heads[0] + heads[1]) / 2, atol=1e-6)
    assert "lm_head.weight" not in weights
    problem = refusal({**recipe(pair, "task_arithmetic", (0.5, 0.5)), "base_model": str(model)})
    assert "it saves score.weight whole, and task_arithmetic needs the base's" in str(problem)
    assert "has no such tensor" in str(problem)
    assert "merge models: BASE+ADAPTER" in problem.finding.fix.replace("Merge", "merge")


def one_by_one(lora: Path, folder: Path) -> Path:
    """An adapter that names each expert, with the factors of all of a parameter: down_proj alone."""
    tensors, config = tensors_of(lora), config_of(lora)
    a, b = (tensors[f"{P}{EXPERTS}.lora_{part}.weight"] for part in "AB")
    rank = config["r"]
    single_factors = {f"{P}{EXPERTS}.{e}.down_proj.lora_A.weight": a[e * rank : (e + 1) * rank] for e in range(E)}
    single_factors |= {f"{P}{EXPERTS}.{e}.down_proj.lora_B.weight": np.ascontiguousarray(b[:, e::E]) for e in range(E)}
    return adapter(folder, single_factors, r=rank, lora_alpha=config["lora_alpha"], target_modules=["down_proj"])


@pytest.mark.long
def test_experts_by_name_get_one_rank(tmp_path: Path) -> None:
    """One adapter trained two experts, the other all: PEFT stacks them, and needs one rank."""
    shapes = {f"{EXPERTS}.{e}.down_proj": (H, 10) for e in range(E)}
    pair = tuple(
        adapter(
            tmp_path / str(i),
            {k: v for name in names for k, v in factors(name, *shapes[name], rank, seed=i + 5).items()}
            | factors(Q, H, H, rank),
            r=rank,
        )
        for i, (names, rank) in enumerate(((list(shapes), 2), (list(shapes)[1:], 3)))
    )
    out = merge(recipe((pair[0], pair[1]), "task_arithmetic", WEIGHTS), tmp_path / "out")
    tensors = tensors_of(out)
    assert {tensors[f"{P}{name}.lora_A.weight"].shape[0] for name in shapes} == {5}
    assert not tensors[f"{P}{EXPERTS}.0.down_proj.lora_A.weight"][2:].any()
    model = write_checkpoint(tmp_path / "base", apart(fused()) | {f"{Q}.weight": normal(H, H)}, CONFIG)
    want = models_merged(model, (pair[0], pair[1]), tmp_path / "as models", "task_arithmetic")
    assert_same(applied(model, out, tmp_path / "in"), want)


# ---- tensors saved whole


def with_whole(folder: Path, seed: int, names: tuple[str, ...] = (HEAD, NORM), rank: int = 4) -> Path:
    shapes = {HEAD: (TOKENS, H), NORM: (H,)}
    tensors = {f"{P}{name}": normal(*shapes[name], seed=seed) for name in names}
    saved = [name.removesuffix(".weight") for name in names]
    return adapter(folder, factors(Q, H, H, rank, seed=seed) | tensors, r=rank, modules_to_save=saved)


@pytest.mark.long
def test_tensors_saved_whole_are_merged_as_those_of_models(tmp_path: Path) -> None:
    pair = with_whole(tmp_path / "one", 1), with_whole(tmp_path / "two", 2, rank=2)
    out = merge(recipe(pair, "linear", (0.7, 0.3)), tmp_path / "out")
    config, tensors = config_of(out), tensors_of(out)
    assert sorted(config["modules_to_save"]) == ["lm_head", "model.norm"]
    for name in (HEAD, NORM):
        one, two = (tensors_of(adapter)[f"{P}{name}"].astype(np.float64) for adapter in pair)
        np.testing.assert_allclose(tensors[f"{P}{name}"], 0.7 * one + 0.3 * two, atol=1e-6)
    model = base(tmp_path / "base", np.float32)
    assert_same(
        applied(model, out, tmp_path / "in"), models_merged(model, pair, tmp_path / "as models", "task_arithmetic", (0.7, 0.3))
    )


@pytest.mark.long
@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_what_an_adapter_does_not_save_is_the_base_s(method: str, tmp_path: Path) -> None:
    model = base(tmp_path / "base", np.float32)
    pair = with_whole(tmp_path / "one", 1), with_whole(tmp_path / "two", 2, (NORM,))
    shared = {"density": 0.5} if method == "ties" else {}
    out = merge({**recipe(pair, method, WEIGHTS, **shared), "base_model": str(model)}, tmp_path / "out")
    weights = applied(model, out, tmp_path / "in")
    want = models_merged(model, pair, tmp_path / "as models", method, **shared)
    for name in (HEAD, NORM):
        assert as_bytes(weights[name]) == as_bytes(want[name])
    if method == "task_arithmetic":
        assert_same(weights, want)
    assert "base_model" in (out / "README.md").read_text()


@pytest.mark.slow
def test_tokenizer_files_beside_adapters_that_save_vocabularies_are_kept(tmp_path: Path) -> None:
    one, two = with_whole(tmp_path / "one", 1), with_whole(tmp_path / "two", 2)
    for folder in (one, two):
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "tokenizer_secret").write_text("private")
    what = recipe((one, two), "linear", (0.5, 0.5))
    out = merge(what, tmp_path / "out")
    assert (out / "tokenizer_config.json").read_text() == "{}"
    assert not (out / "tokenizer_secret").exists()
    assert not weightsmith.plan(what).warnings
    (two / "tokenizer_config.json").write_text('{"a": 1}')
    (warning,) = weightsmith.plan(what).warnings
    assert warning.what.startswith("tokenizer files differ from those beside")
    (tmp_path / "plan.json").write_text(json.dumps(weightsmith.plan(what).to_json()))
    ran = weightsmith.run(tmp_path / "plan.json", tmp_path / "run", progress=False, fsync=False).out
    assert (ran / "tokenizer_config.json").exists()


def test_whole_tensors_without_what_they_need_are_rejected(tmp_path: Path) -> None:
    model = base(tmp_path / "base", np.float32)
    one, two = with_whole(tmp_path / "one", 1), with_whole(tmp_path / "two", 2, (NORM,))
    problem = refusal(recipe((one, two), "linear", (0.5, 0.5)))
    assert f"one: it saves {HEAD} whole, which {two} does not have" in str(problem)
    three = with_whole(tmp_path / "three", 3, (NORM,))
    assert "write merge_method: task_arithmetic, and base_model" in str(problem).lower()
    assert f"it saves {NORM} whole, and ties needs the base's" in str(refusal(recipe((two, three), "ties", density=0.5)))
    problem = refusal(recipe((two, three), "linear", (1.0, 1.0), normalize=False))
    assert "makes 2 times such a tensor of it" in str(problem)
    other = adapter(tmp_path / "other", factors("lm_head", TOKENS, H))
    problem = refusal({**recipe((one, other), "ties"), "base_model": str(model)})
    assert f"it saves {HEAD} whole" in str(problem)
    assert "other has factors of it" in str(problem)
    longer = adapter(tmp_path / "longer", factors(Q, H, H) | {f"{P}{HEAD}": normal(TOKENS + 2, H)})
    assert "different numbers of tokens" in str(refusal(recipe((one, longer), "linear", (0.5, 0.5))))
    small = write_checkpoint(tmp_path / "small", {f"{Q}.weight": normal(H, H + 1)}, CONFIG)
    assert "does not fit" in str(refusal({**recipe((one, two), "ties"), "base_model": str(small)}))


# ---- DoRA


def dora(folder: Path, seed: int, modules: tuple[str, ...] = (Q, DOWN), rank: int = 4, **config: Any) -> Path:
    tensors = {}
    for module in modules:
        rows, cols = (H, H) if module == Q else (H, INNER)
        tensors |= factors(module, rows, cols, rank, seed=seed)
        tensors[f"{P}{module}.lora_magnitude_vector"] = 5 + np.abs(normal(rows, seed=seed))
    return adapter(folder, tensors, use_dora=True, r=rank, **config)


@pytest.mark.long
@pytest.mark.parametrize("space", ["core", "knots"])
def test_a_sum_of_doras_is_a_dora(space: str, tmp_path: Path) -> None:
    """Exactly what the merge of the models is, also with a LoRA among them, and with modules that one alone has."""
    model = base(tmp_path / "base", np.float32)
    plain = adapter(tmp_path / "plain", factors(Q, H, H, 3, seed=8), r=3)
    three = dora(tmp_path / "one", 1), dora(tmp_path / "two", 2, (Q,), 2), plain
    weights = (0.4, 0.5, -0.3)
    what = {**recipe(three, "task_arithmetic", weights), "base_model": str(model)}
    out = merge(what, tmp_path / "out", adapter_space=space)
    actual = applied(model, out, tmp_path / "in")
    assert_same(actual, models_merged(model, three, tmp_path / "as models", "task_arithmetic", weights), 5e-5)
    config = config_of(out)
    assert (config["use_dora"], config["r"], config["rank_pattern"]) == (True, 9, {f"^{DOWN}": 4})
    assert config["base_model_name_or_path"] == str(model)  # none of the adapters names one
    assert config["target_modules"] == [Q, DOWN]
    assert tensors_of(out)[f"{P}{DOWN}.lora_magnitude_vector"].shape == (H,)
    one, two = (merge(what, tmp_path / f"threads {n}", adapter_space=space, threads=n) for n in (1, 3))
    assert {n: as_bytes(a) for n, a in tensors_of(one).items()} == {n: as_bytes(a) for n, a in tensors_of(two).items()}


@pytest.mark.long
def test_a_smaller_rank_of_doras_keeps_the_norms_of_what_is_left(tmp_path: Path) -> None:
    """The rows of the result have the norms that the adapter names, whatever was cut off."""
    model = base(tmp_path / "base", np.float32)
    pair = dora(tmp_path / "one", 1), dora(tmp_path / "two", 2)
    out = merge({**recipe(pair, "ties", density=0.5), "base_model": str(model)}, tmp_path / "out", adapter_rank=2)
    assert config_of(out)["target_modules"] == [Q, DOWN]  # theirs do not say all that they have
    weights, norms = applied(model, out, tmp_path / "in"), tensors_of(out)[f"{P}{Q}.lora_magnitude_vector"]
    np.testing.assert_allclose(np.linalg.norm(weights[f"{Q}.weight"], axis=1), norms, rtol=1e-5)
    assert config_of(out)["r"] == 2


@pytest.mark.long
def test_doras_without_what_they_need_are_rejected(tmp_path: Path) -> None:
    one = dora(tmp_path / "one", 1)
    assert "so the merge needs the base model" in str(refusal(recipe((one, dora(tmp_path / "two", 2)), "ties", density=0.5)))
    model = base(tmp_path / "base", np.float32)
    names = [f"{P}model.embed_tokens.lora_embedding_{part}" for part in "AB"]
    embedding = adapter(tmp_path / "e", dict(zip(names, (normal(4, TOKENS), normal(H, 4)), strict=True)))
    problem = refusal({**recipe((one, embedding), "ties"), "base_model": str(model)})
    assert "DoRA of an embedding is not merged: model.embed_tokens" in str(problem)
    zeroed = dora(tmp_path / "z", 1, (Q,))
    with pytest.raises(weightsmith.WeightsmithError, match=r"row \d+ of the base would be scaled to"):
        scale_to_zero(model, zeroed, tmp_path)


def scale_to_zero(model: Path, lora: Path, tmp_path: Path) -> None:
    """A merge whose first row of the base vanishes."""
    weights = applied(model, lora, tmp_path / "in")
    tensors = tensors_of(lora)
    with weightsmith.open_checkpoint(model) as checkpoint:
        weight = checkpoint.read(f"{Q}.weight").astype(np.float64)
    a, b = (tensors[f"{P}{Q}.lora_{part}.weight"].astype(np.float64) for part in "AB")
    c = np.linalg.norm(weights[f"{Q}.weight"].astype(np.float64), axis=1) / np.linalg.norm(weight + 2 * b @ a, axis=1)
    weight_of_it = float(-1 / (c[0] - 1))
    merge({**recipe((lora,), "task_arithmetic", (weight_of_it,)), "base_model": str(model)}, tmp_path / "out")


@pytest.mark.parametrize("kind", ["DoRA", "tensors that are saved whole", "factors of all experts of a parameter"])
def test_peft_s_combinations_are_of_plain_factors(kind: str, tmp_path: Path) -> None:
    makers = {"DoRA": lambda: dora(tmp_path / "a", 1), "tensors that are saved whole": lambda: with_whole(tmp_path / "a", 1)}
    lora = makers[kind]() if kind in makers else expert_adapters(tmp_path)[0]
    assert f"PEFT's add_weighted_adapter has no peft_svd of {kind}" in str(refusal(recipe((lora,), "peft_svd", (1.0,))))


# ---- other trainers

UNSLOTH: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True},
    "base_model_name_or_path": "unsloth/tiny-llama-unsloth-bnb-4bit",
    "bias": "none",
    "ensure_weight_tying": False,
    "exclude_modules": None,
    "layer_replication": None,
    "loftq_config": {},
    "lora_bias": False,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "target_modules": r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|down_proj))|(?:\bmodel\.layers\..*)",
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_qalora": False,
}


@pytest.mark.long
def test_adapters_of_different_trainers_are_merged(tmp_path: Path) -> None:
    """Unsloth's settings, and names as FSDP and torch.compile leave them: the same bytes as of plain adapters."""
    one, two = factors(Q, H, H), factors(Q, H, H, seed=5) | factors(DOWN, H, INNER, seed=7)
    wrapped = {
        name.replace("model.layers", "_orig_mod.model._fsdp_wrapped_module.layers").replace(".weight", ".default.weight"): array
        for name, array in two.items()
    }
    plain = adapter(tmp_path / "a", one), adapter(tmp_path / "b", two, target_modules=["q_proj", "down_proj"])
    pair = adapter(tmp_path / "c", one, **UNSLOTH), adapter(tmp_path / "d", wrapped, base_model_name_or_path="./Tiny-Llama")
    outs = [merge(recipe(adapters, "ties", density=0.5), tmp_path / f"out {i}") for i, adapters in enumerate((plain, pair))]
    tensors, want = ({n: as_bytes(a) for n, a in tensors_of(out).items()} for out in outs)
    assert tensors == want
    assert config_of(outs[1])["target_modules"] == [Q, DOWN]
    assert config_of(outs[1])["task_type"] == "CAUSAL_LM"


def test_a_base_that_the_recipe_names_may_have_several_names(tmp_path: Path) -> None:
    model = base(tmp_path / "base", np.float32)
    pair = tuple(adapter(tmp_path / name, base_model_name_or_path=f"org/{name}") for name in ("one", "two"))
    assert "name it as base_model" in str(refusal(recipe((pair[0], pair[1]), "task_arithmetic")))
    what = {**recipe((pair[0], pair[1]), "task_arithmetic"), "base_model": str(model)}
    plan = weightsmith.plan(what)
    (warning,) = plan.warnings
    assert [model.ref for model in plan.models] == list(map(str, pair))  # nothing of the base is read
    assert warning.what.startswith("adapters that name different bases")
    assert warning.details == (f"{pair[0]}: org/one", f"{pair[1]}: org/two")


# ---- plans


def kinds(folder: Path) -> dict[str, dict[str, Any]]:
    """A recipe of each kind."""
    model = str(base(folder / "base", np.float32))
    doras = dora(folder / "d1", 1), dora(folder / "d2", 2)
    whole = with_whole(folder / "w1", 1), with_whole(folder / "w2", 2)
    return {
        "experts": recipe(expert_adapters(folder), "ties", density=0.5),
        "DoRA": {**recipe(doras, "ties", density=0.5), "base_model": model},
        "whole": {**recipe(whole, "task_arithmetic"), "base_model": model},
    }


@pytest.mark.long
@pytest.mark.parametrize("kind", ["experts", "DoRA", "whole"])
def test_a_plan_of_any_kind_runs_from_its_json(kind: str, tmp_path: Path) -> None:
    what = kinds(tmp_path)[kind]
    (tmp_path / "plan.json").write_text(json.dumps(weightsmith.plan(what).to_json()))
    out = weightsmith.run(tmp_path / "plan.json", tmp_path / "run", progress=False, fsync=False).out
    direct = merge(what, tmp_path / "out")
    assert {n: as_bytes(a) for n, a in tensors_of(out).items()} == {n: as_bytes(a) for n, a in tensors_of(direct).items()}


@pytest.mark.parametrize("kind", ["experts", "DoRA"])
def test_settings_from_elsewhere_are_checked(kind: str, tmp_path: Path) -> None:
    for product in weightsmith.plan(kinds(tmp_path)[kind]).products:
        check = find_kind(product.op).check
        assert check(product) == ""
        module_settings = dict(product.settings["modules"][0])
        for key, value in {"experts": 10**9, "normed": (7,), "scaled": not module_settings["scaled"]}.items():
            modules = ({**module_settings, key: value}, *product.settings["modules"][1:])
            assert check(replace(product, settings={**product.settings, "modules": modules})), key
        if product.op == "merged_factors":
            assert check(replace(product, settings={**product.settings, "ranks": ()}))


# ---- peft is the judge

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "modules to save": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "DoRA and modules to save": ("llama", {"target_modules": "all-linear", "use_dora": True, "modules_to_save": ["lm_head"]}),
    "mixtral": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": TARGETS}),
    "qwen3-moe": ("qwen3-moe", {"target_modules": [], "target_parameters": TARGETS[1:]}),
    "gpt-oss": ("gpt-oss", {"target_modules": ["q_proj"], "target_parameters": TARGETS}),
    "llama4": ("llama4", {"target_modules": [], "target_parameters": [t.replace("mlp", "feed_forward") for t in TARGETS]}),
}


def fresh_model(name: str, folder: Path) -> Any:
    """A small model of transformers, also saved to a folder."""
    torch, transformers = (pytest.importorskip(n) for n in ("torch", "transformers"))
    torch.manual_seed(0)
    if name == "llama":
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
        sizes = {"vocab_size": TOKENS, "hidden_size": H, "intermediate_size": INNER}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    else:
        model_class, config_class, arguments = moe_zoo.MODELS[name]
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**arguments))
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sampled(KINDS, ("DoRA and modules to save", "gpt-oss")))
def test_peft_loads_merged_adapters_and_they_are_the_merge(kind: str, tmp_path: Path) -> None:
    """No missing or unexpected keys; the same logits as the merge of its own merged models; the same bytes when saved again."""
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    transformers.utils.logging.disable_progress_bar()
    name, settings = KINDS[kind]
    load = transformers.AutoModelForCausalLM.from_pretrained
    base_state = {n: t.clone() for n, t in fresh_model(name, tmp_path / "base").state_dict().items()}
    sums = {n: torch.zeros_like(t) for n, t in base_state.items()}
    for i, weight in enumerate(WEIGHTS):
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2 + i, lora_alpha=4, **settings)
        tuned = peft.get_peft_model(load(tmp_path / "base", dtype=torch.float32), config)
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn_like(parameter) * 0.1
        tuned.save_pretrained(tmp_path / str(i))
        for n, t in tuned.merge_and_unload().state_dict().items():
            sums[n] += weight * (t - base_state[n])
    merged = load(tmp_path / "base", dtype=torch.float32)
    merged.load_state_dict({n: t + sums[n] for n, t in base_state.items()})
    what = recipe((tmp_path / "0", tmp_path / "1"), "task_arithmetic", WEIGHTS)
    out = merge({**what, "base_model": str(tmp_path / "base")}, tmp_path / "out")

    wrapped = peft.get_peft_model(load(tmp_path / "base", dtype=torch.float32), peft.PeftConfig.from_pretrained(out))
    adapter_names = {n for n in wrapped.state_dict() if "lora_" in n or "modules_to_save" in n}
    loading = peft.set_peft_model_state_dict(wrapped, {n: torch.from_numpy(a) for n, a in tensors_of(out).items()})
    assert loading.unexpected_keys == []
    assert not adapter_names & set(loading.missing_keys)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(wrapped.eval()(tokens).logits, merged.eval()(tokens).logits, atol=2e-5, rtol=1e-4)
    wrapped.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    assert {n: as_bytes(a) for n, a in tensors_of(tmp_path / "again").items()} == {
        n: as_bytes(a) for n, a in tensors_of(out).items()
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_peft_loads_merged_experts_that_are_named_one_by_one(tmp_path: Path) -> None:
    """PEFT stacks them when it loads the adapter, so their ranks must be equal."""
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    transformers.utils.logging.disable_progress_bar()
    model = fresh_model("mixtral", tmp_path / "base")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    for i in range(2):
        changed = {n: t + 0.05 * torch.randn_like(t) if "experts" in n or "q_proj" in n else t for n, t in before.items()}
        model.load_state_dict(changed)
        model.save_pretrained(tmp_path / f"fine {i}")
        extract(tmp_path / f"fine {i}", tmp_path / "base", tmp_path / str(i), max_rank=2 + i, out_dtype="float32")
    pair = tmp_path / "0", tmp_path / "1"
    assert any(".experts.0." in name for name in tensors_of(pair[0]))
    out = merge(recipe(pair, "task_arithmetic", WEIGHTS), tmp_path / "out")
    assert config_of(out)["r"] == 5
    weights = models_merged(tmp_path / "base", pair, tmp_path / "as models", "task_arithmetic")
    want = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "as models", dtype=torch.float32)
    assert weights.keys()
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(fresh, out)
    loaded = tuned.load_adapter(out, adapter_name="again")
    assert loaded.unexpected_keys == []
    assert not [key for key in loaded.missing_keys if "lora_" in key and ".again." in key]
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(tuned.eval()(tokens).logits, want.eval()(tokens).logits, atol=2e-5, rtol=2e-4)
