"""T5's encoder in GGUF files for ComfyUI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

import weightsmith
from tests.comfyui_gguf import module, needs_comfyui_gguf
from tests.diffusion_zoo import Arrays
from weightsmith._base.errors import PlanError

COPY = "encoder.embed_tokens.weight"
SIZES = {"vocab_size": 64, "d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 2, "num_heads": 4}


def t5(*, gated: bool = True, kind: str = "T5") -> Arrays:
    """A tiny encoder, with a copy of its embedding."""
    config = getattr(transformers, f"{kind}Config")(**SIZES, feed_forward_proj="gated-gelu" if gated else "relu")
    state = getattr(transformers, f"{kind}EncoderModel")(config).state_dict()
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(tuple(tensor.shape)).astype(ml_dtypes.bfloat16) for name, tensor in state.items()}
    return arrays | {COPY: arrays["shared.weight"]}


def kinds(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path / "model.gguf").tensors}


@pytest.mark.parametrize("kind", ["T5", "UMT5"])
def test_an_encoder_is_written_and_read_back(kind: str, tmp_path: Path) -> None:
    arrays = t5(kind=kind)
    save_file(arrays, tmp_path / "t5.safetensors")
    weightsmith.quantize(tmp_path / "t5.safetensors", tmp_path / "out", format="gguf-bf16", fsync=False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, 2)
    listed = {str(names.get_name(name, try_suffixes=(".weight",))) for name in arrays if name != COPY}
    assert kinds(tmp_path / "out").keys() == listed
    weightsmith.dequantize(tmp_path / "out" / "model.gguf", tmp_path / "plain", fsync=False)
    output = load_file(tmp_path / "plain" / "model.safetensors")
    assert output.keys() == arrays.keys() - {COPY}
    for name, values in output.items():
        np.testing.assert_array_equal(values, arrays[name])


def test_keys_and_types_are_those_of_llama_cpp(tmp_path: Path) -> None:
    save_file(t5(), tmp_path / "t5.safetensors")
    weightsmith.quantize(tmp_path / "t5.safetensors", tmp_path / "out", format="gguf-q4_k_s", fsync=False)
    keys = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields.items()}
    assert {name: value for name, value in keys.items() if not name.startswith("GGUF.")} == {
        "general.architecture": "t5encoder",
        "general.quantization_version": 2,
        "general.file_type": 14,
        "t5encoder.context_length": 512,
        "t5encoder.embedding_length": 256,
        "t5encoder.feed_forward_length": 512,
        "t5encoder.block_count": 2,
        "t5encoder.attention.head_count": 4,
        "t5encoder.attention.key_length": 64,
        "t5encoder.attention.value_length": 64,
        "t5encoder.attention.relative_buckets_count": 32,
        "t5encoder.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
    }
    types = kinds(tmp_path / "out")
    assert types["token_embd.weight"] == "Q6_K"
    assert types["enc.blk.0.attn_rel_b.weight"] == types["enc.blk.1.ffn_norm.weight"] == "F32"
    assert (types["enc.blk.0.attn_v.weight"], types["enc.blk.0.attn_q.weight"]) == ("Q5_K", "Q4_K")
    assert "CLIPLoader (GGUF)" in (tmp_path / "out" / "README.md").read_text()


def test_the_folder_of_a_pipeline_is_written_as_a_single_file_is(tmp_path: Path) -> None:
    arrays = t5()
    save_file(arrays, tmp_path / "t5.safetensors")
    (tmp_path / "text_encoder_2").mkdir()
    save_file(arrays, tmp_path / "text_encoder_2" / "model.safetensors", {"format": "pt"})
    transformers.T5Config(**SIZES).save_pretrained(tmp_path / "text_encoder_2")
    for name in ("t5.safetensors", "text_encoder_2"):
        weightsmith.quantize(tmp_path / name, tmp_path / f"out-{name}", format="gguf-q8_0", fsync=False)
    files = [(tmp_path / f"out-{name}" / "model.gguf").read_bytes() for name in ("t5.safetensors", "text_encoder_2")]
    assert files[0] == files[1]


def test_other_t5_models_are_refused(tmp_path: Path) -> None:
    arrays = t5()
    save_file(arrays | {"decoder.final_layer_norm.weight": np.ones(256, np.float32)}, tmp_path / "whole.safetensors")
    with pytest.raises(PlanError, match=r"'decoder.final_layer_norm.weight' does not belong to the encoder of T5"):
        weightsmith.quantize(tmp_path / "whole.safetensors", tmp_path / "out", format="gguf-q8_0")
    rows = np.zeros((256_384, 32), ml_dtypes.bfloat16)
    small = {name: values for name, values in arrays.items() if name != COPY}
    save_file(small | {"shared.weight": rows}, tmp_path / "umt5.safetensors")
    with pytest.raises(PlanError, match="ComfyUI reads the tokenizer of UMT5"):
        weightsmith.quantize(tmp_path / "umt5.safetensors", tmp_path / "out", format="gguf-q8_0")
    save_file(t5(gated=False), tmp_path / "first.safetensors")
    with pytest.raises(PlanError, match="its feed-forward layers have no gate"):
        weightsmith.quantize(tmp_path / "first.safetensors", tmp_path / "out", format="gguf-q8_0")
    assert not (tmp_path / "out").exists()
    del small["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    save_file(small, tmp_path / "damaged.safetensors")
    with pytest.raises(PlanError, match=r"there is no matrix enc.blk.0.attn_rel_b.weight"):
        weightsmith.quantize(tmp_path / "damaged.safetensors", tmp_path / "out", format="gguf-q8_0")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("3", "there is no layer 2, and there is one 3"),
        (str(2**40), f"'encoder.block.{2**40}.layer.1.DenseReluDense.wo.weight' does not belong to the encoder"),
        ("\u0661", "does not belong to the encoder"),  # another digit 1
        ("01", "does not belong to the encoder"),
        ("1" * 5000, "does not belong to the encoder"),
    ],
    ids=["gap", "huge", "arabic", "zero", "digits"],
)
def test_layers_are_counted_by_numbers_that_follow_each_other(number: str, words: str, tmp_path: Path) -> None:
    other = {f"encoder.block.{number}.layer.1.DenseReluDense.wo.weight": np.ones((256, 512), np.float32)}
    save_file(t5() | other, tmp_path / "t5.safetensors")
    with pytest.raises(PlanError, match=words):
        weightsmith.quantize(tmp_path / "t5.safetensors", tmp_path / "out", format="gguf-q8_0")


@pytest.mark.parametrize("settings", [{"calibration": "built-in"}, {"size_bytes": 1000}])
def test_a_folder_of_t5_has_no_importances(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "t5").mkdir()
    save_file(t5(), tmp_path / "t5" / "model.safetensors", {"format": "pt"})
    transformers.T5Config(**SIZES).save_pretrained(tmp_path / "t5")
    with pytest.raises(PlanError, match="importances are measured by running a language model on a text, and this is not one"):
        weightsmith.quantize(tmp_path / "t5", tmp_path / "out", format="gguf-q4_k_m", **settings)


def test_keys_that_follow_from_the_shapes_cannot_be_stated(tmp_path: Path) -> None:
    save_file(t5(), tmp_path / "t5.safetensors")
    with pytest.raises(PlanError, match=r"'t5encoder\.block_count' is a key by which llama.cpp reads the file"):
        weightsmith.quantize(
            tmp_path / "t5.safetensors", tmp_path / "out", format="gguf-q8_0", metadata=["t5encoder.block_count=9"]
        )


@needs_comfyui_gguf
@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m", "bf16"])
def test_comfyui_gguf_loads_the_same_numbers(kind: str, tmp_path: Path) -> None:
    import torch

    arrays = t5()
    save_file(arrays, tmp_path / "t5.safetensors")
    weightsmith.quantize(tmp_path / "t5.safetensors", tmp_path / "out", format=f"gguf-{kind}", fsync=False)
    state = module("loader").gguf_clip_loader(str(tmp_path / "out" / "model.gguf"))
    assert state.keys() == arrays.keys() - {COPY}
    weightsmith.dequantize(tmp_path / "out" / "model.gguf", tmp_path / "plain", out_dtype="float32", fsync=False)
    ours = load_file(tmp_path / "plain" / "model.safetensors")
    for name, tensor in state.items():
        theirs = torch.Tensor(module("dequant").dequantize_tensor(tensor, torch.float32, torch.float32)).numpy()
        np.testing.assert_allclose(theirs, ours[name], rtol=1e-3, atol=1e-3)
