"""MXFP4 as gpt-oss is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests import zoo
from tests.gguf_help import BYTE_LEVEL, tokenizer_files
from tests.mini import write_checkpoint
from weightsmith._base.errors import FormatError

ENTRY = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
CONFIG = {"model_type": "gpt_oss", "num_hidden_layers": 1, "torch_dtype": "bfloat16", "quantization_config": ENTRY}
NAME = "model.layers.0.mlp.experts.gate_up_proj"


def stored(experts: int = 3, outputs: int = 10, inputs: int = 128, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
    return {f"{NAME}_blocks": blocks, f"{NAME}_scales": rng.integers(100, 140, (experts, outputs, inputs // 32), np.uint8)}


def theirs(tensors: dict[str, np.ndarray], name: str = NAME) -> np.ndarray:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    parts = [torch.from_numpy(tensors[name + end]) for end in ("_blocks", "_scales")]
    return convert_moe_packed_tensors(*parts, dtype=torch.float32).numpy()


def test_the_numbers_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of tiles that begin anywhere, with runs of one group and of several."""
    tensors = stored()
    expected = theirs(tensors)
    for most in (1, 4 * 32 * 10 * 2, 1 << 22):
        monkeypatch.setattr("weightsmith._models.formats.mxfp4.ROWS_BYTES", most)
        with weightsmith.open_checkpoint(write_checkpoint(tmp_path / "m", tensors, CONFIG)) as model:
            assert list(model.specs) == [NAME]
            assert model.specs[NAME].shape == expected.shape == (3, 128, 10)
            assert np.array_equal(model.read(NAME), expected)
            part = np.empty(77, np.float32)
            model.read_into(NAME, 4 * 1275, part.view(np.uint8))  # the end of an expert and the start of the next
            assert np.array_equal(part, expected.reshape(-1)[1275 : 1275 + 77])
            assert model.natural_dtype(NAME).name == "BF16"
            assert "quantization_config" not in (model.config or {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{NAME}_scales": None}, "_scales' is missing"),
        ({f"{NAME}_scales": np.zeros((3, 10, 3), np.uint8)}, r"is \[3, 10, 3\], and the other tensors of its weight require"),
        ({f"{NAME}_blocks": np.zeros((3, 10, 4, 8), np.uint8)}, r"is \[3, 10, 4, 8\]"),
        ({f"{NAME}_blocks": np.zeros((0, 10, 4, 16), np.uint8), f"{NAME}_scales": np.zeros((0, 10, 4), np.uint8)}, "is empty"),
        ({"model.x_scales": np.zeros((3, 10, 4), np.uint8)}, "x_blocks' is missing"),
    ],
)
def test_damage(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    tensors = {name: values for name, values in {**stored(), **changes}.items() if values is not None}
    with pytest.raises(FormatError, match=words):
        weightsmith.open_checkpoint(write_checkpoint(tmp_path / "m", tensors, CONFIG))


@pytest.mark.slow
def test_gpt_oss_as_it_is_published_is_written_like_its_plain_weights(tmp_path: Path) -> None:
    source = zoo.save("gpt-oss", tmp_path / "m", 1, hidden_size=64, intermediate_size=32, vocab_size=262)
    with weightsmith.open_checkpoint(source) as checkpoint:
        tensors, config = {name: checkpoint.read(name) for name in checkpoint.specs}, dict(checkpoint.config or {})
    published = dict(tensors)
    for name in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        parts = stored(experts, outputs, inputs, seed=len(published))
        parts = {key.replace(NAME, name): values for key, values in parts.items()}
        parts[f"{name}_scales"] = parts[f"{name}_scales"] % 8 + 118
        del published[name]
        published |= parts
        tensors[name] = theirs(parts, name).astype(tensors[name].dtype)
    for folder, written, said in (("plain", tensors, config), ("mx", published, {**config, "quantization_config": ENTRY})):
        (tmp_path / folder).mkdir()
        model = tmp_path / folder / "model"  # its name is in the file
        write_checkpoint(model, written, said)
        for file, content in tokenizer_files(BYTE_LEVEL).items():
            (model / file).write_bytes(content)
        weightsmith.quantize(model, tmp_path / f"{folder}-q", "gguf-q8_0", progress=False)
    assert (tmp_path / "mx-q/model.gguf").read_bytes() == (tmp_path / "plain-q/model.gguf").read_bytes()
    weightsmith.quantize(tmp_path / "mx" / "model", tmp_path / "again", "gguf-mxfp4_moe", progress=False)
    with (
        weightsmith.open_checkpoint(tmp_path / "mx" / "model") as before,
        weightsmith.open_checkpoint(tmp_path / "again") as after,
    ):
        for name in before.specs:
            if name.endswith(("gate_up_proj", "down_proj")):
                assert np.array_equal(before.read(name), after.read(name)), name
