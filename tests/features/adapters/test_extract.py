"""`weightsmith extract-lora`: adapters that make one model of another, read back by weightsmith and by PEFT."""

from __future__ import annotations

import gc
import json
import re
import shutil
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import weightsmith
from tests.cli_help import Cli, cli
from tests.mini import as_bytes, write_checkpoint
from tests.models.lora.test_lora import BF16, DOWN, INNER, LLAMA, TOKENS, H, P, Q, adapter, base, base_tensors, factors, normal
from tests.planning.planner import test_pipelines as pipelines
from weightsmith._base.errors import FormatError, OutputExists, PlanError, WeightsmithError
from weightsmith._features.adapters import factors as factors_module
from weightsmith._features.adapters.extract import prepare_extraction
from weightsmith._features.adapters.factors import KIND, FactorWork
from weightsmith._features.adapters.options import ExtractSettings
from weightsmith._outputs.area import StagingArea, staging_folder
from weightsmith._outputs.staging import Staging
from weightsmith._plans import plan_from_json

pytest.importorskip("torch")
__all__ = ["cli"]


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return config


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return dict(load_file(folder / "adapter_model.safetensors"))


def applied(model: Path, lora: Path, out: Path, **options: Any) -> dict[str, np.ndarray]:
    """The model with the adapter, merged."""
    recipe = {"merge_method": "passthrough", "models": [{"model": f"{model}+{lora}"}], **options}
    weightsmith.merge(recipe, out, progress=False, fsync=False)
    with weightsmith.open_checkpoint(out) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.specs}


def tuned(folder: Path, changes: Mapping[str, np.ndarray], dtype: Any = BF16, **config: Any) -> Path:
    """A fine-tune of `base(…)`: some tensors have others added to them."""
    tensors = {name: array.astype(BF16).astype(np.float32) for name, array in base_tensors().items()}
    for name, change in changes.items():
        tensors[name] = tensors[name] + change
    return write_checkpoint(
        folder, {n: a.astype(dtype) for n, a in tensors.items()}, {**LLAMA, "num_hidden_layers": 2, **config}
    )


def first_plan(fine: Path, model: Path) -> str:
    """The first plan as JSON."""
    with prepare_extraction(fine, model, ExtractSettings(max_rank=6)) as prepared:
        return json.dumps(prepared.plan.to_json())


def refusal(*args: Any, **options: Any) -> WeightsmithError:
    with pytest.raises(PlanError) as caught:
        weightsmith.extract_lora(*args, progress=False, fsync=False, **options)
    (problem,) = caught.value.problems
    return problem


def extract(*args: Any, **options: Any) -> weightsmith.Merged:
    return weightsmith.extract_lora(*args, progress=False, fsync=False, **options)


# ---- what comes out goes back in


@pytest.mark.long
@pytest.mark.parametrize("spread", [True, False])
def test_an_adapter_is_recovered_from_the_model_that_it_was_merged_into(spread: bool, tmp_path: Path) -> None:
    model, lora = base(tmp_path / "base", np.float32), adapter(tmp_path / "a", factors(Q, H, H) | factors(DOWN, H, INNER))
    extraction = extract(f"{model}+{lora}", model, tmp_path / "out", max_rank=4, out_dtype="float32", distribute_scale=spread)
    weights, want = (applied(model, adapter, tmp_path / f"{adapter.name} in") for adapter in (extraction.out, lora))
    for name, array in want.items():
        np.testing.assert_allclose(weights[name], array, atol=2e-5, err_msg=name)
    assert {name.removeprefix(P).partition(".lora_")[0] for name in tensors_of(extraction.out)} == {Q, DOWN}
    config = config_of(extraction.out)
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 4, str(model))
    report: Any = extraction.reports["extraction"]
    assert report.to_json()["kept"] == pytest.approx(1, abs=1e-5)
    assert {m["module"]: m["rank"] for m in report.to_json()["modules"] if m["rank"]} == {Q: 4, DOWN: 4}


@pytest.mark.long
def test_all_ranks_give_the_bytes_of_the_fine_tune(tmp_path: Path) -> None:
    weights = [n for n, a in base_tensors().items() if a.ndim == 2 and "layers" in n]
    changes = {n: 0.05 * normal(*base_tensors()[n].shape, seed=3) for n in weights}
    changes["model.norm.weight"] = normal(H, seed=4)
    changes["model.embed_tokens.weight"] = normal(TOKENS, H, seed=5)
    model, fine = base(tmp_path / "base"), tuned(tmp_path / "fine", changes)
    extraction = extract(fine, model, tmp_path / "out", out_dtype="float32")
    assert config_of(extraction.out)["modules_to_save"] == ["model.embed_tokens", "model.norm"]
    actual = applied(model, extraction.out, tmp_path / "merged", dtype="bfloat16")
    with weightsmith.open_checkpoint(fine) as checkpoint:
        for name in checkpoint.specs:
            assert actual[name].tobytes() == checkpoint.read(name).tobytes(), name


@pytest.mark.long
def test_ranks_that_differ_and_modules_that_do_not_are_in_the_config(tmp_path: Path) -> None:
    changes = {f"{Q}.weight": normal(H, 1) @ normal(1, H), f"{DOWN}.weight": normal(H, 3) @ normal(3, INNER)}
    other = Q.replace("layers.0", "layers.1")
    model, fine = base(tmp_path / "base"), tuned(tmp_path / "fine", changes, np.float32)
    extraction = extract(fine, model, tmp_path / "out", energy=0.999999)
    config = config_of(extraction.out)
    assert (config["r"], config["rank_pattern"], config["alpha_pattern"]) == (3, {f"^{Q}": 1}, {f"^{Q}": 1})
    assert config["target_modules"] == [Q, DOWN]  # the short names would match the same modules of the other layers
    assert f"{P}{other}.lora_A.weight" not in tensors_of(extraction.out)
    everything = {f"model.layers.{i}.self_attn.q_proj.weight": changes[f"{Q}.weight"] for i in (0, 1)}
    extraction = extract(tuned(tmp_path / "both", everything, np.float32), model, tmp_path / "out2", max_rank=2)
    assert config_of(extraction.out)["target_modules"] == ["q_proj"]
    applied(model, extraction.out, tmp_path / "merged")


@pytest.mark.slow
def test_a_matrix_is_released_with_its_factors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the next garbage collection finds it: a layer's matrices would be in memory at once."""
    alive: list[weakref.ref[Any]] = []
    counts: list[int] = []

    def decompose(delta: Any, *args: Any, **options: Any) -> Any:
        alive.append(weakref.ref(delta))
        counts.append(sum(reference() is not None for reference in alive))
        return original(delta, *args, **options)

    original = factors_module.decompose
    monkeypatch.setattr(factors_module, "decompose", decompose)
    model = base(tmp_path / "base")
    changes = {name: normal(*array.shape, seed=3) for name, array in base_tensors().items() if "proj" in name}
    gc.disable()
    try:
        extract(tuned(tmp_path / "fine", changes), model, tmp_path / "out", max_rank=2, threads=1)
    finally:
        gc.enable()
    assert (len(counts), max(counts)) == (14, 1)


@pytest.mark.matrix
@pytest.mark.slow
def test_bytes_do_not_depend_on_threads_or_memory(tmp_path: Path) -> None:
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    model, fine = (
        write_checkpoint(tmp_path / name, {n: normal(160, 176, seed=seed + i).astype(BF16) for i, n in enumerate(names)}, LLAMA)
        for name, seed in (("base", 0), ("fine", 9))
    )
    assert not any(m["exact"] for m in json.loads(first_plan(fine, model))["products"][0]["settings"]["targets"])
    first = extract(fine, model, tmp_path / "a", max_rank=6, threads=1).out
    second = extract(fine, model, tmp_path / "b", max_rank=6, threads=3, max_memory_bytes=300_000_000).out
    assert (first / "adapter_model.safetensors").read_bytes() == (second / "adapter_model.safetensors").read_bytes()
    assert config_of(first) == config_of(second)


@pytest.mark.long
def test_interrupted_work_is_resumed_and_what_was_decomposed_serves_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightsmith._features.adapters import factors as module

    changes = {n: 0.1 * normal(*a.shape) for n, a in base_tensors().items() if a.ndim == 2 and "layers" in n}
    model, fine = base(tmp_path / "base"), tuned(tmp_path / "fine", changes)
    counted: list[int] = []
    decompose = module.decompose

    def count(*args: Any, **options: Any) -> Any:
        counted.append(1)
        return decompose(*args, **options)

    monkeypatch.setattr(module, "decompose", count)

    def stop(progress: weightsmith.Progress) -> None:
        if progress.tensors >= 3:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        weightsmith.extract_lora(fine, model, out, max_rank=8, progress=stop, fsync=False, threads=1)
    assert len(counted) == 14
    extraction = extract(fine, model, out, max_rank=8)
    assert len(counted) == 14  # no matrix was decomposed again
    assert extraction.resumed >= 3
    fresh = extract(fine, model, tmp_path / "fresh", max_rank=8)
    assert tensors_of(out).keys() == tensors_of(fresh.out).keys()
    assert all(a.tobytes() == tensors_of(fresh.out)[n].tobytes() for n, a in tensors_of(out).items())
    assert not list(tmp_path.glob(".*staging"))


def small(folder: Path) -> tuple[Path, Path]:
    """A base, and a fine-tune in which the matrices of all layers differ."""
    changes = {n: 0.1 * normal(*a.shape) for n, a in base_tensors().items() if a.ndim == 2 and "layers" in n}
    return base(folder / "base"), tuned(folder / "fine", changes)


def die_in(monkeypatch: pytest.MonkeyPatch, kind: type, method: str, run: Callable[[str], object]) -> None:
    """Run something for the outputs `out` and `other`, which ends in a method as a killed process would."""

    def die(self: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(kind, method, die)
        for name in ("out", "other"):
            with pytest.raises(KeyboardInterrupt):
                run(name)


@pytest.mark.long
def test_the_measurement_of_an_output_that_was_published_is_removed_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process died between the two."""
    model, fine = small(tmp_path)
    leftovers = [tmp_path / f".{name}.measurement.weightsmith-staging" for name in ("out", "other")]
    die_in(monkeypatch, Staging, "discard", lambda name: extract(fine, model, tmp_path / name, max_rank=8))
    assert (tmp_path / "out" / "weightsmith.json").exists()
    shutil.rmtree(tmp_path / "other")  # a measurement without an output is kept
    extract(fine, model, tmp_path / "else", max_rank=8).out.rename(tmp_path / "other")
    (tmp_path / "other/weightsmith.json").write_bytes((tmp_path / "base/config.json").read_bytes())
    for name in ("out", "other"):
        with pytest.raises(OutputExists):
            extract(fine, model, tmp_path / name, max_rank=8)
    assert [folder.exists() for folder in leftovers] == [False, True]
    leftovers[0].mkdir()  # it died in between removing the journal and the folder
    with pytest.raises(OutputExists):
        extract(fine, model, tmp_path / "out", max_rank=8)
    assert not leftovers[0].exists()


@pytest.mark.long
def test_what_a_run_left_that_died_after_it_published_is_removed_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fine = small(tmp_path)
    die_in(monkeypatch, StagingArea, "remove_replaced", lambda name: extract(fine, model, tmp_path / name, max_rank=8))
    leftovers = [staging_folder(tmp_path / name) for name in ("out", "other")]
    assert [folder.exists() for folder in leftovers] == [True, True]
    shutil.copytree(tmp_path / "other", tmp_path / "copy")  # what is there now is not what was published
    shutil.rmtree(tmp_path / "other")
    (tmp_path / "copy").rename(tmp_path / "other")
    for name in ("out", "other"):
        with pytest.raises(OutputExists):
            extract(fine, model, tmp_path / name, max_rank=8)
    assert [folder.exists() for folder in leftovers] == [False, True]
    leftovers[0].mkdir()  # it died in between removing the journal and the folder
    with pytest.raises(OutputExists):
        extract(fine, model, tmp_path / "out", max_rank=8)
    assert not leftovers[0].exists()
    leftovers[0].mkdir()
    (leftovers[0] / "mine").write_text("no work of ours")
    with pytest.raises(OutputExists):
        extract(fine, model, tmp_path / "out", max_rank=8)
    assert (leftovers[0] / "mine").exists()


# ---- which modules


def chosen(tmp_path: Path, **options: Any) -> tuple[set[str], set[str]]:
    """Modules with factors, and tensors that are saved whole, for a fine-tune in which all tensors differ."""
    changes = {n: 0.1 * normal(*a.shape, seed=7) for n, a in base_tensors().items()}
    fine = tuned(tmp_path / "fine", changes)
    extraction = extract(fine, base(tmp_path / "base"), tmp_path / "out", max_rank=3, **options)
    names = [name.removeprefix(P) for name in tensors_of(extraction.out)]
    with_factors = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    whole = {name for name in names if ".lora_" not in name}
    assert {n.rpartition(".")[0] for n in whole} == set(config_of(extraction.out)["modules_to_save"] or ())
    return with_factors, whole


ALL = {n.removesuffix(".weight") for n, a in base_tensors().items() if a.ndim == 2 and "layers" in n}
ENDS = {"model.embed_tokens.weight", "lm_head.weight"}
NORMS = {n for n, a in base_tensors().items() if a.ndim == 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "with_factors", "whole"),
    [
        ({}, ALL, ENDS | NORMS),
        ({"skip_undecomposable": True}, ALL, set()),
        ({"skip_undecomposable": True, "save_modules": ("lm_head",)}, ALL, {"lm_head.weight"}),
        ({"include": (r"q_proj$", "up_proj")}, {m for m in ALL if m.endswith(("q_proj", "up_proj"))}, set()),
        ({"exclude": ("norm", "mlp", "embed", "lm_head")}, {m for m in ALL if "attn" in m}, set()),
        ({"embed_lora": True, "exclude": ("norm",)}, {*ALL, "model.embed_tokens", "lm_head"}, set()),
        ({"layout": "vllm"}, ALL, set()),
        ({"save_modules": ("0.mlp.up_proj",), "exclude": ("norm", "embed", "lm_head")}, None, None),
    ],
)
def test_which_modules_are_in_the_adapter(
    options: dict[str, Any], with_factors: set[str] | None, whole: set[str] | None, tmp_path: Path
) -> None:
    if with_factors is None or whole is None:
        with_factors, whole = ALL - {"model.layers.0.mlp.up_proj"}, {"model.layers.0.mlp.up_proj.weight"}
    assert chosen(tmp_path, **options) == (with_factors, whole)


@pytest.mark.long
def test_what_is_left_out_is_a_warning(tmp_path: Path) -> None:
    changes = {f"{Q}.weight": normal(H, H), "model.norm.weight": normal(H), "lm_head.weight": normal(TOKENS, H)}
    model, fine = base(tmp_path / "base"), tuned(tmp_path / "fine", changes)
    extraction = extract(fine, model, tmp_path / "out", layout="vllm")
    assert [str(w) for w in extraction.warnings] == [
        "lm_head.weight: 2 tensors differ and are not in the adapter: vLLM reads factors only"
    ]
    (unchecked,) = extract(fine, model, tmp_path / "whole").warnings
    assert unchecked.what == "whether PEFT finds all that the adapter has was not checked: transformers is not installed"


@pytest.mark.long
def test_a_tied_embedding_that_differs_is_saved_as_embedding_and_head(tmp_path: Path) -> None:
    tensors = {n: a.astype(BF16) for n, a in base_tensors(head=False).items()}
    model = base(tmp_path / "base", tie=True)
    tensors["model.embed_tokens.weight"] = normal(TOKENS, H, seed=1).astype(BF16)
    tensors[f"{Q}.weight"] = normal(H, H, seed=2).astype(BF16)
    fine = write_checkpoint(tmp_path / "fine", tensors, {**LLAMA, "num_hidden_layers": 2, "tie_word_embeddings": True})
    for embed_lora in (False, True):
        extraction = extract(fine, model, tmp_path / f"{embed_lora}", out_dtype="float32", embed_lora=embed_lora)
        weights = applied(model, extraction.out, tmp_path / f"{embed_lora} in", dtype="bfloat16")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert weights[name].tobytes() == tensors["model.embed_tokens.weight"].tobytes()
        assert any("lora_embedding_A" in name for name in tensors_of(extraction.out)) == embed_lora


@pytest.mark.long
def test_more_tokens_are_saved_whole_with_the_tokenizer(tmp_path: Path) -> None:
    tensors = {n: a.astype(BF16) for n, a in base_tensors().items()}
    for name in ENDS:
        tensors[name] = np.concatenate([tensors[name], normal(3, H).astype(BF16)])
    tensors[f"{Q}.weight"] = normal(H, H, seed=2).astype(BF16)
    config = {**LLAMA, "num_hidden_layers": 2, "vocab_size": TOKENS + 3}
    fine = write_checkpoint(tmp_path / "fine", tensors, config)
    (fine / "tokenizer.json").write_text("{}")
    model = base(tmp_path / "base")
    extraction = extract(fine, model, tmp_path / "out")
    assert (extraction.out / "tokenizer.json").exists()
    weights = applied(model, extraction.out, tmp_path / "in")
    assert weights["lm_head.weight"].tobytes() == tensors["lm_head.weight"].tobytes()
    assert json.loads((tmp_path / "in/config.json").read_text())["vocab_size"] == TOKENS + 3


@pytest.mark.parametrize("layout", ["peft", "vllm"])
def test_a_tokenizer_that_differs_from_the_base_s_goes_with_the_adapter(layout: str, tmp_path: Path) -> None:
    """A chat template is in no tensor: without it, the adapter of a chat model is of no use."""
    model, fine = base(tmp_path / "base"), base(tmp_path / "fine")
    tensors = {n: a.astype(BF16) for n, a in base_tensors().items()} | {f"{Q}.weight": normal(H, H, seed=2).astype(BF16)}
    write_checkpoint(fine, tensors, {**LLAMA, "num_hidden_layers": 2})
    for folder in (model, fine):
        (folder / "tokenizer.json").write_text("{}")
        (folder / "generation_config.json").write_text("{}")
    (model / "tokenizer_config.json").write_text("{}")
    same = extract(fine, model, tmp_path / "same", layout=layout)
    assert not (same.out / "tokenizer.json").exists()
    (fine / "chat_template.jinja").write_text("chat")
    extraction = extract(fine, model, tmp_path / "out", layout=layout)
    assert (extraction.out / "chat_template.jinja").read_text() == "chat"
    assert (extraction.out / "tokenizer.json").exists()
    assert not (extraction.out / "generation_config.json").exists()
    assert weightsmith.verify(extraction.out)


def test_a_base_in_the_hub_s_cache_is_called_by_its_name_on_the_hub(tmp_path: Path) -> None:
    """The path of a cache means nothing on another machine, and PEFT loads the base by this name."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--name/snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    model = base(snapshot)
    tensors = {n: a.astype(BF16) for n, a in base_tensors().items()} | {f"{Q}.weight": normal(H, H, seed=2).astype(BF16)}
    fine = write_checkpoint(tmp_path / "fine", tensors, {**LLAMA, "num_hidden_layers": 2})
    config = json.loads((extract(fine, model, tmp_path / "out").out / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/name", commit)


def test_weights_stored_transposed_are_known_by_their_biases(tmp_path: Path) -> None:
    shapes = {"attn.c_attn": (H, 3 * H), "attn.c_proj": (H, H), "mlp.c_fc": (H, INNER)}
    before: dict[str, np.ndarray] = {"wte.weight": normal(TOKENS, H)}
    for name, (rows, cols) in shapes.items():
        before |= {f"h.0.{name}.weight": normal(rows, cols), f"h.0.{name}.bias": normal(cols)}
    after = {
        n: a + (0.1 * normal(*a.shape, seed=5) if n.endswith("c_proj.weight") or "c_fc.weight" in n else 0)
        for n, a in before.items()
    }
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1}
    model, fine = (
        write_checkpoint(tmp_path / n, {k: a.astype(np.float32) for k, a in t.items()}, config)
        for n, t in (("base", before), ("fine", after))
    )
    extraction = extract(fine, model, tmp_path / "out")
    assert config_of(extraction.out)["fan_in_fan_out"] is True
    assert tensors_of(extraction.out)[f"{P}h.0.mlp.c_fc.lora_A.weight"].shape == (H, H)
    weights = applied(model, extraction.out, tmp_path / "in")
    for name, want in after.items():
        np.testing.assert_allclose(weights[name], want, atol=1e-5, err_msg=name)


# ---- PEFT


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "tied"])
def test_peft_loads_every_tensor_and_makes_the_fine_tune(kind: str, tmp_path: Path) -> None:
    torch, peft, transformers = (pytest.importorskip(n) for n in ("torch", "peft", "transformers"))
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    if kind == "gpt2":
        settings = transformers.GPT2Config(vocab_size=TOKENS, n_embd=H, n_layer=2, n_head=2, n_positions=32)
        model = transformers.GPT2LMHeadModel(settings)
    else:
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
        settings = transformers.LlamaConfig(
            vocab_size=TOKENS, hidden_size=H, intermediate_size=INNER, tie_word_embeddings=kind == "tied", **heads
        )
        model = transformers.LlamaForCausalLM(settings)
    model.save_pretrained(tmp_path / "base")
    model.eval()
    for name, parameter in model.named_parameters():
        if "bias" not in name and "ln_" not in name and "wpe" not in name and not (kind == "gpt2" and "wte" in name):
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "fine")
    options = {"embed_lora": True, "save_modules": ("norm",)} if kind == "llama" else {}
    extraction = extract(tmp_path / "fine", tmp_path / "base", tmp_path / "out", max_rank=INNER, energy=0.9999999, **options)
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    wrapped = peft.get_peft_model(fresh, peft.PeftConfig.from_pretrained(extraction.out))
    adapter_names = {name for name in wrapped.state_dict() if "lora_" in name or "modules_to_save" in name}
    loading = peft.set_peft_model_state_dict(wrapped, {n: torch.from_numpy(a) for n, a in tensors_of(extraction.out).items()})
    assert loading.unexpected_keys == []
    assert not adapter_names & set(loading.missing_keys)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(wrapped(tokens).logits, model(tokens).logits, atol=2e-4, rtol=2e-3)
    wrapped.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    assert {n: as_bytes(a) for n, a in tensors_of(tmp_path / "again").items()} == {
        n: as_bytes(a.astype(np.float32)) for n, a in tensors_of(extraction.out).items()
    }


# ---- what is refused


def test_an_adapter_of_a_whole_pipeline_is_refused(tmp_path: Path) -> None:
    a, b = pipelines.pair(tmp_path)
    for fine, model in ((b, a), (f"{b}/unet", a)):
        problem = refusal(fine, model, tmp_path / "out", max_rank=2)
        assert "a pipeline of several models, and an adapter is of one: " in str(problem)
        assert f"Name the folder of one part in both models, such as {a}/unet" in str(problem)
    assert not (tmp_path / "out").exists()


def test_a_wrong_base_is_one_error(tmp_path: Path) -> None:
    model = base(tmp_path / "base")
    other = {n: a.astype(BF16) for n, a in base_tensors(3).items()}
    other[f"{DOWN}.weight"] = normal(H, INNER + 1).astype(BF16)
    del other[f"{Q}.weight"]
    fine = write_checkpoint(tmp_path / "fine", other, {**LLAMA, "architectures": ["X"], "num_hidden_layers": 3})
    problem = refusal(fine, model, tmp_path / "out")
    text = str(problem)
    assert problem.code == "shape"
    assert f"it is not a fine-tune of {model}: 11 tensors do not match" in text
    assert f"{Q}.weight: the fine-tune has no such tensor" in text
    assert f"{DOWN}.weight: [24, 40] in the base, and [24, 41] in the fine-tune" in text
    assert "model.layers.2." in text
    assert "['X']" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_models_that_are_equal_or_differ_where_no_factors_are_give_no_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = base(tmp_path / "base")
    shutil.copytree(model, tmp_path / "copy")
    with monkeypatch.context() as patched:
        for name in ("thin_svd", "_krylov"):  # an equal matrix is found equal before it would be decomposed
            patched.setattr(f"weightsmith._features.adapters.factors.{name}", None)
        assert f"copy: nothing differs from {model}" in str(refusal(tmp_path / "copy", model, tmp_path / "out"))
        (tmp_path / "link").symlink_to(model)
        for same in (model, tmp_path / "link", f"{tmp_path}/copy/../base/"):
            with pytest.raises(PlanError, match=r"FINETUNED: \S*: this is BASE itself, and nothing differs from it"):
                prepare_extraction(same, model, ExtractSettings())
    (tmp_path / "link").unlink()
    shutil.rmtree(tmp_path / "copy")
    fine = tuned(tmp_path / "fine", {"model.norm.weight": normal(H)})
    assert "only 1 tensors that cannot become factors differ" in str(refusal(fine, model, tmp_path / "out"))
    fine = tuned(tmp_path / "fine2", {f"{Q}.weight": 1e-2 * normal(H, H)})
    assert "no rank is left" in str(refusal(fine, model, tmp_path / "out", sv_epsilon=100.0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "fine", "fine2"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_rank": 0}, "--max-rank (max_rank): must be at least 1, not 0"),
        ({"energy": 1.5}, "--energy (energy): must be at most 1, not 1.5"),
        (
            {"energy": 0.5, "max_parameters": 9},
            "--max-parameters (max_parameters): --energy (energy) chooses the ranks already",
        ),
        ({"sv_epsilon": float("nan")}, "--sv-epsilon (sv_epsilon): must be a number, not nan"),
        ({"layout": "gguf"}, "--for (layout): must be one of peft, vllm, not 'gguf'"),
        ({"intruder_scale": 1.5}, "--intruder-scale (intruder_scale): must be at most 1, not 1.5"),
        ({"layout": "vllm", "max_rank": 1024}, "vLLM loads ranks up to 512"),
        ({"layout": "vllm", "embed_lora": True}, "vLLM loads factors of linear layers only"),
        ({"include": ("(",)}, "is not a regular expression"),
        ({"include": ("qproj",)}, "'qproj' matches no module"),
        ({"exclude": ("layers",)}, "no weight of a linear layer is left to decompose"),
        ({"save_modules": ("lm_haed",)}, "did you mean 'lm_head'"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = base(tmp_path / "base")
    assert words.lower() in str(refusal(model, model, tmp_path / "out", **options)).lower()


@pytest.mark.long
def test_a_budget_that_is_too_small_names_the_least(tmp_path: Path) -> None:
    model, fine = base(tmp_path / "base"), tuned(tmp_path / "fine", {f"{Q}.weight": normal(H, H)})
    assert "must be at least 48, which the smallest factors take, not 40" in str(
        refusal(fine, model, tmp_path / "out", max_parameters=40)
    )
    extraction = extract(fine, model, tmp_path / "out", max_parameters=100)
    assert config_of(extraction.out)["r"] == 2


def test_adapters_as_inputs(tmp_path: Path) -> None:
    model, lora = base(tmp_path / "base"), adapter(tmp_path / "a")
    problem = refusal(model, f"{model}+{lora}", tmp_path / "out")
    assert "the base of an adapter is one model, not a model and an adapter" in str(problem)
    assert "adapter" in str(refusal(lora, model, tmp_path / "out"))
    with pytest.raises(TypeError, match=r"extract_lora\(\) has no option 'max_ranks' \(did you mean 'max_rank'"):
        extract(model, model, tmp_path / "out", max_ranks=3)


def test_infinities_name_the_model(tmp_path: Path) -> None:
    model, fine = base(tmp_path / "base"), tuned(tmp_path / "fine", {f"{Q}.weight": np.full((H, H), np.inf)})
    with pytest.raises(weightsmith.NonFinite, match="inf"):
        extract(fine, model, tmp_path / "out")


# ---- plans and the command line


@pytest.mark.slow
def test_a_plan_runs_from_its_json_and_is_checked(tmp_path: Path, cli: Cli) -> None:
    model, fine = base(tmp_path / "base"), tuned(tmp_path / "fine", {f"{Q}.weight": normal(H, H)})
    ran = cli("extract-lora", fine, model, "--plan", "--json", "--max-rank", 3)
    assert ran.code == 0, ran.err
    (tmp_path / "plan.json").write_text(ran.out)
    weightsmith.run(tmp_path / "plan.json", tmp_path / "a", progress=False, fsync=False)
    direct = extract(fine, model, tmp_path / "b", max_rank=3)
    assert tensors_of(tmp_path / "a").keys() == tensors_of(direct.out).keys()
    data = json.loads(ran.out)
    for change, words in [
        ({"then": {"kind": "lora", "settings": {"out_dtype": "bfloat16"}}}, "not a plan that can be run"),
        ({"then": {"kind": "loar", "settings": {}}}, "there is no kind of plan in two runs 'loar'"),
        ({"then": data["then"] | {"settings": data["then"]["settings"] | {"out_dtype": "int8"}}}, "not a plan that can be run"),
    ]:
        with pytest.raises(WeightsmithError, match=words):
            weightsmith.run(plan_from_json({**data, **change}), tmp_path / "c", progress=False, fsync=False)
    with prepare_extraction(fine, model, ExtractSettings()) as prepared:
        product = prepared.plan.products[0]
        work = FactorWork.of(product)
        wide = tuple(replace(target, rank=H + 1) for target in work.targets)
        assert KIND.check(product) == ""
        assert KIND.check(replace(work, targets=wide).product("x", product.steps)) == "rank 25 of matrices [[24, 40]]"
    for key, value in [("rank", 10**6), ("form", "conv"), ("module", "x"), ("experts", 2), ("experts", 10**12)]:
        broken = json.loads(ran.out)
        broken["products"][0]["settings"]["targets"][0][key] = value
        with pytest.raises(PlanError) as caught:
            weightsmith.run(plan_from_json(broken), tmp_path / "c", progress=False, fsync=False)
        assert isinstance(caught.value.problems[0], FormatError)
    for scale in (-1.0, 1.5, 1e300):
        broken = json.loads(ran.out)
        broken["products"][0]["settings"]["intruders"] = scale
        with pytest.raises(PlanError, match=r"its intruder dimensions are scaled by .*, not by 0 to 1"):
            weightsmith.run(plan_from_json(broken), tmp_path / "c", progress=False, fsync=False)


@pytest.mark.long
def test_the_command(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    base(tmp_path / "base")
    (tmp_path / "base/README.md").write_text("---\nlicense: mit\nbase_model: org/first\n---\n")
    tuned(tmp_path / "fine", {f"{Q}.weight": normal(H, H), f"{DOWN}.weight": normal(H, 2) @ normal(2, INNER)}, np.float32)
    monkeypatch.chdir(tmp_path)
    ran = cli("extract-lora", "fine", "base", "--plan", "--max-rank", 5)
    assert ran.code == 0
    assert "model.layers.0.self_attn.q_proj  24 x 24" in ran.out
    assert not Path("out").exists()
    ran = cli(
        "extract-lora",
        "fine",
        "base",
        "out",
        "--max-rank",
        5,
        "--energy",
        "0.9",
        "-e",
        "norm",
        "--out-dtype",
        "bfloat16",
        "--report",
        "out/report.html",
    )
    assert ran.code == 0, ran.err
    assert "self_attn.q_proj" in ran.out
    lines = ran.out.splitlines()
    assert lines[0].split() == ["module", "count", "rank", "kept", "possible", "signal", "noise", "least,", "in"]
    assert max(map(len, lines[: lines.index("")])) <= 80
    assert "/out: " in lines[lines.index("") + 1]  # the result is last
    report = json.loads(Path("out/extraction.json").read_text())
    assert report["parameters"] == sum(a.size for a in tensors_of(Path("out")).values())
    assert Path("out/extraction.svg").read_text().startswith("<svg")
    page = Path("out/report.html").read_text()
    content = re.search(r'<script type="application/json" id="content">(.*?)</script>', page)
    assert content
    charts = json.loads(content[1])["charts"]
    cells = {
        (chart["prefix"] + column, row): value
        for chart in charts
        for row, values in zip(chart["rows"], chart["values"], strict=True)
        for column, value in zip(chart["columns"], values, strict=True)
    }
    matrices = [m for m in report["modules"] if ".layers." in m["module"]]
    assert matrices
    for matrix in matrices:  # a cell each
        stack, _, rest = matrix["module"].partition(".layers.")
        layer, _, part = rest.partition(".")
        kept = matrix["signal_kept"]  # None: nothing differs
        assert cells[f"{stack}.layers.{layer}", part] == ("unchanged" if kept is None else pytest.approx(kept, abs=1e-5))
    assert all(array.dtype == ml_dtypes.bfloat16 for array in tensors_of(Path("out")).values())
    card = Path("out/README.md").read_text()
    for line in ("library_name: peft", "- lora", "base_model_relation: adapter", "What the adapter keeps", "PeftModel"):
        assert line in card
    assert not Path("out/recipe.yml").exists()
    assert cli("verify", "out").code == 0
    assert cli("extract-lora", "fine", "base").code == 2
    assert cli("extract-lora", "fine", "fine", "out2").code == 1
