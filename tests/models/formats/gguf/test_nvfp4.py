"""NVFP4 in GGUF files: weights with a factor each, as NVIDIA's checkpoints have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files
from tests.llama_cpp import needs_llama_cpp
from tests.models.formats.gguf.test_gguf_files import FAMILIES, OWN
from weightsmith._base.errors import PlanError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.gguf.architectures import architectures
from weightsmith._models.formats.gguf.writing import find

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 262, "max_position_embeddings": 64}
WIDER: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "qwen3-moe": {"moe_intermediate_size": 64},
    "qwen3.5": {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_value_heads": 4},
}
FACTORED = {name: name for name in ("llama", "mistral", "mixtral", "qwen3", "qwen3-moe", "qwen3.5", "cohere2")}
FACTORED["ministral3"] = "ministral3"


def save(name: str, folder: Path) -> Path:
    changes = {**OWN.get(name, {}), **SIZES, **WIDER.get(name, {})}
    source = zoo.save(name, folder, 1, dtype="float32", **changes)
    for file, content in tokenizer_files(BYTE_LEVEL).items():
        (source / file).write_bytes(content)
    return source


def quantize(source: Path, out: Path, name: str, **options: Any) -> Path:
    weightsmith.quantize(source, out, f"gguf-{name}", progress=False, **options)
    return out / "model.gguf"


def test_every_architecture_with_factors_is_compared_with_llama_cpp() -> None:
    known = {gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, FAMILIES[name])] for name in FACTORED}
    assert {architecture.name for architecture in architectures() if architecture.factored} == known


@pytest.mark.long
@pytest.mark.matrix("llama", "qwen3-moe")
@needs_llama_cpp
@pytest.mark.parametrize("name", FACTORED)
def test_llama_cpp_computes_the_stored_weights(name: str, tmp_path: Path) -> None:
    source = save(name, tmp_path / "m")
    path = quantize(source, tmp_path / "q", "nvfp4")
    tensors = stored(path)
    kinds = {name: kind for name, (kind, _, _) in tensors.items()}
    small = [tensor for tensor, kind in kinds.items() if kind == "NVFP4"]
    assert small
    assert all(f"{tensor.removesuffix('.weight')}.scale" in kinds for tensor in small)
    assert not any(f"{tensor.removesuffix('.weight')}.bias" in kinds for tensor in small)
    assert kinds["token_embd.weight"] == "Q8_0"
    logits = []
    for folder in (path, quantize(tmp_path / "q", tmp_path / "again", "f32"), quantize(source, tmp_path / "plain", "f32")):
        with llama_cpp.Judge(folder) as judge:
            logits.append(judge.logits(list(range(40))))
    theirs, ours, plain = logits
    error, lost = (float(np.linalg.norm(theirs - other) / np.linalg.norm(plain)) for other in (ours, plain))
    assert error < 0.05, error  # llama.cpp rounds what enters a layer to 8 bits
    assert lost > 2 * error


@pytest.mark.long
@pytest.mark.parametrize("name", ["nvfp4a16", "gguf-nvfp4"])
def test_numbers_of_nvfp4_stay_as_they_are(name: str, tmp_path: Path) -> None:
    """Those of a GGUF file, and those of compressed-tensors, whose q, k and v share a factor."""
    weightsmith.quantize(save("qwen3", tmp_path / "m"), tmp_path / "q", name, progress=False)
    path = quantize(tmp_path / "q", tmp_path / "r", "nvfp4", out_dtype="float32")
    small = {tensor for tensor, (kind, _, _) in stored(path).items() if kind == "NVFP4"}
    assert len(small) == 14
    with weightsmith.open_checkpoint(tmp_path / "q") as first, weightsmith.open_checkpoint(tmp_path / "r") as again:
        for tensor in first.specs:
            if tensor.endswith("proj.weight"):
                before, after = (np.asarray(model.read(tensor), np.float32) for model in (first, again))
                assert np.abs(after - before).max() <= 1e-6 * np.abs(before).max(), tensor


@pytest.mark.long
def test_weights_with_biases_have_more_bits(tmp_path: Path) -> None:
    """llama.cpp multiplies the biases of some MLPs too."""
    kinds = {kind for kind, _, _ in stored(quantize(save("llama-bias", tmp_path / "m"), tmp_path / "q", "nvfp4")).values()}
    assert kinds == {"F32", "Q8_0"}


@pytest.mark.long
def test_a_merge_straight_to_nvfp4_is_the_merge_then_quantised(tmp_path: Path) -> None:
    save("llama", tmp_path / "a")
    zoo.save("llama", tmp_path / "b", 2, dtype="float32", **SIZES)
    models = [{"model": str(tmp_path / name), "parameters": {"weight": 0.5}} for name in "ab"]
    recipe = {"merge_method": "linear", "models": models, "dtype": "float32"}
    weightsmith.merge(recipe, tmp_path / "plain", progress=False)
    weightsmith.merge(recipe, tmp_path / "q", quantize="gguf-nvfp4", progress=False)
    assert stored(quantize(tmp_path / "plain", tmp_path / "r", "nvfp4")) == stored(tmp_path / "q/model.gguf")


@pytest.mark.long
def test_blocks_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((6, 128)).astype(np.float32) * np.float32([[1e-3], [1], [0], [1e-6], [3], [0.1]])
    rows[1, :16] = 0
    encoding, spec = find("gguf-nvfp4-scaled"), TensorSpec("x.weight", DTYPES["F32"], (6, 128))
    assert encoding is not None
    assert [(out.name, out.dtype.name, out.shape) for out in encoding.outs(spec)][1] == ("x.weight.scale", "F32", (1,))
    blocks, factor = np.empty(6 * 72, np.uint8), np.empty(4, np.uint8)
    largest = np.abs(rows).max()
    encoding.encode(spec, rows, 0, [blocks, factor], np.array([largest], np.float32))
    number = factor.view(np.float32)[0]
    assert number == largest / np.float32(2688)
    decoded = gguf.quants.dequantize(blocks.reshape(6, 72), gguf.GGMLQuantizationType.NVFP4) * number
    groups, errors = np.abs(rows).reshape(6, 8, 16).max(2), np.abs(decoded - rows).reshape(6, 8, 16).max(2)
    assert (errors <= groups / 5 + number * 2.0**-10 * 6).all()
    assert np.abs(decoded).max() == pytest.approx(largest, rel=1e-6)
    encoding.encode(spec, np.zeros((6, 128), np.float32), 0, [blocks, factor], np.zeros(1, np.float32))
    assert (not blocks.any(), factor.view(np.float32)[0]) == (True, 1)


def test_architectures_whose_factors_llama_cpp_ignores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="does not multiply weights of the architecture gemma2 by the factors of NVFP4"):
        quantize(save("gemma2", tmp_path / "m"), tmp_path / "q", "nvfp4")
