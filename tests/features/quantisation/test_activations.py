"""Static scales of activations and of the KV cache: from the largest magnitudes that transformers' modules see, in float64."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import weightsmith
from tests.calibration_help import changed, interrupted, prepared_for, quantise, rows_for, save_model, settings
from weightsmith._activations import states
from weightsmith._activations.work import LayerWork
from weightsmith._base.errors import NonFinite, PlanError
from weightsmith._engine.products import find_kind
from weightsmith._execution.execute import execute
from weightsmith._execution.options import RunOptions
from weightsmith._features.quantisation.calibration.activations import shared_site
from weightsmith._features.quantisation.calibration.weights import by_weight
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith.abc.product import Arrays, ProductContext

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def given_for(folder: Path, **options: Any) -> QuantizeSettings:
    return settings(folder, bits=None, uniform=False, **options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama")


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    views = {torch.bfloat16: (torch.int16, BF16), torch.float8_e4m3fn: (torch.uint8, E4M3)}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        raw, dtype = views.get(tensor.dtype, (tensor.dtype, None))
        tensors[name] = tensor.view(raw).numpy() if dtype is None else tensor.view(raw).numpy().view(dtype)
    return tensors


def entry_of(folder: Path) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return entry


class Seen:
    """The largest magnitudes in a float64 model of transformers while a text runs through it.

    inputs  of the linear layers, by module; of experts, without their number
    cached  of the keys and values, by layer
    """

    def __init__(self, folder: Path, ids: torch.Tensor) -> None:
        self.inputs: dict[str, float] = {}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        model.set_experts_implementation("eager")  # the others do not multiply float64
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _module, args, name=name: self.note(name, args[0]))
            elif name.endswith(".experts"):
                module.register_forward_pre_hook(lambda module, args, name=name: self.experts(name, module, *args))
        with torch.inference_mode():
            cache = model(ids, use_cache=True).past_key_values
        self.cached = [(float(layer.keys.abs().max()), float(layer.values.abs().max())) for layer in cache.layers]

    def note(self, name: str, x: torch.Tensor) -> None:
        self.inputs[name] = max(float(x.abs().max()), self.inputs.get(name, 0))

    def experts(self, name: str, module: Any, x: torch.Tensor, chosen: torch.Tensor, _weights: torch.Tensor) -> None:
        x = x.reshape(-1, x.shape[-1])
        for expert in chosen.unique().tolist():
            tokens = x[(chosen == expert).any(-1)]
            gate, up = (tokens @ module.gate_up_proj[expert].T).chunk(2, -1)
            self.note(f"{name}.gate_up", tokens)
            self.note(f"{name}.down", module.act_fn(gate) * up)

    def entering(self, module: str) -> float:
        """The largest magnitude of what enters the module of a stored name."""
        module = module.replace("block_sparse_moe", "mlp")
        if ".experts." not in module:
            return self.inputs[module]
        owner, _, rest = module.partition(".experts.")
        return self.inputs[f"{owner}.experts.{'down' if rest.endswith(('w2', 'down_proj')) else 'gate_up'}"]


def assert_nearest(stored: np.ndarray, largest: float) -> None:
    """The scale is the bfloat16 next to largest / 448, or to what float32 makes of it."""
    assert stored.shape == (1,)
    assert stored.dtype == BF16
    near = np.array([largest / 448 * (1 + error) for error in (-1e-5, 0, 1e-5)], np.float32).astype(BF16)
    assert stored[0] in near, (stored, near)


@pytest.mark.matrix("llama")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3", "mixtral", "qwen3 moe"])
def test_scales_are_those_of_what_transformers_modules_see(name: str, tmp_path: Path) -> None:
    model, quantize_settings = save_model(tmp_path / "m", name), given_for(tmp_path, kv_cache="fp8")
    seen = Seen(model, rows_for(quantize_settings, model))
    fp8 = tensors_of(quantise(model, tmp_path / "fp8", quantize_settings, name="fp8-static").out)
    fp4 = tensors_of(quantise(model, tmp_path / "fp4", quantize_settings, name="nvfp4").out)
    modules = [name.removesuffix(".input_scale") for name in fp8 if name.endswith(".input_scale")]
    assert len(modules) == sum(array.dtype == E4M3 for array in fp8.values()) >= 8
    assert sorted(modules) == sorted(name.removesuffix(".weight_packed") for name in fp4 if name.endswith(".weight_packed"))
    for module in modules:
        largest = seen.entering(module)
        assert_nearest(fp8[f"{module}.input_scale"], largest)
        np.testing.assert_allclose(fp4[f"{module}.input_global_scale"], np.float32([448 * 6 / largest]), rtol=1e-5)
    assert len(seen.cached) == 2
    for layer, both in enumerate(seen.cached):
        for part, largest in zip("kv", both, strict=True):
            for stored in (fp8, fp4):
                assert_nearest(stored[f"model.layers.{layer}.self_attn.{part}_scale"], largest)


@pytest.mark.long
def test_weights_that_engines_join_have_one_scale(llama: Path, tmp_path: Path) -> None:
    tensors = tensors_of(quantise(llama, tmp_path / "o", given_for(tmp_path), name="fp8-static").out)
    plain = tensors_of(llama)
    for parts in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        names = [f"model.layers.1.{part}.weight" for part in parts]
        largest = max(np.abs(plain[name].astype(np.float32)).max() for name in names)
        for name in names:
            assert tensors[f"{name}_scale"].tolist() == [np.float32(largest / np.float32(448)).astype(BF16)]
            codes = (plain[name].astype(np.float32) / tensors[f"{name}_scale"].astype(np.float32)).clip(-448, 448).astype(E4M3)
            np.testing.assert_array_equal(tensors[name].view(np.uint8), codes.view(np.uint8))


@pytest.mark.long
def test_experts_that_no_token_reaches_have_the_scale_of_the_others(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m", "mixtral")
    changed(model, gate=0)  # equal scores: the same two experts for every token
    tensors = tensors_of(quantise(model, tmp_path / "o", given_for(tmp_path), name="nvfp4").out)
    for layer in range(2):
        for part in ("w1", "w2", "w3"):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{{}}.{part}.input_global_scale"
            (scale,) = {float(tensors[name.format(expert)][0]) for expert in range(4)}
            assert 1 < scale < 1e6
    assert shared_site("l.0.experts.3.w2") != shared_site("l.0.experts.3.gate_up")


# ---- transformers


def quantised_input(x: np.ndarray, module: Any) -> np.ndarray:
    """float32, as the format defines it. (compressed-tensors divides by 6 in the dtype of the model, which is bfloat16.)"""
    if hasattr(module, "input_scale"):
        scale = module.input_scale.float().numpy()
        return (x / scale).clip(-448, 448).astype(E4M3).astype(np.float32) * scale
    whole = module.input_global_scale.numpy()
    groups = x.reshape(*x.shape[:-1], -1, 16)
    sixths = (np.abs(groups).max(-1, keepdims=True) / np.float32(6)).astype(BF16).astype(np.float32)
    local = (whole * sixths).clip(0, 448).astype(E4M3).astype(np.float32)
    scales = np.where(local == 0, np.float32(0.125), local) / whole
    quotients = np.abs(groups / scales)
    nearest = np.abs(quotients[..., None] - E2M1).argmin(-1)
    return (np.sign(groups) * E2M1[nearest] * scales).reshape(x.shape)


@pytest.mark.matrix("llama-*")
@pytest.mark.slow
@pytest.mark.parametrize("format", ["fp8-static", "nvfp4"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_transformers_multiplies_what_the_scales_say(name: str, format: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    model, quantize_settings = save_model(tmp_path / "m", name), given_for(tmp_path)
    out = quantise(model, tmp_path / "o", quantize_settings, name=format).out
    dtype = torch.float32 if format == "fp8-static" else torch.bfloat16  # that of what it decompresses
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    calls: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for module_name, module in loaded.eval().named_modules():
        if hasattr(module, "quantization_scheme"):
            module.register_forward_hook(
                lambda _module, args, y, module_name=module_name: calls.__setitem__(
                    module_name, (args[0].float().numpy(), y.float().numpy())
                )
            )
    with torch.inference_mode():
        loaded(rows_for(quantize_settings, model))
    assert len(calls) == 14
    errors = []
    with weightsmith.open_checkpoint(out) as opened:
        for module_name, (x, y) in calls.items():
            weight, module = opened.read(f"{module_name}.weight"), loaded.get_submodule(module_name)
            expected = quantised_input(x, module) @ weight.T
            bound = 1e-5 if format == "fp8-static" else 5e-3
            assert np.linalg.norm(y - expected) < bound * np.linalg.norm(expected), module_name
            errors.append(np.linalg.norm(x @ weight.T - expected) / np.linalg.norm(expected))
    assert min(errors) > (1e-2 if format == "fp8-static" else 5e-2), errors  # activations are indeed rounded


# ---- the same bytes


@pytest.mark.long
@pytest.mark.parametrize("kv_cache", ["", "fp8"])
def test_a_layer_runs_once_for_its_scales_and_the_next_layer(
    kv_cache: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scales of the cache it runs twice: attention that fills a cache may round otherwise."""
    alone: list[int] = []
    run = states.run

    def noted(context: ProductContext, work: LayerWork, inputs: Any) -> Arrays:
        alone.append(work.layer)
        return run(context, work, inputs)

    monkeypatch.setattr(states, "run", noted)
    quantise(llama, tmp_path / "out", given_for(tmp_path, kv_cache=kv_cache or None), name="fp8-static")
    assert alone == ([0] if kv_cache else [])


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("format", ["fp8-static", "nvfp4", "int8", "w4a16"])
def test_the_bytes_depend_on_neither_threads_nor_interruptions(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "m", "mixtral")
    quantize_settings = given_for(tmp_path, kv_cache="fp8", group_size=32 if format == "w4a16" else None)
    once = quantise(model, tmp_path / "a", quantize_settings, name=format, threads=1).out
    with prepared_for(model, quantize_settings, format) as prepared:
        with interrupted(monkeypatch, "scales 1"):
            execute(prepared, tmp_path / "b", RunOptions(threads=2, card=False))
        execute(prepared, tmp_path / "b", RunOptions(threads=2, card=False))
    assert (once / "model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert entry_of(once)["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    }
    weightsmith.verify(once)


@pytest.mark.long
@pytest.mark.parametrize("format", ["fp8-static", "nvfp4", "fp8-dynamic"])
def test_a_merge_into_the_format_is_the_merge_and_then_the_format(format: str, llama: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=1)
    quantize_settings = given_for(tmp_path, kv_cache="fp8")
    recipe = {
        "merge_method": "linear",
        "models": [{"model": str(source), "parameters": {"weight": 0.5}} for source in (llama, other)],
    }
    once = quantise(recipe, tmp_path / "once", quantize_settings, name=format).out
    weightsmith.merge(recipe, tmp_path / "merged", progress=False, fsync=False)
    then = quantise(tmp_path / "merged", tmp_path / "then", quantize_settings, name=format).out
    assert (once / "model.safetensors").read_bytes() == (then / "model.safetensors").read_bytes()
    assert entry_of(once) == entry_of(then)


@pytest.mark.long
@pytest.mark.parametrize("calibration", [True, False])
def test_a_cache_changes_no_weight(calibration: bool, llama: Path, tmp_path: Path) -> None:
    """Beside GPTQ's codes and beside rounded ones; the default text is built in."""
    quantize_settings = given_for(tmp_path, group_size=32, calibration_rows=2)
    if not calibration:
        quantize_settings = replace(quantize_settings, calibration=None)
        plain = replace(quantize_settings, calibration_rows=None, calibration_tokens=None)
    else:
        plain = quantize_settings
    without = tensors_of(quantise(llama, tmp_path / "a", plain, name="w4a16").out)
    with_cache = tensors_of(quantise(llama, tmp_path / "b", replace(quantize_settings, kv_cache="fp8"), name="w4a16").out)
    added = {f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(2) for part in "kv"}
    assert with_cache.keys() - without.keys() == added
    for name, array in without.items():
        np.testing.assert_array_equal(array, with_cache[name], name)


@pytest.mark.long
def test_a_calibrated_cache_holds_what_the_quantised_model_computes(tmp_path: Path) -> None:
    """Its values are scaled, and the keys and values of layer 1 follow from the quantised layer 0."""
    model = save_model(tmp_path / "m", "qwen2")
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("v_proj.bias"):
            tensor += (torch.arange(len(tensor)) % 16 == 3) * 12
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    quantize_settings = given_for(tmp_path, kv_cache="fp8", group_size=32)
    out = quantise(model, tmp_path / "out", quantize_settings, name="w4a16").out
    weightsmith.dequantize(out, tmp_path / "plain", out_dtype="float32", progress=False)
    stored, seen = tensors_of(out), Seen(tmp_path / "plain", rows_for(quantize_settings, model))
    plain = Seen(model, rows_for(quantize_settings, model))
    for layer, both in enumerate(seen.cached):
        assert plain.cached[layer][1] > 1.2 * both[1]
        for part, largest in zip("kv", both, strict=True):
            assert_nearest(stored[f"model.layers.{layer}.self_attn.{part}_scale"], largest)


# ---- reading


@pytest.mark.long
@pytest.mark.parametrize("format", ["fp8-static", "nvfp4"])
def test_scales_are_dropped_with_a_note_when_a_model_is_read(format: str, llama: Path, tmp_path: Path) -> None:
    out = quantise(llama, tmp_path / "o", given_for(tmp_path, kv_cache="fp8"), name=format).out
    dequantised = weightsmith.dequantize(out, tmp_path / "plain", progress=False)
    notes = [str(warning) for warning in dequantised.warnings]
    assert any("18 scale(s) of activations or of the KV cache are dropped" in note for note in notes), notes
    note = next(note for note in weightsmith.inspect(out).notes if "are dropped" in note)
    assert "plain weights have none; the first is 'model.layers.0." in note
    plain, before = tensors_of(tmp_path / "plain"), tensors_of(llama)
    assert plain.keys() == before.keys()
    for name, array in plain.items():
        error = np.linalg.norm(array.astype(np.float32) - before[name].astype(np.float32))
        assert error <= 0.15 * np.linalg.norm(before[name].astype(np.float32)), name
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())


# ---- errors


def refusal(model: Path, format: str, quantize_settings: QuantizeSettings) -> str:
    with pytest.raises(PlanError) as problem:
        prepared_for(model, quantize_settings, format)
    (finding,) = problem.value.problems
    return str(finding)


@pytest.mark.slow
def test_settings_that_contradict_each_other(llama: Path, tmp_path: Path) -> None:
    none = QuantizeSettings(calibration="none")
    assert "fp8-static needs a text" in refusal(llama, "fp8-static", none)
    assert "needs a text" in refusal(llama, "w4a16", replace(none, kv_cache="fp8"))
    message = refusal(llama, "fp8-dynamic", QuantizeSettings(calibration="built-in"))
    assert "fp8-dynamic reads no text without" in message
    assert "fp8" in message
    assert "no calibration text is read" in refusal(llama, "w4a16", QuantizeSettings(calibration_rows=2))
    assert "not a setting of mlx-4bit" in refusal(llama, "mlx-4bit", QuantizeSettings(kv_cache="fp8"))


def test_models_whose_cache_holds_something_else(llama: Path, tmp_path: Path) -> None:
    quantize_settings = given_for(tmp_path, kv_cache="fp8")
    (tmp_path / "m").mkdir()
    for file in llama.iterdir():
        (tmp_path / "m" / file.name).write_bytes(file.read_bytes())
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps({**config, "num_kv_shared_layers": 1}))
    assert "1 layers use the keys and values of others" in refusal(tmp_path / "m", "fp8-dynamic", quantize_settings)
    tensors = {name.replace("k_proj", "kv_b_proj"): tensor for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(tensors, tmp_path / "m/model.safetensors", {"format": "pt"})
    message = refusal(tmp_path / "m", "fp8-dynamic", quantize_settings)
    assert "no layer has self_attn.k_proj and self_attn.v_proj" in message
    assert "'llama'" in message


def test_models_that_transformers_cannot_build(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for file in llama.iterdir():
        (tmp_path / "m" / file.name).write_bytes(file.read_bytes())
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps({**config, "model_type": "lama"}))
    assert "transformers cannot build a model of type 'lama'" in refusal(tmp_path / "m", "nvfp4", given_for(tmp_path))


def test_errors_of_scales_do_not_propose_to_leave_out_the_text(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for file in llama.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / "m" / file.name).write_bytes(file.read_bytes())
    for format, cache, other in (("fp8-static", None, "fp8-dynamic"), ("w8a16", "fp8", "fp8-dynamic without --kv-cache")):
        message = refusal(tmp_path / "m", format, given_for(tmp_path, kv_cache=cache))
        assert "put the model's tokenizer.json next to its weights" in message.lower()
        assert f"; or choose {other}" in message
        assert "--calibration none" not in message


@pytest.mark.slow
def test_keys_that_are_too_large(tmp_path: Path) -> None:
    model, quantize_settings = save_model(tmp_path / "m"), given_for(tmp_path, kv_cache="fp8")
    changed(model, k_proj=3e38)
    changed(model, k_proj=3e38)
    with pytest.raises(NonFinite):
        quantise(model, tmp_path / "o", quantize_settings, name="fp8-dynamic")
    assert not (tmp_path / "o").exists()


def test_scales_are_not_counted_as_tensors(llama: Path, tmp_path: Path) -> None:
    with prepared_for(llama, given_for(tmp_path, kv_cache="fp8"), "fp8-static") as prepared:
        shown = by_weight(prepared.plan)
        assert [step.out.name for step in shown.steps] == list(prepared.inputs[0].specs)
        assert len(prepared.plan.steps) == len(shown.steps) + 18


@contextmanager
def product_of(llama: Path, folder: Path) -> Iterator[Any]:
    with prepared_for(llama, given_for(folder, kv_cache="fp8"), "nvfp4") as prepared:
        yield next(product for product in prepared.plan.products if product.op == "activation_scales")


def test_a_changed_product_is_refused(llama: Path, tmp_path: Path) -> None:
    with product_of(llama, tmp_path) as product:
        check = find_kind(product.op).check
        assert not check(product)
        for key, value, problem in (
            ("encoding", "int8", "there is no scale of activations for weights stored as int8"),
            ("weights", (), "its arrays are not those of its settings"),
            ("attention", "", "there is no such cache"),
            ("cache", "int4", "there is no such cache"),
            ("layer", 7, "there is no layer 7"),
            ("states", "other", "it does not need what its settings name"),
        ):
            assert check(replace(product, settings={**product.settings, key: value})) == problem, key
