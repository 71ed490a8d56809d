"""Weights in several encodings of compressed-tensors: config.json as its library and vLLM read it, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.calibration_help import save_model
from tests.models.formats.compressed_tensors.test_reading import write_model, write_transformer
from weightsmith._base.errors import PlanError

TYPES = ("self_attn=fp8-dynamic", r"layers\.1\.mlp\.down_proj=plain", r"layers\.1\.self_attn=mxfp8")


def quantise(source: Path, out: Path, name: str, *types: str, **options: Any) -> Any:
    settings = {"progress": False, "fsync": False, "card": False, **options}
    return weightsmith.quantize(source, out, name, tensor_types=types, **settings)


def entry(folder: Path) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return stored


def read(folder: Path) -> dict[str, np.ndarray]:
    with weightsmith.open_checkpoint(folder) as opened:
        return {name: opened.read(name) for name in opened.specs}


def groups_of(stored: dict[str, Any], module: str) -> list[str]:
    """The formats of the groups that a module is a target of, as compressed-tensors and vLLM match: from the beginning."""
    return [
        group["format"]
        for group in stored["config_groups"].values()
        for target in group["targets"]
        if (re.match(target[3:], module) if target.startswith("re:") else target == module)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixed") / "m")


def test_each_weight_is_stored_as_its_type_says(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "q", "nvfp4a16", *TYPES)
    stored = entry(tmp_path / "q")
    assert stored["format"] == "mixed-precision"
    expected = {
        "model.layers.0.self_attn.q_proj": ["float-quantized"],
        "model.layers.1.self_attn.q_proj": ["mxfp8-quantized"],
        "model.layers.0.mlp.up_proj": ["nvfp4-pack-quantized"],
        "model.layers.1.mlp.up_proj": ["nvfp4-pack-quantized"],
    }
    assert {module: groups_of(stored, module) for module in expected} == expected
    assert groups_of(stored, "language_model.model.layers.0.self_attn.q_proj") == ["float-quantized"]  # another prefix
    assert "model.layers.1.mlp.down_proj" in stored["ignore"]
    assert "Linear" not in [target for group in stored["config_groups"].values() for target in group["targets"]]


def test_a_mixture_is_read_as_its_parts_are(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "q", "nvfp4a16", *TYPES)
    whole = {"plain": read(model)}
    for name in ("nvfp4a16", "fp8-dynamic", "mxfp8"):
        quantise(model, tmp_path / name, name)
        whole[name] = read(tmp_path / name)
    for tensor, values in read(tmp_path / "q").items():
        kind = "mxfp8" if "1.self_attn" in tensor else "fp8-dynamic" if "self_attn" in tensor else "nvfp4a16"
        kind = "plain" if "layers.1.mlp.down" in tensor else kind
        np.testing.assert_array_equal(values, whole[kind][tensor], err_msg=tensor)


def test_the_last_type_that_fits_wins_and_one_type_for_all_is_no_mixture(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "q", "w4a16", "self_attn=int8", ".=fp8-dynamic")
    quantise(model, tmp_path / "whole", "fp8-dynamic")
    assert entry(tmp_path / "q") == entry(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "types", "message"),
    [
        ("fp8-dynamic", ["self_attn"], "'self_attn' is not REGEX=FORMAT"),
        ("fp8-dynamic", ["self_attn=gptq-4bit"], "'gptq-4bit' cannot be mixed with formats of compressed-tensors"),
        ("fp8-dynamic", ["self_attn=nvfp4a61"], "(did you mean"),
        ("fp8-dynamic", ["(=int8"], "is not a regular expression"),
        ("fp8-dynamic", ["norm=int8"], "no weight that is quantised has a name that matches norm"),
        ("fp8-static", ["mlp=nvfp4"], "fp8-static and nvfp4 need different scales of activations"),
        ("fp8-dynamic", ["self_attn=fp8-static", "mlp=nvfp4"], "nvfp4 and fp8-static need different scales"),
        ("gptq-4bit", ["mlp=gptq-8bit"], "not a setting of gptq-4bit"),
    ],
)
def test_types_that_cannot_be_are_refused(name: str, types: list[str], message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(weightsmith.WeightsmithError) as caught:
        quantise(model, tmp_path / "q", name, *types)
    assert message in str(caught.value)
    assert not (tmp_path / "q").exists()


def test_parts_of_a_joined_matrix_in_two_formats_are_a_warning_or_an_error(model: Path, tmp_path: Path) -> None:
    types = ("q_proj=fp8-dynamic", "up_proj=plain")
    done = quantise(model, tmp_path / "q", "w4a16", *types)
    (warning,) = [warning for warning in done.warnings if "join weights" in warning.what]
    assert "gate_proj w4a16, up_proj plain (4 layers)" in warning.what
    with pytest.raises(PlanError, match="join weights"):
        quantise(model, tmp_path / "v", "w4a16", *types, engine="vllm")
    with pytest.raises(PlanError, match="does not load mxfp4"):
        quantise(model, tmp_path / "s", "fp8-dynamic", "self_attn=mxfp4", engine="sglang")


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "types"), [("Llama", TYPES), ("Qwen3Moe", (r"experts=fp8-dynamic",))])
def test_transformers_loads_the_weights_that_we_read(kind: str, types: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import torch
    import transformers

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96} if kind == "Qwen3Moe" else {}
    source = write_transformer(tmp_path / "m", kind, num_hidden_layers=2, **experts)
    quantise(source, tmp_path / "q", "nvfp4a16", *types)
    # dequantize=True of transformers 5.24 takes one group for all layers that are no experts; otherwise the library decides
    options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if experts else {}
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", dtype=torch.bfloat16, output_loading_info=True, **options
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    weightsmith.dequantize(tmp_path / "q", tmp_path / "plain", progress=False, fsync=False)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    with torch.no_grad():
        loaded(torch.arange(8)[None])
    for tensor, values in ours.state_dict().items():
        assert torch.equal(loaded.state_dict()[tensor], values), tensor


@pytest.mark.slow
def test_a_text_calibrates_integers_and_gives_scales_of_activations(tmp_path: Path) -> None:
    source = save_model(tmp_path / "m")
    text = {"calibration": "built-in", "calibration_rows": 2, "calibration_tokens": 32}
    done = quantise(source, tmp_path / "q", "w4a16", "self_attn=fp8-static", **text)
    assert any("are rounded to nearest" in warning.what for warning in done.warnings)
    rounded, calibrated = read(tmp_path / "q"), tmp_path / "calibrated"
    with weightsmith.open_checkpoint(tmp_path / "q") as opened:
        assert not any(name.endswith("input_scale") for name in opened.specs)
    done = quantise(source, calibrated, "w4a16", "self_attn=fp8-dynamic", "layers.0.mlp=plain", **text)
    assert not any("are rounded to nearest" in warning.what for warning in done.warnings)
    chosen = read(calibrated)
    up = "model.layers.1.mlp.up_proj.weight"
    assert not np.array_equal(chosen[up], rounded[up])
