"""The full measurement: the error of a block's output, held against transformers' own model with the same quantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import weightsmith
from tests.calibration_help import few_options, prepared_for, quantise, save_model, settings
from weightsmith._activations import running
from weightsmith._activations.rows import rows_of, text_source
from weightsmith._base.errors import FormatError, ParameterError, PlanError
from weightsmith._execution.execute import execute
from weightsmith._execution.options import RunOptions
from weightsmith._features.quantisation.formats import FOLLOW_UP
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._models.formats import find_encoding
from weightsmith._models.formats.exl2 import model as exl2_model
from weightsmith._models.formats.hessians import prepare
from weightsmith._plans import plan_from_json

__all__ = ["few_options"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_options")]


def full(folder: Path, **options: Any) -> QuantizeSettings:
    return settings(folder, **{"uniform": False, "measure": "full"} | options)


def states(model: Any, rows: torch.Tensor, module: str) -> torch.Tensor:
    """What enters a module: [rows, tokens, features]."""
    entering: list[torch.Tensor] = []

    def note(_module: Any, args: Any, kwargs: Any) -> None:
        entering.append(args[0] if args else kwargs["hidden_states"])

    hook = model.get_submodule(module).register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(rows)
    hook.remove()
    return entering[0]


@pytest.mark.parametrize(("name", "norm"), [("llama", "post_attention_layernorm"), ("gemma3", "pre_feedforward_layernorm")])
def test_errors_are_those_of_transformers_own_blocks(name: str, norm: str, tmp_path: Path) -> None:
    folder, quantize_settings = save_model(tmp_path / "m", name), full(tmp_path)
    out = quantise(folder, tmp_path / "out", quantize_settings).out
    measured = json.loads((out / "measurement.json").read_text())["measurement"]
    prefix = next(key for key in measured if key.endswith("layers.0.self_attn")).removesuffix("layers.0.self_attn")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    calibration = text_source(
        quantize_settings.calibration, quantize_settings.calibration_rows, quantize_settings.calibration_tokens, 0
    )
    rows = torch.from_numpy(rows_of(calibration, folder, 256, model.config.bos_token_id)).long()
    layer = model.model.layers[0]
    tried = {
        "self_attn": (exl2_model.ATTENTION, {role: f"self_attn.{role}_proj" for role in "qkvo"}, f"model.layers.0.{norm}"),
        "mlp": (exl2_model.MLP, {role: f"mlp.{role}_proj" for role in ("gate", "up", "down")}, "model.layers.1"),
    }
    for key, (options, modules, after) in tried.items():
        inputs = {m: states(model, rows, f"model.layers.0.{m}").flatten(0, 1) for m in modules.values()}
        plain = {m: layer.get_submodule(m).weight.detach().clone() for m in modules.values()}
        leaving = states(model, rows, after)
        for number in range(len(options)):
            for role, m in modules.items():
                encoding = f"exl2 {options[number][role]}"
                kind = find_encoding(encoding)
                arrays = kind.quantise(plain[m].numpy(), prepare((inputs[m].T @ inputs[m]).numpy()), 1)
                layer.get_submodule(m).weight.data = torch.from_numpy(kind.dequantise(arrays, tuple(plain[m].shape)))
            changed = states(model, rows, after)
            errors = [(float((b - a).norm() / a.norm())) for a, b in zip(leaving, changed, strict=True)]
            accuracy = measured[f"{prefix}layers.0.{key}"][number]["accuracy"]
            assert 1 - accuracy == pytest.approx(np.mean(errors), rel=0.01), (key, number)
            for m, weight in plain.items():
                layer.get_submodule(m).weight.data = weight


@pytest.mark.matrix
def test_it_is_the_same_for_any_threads_and_for_experts(tmp_path: Path) -> None:
    folder, quantize_settings = save_model(tmp_path / "m", "mixtral"), full(tmp_path)
    one, two = (quantise(folder, tmp_path / f"{threads}", quantize_settings, threads=threads).out for threads in (1, 2))
    assert (one / "measurement.json").read_bytes() == (two / "measurement.json").read_bytes()
    data = json.loads((one / "measurement.json").read_text())["measurement"]
    for key in ("model.layers.0.self_attn", "model.layers.1.block_sparse_moe"):
        accuracies = [option["accuracy"] for option in data[key]]
        assert accuracies[0] < accuracies[-1] - 0.001, key


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda options: options[0].update({"model.norm.weight": "exl2 4/g32"}), "are for other weights"),
        (lambda options: options.clear(), "are for other weights"),
        (lambda options: options[2].update(dict.fromkeys(options[2], "int8")), "cannot calibrate its encoding"),
        (lambda options: options[2].update(dict.fromkeys(options[2], "exl2 x")), "has no setting 'x'"),
        (lambda options: options.append(options[0]), "its arrays are not those"),
        (lambda options: [one.update({"model.norm.weight": "exl2 4/g32"}) for one in options], "it has no step for a weight"),
    ],
)
def test_a_plan_from_elsewhere_is_checked(change: Any, words: str, tmp_path: Path) -> None:
    with prepared_for(save_model(tmp_path / "m"), full(tmp_path)) as prepared:
        plan = json.loads(json.dumps(prepared.plan.to_json()))
    product = next(product for product in plan["products"] if product["op"] == "measured_blocks")
    change(product["settings"]["blocks"]["model.layers.0.self_attn"])
    with pytest.raises(PlanError, match=words):
        weightsmith.run(plan_from_json(plan), tmp_path / "out", progress=False)


def test_what_it_cannot_do_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "m")
    with prepared_for(folder, full(tmp_path)) as prepared:
        zeros = {p.name: [np.zeros((2, 2))] for p in prepared.plan.products if p.op == "measured_blocks"}
        with pytest.raises(FormatError, match="it does not measure every weight"):
            FOLLOW_UP.follow(prepared, zeros, None, None)
        monkeypatch.setattr(running, "budget", lambda context: 30_000)
        with pytest.raises(ParameterError, match=r"the Hessians of layer 0 take .* and the limit is") as caught:
            execute(prepared, tmp_path / "out", RunOptions())
    assert "--measure proxy" in str(caught.value)
