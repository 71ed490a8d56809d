"""Single files as LyCORIS writes them: norms of DoRA, cores, whole differences. LyCORIS is the judge, and its formulas are."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests.mini import as_bytes, write_checkpoint
from tests.models.lora.test_files import Arrays, check, flat, model, pair, product
from tests.models.lora.test_lora import baked, normal, refusal
from weightsmith._base.errors import PlanError
from weightsmith._models.lora import apply_adapter, open_adapter

PYTHON = os.environ.get("WEIGHTSMITH_LYCORIS", "")
NAME = "lora_unet_mid_block_a"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs LyCORIS: WEIGHTSMITH_LYCORIS")
def test_lycoris_is_the_judge(tmp_path: Path) -> None:
    """LyCORIS 4.1.3: linear layers, a convolution and a norm."""
    subprocess.run([PYTHON, Path(__file__).with_name("lycoris_script.py"), tmp_path], check=True, capture_output=True)
    before = load_file(tmp_path / "base.safetensors")
    folder = write_checkpoint(tmp_path / "base", before, {"_class_name": "AnyModel"})
    files = sorted(tmp_path.glob("*.merged.safetensors"))
    assert len(files) == 8
    for file in files:
        case, expected = file.name.removesuffix(".merged.safetensors"), load_file(file)
        weights = baked(folder, tmp_path / f"{case}.safetensors", tmp_path / f"{case} out")
        assert sum(bool((expected[name] != array).any()) for name, array in before.items()) >= 3
        for name, array in weights.items():
            np.testing.assert_allclose(array, expected[name], rtol=2e-6, atol=2e-6, err_msg=f"{case}: {name}")


def dora(path: Path, shape: tuple[int, ...], norms: np.ndarray, name: str = f"{NAME}.dora_scale") -> np.ndarray:
    """A file of factors with norms. Returns what the factors alone add."""
    save_file(flat(NAME, shape) | {name: norms, f"{NAME}.alpha": np.float32([3])}, path)
    return product(*pair(shape), shape) * 1.5


def scaled(weight: np.ndarray, norms: np.ndarray, *, columns: bool) -> np.ndarray:
    turned = weight.swapaxes(0, 1) if columns else weight
    rows = turned.reshape(len(turned), -1).astype(float)
    rows = rows * (norms.reshape(-1) / np.linalg.norm(rows, axis=1))[:, None]
    back: np.ndarray = rows.reshape(turned.shape)
    return back.swapaxes(0, 1) if columns else back


@pytest.mark.parametrize("shape", [(6, 8), (8, 8), (6, 4, 3, 3)])
@pytest.mark.parametrize(
    ("ending", "columns"),
    [("dora_scale", False), ("dora_scale", True), ("lora_magnitude_vector", False), ("lora_magnitude_vector.weight", False)],
)
def test_rows_or_columns_get_the_norms_of_dora(shape: tuple[int, ...], ending: str, columns: bool, tmp_path: Path) -> None:
    """LyCORIS stores [outputs, 1] or [1, inputs]; PEFT one number for each output, of convolutions [1, outputs, 1, 1]."""
    folder, path = model(tmp_path / "base", {"mid_block.a": shape, "mid_block.b": shape}), tmp_path / "a.safetensors"
    ones = (1,) * (len(shape) - 2)
    form = (1, shape[1], *ones) if columns else (shape[0], 1, *ones)
    if ending.startswith("lora"):
        form = (1, shape[0], *ones) if ones else (shape[0],)
    norms = np.abs(normal(*form)) + 1
    added = dora(path, shape, norms, f"{NAME}.{ending}")
    before = load_file(folder / "model.safetensors")
    weights = baked(folder, path, tmp_path / "out")
    expected = scaled(before["mid_block.a.weight"] + added, norms, columns=columns)
    np.testing.assert_allclose(weights["mid_block.a.weight"], expected, rtol=3e-6, atol=1e-6)
    np.testing.assert_array_equal(weights["mid_block.b.weight"], before["mid_block.b.weight"])
    with weightsmith.open_checkpoint(folder) as checkpoint, apply_adapter(checkpoint, open_adapter(str(path)), "x") as applied:
        data = as_bytes(applied.read("mid_block.a.weight"))
        for start, end in [(0, 4), (3, 90), (len(data) // 2, len(data) // 2 + 40), (1, len(data))]:
            buffer = np.empty(end - start, np.uint8)
            applied.read_into("mid_block.a.weight", start, buffer)
            assert buffer.tobytes() == data[start:end]


def test_norms_that_are_not_read(tmp_path: Path) -> None:
    folder, path = model(tmp_path / "base", {"mid_block.a": (6, 8)}), tmp_path / "a.safetensors"
    for shape in ((7, 1), (1, 7), (6, 8), (1, 6)):
        dora(path, (6, 8), np.ones(shape, np.float32))
        assert "has not one number for each of 6 outputs, nor [1, 8] for inputs" in str(refusal(folder, path))
    loha = {f"{NAME}.hada_w{k}_{e}": normal(6, 2) if e == "a" else normal(2, 8) for k in (1, 2) for e in "ab"}
    save_file(loha | {f"{NAME}.dora_scale": np.ones((6, 1), np.float32)}, path)
    assert "it is DoRA, which is not applied from a single file" in str(refusal(folder, path))
    dora(path, (6, 8), np.ones((6, 1), np.float32))
    for action, message in (
        (lambda: weightsmith.plan({"merge_method": "linear", "models": [{"model": str(path)}]}), r"BASE\+ADAPTER"),
        (lambda: weightsmith.convert_lora(path, tmp_path / "out", layout="diffusers"), f"extract-lora BASE\\+{path} BASE OUT"),
    ):
        with pytest.raises(PlanError, match=message):
            action()


def core(path: Path, kernel: tuple[int, ...] = (3, 3), **change: np.ndarray) -> np.ndarray:
    """A Tucker decomposition of a convolution of 4 channels to 6. Returns what it adds."""
    ones = (1,) * len(kernel)
    parts = {"lora_down": normal(2, 4, *ones), "lora_mid": normal(2, 2, *kernel), "lora_up": normal(6, 2, *ones)} | change
    tensors = {f"{NAME}.{part}.weight": array for part, array in parts.items() if array.size}
    save_file(tensors | {f"{NAME}.alpha": np.float32([3])}, path)
    down, up = parts["lora_down"].reshape(2, -1), parts["lora_up"].reshape(-1, 2)
    added: np.ndarray = 1.5 * np.einsum("rs...,or,si->oi...", parts["lora_mid"].astype(float), up, down)
    return added


@pytest.mark.parametrize("kernel", [(3, 3), (3,), (1, 3, 3)])
def test_the_core_of_a_convolution(kernel: tuple[int, ...], tmp_path: Path) -> None:
    folder, path = model(tmp_path / "base", {"mid_block.a": (6, 4, *kernel)}), tmp_path / "a.safetensors"
    check(folder, path, tmp_path / "out", {"mid_block.a": core(path, kernel)})
    recipe = {"merge_method": "linear", "models": [{"model": str(path), "parameters": {"weight": 0.5}}]}
    weightsmith.merge({**recipe, "parameters": {"normalize": False}}, tmp_path / "half", fsync=False)
    halved = tmp_path / "half/lora.safetensors"
    assert load_file(halved)[f"{NAME}.lora_down.weight"].shape == (2, 4, *kernel)
    check(folder, halved, tmp_path / "halved", {"mid_block.a": core(path, kernel) / 2})


def test_a_core_is_converted(tmp_path: Path) -> None:
    """diffusers has no cores: A becomes the whole kernel, at the same rank."""
    name, path = "lora_unet_down_blocks_0_resnets_0_conv1", tmp_path / "a.safetensors"
    shape = (6, 4, 3, 3)
    added = core(path)
    save_file({key.replace(NAME, name): array for key, array in load_file(path).items()}, path)
    weightsmith.convert_lora(path, tmp_path / "out", layout="diffusers")
    converted = load_file(tmp_path / "out/pytorch_lora_weights.safetensors")
    a, b = (converted[f"unet.down_blocks.0.resnets.0.conv1.lora_{part}.weight"] for part in "AB")
    assert (a.shape, b.shape) == ((2, *shape[1:]), (6, 2, 1, 1))
    np.testing.assert_allclose(product(a, b, shape), added, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_mid": normal(2, 3, 3, 3)}, "lora_mid is [2, 3, 3, 3], and [2, 2, 3, 3]"),
        ({"lora_down": np.empty(0, np.float32)}, "it has no lora_down"),
        ({"lora_down": normal(2, 4, 3, 3)}, "lora_down is [2, 4, 3, 3], and [2, 4, 1, 1]"),
    ],
)
def test_cores_that_do_not_fit(change: Arrays, message: str, tmp_path: Path) -> None:
    folder, path = model(tmp_path / "base", {"mid_block.a": (6, 4, 3, 3)}), tmp_path / "a.safetensors"
    parts = {"lora_down": normal(2, 4, 1, 1), "lora_mid": normal(2, 2, 3, 3), "lora_up": normal(6, 2, 1, 1)} | change
    save_file({f"{NAME}.{part}.weight": array for part, array in parts.items() if array.size}, path)
    assert message in str(refusal(folder, path))


def test_whole_differences(tmp_path: Path) -> None:
    """Beside factors, too: files of Wan have factors of a layer, and the difference of its bias."""
    tensors = {"a.weight": normal(6, 8), "a.bias": normal(6), "k.weight": normal(6, 4, 3, 3), "norm.weight": normal(8)}
    folder = write_checkpoint(tmp_path / "base", tensors, {"_class_name": "AnyModel"})
    a, b = pair((6, 8))
    differences = {"a.diff_b": normal(6, seed=3), "k.diff": normal(6, 4, 3, 3, seed=4), "norm.diff": normal(8, seed=5)}
    factors = {"diffusion_model.a.lora_down.weight": a, "diffusion_model.a.lora_up.weight": b}
    save_file(factors | {f"diffusion_model.{name}": array for name, array in differences.items()}, tmp_path / "a.safetensors")
    weights = baked(folder, tmp_path / "a.safetensors", tmp_path / "out")
    expected = {
        "a.weight": tensors["a.weight"] + product(a, b, (6, 8)),
        "a.bias": tensors["a.bias"] + differences["a.diff_b"],
        "k.weight": tensors["k.weight"] + differences["k.diff"],
        "norm.weight": tensors["norm.weight"] + differences["norm.diff"],
    }
    for name, array in expected.items():
        np.testing.assert_allclose(weights[name], array, rtol=1e-6, atol=1e-5, err_msg=name)
    with pytest.raises(PlanError, match="LoRA and whole differences"):
        weightsmith.convert_lora(tmp_path / "a.safetensors", tmp_path / "other", layout="kohya")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.diff": normal(6, 7)}, "diff is [6, 7], and [6, 8]"),
        ({"k.diff_b": normal(6)}, "the adapter has diff_b, and the base has no k.bias"),
        ({"a.diff_b": normal(5)}, "diff_b is [5], and [6]"),
        ({"a.diff": normal(6, 8), "a.w_norm": normal(6, 8)}, "it has diff and w_norm"),
        ({"a.diff": normal(6, 8), "a.lora_down.weight": normal(2, 8), "a.lora_up.weight": normal(6, 2)}, "two changes for it"),
        ({"a.diff": normal(6, 8), "a.alpha": np.float32([1])}, "are neither factors nor alpha"),
        ({"a.set_weight": normal(6, 8)}, "whole weights in place of the model's, which is not applied"),
    ],
)
def test_differences_that_do_not_fit(tensors: Arrays, message: str, tmp_path: Path) -> None:
    whole = {"a.weight": normal(6, 8), "a.bias": normal(6), "k.weight": normal(6, 8)}
    folder = write_checkpoint(tmp_path / "base", whole, {"_class_name": "AnyModel"})
    save_file({f"diffusion_model.{name}": array for name, array in tensors.items()}, tmp_path / "a.safetensors")
    assert message in str(refusal(folder, tmp_path / "a.safetensors"))


def test_an_alpha_of_zero(tmp_path: Path) -> None:
    """Programs disagree on it."""
    folder, path = model(tmp_path / "base", {"mid_block.a": (6, 8)}), tmp_path / "a.safetensors"
    save_file(flat(NAME) | {f"{NAME}.alpha": np.float32([0])}, path)
    assert f"{NAME}.alpha is 0: kohya's scripts and LyCORIS take that for the rank" in str(refusal(folder, path))


@pytest.mark.parametrize("prefix", ["diffusion_model.blocks.0", "lora_unet_blocks_0"])
def test_differences_of_modulations(prefix: str, tmp_path: Path) -> None:
    """lightx2v's adapters of Wan: a parameter of a block that is no weight of a module inside."""
    tensors = {"blocks.0.modulation": normal(1, 6, 8), "blocks.0.ffn.0.weight": normal(8, 8, seed=1)}
    folder = write_checkpoint(tmp_path / "base", tensors, {"_class_name": "WanModel"})
    difference = normal(1, 6, 8, seed=2)
    joined = f"{prefix}{prefix[-2]}ffn{prefix[-2]}0"
    factors = {f"{joined}.lora_down.weight": normal(2, 8, seed=3), f"{joined}.lora_up.weight": normal(8, 2, seed=4)}
    save_file({**factors, f"{prefix}.diff_m": difference}, tmp_path / "a.safetensors")
    weights = baked(folder, tmp_path / "a.safetensors", tmp_path / "out")
    np.testing.assert_allclose(weights["blocks.0.modulation"], tensors["blocks.0.modulation"] + difference, rtol=1e-6)
    assert (weights["blocks.0.ffn.0.weight"] != tensors["blocks.0.ffn.0.weight"]).any()
    save_file({**factors, f"{prefix}x.diff_m": difference}, tmp_path / "b.safetensors")
    assert "modulation" in str(refusal(folder, tmp_path / "b.safetensors"))
    twice = {f"{prefix}.diff_m": difference, f"{prefix}{prefix[-2]}modulation.diff": difference}
    save_file({**factors, **twice}, tmp_path / "c.safetensors")
    assert "which is not applied" in str(refusal(folder, tmp_path / "c.safetensors"))
