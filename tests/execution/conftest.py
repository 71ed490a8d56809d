"""Models of the tests of runs."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.mini import write_checkpoint

LAYERS = 4


@cache
def big_tensors(seed: int) -> dict[str, np.ndarray]:
    """Some tensors of several tiles, so that there is something to interrupt."""
    rng = np.random.default_rng(seed)
    tensors = {
        "model.embed_tokens.weight": rng.normal(0, 0.02, (4000, 64)),
        **{
            f"model.layers.{i}.mlp.{p}_proj.weight": rng.normal(0, 0.02, (900, 512))
            for i in range(LAYERS)
            for p in ("up", "down")
        },
        "model.norm.weight": np.ones(64),
    }
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def big_model(folder: Path, seed: int) -> str:
    config = {"architectures": ["X"], "model_type": "llama", "num_hidden_layers": LAYERS, "vocab_size": 4000}
    return str(write_checkpoint(folder, big_tensors(seed), config))


@pytest.fixture(scope="session")
def big_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models a, b and c."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("abc"):
        big_model(folder / name, seed)
    return folder


@pytest.fixture
def linked(big_models: Path, tmp_path: Path) -> Path:
    """A folder with links to the files of models a, b and c: replace them, and do not write to them."""
    shutil.copytree(big_models, tmp_path, dirs_exist_ok=True, copy_function=os.link)
    return tmp_path
