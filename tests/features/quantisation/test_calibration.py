"""Calibrated quantisation: the states and Hessians are those of the model, and the bytes depend on nothing else."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import weightsmith
from tests import vision_zoo, zoo
from tests.calibration_help import (
    CONFIGS,
    TEXT,
    TINY,
    captured,
    few_options,
    interrupted,
    prepared_for,
    quantise,
    rows_for,
    save_model,
    settings,
)
from tests.cli_help import run_process
from tests.fork_help import forked_code
from weightsmith._activations import running, sums
from weightsmith._activations.model import input_of, statistic_products, text_for
from weightsmith._activations.statistics import Statistic
from weightsmith._base.errors import CannotResume, FormatError, NonFinite, PlanError, StoreError, WeightsmithError
from weightsmith._engine.products import find_kind
from weightsmith._execution.execute import execute
from weightsmith._execution.options import RunOptions
from weightsmith._features.quantisation.base import without_measuring
from weightsmith._features.quantisation.calibration import layer
from weightsmith._features.quantisation.calibration.layer import split
from weightsmith._features.quantisation.formats import FOLLOW_UP
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._models.formats import find_encoding, hessians
from weightsmith._outputs.area import staging_folder
from weightsmith._planning.planner.reopen import reopen
from weightsmith._plans import PlanDraft, StatisticRequest, plan_from_json

__all__ = ["few_options"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.long
def test_each_layer_is_quantised_for_what_leaves_the_quantised_ones(llama: Path, tmp_path: Path) -> None:
    """States that leave a layer are those of its quantised weights, and they are removed when nothing needs them any more."""
    quantize_settings = settings(tmp_path)
    with prepared_for(llama, quantize_settings) as prepared:
        products = prepared.plan.products
        output = captured(prepared, products)
        specs = {step.out.name: step.out for product in products for step in product.steps}
        model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
        for product in products:
            if product.op == "quantised_layer" and product.name != "head":
                weights = product.settings["weights"]
                for name, stored in split(weights, specs, output.arrays[product.name]):
                    weight = find_encoding(weights[name]).dequantise(stored, specs[name].shape)
                    model.get_parameter(name).data.copy_(torch.from_numpy(weight))
    with torch.inference_mode():
        states = model(rows_for(quantize_settings, llama), output_hidden_states=True).hidden_states
    torch.testing.assert_close(torch.from_numpy(output.arrays["states 1"][0]), states[1], rtol=1e-4, atol=2e-5)
    log = output.log
    assert log[:6] == ["rows", "states 0", "-rows", "layer 0", "states 1", "-states 0"]
    assert sorted(log[-2:]) == ["-states 2", "largest states"]
    assert output.arrays["head"]


@pytest.mark.long
def test_linear_layers_multiply_in_bfloat16_if_wanted(tmp_path: Path) -> None:
    model = save_model(tmp_path / "mixtral", "mixtral")
    quantize_settings = settings(tmp_path, bits=None, uniform=False)
    states = {}
    for dtype in ("float32", "bfloat16"):
        with prepared_for(model, replace(quantize_settings, calibration_dtype=dtype, group_size=32), "w4a16") as prepared:
            output = captured(prepared, prepared.plan.products)
            states[dtype] = torch.from_numpy(output.arrays["states 1"][0])
    difference = (states["bfloat16"] - states["float32"]).norm() / (states["float32"] - states["float32"].mean()).norm()
    assert 1e-5 < difference < 2e-2


def output_error(ids: torch.Tensor, folder: Path, weights: Path) -> float:
    """Relative error of the logits."""
    models = [transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32) for source in (folder, weights)]
    with torch.inference_mode():
        expected, actual = (model(ids).logits for model in models)
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.slow
def test_calibration_beats_rounding_to_nearest(llama: Path, tmp_path: Path) -> None:
    errors = []
    for name, quantize_settings in (
        ("calibrated", settings(tmp_path, bits=4)),
        ("rounded", QuantizeSettings(bits=4, calibration="none", uniform=True)),
    ):
        quantise(llama, tmp_path / name, quantize_settings)
        weightsmith.dequantize(tmp_path / name, tmp_path / f"{name}-plain", progress=False)
        errors.append(output_error(rows_for(settings(tmp_path), llama), llama, tmp_path / f"{name}-plain"))
    assert errors[0] < 0.8 * errors[1], errors


@pytest.mark.long
@pytest.mark.parametrize("name", ["w4a16", "w8a16"])
def test_gptq_beats_rounding_to_nearest_and_other_programs_read_it(llama: Path, tmp_path: Path, name: str) -> None:
    quantize_settings = settings(tmp_path, bits=None, uniform=False, group_size=32)
    errors = []
    for out, chosen in (("gptq", quantize_settings), ("rounded", QuantizeSettings(group_size=32))):
        quantise(llama, tmp_path / out, chosen, name=name)
        errors.append(output_error(rows_for(quantize_settings, llama), llama, tmp_path / out))
    assert errors[0] < 0.85 * errors[1], errors


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.matrix
@pytest.mark.slow
def test_the_bytes_depend_on_the_seed_and_the_text_and_not_on_threads(llama: Path, tmp_path: Path) -> None:
    quantize_settings = settings(tmp_path)
    first = weights_of(quantise(llama, tmp_path / "a", quantize_settings, threads=1).out)
    assert weights_of(quantise(llama, tmp_path / "b", quantize_settings, threads=5).out) == first
    assert weights_of(quantise(llama, tmp_path / "c", quantize_settings, seed=1).out) != first  # other rows of the text
    (tmp_path / "other").mkdir()
    other = settings(tmp_path / "other")
    (tmp_path / "other/text.txt").write_text("Something else. " * 20)
    assert weights_of(quantise(llama, tmp_path / "d", other).out) != first


class Counted:
    """A function that takes its time, and the largest number of threads that were in it at once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._inside = self.most = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
        time.sleep(0.05)
        try:
            return self._function(*args, **options)
        finally:
            with self._lock:
                self._inside -= 1


@pytest.mark.long
@pytest.mark.usefixtures("few_options")
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("uniform", [True, False])
def test_factorisations_run_one_at_a_time_if_memory_is_short(
    uniform: bool, gpu: bool, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU, too: it gets its work from one thread, and processors factorise."""
    if gpu:
        monkeypatch.setattr(running, "on_cpu", lambda _device: False)
    runs = []
    with prepared_for(llama, settings(tmp_path, uniform=uniform)) as prepared:
        last = "layer 0" if uniform else "measurement: measured 0"
        until = [product.name for product in prepared.plan.products].index(last) + 1
        for memory, at_once in ((None, 2), (0, 1)):
            counted = Counted(hessians.prepare)
            with monkeypatch.context() as patch:
                patch.setattr(hessians, "prepare", counted)
                output = captured(prepared, prepared.plan.products[:until], memory)
            assert counted.most == at_once
            runs.append([array.tobytes() for arrays in output.arrays.values() for array in arrays])
    assert runs[0] == runs[1]


@pytest.mark.long
@pytest.mark.usefixtures("few_options")
@pytest.mark.parametrize("uniform", [True, False])
def test_hessians_of_experts_are_summed_within_a_budget(uniform: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several passes over the rows, with the same bytes."""
    held: list[sums.Sums] = []
    plain = sums.Sums.__init__

    def init(self: sums.Sums, statistic: Statistic, shapes: Mapping[str, tuple[int, int]], device: str = "cpu") -> None:
        plain(self, statistic, shapes, device)
        held.append(self)
        taken.append(sum(total.nbytes for held_sums in held for total in held_sums._sums.values()))

    monkeypatch.setattr(sums.Sums, "__init__", init)
    runs, most = [], []
    with prepared_for(save_model(tmp_path / "m", "mixtral"), settings(tmp_path, uniform=uniform)) as prepared:
        last = "layer 0" if uniform else "measurement: measured 0"
        until = [product.name for product in prepared.plan.products].index(last) + 1
        limit = 80_000 if uniform else 200_000
        for memory in (None, limit):
            taken: list[int] = []
            output = captured(prepared, prepared.plan.products[:until], memory)
            runs.append([array.tobytes() for arrays in output.arrays.values() for array in arrays])
            most.append(max(taken))
    assert most[0] > 200_000
    assert 0.36 * limit < most[1] <= 0.5 * limit
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_a_merge_is_quantised_on_the_way(tmp_path: Path) -> None:
    """As merging first, and quantising the result."""
    for seed, name in enumerate("abc"):
        save_model(tmp_path / name, seed=seed)
    models = [{"model": str(tmp_path / name), "parameters": {"weight": 1, "density": 0.5}} for name in "bc"]
    recipe = {"merge_method": "ties", "base_model": str(tmp_path / "a"), "models": models, "parameters": {"scope": "model"}}
    weightsmith.merge(recipe, tmp_path / "merged", progress=False)
    quantize_settings = settings(tmp_path)
    direct = quantise(recipe, tmp_path / "direct", quantize_settings).out
    assert weights_of(direct) == weights_of(quantise(tmp_path / "merged", tmp_path / "after", quantize_settings).out)


# ---- measurement


@pytest.mark.long
@pytest.mark.usefixtures("few_options")
def test_a_measurement_precedes_and_can_be_used_again(llama: Path, tmp_path: Path) -> None:
    quantize_settings = settings(tmp_path, uniform=False)
    measured = quantise(llama, tmp_path / "a", quantize_settings).out
    data = json.loads((measured / "measurement.json").read_text())["measurement"]
    for block, options in data.items():
        if options is not None:
            accuracies = [option["accuracy"] for option in sorted(options, key=lambda option: option["total_bits"])]
            assert 1 - accuracies[0] > 10 * (1 - accuracies[-1]), block
            assert all(0 < accuracy < 1 for accuracy in accuracies)
    assert json.loads((measured / "weightsmith.json").read_text())["quantised"] == "exl2"
    again = replace(quantize_settings, measurement=str(measured / "measurement.json"))
    assert weights_of(quantise(llama, tmp_path / "b", again).out) == weights_of(measured)
    assert not list(tmp_path.glob(".*staging"))
    with prepared_for(llama, again) as prepared, pytest.raises(StoreError, match=r"measurement\.json would be lost"):
        execute(prepared, measured, RunOptions(overwrite=True, card=False))


def test_statistics_of_other_users_are_no_part_of_a_measurement(llama: Path, tmp_path: Path) -> None:
    """They would be removed with it, and steps that read them could not run."""
    quantize_settings = settings(tmp_path, uniform=False)
    with prepared_for(llama, quantize_settings) as prepared:
        draft, model = PlanDraft.of(prepared.plan), input_of(prepared.inputs, 0)
        text = text_for(
            model, quantize_settings.calibration, quantize_settings.calibration_rows, quantize_settings.calibration_tokens, 0
        )
        others = statistic_products(lambda number: model, [StatisticRequest("gram", 0, text)])
    draft.products += others
    assert {product.op for product in others} == {"text_rows", "embedded_rows", "states", "statistic"}
    assert without_measuring(draft) == list(prepared.plan.products)
    assert (draft.products, draft.then) == (list(others), None)


@pytest.mark.long
def test_features_of_a_down_projection_beside_biases_stay_in_order(tmp_path: Path) -> None:
    out = quantise(save_model(tmp_path / "m", "biased"), tmp_path / "out", settings(tmp_path)).out
    with open_checkpoint(out, raw=True) as stored:
        for name, spec in stored.specs.items():
            if name.endswith("q_invperm") and "lm_head" not in name:
                assert (stored.read(name) == np.arange(spec.size)).all() == ("down_proj" in name), name


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_head_that_is_not_quantised_leaves_the_layers_as_they_are(name: str, tmp_path: Path) -> None:
    """gemma3 is tied and gets other names; llama has a head of its own."""
    model, quantize_settings = save_model(tmp_path / "m", name), settings(tmp_path)
    merged = quantise(model, tmp_path / "plain", replace(quantize_settings, head_bits=16))
    assert "head" not in {product.name for product in merged.plan.products}
    quantise(model, tmp_path / "out", quantize_settings)
    with open_checkpoint(tmp_path / "plain", raw=True) as plain, open_checkpoint(tmp_path / "out", raw=True) as other:
        layers = [key for key in other.specs if "lm_head" not in key]
        assert [key for key in plain.specs if key not in layers] == (["lm_head.weight"] if name == "llama" else [])
        for key in layers:
            np.testing.assert_array_equal(plain.read(key), other.read(key))


@pytest.mark.long
def test_the_card_counts_weights(llama: Path, tmp_path: Path) -> None:
    quantize_settings = settings(tmp_path, bits=None, uniform=False, group_size=32)
    with prepared_for(llama, quantize_settings, "w4a16") as prepared:
        out = execute(prepared, tmp_path / "out", RunOptions()).out
    assert "Quantised: w4a16 (14 of 21 tensors)." in (out / "README.md").read_text()


@pytest.mark.long
def test_a_model_can_be_split_for_one_format_and_fused_for_the_next(tmp_path: Path) -> None:
    phi3, quantize_settings = save_model(tmp_path / "m", "phi3"), settings(tmp_path)
    quantise(phi3, tmp_path / "exl2", quantize_settings)  # q, k and v are one matrix each
    fused = replace(quantize_settings, bits=None, uniform=False, group_size=32)
    assert "layer 0" in {product.name for product in quantise(phi3, tmp_path / "out", fused, name="w4a16").plan.products}


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.usefixtures("few_options")
def test_a_run_resumes_after_its_measurement(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_settings = settings(tmp_path, uniform=False)

    with interrupted(monkeypatch, "layer 0"):
        quantise(llama, tmp_path / "a", quantize_settings)
    with monkeypatch.context() as patch:
        patch.setattr("weightsmith._features.quantisation.calibration.costs._losses", None)  # fails if a layer is measured
        weights = weights_of(quantise(llama, tmp_path / "a", quantize_settings).out)
    assert weights == weights_of(quantise(llama, tmp_path / "b", quantize_settings).out)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.usefixtures("few_options")
def test_a_measurement_is_resumed_for_other_bits(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_settings = settings(tmp_path, uniform=False)

    with interrupted(monkeypatch, "measurement: measured 1"):
        quantise(llama, tmp_path / "a", quantize_settings)
    with pytest.raises(CannotResume):
        quantise(llama, tmp_path / "a", replace(quantize_settings, calibration_rows=5))
    other = replace(quantize_settings, bits=5.0, head_bits=8)
    weights = weights_of(quantise(llama, tmp_path / "a", other).out)
    assert weights == weights_of(quantise(llama, tmp_path / "b", other).out)


@pytest.mark.cpu
@pytest.mark.long
def test_a_calibration_begun_on_one_device_is_not_resumed_on_another(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_settings = settings(tmp_path)

    with prepared_for(llama, quantize_settings) as prepared:
        with interrupted(monkeypatch, "layer 1"):
            execute(prepared, tmp_path / "out", RunOptions())
        with pytest.raises(CannotResume, match="device: cpu -> cuda"):
            execute(prepared, tmp_path / "out", RunOptions(device="cuda:0"))
        execute(prepared, tmp_path / "out", RunOptions(device="cpu"))


@pytest.mark.long
@pytest.mark.usefixtures("few_options")
def test_a_token_with_a_massive_activation_does_not_hide_the_errors_of_the_others(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_model(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    token = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("T")
    tensors["model.embed_tokens.weight"][token] *= 1000
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantize_settings = settings(tmp_path, uniform=False)
    plain, massive = (
        _errors(quantise(model, tmp_path / f"out-{model.name}", quantize_settings).out) for model in (llama, folder)
    )
    assert massive == pytest.approx(plain, rel=0.5)


def _errors(out: Path) -> list[float]:
    """The error of the middle option of each block."""
    data = json.loads((out / "measurement.json").read_text())["measurement"]
    return [1 - options[1]["accuracy"] for options in data.values() if options is not None]


# ---- crashes


KILLED = """
import os, signal, sys
import weightsmith
from weightsmith._outputs import staging
plain = staging.Staging.keep
def keep(self, product, arrays):
    found = plain(self, product, arrays)
    if product.name == "states 1":
        os.kill(os.getpid(), signal.SIGKILL)
    return found
staging.Staging.keep = keep
given = {"bits": 4.1, "uniform": True, "calibration": sys.argv[3], "calibration_rows": 6, "calibration_tokens": 16}
weightsmith.quantize(*sys.argv[1:3], "exl2", **given)
"""


@pytest.mark.process
@pytest.mark.cpu
@pytest.mark.slow
def test_killed_and_run_again_it_gives_the_same_bytes(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_settings, out = settings(tmp_path), tmp_path / "out"
    whole = weights_of(quantise(llama, tmp_path / "whole", quantize_settings).out)
    ran = forked_code(KILLED, llama, out, quantize_settings.calibration)
    assert ran.code == -signal.SIGKILL, ran.err
    calls: list[str] = []
    plain = layer.stages
    monkeypatch.setattr(layer, "stages", lambda *args: calls.append("layer") or plain(*args))
    resumed = weightsmith.quantize(
        llama, out, "exl2", **{name: getattr(quantize_settings, name) for name in quantize_settings.changed}, progress=False
    )
    assert weights_of(resumed.out) == whole
    assert len(calls) == 1
    assert not staging_folder(out).exists()


@pytest.mark.long
def test_lost_states_are_computed_again_and_finished_layers_are_not(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run stops with every layer finished but the head; its states are lost."""
    quantize_settings, out = settings(tmp_path), tmp_path / "out"

    with interrupted(monkeypatch, "head"):
        quantise(llama, out, quantize_settings)
    for file in (staging_folder(out) / "products").iterdir():
        if file.stat().st_size == 6 * 16 * 64 * 4:
            file.unlink()
    monkeypatch.setattr(layer, "stages", None)  # fails if a layer is quantised again
    weights = weights_of(quantise(llama, out, quantize_settings).out)
    monkeypatch.undo()
    assert weights == weights_of(quantise(llama, tmp_path / "whole", quantize_settings).out)


@pytest.mark.long
def test_a_plan_survives_json(llama: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    weightsmith.merge({"merge_method": "passthrough", "models": [{"model": str(llama)}]}, old, progress=False)
    quantize_settings = settings(old)
    with prepared_for(llama, quantize_settings) as prepared:
        with reopen(prepared.plan) as again, pytest.raises(StoreError, match=r"text\.txt would be lost"):
            execute(again, old, RunOptions(overwrite=True))
        assert llama / "tokenizer.json" in again.named
        text = json.dumps(prepared.plan.to_json())
        assert plan_from_json(json.loads(text)) == prepared.plan
        for product in prepared.plan.products:
            assert find_kind(product.op).check(product) == ""
            assert find_kind(product.op).check(replace(product, settings={"base": 1})) != ""
    (tmp_path / "plan.json").write_text(text)
    weightsmith.run(tmp_path / "plan.json", tmp_path / "run", progress=False)
    assert weights_of(tmp_path / "run") == weights_of(quantise(llama, tmp_path / "out", quantize_settings).out)


# ---- bad input


@pytest.mark.long
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize(("name", "place"), [("lm_head", "lm_head"), ("model.layers.1.self_attn.o_proj", "layers.1.self_attn")])
def test_a_weight_that_float16_cannot_hold_is_named(name: str, place: str, uniform: bool, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{name}.weight"][:, 0] = 1e5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(NonFinite, match=f"{place}.*: a weight is not a number that float16 can hold"):
        quantise(folder, tmp_path / "out", settings(tmp_path, uniform=uniform))


def test_a_negative_seed_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="must be at least 0 for a calibration, not -1"):
        prepared_for(llama, settings(tmp_path), seed=-1)


def _made(plan: dict[str, Any], op: str) -> dict[str, Any]:
    product: dict[str, Any] = next(product for product in plan["products"] if product["op"] == op)
    return product


def _rows(plan: dict[str, Any]) -> dict[str, Any]:
    product_settings: dict[str, Any] = _made(plan, "text_rows")["settings"]
    return product_settings


def _states_weights(plan: dict[str, Any]) -> dict[str, str]:
    weights: dict[str, str] = _made(plan, "quantised_states")["settings"]["weights"]
    return weights


def _layer(plan: dict[str, Any]) -> dict[str, Any]:
    product_settings: dict[str, Any] = _made(plan, "quantised_layer")["settings"]
    return product_settings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: _rows(plan)["text"].update(tokens=0), "its rows are not those of its text"),
        (lambda plan: _rows(plan)["text"].update(seed=-1), "its seed is negative"),
        (lambda plan: _rows(plan)["base"].update(model=7), "it does not name the tokenizer's file"),
        (
            lambda plan: _made(plan, "embedded_rows")["settings"]["base"].update(hidden=1),
            "its states are not those of its rows",
        ),
        (
            lambda plan: _layer(plan)["base"].update(arithmetic="float64"),
            "not those of a quantised_layer product",
        ),
        (lambda plan: _layer(plan).update(layer=99), "there is no layer 99"),
        (lambda plan: _made(plan, "embedded_rows").pop("transient"), "the arrays of 'embedded_rows' are transient"),
        (
            lambda plan: _made(plan, "quantised_states").update(transient=False),
            "'quantised_states' are transient",
        ),
        (lambda plan: _layer(plan).update(weights={"x.weight": "exl2 4/g32"}), "it has no step for a weight"),
        (lambda plan: _layer(plan)["weights"].update({"x.weight": "plain"}), "it has no step for a weight"),
        (
            lambda plan: _layer(plan)["weights"].update(dict.fromkeys(_layer(plan)["weights"], "exl2 2/g32")),
            "its arrays are not",
        ),
        (lambda plan: _layer(plan)["weights"].update(dict.fromkeys(_layer(plan)["weights"], "int8")), "cannot calibrate"),
        (lambda plan: _states_weights(plan).update({"x.weight": "exl2 4/g32"}), "it has no step for a quantised weight"),
        (lambda plan: _states_weights(plan).update(dict.fromkeys(_states_weights(plan), "no-such")), "no-such"),
    ],
)
def test_a_plan_from_elsewhere_is_checked(change: Any, words: str, llama: Path, tmp_path: Path) -> None:
    with prepared_for(llama, settings(tmp_path)) as prepared:
        plan = json.loads(json.dumps(prepared.plan.to_json()))
    change(plan)
    with pytest.raises(PlanError, match=words):
        weightsmith.run(plan_from_json(plan), tmp_path / "out", progress=False)


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [lambda weights: weights.popitem(), lambda weights: weights.update(dict.fromkeys(weights, "w4a16-g32"))],
    ids=["fewer", "in another format"],
)
def test_weights_of_a_layer_are_those_that_its_product_has(change: Any, llama: Path, tmp_path: Path) -> None:
    """A plan from elsewhere whose states name weights of more arrays than the product has ended in a RuntimeError."""
    with prepared_for(llama, settings(tmp_path)) as prepared:
        plan = json.loads(json.dumps(prepared.plan.to_json()))
    change(_states_weights(plan))
    with pytest.raises(FormatError, match="are not those of the weights that its settings name"):
        weightsmith.run(plan_from_json(plan), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("op", ["quantised_states", "largest_state"])
def test_states_are_those_that_a_product_has(op: str, llama: Path, tmp_path: Path) -> None:
    """A plan from elsewhere that names a layer's weights in their place ended in a ValueError."""
    with prepared_for(llama, settings(tmp_path)) as prepared:
        plan = json.loads(json.dumps(prepared.plan.to_json()))
    weights, made = _made(plan, "quantised_layer")["name"], _made(plan, op)
    made["settings"]["states"] = weights
    made["needs"].append(weights)
    with pytest.raises(FormatError, match=f"product {weights} does not have the states that enter a layer"):
        weightsmith.run(plan_from_json(plan), tmp_path / "out", progress=False)


def test_largest_states_are_numbers(llama: Path, tmp_path: Path) -> None:
    """A plan from elsewhere that collects a layer's weights ended in a ValueError."""
    with prepared_for(llama, settings(tmp_path)) as prepared:
        plan = json.loads(json.dumps(prepared.plan.to_json()))
    weights = _made(plan, "quantised_layer")["name"]
    _made(plan, "largest_states")["needs"][0] = weights
    with pytest.raises(FormatError, match=f"product {weights} does not have the largest state of a layer"):
        weightsmith.run(plan_from_json(plan), tmp_path / "out", progress=False)


@pytest.mark.parametrize("op", ["measured_layer", "states"])
def test_what_a_measurement_keeps_is_what_follows_from_it(op: str, llama: Path, tmp_path: Path) -> None:
    """A plan that removes the errors of a layer, which the second plan reads, ended in a KeyError."""
    with prepared_for(llama, settings(tmp_path, uniform=False)) as prepared:
        plan = json.loads(json.dumps(prepared.plan.to_json()))
    product = _made(plan, op)
    product["transient"] = not product.get("transient", False)
    with pytest.raises(PlanError, match=f"the arrays of '{op}' are (not )?transient"):
        weightsmith.run(plan_from_json(plan), tmp_path / "out", progress=False)


def test_what_follows_a_measurement_from_elsewhere_is_checked(llama: Path, tmp_path: Path) -> None:
    with prepared_for(llama, settings(tmp_path, uniform=False)) as prepared:
        with pytest.raises(FormatError, match="it does not measure every weight"):
            FOLLOW_UP.follow(prepared, {}, None, None)
        then = prepared.plan.then
        assert then is not None
        changed = replace(then, settings={**then.settings, "bits": None, "head_bits": 7})
        wrong = replace(prepared.plan, then=changed)
        with pytest.raises(PlanError, match=r"--head-bits \(head_bits\): must be one of .*, not 7"):
            FOLLOW_UP.follow(prepared.with_plan(wrong), {}, None, None)


@pytest.mark.parametrize("products", [None, 7, ["measurement: of no plan"], [7]], ids=repr)
def test_the_products_of_a_measurement_are_those_of_its_plan(products: object, llama: Path, tmp_path: Path) -> None:
    with prepared_for(llama, settings(tmp_path, uniform=False)) as prepared:
        then = prepared.plan.then
        assert then is not None
        assert set(then.settings["products"]) == {product.name for product in prepared.plan.products}
        wrong = replace(prepared.plan, then=replace(then, settings={**then.settings, "products": products}))
        with pytest.raises(FormatError, match="no format of ours measures so"):
            FOLLOW_UP.follow(prepared.with_plan(wrong), {}, None, None)


@pytest.mark.long
def test_an_activation_that_is_not_finite_is_one_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_model(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 3e38
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(NonFinite) as caught:
        quantise(folder, tmp_path / "out", settings(tmp_path))
    assert "the input of model.layers.1.mlp.down_proj is NaN, infinite or too large in row 0 of the text" in str(caught.value)
    assert "Finished layers are kept" in str(caught.value)
    assert staging_folder(tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"calibration_rows": 1000}, "tokens, but 1,000 rows of 16 take 16,000"),
        ({"calibration": "no_such_file.txt"}, "no_such_file.txt"),
        ({"calibration": "text.doc"}, "not a .txt, .jsonl or .parquet file"),
        ({"calibration": "Hello, a text."}, "Save the text in a .txt file"),
        ({"calibration": "broken.jsonl"}, "line 2 is not JSON"),
        ({"calibration": "deep.jsonl"}, "line 1 is JSON nested too deeply"),
        ({"calibration": "large.jsonl"}, "line 1 would take up to"),
        ({"calibration": "latin.txt"}, "not UTF-8: byte 0xe9 at offset 3"),
    ],
)
def test_a_bad_text_is_one_error(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    quantize_settings = replace(settings(tmp_path), **change)
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text":\n')
    (tmp_path / "deep.jsonl").write_text("[" * 70 + "]" * 70)
    (tmp_path / "large.jsonl").write_text("[" + "[]," * 10_000_000 + "0]")  # 30 MB of text, 600 MB of lists
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError) as caught:
        quantise(llama, tmp_path / "out", quantize_settings)
    assert len(caught.value.problems) == 1
    assert message in str(caught.value)
    assert not staging_folder(tmp_path / "out").exists()


@pytest.mark.parametrize(("tokens", "row"), [(None, 64), (64, 64), (65, 0)])
def test_rows_have_no_more_tokens_than_the_model_has_positions(
    tokens: int | None, row: int, llama: Path, tmp_path: Path
) -> None:
    quantize_settings = settings(tmp_path, calibration_tokens=tokens)
    if not row:
        with pytest.raises(PlanError, match="a row has at most 64 tokens, not 65"):
            prepared_for(llama, quantize_settings)
        return
    with prepared_for(llama, quantize_settings) as prepared:
        [rows] = [product for product in prepared.plan.products if product.op == "text_rows"]
        assert rows.outs[0].shape[1] == row


def test_a_model_without_a_tokenizer_is_one_error(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(PlanError, match=r"a text needs the model's tokenizer\.json"):
        quantise(folder, tmp_path / "out", settings(tmp_path))


@pytest.mark.long
def test_a_head_that_is_stored_as_it_is_may_have_another_name(tmp_path: Path) -> None:
    source = zoo.save("gpt-neox", tmp_path / "m", 1, vocab_size=256)
    shutil.copy(save_model(tmp_path / "other") / "tokenizer.json", source)
    with prepared_for(source, settings(tmp_path, bits=None, uniform=False, group_size=32), "w4a16") as prepared:
        assert [product.op for product in prepared.plan.products].count("quantised_layer") == 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["w4a16", "gptq-4bit"])
def test_the_text_half_of_a_model_with_images_is_calibrated(name: str, tmp_path: Path) -> None:
    source = vision_zoo.save("gemma3", tmp_path / "m", tie_word_embeddings=True)
    (tmp_path / "text.txt").write_text(TEXT * 4)
    text: dict[str, Any] = {"calibration": str(tmp_path / "text.txt"), "calibration_tokens": 32}
    for folder, options in (("rounded", {}), ("q", text)):
        weightsmith.quantize(source, tmp_path / folder, name, group_size=32, progress=False, **options)
    plain, rounded, chosen = (
        load_file(folder / "model.safetensors") for folder in (source, tmp_path / "rounded", tmp_path / "q")
    )
    assert chosen.keys() == rounded.keys()
    beside = [tensor for tensor in plain if "language_model" not in tensor]
    assert all(torch.equal(chosen[tensor], plain[tensor]) for tensor in beside)
    codes = [tensor for tensor in chosen if tensor.endswith(("weight_packed", "qweight"))]
    assert len(codes) >= 6
    assert all(not torch.equal(chosen[tensor], rounded[tensor]) for tensor in codes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"indexer_types": ["full", "shared"]}, "rows may have 8 tokens, not 16"),
        (
            {"moe_intermediate_size": 24},
            r"experts\.0\.gate_proj\.weight: \[24, 64\] by its config.json, \[32, 64\] in its files",
        ),
    ],
)
def test_a_model_that_rows_cannot_run_through_is_refused_before_the_run(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Layers of GLM-5 may attend to the tokens that another layer chose."""
    source = zoo.save("glm-dsa", tmp_path / "m", 1, **{**TINY_DSA, **changes, "moe_intermediate_size": 32})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    shutil.copy(save_model(tmp_path / "other") / "tokenizer.json", source)
    with pytest.raises(PlanError, match=words), prepared_for(source, settings(tmp_path, bits=None, uniform=False), "gptq-4bit"):
        pass


TINY_DSA = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "index_topk": 8, "indexer_types": ["full", "full"]}


def test_a_model_with_several_states_of_a_token_is_refused_before_the_run(tmp_path: Path) -> None:
    source = zoo.save("deepseek-v4", tmp_path / "m", 1, vocab_size=256)
    shutil.copy(save_model(tmp_path / "other") / "tokenizer.json", source)
    what = "layers of 'deepseek_v4' get several states of each token"
    with pytest.raises(PlanError, match=what), prepared_for(source, settings(tmp_path, bits=None, uniform=False), "gptq-4bit"):
        pass


def test_a_text_that_changed_after_planning_is_an_error(llama: Path, tmp_path: Path) -> None:
    quantize_settings = settings(tmp_path)
    with prepared_for(llama, quantize_settings) as prepared:
        Path(str(quantize_settings.calibration)).write_text("changed " * 100)
        with pytest.raises(WeightsmithError, match="the text has changed"):
            execute(prepared, tmp_path / "out", RunOptions(card=False))


# ---- memory


PEAKS = """
import sys
from pathlib import Path
import weightsmith
from weightsmith._outputs import staging
plain = staging.Staging.keep
def keep(self, product, arrays):
    if product.name.startswith("layer "):
        print("peak", int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10)  # KiB
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    return plain(self, product, arrays)
staging.Staging.keep = keep
given = {"calibration": "built-in", "calibration_rows": 4, "calibration_tokens": 64}
weightsmith.quantize(*sys.argv[1:3], "w4a16", threads=2, progress=False, **given)
"""


@pytest.mark.process
@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer takes 13 MB as float32, and its Hessians 11. A process of its own has no memory that other tests left behind."""
    sizes = {**TINY, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
    monkeypatch.setitem(CONFIGS, "deep", lambda: transformers.LlamaConfig(**sizes))
    ran = run_process(save_model(tmp_path / "m", "deep"), tmp_path / "out", code=PEAKS)
    assert ran.code == 0, ran.err
    peaks = [int(line.removeprefix("peak ")) for line in ran.out.splitlines() if line.startswith("peak ")]
    assert len(peaks) == 6
    assert max(peaks[3:]) < max(peaks[:3]) + 32, peaks
