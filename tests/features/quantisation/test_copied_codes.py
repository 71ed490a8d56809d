"""Weights that an input stores as the output does: their codes are copied, not decoded and encoded again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.calibration_help import TEXT, save_model
from tests.cli_help import Cli
from tests.features.quantisation.test_mlx_experts import model as mixture
from tests.files.remote.servers import model as llama
from tests.files.remote.servers import serve, write
from tests.mini import write_checkpoint
from tests.models.formats.compressed_tensors.test_reading import write_model, write_transformer
from tests.models.formats.test_transposed import random_model
from weightsmith._base.errors import PlanError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats import find_encoding
from weightsmith._models.formats.verbatim import copied as copy_of
from weightsmith._planning.planner.reopen import reopen
from weightsmith._plans import COPY, JOIN, PRODUCTS, Block, Plan, Read, Step, plan_from_json
from weightsmith.abc.tensors import StoredAs, StoredPart

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]

ROUNDED = ("w4a16", "w8a16", "gptq-4bit", "gptq-8bit", "awq-4bit", "int8", "mlx-4bit", "mlx-8bit")
"""Formats in which a second rounding changes weights."""
FORMATS = (*ROUNDED, "fp8-dynamic", "fp8-block", "mxfp4", "mxfp8")
QUIET: dict[str, Any] = {"progress": False, "fsync": False}


def stored(folder: Path | str) -> Stored:
    """The tensors of a folder as they are stored: dtype, shape and bytes."""
    with weightsmith.open_checkpoint(folder, raw=True) as model:
        return {name: (spec.dtype.name, spec.shape, model.read(name).tobytes()) for name, spec in model.specs.items()}


def values(folder: Path | str) -> dict[str, np.ndarray]:
    with weightsmith.open_checkpoint(folder) as model:
        return {name: model.read(name) for name in model.specs}


def of_layer(tensors: Mapping[str, Any], number: int) -> dict[str, Any]:
    prefix = f"model.layers.{number}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def stack(*layers: tuple[str, int, int]) -> dict[str, Any]:
    slices = [{"sources": [{"model": model, "layer_range": [first, end]}]} for model, first, end in layers]
    return {"slices": slices, "merge_method": "passthrough"}


def config(folder: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(Path(folder, "config.json").read_text())
    return read


def rewritten(folder: str, out: str, change: Callable[[dict[str, np.ndarray], dict[str, Any]], object]) -> str:
    """The stored tensors and config.json of a folder, changed, in another one."""
    with weightsmith.open_checkpoint(folder, raw=True) as model:
        tensors = {name: model.read(name) for name in model.specs}
    described = config(folder)
    change(tensors, described)
    write_checkpoint(Path(out), tensors, described)
    return out


def encoded(plan: Plan) -> list[str]:
    return [step.out.name for step in plan.steps if step.encoding != "plain" and not step.verbatim]


def copied(plan: Plan) -> list[str]:
    return [step.out.name for step in plan.steps if step.verbatim]


def quantised_already(result: Any) -> list[str]:
    return [str(warning) for warning in result.warnings if "quantised already" in str(warning)]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models `a` and `b` in the current folder: two layers, each with a router."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        random_model(tmp_path / name, seed)
    return tmp_path


def quantise(name: str, *sources: str, **options: Any) -> list[str]:
    """The models in a format, in folders of the current one."""
    for source in sources:
        weightsmith.quantize(source, f"{source}-{name}", name, **QUIET, **options)
    return [f"{source}-{name}" for source in sources]


@pytest.mark.parametrize("name", FORMATS)
def test_layers_of_a_stack_keep_their_codes(name: str, models: Path) -> None:
    a, b = quantise(name, "a", "b")
    recipe = stack((a, 0, 2), (b, 1, 2), (a, 1, 2))
    result = weightsmith.merge(recipe, "out", quantize=name, **QUIET)
    assert not encoded(result.plan)
    assert not quantised_already(result)
    out, taken = stored("out"), [(a, 0), (a, 1), (b, 1), (a, 1)]
    assert [of_layer(out, i) for i in range(4)] == [of_layer(stored(folder), layer) for folder, layer in taken]
    decoded = values("out")
    for i, (folder, layer) in enumerate(taken):
        for tensor, array in of_layer(values(folder), layer).items():
            np.testing.assert_array_equal(decoded[f"model.layers.{i}.{tensor}"], array)
    weightsmith.merge(stack(("a", 0, 2), ("b", 1, 2), ("a", 1, 2)), "plain", quantize=name, **QUIET)
    assert config("out") == config("plain")
    assert stored("out").keys() == stored("plain").keys()
    assert json.loads(Path("out/weightsmith.json").read_text())["inputs"] != []
    assert len(result.plan.refs) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_a_copy_is_the_file_that_it_is_made_from(name: str, models: Path) -> None:
    (a,) = quantise(name, "a")
    result = weightsmith.quantize(a, "out", name, **QUIET)
    assert Path("out/model.safetensors").read_bytes() == Path(a, "model.safetensors").read_bytes()
    assert config("out") == config(a)
    assert result.plan.encodings == (find_encoding(name).name,)
    assert len(json.loads(Path("out/weightsmith.json").read_text())["inputs"]) == 1


@pytest.mark.parametrize("name", ROUNDED)
def test_only_what_is_not_stored_so_is_encoded(name: str, models: Path) -> None:
    """A model in the format, one in another, one in groups of another size, and a plain one."""
    other = "fp8-dynamic"
    (a,), (b,) = quantise(name, "a"), quantise(other, "b")
    result = weightsmith.merge(stack((a, 0, 2), (b, 0, 1), ("b", 0, 1)), "out", quantize=name, **QUIET)
    out = stored("out")
    assert [of_layer(out, i) for i in (0, 1)] == [of_layer(stored(a), i) for i in (0, 1)]
    assert {int(tensor.split(".")[2]) for tensor in encoded(result.plan)} == {2, 3}
    weightsmith.merge(stack(("a", 0, 2), (b, 0, 1), ("b", 0, 1)), "again", quantize=name, **QUIET)
    assert [of_layer(out, i) for i in (2, 3)] == [of_layer(stored("again"), i) for i in (2, 3)]
    [warning] = quantised_already(result)
    assert warning.startswith(f"{b}: it is quantised already")


def test_groups_of_another_size_are_decoded_and_the_warning_says_how_to_keep_them(models: Path) -> None:
    (a,) = quantise("w4a16", "a", group_size=32)
    result = weightsmith.quantize(a, "out", "w4a16", **QUIET)
    assert not copied(result.plan)
    [warning] = quantised_already(result)
    assert "its weights are dequantised, then stored as w4a16" in warning
    assert "Add --group-size 32 (group_size=32) to copy its codes" in warning
    again = weightsmith.quantize(a, "again", "w4a16", group_size=32, **QUIET)
    assert not encoded(again.plan)
    assert stored("again") == stored(a)


def test_weights_that_are_merged_could_not_be_copied(models: Path) -> None:
    a, b = quantise("w4a16", "a", "b", group_size=32)
    recipe = {"models": [{"model": a}, {"model": b}], "merge_method": "linear", "parameters": {"weight": 0.5}}
    for group_size in (None, 32):
        plan = weightsmith.plan(recipe, quantize="w4a16", group_size=group_size)
        warnings = [str(warning) for warning in plan.warnings if "quantised already" in str(warning)]
        assert len(warnings) == 2
        assert not [warning for warning in warnings if "--group-size" in warning]


def test_groups_that_do_not_divide_a_row_are_decoded(models: Path) -> None:
    """As many as there are of 64, but the last is smaller."""
    (a,) = quantise("w4a16", "a", group_size=64)

    def regrouped(_tensors: dict[str, np.ndarray], described: dict[str, Any]) -> None:
        described["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 96

    other = rewritten(a, "other", regrouped)
    assert not copied(weightsmith.quantize(other, "out", "w4a16", group_size=64, **QUIET).plan)


def test_the_warning_counts_what_is_decoded(models: Path) -> None:
    (a,) = quantise("w4a16", "a")
    result = weightsmith.quantize(a, "out", "w4a16", tensor_types=["q_proj=w8a16"], **QUIET)
    assert len(encoded(result.plan)) == 2
    [warning] = quantised_already(result)
    assert "2 of its weights are dequantised, then stored as w4a16" in warning


def test_weights_of_a_mixed_model_are_copied_in_their_own_encodings(models: Path) -> None:
    types = ["q_proj=w8a16", r"layers\.1\.mlp\.(gate|up)_proj=fp8-dynamic"]
    (a,) = quantise("w4a16", "a", tensor_types=types)
    result = weightsmith.quantize(a, "out", "w4a16", tensor_types=types, **QUIET)
    assert not encoded(result.plan)
    assert stored("out") == stored(a)
    assert config("out") == config(a)


def test_rows_with_one_scale_are_copied(models: Path) -> None:
    write_model(models / "c", width=144)  # no size of groups divides it
    (c,) = quantise("w4a16", "c")
    result = weightsmith.quantize(c, "out", "w4a16", **QUIET)
    assert result.plan.encodings == ("w4a16-channel",)
    assert not encoded(result.plan)
    assert stored("out") == stored(c)


@pytest.mark.parametrize(("name", "end"), [("w4a16", "_scale"), ("gptq-4bit", ".scales"), ("awq-4bit", ".scales")])
def test_scales_keep_the_dtype_of_the_file(name: str, end: str, models: Path) -> None:
    """vLLM and transformers cast them to the dtype of the model."""
    (a,) = quantise(name, "a")
    dtype = DTYPES["F16" if name == "w4a16" else "BF16"]

    def cast(tensors: dict[str, np.ndarray], _described: dict[str, Any]) -> None:
        tensors |= {tensor: array.astype(dtype.numpy) for tensor, array in tensors.items() if tensor.endswith(end)}

    other = rewritten(a, "other", cast)
    result = weightsmith.merge(stack((a, 0, 1), (other, 1, 2)), "out", quantize=name, **QUIET)
    assert not encoded(result.plan)
    out = stored("out")
    assert [of_layer(out, i) for i in (0, 1)] == [of_layer(stored(folder), i) for i, folder in enumerate((a, other))]
    assert {kind for tensor, (kind, _, _) in out.items() if tensor.endswith(end)} == {"F16", "BF16"}
    with reopen(plan_from_json(json.loads(json.dumps(result.plan.to_json())))):
        pass


def entry(key: str, value: object) -> Callable[[dict[str, np.ndarray], dict[str, Any]], object]:
    return lambda _tensors, described: described["quantization_config"].__setitem__(key, value)


def without(end: str) -> Callable[[dict[str, np.ndarray], dict[str, Any]], object]:
    return lambda tensors, _described: [tensors.pop(name) for name in [*tensors] if name.endswith(end)]


def with_zeros(tensors: dict[str, np.ndarray], described: dict[str, Any]) -> None:
    described["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    for name in [name for name in tensors if name.endswith("_scale")]:
        rows, groups = tensors[name].shape
        tensors[name.replace("_scale", "_zero_point")] = np.full((rows // 8, groups), 0x77777777, np.int32)


def with_order(tensors: dict[str, np.ndarray], _described: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.endswith("_scale")]:
        tensors[name.replace("_scale", "_g_idx")] = np.zeros(128, np.int32)


def wide_scales(tensors: dict[str, np.ndarray], _described: dict[str, Any]) -> None:
    tensors |= {name: array.astype(np.float32) for name, array in tensors.items() if name.endswith(("_scale", ".scales"))}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gptq-4bit", entry("desc_act", True)),
        ("gptq-4bit", entry("sym", False)),
        ("gptq-4bit", entry("checkpoint_format", "gptq_v2")),
        ("gptq-4bit", entry("dynamic", {"+:.*q_proj": {"sym": False}})),
        ("gptq-4bit", entry("dynamic", {"+:.*q_proj": {"desc_act": True}})),
        ("gptq-4bit", without(".g_idx")),
        ("gptq-4bit", wide_scales),
        ("awq-4bit", entry("zero_point", False)),
        ("awq-4bit", wide_scales),
        ("w4a16", with_zeros),
        ("w4a16", with_order),
        ("w4a16", wide_scales),
    ],
)
def test_codes_that_config_json_cannot_describe_are_decoded(name: str, change: Any, models: Path) -> None:
    (a,) = quantise(name, "a")
    result = weightsmith.quantize(rewritten(a, "other", change), "out", name, **QUIET)
    assert not copied(result.plan)
    assert quantised_already(result)
    assert stored("out").keys() == stored(a).keys()


def test_autoround_in_the_same_layout_is_copied(models: Path) -> None:
    (a,) = quantise("gptq-4bit", "a")

    def of_autoround(_tensors: dict[str, np.ndarray], described: dict[str, Any]) -> None:
        entry = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"}
        described["quantization_config"] = {**entry, "bits": 4, "group_size": 128, "sym": True}

    result = weightsmith.quantize(rewritten(a, "other", of_autoround), "out", "gptq-4bit", **QUIET)
    assert not encoded(result.plan)
    assert stored("out") == stored(a)
    assert config("out") == config(a)


@pytest.mark.parametrize("name", ["w4a16", "gptq-4bit"])
def test_a_plan_of_copies_runs_later_and_in_parts_on_any_number_of_threads(name: str, models: Path) -> None:
    a, b = quantise(name, "a", "b")
    recipe = stack((a, 0, 2), ("b", 1, 2), (b, 0, 2))
    options: dict[str, Any] = {"quantize": name, "max_shard_bytes": 200_000}
    weightsmith.merge(recipe, "out", threads=1, **options, **QUIET)
    plan = plan_from_json(json.loads(json.dumps(weightsmith.plan(recipe, **options).to_json())))
    weightsmith.run(plan, "later", threads=3, max_memory_bytes=400 << 20, **QUIET)
    for number in (1, 2):
        weightsmith.run(plan, "parts", part=(number, 2), **QUIET)
    weightsmith.run(plan, "parts", **QUIET)
    files = [path.name for path in Path("out").glob("*.safetensors")]
    assert len(files) > 1
    for other in ("later", "parts"):
        assert [Path(other, file).read_bytes() for file in files] == [Path("out", file).read_bytes() for file in files]


def test_an_input_in_several_files_is_copied(models: Path) -> None:
    quantise("w4a16", "a", max_shard_bytes=100_000)
    assert len([*Path("a-w4a16").glob("*.safetensors")]) > 1
    result = weightsmith.quantize("a-w4a16", "out", "w4a16", **QUIET)
    assert not encoded(result.plan)
    assert stored("out") == stored("a-w4a16")


def test_another_file_in_the_place_of_the_planned_one_is_noticed(models: Path) -> None:
    a, b = quantise("w4a16", "a", "b")
    plan = weightsmith.plan(stack((a, 0, 2)), quantize="w4a16")
    Path(a).rename("gone")
    Path(b).rename(a)
    with pytest.raises(weightsmith.WeightsmithError, match="have changed"):
        weightsmith.run(plan, "out", **QUIET)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"encoding": "w8a16"}, "w8a16 does not store it as the plan says"),
        ({"encoding": "w4a16-g64"}, "w4a16-g64 does not store it as the plan says"),
        ({"dtype": "I32"}, "cannot be stored as w4a16"),
    ],
)
def test_a_forged_plan_of_copies_is_refused(change: dict[str, Any], words: str, models: Path) -> None:
    (a,) = quantise("w4a16", "a")
    plan = weightsmith.plan(stack((a, 0, 2)), quantize="w4a16").to_json()
    step = next(step for step in plan["steps"] if step.get("encoding") == "w4a16")
    step |= change
    with pytest.raises(weightsmith.WeightsmithError, match=words), reopen(plan_from_json(plan)):
        pass


def test_results_of_other_recipes_are_copies_of_their_inputs(models: Path) -> None:
    a, b = quantise("w4a16", "a", "b")
    recipe = f"""
name: st
slices:
- sources: [{{model: {a}, layer_range: [0, 2]}}]
- sources: [{{model: {b}, layer_range: [1, 2]}}]
merge_method: passthrough
---
slices:
- sources: [{{model: st, layer_range: [1, 3]}}]
- sources: [{{model: {a}, layer_range: [0, 1]}}]
merge_method: passthrough
"""
    result = weightsmith.merge(recipe, "out", quantize="w4a16", **QUIET)
    assert not encoded(result.plan)
    out, taken = stored("out"), [(a, 1), (b, 1), (a, 0)]
    assert [of_layer(out, i) for i in range(3)] == [of_layer(stored(folder), layer) for folder, layer in taken]
    weightsmith.run(weightsmith.plan(recipe, quantize="w4a16"), "again", **QUIET)
    assert stored("again") == out


def test_an_adapter_leaves_what_it_does_not_change(models: Path) -> None:
    (a,) = quantise("gptq-4bit", "a")
    rng = np.random.default_rng(0)
    prefix, shapes = "base_model.model.model.layers.1.self_attn.q_proj.lora_", {"A": (2, 128), "B": (192, 2)}
    factors = {f"{prefix}{part}.weight": rng.standard_normal(shape).astype(np.float32) for part, shape in shapes.items()}
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    write_checkpoint(models / "lora", factors, {})
    (models / "lora/model.safetensors").rename(models / "lora/adapter_model.safetensors")
    (models / "lora/config.json").unlink()
    (models / "lora/adapter_config.json").write_text(json.dumps(settings))
    result = weightsmith.quantize(f"{a}+lora", "out", "gptq-4bit", **QUIET)
    before, out = stored(a), stored("out")
    assert encoded(result.plan) == ["model.layers.1.self_attn.q_proj.weight"]
    changed = {name for name in out if out[name] != before[name]}
    assert changed == {f"model.layers.1.self_attn.q_proj.{part}" for part in ("qweight", "scales")}
    assert "1 of its weights are dequantised" in quantised_already(result)[0]
    plan = plan_from_json(json.loads(json.dumps(result.plan.to_json())))
    weightsmith.run(plan, "again", **QUIET)
    assert stored("again") == out


def test_what_a_merge_takes_from_its_base_is_copied_and_does_not_count_as_distance(models: Path) -> None:
    (a,) = quantise("w4a16", "a")
    slices = [{"sources": [{"model": a, "layer_range": [0, 1]}]}]
    slices.append({"sources": [{"model": name, "layer_range": [1, 2]} for name in (a, "b")]})
    recipe = {"slices": slices, "base_model": a, "merge_method": "task_arithmetic", "parameters": {"weight": 1.0}}
    result = weightsmith.merge(recipe, "out", quantize="w4a16", **QUIET)
    assert {int(tensor.split(".")[2]) for tensor in copied(result.plan)} == {0}
    assert of_layer(stored("out"), 0) == of_layer(stored(a), 0)
    assert "Weights whose codes are copied from an input do not count" in Path("out/README.md").read_text()
    assert len(quantised_already(result)) == 1


def test_what_is_said_of_copies(models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (a,) = quantise("w4a16", "a")
    Path("r.yml").write_text(json.dumps(stack((a, 0, 2), ("b", 0, 1))))
    plan = weightsmith.plan("r.yml", quantize="w4a16")
    summary = plan.summary()
    encoded_as = [(facts.encoding, facts.tensors, facts.why) for facts in summary.stored if facts.encoding != "plain"]
    assert encoded_as == [("w4a16", 6, "copied: an input has it stored so"), ("w4a16", 3, "")]
    assert summary.tensors == len(plan.steps)
    run = Cli(monkeypatch, capsys)
    shown = run("plan", "r.yml", "--quantize", "w4a16", "--explain", "model.layers.1.mlp.up_proj.weight")
    assert shown.out.startswith("model.layers.1.mlp.up_proj.weight [1024, 128] BF16, made by copy")
    for line in ("copied: an input has it stored so", "stored as w4a16: model.layers.1.mlp.up_proj.weight_packed I32"):
        assert line in shown.out
    assert "merged as a tensor of its own" not in shown.out


def test_a_program_that_cannot_run_copies_refuses_them(models: Path) -> None:
    (a,) = quantise("mxfp4", "a")
    with pytest.raises(PlanError, match="SGLang"):
        weightsmith.quantize(a, "out", "mxfp4", engine="sglang", **QUIET)


def test_an_interrupted_run_of_copies_is_resumed(models: Path) -> None:
    a, b = quantise("gptq-4bit", "a", "b")
    recipe = stack((a, 0, 2), ("a", 0, 1), (b, 0, 2))
    weightsmith.merge(recipe, "whole", quantize="gptq-4bit", **QUIET)

    def stop(now: weightsmith.Progress) -> None:
        if now.tensors >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge(recipe, "out", quantize="gptq-4bit", fsync=False, threads=1, progress=stop)
    assert weightsmith.merge(recipe, "out", quantize="gptq-4bit", **QUIET).resumed
    assert Path("out/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


def test_only_codes_are_fetched_of_a_model_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "m", llama(0))
    (m,) = quantise("w4a16", "m")
    files = {f"{m}/{path.name}": path.read_bytes() for path in Path(m).iterdir()}
    whole = weightsmith.merge(stack((m, 1, 4)), "here", quantize="w4a16", **QUIET)
    with serve(files) as site:
        done = weightsmith.merge(stack((f"{site.url}/{m}", 1, 4)), "out", quantize="w4a16", stream=True, **QUIET)
    assert not encoded(done.plan)
    assert Path("out/model.safetensors").read_bytes() == Path("here/model.safetensors").read_bytes()
    assert done.fetched_bytes == sum(len(data) for _, _, data in stored("here").values()) == whole.plan.nbytes


def test_experts_of_a_mixture_are_copied_from_dense_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        write(tmp_path / name, llama(seed))
    a, b = quantise("w4a16", "a", "b")
    recipe: dict[str, Any] = {"base_model": a, "gate_mode": "random", "architecture": "mixtral"}
    recipe |= {"experts": [{"source_model": name, "positive_prompts": ["x"]} for name in (a, b)]}
    result = weightsmith.moe(recipe, "out", quantize="w4a16", **QUIET)
    assert not encoded(result.plan)
    out = stored("out")
    for number, folder in enumerate((a, b)):
        for ours, part in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            for end in ("packed", "scale", "shape"):
                expert = f"model.layers.1.block_sparse_moe.experts.{number}.{ours}.weight_{end}"
                assert out[expert] == stored(folder)[f"model.layers.1.mlp.{part}.weight_{end}"]


OF_TEXT: dict[str, Any] = {"calibration": "text.txt", "calibration_rows": 2, "calibration_tokens": 32}
CALIBRATED = ("w4a16", "gptq-4bit", "awq-4bit")


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models `m` and `n` in the current folder, which a text can run through, and a text."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("mn"):
        save_model(tmp_path / name, seed=seed)
    (tmp_path / "text.txt").write_text(TEXT * 4)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("name", CALIBRATED)
def test_a_calibrated_run_copies_codes_and_calibrates_the_rest(name: str, texts: Path) -> None:
    """The text runs through the copied weights as they are decoded."""
    (m,) = quantise(name, "m", group_size=32, **OF_TEXT)
    recipe = stack((m, 0, 1), ("n", 1, 2))
    result = weightsmith.merge(recipe, "out", quantize=name, group_size=32, **OF_TEXT, **QUIET)
    assert of_layer(stored("out"), 0) == of_layer(stored(m), 0)
    facts = {(stored_as.why, stored_as.tensors) for stored_as in result.plan.summary().stored if stored_as.encoding != "plain"}
    assert facts == {("copied: an input has it stored so", 7), ("calibrated: quantised for what enters the layer", 7)}
    assert not quantised_already(result)
    weightsmith.dequantize(m, "decoded", **QUIET)
    weightsmith.merge(stack(("decoded", 0, 1), ("n", 1, 2)), "plain", **QUIET)
    types = [r"layers\.0\.=plain"]
    weightsmith.quantize("plain", "again", name, group_size=32, tensor_types=types, **OF_TEXT, **QUIET)
    assert of_layer(stored("out"), 1) == of_layer(stored("again"), 1)
    plan = plan_from_json(json.loads(json.dumps(result.plan.to_json())))
    weightsmith.run(plan, "later", threads=1, **QUIET)
    assert stored("later") == stored("out")


@pytest.mark.parametrize("name", CALIBRATED)
def test_a_text_is_not_read_if_all_codes_are_copied(name: str, texts: Path) -> None:
    (m,) = quantise(name, "m", group_size=32)
    result = weightsmith.quantize(m, "out", name, group_size=32, **OF_TEXT, **QUIET)
    assert not result.plan.products
    assert stored("out") == stored(m)
    [warning] = [str(warning) for warning in result.warnings if "text" in str(warning)]
    assert "no text is read: all weights that it would calibrate are copied" in warning


def test_a_text_that_only_measures_scales_of_the_cache_is_read(texts: Path) -> None:
    """Nothing says that it is not, or that it may be left out."""
    (m,) = quantise("w4a16", "m", group_size=32)
    result = weightsmith.quantize(m, "out", "w4a16", group_size=32, kv_cache="fp8", **OF_TEXT, **QUIET)
    assert not encoded(result.plan)
    assert "rows" in [product.name for product in result.plan.products]
    assert not [str(warning) for warning in result.warnings if "text" in str(warning)]


@pytest.mark.long
def test_what_a_copied_weight_reads_gets_no_scales(texts: Path) -> None:
    """Scales would have to be in its codes."""
    (m,) = quantise("w4a16", "m", group_size=32, tensor_types=["(k|v|up)_proj=plain"])
    options: dict[str, Any] = {"group_size": 32, **OF_TEXT}
    result = weightsmith.quantize(m, "out", "w4a16", **options, **QUIET)
    assert len(copied(result.plan)) == 8
    before, out = stored(m), stored("out")
    kept = [name for name in before if "norm" in name or "q_proj" in name]
    assert {name: out[name] for name in kept} == {name: before[name] for name in kept}
    [warning] = [str(warning) for warning in result.warnings if "no AWQ scales" in str(warning)]
    assert "weights that are copied, or in other formats, make their inputs, or share them" in warning


def test_stacked_experts_are_copied(models: Path) -> None:
    mixture(models / "m", "qwen3_moe")
    (m,) = quantise("mlx-4bit", "m", group_size=32)
    result = weightsmith.merge(stack((m, 1, 2), (m, 0, 2)), "out", quantize="mlx-4bit", group_size=32, **QUIET)
    assert not encoded(result.plan)
    assert [of_layer(stored("out"), i) for i in range(3)] == [of_layer(stored(m), i) for i in (1, 0, 1)]
    experts = [step for step in result.plan.steps if ".switch_mlp." in step.out.name]
    assert {len(step.pieces) for step in experts} == {9}
    assert len(experts) == 9


def test_scales_in_float32_are_copied_if_the_output_has_them_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "m", llama(0))
    (m,) = quantise("mlx-4bit", "m")
    assert not encoded(weightsmith.quantize(m, "out", "mlx-4bit", **QUIET).plan)
    half = weightsmith.quantize(m, "half", "mlx-4bit", out_dtype="bfloat16", **QUIET)
    assert not copied(half.plan)
    assert not [warning for warning in quantised_already(half) if "--group-size" in warning]


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_scales_of_two_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import torch
    import transformers

    monkeypatch.chdir(tmp_path)
    write_transformer(tmp_path / "m", "Llama")
    (m,) = quantise("w4a16", "m")

    def cast(tensors: dict[str, np.ndarray], _described: dict[str, Any]) -> None:
        tensors |= {name: a.astype(np.float16) for name, a in tensors.items() if name.endswith("mlp.up_proj.weight_scale")}

    result = weightsmith.quantize(rewritten(m, "other", cast), "out", "w4a16", **QUIET)
    assert len(copied(result.plan)) == 7
    assert {kind for name, (kind, _, _) in stored("out").items() if name.endswith("_scale")} == {"F16", "BF16"}
    weightsmith.dequantize("out", "plain", **QUIET)
    tokens, logits = torch.arange(8)[None], []
    for folder in ("plain", "out"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            logits.append(loaded(tokens).logits)
    assert torch.equal(*logits)


WEIGHT = TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 128))
JOINED = TensorSpec("q_proj.weight", DTYPES["BF16"], (2, 64, 128))
READ, OTHER = Read(0, "q_proj.weight"), Read(1, "q_proj.weight")
COPIED = Step(WEIGHT, COPY, (READ,), settings=1)


def tried(step: Step, *, dtypes: tuple[str, str] = ("BF16", "BF16"), order: object = None, parts: int = 3) -> Step | None:
    """A step that is copied from models whose scales have these dtypes; None if it is not."""
    outs = find_encoding("w4a16").outs(WEIGHT)

    def stored_as(read: Read) -> StoredAs:
        scales = DTYPES[dtypes[read.model]]
        stored = [StoredPart(out.name, scales if out.dtype.floating else out.dtype) for out in outs]
        return StoredAs("w4a16", tuple(stored[:parts]), order)

    wanted = [replace(out, shape=(2, *out.shape)) for out in outs] if len(step.out.shape) == 3 else outs
    return copy_of(step, "w4a16", wanted, stored_as, lambda read: 2 + read.model)


def joined(out: TensorSpec, *leaves: Step) -> Step:
    return Step(out, JOIN, (), pieces=leaves)


def test_a_copy_has_the_settings_and_the_stored_tensors_of_its_leaves() -> None:
    copy = tried(joined(JOINED, COPIED, replace(COPIED, inputs=(OTHER,))))
    assert copy is not None
    assert [(piece.settings, piece.inputs[0].model, piece.out.shape) for piece in copy.pieces] == [
        (1, model, shape) for shape in ((64, 16), (64, 1), (2,)) for model in (2, 3)
    ]
    assert [(number, origin) for _, number, origin in copy.places] == [(0, 0), (0, 1024), (1, 0), (1, 64), (2, 0), (2, 2)]


@pytest.mark.parametrize(
    "step",
    [
        replace(COPIED, op="linear"),
        replace(COPIED, inputs=(replace(READ, view=Block(0, 64, 128, 128)),)),
        replace(COPIED, inputs=(READ, OTHER)),
        replace(COPIED, inputs=(replace(READ, model=PRODUCTS),)),
        joined(WEIGHT, *(replace(COPIED, out=replace(WEIGHT, shape=(32, 128))) for _ in range(2))),
        joined(JOINED, COPIED),
        joined(JOINED, COPIED, replace(COPIED, op="fill", inputs=())),
    ],
)
def test_only_whole_tensors_are_copied(step: Step) -> None:
    assert tried(step) is None


def test_only_what_is_stored_alike_is_copied() -> None:
    assert tried(COPIED) is not None
    assert tried(replace(COPIED, op="cast")) is not None
    assert tried(COPIED, order="turned") is None
    assert tried(COPIED, parts=2) is None
    assert tried(COPIED, dtypes=("F32", "BF16")) is None
    both = joined(JOINED, COPIED, replace(COPIED, inputs=(OTHER,)))
    assert tried(both, dtypes=("F16", "F16")) is not None
    assert tried(both, dtypes=("F16", "BF16")) is None
