"""What merged diffusion models paint: the images of a real model and its fine-tune, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests.terrain import Weights, images, needs_terrain, onnx_of, weights_of

pytestmark = [needs_terrain, pytest.mark.timeout(600)]
PREFIX = "model.diffusion_model."
Images = np.ndarray[Any, np.dtype[np.float64]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights, Weights]:
    """A folder with base.safetensors and tuned.safetensors, and their weights."""
    folder = tmp_path_factory.mktemp("terrain")
    base, tuned = (weights_of(onnx_of(version)) for version in ("0.4.1", "0.4.2"))
    for name, weights in (("base", base), ("tuned", tuned)):
        save_file({f"{PREFIX}{key}": values for key, values in weights.items()}, folder / f"{name}.safetensors")
    return folder, base, tuned


def painted(weights: Weights, folder: Path) -> Images:
    folder.mkdir(exist_ok=True)
    return images(onnx_of("0.4.2"), weights, folder)


def written(folder: Path) -> Weights:
    (path,) = folder.glob("*.safetensors")
    return {name.removeprefix(PREFIX): values for name, values in load_file(path).items()}


def merged(models: tuple[Path, Weights, Weights], out: Path, method: str, parameters: dict[str, Any]) -> Weights:
    tuned = {"model": str(models[0] / "tuned.safetensors"), "parameters": parameters}
    recipe = {"merge_method": method, "base_model": str(models[0] / "base.safetensors"), "models": [tuned], "dtype": "float32"}
    weightsmith.merge(recipe, out, progress=False, fsync=False)
    return written(out)


def apart(one: Images, other: Images) -> float:
    """How far images are from others, as a share of these."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def test_the_images_of_a_merge_move_from_one_model_to_the_other(models: tuple[Path, Weights, Weights], tmp_path: Path) -> None:
    _, base, tuned = models
    first, last = painted(base, tmp_path / "base"), painted(tuned, tmp_path / "tuned")
    whole = merged(models, tmp_path / "whole", "task_arithmetic", {"weight": 1.0})
    half = merged(models, tmp_path / "half", "task_arithmetic", {"weight": 0.5})
    middle = {name: ((base[name].astype(np.float64) + tuned[name]) / 2).astype(np.float32) for name in base}
    assert apart(last, first) > 0.05
    assert apart(painted(whole, tmp_path / "a"), last) < 1e-5
    between = painted(half, tmp_path / "b")
    assert apart(between, painted(middle, tmp_path / "c")) < 1e-4
    assert max(apart(between, first), apart(between, last)) < apart(last, first)


def test_block_weights_change_the_blocks_that_they_name(models: tuple[Path, Weights, Weights], tmp_path: Path) -> None:
    _, base, tuned = models
    weight = [{"blocks": "sd1", "values": {"IN00-IN11": 1.0}}, {"value": 0}]
    inputs = merged(models, tmp_path / "in", "task_arithmetic", {"weight": weight})
    first_blocks = ("time_embed.", "label_emb.", *(f"input_blocks.{number}." for number in range(12)))
    expected = {name: (tuned if name.startswith(first_blocks) else base)[name] for name in base}
    assert any(name.startswith("input_blocks.12.") for name in base)
    images_of = [painted(weights, tmp_path / str(i)) for i, weights in enumerate((inputs, expected))]
    assert apart(*images_of) < 1e-5


def test_a_lora_of_the_difference_paints_as_the_fine_tune(models: tuple[Path, Weights, Weights], tmp_path: Path) -> None:
    """Adapts matrices and convolutions, named as kohya's scripts do. Biases and norms stay those of the base."""
    folder, base, tuned = models
    factors: dict[str, np.ndarray[Any, Any]] = {}
    for name in (name for name, values in base.items() if values.ndim > 1):
        shape = base[name].shape
        left, sizes, right = np.linalg.svd((tuned[name] - base[name]).reshape(len(base[name]), -1), full_matrices=False)
        module = f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}"
        factors[f"{module}.lora_up.weight"] = (left * sizes).reshape(len(left), -1, *[1] * (len(shape) - 2))
        factors[f"{module}.lora_down.weight"] = right.reshape(-1, *shape[1:])
        factors[f"{module}.alpha"] = np.array(float(len(sizes)), np.float32)
    save_file(factors, tmp_path / "lora.safetensors")
    model = f"{folder / 'base.safetensors'}+{tmp_path / 'lora.safetensors'}"
    weightsmith.dequantize(model, tmp_path / "out", out_dtype="float32", progress=False, fsync=False)
    first, last = painted(base, tmp_path / "base"), painted(tuned, tmp_path / "tuned")
    images = painted(written(tmp_path / "out"), tmp_path / "found")
    assert apart(images, last) < 0.01 < 0.05 < apart(first, last)
