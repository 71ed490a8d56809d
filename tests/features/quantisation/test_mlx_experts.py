"""Experts of mixtures in MLX's formats: some models of mlx-lm load them stacked alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import weightsmith
from tests.mini import write_checkpoint
from weightsmith._base.errors import WeightsmithError

EXPERTS, HIDDEN, INNER = 3, 64, 32


def model(folder: Path, model_type: str) -> Path:
    """Two layers in float16."""
    random = np.random.default_rng(0)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    tensors = {"model.embed_tokens.weight": (32, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (32, HIDDEN)}
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] = (HIDDEN, HIDDEN)
        tensors[f"model.layers.{layer}.mlp.moe_statics.e_score_correction_bias"] = (1, EXPERTS)  # without it, ERNIE is refused
        for expert in range(EXPERTS):
            for name, shape in shapes.items():
                tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"] = shape
    values = {name: random.standard_normal(shape).astype(np.float16) for name, shape in tensors.items()}
    config = {
        "model_type": model_type,
        "architectures": ["X"],
        "num_hidden_layers": 2,
        "num_experts": EXPERTS,
        "hidden_size": HIDDEN,
    }
    return write_checkpoint(folder, values, config)


def plain(folder: Path, model_type: str, **options: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A model as it is stored in mlx-4bit, and plain again."""
    weightsmith.quantize(model(folder / "m", model_type), folder / "q", "mlx-4bit", group_size=32, progress=False, **options)
    weightsmith.dequantize(folder / "q", folder / "d", progress=False)
    return load_file(folder / "q" / "model.safetensors"), load_file(folder / "d" / "model.safetensors")


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["qwen3_moe", "ernie4_5_moe"])
def test_stacked_experts_have_the_numbers_of_those_apart(model_type: str, tmp_path: Path) -> None:
    stored, decoded = plain(tmp_path / "a", model_type)
    assert stored["model.layers.1.mlp.switch_mlp.gate_proj.weight"].shape == (EXPERTS, INNER, HIDDEN // 8)
    assert stored["model.layers.1.mlp.switch_mlp.down_proj.scales"].shape == (EXPERTS, HIDDEN, 1)
    assert not [name for name in stored if ".experts." in name]
    apart, expected = plain(tmp_path / "b", "qwen2_moe")
    assert [name for name in apart if ".experts." in name]
    assert not [name for name in apart if "switch_mlp" in name]
    assert expected.keys() == decoded.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(decoded[name], array, err_msg=name)


@pytest.mark.matrix
@pytest.mark.slow
def test_the_bytes_do_not_depend_on_threads_and_verify_reads_them(tmp_path: Path) -> None:
    one, _ = plain(tmp_path / "one", "qwen3_moe", threads=1)
    two, _ = plain(tmp_path / "two", "qwen3_moe", threads=2)
    assert {name: array.tobytes() for name, array in one.items()} == {name: array.tobytes() for name, array in two.items()}
    weightsmith.verify(tmp_path / "one" / "q")


@pytest.mark.slow
def test_stacked_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    stored, _ = plain(tmp_path, "qwen3_moe")
    config = {"model_type": "gpt_oss", "quantization": {"group_size": 32, "bits": 4}}
    other = write_checkpoint(tmp_path / "other", stored, config)
    with pytest.raises(WeightsmithError, match="switch_mlp"):
        weightsmith.dequantize(other, tmp_path / "out", progress=False)
    config = {**config, "model_type": "qwen3_moe", "num_experts": EXPERTS}
    first = "model.layers.0.mlp.experts.0.gate_proj.weight"
    damage = {
        "has 3 experts, and config.json says": (stored, {**config, "num_experts": 4}),
        "is stored twice": ({**stored, first: np.zeros((INNER, HIDDEN), np.float16)}, config),
    }
    for number, (message, (tensors, changed)) in enumerate(damage.items()):
        with pytest.raises(WeightsmithError, match=message):
            weightsmith.dequantize(write_checkpoint(tmp_path / str(number), tensors, changed), tmp_path / "out", progress=False)
