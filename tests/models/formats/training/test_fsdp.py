"""FSDP's checkpoints with a file for each process are read as PyTorch cut them, and what is not one model is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor.placement_types import Shard

import weightsmith
from tests import plan_help
from tests.mini import write_checkpoint
from tests.models.formats.training.processes import tensors, write_ranks
from tests.models.sources.test_pytorch import as_array
from weightsmith._base.errors import CheckpointError, FormatError, Unsupported
from weightsmith._files.hf_folder import natural_key
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._models.formats.training.fsdp import open_files
from weightsmith.testing import SourceCase, SourceTests


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model_world_size_*"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp") / "c"
    write_ranks(folder, tensors())
    return folder


class TestRanks(SourceTests):
    @pytest.fixture
    def case(self, ranks: Path, tmp_path: Path) -> SourceCase:
        copied, other = tmp_path / "a", tmp_path / "b"
        shutil.copytree(ranks, copied)
        write_ranks(other, {**tensors(), "scalar": torch.zeros(2)})
        expected = {name: as_array(tensor) for name, tensor in sorted(tensors().items(), key=lambda x: natural_key(x[0]))}

        def opener(folder: Path) -> Any:
            return lambda: open_files(files(folder), None, "it").source

        return SourceCase(opener(copied), expected, opener(other))


@pytest.mark.long
def test_three_processes_share_rows_unevenly(tmp_path: Path) -> None:
    write_ranks(tmp_path / "c" / "actor", tensors(), 3)
    for other in ("optim_world_size_3_rank_0.pt", "extra_state_world_size_3_rank_0.pt"):
        (tmp_path / "c" / "actor" / other).write_bytes(b"no pickle")
    with open_checkpoint(tmp_path / "c") as opened:
        assert set(opened) == set(tensors())
        for name, tensor in tensors().items():
            np.testing.assert_array_equal(opened[name], as_array(tensor))
        assert opened.notes[0].what == "the weights are in parts of 3 processes"


@pytest.mark.long
def test_a_merge_and_a_quantisation_of_ranks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("base", "tuned"):
        state = {key: rng.standard_normal(array.shape).astype(np.float32) for key, array in plan_help.decoder(2).items()}
        write_checkpoint(tmp_path / name, state, plan_help.config(2))
    run, tuned = tmp_path / "actor", tmp_path / "tuned"
    write_ranks(run, {key: torch.from_numpy(array) for key, array in state.items()})
    shutil.copy(tuned / "config.json", run)
    for model in (tuned, run):
        entry = {"model": str(model), "parameters": {"density": 0.5, "weight": 1}}
        recipe = {"merge_method": "ties", "base_model": str(tmp_path / "base"), "models": [entry]}
        weightsmith.merge(recipe, tmp_path / f"merge of {model.name}", progress=False, fsync=False)
    one, other = (tmp_path / f"merge of {model.name}" / "model.safetensors" for model in (tuned, run))
    assert one.read_bytes() == other.read_bytes()


# ---- what is refused


def test_the_files_of_all_processes_must_be_there(ranks: Path, tmp_path: Path) -> None:
    shutil.copytree(ranks, tmp_path / "c")
    (tmp_path / "c" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(FormatError, match=r"1 of 2 files are missing: 'model_world_size_2_rank_1\.pt'"):
        open_checkpoint(tmp_path / "c")
    shutil.copy(files(ranks)[1], tmp_path / "c" / "model_world_size_3_rank_1.pt")
    with pytest.raises(FormatError, match="checkpoints of '2 processes', '3 processes' in one folder"):
        open_checkpoint(tmp_path / "c")


def test_files_may_not_change_places(ranks: Path, tmp_path: Path) -> None:
    one, other = files(ranks)
    (tmp_path / "c").mkdir()
    shutil.copy(one, tmp_path / "c" / other.name)
    shutil.copy(other, tmp_path / "c" / one.name)
    with pytest.raises(Unsupported, match="process 0 does not have the place 0 of the mesh"):
        open_checkpoint(tmp_path / "c")


def test_a_mesh_of_two_dimensions_is_refused(tmp_path: Path) -> None:
    write_ranks(tmp_path, {"w": torch.ones(4, 2)}, mesh="two dimensions")
    with pytest.raises(Unsupported, match="'w' is on a mesh of processes of 2 dimensions") as caught:
        open_checkpoint(tmp_path)
    assert "verl.model_merger" in caught.value.finding.fix


@pytest.mark.long
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"w": torch.ones(6, 2)}, r"is a part \[3, 2\] F32 of \[6, 2\], and that of process 1 is \[2, 2\] F32 of \[4, 2\]"),
        ({"w": torch.ones(4, 2).half()}, r"is a part \[2, 2\] F16 of \[4, 2\]"),
        ({"v": torch.ones(4, 2)}, "tensor 'w' is missing, which model_world_size_2_rank_0.pt has"),
        ({"w": torch.ones(4, 2), "v": torch.ones(4)}, "has the tensor 'v', and model_world_size_2_rank_0.pt has not"),
    ],
)
def test_files_of_two_runs_are_refused(other: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    write_ranks(tmp_path / "a", {"w": torch.ones(4, 2)})
    write_ranks(tmp_path / "b", other)
    shutil.copy(files(tmp_path / "b")[1], files(tmp_path / "a")[1])
    with pytest.raises(FormatError, match=message):
        open_checkpoint(tmp_path / "a")


def test_flat_parameters_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        state = {"layers.0._fsdp_wrapped_module._flat_param": torch.full((4,), float(rank))}
        torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(Unsupported, match=r"'layers\.0\._fsdp_wrapped_module\._flat_param' has several tensors in one row"):
        open_checkpoint(tmp_path)


def test_plain_tensors_alone_do_not_say_how_processes_share_them(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.ones(4), "v": torch.ones(2)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(Unsupported, match="none of 2 tensors is a DTensor, which says how 2 processes share it"):
        open_checkpoint(tmp_path)
    (tmp_path / "one").mkdir()
    torch.save({"w": torch.ones(4)}, tmp_path / "one" / "model_world_size_1_rank_0.pt")
    with open_checkpoint(tmp_path / "one") as opened:
        assert opened["w"].tolist() == [1, 1, 1, 1]


@pytest.mark.long
@pytest.mark.parametrize(("name", "other"), [("scalar", torch.tensor(3.5)), ("long", torch.arange(9) // 8 * 9)])
def test_a_tensor_that_each_file_has_whole_is_the_same_in_all(
    name: str, other: torch.Tensor, ranks: Path, tmp_path: Path
) -> None:
    shutil.copytree(ranks, tmp_path / "a")
    write_ranks(tmp_path / "b", {**tensors(), name: other})
    shutil.copy(files(tmp_path / "b")[1], files(tmp_path / "a")[1])
    with open_checkpoint(tmp_path / "a") as opened:
        message = f"tensor '{name}' has other values than in model_world_size_2_rank_0.pt, and each file has all of it"
        with pytest.raises(FormatError, match=message) as caught:
            opened.read(name)
        assert "model_world_size_2_rank_1.pt" in str(caught.value)
        opened.read("w")


class Code:
    def __reduce__(self) -> Any:
        return print, ("code of a pickle was run",)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"w": Code()}, "uses 'builtins.print'"),
        ({"w": 3}, "the entry 'w' is 3, not a tensor"),
        ([torch.ones(2)], "it holds a list, not a state dict"),
        ({"w": Shard(0)}, "'w' is an object of .*Shard', not a DTensor"),
        ({}, "contains no tensors"),
    ],
)
def test_what_is_no_state_dict_is_refused(state: Any, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)
    assert "was run" not in capfd.readouterr().out
