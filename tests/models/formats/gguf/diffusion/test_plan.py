"""GGUF files of diffusion models: what they hold, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import weightsmith
from tests.comfyui_gguf import module, needs_comfyui_gguf
from tests.diffusion_zoo import Arrays, read_numbers
from weightsmith._base.errors import PlanError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats import Encoding, find_encoding
from weightsmith._models.formats.gguf.diffusion.families import FAMILIES, MIXTURES
from weightsmith._models.formats.gguf.layout import DIFFUSION_ARCHITECTURES
from weightsmith._models.formats.gguf.writing import NEEDS_IMPORTANCES
from weightsmith.testing import EncodingTests

PREFIX = "model.diffusion_model."
FLUX = {
    "double_blocks.0.img_attn.proj.weight": (64, 256),
    "double_blocks.0.img_attn.qkv.weight": (192, 256),
    "double_blocks.0.img_mlp.0.bias": (256,),
    "double_blocks.0.img_mlp.2.weight": (64, 96),
    "img_in.weight": (64, 32),
}
UNET = {
    "input_blocks.1.0.in_layers.2.weight": (32, 16, 3, 3),
    "input_blocks.1.1.proj_in.weight": (64, 320),
    "label_emb.0.0.weight": (64, 256),
    "out.2.bias": (4,),
}
WAN = {
    "blocks.0.self_attn.norm_q.weight": (64,),
    "blocks.0.self_attn.v.weight": (64, 256),
    "blocks.0.modulation": (1, 6, 256),
    "text_embedding.2.weight": (64, 64),
    "head.modulation": (1, 2, 64),
    "patch_embedding.weight": (64, 16, 1, 2, 2),
    "img_emb.emb_pos": (1, 32, 64),
}


def normal(shapes: Mapping[str, tuple[int, ...]], seed: int = 0, dtype: type = ml_dtypes.bfloat16) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write(path: Path, tensors: Arrays, prefix: str = "") -> Path:
    save_file({prefix + name: values for name, values in tensors.items()}, path)
    return path


def stored(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path / "model.gguf").tensors}


def kinds(path: Path) -> dict[str, str]:
    return {name: tensor.tensor_type.name for name, tensor in stored(path).items()}


@pytest.mark.parametrize(
    "name",
    ["gguf-comfyui-f32", "gguf-comfyui-bf16-swapped", "gguf-comfyui-q4_k", "gguf-comfyui-q8_0", "gguf-comfyui-q5_1-folded"],
)
class TestEncoding(EncodingTests):
    @pytest.fixture
    def encoding(self, name: str) -> Encoding:
        return find_encoding(name)


@pytest.mark.parametrize("kind", sorted(NEEDS_IMPORTANCES))
def test_types_that_need_importances_are_refused(kind: str) -> None:
    """A plan may come from anywhere."""
    spec = TensorSpec("img_in.weight", DTYPES["BF16"], (64, 256))
    assert find_encoding(f"gguf-comfyui-{kind.lower()}").refusal(spec) == "its type needs importances, and it has none"


def test_every_family_that_is_read_is_written() -> None:
    assert {family.name for family in FAMILIES} == set(DIFFUSION_ARCHITECTURES)


@pytest.mark.parametrize("prefix", ["", PREFIX, "diffusion_model.", "net."])
def test_a_single_file_keeps_its_names_without_the_prefix(prefix: str, tmp_path: Path) -> None:
    tensors = normal(FLUX)
    weightsmith.quantize(
        write(tmp_path / "flux.safetensors", tensors, prefix), tmp_path / "out", format="gguf-q8_0", fsync=False
    )
    assert kinds(tmp_path / "out") == {
        "double_blocks.0.img_attn.proj.weight": "Q8_0",
        "double_blocks.0.img_attn.qkv.weight": "Q8_0",
        "double_blocks.0.img_mlp.0.bias": "F32",
        "double_blocks.0.img_mlp.2.weight": "Q8_0",
        "img_in.weight": "BF16",
    }
    dequantised = weightsmith.dequantize(tmp_path / "out" / "model.gguf", tmp_path / "plain", fsync=False)
    assert not dequantised.plan.warnings  # that it has no config.json is as it should be
    output = load_file(tmp_path / "plain" / "model.safetensors")
    for name, values in tensors.items():
        largest = np.abs(values.astype(np.float32)).max()
        np.testing.assert_allclose(output[name].astype(np.float32), values.astype(np.float32), rtol=2**-8, atol=largest / 200)


def test_rows_of_no_whole_block_are_f16_with_a_warning(tmp_path: Path) -> None:
    path = write(tmp_path / "flux.safetensors", normal(FLUX))
    merged = weightsmith.quantize(path, tmp_path / "out", format="gguf-q4_k_m", fsync=False)
    assert kinds(tmp_path / "out")["double_blocks.0.img_mlp.2.weight"] == "F16"
    assert any("1 matrix is stored as F16: 96 columns" in finding.what for finding in merged.plan.warnings)


def test_a_checkpoints_vae_and_text_encoders_are_left_out_with_a_warning(tmp_path: Path) -> None:
    tensors = {PREFIX + name: values for name, values in normal(FLUX).items()}
    tensors |= normal({"vae.decoder.conv_in.weight": (4, 4, 3, 3), "text_encoders.t5xxl.shared.weight": (8, 4)})
    save_file(tensors, tmp_path / "flux.safetensors")
    merged = weightsmith.quantize(tmp_path / "flux.safetensors", tmp_path / "out", format="gguf-bf16", fsync=False)
    assert stored(tmp_path / "out").keys() == FLUX.keys()
    assert any(finding.what.startswith("2 tensors are left out") for finding in merged.plan.warnings)
    assert {dropped.tensor for dropped in merged.plan.dropped} == {
        "vae.decoder.conv_in.weight",
        "text_encoders.t5xxl.shared.weight",
    }


def test_settings_in_metadata_are_named_since_comfyui_gguf_does_not_pass_them_on(tmp_path: Path) -> None:
    save_file(normal(FLUX), tmp_path / "flux.safetensors", {"config": '{"transformer": {"rope_type": "split"}}'})
    merged = weightsmith.quantize(tmp_path / "flux.safetensors", tmp_path / "out", format="gguf-bf16", fsync=False)
    assert any("settings of the model (config)" in finding.what for finding in merged.plan.warnings)
    weightsmith.quantize(tmp_path / "flux.safetensors", tmp_path / "fp8", format="comfyui-fp8", fsync=False)
    with safe_open(tmp_path / "fp8" / "model.safetensors", "np") as file:
        assert file.metadata()["config"] == '{"transformer": {"rope_type": "split"}}'


def test_ltx_2_is_not_taken_for_ltx_video(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "ltxv")
    names = [*family.marks[0], "audio_adaln_single.linear.weight"]
    path = write(tmp_path / "ltx2.safetensors", normal(dict.fromkeys(names, (32, 32))), PREFIX)
    with pytest.raises(PlanError, match="ComfyUI-GGUF does not load LTX-2"):
        weightsmith.quantize(path, tmp_path / "out", format="gguf-q8_0", fsync=False)


MARKERS = {
    "v_pred": np.zeros(0, np.float32),
    "ztsnr": np.zeros(0, np.float16),
    "edm_vpred.sigma_max": np.array(120, np.float32),
    "edm_mean": np.ones((1, 4, 1, 1), ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("kind", ["q8_0", "bf16"])
def test_tensors_after_which_comfyui_chooses_how_it_samples_are_kept(kind: str, tmp_path: Path) -> None:
    tensors = {PREFIX + name: values for name, values in normal(UNET).items()} | MARKERS
    save_file(tensors | normal({"first_stage_model.decoder.conv_in.weight": (4, 4, 3, 3)}), tmp_path / "sdxl.safetensors")
    merged = weightsmith.quantize(tmp_path / "sdxl.safetensors", tmp_path / "out", format=f"gguf-{kind}", fsync=False)
    output = stored(tmp_path / "out")
    assert output.keys() == UNET.keys() | MARKERS.keys()
    assert output["edm_vpred.sigma_max"].data.tolist() == [120]
    assert {output[name].tensor_type.name for name in MARKERS} <= {"F32", "F16"}
    assert [output[name].shape.tolist() for name in ("v_pred", "ztsnr", "edm_mean")] == [[0], [0], [1, 1, 4, 1]]
    assert any(finding.what.startswith("1 tensor is left out: ") for finding in merged.plan.warnings)
    weightsmith.dequantize(tmp_path / "out" / "model.gguf", tmp_path / "plain", fsync=False)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert [plain[name].shape for name in ("v_pred", "ztsnr", "edm_mean")] == [(0,), (0,), (1, 4, 1, 1)]


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_empty_tensors_by_which_comfyui_tells_models_are_kept(prefix: str, tmp_path: Path) -> None:
    tensors = normal(FLUX) | {"__x0__": np.zeros(0, np.float32)}
    path = write(tmp_path / "radiance.safetensors", tensors, prefix)
    weightsmith.quantize(path, tmp_path / "out", format="gguf-q8_0", fsync=False)
    assert stored(tmp_path / "out").keys() == tensors.keys()
    other = write(tmp_path / "other.safetensors", normal(FLUX, 1) | {"__x0__": np.zeros(0, np.float32)}, prefix)
    models = [{"model": str(file), "parameters": {"weight": 0.5}} for file in (path, other)]
    recipe = {"merge_method": "linear", "models": models}
    weightsmith.merge(recipe, tmp_path / "merged", quantize="gguf-q8_0", fsync=False)
    assert stored(tmp_path / "merged")["__x0__"].shape.tolist() == [0]
    whole = write(tmp_path / "matrix.safetensors", normal(FLUX) | {"x.weight": np.zeros((0, 4), np.float32)}, prefix)
    with pytest.raises(PlanError, match=r"'x.weight' cannot be stored .*: its shape is \[0, 4\]"):
        weightsmith.quantize(whole, tmp_path / "no", format="gguf-q8_0", fsync=False)


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_convolutions_are_folded_and_read_back(kind: str, tmp_path: Path) -> None:
    tensors = normal(UNET, dtype=np.float16)
    path = write(tmp_path / "sdxl.safetensors", tensors, PREFIX)
    weightsmith.quantize(path, tmp_path / "out", format=f"gguf-{kind}", fsync=False)
    default = {"q8_0": "Q8_0", "q4_k_m": "Q4_K"}[kind]
    assert kinds(tmp_path / "out") == dict(zip(UNET, [default, default, "F16", "F16"], strict=True))
    assert stored(tmp_path / "out")["input_blocks.1.0.in_layers.2.weight"].shape.tolist() == [256, 18]
    weightsmith.dequantize(tmp_path / "out" / "model.gguf", tmp_path / "plain", fsync=False)
    output = load_file(tmp_path / "plain" / "model.safetensors")
    for name, values in tensors.items():
        assert output[name].shape == values.shape
        error = output[name].astype(np.float32) - values.astype(np.float32)
        assert np.sqrt((error**2).mean()) < {"q8_0": 0.01, "q4_k_m": 0.1}[kind], name


@pytest.mark.long
def test_a_convolution_of_several_tiles_has_the_bytes_of_another_writer(tmp_path: Path) -> None:
    name = "output_blocks.3.0.in_layers.2.weight"  # 1,843,200 elements, and a tile of rows of 3 is no multiple of 256
    tensors = normal(UNET | {name: (320, 640, 3, 3)})
    models = [
        write(tmp_path / f"{i}.safetensors", {k: (v * (i + 1)).astype(v.dtype) for k, v in tensors.items()}) for i in range(2)
    ]
    recipe = {"merge_method": "linear", "models": [{"model": str(m), "parameters": {"weight": 0.5}} for m in models]}
    weightsmith.merge(recipe, tmp_path / "mean", quantize="gguf-q8_0", out_dtype="float32", fsync=False)
    weightsmith.quantize(models[0], tmp_path / "copy", format="gguf-q8_0", fsync=False)
    for factor, out in ((1.5, "mean"), (1, "copy")):
        rows = (tensors[name].astype(np.float32) * np.float32(factor)).reshape(-1, 256)
        theirs = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
        assert stored(tmp_path / out)[name].data.tobytes() == theirs.tobytes()


@pytest.mark.long
def test_parameters_and_convolutions_over_time_are_f32(tmp_path: Path) -> None:
    weightsmith.quantize(write(tmp_path / "wan.safetensors", normal(WAN)), tmp_path / "out", format="gguf-q4_k_m", fsync=False)
    assert kinds(tmp_path / "out") == {
        "blocks.0.self_attn.norm_q.weight": "F32",
        "blocks.0.self_attn.v.weight": "Q6_K",
        "blocks.0.modulation": "F32",
        "text_embedding.2.weight": "BF16",
        "head.modulation": "F32",
        "patch_embedding.weight": "F32",
        "img_emb.emb_pos": "F32",
    }
    assert stored(tmp_path / "out")["blocks.0.modulation"].shape.tolist() == [256, 6, 1]


def test_a_merge_written_as_gguf_is_the_merge_quantised_afterwards(tmp_path: Path) -> None:
    for name, shapes in (("sdxl", UNET), ("wan", WAN)):
        files = [write(tmp_path / f"{name}{i}.safetensors", normal(shapes, i), PREFIX) for i in range(3)]
        models = [{"model": str(file), "parameters": {"weight": 0.5, "density": 0.5}} for file in files[1:]]
        recipe = {"merge_method": "ties", "base_model": str(files[0]), "models": models, "dtype": "bfloat16"}
        weightsmith.merge(recipe, tmp_path / name / "once", quantize="gguf-q4_k_m", fsync=False)
        weightsmith.merge(recipe, tmp_path / name / "plain", fsync=False)
        plain = tmp_path / name / "plain" / "model.safetensors"
        weightsmith.quantize(plain, tmp_path / name / "twice", format="gguf-q4_k_m", fsync=False)
        assert (tmp_path / name / "once" / "model.gguf").read_bytes() == (tmp_path / name / "twice" / "model.gguf").read_bytes()


def small_flux(seed: int) -> Arrays:
    """In the names of diffusers."""
    block = "transformer_blocks.0.attn"
    shapes = {f"{block}.{part}.weight": (64, 32) for part in ("to_q", "to_k", "to_v", "to_out.0")}
    shapes |= {f"{block}.{part}.bias": (64,) for part in ("to_q", "to_k", "to_v")}
    return normal(shapes | {"norm_out.linear.weight": (128, 32), "norm_out.linear.bias": (128,)}, seed, np.float32)


def folder(path: Path, tensors: Arrays, kind: str = "FluxTransformer2DModel") -> Path:
    path.mkdir(parents=True)
    save_file(tensors, path / "diffusion_pytorch_model.safetensors")
    (path / "config.json").write_text(json.dumps({"_class_name": kind}))
    return path


def test_a_merge_of_folders_joins_matrices_and_swaps_halves(tmp_path: Path) -> None:
    a, b = small_flux(0), small_flux(1)
    models = [str(folder(tmp_path / name, tensors)) for name, tensors in (("a", a), ("b", b))]
    recipe = {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 0.5}} for m in models]}
    weightsmith.merge(recipe, tmp_path / "out", quantize="gguf-f32", out_dtype="float32", fsync=False)
    output = read_numbers(tmp_path / "out" / "model.gguf")
    mean = {name: (a[name] + b[name]) / 2 for name in a}
    for end in ("weight", "bias"):
        parts = [mean[f"transformer_blocks.0.attn.to_{part}.{end}"] for part in "qkv"]
        np.testing.assert_allclose(output[f"double_blocks.0.img_attn.qkv.{end}"], np.concatenate(parts), rtol=1e-6, atol=1e-7)
        halves = mean[f"norm_out.linear.{end}"]
        swapped = np.concatenate([halves[64:], halves[:64]])
        np.testing.assert_allclose(output[f"final_layer.adaLN_modulation.1.{end}"], swapped, rtol=1e-6, atol=1e-7)


def test_the_denoiser_of_a_pipeline_is_written(tmp_path: Path) -> None:
    folder(tmp_path / "flux" / "transformer", small_flux(0))
    folder(tmp_path / "flux" / "vae", normal({"conv_in.weight": (4, 4)}), "AutoencoderKL")
    index = {"transformer": ["diffusers", "FluxTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"]}
    (tmp_path / "flux" / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **index}))
    merged = weightsmith.quantize(tmp_path / "flux", tmp_path / "whole", format="gguf-q8_0", fsync=False)
    assert any("other parts of the pipeline are left out: vae" in finding.what for finding in merged.plan.warnings)
    weightsmith.quantize(tmp_path / "flux" / "transformer", tmp_path / "part", format="gguf-q8_0", fsync=False)
    assert (tmp_path / "whole" / "model.gguf").read_bytes() == (tmp_path / "part" / "model.gguf").read_bytes()
    assert not (tmp_path / "whole" / "model_index.json").exists()
    assert "ComfyUI-GGUF" in (tmp_path / "whole" / "README.md").read_text()
    folder(tmp_path / "flux" / "transformer_2", small_flux(1))
    index["transformer_2"] = index["transformer"]
    (tmp_path / "flux" / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **index}))
    with pytest.raises(PlanError, match="a pipeline of several models"):
        weightsmith.quantize(tmp_path / "flux", tmp_path / "two", format="gguf-q8_0")


def test_thresholds_are_those_of_the_whole_checkpoint(tmp_path: Path) -> None:
    files = []
    for i in range(3):
        tensors = {PREFIX + name: values for name, values in normal(FLUX, i).items()}
        files.append(tmp_path / f"{i}.safetensors")
        save_file(tensors | normal({"vae.decoder.conv_in.weight": (64, 64, 3, 3)}, 3 + i), files[-1])
    models = [{"model": str(file), "parameters": {"weight": 0.5, "density": 0.5}} for file in files[1:]]
    recipe = {"merge_method": "ties", "base_model": str(files[0]), "models": models, "parameters": {"scope": "model"}}
    weightsmith.merge(recipe, tmp_path / "once", quantize="gguf-q8_0", fsync=False)
    weightsmith.merge(recipe, tmp_path / "plain", fsync=False)
    weightsmith.quantize(tmp_path / "plain" / "model.safetensors", tmp_path / "twice", format="gguf-q8_0", fsync=False)
    assert (tmp_path / "once" / "model.gguf").read_bytes() == (tmp_path / "twice" / "model.gguf").read_bytes()


def test_a_merge_of_pipelines_is_that_of_their_denoisers(tmp_path: Path) -> None:
    for i, name in enumerate("ab"):
        folder(tmp_path / name / "transformer", small_flux(i))
        folder(tmp_path / name / "vae", normal({"conv_in.weight": (4, 4)}, i), "AutoencoderKL")
        index = {"transformer": ["diffusers", "FluxTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"]}
        (tmp_path / name / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **index}))
    written = []
    for part in ("", "transformer"):
        models = [{"model": str(tmp_path / name / part), "parameters": {"weight": 0.5}} for name in "ab"]
        out = tmp_path / f"out{part}"
        weightsmith.merge({"merge_method": "linear", "models": models}, out, quantize="gguf-q8_0", fsync=False)
        written.append((out / "model.gguf").read_bytes())
    assert written[0] == written[1]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_models_of_8_bit_floats_are_f16_without_loss(dtype: type, tmp_path: Path) -> None:
    tensors = normal(FLUX, dtype=dtype)
    weightsmith.quantize(write(tmp_path / "a.safetensors", tensors), tmp_path / "out", format="gguf-f16", fsync=False)
    assert set(kinds(tmp_path / "out").values()) == {"F16"}
    for name, tensor in stored(tmp_path / "out").items():
        np.testing.assert_array_equal(tensor.data.reshape(FLUX[name]), tensors[name].astype(np.float16))


def test_types_and_keys_can_be_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "flux.safetensors", normal(FLUX))
    settings = {"tensor_types": ["qkv=q8_0", "img_in=q4_0"], "metadata": ["name=Mine"]}
    weightsmith.quantize(path, tmp_path / "out", format="gguf-q4_k_s", fsync=False, **settings)
    chosen = kinds(tmp_path / "out")
    assert (chosen["double_blocks.0.img_attn.qkv.weight"], chosen["img_in.weight"]) == ("Q8_0", "Q4_0")
    assert gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields["general.name"].contents() == "Mine"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_types": ["attn_q=q8_0"]}, "no tensor of this model has a name that matches attn_q"),
        ({"tensor_types": ["qkv=iq2_xxs"]}, "IQ2_XXS needs importances, and diffusion models have none"),
        ({"metadata": ["comfy.gguf.orig_shape.img_in.weight=1"]}, "comfy"),
        ({"calibration": "built-in"}, "importances are measured by running a language model"),
        ({"size_bytes": 1000}, "importances are measured by running a language model"),
        ({"imatrix": "imatrix.dat"}, "importance matrices are for language models, and this is not one"),
        ({"format": "gguf-iq4_xs"}, "ComfyUI-GGUF has no rules for diffusion models in gguf-iq4_xs"),
        ({"format": "gguf-nvfp4"}, "ComfyUI-GGUF has no rules for diffusion models in gguf-nvfp4"),
    ],
)
def test_settings_of_language_models_are_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "flux.safetensors", normal(FLUX))
    (tmp_path / "imatrix.dat").touch()
    if "imatrix" in settings:
        settings = {"imatrix": str(tmp_path / "imatrix.dat")}
    with pytest.raises(PlanError, match=words):
        weightsmith.quantize(path, tmp_path / "out", **{"format": "gguf-q4_k_m", **settings})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("clip_txt_mapper.weight", "ComfyUI-GGUF does not load Stable Cascade"),
        ("model.diffusion_model.blocks.0.attn.qkv_x.weight", "ComfyUI-GGUF does not load Mochi"),
        ("model.layers.0.mlp.up_proj.weight", "it has no config.json, as language models have it"),
    ],
)
def test_other_models_are_refused_by_name(name: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "other.safetensors", normal({name: (4, 32)}))
    with pytest.raises(PlanError, match=words) as caught:
        weightsmith.quantize(path, tmp_path / "out", format="gguf-q8_0")
    assert "Flux.1, Flux.2, Chroma; Stable Diffusion 3" in str(caught.value)


def test_other_classes_of_diffusers_are_refused_by_name(tmp_path: Path) -> None:
    path = folder(tmp_path / "mochi", normal({"a.weight": (4, 32)}), "MochiTransformer3DModel")
    with pytest.raises(PlanError, match="ComfyUI-GGUF does not load 'MochiTransformer3DModel'"):
        weightsmith.quantize(path, tmp_path / "out", format="gguf-q8_0")


def test_unknown_names_and_missing_parts_of_diffusers_are_refused(tmp_path: Path) -> None:
    tensors = small_flux(0)
    path = folder(tmp_path / "a", tensors | normal({"extra.weight": (4, 4)}))
    with pytest.raises(PlanError, match="1 of its 10 tensors have no name in single files") as caught:
        weightsmith.quantize(path, tmp_path / "out", format="gguf-q8_0")
    assert "extra.weight" in str(caught.value)
    del tensors["transformer_blocks.0.attn.to_k.bias"]
    path = folder(tmp_path / "b", tensors)
    with pytest.raises(PlanError, match=r"transformer_blocks.0.attn.to_k.bias is missing"):
        weightsmith.quantize(path, tmp_path / "out", format="gguf-q8_0")


def test_a_block_whose_number_is_absurd_is_refused(tmp_path: Path) -> None:
    name = f"transformer_blocks.{'1' * 5000}.norm1_context.linear.weight"
    path = folder(tmp_path / "a", normal({name: (64, 32)}), "SD3Transformer2DModel")
    with pytest.raises(PlanError, match="1 of its 1 tensors have no name in single files"):
        weightsmith.quantize(path, tmp_path / "out", format="gguf-q8_0")


def test_names_have_up_to_127_bytes(tmp_path: Path) -> None:
    long = "double_blocks.0." + "x" * 104 + ".weight"
    assert len(long) == 127
    path = write(tmp_path / "a.safetensors", normal(FLUX | {long: (4, 32)}))
    weightsmith.quantize(path, tmp_path / "out", format="gguf-q8_0", fsync=False)
    assert long in stored(tmp_path / "out")
    path = write(tmp_path / "b.safetensors", normal(FLUX | {f"x{long}": (4, 32)}))
    with pytest.raises(weightsmith.WeightsmithError, match="at most 127 bytes"):
        weightsmith.quantize(path, tmp_path / "no", format="gguf-q8_0")


@needs_comfyui_gguf
@pytest.mark.parametrize("kind", sorted(MIXTURES))
@pytest.mark.parametrize(("shapes", "family"), [(FLUX, "flux"), (UNET, "sdxl"), (WAN, "wan")])
def test_comfyui_gguf_loads_the_same_numbers(kind: str, shapes: dict[str, Any], family: str, tmp_path: Path) -> None:
    import torch

    path = write(tmp_path / "a.safetensors", normal(shapes))
    weightsmith.quantize(path, tmp_path / "out", format=f"gguf-{kind.lower()}", fsync=False)
    state, arch = module("loader").gguf_sd_loader(str(tmp_path / "out" / "model.gguf"), return_arch=True)
    assert (arch, state.keys()) == (family, shapes.keys())
    weightsmith.dequantize(tmp_path / "out" / "model.gguf", tmp_path / "plain", out_dtype="float32", fsync=False)
    ours = load_file(tmp_path / "plain" / "model.safetensors")
    for name, tensor in state.items():
        assert tuple(tensor.shape) == shapes[name]
        theirs = torch.Tensor(module("dequant").dequantize_tensor(tensor, torch.float32, torch.float32)).numpy()
        np.testing.assert_allclose(theirs, ours[name], rtol=1e-3, atol=1e-3)
