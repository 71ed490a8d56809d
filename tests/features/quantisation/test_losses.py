"""What settings cost, held against transformers' own models: gradients, losses in nats, and which blocks get the bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import weightsmith
from tests.calibration_help import changed, few_options, prepared_for, quantise, rows_for, save_model, settings
from weightsmith._base.errors import PlanError
from weightsmith._engine.products import find_kind
from weightsmith._execution.execute import execute
from weightsmith._execution.options import RunOptions
from weightsmith._features.quantisation.calibration import costs
from weightsmith._models.formats.exl2.model import ATTENTION, MLP
from weightsmith._plans import plan_from_json

__all__ = ["few_options"]

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_losses_are_about_the_divergences_of_models_with_one_quantised_block(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    changed(folder, o_proj=8, down_proj=8, lm_head=20, embed_tokens=20)
    quantize_settings = settings(tmp_path, uniform=False, calibration_rows=12)
    data = json.loads((quantise(folder, tmp_path / "out", quantize_settings).out / "measurement.json").read_text())[
        "measurement"
    ]
    ids = rows_for(quantize_settings, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        plain = model(ids).logits.log_softmax(-1)
    ratios = []
    for key, options in data.items():
        for number in (4, 9) if options else ():
            again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            chosen = (MLP if key.endswith("mlp") else ATTENTION)[number]
            for role, params in chosen.items():
                _quantise_in_place(again, f"{key}.{role}_proj", str(params), ids)
            with torch.inference_mode():
                logs = again(ids).logits.log_softmax(-1)
            divergence = float((plain.exp() * (plain - logs)).sum(-1).mean())
            ratios.append((1 - options[number]["accuracy"]) ** 2 / divergence)
    assert len(ratios) == 8
    assert 0.6 < np.exp(np.mean(np.log(ratios))) < 1.6, ratios
    assert 0.4 < min(ratios) < max(ratios) < 2.5, ratios


def _quantise_in_place(model: Any, module: str, setting: str, ids: torch.Tensor) -> None:
    from weightsmith._models.formats import find_encoding
    from weightsmith._models.formats.hessians import prepare

    seen: list[torch.Tensor] = []
    linear = model.get_submodule(module)
    hook = linear.register_forward_pre_hook(lambda _module, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        model(ids)
        hook.remove()
        weight = linear.weight.numpy()
        encoding = find_encoding(f"exl2 {setting}")
        arrays = encoding.quantise(weight, prepare((seen[0].T @ seen[0]).numpy()), 1)
        linear.weight.copy_(torch.from_numpy(encoding.dequantise(arrays, weight.shape)))


@pytest.mark.long
def test_a_block_that_predictions_do_not_depend_on_gets_the_fewest_bits(tmp_path: Path) -> None:
    """However large its part of the residual stream is: the head does not look at what it writes to."""
    folder = save_model(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][:, 32:] = 0
    tensors["model.layers.1.mlp.down_proj.weight"][:32] = 0
    tensors["model.layers.1.self_attn.o_proj.weight"][32:] = 0
    tensors["model.embed_tokens.weight"] *= 20
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    merged = quantise(folder, tmp_path / "out", settings(tmp_path, uniform=False, bits=4.5))
    data = json.loads((merged.out / "measurement.json").read_text())["measurement"]
    loss = {key: (1 - options[4]["accuracy"]) ** 2 for key, options in data.items() if options}
    assert min(loss, key=lambda key: loss[key]) == "model.layers.1.mlp"
    assert loss["model.layers.1.mlp"] < 0.01 * loss["model.layers.1.self_attn"]
    layers = [product.settings["weights"] for product in merged.plan.products if product.op == "quantised_layer"]
    chosen = {name: encoding for weights in layers for name, encoding in weights.items()}
    assert chosen["model.layers.1.mlp.up_proj.weight"] == f"exl2 {MLP[0]['up']}"
    assert chosen["model.layers.1.self_attn.q_proj.weight"] in {f"exl2 {option['q']}" for option in ATTENTION[6:]}


@pytest.mark.matrix
@pytest.mark.usefixtures("few_options")
def test_it_is_the_same_for_any_threads_and_for_experts(tmp_path: Path) -> None:
    folder, quantize_settings = save_model(tmp_path / "m", "mixtral"), settings(tmp_path, uniform=False)
    one, two = (quantise(folder, tmp_path / f"{threads}", quantize_settings, threads=threads).out for threads in (1, 3))
    assert (one / "measurement.json").read_bytes() == (two / "measurement.json").read_bytes()
    data = json.loads((one / "measurement.json").read_text())["measurement"]
    for key in ("model.layers.0.self_attn", "model.layers.1.block_sparse_moe"):
        errors = [1 - option["accuracy"] for option in data[key]]
        assert errors[0] > 10 * errors[-1], key


@pytest.mark.long
@pytest.mark.usefixtures("few_options")
def test_rows_of_a_measurement_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their states are stored for all layers at once. The calibration that follows uses all rows."""
    monkeypatch.setattr("weightsmith._features.quantisation.exl2.MEASURED_ROWS", 2)
    with prepared_for(save_model(tmp_path / "m"), settings(tmp_path, uniform=False)) as prepared:
        assert {out.shape for p in prepared.plan.products for out in p.outs if "states" in out.name} == {(2, 16, 64)}
        merged = execute(prepared, tmp_path / "out", RunOptions(card=False))
    assert merged.plan.products[1].outs[0].shape == (6, 16, 64)


def test_features_are_drawn_by_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    squares = rng.random(1000) ** 8
    values = squares**0.5 + rng.random(1000)
    some, shares = costs.drawn(squares)
    assert len(some) <= costs.FEATURES
    assert shares.sum() == pytest.approx(1)
    assert float(shares @ values[some]) == pytest.approx(float(squares @ values / squares.sum()), rel=0.1)
    assert costs.drawn(np.zeros(4))[1].tolist() == [0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda work: work.update(layer=3), "there is no layer 3"),
        (lambda work: work.update(seed=-1), "its seed is negative"),
        (lambda work: work.update(weights=["model.norm.weight"]), "it has no step for a weight"),
        (lambda work: work["weights"].pop(), "its arrays are not those of its weights"),
        (lambda work: work.update(gradients="measurement: states 1"), "it does not need what its settings name"),
        (lambda work: work.update(layer=2), "it has no step for the head, or other arrays"),
    ],
)
def test_a_plan_from_elsewhere_is_checked(change: Any, words: str, tmp_path: Path) -> None:
    with prepared_for(save_model(tmp_path / "m"), settings(tmp_path, uniform=False)) as prepared:
        plan = json.loads(json.dumps(prepared.plan.to_json()))
        for product in prepared.plan.products:
            assert find_kind(product.op).check(product) == ""
    change(next(product["settings"] for product in plan["products"] if product["name"] == "measurement: gradients 0"))
    with pytest.raises(PlanError, match=words):
        weightsmith.run(plan_from_json(plan), tmp_path / "out", progress=False)
