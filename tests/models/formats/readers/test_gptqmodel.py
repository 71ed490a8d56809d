"""Models calibrated with AWQ's scales, run by transformers with GPTQModel's layers on a processor.

WEIGHTSMITH_GPTQMODEL names the Python that has both. Logits are those of transformers, in float32, with the weights that
weightsmith reads: norms and biases have changed with the scales, too.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import weightsmith
from tests.models.formats.readers.test_loaders import TEXT, TOKENIZER, errors, logits, make

PYTHON = os.environ.get("WEIGHTSMITH_GPTQMODEL", "")
SCRIPT = Path(__file__).with_name("gptqmodel_script.py")
pytestmark = [pytest.mark.reader, pytest.mark.skipif(not PYTHON, reason="needs GPTQModel: WEIGHTSMITH_GPTQMODEL")]

TOKENS = np.array(TOKENIZER.encode(TEXT).ids[:100])
MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")


def uneven(folder: Path, name: str) -> Path:
    """A model some of whose features are much larger than others, as in trained ones."""
    make(folder, name)
    tensors = load_file(folder / "model.safetensors")
    for tensor in (tensors[key] for key in tensors if "layernorm" in key or "v_proj.bias" in key):
        tensor += (torch.arange(len(tensor)) % 16 == 3) * 6
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each model a folder with the model as made, quantised and plain again, after GPTQModel's layers have run."""
    root = tmp_path_factory.mktemp("gptqmodel")
    (root / "text.txt").write_text(TEXT * 8)
    text = {"calibration": root / "text.txt", "calibration_rows": 8, "calibration_tokens": 64}
    by_name = {name: root / name for name in MODELS}
    for name, folder in by_name.items():
        weightsmith.quantize(uneven(folder / "made", name), folder / "quantised", "awq-4bit", progress=False, **text)
        weightsmith.dequantize(folder / "quantised", folder / "plain", out_dtype="float32", progress=False)
    asked = [TOKENS.tolist(), *(str(folder / "quantised") for folder in by_name.values())]
    subprocess.run([PYTHON, SCRIPT], input=json.dumps(asked), text=True, check=True, capture_output=True)
    return by_name


@pytest.mark.parametrize("name", MODELS)
def test_gptqmodel_computes_what_transformers_does(name: str, folders: dict[str, Path]) -> None:
    made, folder = load_file(folders[name] / "made" / "model.safetensors"), folders[name] / "quantised"
    stored, problem = load_file(folder / "model.safetensors"), folder / "gptqmodel.txt"
    norms = [key for key in made if key.endswith(".input_layernorm.weight")]
    assert not any(torch.equal(made[key], stored[key]) for key in norms)
    assert not problem.exists(), problem.read_text()
    expected, computed = logits(folders[name] / "plain", TOKENS), np.load(folder / "gptqmodel.npz")
    half, decoded = (errors(computed[key], expected) for key in ("half", "decoded"))
    print(f"{name}: decoded {decoded.max():.7f}, in float16 {np.median(half):.7f}, worst token {half.max():.7f}")
    assert decoded.max() < 1e-5
    assert np.median(half) < 0.005
