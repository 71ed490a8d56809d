"""Models of several architectures in the formats that mlx-lm reads, run by mlx-lm on a processor.

`make test` installs both, built for CPUs on Linux. WEIGHTSMITH_MLX names another Python that has them.

Its logits are those of transformers, in float32, with the weights that weightsmith reads. transformers 5 has saved the models,
so only what weightsmith adds to config.json tells mlx-lm of rotary embeddings and windows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import weightsmith
from tests.models.formats.readers.test_loaders import TEXT, TOKENIZER, errors, logits, make

pytestmark = pytest.mark.reader

PYTHON = os.environ.get("WEIGHTSMITH_MLX") or (sys.executable if find_spec("mlx_lm") else "")
SCRIPT = Path(__file__).with_name("mlx_script.py")

TOKENS = np.array(TOKENIZER.encode(TEXT).ids[:200])
BOUNDS = {"mlx-4bit": 1e-4, "mlx-8bit": 1e-4, "awq-4bit": 1e-3}
"""Limits for the median token. mlx-lm multiplies AWQ's scales and zeros in float16."""
MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3-deep", "phi3", "mixtral", "qwen3-moe")
CASES = [(model, f"mlx-{bits}bit") for model in MODELS for bits in (4, 8)]
CASES += [(model, "awq-4bit") for model in MODELS if model not in ("mixtral", "qwen3-moe")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Of each case a folder with the model as made, quantised and plain again, after mlx-lm has run."""
    root = tmp_path_factory.mktemp("mlx")
    by_case = {case: root / "-".join(case) for case in CASES}
    for (model, format_), folder in by_case.items():
        weightsmith.quantize(make(folder / "made", model), folder / "quantised", format_, progress=False)
        weightsmith.dequantize(folder / "quantised", folder / "plain", out_dtype="float32", progress=False)
    asked = [TOKENS.tolist(), *(str(folder / "quantised") for folder in by_case.values())]
    env = {**os.environ, "TMPDIR": str(root)}  # MLX leaves a folder there
    subprocess.run([PYTHON, SCRIPT], input=json.dumps(asked), text=True, check=True, capture_output=True, env=env)
    return by_case


@pytest.mark.skipif(not PYTHON, reason="needs MLX")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_mlx_lm_computes_what_transformers_does(case: tuple[str, str], folders: dict[tuple[str, str], Path]) -> None:
    folder = folders[case] / "quantised"
    problem = folder / "mlx.txt"
    assert not problem.exists(), problem.read_text()
    token_errors = errors(np.load(folder / "mlx.npy"), logits(folders[case] / "plain", TOKENS))
    print(f"{'-'.join(case)}: error {np.median(token_errors):.7f}, worst token {token_errors.max():.7f}")
    assert np.median(token_errors) <= BOUNDS[case[1]]
