"""`weightsmith moe` end to end without torch: experts are their donors' bytes, whatever the donors are; nothing is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests.cli_help import Cli, cli
from tests.mini import as_bytes, write_checkpoint
from weightsmith._base.errors import Finding, PlanError, StoreError
from weightsmith._planning.planner import inputs
from weightsmith._plans import plan_from_json

__all__ = ["cli"]

BF16 = np.dtype(ml_dtypes.bfloat16)
HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 16, 24, 32, 2
NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


def config(**keys: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "vocab_size": VOCAB,
        **keys,
    }


def llama(seed: int, dtype: Any = BF16, *, fused: bool = False, intermediate: int = INTERMEDIATE) -> dict[str, np.ndarray]:
    """Tensors of a Llama; fused: gate and up are one tensor, and q, k and v."""
    rng = np.random.default_rng(seed)

    def new(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    tensors = {"model.embed_tokens.weight": new(VOCAB, HIDDEN), "model.norm.weight": new(HIDDEN)}
    for i in range(LAYERS):
        layer = {f"self_attn.{p}_proj.weight": new(HIDDEN, HIDDEN) for p in "qkvo"}
        layer |= {"mlp.gate_proj.weight": new(intermediate, HIDDEN), "mlp.up_proj.weight": new(intermediate, HIDDEN)}
        layer |= {"mlp.down_proj.weight": new(HIDDEN, intermediate)}
        layer |= {"input_layernorm.weight": new(HIDDEN), "post_attention_layernorm.weight": new(HIDDEN)}
        if fused:
            layer["mlp.gate_up_proj.weight"] = np.concatenate([layer.pop(f"mlp.{p}_proj.weight") for p in ("gate", "up")])
            layer["self_attn.qkv_proj.weight"] = np.concatenate([layer.pop(f"self_attn.{p}_proj.weight") for p in "qkv"])
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return tensors


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    """base, a and b."""
    return {name: write_checkpoint(tmp_path / name, llama(seed), config()) for seed, name in enumerate(("base", "a", "b"))}


def recipe(models: Mapping[str, Path], experts: Sequence[str], base: Any = None, **options: Any) -> dict[str, Any]:
    return {
        "base_model": str(models["base"]) if base is None else base,
        "experts": [{"source_model": str(models[name])} for name in experts],
        "gate_mode": "random",
        **options,
    }


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    with weightsmith.open_checkpoint(folder) as model:
        return {name: model.read(name) for name in model.specs}


def check_experts(out: Path, donors: Sequence[Mapping[str, np.ndarray]]) -> None:
    tensors = tensors_of(out)
    for i in range(LAYERS):
        for e, donor in enumerate(donors):
            for part, short in NAMES.items():
                matrix = tensors[f"model.layers.{i}.block_sparse_moe.experts.{e}.{short}.weight"]
                assert as_bytes(matrix) == as_bytes(donor[f"model.layers.{i}.mlp.{part}_proj.weight"])


def test_experts_are_their_donors_bytes_and_all_else_is_the_bases(models: dict[str, Path], tmp_path: Path) -> None:
    mixture = weightsmith.moe(recipe(models, ["a", "b", "a", "base"]), tmp_path / "out")
    check_experts(tmp_path / "out", [llama(1), llama(2), llama(1), llama(0)])
    tensors = tensors_of(tmp_path / "out")
    for name, tensor in llama(0).items():
        if ".mlp." not in name:
            assert as_bytes(tensors[name]) == as_bytes(tensor)
    assert tensors["model.layers.0.block_sparse_moe.gate.weight"].shape == (4, HIDDEN)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["model_type"], said["num_local_experts"], said["num_experts_per_tok"]) == ("mixtral", 4, 2)
    assert {s.op for s in mixture.plan.steps} == {"copy"}
    assert weightsmith.verify(tmp_path / "out")


def test_what_is_to_know_of_the_models_is_said(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weightsmith.moe(recipe(models, ["a", "b", "a", "b"]), tmp_path / "out")
    real = inputs.open_checkpoint

    def noted(ref: str, **options: Any) -> Any:
        checkpoint = real(ref, **options)
        checkpoint.notes = (Finding("an old revision", Path(ref).name),)
        return checkpoint

    monkeypatch.setattr(inputs, "open_checkpoint", noted)
    said = [
        warning.where for warning in weightsmith.plan(recipe(models, ["a", "b"])).warnings if warning.what == "an old revision"
    ]
    assert said == ["base", "a", "b"]
    smaller = {"model": str(tmp_path / "out"), "merge_experts": {"groups": [[0, 1], [2, 3]]}}
    assert [w.where for w in weightsmith.plan(smaller).warnings if w.what == "an old revision"] == ["out"]


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens"])
def test_only_the_base_is_said_to_have_a_head_and_an_embedding_of_its_own(saved: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", llama(0), config(tie_word_embeddings=True))
    place = {"lm_head": "lm_head", "embed_tokens": "model.embed_tokens"}[saved]
    tensors = {f"base_model.model.{place}.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    for i in range(LAYERS):
        for part, shape in (("A", (2, HIDDEN)), ("B", (INTERMEDIATE, 2))):
            tensors[f"base_model.model.model.layers.{i}.mlp.up_proj.lora_{part}.weight"] = np.ones(shape, np.float32)
    write_checkpoint(tmp_path / "adapter", tensors)
    (tmp_path / "adapter" / "model.safetensors").rename(tmp_path / "adapter" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["up_proj"], "modules_to_save": [saved]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    adapted = f"{base}+{tmp_path}/adapter"

    def said(base_model: str) -> list[str]:
        experts = [{"source_model": str(base)}, {"source_model": adapted}]
        what = {"base_model": base_model, "gate_mode": "random", "experts": experts}
        return [warning.what for warning in weightsmith.plan(what).warnings if "two tensors" in warning.what]

    assert len(said(adapted)) == 1
    assert not said(str(base))


def test_every_tensor_of_every_model_is_used_or_left_out_for_a_reason(models: dict[str, Path], tmp_path: Path) -> None:
    mixture = weightsmith.moe(recipe(models, ["a", "b"]), tmp_path / "out")
    used = {(i.model, i.tensor) for step in mixture.plan.steps for leaf in step.leaves for i in leaf.inputs}
    dropped = {(d.model, d.tensor): d.reason for d in mixture.plan.dropped}
    refs = [m.ref for m in mixture.plan.models]
    for number, ref in enumerate(refs[:3]):
        for name in llama(0):
            assert ((number, name) in used) != ((number, name) in dropped), (ref, name)
    base = refs.index(str(models["base"]))
    assert dropped[base, "model.layers.0.mlp.up_proj.weight"] == "replaced by the experts"


def test_fused_donors_give_the_same_checkpoint(models: dict[str, Path], tmp_path: Path) -> None:
    fused = {
        n: write_checkpoint(tmp_path / f"fused-{n}", llama(s, fused=True), config()) for s, n in enumerate(("base", "a", "b"))
    }
    weightsmith.moe(recipe(models, ["a", "b"]), tmp_path / "out")
    weightsmith.moe(recipe(fused, ["a", "b"]), tmp_path / "fused")
    ours, theirs = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "fused")
    assert list(ours) == list(theirs)
    assert all(as_bytes(ours[name]) == as_bytes(theirs[name]) for name in ours)


def test_a_donor_of_another_dtype_is_cast_to_the_bases(models: dict[str, Path], tmp_path: Path) -> None:
    models["wide"] = write_checkpoint(tmp_path / "wide", llama(3, np.float32), config())
    weightsmith.moe(recipe(models, ["a", "wide"]), tmp_path / "out")
    rounded = {name: tensor.astype(BF16) for name, tensor in llama(3, np.float32).items()}
    check_experts(tmp_path / "out", [llama(1), rounded])


def test_dtype_is_that_of_every_tensor(models: dict[str, Path], tmp_path: Path) -> None:
    weightsmith.moe(recipe(models, ["a", "b"], dtype="float32"), tmp_path / "out")
    assert {t.dtype for t in tensors_of(tmp_path / "out").values()} == {np.dtype(np.float32)}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.long
def test_a_merge_in_the_place_of_the_base_is_that_merge(models: dict[str, Path], tmp_path: Path) -> None:
    """The tensors that are no experts' are what the merge alone writes, random masks included."""
    merge = {
        "merge_method": "dare_ties",
        "base_model": str(models["base"]),
        "models": [{"model": str(models[n]), "parameters": {"weight": 0.5, "density": 0.5}} for n in ("a", "b")],
    }
    mixture = weightsmith.moe(recipe(models, ["a", "b"], base=merge), tmp_path / "out", seed=3)
    weightsmith.merge(merge, tmp_path / "merged", seed=3)
    tensors, alone = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "merged")
    kept = [name for name in alone if ".mlp." not in name]
    assert len(kept) == 2 + LAYERS * 6
    assert all(as_bytes(tensors[name]) == as_bytes(alone[name]) for name in kept)
    check_experts(tmp_path / "out", [llama(1), llama(2)])
    assert [m.ref for m in mixture.plan.models].count(str(models["a"])) == 1, "one model, however often it is named"
    assert mixture.distance, "the part that is merged has moved from its base"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Frobenius norms of merged - base, over the tensors shared by an inline merge and its base." in card
    assert "Random seed: 3." in card


def test_a_merge_of_another_depth_is_the_base_and_the_experts(models: dict[str, Path], tmp_path: Path) -> None:
    """Slices make a model of more layers than any of its inputs has."""
    runs = [("a", 0, 2), ("b", 0, 2)]
    slices = [{"sources": [{"model": str(models[n]), "layer_range": [i, j]}]} for n, i, j in runs]
    merge = {"merge_method": "passthrough", "slices": slices}
    experts = [{"source_model": merge}] * 2
    weightsmith.moe({"base_model": merge, "experts": experts, "gate_mode": "random"}, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 2 * LAYERS
    written = tensors_of(tmp_path / "out")
    for layer, (donor, donor_layer) in enumerate([(1, 0), (1, 1), (2, 0), (2, 1)]):
        tensors = llama(donor)
        for new, old in (("block_sparse_moe.experts.1.w2", "mlp.down_proj"), ("self_attn.q_proj", "self_attn.q_proj")):
            matrix = written[f"model.layers.{layer}.{new}.weight"]
            assert as_bytes(matrix) == as_bytes(tensors[f"model.layers.{donor_layer}.{old}.weight"])


@pytest.mark.long
def test_a_model_wide_merge_made_on_the_way_is_the_merge_written_first(models: dict[str, Path], tmp_path: Path) -> None:
    """`scope: model` counts every tensor of the merge, also those that the mixture takes from another model."""

    def merge(name: str) -> dict[str, Any]:
        return {
            "merge_method": "ties",
            "base_model": str(models["base"]),
            "models": [{"model": str(models[name]), "parameters": {"weight": 1, "density": 0.2}}],
            "parameters": {"scope": "model"},
        }

    made_on_the_way = [{"source_model": merge("b")}, {"source_model": str(models["a"])}]
    weightsmith.moe({**recipe(models, [], base=merge("a")), "experts": made_on_the_way}, tmp_path / "at once")
    written = {name: tmp_path / f"merged {name}" for name in "ab"}
    for name, out in written.items():
        weightsmith.merge(merge(name), out)
    experts = [{"source_model": str(written["b"])}, made_on_the_way[1]]
    weightsmith.moe({**recipe(models, [], base=str(written["a"])), "experts": experts}, tmp_path / "in steps")
    at_once, in_steps = tensors_of(tmp_path / "at once"), tensors_of(tmp_path / "in steps")
    plan = plan_from_json(weightsmith.plan({**recipe(models, [], base=merge("a")), "experts": made_on_the_way}).to_json())
    weightsmith.run(plan, tmp_path / "from its plan")
    assert tensors_of(tmp_path / "from its plan").keys() == at_once.keys()
    assert at_once.keys() == in_steps.keys()
    assert all(as_bytes(at_once[name]) == as_bytes(in_steps[name]) for name in in_steps)


@pytest.mark.parametrize(("out", "overwrite"), [("made", False), ("a", True), ("file/out", False)])
def test_an_output_that_cannot_be_is_refused_before_router_weights_are_computed(
    out: str, overwrite: bool, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may take hours."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("weightsmith._features.mixture.router.route", lambda *_: pytest.fail("computed"))
    with pytest.raises(StoreError):
        weightsmith.moe(recipe(models, ["a", "b"]), tmp_path / out, overwrite=overwrite)
    assert not list(tmp_path.glob(".*"))


def test_plan_takes_recipes_of_mixtures_too(models: dict[str, Path]) -> None:
    planned = weightsmith.plan(recipe(models, ["a", "b"]), seed=5)
    assert (planned.provenance.name, planned.seed) == ("moe", 5)


@pytest.mark.long
def test_random_gates_follow_the_seed(models: dict[str, Path], tmp_path: Path) -> None:
    for mode in ("random", "uniform_random"):
        rows = []
        for k, seed in enumerate((1, 1, 2)):
            weightsmith.moe(recipe(models, ["a", "b"]) | {"gate_mode": mode}, tmp_path / f"{mode}{k}", seed=seed)
            rows.append(tensors_of(tmp_path / f"{mode}{k}")["model.layers.1.block_sparse_moe.gate.weight"])
        assert as_bytes(rows[0]) == as_bytes(rows[1]) != as_bytes(rows[2])
    assert float(np.abs(rows[0].astype(np.float32)).max()) <= HIDDEN**-0.5


def test_the_bytes_do_not_depend_on_threads_or_memory(models: dict[str, Path], tmp_path: Path) -> None:
    weightsmith.moe(recipe(models, ["a", "b"]), tmp_path / "one", threads=1)
    weightsmith.moe(recipe(models, ["a", "b"]), tmp_path / "many", threads=5, max_memory_bytes=300_000_000)
    one, many = (tmp_path / n / "model.safetensors" for n in ("one", "many"))
    assert one.read_bytes() == many.read_bytes()


def test_the_command_makes_what_the_function_makes(models: dict[str, Path], tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "moe.yml"
    file.write_text(json.dumps(recipe(models, ["a", "b"])) + "\n")
    began = time.monotonic()
    said = json.loads(cli("moe", file, tmp_path / "cli", "--json", "--no-check-loading").out)
    assert said["method"] == "moe"
    assert 0 < said["seconds"] < time.monotonic() - began
    weightsmith.moe(file, tmp_path / "api")
    by_command, by_function = (tmp_path / n / "model.safetensors" for n in ("cli", "api"))
    assert by_command.read_bytes() == by_function.read_bytes()
    assert (tmp_path / "cli" / "recipe.yml").read_bytes() == file.read_bytes()
    card = (tmp_path / "cli" / "README.md").read_text()
    assert "Mixture of experts (mixtral)" in card
    assert "(computed)" not in card


@pytest.mark.slow
def test_a_merge_in_the_place_of_an_expert_is_that_merge(models: dict[str, Path], tmp_path: Path) -> None:
    """Its MLPs are what the merge alone writes, random masks included, in unfused and in fused layouts."""
    merge = {
        "merge_method": "dare_ties",
        "base_model": str(models["base"]),
        "models": [{"model": str(models[n]), "parameters": {"weight": 0.5, "density": 0.5}} for n in ("a", "b")],
    }
    weightsmith.merge(merge, tmp_path / "merged", seed=3)
    alone = tensors_of(tmp_path / "merged")
    mixed = recipe(models, ["a", "b"])
    mixed["experts"].append({"source_model": merge})
    weightsmith.moe(mixed, tmp_path / "out", seed=3)
    check_experts(tmp_path / "out", [llama(1), llama(2), alone])
    weightsmith.moe(mixed | {"architecture": "granitemoe"}, tmp_path / "fused", seed=3)
    fused = tensors_of(tmp_path / "fused")["model.layers.1.block_sparse_moe.input_linear.weight"]
    expected = [alone[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert as_bytes(fused[2]) == as_bytes(np.concatenate(expected))


def test_an_expert_that_is_merged_on_the_way_is_not_changed_besides(models: dict[str, Path]) -> None:
    merge = {"merge_method": "linear", "models": [{"model": str(models["a"]), "parameters": {"weight": 1}}]}
    mixed = recipe(models, ["a"], experts_per_token=1)
    mixed["experts"].append({"source_model": merge, "noise_scale": 0.1})
    with pytest.raises(PlanError, match="an inline merge") as caught:
        weightsmith.moe(mixed, "never")
    assert caught.value.problems[0].finding.where == "experts[1].source_model"
