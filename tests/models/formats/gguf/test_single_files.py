"""GGUF files for ComfyUI: diffusion models and T5 text encoders, as single files. The package gguf writes and decodes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

import weightsmith
from weightsmith._base.errors import FormatError, PlanError, Unsupported
from weightsmith._files.hf_folder import natural_key
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._models.formats.gguf.layout import DIFFUSION_ARCHITECTURES
from weightsmith._models.formats.gguf.reading import open_files
from weightsmith.testing import SourceCase, SourceTests

CONV = "input_blocks.1.0.in_layers.2.weight"
Stored = dict[str, tuple[np.ndarray, str]]


def normal(seed: int, shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, str]) -> Stored:
    rng = np.random.default_rng(seed)
    return {name: (rng.standard_normal(shape).astype(np.float32), kinds.get(name, "Q8_0")) for name, shape in shapes.items()}


def flux(seed: int = 0) -> Stored:
    shapes = {f"double_blocks.{i}.img_attn.proj.weight": (32, 256) for i in range(2)}
    shapes |= {"double_blocks.0.img_attn.proj.bias": (32,), "img_in.weight": (32, 64)}
    kinds = {
        "double_blocks.0.img_attn.proj.bias": "F32",
        "double_blocks.1.img_attn.proj.weight": "Q4_0",
        "img_in.weight": "BF16",
    }
    return normal(seed, shapes, kinds)


def unet(seed: int = 0) -> Stored:
    """The convolution is [32, 16, 3, 3]: rows of 3 numbers hold no blocks."""
    return normal(seed, {CONV: (32, 16, 3, 3), "out.2.bias": (4,), "time_embed.0.weight": (8, 64)}, {"out.2.bias": "F16"})


def write(
    path: Path, architecture: str | None, tensors: Stored, flat: Sequence[str] = (), shapes: Mapping[str, Any] | None = None
) -> Path:
    """The file that ComfyUI-GGUF's converter and llama-quantize make. flat: stored as rows of 256 numbers."""
    writer = gguf.GGUFWriter(path, architecture or "none")
    if architecture is None:
        writer.kv_data[0].pop("general.architecture")
    for name in flat:
        writer.add_array(f"comfy.gguf.orig_shape.{name}", list(tensors[name][0].shape))
    for key, value in (shapes or {}).items():
        writer.add_array(f"comfy.gguf.orig_shape.{key}", value)
    for name, (values, kind) in tensors.items():
        stored = gguf.GGMLQuantizationType[kind]
        rows = values.reshape(-1, 256) if name in flat or name in (shapes or {}) else values
        writer.add_tensor(name, gguf.quants.quantize(rows, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def decoded(values: np.ndarray, kind: str) -> np.ndarray:
    """As the package gguf decodes them."""
    stored = gguf.GGMLQuantizationType[kind]
    flat = values.reshape(-1, 256) if values.ndim > 2 and kind != "F32" else values
    numbers = gguf.quants.dequantize(gguf.quants.quantize(flat, stored), stored).reshape(values.shape)
    return numbers.astype({"F16": np.float16, "BF16": ml_dtypes.bfloat16}.get(kind, np.float32))


def expected(tensors: Stored) -> dict[str, np.ndarray]:
    return {name: decoded(*tensors[name]) for name in sorted(tensors, key=natural_key)}


class TestSingleFile(SourceTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        one = write(tmp_path / "a.gguf", "sdxl", unet(), [CONV])
        other = write(tmp_path / "b.gguf", "flux", flux())
        return SourceCase(
            lambda: open_files([one], None, "a").source, expected(unet()), lambda: open_files([other], None, "b").source
        )


@pytest.mark.parametrize("architecture", DIFFUSION_ARCHITECTURES)
def test_every_family_is_read_under_the_names_in_the_file(architecture: str, tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path / "a.gguf", architecture, flux())) as model:
        assert (model.config, model.files, model.decoded) == (None, (), "GGUF, mostly Q8_0")
        assert list(model) == list(expected(flux()))


def test_convolutions_over_time_have_five_dimensions(tmp_path: Path) -> None:
    tensors = normal(0, {"patch_embedding.weight": (8, 4, 1, 2, 2)}, {"patch_embedding.weight": "F32"})
    with open_checkpoint(write(tmp_path / "a.gguf", "wan", tensors)) as model:
        np.testing.assert_array_equal(model.read("patch_embedding.weight"), tensors["patch_embedding.weight"][0])
    with pytest.raises(FormatError, match="5 dimensions, and 1 to 4 are allowed"):
        open_checkpoint(write(tmp_path / "b.gguf", "llama", tensors))


@pytest.mark.parametrize(
    ("tensors", "flat", "dtype"),
    [
        (unet(), [CONV], "F16"),
        (flux(), [], "BF16"),
        ({name: (values, "F32") for name, (values, _) in flux().items()}, [], "F32"),
        ({name: (values, "F16") for name, (values, _) in unet().items()}, [], "F16"),
        (
            normal(
                0,
                {"a.weight": (8, 64), "b.weight": (2, 4), "b.bias": (4,)},
                {"a.weight": "F16", "b.weight": "F32", "b.bias": "F32"},
            ),
            [],
            "F16",
        ),
    ],
)
def test_it_is_dequantised_to_the_dtype_it_was_made_of(tensors: Stored, flat: list[str], dtype: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "sdxl", tensors, flat)
    weightsmith.dequantize(path, tmp_path / "out", fsync=False)
    numpy = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}[dtype]
    output = load_file(tmp_path / "out" / "model.safetensors")
    assert output.keys() == tensors.keys()
    for name, values in expected(tensors).items():
        np.testing.assert_array_equal(output[name], values.astype(np.float32).astype(numpy), strict=True)


@pytest.mark.long
def test_it_merges_with_a_safetensors_file_and_with_block_weights(tmp_path: Path) -> None:
    plain = {name: values for name, (values, _) in flux(1).items()}
    save_file(plain, tmp_path / "b.safetensors")
    weight = [{"blocks": "flux", "values": {"D00": 0.25}}, {"value": 0.5}]
    recipe = {
        "merge_method": "linear",
        "parameters": {"normalize": False},
        "dtype": "float32",
        "models": [
            {"model": str(write(tmp_path / "a.gguf", "flux", flux())), "parameters": {"weight": weight}},
            {"model": str(tmp_path / "b.safetensors"), "parameters": {"weight": 0.5}},
        ],
    }
    output = load_file(weightsmith.merge(recipe, tmp_path / "out", fsync=False).out / "model.safetensors")
    for name, values in expected(flux()).items():
        share = 0.25 if name.startswith("double_blocks.0.") else 0.5
        np.testing.assert_allclose(output[name], share * values.astype(np.float32) + 0.5 * plain[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [[32, 16, 3, 4], [0], [-32, -16, 3, 3], [1, 1, 32, 16, 3, 3], [4608.0]])
def test_shapes_that_do_not_fit_are_refused(shape: list[Any], tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "sdxl", unet(), shapes={CONV: shape})
    with pytest.raises(FormatError, match=f"comfy.gguf.orig_shape.{CONV} is "):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [("pig", r"gguf-connector \(pig\)"), ("cow", r"gguf-connector \(cow\)"), (None, "stable-diffusion")],
)
def test_files_of_other_programs_are_refused_by_name(architecture: str | None, words: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=words) as caught:
        open_checkpoint(write(tmp_path / "a.gguf", architecture, flux()))
    assert "convert.py" in str(caught.value)


@pytest.mark.parametrize("key", ["general.architecture", "general.type"])
def test_a_list_of_numbers_in_place_of_a_text_is_refused(key: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.kv_data[0].pop(key, None)
    writer.add_array(key, [1, 2])
    writer.add_tensor("double_blocks.0.img_mod.lin.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FormatError, match=r"general.architecture is .* not a name|llama.block_count is missing"):
        open_checkpoint(tmp_path / "a.gguf")
    with pytest.raises(PlanError):
        weightsmith.inspect(tmp_path / "a.gguf")


def test_a_file_that_was_read_is_written_again(tmp_path: Path) -> None:
    tensors = {name: (values, kind if kind != "Q4_0" else "Q8_0") for name, (values, kind) in flux().items()}
    path = write(tmp_path / "a.gguf", "flux", tensors)
    weightsmith.quantize(path, tmp_path / "out", format="gguf-q8_0", out_dtype="float32", fsync=False)
    again = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.tensor_type.name == "Q8_0":
            assert again[tensor.name].data.tobytes() == tensor.data.tobytes()


def test_a_part_of_a_pipeline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", "transformer": ["diffusers", "X"]}))
    write(tmp_path / "transformer" / "model.gguf", "flux", flux())
    with pytest.raises(Unsupported, match="a part of a pipeline in a GGUF file"):
        open_checkpoint(tmp_path)


def t5(gated: bool) -> dict[str, str]:
    """llama.cpp's name of each tensor of a tiny encoder, as the package gguf maps them → transformers' name."""
    sizes = {"vocab_size": 8, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, feed_forward_proj="gated-gelu" if gated else "relu")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, 2)
    hub = [name for name in transformers.T5EncoderModel(config).state_dict() if name != "encoder.embed_tokens.weight"]
    return {str(names.get_name(name, try_suffixes=(".weight",))): name for name in hub}


@pytest.mark.parametrize("architecture", ["t5", "t5encoder"])
@pytest.mark.parametrize("gated", [True, False])
def test_t5_has_the_names_of_transformers(architecture: str, gated: bool, tmp_path: Path) -> None:
    names = t5(gated)
    tensors = normal(0, dict.fromkeys(names, (8, 32)), {})
    with open_checkpoint(write(tmp_path / "a.gguf", architecture, tensors)) as model:
        assert set(model) == set(names.values())
        for name, hub in names.items():
            np.testing.assert_array_equal(model.read(hub), decoded(*tensors[name]))


def test_t5_with_a_decoder_is_refused(tmp_path: Path) -> None:
    tensors = normal(0, {"token_embd.weight": (8, 32), "dec.blk.0.attn_q.weight": (8, 32)}, {})
    with pytest.raises(Unsupported, match=r"'dec.blk.0.attn_q.weight' does not belong to the encoder of T5"):
        open_checkpoint(write(tmp_path / "a.gguf", "t5", tensors))


@pytest.mark.long
def test_a_note_says_that_a_file_of_umt5_lacks_the_tokenizer(tmp_path: Path) -> None:
    small = {"token_embd.weight": (64, 32)}
    with open_checkpoint(write(tmp_path / "a.gguf", "t5encoder", normal(0, small, {}))) as model:
        assert model.notes == ()
    whole = {"token_embd.weight": (256_384, 32)}
    with open_checkpoint(write(tmp_path / "b.gguf", "t5encoder", normal(0, whole, {}))) as model:
        assert [note.where for note in model.notes] == ["token_embd.weight"]
