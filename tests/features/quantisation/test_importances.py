"""Importance matrices of a calibration text: those of transformers' forward pass, and of a file with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.calibration_help import quantise, save_model, settings
from weightsmith._activations import running
from weightsmith._activations.rows import rows_of, text_source
from weightsmith._activations.work import LayerWork, StatisticWork
from weightsmith._base.errors import FormatError, PlanError
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._models.formats.gguf.imatrix import imatrix_bytes, read_imatrix
from weightsmith._outputs.area import staging_folder
from weightsmith._outputs.staging import Staging
from weightsmith.abc.product import ProductContext

pytestmark = pytest.mark.slow


def given_for(folder: Path, **options: Any) -> QuantizeSettings:
    return settings(folder, bits=None, uniform=False, **options)


def inputs_of(model: Path, quantize_settings: QuantizeSettings, modules: list[str]) -> dict[str, torch.Tensor]:
    """What enters these modules of transformers' own model on the calibration text: float64 [tokens, features]."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    calibration = text_source(
        quantize_settings.calibration, quantize_settings.calibration_rows, quantize_settings.calibration_tokens, 0
    )
    rows = torch.from_numpy(rows_of(calibration, model, 256, loaded.config.bos_token_id)).long()
    inputs: dict[str, torch.Tensor] = {}
    for name in modules:
        note = lambda _module, args, name=name: inputs.update({name: args[0].double().reshape(-1, args[0].shape[-1])})  # noqa: E731
        loaded.get_submodule(name).register_forward_pre_hook(note)
    with torch.no_grad():
        loaded(rows)
    return inputs


def test_importances_are_mean_squares_of_what_enters_a_layer(tmp_path: Path) -> None:
    model, quantize_settings = save_model(tmp_path / "m"), given_for(tmp_path)
    out = quantise(model, tmp_path / "out", quantize_settings, name="gguf-q4_k_m").out
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    inputs = inputs_of(model, quantize_settings, [f"model.layers.{i}.{here}" for i in range(2) for here in names.values()])
    importances = read_imatrix(out / "imatrix.dat")
    assert len(importances) == 2 * 7  # neither the embedding nor the head
    for i in range(2):
        for there, here in names.items():
            expected = inputs[f"model.layers.{i}.{here}"].square().mean(0).numpy()
            np.testing.assert_allclose(importances[f"blk.{i}.{there}.weight"], expected, rtol=1e-4)
        assert (importances[f"blk.{i}.attn_v.weight"] == importances[f"blk.{i}.attn_q.weight"]).all()


@pytest.mark.long
def test_each_expert_has_importances_of_the_tokens_that_reach_it(tmp_path: Path) -> None:
    model, quantize_settings = save_model(tmp_path / "m", "mixtral"), given_for(tmp_path)
    out = quantise(model, tmp_path / "out", quantize_settings, name="gguf-q4_k_m").out
    owner = "model.layers.0.mlp"
    entering = inputs_of(model, quantize_settings, [owner])[owner]
    gate = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).get_submodule(f"{owner}.gate").weight
    chosen = (entering @ gate.T).topk(2, dim=1).indices
    importances = read_imatrix(out / "imatrix.dat")["blk.0.ffn_up_exps.weight"].reshape(4, -1)
    for expert in range(4):
        tokens = entering[(chosen == expert).any(1)]
        expected = tokens.square().mean(0).numpy() if len(tokens) else np.ones(64)
        np.testing.assert_allclose(importances[expert], expected, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral"])
def test_a_calibration_has_the_bytes_of_its_importance_matrix_read_from_a_file(name: str, tmp_path: Path) -> None:
    model, quantize_settings = save_model(tmp_path / "m", name), given_for(tmp_path)
    measured = quantise(model, tmp_path / "measured", quantize_settings, name="gguf-iq4_nl", threads=1).out
    read = QuantizeSettings(imatrix=str(measured / "imatrix.dat"))
    weights = (measured / "model.gguf").read_bytes()
    assert (quantise(model, tmp_path / "read", read, name="gguf-iq4_nl").out / "model.gguf").read_bytes() == weights
    assert (
        quantise(model, tmp_path / "plain", QuantizeSettings(), name="gguf-iq4_nl").out / "model.gguf"
    ).read_bytes() != weights


@pytest.mark.long
def test_an_interrupted_measurement_is_resumed_for_any_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, quantize_settings = save_model(tmp_path / "m"), given_for(tmp_path)
    keep = Staging.keep

    def stop(staging: Staging, product: Any, arrays: Any) -> Any:
        if product.name == "measurement: moments 1":
            raise KeyboardInterrupt
        return keep(staging, product, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "keep", stop)
        with pytest.raises(KeyboardInterrupt):
            quantise(model, tmp_path / "a", quantize_settings, name="gguf-q4_0")
    layers: list[int] = []
    run_layer = running.layer_rows

    def noted(context: ProductContext, work: LayerWork, *args: Any, **options: Any) -> Any:
        if isinstance(work, StatisticWork):
            layers.append(work.layer)
        return run_layer(context, work, *args, **options)

    monkeypatch.setattr(running, "layer_rows", noted)
    resumed = quantise(model, tmp_path / "a", quantize_settings, name="gguf-iq4_nl").out
    assert layers == [1]
    monkeypatch.undo()
    whole = quantise(model, tmp_path / "b", quantize_settings, name="gguf-iq4_nl", threads=1).out
    for file in ("model.gguf", "imatrix.dat"):
        assert (resumed / file).read_bytes() == (whole / file).read_bytes()
    assert not staging_folder(tmp_path / "a.measurement").exists()


@pytest.mark.long
def test_mixtures_that_require_importances_take_them_from_a_text(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m")
    with pytest.raises(PlanError, match="--calibration built-in"):
        quantise(wide(tmp_path), tmp_path / "out", QuantizeSettings(), name="gguf-iq2_xxs")
    assert (quantise(wide(tmp_path), tmp_path / "out", given_for(tmp_path), name="gguf-iq2_xxs").out / "model.gguf").exists()
    with pytest.raises(PlanError, match="importances come from a file or from a calibration text, not both"):
        quantise(model, tmp_path / "b", given_for(tmp_path, imatrix="x"), name="gguf-q4_0")
    with pytest.raises(PlanError, match="not a setting of"):
        quantise(model, tmp_path / "b", given_for(tmp_path), name="gguf-q8_0")


def wide(folder: Path) -> Path:
    """A model with whole blocks of 256."""
    if not (folder / "wide").exists():
        save_model(folder / "wide")
        sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder / "wide")
    return folder / "wide"


def test_a_written_importance_matrix_is_read_again(tmp_path: Path) -> None:
    values = {"blk.0.ffn_up.weight": np.float32([0.5, 2]), "blk.0.ffn_down_exps.weight": np.float32([1, 2, 3, 4])}
    (tmp_path / "i.dat").write_bytes(imatrix_bytes(values))
    importances = read_imatrix(tmp_path / "i.dat")
    assert {name: array.tolist() for name, array in importances.items()} == {
        name: array.tolist() for name, array in values.items()
    }
    (tmp_path / "i.dat").write_bytes(imatrix_bytes(values)[:-2])
    with pytest.raises(FormatError):
        read_imatrix(tmp_path / "i.dat")
