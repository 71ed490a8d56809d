"""Models in folders behind http: the tensors, the bytes that travel, and what is refused."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

import weightsmith
from tests.files.remote.servers import model, serve, write
from weightsmith._base.errors import CheckpointError, FormatError, NotFound, WeightsmithError
from weightsmith._base.files import Extent
from weightsmith._files.remote.folder import HEAD_BYTES


def at(prefix: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{prefix}/{name}": data for name, data in files.items()}


def pickled(tensors: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    stored = {name: torch.from_numpy(array) for name, array in tensors.items()}
    torch.save({name: tensor.t().contiguous().t() for name, tensor in stored.items()}, file)
    return file.getvalue()


@pytest.mark.long
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_that_of_the_files(shards: int) -> None:
    files = model(0, shards=shards)
    expected = {
        name: array for file, data in files.items() if file.endswith(".safetensors") for name, array in load(data).items()
    }
    with serve(at("models/a", files)) as site, weightsmith.open_checkpoint(f"{site.url}/models/a") as checkpoint:
        assert set(checkpoint.specs) == set(expected)
        assert checkpoint.config is not None
        assert checkpoint.files == ("config.json", "generation_config.json")
        for name, array in expected.items():
            np.testing.assert_array_equal(checkpoint.read(name), array)
            assert checkpoint.location(name) is None
            (extent,) = checkpoint.extents(name, 4, 8)
            assert (extent.nbytes, type(extent)) == (8, Extent)
        name = "lm_head.weight"
        np.testing.assert_array_equal(checkpoint.read(name, slice(3, 5)), expected[name][3:5])
        assert site.ranges[-1][2] - site.ranges[-1][1] == expected[name][3:5].nbytes
        checkpoint.check_unchanged()


@pytest.mark.long
def test_modules_and_templates_in_subfolders_are_found() -> None:
    files = model(0, shards=1) | {
        "modules.json": b'[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]',
        "1_Pooling/config.json": b"{}",
        "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": save({"linear.weight": np.ones((2, 3), np.float32)}),
        "additional_chat_templates/tool_use.jinja": b"TOOLS",
    }
    with serve(at("m", files)) as site, weightsmith.open_checkpoint(f"{site.url}/m") as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("2_Dense/linear.weight"), np.ones((2, 3)))
        inner = {name for name in checkpoint.files if "/" in name}
        assert inner == {"1_Pooling/config.json", "2_Dense/config.json", "additional_chat_templates/tool_use.jinja"}
        assert all((checkpoint.folder / name).is_file() for name in inner)


@pytest.mark.long
def test_the_parts_of_a_pipeline_and_their_shards_are_found() -> None:
    unet = {
        f"unet/diffusion_pytorch_model-{i:05}-of-00002.safetensors": save({f"w.{i}": np.full(3, i, np.float32)}) for i in (1, 2)
    }
    weight_map = {f"w.{i}": f"diffusion_pytorch_model-{i:05}-of-00002.safetensors" for i in (1, 2)}
    parts = {"unet": ["diffusers", "X"], "scheduler": ["diffusers", "Y"], "text_encoder": ["transformers", "Z"]}
    files = unet | {
        "model_index.json": json.dumps({"_class_name": "P", "image_encoder": [None, None], **parts}).encode(),
        "unet/config.json": b'{"_class_name": "X"}',
        "unet/diffusion_pytorch_model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        "scheduler/scheduler_config.json": b"{}",
        "text_encoder/config.json": b"{}",
        "text_encoder/model.safetensors": save({"v": np.ones(2, np.float32)}),
    }
    with serve(at("m", files)) as site, weightsmith.open_checkpoint(f"{site.url}/m") as checkpoint:
        assert [*checkpoint.specs] == ["text_encoder/v", "unet/w.1", "unet/w.2"]
        assert checkpoint.read("unet/w.2").tolist() == [2, 2, 2]
        assert {"model_index.json", "scheduler/scheduler_config.json", "unet/config.json"} <= {*checkpoint.files}
        assert all((checkpoint.folder / name).is_file() for name in checkpoint.files)


@pytest.mark.long
def test_the_parts_of_a_pipeline_may_be_pickles_or_a_variant() -> None:
    shard = "pytorch_model-00001-of-00001.bin"
    weights = {
        "unet/diffusion_pytorch_model.bin": pickled({"w": np.ones(2, np.float32)}),
        "vae/diffusion_pytorch_model.fp16.safetensors": save({"w": np.ones(2, np.float16)}),
        f"text_encoder/{shard}": pickled({"w": np.ones(2, np.float32)}),
        "text_encoder/pytorch_model.bin.index.json": json.dumps({"weight_map": {"w": shard}}).encode(),
    }
    parts = {part: ["diffusers", "X"] for part in ("unet", "vae", "text_encoder")}
    files = weights | {"model_index.json": json.dumps({"_class_name": "P", **parts}).encode()}
    files |= {f"{part}/config.json": b'{"_class_name": "X"}' for part in parts}
    with serve(at("m", files)) as site, weightsmith.open_checkpoint(f"{site.url}/m") as checkpoint:
        assert {*checkpoint.weights} == {name for name in weights if not name.endswith(".json")}
        assert checkpoint.read("text_encoder/w").tolist() == [1, 1]
    files["unet/diffusion_pytorch_model.of_another_name.bin"] = files.pop("unet/diffusion_pytorch_model.bin")
    with serve(at("m", files)) as site, pytest.raises(NotFound, match="no weight file with a usual name"):
        weightsmith.open_checkpoint(f"{site.url}/m")


def test_other_formats_are_read_without_a_line_of_their_own() -> None:
    tensors = {"a.weight": np.arange(60_000, dtype=np.float32).reshape(200, 300), "b.weight": np.arange(7, dtype=np.float32)}
    files = {"config.json": b"{}", "pytorch_model.bin": pickled(tensors)}
    assert zipfile.is_zipfile(io.BytesIO(files["pytorch_model.bin"]))
    with serve(at("m", files)) as site, weightsmith.open_checkpoint(f"{site.url}/m") as checkpoint:
        for name, array in tensors.items():
            np.testing.assert_array_equal(checkpoint.read(name), array)
        (extent,) = checkpoint.extents("a.weight", 0, 4)
        assert extent.nbytes == tensors["a.weight"].nbytes  # it is stored transposed


@pytest.mark.long
@pytest.mark.parametrize("width", [4, 128])
def test_a_plan_finds_out_that_a_server_knows_no_byte_ranges(width: int, tmp_path: Path) -> None:
    """With files that are smaller, and larger, than what is read of a file to begin with."""
    files = at("a", model(0, width=width)) | at("b", model(1, width=width))
    assert (len(files["a/model.safetensors"]) > HEAD_BYTES) == (width == 128)
    with serve(files) as site:
        recipe = f"merge_method: linear\nmodels:\n  - model: {site.url}/a\n  - model: {site.url}/b\nparameters: {{weight: 1}}\n"
        weightsmith.plan(recipe)
        assert any(first or end < len(files[path]) for path, first, end in site.ranges), "a part was asked for"
        site.parts = False
        before = len(site.headers)
        with pytest.raises(WeightsmithError, match="it does not know byte ranges") as caught:
            weightsmith.plan(recipe)
        assert "Download the model" in str(caught.value)
        asked = [path for path, headers in site.headers[before:] if "range" in headers and path.endswith("model.safetensors")]
        assert len(asked) == len(set(asked)), "each file was asked for once"


def test_one_file_is_opened_by_its_address() -> None:
    with serve({"x/weights.safetensors": save({"w": np.arange(4.0)})}) as site:
        with weightsmith.open_checkpoint(f"{site.url}/x/weights.safetensors") as checkpoint:
            assert checkpoint.read("w").tolist() == [0, 1, 2, 3]
            assert checkpoint.alone
        with pytest.raises(NotFound, match=r"other\.safetensors is not there"):
            weightsmith.open_checkpoint(f"{site.url}/x/other.safetensors")
        with pytest.raises(NotFound, match="no file of a model is there"):
            weightsmith.open_checkpoint(f"{site.url}/nowhere")


@pytest.mark.long
def test_a_folder_that_changes_is_noticed_before_a_merge_is_published() -> None:
    files = at("m", model(0))
    with serve(files) as site, weightsmith.open_checkpoint(f"{site.url}/m") as checkpoint:
        state = checkpoint.state
        site.files["m/model.safetensors"] = model(1)["model.safetensors"]
        for act in (checkpoint.check_unchanged, lambda: checkpoint.read("lm_head.weight")):
            with pytest.raises(
                CheckpointError, match=r"m/model\.safetensors: the file has changed since it was first read: etag "
            ):
                act()
        with weightsmith.open_checkpoint(f"{site.url}/m") as again:
            assert again.identity == checkpoint.identity
            assert again.state != state
            assert again.revision != checkpoint.revision


@pytest.mark.long
def test_a_server_without_versions_is_a_warning() -> None:
    with serve(at("m", model(0)), tags=False) as site, weightsmith.open_checkpoint(f"{site.url}/m") as checkpoint:
        assert "gives no version of 'model.safetensors'" in checkpoint.notes[0].what


@pytest.mark.long
def test_an_index_names_no_file_elsewhere() -> None:
    index = json.dumps({"weight_map": {"a": "../secret.safetensors", "b": "/etc/passwd", "c": "x\n.safetensors"}}).encode()
    files = {"m/config.json": b"{}", "m/model.safetensors.index.json": index, "secret.safetensors": save({"a": np.ones(3)})}
    with serve(files) as site:
        with pytest.raises(FormatError):
            weightsmith.open_checkpoint(f"{site.url}/m")
        assert all("secret" not in path and "passwd" not in path for path, _ in site.headers)


@pytest.mark.long
@pytest.mark.parametrize(
    "data", [b"", b"<html>" + b" " * 100, b"\xff" * 200, (10**6).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"{}"]
)
def test_hostile_files_are_errors_and_not_read_on(data: bytes) -> None:
    with serve({"m/config.json": b"{}", "m/model.safetensors": data + bytes(3 * HEAD_BYTES)}) as site:
        with pytest.raises(WeightsmithError):
            weightsmith.open_checkpoint(f"{site.url}/m")
        assert site.sent <= HEAD_BYTES + 1000


def test_a_revision_of_an_address_is_refused() -> None:
    with pytest.raises(weightsmith.ParameterError, match="which has no revisions"):
        weightsmith.open_checkpoint("https://example.org/m", revision="main")


@pytest.mark.slow
def test_a_merge_from_a_folder_behind_http(tmp_path: Path) -> None:
    models = [model(k) for k in range(2)]
    local = [write(tmp_path / f"m{k}", files) for k, files in enumerate(models)]

    def recipe(*places: object) -> dict[str, object]:
        return {"merge_method": "linear", "models": [{"model": str(p), "parameters": {"weight": 1}} for p in places]}

    weightsmith.merge(recipe(*local), tmp_path / "local", progress=False)
    with serve(at("a", models[0]) | at("b", models[1])) as site:
        done = weightsmith.merge(recipe(f"{site.url}/a", f"{site.url}/b"), tmp_path / "out", progress=False)
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    card = (tmp_path / "out/README.md").read_text()
    assert "base_model" not in card
    assert "huggingface.co" not in card
    assert f"`{site.url}/a`" in card
    assert done.fetched_bytes == sum(array.nbytes for files in models for array in load(files[name]).values())
