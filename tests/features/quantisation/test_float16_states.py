"""Hidden states that float16 cannot hold, though all weights fit: EXL2, EXL3, GPTQ and AWQ say so by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.calibration_help import quantise, save_model, settings
from weightsmith._base.errors import Unsupported
from weightsmith._features.quantisation.calibration import activations
from weightsmith._plans import Product

pytestmark = pytest.mark.slow

FORMATS = {
    "exl3": {"bits": 3.0, "uniform": False},
    "exl2": {"bits": 4.0, "uniform": True},
    "gptq-4bit": {"bits": None, "uniform": False},
    "awq-4bit": {"bits": None, "uniform": False},
}


def large_model(folder: Path) -> Path:
    """A model whose states leave float16 in layer 1."""
    model = save_model(folder, "llama-128")
    path = model / "model.safetensors"
    tensors = load_file(path)
    for name, factor in (("down_proj", 3e5), ("up_proj", 100)):
        tensors[f"model.layers.1.mlp.{name}.weight"] *= factor
    save_file(tensors, path, metadata={"format": "pt"})
    assert max(float(tensor.abs().max()) for tensor in tensors.values()) < activations.LARGEST
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        hidden = loaded(torch.arange(64)[None], output_hidden_states=True).hidden_states
    assert float(hidden[1].abs().max()) < activations.LARGEST
    return model


@pytest.mark.matrix("gptq-4bit")
@pytest.mark.parametrize("name", FORMATS)
def test_a_warning_names_the_layers(name: str, tmp_path: Path) -> None:
    model, quantize_settings = large_model(tmp_path / "m"), settings(tmp_path, **FORMATS[name])
    quantised = quantise(model, tmp_path / "out", quantize_settings, name=name)
    [warning] = [str(warning) for warning in quantised.warnings if "float16" in str(warning)]
    assert "hidden states leave the range of float16, which holds 65,504: " in warning
    assert "behind layer 1" in warning
    assert "behind layer 0" not in warning
    assert ("--dtype bfloat16" in warning) == name.startswith(("gptq", "awq"))
    [report] = quantised.reports.values()
    assert "## Range of the hidden states" in report.section()
    assert "| 1 | " in report.section()


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["exl3", "w4a16"])
def test_nothing_is_said_of_other_models_and_formats(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "m", "llama-128") if name == "exl3" else large_model(tmp_path / "m")
    quantize_settings = settings(tmp_path, **FORMATS.get(name, FORMATS["gptq-4bit"]))
    quantised = quantise(model, tmp_path / "out", quantize_settings, name=name)
    assert not any("float16" in str(warning) for warning in quantised.warnings)
    assert not any(report.section() for report in quantised.reports.values())


@pytest.mark.long
def test_a_program_that_computes_in_float16_is_an_error(tmp_path: Path) -> None:
    model, quantize_settings = large_model(tmp_path / "m"), settings(tmp_path, **FORMATS["exl3"], engine="exllamav3")
    with pytest.raises(Unsupported, match=r"layer 1, .*hidden states of up to .* leave the layer, and exllamav3") as caught:
        quantise(model, tmp_path / "out", quantize_settings, name="exl3")
    assert "Nothing was published" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_report_counts_layers() -> None:
    report = activations.LargestStates((0, 1), np.float32([1, 7e5]), fixed=True)
    assert report.warnings("")[0].what.endswith("7e+05 behind layer 1")
    [table] = report.blocks()
    assert table.rows == (("0", 1.0), ("1", 7e5))
    none = activations.LargestStates((0,), np.float32([activations.LARGEST]), fixed=True)
    assert (none.warnings(""), none.blocks(), none.section(), none.files()) == ([], [], "", {})


@pytest.mark.parametrize("changes", [{"layers": [0, 1]}, {"layers": ["0"]}, {"fixed": 1}, {"more": 1}, {"layers": 3}])
def test_settings_of_a_plan_from_elsewhere_are_checked(changes: dict[str, Any]) -> None:
    from weightsmith._base.tensors import DTYPES, TensorSpec

    out = (TensorSpec("largest states", DTYPES["F32"], (1,)),)
    good, check = {"layers": [0], "fixed": True}, activations.LARGEST_STATES.check
    assert check(Product("n", "largest_states", out, good, (), (), ("a",))) == ""
    assert check(Product("n", "largest_states", out, json.loads(json.dumps({**good, **changes})), (), (), ("a",)))
