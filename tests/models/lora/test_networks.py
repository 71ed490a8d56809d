"""Files of LoRA factors for several networks: each gets its own update, and what a model lacks is left out with a warning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightsmith
from tests.mini import write_checkpoint
from tests.models.lora.test_files import pair, product
from tests.models.lora.test_lora import baked, normal, refusal
from weightsmith._models.lora.networks import NETWORKS, UNKNOWN, network_of

L = "text_model.encoder.layers.0.self_attn.q_proj"
K = L.replace(".", "_")
TO_Q = "input_blocks.4.1.transformer_blocks.0.attn1.to_q"
UNET = f"model.diffusion_model.{TO_Q}.weight"
UNET_LORA = f"lora_unet_{TO_Q.replace('.', '_')}"
SEEDS = {UNET_LORA: 1, f"lora_te1_{K}": 2, f"lora_te2_{K}": 3, f"lora_te3_{K}": 4, f"lora_te_{K}": 5}

Arrays = dict[str, np.ndarray]
Shape = tuple[int, int]


def lora(path: Path, *modules: str, shape: Shape = (8, 8), shapes: dict[str, Shape] | None = None) -> Path:
    tensors = {}
    for module in modules:
        a, b = pair((shapes or {}).get(module, shape), 2, 10 * SEEDS[module])
        tensors |= {f"{module}.lora_down.weight": a, f"{module}.lora_up.weight": b, f"{module}.alpha": np.array(2, np.float32)}
    save_file(tensors, path)
    return path


def update(module: str, shape: Shape = (8, 8)) -> np.ndarray:
    return product(*pair(shape, 2, 10 * SEEDS[module]), shape)


def single(path: Path, *names: str) -> Path:
    """A model in one file."""
    save_file({name: normal(8, 8, seed=i) for i, name in enumerate(names)}, path)
    return path


def added(model: Path, file: Path, out: Path) -> Arrays:
    """What a file adds to a model's tensors."""
    with weightsmith.open_checkpoint(model) as opened:
        before = {name: opened.read(name).astype(float) for name in opened}
    return {name: array - before[name] for name, array in baked(model, file, out).items()}


def notes(model: Path, file: Path) -> list[str]:
    plan = weightsmith.plan({"merge_method": "passthrough", "models": [{"model": f"{model}+{file}"}]})
    return [warning.what for warning in plan.warnings if "left out" in warning.what]


@pytest.mark.parametrize(
    ("names", "owners"),
    [
        (  # Stable Diffusion XL, with an encoder of each kind in transformers' names
            ("conditioner.embedders.0.transformer", "conditioner.embedders.1.transformer"),
            (f"lora_te1_{K}", f"lora_te2_{K}"),
        ),
        (  # Stable Diffusion 3 and Flux, with all encoders in one file
            ("text_encoders.clip_l.transformer", "text_encoders.clip_g.transformer", "text_encoders.t5xxl.transformer"),
            (f"lora_te1_{K}", f"lora_te2_{K}", f"lora_te3_{K}"),
        ),
        (("cond_stage_model.transformer",), (f"lora_te_{K}",)),  # Stable Diffusion 1
    ],
)
def test_each_network_gets_its_own_update(names: tuple[str, ...], owners: tuple[str, ...], tmp_path: Path) -> None:
    tensors = [f"{name}.{L}.weight" for name in names]
    model = single(tmp_path / "model.safetensors", UNET, *tensors)
    file = lora(tmp_path / "lora.safetensors", UNET_LORA, *owners)
    weights = added(model, file, tmp_path / "out")
    for tensor, owner in zip((UNET, *tensors), (UNET_LORA, *owners), strict=True):
        np.testing.assert_allclose(weights[tensor], update(owner), atol=1e-5, err_msg=tensor)
    assert notes(model, file) == []


def test_an_open_clip_encoder_gets_what_files_name_as_transformers_does(tmp_path: Path) -> None:
    """Stable Diffusion XL has its second text encoder in OpenCLIP's names, where q, k and v are one matrix."""
    home, tensors, modules = "conditioner.embedders.1.model.transformer.resblocks.3", {}, {}
    tensors[f"{home}.attn.in_proj_weight"] = normal(24, 8, seed=1)
    for i, (module, shape) in enumerate({"attn.out_proj": (8, 8), "mlp.c_fc": (12, 8), "mlp.c_proj": (8, 12)}.items()):
        tensors[f"{home}.{module}.weight"] = normal(*shape, seed=i)
    tensors[UNET] = normal(8, 8)
    save_file(tensors, tmp_path / "model.safetensors")
    layer = "lora_te2_text_model_encoder_layers_3"
    shapes = {f"self_attn_{name}_proj": (8, 8) for name in ("q", "v", "out")} | {"mlp_fc1": (12, 8), "mlp_fc2": (8, 12)}
    updates = {}
    for i, (module, shape) in enumerate(shapes.items()):
        a, b = pair(shape, 2, 10 * i)
        modules |= {f"{layer}_{module}.lora_down.weight": a, f"{layer}_{module}.lora_up.weight": b}
        updates[module] = product(a, b, shape)
    save_file(modules, tmp_path / "lora.safetensors")
    weights = added(tmp_path / "model.safetensors", tmp_path / "lora.safetensors", tmp_path / "out")
    fused = np.concatenate([updates["self_attn_q_proj"], np.zeros((8, 8)), updates["self_attn_v_proj"]])
    for name, want in {
        f"{home}.attn.in_proj_weight": fused,
        f"{home}.attn.out_proj.weight": updates["self_attn_out_proj"],
        f"{home}.mlp.c_fc.weight": updates["mlp_fc1"],
        f"{home}.mlp.c_proj.weight": updates["mlp_fc2"],
        UNET: np.zeros((8, 8)),
    }.items():
        np.testing.assert_allclose(weights[name], want, atol=1e-5, err_msg=name)


def test_networks_that_a_model_lacks_are_left_out_with_a_warning(tmp_path: Path) -> None:
    file = lora(tmp_path / "lora.safetensors", UNET_LORA, f"lora_te1_{K}", f"lora_te2_{K}")
    first = f"conditioner.embedders.0.transformer.{L}.weight"
    model = single(tmp_path / "model.safetensors", UNET, first)
    weights = added(model, file, tmp_path / "one")
    np.testing.assert_allclose(weights[first], update(f"lora_te1_{K}"), atol=1e-5)
    (note,) = notes(model, file)
    assert note == f"its updates of 1 module of text encoder 2 are left out: {model} does not hold that"
    unet = write_checkpoint(tmp_path / "unet", {f"{TO_Q}.weight": normal(8, 8)}, {"_class_name": "UNet2DConditionModel"})
    np.testing.assert_allclose(added(unet, file, tmp_path / "two")[f"{TO_Q}.weight"], update(UNET_LORA), atol=1e-5)
    assert [" of text encoder 1 " in note or " of text encoder 2 " in note for note in notes(unet, file)] == [True, True]


def test_a_module_that_a_network_lacks_is_an_error(tmp_path: Path) -> None:
    model = single(tmp_path / "model.safetensors", UNET, "conditioner.embedders.0.transformer.text_model.other.weight")
    problem = refusal(model, lora(tmp_path / "lora.safetensors", UNET_LORA, f"lora_te1_{K}"))
    assert f"{K}.weight: the base has no such tensor" in str(problem)


@pytest.mark.parametrize(
    ("folder", "owner", "shapes"),
    [
        ("text_encoder", f"lora_te1_{K}", {}),
        ("text_encoder_2", f"lora_te2_{K}", {}),
        ("model", f"lora_te2_{K}", {f"lora_te1_{K}": (4, 4)}),  # its shapes tell
        ("text_encoder", f"lora_te2_{K}", {f"lora_te1_{K}": (4, 4)}),
    ],
)
def test_which_text_encoder_a_folder_is(folder: str, owner: str, shapes: dict[str, Shape], tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / folder, {f"{L}.weight": normal(8, 8)}, {"model_type": "clip_text_model"})
    file = lora(tmp_path / "lora.safetensors", UNET_LORA, f"lora_te1_{K}", f"lora_te2_{K}", shapes=shapes)
    np.testing.assert_allclose(added(model, file, tmp_path / "out")[f"{L}.weight"], update(owner), atol=1e-5)


def test_a_text_encoder_that_may_be_either(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "clip", {f"{L}.weight": normal(8, 8)}, {"model_type": "clip_text_model"})
    problem = refusal(model, lora(tmp_path / "lora.safetensors", f"lora_te1_{K}", f"lora_te2_{K}"))
    assert "it has updates of text encoder 1 and text encoder 2" in problem.finding.what
    assert "text_encoder_2" in problem.finding.fix


def test_no_name_begins_with_two_networks() -> None:
    for flat in (True, False):
        beginnings = [(start, network) for network in NETWORKS for start in (network.flat if flat else network.dotted)]
        for start, network in beginnings:
            name = f"{start}layers_0_q" if flat else f"{start}layers.0.q"
            assert network_of(name, flat=flat) == (network, name.removeprefix(start))
        assert len({start for start, _ in beginnings}) == len(beginnings)
    assert network_of("model.layers.0.q", flat=False) == (UNKNOWN, "model.layers.0.q")


@pytest.mark.parametrize("stored", ["text_encoder_2/", "text_encoders.t5xxl.transformer."])
@pytest.mark.parametrize("written", ["text_encoder_2.", "lora_te3_"])
def test_flux_s_t5_is_known_by_its_names(stored: str, written: str, tmp_path: Path) -> None:
    """It is the second text encoder in diffusers, and the third in kohya's scripts and ComfyUI."""
    t5 = "encoder.block.0.layer.0.SelfAttention.q"
    module = f"{written}{t5.replace('.', '_') if written.startswith('lora') else t5}"
    a, b = pair((8, 8), 2, 0)
    save_file({f"{module}.lora_down.weight": a, f"{module}.lora_up.weight": b}, tmp_path / "lora.safetensors")
    model = single(tmp_path / "model.safetensors", UNET, f"{stored}{t5}.weight")
    weights = added(model, tmp_path / "lora.safetensors", tmp_path / "out")
    np.testing.assert_allclose(weights[f"{stored}{t5}.weight"], product(a, b, (8, 8)), atol=1e-5)
