"""Single files of diffusion models: their modules, a VAE from another file, and moving averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import weightsmith
from tests import plan_help
from tests.plan_help import plan, prepare, warnings
from weightsmith._base.errors import MismatchError, ShapeError, Unsupported
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.structure import analyse

Shapes = dict[str, tuple[int, ...]]

UNET: Shapes = {f"{side}_blocks.{i}.0.in_layers.2.weight": (4, 4, 3, 3) for side in ("input", "output") for i in range(12)}
UNET |= {f"middle_block.{i}.in_layers.2.weight": (4, 4, 3, 3) for i in (0, 2)}
UNET |= {"time_embed.0.weight": (4, 4), "out.2.weight": (4, 4, 3, 3)}
VAE: Shapes = {f"{side}.conv_in.weight": (4, 3, 3, 3) for side in ("encoder", "decoder")}
VAE |= {f"encoder.down.{i}.block.{j}.conv1.weight": (4, 4, 3, 3) for i in range(4) for j in range(2)}
VAE |= {f"decoder.up.{i}.block.{j}.conv1.weight": (4, 4, 3, 3) for i in range(4) for j in range(3)}
VAE |= {
    "quant_conv.weight": (4, 4, 1, 1),
    "encoder.mid.attn_1.q.weight": (4, 4, 1, 1),
    "decoder.mid.attn_1.q.weight": (4, 4, 1, 1),
}
TEXT: Shapes = {f"transformer.text_model.encoder.layers.{i}.mlp.fc1.weight": (6, 4) for i in range(3)}
DIFFUSION, FIRST = "model.diffusion_model.", "first_stage_model."


def tensors(shapes: Shapes, seed: int, prefix: str = "", dtype: Any = np.float16) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"{prefix}{name}": random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def averages(seed: int) -> dict[str, np.ndarray]:
    """The moving average of the diffusion model, under the names that its training gives it."""
    trained = tensors(UNET, seed, "diffusion_model.", np.float32)
    named = {f"model_ema.{name.replace('.', '')}": tensor for name, tensor in trained.items()}
    return {**named, "model_ema.decay": np.array(0.99, np.float32), "model_ema.num_updates": np.array(7, np.int32)}


def single(path: Path, seed: int, **extra_tensors: np.ndarray) -> str:
    """A file of Stable Diffusion 1."""
    parts = tensors(UNET, seed, DIFFUSION) | tensors(VAE, seed + 50, FIRST) | tensors(TEXT, seed + 70, "cond_stage_model.")
    save_file({**parts, "betas": np.arange(5, dtype=np.float32), **extra_tensors}, path, {"modelspec.title": f"model {seed}"})
    return str(path)


def pair(tmp_path: Path) -> tuple[str, str]:
    return single(tmp_path / "a.safetensors", 1), single(tmp_path / "b.safetensors", 2)


def models(*names: str) -> list[dict[str, Any]]:
    return [{"model": name, "parameters": {"weight": 1 / len(names)}} for name in names]


def merged(recipe: dict[str, Any], tmp_path: Path) -> dict[str, np.ndarray]:
    return load_file(weightsmith.merge(recipe, tmp_path / "out", fsync=False).out / "model.safetensors")


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        (
            (f"{DIFFUSION}out.2.weight", f"{FIRST}quant_conv.weight", "cond_stage_model.x", "betas"),
            "diffusion vae text_encoders other",
        ),
        ((f"{DIFFUSION}out.2.weight", "conditioner.embedders.0.x", "conditioner.embedders.1.x"), "diffusion text_encoders"),
        (
            (f"{DIFFUSION}joint_blocks.0.x", "text_encoders.clip_l.x", "text_encoders.t5xxl.x", "vae.x"),
            "diffusion text_encoders vae",
        ),
        ((f"{DIFFUSION}out.2.weight", "model_ema.decay"), "diffusion ema"),
        (("double_blocks.0.img_attn.qkv.weight", "img_in.weight"), "model"),
    ],
)
def test_the_modules_of_a_file(names: tuple[str, ...], modules: str) -> None:
    structure = analyse([TensorSpec(name, DTYPES["F16"], (2, 2)) for name in names], None)
    assert [*structure.modules] == modules.split()


def test_each_module_is_merged_by_its_own_values(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    p = plan(
        {
            "merge_method": "linear",
            "modules": {"diffusion": {"models": models(a, b)}, "text_encoders": {"models": models(a, b)}},
        }
    )
    assert not any("config.json" in text for text in warnings(p)), "such a file never has one"
    weights = merged({"merge_method": "linear", "modules": {"diffusion": {"models": models(a, b)}}}, tmp_path)
    first, second = load_file(a), load_file(b)
    assert weights.keys() == first.keys()
    for name, tensor in weights.items():
        expected = (first[name].astype(np.float64) + second[name]) / 2 if name.startswith(DIFFUSION) else first[name]
        np.testing.assert_allclose(tensor, expected, rtol=2**-10, atol=1e-6)
    with safe_open(tmp_path / "out/model.safetensors", "np") as file:
        said = {"modelspec.title": "model 1", "modelspec.merged_from": "a, b"}
        assert file.metadata() == {"format": "pt", **said}


@pytest.mark.parametrize("prefix", ["", FIRST], ids=["alone", "in a model"])
def test_a_vae_of_another_file_is_baked_in(prefix: str, tmp_path: Path) -> None:
    a, _ = pair(tmp_path)
    vae = tensors(VAE, 9, prefix) | ({} if not prefix else tensors(UNET, 9, DIFFUSION))
    save_file(vae, tmp_path / "vae.safetensors")
    recipe = {
        "merge_method": "linear",
        "modules": {"diffusion": {"models": models(a)}, "vae": {"models": models(str(tmp_path / "vae.safetensors"))}},
    }
    weights, first = merged(recipe, tmp_path), load_file(a)
    assert weights.keys() == first.keys()
    for name, tensor in weights.items():
        expected = vae[prefix + name.removeprefix(FIRST)] if name.startswith(FIRST) else first[name]
        assert np.array_equal(tensor, expected), name


def without_steps(path: Path, seed: int) -> str:
    """A file of three parts and no more: no tensor of it is outside them."""
    parts = tensors(UNET, seed, DIFFUSION) | tensors(VAE, seed + 50, FIRST) | tensors(TEXT, seed + 70, "cond_stage_model.")
    save_file(parts, path)
    return str(path)


def baked(base: str, vae: Path) -> dict[str, Any]:
    return {"merge_method": "linear", "modules": {"diffusion": {"models": models(base)}, "vae": {"models": models(str(vae))}}}


@pytest.mark.parametrize("prefix", ["", FIRST, "vae."])
def test_a_vae_is_baked_in_whatever_else_its_file_has(prefix: str, tmp_path: Path) -> None:
    base = without_steps(tmp_path / "a.safetensors", 1)
    vae = tensors(VAE, 9, prefix) | {"loss.logvar": np.zeros((), np.float32)}
    save_file(vae | ({} if not prefix else tensors(UNET, 9, DIFFUSION)), tmp_path / "vae.safetensors")
    weights, first = merged(baked(base, tmp_path / "vae.safetensors"), tmp_path), load_file(base)
    assert weights.keys() == first.keys()
    for name, tensor in weights.items():
        expected = vae[prefix + name.removeprefix(FIRST)] if name.startswith(FIRST) else first[name]
        assert np.array_equal(tensor, expected), name


def test_a_vae_under_two_prefixes_is_one_in_a_merge(tmp_path: Path) -> None:
    a, b = str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")
    shapes = {name: shape for name, shape in VAE.items() if name in ("quant_conv.weight", "encoder.conv_in.weight")}
    for name, prefix in ((a, FIRST), (b, "vae.")):  # without layers, whose prefixes are paired by themselves
        save_file(tensors(UNET, 5, DIFFUSION) | tensors(shapes, len(prefix), prefix), name)
    weights = merged({"merge_method": "linear", "models": models(a, b)}, tmp_path)
    first, second = load_file(a), load_file(b)
    assert weights.keys() == first.keys()
    for name in tensors(shapes, 0, FIRST):
        expected = (first[name].astype(np.float64) + second[name.replace(FIRST, "vae.")]) / 2
        np.testing.assert_allclose(weights[name], expected, rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("steps", [False, True], ids=["three parts", "and a schedule"])
def test_a_vae_of_other_names_is_refused(steps: bool, tmp_path: Path) -> None:
    base = single(tmp_path / "a.safetensors", 1) if steps else without_steps(tmp_path / "a.safetensors", 1)
    vae = {f"{side}.conv_in.weight": (4, 3, 3, 3) for side in ("encoder", "decoder")}
    vae |= {"decoder.mid_block.resnets.0.conv1.weight": (4, 4, 3, 3)}
    save_file(tensors(vae, 3), tmp_path / "vae.safetensors")
    (problem,) = plan_help.problems(baked(base, tmp_path / "vae.safetensors"))
    assert isinstance(problem, MismatchError)
    assert f"has 2 of the {len(VAE)} tensors of module 'vae'" in str(problem)
    assert f"vae.safetensors: {[*vae][2]}" in str(problem)


def test_a_model_without_the_module_it_is_given_for_is_refused(tmp_path: Path) -> None:
    a, _ = pair(tmp_path)
    save_file(tensors(UNET, 5, DIFFUSION), tmp_path / "bare.safetensors")
    (problem,) = plan_help.problems(baked(a, tmp_path / "bare.safetensors"))
    assert f"has 0 of the {len(VAE)} tensors of module 'vae'" in str(problem)


def test_the_moving_average_takes_the_place_of_the_weights(tmp_path: Path) -> None:
    mean = averages(3)
    a = single(tmp_path / "a.safetensors", 1, **mean)
    weights, first = merged({"merge_method": "passthrough", "models": [{"model": f"{a}+ema"}]}, tmp_path), load_file(a)
    assert weights.keys() == {name for name in first if not name.startswith("model_ema.")}
    for name, tensor in weights.items():
        average = f"model_ema.diffusion_model{name.removeprefix(DIFFUSION).replace('.', '')}"
        assert np.array_equal(tensor, mean[average] if name.startswith(DIFFUSION) else first[name]), name


def test_the_moving_average_is_left_out(tmp_path: Path) -> None:
    a = single(tmp_path / "a.safetensors", 1, **averages(3))
    out = weightsmith.dequantize(f"{a}+no-ema", tmp_path / "out", fsync=False).out
    weights, first = load_file(out / "model.safetensors"), load_file(a)
    assert weights.keys() == {name for name in first if not name.startswith("model_ema.")}
    assert all(np.array_equal(tensor, first[name]) for name, tensor in weights.items())


def test_a_model_and_its_average_are_two_models_of_one_recipe(tmp_path: Path) -> None:
    mean = averages(3)
    a = single(tmp_path / "a.safetensors", 1, **mean)
    weights, first = merged({"merge_method": "linear", "models": models(f"{a}+no-ema", f"{a}+ema")}, tmp_path), load_file(a)
    name = f"{DIFFUSION}out.2.weight"
    np.testing.assert_allclose(
        weights[name], (first[name].astype(np.float32) + mean["model_ema.diffusion_modelout2weight"]) / 2, rtol=1e-6
    )


def test_averages_of_no_weight_are_left_out_and_the_plan_says_so(tmp_path: Path) -> None:
    a = single(tmp_path / "a.safetensors", 1, **averages(3), **{"model_ema.diffusion_modelold": np.zeros(2, np.float32)})
    p = plan({"merge_method": "passthrough", "models": [{"model": f"{a}+ema"}]})
    said = "\n".join(warnings(p))
    assert "1 moving average of no weight of the diffusion model is left out" in said
    assert "model_ema.diffusion_modelold" in said
    b = single(tmp_path / "b.safetensors", 1, **averages(3))
    assert not any(
        "left out" in text for text in warnings(plan({"merge_method": "passthrough", "models": [{"model": f"{b}+ema"}]}))
    )


def test_weights_without_an_average_are_used_as_stored_and_the_plan_says_so(tmp_path: Path) -> None:
    mean = averages(3)
    del mean["model_ema.diffusion_modelout2weight"]
    a = single(tmp_path / "a.safetensors", 1, **mean)
    said = "\n".join(warnings(plan({"merge_method": "passthrough", "models": [{"model": f"{a}+ema"}]})))
    assert "1 tensor of the diffusion model without a moving average is used as stored" in said


@pytest.mark.parametrize(
    ("extra_tensors", "choice", "kind", "text"),
    [
        ({}, "ema", Unsupported, "it holds no moving average"),
        ({}, "no-ema", Unsupported, "it holds no moving average"),
        ({"model_ema.decay": np.array(1.0)}, "ema", Unsupported, "none of the 1 tensor under model_ema. is the average"),
        (
            {"model_ema.diffusion_modelout2weight": np.ones((2, 2))},
            "ema",
            ShapeError,
            "the moving average has the shape [2, 2]",
        ),
    ],
)
def test_no_average_is_an_error(extra_tensors: dict[str, Any], choice: str, kind: type, text: str, tmp_path: Path) -> None:
    a = single(tmp_path / "a.safetensors", 1, **extra_tensors)
    (problem,) = plan_help.problems({"merge_method": "passthrough", "models": [{"model": f"{a}+{choice}"}]})
    assert isinstance(problem, kind)
    assert text in str(problem)


def test_a_folder_named_ema_is_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = single(tmp_path / "a.safetensors", 1, **averages(3))
    (tmp_path / "ema").mkdir()
    monkeypatch.chdir(tmp_path)
    (problem,) = plan_help.problems({"merge_method": "passthrough", "models": [{"model": f"{a}+ema"}]})
    assert "ema" in str(problem)
    assert "adapter" in str(problem)


def test_a_plan_from_json_has_the_average(tmp_path: Path) -> None:
    from weightsmith._planning.planner.reopen import reopen

    a = single(tmp_path / "a.safetensors", 1, **averages(3))
    with (
        prepare({"merge_method": "passthrough", "models": [{"model": f"{a}+ema"}]}) as prepared,
        reopen(prepared.plan) as again,
    ):
        assert again.inputs[0].identity == prepared.inputs[0].identity
        assert np.array_equal(again.inputs[0][f"{DIFFUSION}out.2.weight"], averages(3)["model_ema.diffusion_modelout2weight"])
