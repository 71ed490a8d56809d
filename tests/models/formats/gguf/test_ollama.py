"""Models in Ollama's folder are read by their manifests, as the GGUF files that they name."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightsmith
from tests.gguf_help import SENTENCEPIECE, SIZES, llama, write_gguf
from weightsmith._base.errors import FormatError, NotFound, Unsupported, WeightsmithError
from weightsmith._models.checkpoint import open_checkpoint

MODEL = "application/vnd.ollama.image.model"


def pulled(folder: Path, gguf: Path, *other_layers: dict[str, Any]) -> Path:
    """Ollama's folder with a model; its manifest."""
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    (folder / "blobs").mkdir(parents=True)
    shutil.copy(gguf, folder / "blobs" / f"sha256-{digest}")
    manifest = folder / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    manifest.parent.mkdir(parents=True)
    layers = [{"mediaType": MODEL, "digest": f"sha256:{digest}", "size": gguf.stat().st_size}, *other_layers]
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


def test_a_tag_may_be_the_name_of_a_file(gguf: Path, tmp_path: Path) -> None:
    """As of models that Ollama has pulled from the Hub by the names of their files."""
    manifest = pulled(tmp_path / "models", gguf)
    tag = manifest.rename(manifest.with_name("tiny-Q4_K_M.gguf"))
    with open_checkpoint(gguf) as expected, open_checkpoint(tag) as opened:
        assert list(opened) == list(expected)
    assert bake(str(tag), tmp_path / "out")


def test_a_blob_of_another_size_is_refused(gguf: Path, tmp_path: Path) -> None:
    manifest = pulled(tmp_path / "models", gguf)
    whole = json.loads(manifest.read_text())
    whole["layers"][0]["size"] -= 1
    manifest.write_text(json.dumps(whole))
    with pytest.raises(FormatError, match=r"has [\d,]+ bytes, and the manifest says [\d,]+"):
        open_checkpoint(manifest)


def test_what_ollama_adds_to_a_chat_is_named(gguf: Path, tmp_path: Path) -> None:
    layers = [{"mediaType": MODEL.replace("model", kind), "digest": "sha256:" + "0" * 64} for kind in ("system", "license")]
    with open_checkpoint(pulled(tmp_path / "models", gguf, *layers)) as opened:
        assert "layers of the manifest are left to Ollama: 'system'" in [note.what for note in opened.notes]


def trained(folder: Path, gguf: Path, name: str, seed: int) -> tuple[Path, dict[str, Any]]:
    """An adapter of one module in a GGUF file; and the entry of a manifest that names it."""
    rng = np.random.default_rng(seed)
    with open_checkpoint(gguf) as opened:
        rows, cols = opened.specs[f"{name}.weight"].shape
    weightsmith.dequantize(gguf, folder / "plain", progress=False)
    lora = folder / "lora"
    lora.mkdir()
    factors = {"A": rng.standard_normal((4, cols)), "B": rng.standard_normal((rows, 4))}
    prefix = f"base_model.model.{name}.lora_"
    save_file(
        {f"{prefix}{part}.weight": a.astype(np.float32) for part, a in factors.items()}, lora / "adapter_model.safetensors"
    )
    target = name.rpartition(".")[2]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [target], "base_model_name_or_path": "x"}
    (lora / "adapter_config.json").write_text(json.dumps(config))
    weightsmith.convert_lora(lora, folder / "out", base=folder / "plain", layout="llama.cpp", progress=False)
    file = folder / "out" / "adapter.gguf"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return file, {
        **{"mediaType": MODEL.replace("model", "adapter"), "digest": f"sha256:{digest}"},
        "size": file.stat().st_size,
    }


@pytest.mark.long
def test_a_model_is_read_with_the_adapter_that_ollama_applies(gguf: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj"
    file, entry = trained(tmp_path, gguf, name, 0)
    other = {"mediaType": MODEL.replace("model", "system"), "digest": "sha256:" + "0" * 64}
    manifest = pulled(tmp_path / "models", gguf, other, entry)
    shutil.copy(file, tmp_path / "models" / "blobs" / entry["digest"].replace(":", "-"))
    with pytest.raises(Unsupported, match="the model has 1 adapter, which Ollama applies while it runs") as refused:
        open_checkpoint(manifest)
    assert f"weightsmith dequantize {manifest} OUT" in refused.value.finding.fix
    expected = bake(f"{gguf}+{file}", tmp_path / "expected")
    assert set(expected) == set(bake(str(manifest), tmp_path / "found"))
    with (
        open_checkpoint(tmp_path / "expected") as one,
        open_checkpoint(tmp_path / "found") as checkpoint,
        open_checkpoint(gguf) as base,
    ):
        for key in expected:
            np.testing.assert_array_equal(one[key], checkpoint[key])
        assert (one[f"{name}.weight"] != base[f"{name}.weight"].astype(one[f"{name}.weight"].dtype)).any()
    notes = [note.what for note in weightsmith.plan(recipe(str(manifest))).warnings]
    assert "the model is read with 1 adapter applied, as Ollama does" in notes
    assert "layers of the manifest are left to Ollama: 'system'" in notes
    weightsmith.dequantize(manifest, tmp_path / "copy", progress=False)
    with open_checkpoint(tmp_path / "copy") as copy, open_checkpoint(tmp_path / "found") as checkpoint:
        np.testing.assert_array_equal(copy[f"{name}.weight"], checkpoint[f"{name}.weight"])


def test_a_plan_reads_the_adapters_of_a_manifest_again(gguf: Path, tmp_path: Path) -> None:
    first, one = trained(tmp_path / "a", gguf, "model.layers.0.mlp.up_proj", 0)
    second, two = trained(tmp_path / "b", gguf, "model.layers.0.mlp.down_proj", 1)
    manifest = pulled(tmp_path / "models", gguf, one, two)
    for file, entry in ((first, one), (second, two)):
        shutil.copy(file, tmp_path / "models" / "blobs" / entry["digest"].replace(":", "-"))
    plan = weightsmith.plan(recipe(str(manifest)))
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    weightsmith.run(tmp_path / "plan.json", tmp_path / "out", fsync=False)
    with open_checkpoint(gguf) as base, open_checkpoint(tmp_path / "out") as checkpoint:
        changed = [key for key in base if (checkpoint[key].astype(np.float32) != base[key].astype(checkpoint[key].dtype)).any()]
    assert changed == ["model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight"]


def test_layers_of_unknown_types_are_named(gguf: Path, tmp_path: Path) -> None:
    layers = [{"mediaType": MODEL.replace("model", kind), "digest": "sha256:" + "0" * 64} for kind in ("license", "steering")]
    with open_checkpoint(pulled(tmp_path / "models", gguf, *layers)) as opened:
        whats = [note.what for note in opened.notes]
    assert "layers of the manifest whose meaning is not known are left out: 'steering'" in whats


@pytest.mark.parametrize("name", ["tiny.gguf", "a/b/c/d/tiny.gguf", "tiny.safetensors"])
def test_other_files_in_a_folder_named_manifests_are_models(name: str, gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "manifests" / name
    path.parent.mkdir(parents=True)
    if path.suffix == ".gguf":
        shutil.copy(gguf, path)
    else:
        save_file({"model.layers.0.mlp.up_proj.weight": np.ones((4, 4), np.float32)}, path)
    assert bake(str(path), tmp_path / "out")


def recipe(model: str) -> dict[str, Any]:
    return {"merge_method": "passthrough", "models": [{"model": model}]}


def bake(model: str, out: Path) -> list[str]:
    weightsmith.merge(recipe(model), out, progress=False, fsync=False)
    with open_checkpoint(out) as opened:
        return list(opened)


LAYERS: dict[str, tuple[Any, str, type[WeightsmithError]]] = {
    "none": ([], "layers are none", Unsupported),
    "tensors": ([{"mediaType": "application/vnd.ollama.image.tensor"}], "layers are 'tensor'", Unsupported),
    "no digest": ([{"mediaType": MODEL, "digest": "sha256:../../x"}], "not that of a blob", FormatError),
    "no blob": ([{"mediaType": MODEL, "digest": "sha256:" + "1" * 64}], "the blob of its model is not there", NotFound),
}


@pytest.mark.parametrize("name", LAYERS)
def test_other_manifests_are_refused(name: str, tmp_path: Path) -> None:
    layers, words, kind = LAYERS[name]
    path = tmp_path / "manifests" / "host" / "library" / "tiny" / "latest"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"layers": layers}))
    with pytest.raises(kind, match=words):
        open_checkpoint(path)


def test_a_missing_blob_is_named_by_the_kind_of_its_layer(gguf: Path, tmp_path: Path) -> None:
    entry = {"mediaType": MODEL.replace("model", "adapter"), "digest": "sha256:" + "1" * 64}
    with pytest.raises(NotFound, match="the blob of its adapter is not there"):
        open_checkpoint(pulled(tmp_path / "models", gguf, entry))
