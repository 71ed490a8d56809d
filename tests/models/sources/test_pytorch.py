"""PyTorch's zip checkpoints as inputs: which files are the model, reading, and merges as those of the same safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.numpy import save_file

import weightsmith
from tests import zoo
from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.tensors import DTYPES
from weightsmith._models.formats.pytorch import STRIDED_BYTES, open_pytorch
from weightsmith.testing import SourceCase, SourceTests

BF16 = DTYPES["BF16"].numpy


def model() -> dict[str, torch.Tensor]:
    """Tensors in model order: several dtypes, a scalar, an empty one, tied ones, and views that are no run of bytes."""
    torch.manual_seed(0)
    w = torch.randn(300, 70)
    return {
        "empty": torch.zeros(0, 3),
        "expanded": torch.randn(5, 1).expand(5, 9),
        "head": w,
        "layers.2.w": torch.randn(7, 5).bfloat16(),
        "layers.10.w": torch.randn(3, 2, 4).half(),
        "long": torch.arange(9),
        "scalar": torch.tensor(5.5, dtype=torch.float64),
        "sliced": w[7:, 3:60:2],
        "tied": w,
        "turned": torch.randn(40, 30).bfloat16().T,
    }


def as_array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BF16)
    return tensor.numpy()


def shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> list[Path]:
    """Two files: every other tensor in each."""
    folder.mkdir()
    files = [folder / f"pytorch_model-0000{k}-of-00002.bin" for k in (1, 2)]
    for k, file in enumerate(files):
        torch.save(dict(list(tensors.items())[k::2]), file)
    return files


class TestStoredViews(SourceTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        a = shards(tmp_path / "a", model())
        b = shards(tmp_path / "b", {**model(), "tied": torch.randn(299, 70)})
        expected = {name: as_array(tensor) for name, tensor in model().items()}
        return SourceCase(lambda: open_pytorch(a, None, "a").source, expected, lambda: open_pytorch(b, None, "b").source)

    def test_what_is_a_run_of_bytes_has_a_place_and_any_rows(self, case: SourceCase) -> None:
        source = case.open()
        strided = {name for name in source.specs if source.location(name) is None}
        assert strided == {"expanded", "sliced", "turned"}
        assert {name for name in source.specs if source.preferred_rows(name) > 1} == strided
        assert source.location("head") == source.location("tied") is not None
        source.close()


@pytest.mark.long
def test_rows_of_a_strided_tensor_that_are_read_together(tmp_path: Path) -> None:
    torch.save(
        {"w": torch.zeros(2048, 5000).T, "row": torch.zeros(3_000_000, 2).T, "long": torch.zeros(20, 2)[:, 0]},
        tmp_path / "a.pt",
    )
    with weightsmith.open_checkpoint(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.preferred_rows("w") == STRIDED_BYTES // (2048 * 4)
        assert checkpoint.preferred_rows("row") == 1  # one has more bytes
        assert checkpoint.preferred_rows("long") == 1


# Which files are the model.

W = {"w": torch.arange(6.0).reshape(2, 3)}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "x.pth", "x.ckpt", "X.BIN", "consolidated.00.pth"])
def test_a_file_of_any_name_is_read_in_its_folder_and_alone(name: str, tmp_path: Path) -> None:
    torch.save(W, tmp_path / name)
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    for ignored in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth"):
        (tmp_path / ignored).write_bytes(b"not read")
    with weightsmith.open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.weights, checkpoint.config) == ((name,), {"model_type": "x"})
        assert checkpoint.read("w").tolist() == [[0, 1, 2], [3, 4, 5]]
    with weightsmith.open_checkpoint(tmp_path / name) as checkpoint:
        assert (list(checkpoint.specs), checkpoint.alone) == (["w"], True)


@pytest.mark.parametrize(
    ("pickled", "name", "read"),
    [
        ("pytorch_model.bin", "model.safetensors", "s"),
        ("pytorch_model.bin", "other.safetensors", "w"),  # no loader finds it by itself
        ("other.bin", "other.safetensors", "s"),
    ],
)
def test_safetensors_win_where_loaders_find_them(pickled: str, name: str, read: str, tmp_path: Path) -> None:
    torch.save(W, tmp_path / pickled)
    save_file({"s": np.zeros(3)}, tmp_path / name)
    assert list(weightsmith.open_checkpoint(tmp_path).specs) == [read]


def test_the_index_says_which_shards_are_read(tmp_path: Path) -> None:
    first, second = (file.name for file in shards(tmp_path / "m", {"a": torch.zeros(2), "b": torch.ones(2)}))
    torch.save(W, tmp_path / "m" / "other.bin")
    index = tmp_path / "m" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": first, "b": second}}))
    with weightsmith.open_checkpoint(tmp_path / "m") as checkpoint:
        assert (checkpoint.weights, checkpoint.ignored) == ((first, second), ("other.bin",))
    for weight_map, message in (
        ({"a": second, "b": first}, "the index says that tensor 'a' is in"),
        ({"a": first}, "the index names|that the index does not list|no file has it"),
        ({"a": "../x.bin"}, "leaves the folder"),
        ({"a": "model.safetensors"}, r"not a \.bin or \.pt or \.pth or \.ckpt file"),
        ({"a": "none.bin"}, "'none.bin' .* does not exist"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        if weight_map == {"a": first}:
            torch.save({"a": torch.zeros(2), "c": torch.zeros(2)}, tmp_path / "m" / first)
        with pytest.raises(FormatError, match=message):
            weightsmith.open_checkpoint(tmp_path / "m")


def test_files_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    shards(tmp_path / "m", {"a": torch.zeros(2), "b": torch.ones(2)})[1].unlink()
    with pytest.raises(FormatError, match=r"1 of 2 shards are missing: pytorch_model-00002-of-00002\.bin"):
        weightsmith.open_checkpoint(tmp_path / "m")
    torch.save(W, tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"both pytorch_model\.bin and pytorch_model-00001-of-00002\.bin"):
        weightsmith.open_checkpoint(tmp_path / "m")
    (tmp_path / "n").mkdir()
    for name in ("best.pt", "last.pt"):
        torch.save(W, tmp_path / "n" / name)
    with pytest.raises(FormatError, match="tensor 'w' is in two files"):
        weightsmith.open_checkpoint(tmp_path / "n")


def test_slices_for_several_devices_are_refused(tmp_path: Path) -> None:
    for k in range(2):
        torch.save(W, tmp_path / f"consolidated.0{k}.pth")
    with pytest.raises(Unsupported, match=r"consolidated\.00\.pth and similar files hold slices"):
        weightsmith.open_checkpoint(tmp_path)


def test_what_was_left_out_is_a_warning_of_the_plan(tmp_path: Path) -> None:
    torch.save({"state_dict": W, "epoch": 3}, tmp_path / "model.ckpt")
    plan = weightsmith.plan({"merge_method": "passthrough", "models": [{"model": str(tmp_path)}]})
    assert any("the tensors are those of its entry 'state_dict'; ignored: 'epoch'" in str(w) for w in plan.warnings)


# Merges have the bytes of those of the same safetensors.


def twin(folder: Path, source: Path, how: str) -> Path:
    """A model that transformers saved, with PyTorch files for its weights."""
    folder.mkdir()
    tensors = {}
    with weightsmith.open_checkpoint(source) as checkpoint:
        for name in checkpoint.specs:
            array = checkpoint.read(name)
            bits = torch.from_numpy(array.view(np.int16) if array.dtype == BF16 else array)
            tensors[name] = bits.view(torch.bfloat16) if array.dtype == BF16 else bits
    for file in source.glob("*.json"):
        if "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    if how == "one":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif how == "sharded":
        save_torch_state_dict(tensors, folder, safe_serialization=False, max_shard_size=20_000)
        assert len(list(folder.glob("pytorch_model-*.bin"))) > 2
    elif how == "turned":  # every matrix is stored transposed
        torch.save({n: t.T.contiguous().T if t.ndim == 2 else t for n, t in tensors.items()}, folder / "pytorch_model.bin")
    else:
        torch.save(
            {"step": 7, "model": {f"module.{n}": torch.nn.Parameter(t) for n, t in tensors.items()}}, folder / "model.pt"
        )
    return folder


def merged(out: Path, method: str, models: list[Path], **options: Any) -> bytes:
    recipe: dict[str, Any] = {"merge_method": method, "models": [{"model": str(m)} for m in models], **options}
    recipe["parameters"] = {"weight": 0.6} | ({"density": 0.4} if method == "ties" else {})
    if method == "ties":
        recipe["base_model"] = str(models[0])
    weightsmith.merge(recipe, out, fsync=False)
    return (out / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("llamas")
    return [zoo.save("llama", folder / f"m{k}", k) for k in range(3)]


@pytest.mark.matrix("one-ties")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["linear", "ties"])
@pytest.mark.parametrize("how", ["one", "sharded", "nested", "turned"])
def test_a_merge_of_pytorch_files_has_the_bytes_of_that_of_safetensors(
    how: str, method: str, llamas: list[Path], tmp_path: Path
) -> None:
    expected = merged(tmp_path / "expected", method, llamas)
    models = [twin(tmp_path / f"m{k}", model, how) for k, model in enumerate(llamas)]
    assert not list(tmp_path.glob("m?/*.safetensors"))
    assert merged(tmp_path / "out", method, models) == expected
    assert merged(tmp_path / "mixed", method, [llamas[0], *models[1:]]) == expected
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((tmp_path / "expected/config.json").read_text())


@pytest.mark.parametrize("how", ["one", "sharded", "turned"])
def test_transformers_loads_the_same_weights(how: str, llamas: list[Path], tmp_path: Path) -> None:
    folder = twin(tmp_path / "m", llamas[0], how)
    loaded, info = zoo.load("llama", folder)
    assert info == {}
    theirs = loaded.state_dict()
    with weightsmith.open_checkpoint(folder) as checkpoint:
        for name in checkpoint.specs:
            np.testing.assert_array_equal(checkpoint.read(name).astype(np.float32), theirs[name].float().numpy())


@pytest.mark.slow
def test_tied_names_are_both_read_and_the_merge_loads(tmp_path: Path) -> None:
    """transformers wrote both names of a tied head to .bin files, one storage; safetensors have one of them."""
    safe = [zoo.save("llama-tied", tmp_path / f"s{k}", k) for k in range(2)]
    models = []
    for k, folder in enumerate(safe):
        model, _ = zoo.load("llama-tied", folder)
        models.append(tmp_path / f"m{k}")
        models[-1].mkdir()
        torch.save(model.state_dict(), models[-1] / "pytorch_model.bin")
        (models[-1] / "config.json").write_bytes((folder / "config.json").read_bytes())
    with weightsmith.open_checkpoint(models[0]) as checkpoint:
        assert checkpoint.location("lm_head.weight") == checkpoint.location("model.embed_tokens.weight") is not None
    merged(tmp_path / "expected", "linear", safe)
    merged(tmp_path / "out", "linear", models)
    (expected, _), (loaded, info) = (zoo.load("llama-tied", tmp_path / name) for name in ("expected", "out"))
    assert info == {}
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in expected.state_dict().items())


@pytest.mark.parametrize("how", ["one", "turned"])
def test_a_copy_of_pytorch_files_has_the_bytes_of_that_of_safetensors(how: str, llamas: list[Path], tmp_path: Path) -> None:
    contents = []
    for name, model in (("expected", llamas[0]), ("out", twin(tmp_path / "m", llamas[0], how))):
        weightsmith.merge({"merge_method": "passthrough", "models": [{"model": str(model)}]}, tmp_path / name, fsync=False)
        contents.append((tmp_path / name / "model.safetensors").read_bytes())
    assert contents[0] == contents[1]


def test_files_of_a_run_are_a_pattern(tmp_path: Path) -> None:
    for step in (9, 10):
        torch.save(W, tmp_path / f"step-{step}.pt")
    (tmp_path / "optimizer.pt").write_bytes(b"not read")
    plan = weightsmith.plan({"merge_method": "linear", "models": [{"model": f"{tmp_path}/*.pt"}], "parameters": {"weight": 1}})
    assert [Path(model.ref).name for model in plan.models] == ["step-9.pt", "step-10.pt"]


@pytest.mark.slow
def test_a_mixture_of_pytorch_files(llamas: list[Path], tmp_path: Path) -> None:
    models = [twin(tmp_path / f"m{k}", model, "one") for k, model in enumerate(llamas)]
    contents = []
    for name, listed in (("expected", llamas), ("out", models)):
        experts = [{"source_model": str(model)} for model in listed[1:]]
        recipe = {"base_model": str(listed[0]), "gate_mode": "random", "dtype": "bfloat16", "experts": experts}
        weightsmith.moe(recipe, tmp_path / name, fsync=False)
        contents.append((tmp_path / name / "model.safetensors").read_bytes())
    assert contents[0] == contents[1]
