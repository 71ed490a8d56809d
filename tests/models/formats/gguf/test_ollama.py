"""Models in Ollama's folder are read by their manifests, as the GGUF files that they name."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.gguf_help import SENTENCEPIECE, SIZES, llama, write_gguf
from weightsmith._base.errors import FormatError, NotFound, Unsupported, WeightsmithError
from weightsmith._models.checkpoint import open_checkpoint

MODEL = "application/vnd.ollama.image.model"


def pulled(folder: Path, gguf: Path, *more: dict[str, Any]) -> Path:
    """Ollama's folder with a model; its manifest."""
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    (folder / "blobs").mkdir(parents=True)
    shutil.copy(gguf, folder / "blobs" / f"sha256-{digest}")
    manifest = folder / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    manifest.parent.mkdir(parents=True)
    layers = [{"mediaType": MODEL, "digest": f"sha256:{digest}", "size": gguf.stat().st_size}, *more]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return manifest


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", "llama", llama(), {**SIZES, **SENTENCEPIECE})


def test_a_manifest_is_the_model_that_it_names(gguf: Path, tmp_path: Path) -> None:
    parameters = {"mediaType": "application/vnd.ollama.image.params", "digest": "sha256:" + "0" * 64}
    manifest = pulled(tmp_path / "models", gguf, parameters)
    blob = next((tmp_path / "models" / "blobs").iterdir())
    with open_checkpoint(gguf) as expected:
        for path in (manifest, blob):
            with open_checkpoint(path) as opened:
                assert list(opened) == list(expected)
                assert opened.config == expected.config
                for name, array in expected.items():
                    np.testing.assert_array_equal(opened[name], array)
    recipe = {"merge_method": "linear", "models": [{"model": str(manifest), "parameters": {"weight": 1}}], "dtype": "bfloat16"}
    weightsmith.merge(recipe, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


LAYERS: dict[str, tuple[Any, str, type[WeightsmithError]]] = {
    "none": ([], "layers are none", Unsupported),
    "tensors": ([{"mediaType": "application/vnd.ollama.image.tensor"}], "layers are 'tensor'", Unsupported),
    "no digest": ([{"mediaType": MODEL, "digest": "sha256:../../x"}], "not that of a blob", FormatError),
    "no blob": ([{"mediaType": MODEL, "digest": "sha256:" + "1" * 64}], "the blob of its model is not there", NotFound),
}


@pytest.mark.parametrize("name", LAYERS)
def test_other_manifests_are_refused(name: str, tmp_path: Path) -> None:
    layers, words, kind = LAYERS[name]
    path = tmp_path / "manifests" / "host" / "tiny" / "latest"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"layers": layers}))
    with pytest.raises(kind, match=words):
        open_checkpoint(path)
