"""Plain weights whose config.json says that they are quantised: refused with the way to go on, and read if asked to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.mini import write_checkpoint
from tests.plan_help import config, decoder, model
from weightsmith._base.errors import PlanError
from weightsmith._plans import plan_from_json

ENTRIES: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
    "quanto": {"quant_method": "quanto", "weights": "int8"},
    "mlx": {"bits": 4, "group_size": 64},
}
IGNORED = {"ignore_quantization_config": True, "progress": False}


@pytest.fixture
def plain(tmp_path: Path) -> str:
    return model(tmp_path / "plain", seed=1)


def stale(folder: Path, entry: dict[str, Any], *, inside: str = "", key: str = "quantization_config") -> str:
    """The same weights as `plain`, with an entry in config.json, or in a part of it."""
    path = Path(model(folder, seed=1)) / "config.json"
    settings = json.loads(path.read_text())
    settings |= {inside: {key: entry}} if inside else {key: entry}
    path.write_text(json.dumps(settings))
    return str(folder)


def linear(*models: str) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 0.5}} for m in models]}


def shards(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]


def entries(folder: Path) -> list[str]:
    """What config.json of an output says of quantisation."""
    return [line for line in (folder / "config.json").read_text().splitlines() if "quant" in line or '"bits"' in line]


@pytest.mark.parametrize("method", ENTRIES)
def test_without_the_option_the_error_says_how_to_go_on(method: str, tmp_path: Path) -> None:
    folder = stale(tmp_path / "stale", ENTRIES[method])
    with pytest.raises(PlanError, match=r"weights of .*stale are plain, and config\.json says that") as refused:
        weightsmith.merge(linear(folder, folder), tmp_path / "out", progress=False)
    text = " ".join(str(refused.value).split())
    assert "(quantization_config in config.json)" in text
    assert "--ignore-quantization-config (ignore_quantization_config=True)" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inside", "key"), [("", "quantization_config"), ("text_config", "quantization_config"), ("", "compression_config")]
)
@pytest.mark.parametrize("method", ENTRIES)
def test_a_merge_with_the_option_is_that_of_the_plain_models(
    method: str, inside: str, key: str, plain: str, tmp_path: Path
) -> None:
    other = model(tmp_path / "other", seed=2)
    folder = stale(tmp_path / "stale", ENTRIES[method], inside=inside, key=key)
    merged = weightsmith.merge(linear(folder, other), tmp_path / "out", **IGNORED)
    weightsmith.merge(linear(plain, other), tmp_path / "expected", progress=False)
    assert shards(tmp_path / "out") == shards(tmp_path / "expected")
    assert not entries(tmp_path / "out")
    (note,) = (warning for warning in merged.warnings if "its weights are plain" in warning.what)
    assert note.where == folder
    weightsmith.open_checkpoint(tmp_path / "out").close()


@pytest.mark.parametrize("command", ["dequantize", "quantize"])
def test_copies_have_no_entry_but_their_own(command: str, plain: str, tmp_path: Path) -> None:
    outputs = []
    for folder, options in ((plain, {"progress": False}), (stale(tmp_path / "stale", ENTRIES["gptq"]), IGNORED)):
        out = tmp_path / f"{Path(folder).name}-{command}"
        if command == "dequantize":
            weightsmith.dequantize(folder, out, **options)
        else:
            weightsmith.quantize(folder, out, "fp8-dynamic", **options)
        outputs.append((shards(out), json.loads((out / "config.json").read_text())))
    assert outputs[0] == outputs[1]


def test_a_plan_that_was_made_with_the_option_runs_without_it(tmp_path: Path) -> None:
    folder = stale(tmp_path / "stale", ENTRIES["bitsandbytes"])
    recipe = {"merge_method": "passthrough", "models": [{"model": folder}]}
    plan = weightsmith.plan(recipe, ignore_quantization_config=True)
    again = plan_from_json(json.loads(json.dumps(plan.to_json())))
    weightsmith.run(again, tmp_path / "out", progress=False)
    assert not entries(tmp_path / "out")


def test_looks_need_no_option_and_say_what_they_ignore(plain: str, tmp_path: Path) -> None:
    folder = stale(tmp_path / "stale", ENTRIES["fp8"])
    assert not weightsmith.diff(plain, folder, progress=False).moved
    (note,) = weightsmith.inspect(folder).notes
    assert "its weights are plain, so the quantisation that config.json names is ignored: 'fp8'" in note


@pytest.mark.parametrize(
    "tensors",
    [
        {"model.layers.0.mlp.up_proj.weight": np.ones((8, 8), np.uint8)},
        {"model.layers.0.mlp.up_proj.codebooks": np.ones((8, 8), np.float32)},
        {"model.layers.0.mlp.up_proj.qweight": np.ones((8, 8), np.int32)},
        {"model.layers.0.mlp.up_proj.absmax": np.ones(8, np.float32)},
    ],
    ids=lambda tensors: next(iter(tensors)),
)
def test_the_option_does_not_make_numbers_of_codes(tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    settings = {**config(), "quantization_config": ENTRIES["quanto"]}
    folder = write_checkpoint(tmp_path / "codes", {**decoder(), **tensors}, settings)
    with pytest.raises(PlanError, match=r"is quantised \('quanto'"):
        weightsmith.dequantize(folder, tmp_path / "out", **IGNORED)
