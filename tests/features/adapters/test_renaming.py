"""Single files under the names of other programs: diffusers' own conversions are the judge."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests.features.adapters.test_convert import converted, peft_folder, refusal
from tests.features.adapters.test_convert import pair as peft_pair
from tests.models.lora.test_files import pair
from weightsmith._features.adapters.families import FAMILIES, HUNYUAN_VIDEO, LTX, QWEN_IMAGE, STABLE_DIFFUSION_3, WAN, Family
from weightsmith._features.adapters.renaming import _dotted, _first_name, _unet_name

H, TEXT = 8, 12
RANK = 2

FLUX: dict[str, tuple[int, ...]] = {
    "double_blocks_0_img_attn_qkv": (3 * H, H),
    "double_blocks_0_txt_attn_qkv": (3 * H, H),
    "double_blocks_0_img_attn_proj": (H, H),
    "double_blocks_0_txt_attn_proj": (H, H),
    "double_blocks_0_img_mlp_0": (4 * H, H),
    "double_blocks_0_img_mlp_2": (H, 4 * H),
    "double_blocks_0_txt_mlp_0": (4 * H, H),
    "double_blocks_0_txt_mlp_2": (H, 4 * H),
    "double_blocks_0_img_mod_lin": (6 * H, H),
    "double_blocks_0_txt_mod_lin": (6 * H, H),
    "single_blocks_1_linear1": (7 * H, H),
    "single_blocks_1_linear2": (H, 5 * H),
    "single_blocks_1_modulation_lin": (3 * H, H),
}
SDXL: dict[str, tuple[int, ...]] = {
    "lora_unet_input_blocks_1_0_in_layers_2": (H, H, 3, 3),
    "lora_unet_input_blocks_3_0_op": (H, H, 3, 3),
    "lora_unet_input_blocks_4_0_skip_connection": (H, 4, 1, 1),
    "lora_unet_input_blocks_4_1_proj_in": (H, H),
    "lora_unet_input_blocks_4_1_transformer_blocks_1_attn1_to_q": (H, H),
    "lora_unet_input_blocks_8_1_transformer_blocks_9_ff_net_0_proj": (4 * H, H),
    "lora_unet_input_blocks_8_0_emb_layers_1": (H, H),
    "lora_unet_middle_block_0_out_layers_3": (H, H, 3, 3),
    "lora_unet_middle_block_1_transformer_blocks_3_attn2_to_out_0": (H, H),
    "lora_unet_middle_block_2_in_layers_2": (H, H, 3, 3),
    "lora_unet_output_blocks_2_1_transformer_blocks_0_attn2_to_k": (H, TEXT),
    "lora_unet_output_blocks_5_2_conv": (H, H, 3, 3),
    "lora_unet_output_blocks_7_0_out_layers_3": (H, H, 3, 3),
    "lora_te1_text_model_encoder_layers_0_self_attn_q_proj": (TEXT, TEXT),
    "lora_te2_text_model_encoder_layers_31_mlp_fc1": (4 * TEXT, TEXT),
}


def kohya(path: Path, shapes: dict[str, tuple[int, ...]], prefix: str = "", alpha: float = 3.0) -> Path:
    tensors: dict[str, np.ndarray] = {}
    for i, (module, shape) in enumerate(shapes.items()):
        a, b = pair(shape, RANK, 10 * i)
        tensors |= {f"{prefix}{module}.lora_down.weight": a, f"{prefix}{module}.lora_up.weight": b}
        tensors[f"{prefix}{module}.alpha"] = np.array(alpha, np.float32)
    save_file(tensors, path)
    return path


def deltas(tensors: dict[str, Any], a: str = ".lora_A.weight", b: str = ".lora_B.weight") -> dict[str, np.ndarray]:
    """Module → what is added to its weight, times the scale that the file states."""
    by_module = {}
    for name in tensors:
        if name.endswith(a):
            module = name.removesuffix(a)
            down, up = (np.asarray(tensors[f"{module}{end}"]) for end in (a, b))
            alpha = tensors.get(f"{module}.alpha")
            scale = 1.0 if alpha is None else float(alpha) / down.shape[0]
            by_module[module] = scale * up.reshape(len(up), -1) @ down.reshape(len(down), -1)
    return by_module


def newer(module: str) -> str:
    """The name that diffusers has for a module since 2023."""
    plain = module.replace(".processor.", ".")
    if plain.startswith("text_encoder"):
        return re.sub(r"\.to_([qkv])$", r".\1_proj", plain)
    return f"{plain}.0" if plain.endswith(".to_out") else plain


def same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for module, delta in expected.items():
        np.testing.assert_allclose(actual[module], delta, rtol=1e-5, atol=1e-5, err_msg=module)


@pytest.mark.long
def test_flux_of_kohya_becomes_what_diffusers_makes_of_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("diffusers.loaders.lora_conversion_utils")
    shapes = {**FLUX, "single_blocks_1_linear1": (7 * 3072, 3072)}  # diffusers knows this size alone
    path = kohya(tmp_path / "k.safetensors", shapes, "lora_unet_")
    theirs = utils._convert_kohya_flux_lora_to_diffusers({name: torch.tensor(a) for name, a in load_file(path).items()})
    ours = load_file(converted(path, tmp_path / "out", "diffusers") / "pytorch_lora_weights.safetensors")
    few = {name: array[:, :9] if name.endswith(".lora_A.weight") else array for name, array in ours.items()}
    same(
        deltas(few),
        deltas({name: array[:, :9] if name.endswith(".lora_A.weight") else array for name, array in theirs.items()}),
    )


@pytest.mark.long
def test_stable_diffusion_xl_of_kohya_becomes_what_diffusers_makes_of_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("diffusers.loaders.lora_conversion_utils")
    path = kohya(tmp_path / "k.safetensors", SDXL)
    tensors = {name: torch.tensor(a) for name, a in load_file(path).items()}
    mapped = utils._maybe_map_sgm_blocks_to_diffusers(tensors, SimpleNamespace(layers_per_block=2))
    theirs, alphas = utils._convert_non_diffusers_lora_to_diffusers(mapped)
    assert set(alphas.values()) == {3.0}
    actual = deltas(load_file(converted(path, tmp_path / "out", "diffusers") / "pytorch_lora_weights.safetensors"))
    stems = (".lora", "_lora", ".lora_linear_layer")
    ends = [(f"{stem}.down.weight", f"{stem}.up.weight") for stem in stems]
    expected = dict(itertools.chain(*(deltas(theirs, *pair_of_ends).items() for pair_of_ends in ends)))
    same(actual, {newer(module): 3 / RANK * delta for module, delta in expected.items()})


def test_stable_diffusion_xl_gets_its_names_back(tmp_path: Path) -> None:
    path = kohya(tmp_path / "k.safetensors", SDXL)
    diffusers = converted(path, tmp_path / "diffusers", "diffusers") / "pytorch_lora_weights.safetensors"
    back = load_file(converted(diffusers, tmp_path / "back", "kohya") / "lora.safetensors")
    ends = ".lora_down.weight", ".lora_up.weight"
    same(deltas(back, *ends), deltas(load_file(path), *ends))
    shapes = {name: array.shape for name, array in load_file(path).items()}
    assert {name: array.shape for name, array in back.items()} == shapes
    comfyui = load_file(converted(diffusers, tmp_path / "comfyui", "comfyui") / "pytorch_lora_weights.safetensors")
    assert "diffusion_model.input_blocks.4.1.transformer_blocks.1.attn1.to_q.lora_A.weight" in comfyui
    assert "text_encoders.clip_g.transformer.text_model.encoder.layers.31.mlp.fc1.alpha" in comfyui


@pytest.mark.parametrize("layout", ["kohya", "comfyui"])
def test_flux_of_diffusers_becomes_one_matrix_again(layout: str, tmp_path: Path) -> None:
    path = kohya(tmp_path / "k.safetensors", FLUX, "lora_unet_")
    diffusers = converted(path, tmp_path / "diffusers", "diffusers") / "pytorch_lora_weights.safetensors"
    back = converted(diffusers, tmp_path / "back", layout)
    before = deltas(load_file(path), ".lora_down.weight", ".lora_up.weight")
    if layout == "kohya":
        same(deltas(load_file(back / "lora.safetensors"), ".lora_down.weight", ".lora_up.weight"), before)
        return
    names = {f"diffusion_model.{_dotted(module.removeprefix('lora_unet_'))}": delta for module, delta in before.items()}
    same(deltas(load_file(back / "pytorch_lora_weights.safetensors")), names)


def test_parts_that_were_not_trained_are_zeros(tmp_path: Path) -> None:
    tensors = {}
    for i, part in enumerate(("attn.to_q", "attn.to_v", "proj_mlp")):
        a, b = pair((4 * H if part == "proj_mlp" else H, H), RANK + i, 10 * i)
        name = f"transformer.single_transformer_blocks.4.{part}"
        tensors |= {f"{name}.lora_A.weight": a.astype(np.float16), f"{name}.lora_B.weight": b.astype(np.float16)}
    save_file(tensors, tmp_path / "d.safetensors")
    out = load_file(converted(tmp_path / "d.safetensors", tmp_path / "out", "kohya") / "lora.safetensors")
    whole = deltas(out, ".lora_down.weight", ".lora_up.weight")["lora_unet_single_blocks_4_linear1"]
    parts = deltas(tensors)
    assert out["lora_unet_single_blocks_4_linear1.lora_up.weight"].dtype == np.float16
    for first, part in ((0, "attn.to_q"), (2 * H, "attn.to_v"), (3 * H, "proj_mlp")):
        expected = parts[f"transformer.single_transformer_blocks.4.{part}"].astype(np.float32)
        np.testing.assert_allclose(whole[first : first + len(expected)], expected, atol=0.02)
    assert not whole[H : 2 * H].any()


def test_names_of_stable_diffusion_1_and_its_text_encoder(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "lora_unet_down_blocks_0_attentions_1_transformer_blocks_0_attn1_to_out_0": (H, H),
        "lora_unet_up_blocks_1_resnets_0_time_emb_proj": (H, H),
        "lora_unet_down_blocks_0_attentions_0_proj_in": (H, H, 1, 1),
        "lora_te_text_model_encoder_layers_3_mlp_fc2": (TEXT, TEXT),
    }
    path = kohya(tmp_path / "k.safetensors", shapes, alpha=1.0)
    out = converted(path, tmp_path / "out", "diffusers") / "pytorch_lora_weights.safetensors"
    names = {name.removesuffix(".lora_A.weight") for name in load_file(out) if name.endswith("A.weight")}
    assert names == {
        "unet.down_blocks.0.attentions.1.transformer_blocks.0.attn1.to_out.0",
        "unet.up_blocks.1.resnets.0.time_emb_proj",
        "unet.down_blocks.0.attentions.0.proj_in",
        "text_encoder.text_model.encoder.layers.3.mlp.fc2",
    }
    back = load_file(converted(out, tmp_path / "back", "kohya") / "lora.safetensors")
    same(deltas(back, ".lora_down.weight", ".lora_up.weight"), deltas(load_file(path), ".lora_down.weight", ".lora_up.weight"))
    assert back["lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight"].shape == (RANK, H, 1, 1)
    assert "--for kohya" in refusal(out, "comfyui").finding.fix


def test_a_file_with_loha_becomes_a_lora_of_diffusers(tmp_path: Path) -> None:
    name = "lora_unet_double_blocks_0_img_attn_proj"
    rng = np.random.default_rng(0)
    parts = {
        f"hada_w{k}_{e}": rng.standard_normal((H, 2) if e == "a" else (2, H)).astype(np.float32) for k in "12" for e in "ab"
    }
    save_file({f"{name}.{part}": array for part, array in parts.items()}, tmp_path / "l.safetensors")
    out = converted(tmp_path / "l.safetensors", tmp_path / "out", "diffusers") / "pytorch_lora_weights.safetensors"
    actual = deltas(load_file(out))["transformer.transformer_blocks.0.attn.to_out.0"]
    expected = (parts["hada_w1_a"] @ parts["hada_w1_b"]) * (parts["hada_w2_a"] @ parts["hada_w2_b"])
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_names_that_are_not_known_are_refused(tmp_path: Path) -> None:
    path = kohya(tmp_path / "k.safetensors", {"lora_unet_nonsense_3_to_q": (H, H)})
    assert "1 of its 1 modules have names that are not known" in str(refusal(path, "diffusers"))
    path = kohya(tmp_path / "k.safetensors", {"lora_unet_input_blocks_4_9_to_q": (H, H)})
    assert "input_blocks.4.9.to_q has no name there" in str(refusal(path, "diffusers"))
    folder = peft_folder(tmp_path / "peft", peft_pair("model.layers.0.self_attn.q_proj"))
    assert "in PEFT's format, which kohya does not name" in str(refusal(folder, "kohya"))
    assert "its names are those of a single file" in str(refusal(path, "peft"))


@pytest.mark.parametrize("layout", ["kohya", "comfyui", "diffusers"])
def test_a_second_diffusion_model_is_refused_by_its_name(layout: str, tmp_path: Path) -> None:
    second = {f"transformer_2.blocks.{i}.attn1.to_q": (H, H) for i in range(2)}
    for modules, total in ((second, 2), ({**second, "transformer.blocks.0.attn1.to_q": (H, H)}, 3)):
        problem = refusal(diffusers_file(tmp_path / "d.safetensors", modules), layout)
        assert f"2 of its {total} modules are of the second diffusion model" in str(problem)
        assert "with transformer. in place of transformer_2." in problem.finding.fix


@pytest.mark.parametrize(
    "module", ["transformer_blocks.0.attn.to_q", "double_blocks.0.img_attn.qkv", "blocks.0.self_attn.q", "blocks.0.attn1.to_q"]
)
def test_names_without_the_prefix_of_their_network_are_refused(module: str, tmp_path: Path) -> None:
    with_alpha = kohya(tmp_path / "k.safetensors", {module: (H, H)})
    problem = refusal(with_alpha, "comfyui")
    assert "are those of a diffusion model without the prefix of the network" in str(problem)
    assert problem.finding.fix.startswith("Begin names with transformer. (diffusers) or")
    plain = diffusers_file(tmp_path / "d.safetensors", {module: (H, H)})
    assert refusal(plain, "comfyui").finding.fix.startswith("Begin names with transformer. (diffusers) or")


def test_embeddings_in_the_file_are_refused_by_their_name(tmp_path: Path) -> None:
    module = "transformer.transformer_blocks.0.attn.to_q"
    path = diffusers_file(tmp_path / "d.safetensors", {module: (H, H)})
    save_file({**load_file(path), "bundle_emb.word.clip_l": np.ones((2, H), np.float32)}, path)
    problem = refusal(path, "diffusers")
    assert "it has embeddings of new words beside the factors: 1 tensor" in str(problem)
    assert "Remove these tensors from a copy of the file" in problem.finding.fix
    save_file({**load_file(path), "else": np.ones(2, np.float32)}, path)
    assert "of new words" not in str(refusal(path, "diffusers"))


def diffusers_file(path: Path, shapes: dict[str, tuple[int, int]]) -> Path:
    tensors: dict[str, np.ndarray] = {}
    for module, shape in shapes.items():
        tensors |= dict(zip((f"{module}.lora_A.weight", f"{module}.lora_B.weight"), pair(shape, RANK), strict=True))
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("module", "shape", "rows"),
    [
        ("double_blocks_0_img_attn_qkv", (3 * H + 1, H), "25 rows of B, and 8 columns of A: there are 3 times as many"),
        ("single_blocks_0_linear1", (3 * H, H), "24 rows of B, and 8 columns of A: there are 7 times as many"),
        ("single_blocks_0_linear1", (10, H), "10 rows of B, and 8 columns of A: there are 7 times as many"),
        ("double_blocks_0_txt_mlp_0", (6 * H, H), "48 rows of B, and 8 columns of A: there are 4 times as many"),
        ("single_blocks_0_linear2", (H, 4 * H), "8 rows of B, and 32 columns of A: there are 5 times as many columns in Flux"),
        ("double_blocks_0_img_mlp_2", (H, 3 * H), "8 rows of B, and 24 columns of A: there are 4 times as many columns in"),
        ("double_blocks_0_txt_mlp_2", (H, 3 * H), "8 rows of B, and 24 columns of A: there are 4 times as many columns in"),
    ],
)
def test_matrices_of_flux_that_cannot_be_cut_are_refused(
    module: str, shape: tuple[int, int], rows: str, tmp_path: Path
) -> None:
    path = kohya(tmp_path / "k.safetensors", {f"lora_unet_{module}": shape})
    problem = refusal(path, "diffusers")
    assert rows in str(problem)
    assert _dotted(module) in str(problem)


@pytest.mark.parametrize(
    ("module", "times"),
    [
        ("single_transformer_blocks.0.proj_out", 5),
        ("transformer_blocks.0.ff.net.2", 4),
        ("transformer_blocks.0.ff_context.net.2", 4),
    ],
)
def test_matrices_of_another_size_under_the_names_of_diffusers_are_refused(module: str, times: int, tmp_path: Path) -> None:
    names = {"transformer.single_transformer_blocks.0.proj_mlp": (4 * H, H), f"transformer.{module}": (H, 3 * H)}
    path = diffusers_file(tmp_path / "d.safetensors", names)
    assert f"{module} has 8 rows of B, and 24 columns of A: there are {times} times as many columns" in str(
        refusal(path, "kohya")
    )


@pytest.mark.parametrize("layout", ["kohya", "comfyui"])
def test_matrices_of_flux_that_cannot_be_joined_are_refused(layout: str, tmp_path: Path) -> None:
    single = "transformer.single_transformer_blocks.0.attn.to_"
    path = diffusers_file(tmp_path / "d.safetensors", {f"{single}q": (H, H), f"{single}v": (12, H)})
    assert "12 rows of B, and 8 columns of A: there are as many" in str(refusal(path, layout))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_the_t5_of_flux_has_another_number_in_diffusers(tmp_path: Path) -> None:
    t5, proj = "encoder.block.0.layer.0.SelfAttention.q", "lora_unet_single_blocks_1_linear2"
    path = kohya(tmp_path / "k.safetensors", {f"lora_te3_{t5.replace('.', '_')}": (H, H), proj: (H, 5 * H)})
    conversion = weightsmith.convert_lora(path, tmp_path / "d", layout="diffusers", progress=False, fsync=False)
    assert any("diffusers does not load factors of Flux's T5" in warning.what for warning in conversion.warnings)
    diffusers = conversion.out / "pytorch_lora_weights.safetensors"
    assert f"text_encoder_2.{t5}.lora_A.weight" in load_file(diffusers)
    comfyui = load_file(converted(diffusers, tmp_path / "c", "comfyui") / "pytorch_lora_weights.safetensors")
    assert f"text_encoders.t5xxl.transformer.{t5}.lora_A.weight" in comfyui
    back = load_file(converted(diffusers, tmp_path / "back", "kohya") / "lora.safetensors")
    assert back.keys() == load_file(path).keys()


@pytest.mark.parametrize("layout", ["kohya", "comfyui", "diffusers"])
def test_names_that_several_models_have(layout: str, tmp_path: Path) -> None:
    """Under diffusers' names, one attention may be of Stable Diffusion 3, Qwen-Image and HunyuanVideo. Not of Flux."""
    path = diffusers_file(tmp_path / "d.safetensors", {"transformer.transformer_blocks.0.attn.to_q": (H, H)})
    if layout == "diffusers":
        tensors = load_file(converted(path, tmp_path / "out", layout) / "pytorch_lora_weights.safetensors")
        assert "transformer.transformer_blocks.0.attn.to_q.lora_A.weight" in tensors
    else:
        message = "its names are those of Stable Diffusion 3, Qwen-Image, HunyuanVideo, which have other names in"
        assert message in str(refusal(path, layout))
    blocks = {f"transformer.transformer_blocks.{i}.attn.to_q": (H, H) for i in range(24)}
    file = diffusers_file(tmp_path / "all.safetensors", blocks)
    tensors = load_file(next(converted(file, tmp_path / "out of all", layout).glob("*.safetensors")))
    names = {
        "kohya": "lora_unet_joint_blocks_23_x_block_attn_qkv",
        "comfyui": "diffusion_model.joint_blocks.23.x_block.attn.qkv",
    }
    name = names.get(layout, "transformer.transformer_blocks.23.attn.to_q")
    assert any(key.startswith(f"{name}.lora_") for key in tensors)


def _with_text_attention(blocks: int, width: int, text: int, *outside: str) -> dict[str, tuple[int, int]]:
    """Modules of LTX, PixArt, Cosmos, and others: the names in blocks are the same."""
    widths = {"attn1.to_q": width, "attn2.to_k": text}
    shapes = {f"transformer_blocks.{i}.{name}": (width, inputs) for i in range(blocks) for name, inputs in widths.items()}
    return shapes | {name: (6 * H, H) for name in outside}


@pytest.mark.long
@pytest.mark.parametrize(
    ("blocks", "width", "text"), [(28, 1152, 1152), (28, 2048, 1024), (20, 2240, 2240), (48, 3072, 4096 - H), (3, H, H)]
)
def test_names_of_pixart_are_not_those_of_ltx(blocks: int, width: int, text: int, tmp_path: Path) -> None:
    shapes = _with_text_attention(blocks, width, text, "adaln_single.linear", "caption_projection.linear_1")
    modules = {f"transformer.{name}": shape for name, shape in shapes.items()}
    path = diffusers_file(tmp_path / "d.safetensors", modules)
    out = load_file(converted(path, tmp_path / "out", "diffusers") / "pytorch_lora_weights.safetensors")
    assert out.keys() == {f"{name}.lora_{end}.weight" for name in modules for end in "AB"}
    message = "its names are those of LTX, and of PixArt, CogVideoX, Sana, Mochi and Cosmos: nothing in the file says which"
    for layout in ("kohya", "comfyui"):
        assert message in str(refusal(path, layout))
    original = diffusers_file(tmp_path / "c.safetensors", {f"diffusion_model.{name}": shape for name, shape in shapes.items()})
    assert message in str(refusal(original, "diffusers"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("blocks", "width", "outside"),
    [(28, 2048, ()), (48, 4096, ()), (2, H, ("patchify_proj",))],
)
def test_ltx_is_known_by_a_module_or_by_its_size(blocks: int, width: int, outside: tuple[str, ...], tmp_path: Path) -> None:
    shapes = _with_text_attention(blocks, width, width, "adaln_single.linear", *outside)
    path = diffusers_file(tmp_path / "c.safetensors", {f"diffusion_model.{name}": shape for name, shape in shapes.items()})
    theirs = converted(path, tmp_path / "theirs", "diffusers") / "pytorch_lora_weights.safetensors"
    names = {name.removesuffix(".lora_A.weight") for name in load_file(theirs)}
    assert "transformer.time_embed.linear" in names
    back = converted(theirs, tmp_path / "back", "comfyui") / "pytorch_lora_weights.safetensors"
    modules = {name.removesuffix(".lora_A.weight") for name in load_file(back) if name.endswith(".lora_A.weight")}
    assert modules == {f"diffusion_model.{name}" for name in shapes}


class _Checkpoint(dict[str, Any]):
    """The part of a checkpoint that adapters change. diffusers' converters pop the rest, too."""

    def pop(self, key: str, *default: Any) -> Any:  # type: ignore[override]
        torch = pytest.importorskip("torch")
        return super().pop(key, torch.zeros(6 * H))


def _by_diffusers(family: Family, added: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What is added to each weight, under the names that diffusers' converter of checkpoints gives them."""
    torch = pytest.importorskip("torch")
    single = pytest.importorskip("diffusers.loaders.single_file_utils")
    if family is QWEN_IMAGE:
        return added  # diffusers reads its checkpoints as they are
    # diffusers cuts these at the 3,072 columns of HunyuanVideo
    single_blocks = {name: array for name, array in added.items() if name.endswith("linear1")}
    rest = {name: array for name, array in added.items() if name not in single_blocks}
    whole = _Checkpoint({f"{name}.weight": torch.from_numpy(array) for name, array in rest.items()})
    if family is STABLE_DIFFUSION_3:  # the last block of its context is another one
        whole["joint_blocks.2.x_block.attn.qkv.weight"] = torch.zeros(3 * H, H)
    name = {WAN: "wan_transformer", HUNYUAN_VIDEO: "hunyuan_video_transformer", LTX: "ltx_transformer_checkpoint"}
    renamed = getattr(single, f"convert_{name.get(family, 'sd3_transformer_checkpoint')}_to_diffusers")(whole)
    cut = {
        f"single_transformer_{name.removeprefix('single_').removesuffix('linear1')}{part}": rows
        for name, array in single_blocks.items()
        for part, rows in zip(
            ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), np.split(array, [H, 2 * H, 3 * H]), strict=True
        )
    }
    return cut | {key.removesuffix(".weight"): value.numpy() for key, value in renamed.items() if key.endswith(".weight")}


def _of_family(path: Path, family: Family, *, flat: bool) -> dict[str, np.ndarray]:
    """A file with all modules of two blocks. Returns what is added to each, under the names of the first implementation."""
    rows = {3: 3 * H, 4: 7 * H}
    shapes = {name: (rows.get(len(family.fused.get(name, ())), H), H) for name in family.first}
    shapes = {name.replace("#", str(i)): shape for name, shape in shapes.items() for i in range(2)}
    written = {f"lora_unet_{n.replace('.', '_')}" if flat else f"diffusion_model.{n}": n for n in shapes}
    kohya(path, {name: shapes[dotted] for name, dotted in written.items()})
    by_module = deltas(load_file(path), ".lora_down.weight", ".lora_up.weight")
    return {dotted: by_module[name] for name, dotted in written.items()}


@pytest.mark.long
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_families_get_the_names_that_diffusers_gives_their_weights(family: Family, flat: bool, tmp_path: Path) -> None:
    """And back: every module in the table, split and joined again."""
    layout = "kohya" if flat else "comfyui"
    added = _of_family(tmp_path / "first.safetensors", family, flat=flat)
    theirs = converted(tmp_path / "first.safetensors", tmp_path / "theirs", "diffusers") / "pytorch_lora_weights.safetensors"
    actual = deltas(load_file(theirs))
    expected = _by_diffusers(family, added)
    assert len(actual) >= len(added)
    for name, array in actual.items():
        np.testing.assert_allclose(array, expected[name.removeprefix("transformer.")], rtol=1e-5, atol=1e-5, err_msg=name)
    back = load_file(next(converted(theirs, tmp_path / "back", layout).glob("*.safetensors")))
    ends = (".lora_down.weight", ".lora_up.weight") if flat else (".lora_A.weight", ".lora_B.weight")
    again = deltas(back, *ends)
    assert len(again) == len(added)
    for name, array in added.items():
        written = f"lora_unet_{name.replace('.', '_')}" if flat else f"diffusion_model.{name}"
        np.testing.assert_allclose(again[written], array, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_diffusers_own_converters_of_adapters_agree(tmp_path: Path) -> None:
    """Those of Wan (musubi-tuner's files), HunyuanVideo and Qwen-Image; they take modules of blocks."""
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("diffusers.loaders.lora_conversion_utils")
    from safetensors.torch import load_file as load_torch

    for family, convert, flat in (
        (WAN, theirs._convert_musubi_wan_lora_to_diffusers, True),
        (WAN, theirs._convert_non_diffusers_wan_lora_to_diffusers, False),
        (QWEN_IMAGE, theirs._convert_non_diffusers_qwen_lora_to_diffusers, True),
        (HUNYUAN_VIDEO, theirs._convert_hunyuan_video_lora_to_diffusers, False),
    ):
        path = tmp_path / f"{family.title} {flat}.safetensors"
        _of_family(path, family, flat=flat)
        start = "lora_unet_blocks" if flat and family is WAN else "lora_unet_transformer_blocks" if flat else ""
        kept = {key: value for key, value in load_torch(path).items() if key.startswith(start) and "linear1" not in key}
        if not flat:  # these have no alphas in diffusers' converters, or none outside of blocks
            kept = {
                key.replace("lora_down", "lora_A").replace("lora_up", "lora_B"): value
                for key, value in kept.items()
                if not key.endswith(".alpha") and "patch_embedding" not in key and "txt_in" not in key
            }
        save_file({key: value.numpy() for key, value in kept.items()}, path)
        expected = deltas({name: value.float().numpy() for name, value in convert(dict(kept)).items()})
        out = converted(path, tmp_path / f"{family.title} {flat}", "diffusers") / "pytorch_lora_weights.safetensors"
        actual = deltas(load_file(out))
        assert actual.keys() == expected.keys(), family.title
        for name, array in actual.items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert torch


def test_families_in_files_with_text_encoders_and_other_names(tmp_path: Path) -> None:
    sd3 = {"lora_unet_joint_blocks_0_x_block_attn_qkv": (3 * H, H), "lora_te3_encoder_block_0_layer_0_SelfAttention_q": (H, H)}
    path = kohya(tmp_path / "a.safetensors", sd3)
    actual = deltas(load_file(converted(path, tmp_path / "out", "diffusers") / "pytorch_lora_weights.safetensors"))
    blocks = [f"transformer.transformer_blocks.0.attn.to_{part}" for part in "qkv"]
    assert actual.keys() == {*blocks, "text_encoder_3.encoder.block.0.layer.0.SelfAttention.q"}
    for module, shape, message in (
        ("lora_unet_joint_blocks_0_x_block_attn_qkv", (3 * H + 3, H), "its parts are not square"),
        ("lora_unet_joint_blocks_0_x_block_attn_norm", (H, H), "modules have names that are not known"),
        ("lora_te_nothing", (H, H), "a name of the file is not known: 'lora_te_nothing'"),
    ):
        path = kohya(tmp_path / "a.safetensors", {**sd3, module: shape})
        assert message in str(refusal(path, "diffusers"))
    both = {"transformer.blocks.0.self_attn.q": (H, H), "transformer.blocks.0.attn1.to_q": (H, H)}
    path = diffusers_file(tmp_path / "b.safetensors", both)
    assert "two modules of the file are blocks.0.attn1.to_q" in str(refusal(path, "diffusers"))


@pytest.mark.long
def test_every_module_of_the_unets_has_its_name(tmp_path: Path) -> None:
    """Those that diffusers builds: `_` for dots and back, and those of Stable Diffusion XL's first implementation."""
    diffusers = pytest.importorskip("diffusers")
    sizes = {"block_out_channels": (32, 64, 64), "cross_attention_dim": 32, "attention_head_dim": 8, "layers_per_block": 2}
    down = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
    up = ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
    model = diffusers.UNet2DConditionModel(**sizes, down_block_types=down, up_block_types=up, norm_num_groups=8)
    modules = [name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv2d")]
    assert [_dotted(name.replace(".", "_")) for name in modules] == modules
    places = [f"input_blocks.{i}.{j}" for i in range(1, 9) for j in (0, 1)]
    places += [f"output_blocks.{i}.{j}" for i in range(9) for j in (0, 1, 2)] + [f"middle_block.{i}" for i in range(3)]
    inside = ["in_layers.2", "out_layers.3", "emb_layers.1", "skip_connection", "op", "conv", "proj_in"]
    unet_names = {_unet_name(f"{place}.{inner}") for place in places for inner in inside}
    kinds = (".conv1", ".conv2", ".time_emb_proj", ".conv", ".proj_in")
    assert {name for name in modules if name.endswith(kinds) and not name.startswith("time")} <= unet_names
    assert all(_unet_name(_first_name(name)) == name for name in unet_names if name)
