"""PyTorch's distributed checkpoints are read as PyTorch reads them, and merged as the same model in safetensors."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, ChunkStorageMetadata, MetadataIndex

import weightsmith
from tests import plan_help
from tests.mini import write_checkpoint
from tests.models.formats.training.processes import tensors, write_sharded
from tests.models.sources.test_pytorch import as_array
from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._files.hf_folder import natural_key
from weightsmith._files.state_pickle import Instance, interpret
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._models.formats.training.dcp import METADATA, open_files
from weightsmith.testing import SourceCase, SourceTests

OPTIMIZER = {"state": {"w": {"exp_avg": torch.ones(301, 70)}}, "lr": 0.1}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "c"
    write_sharded(folder, {"model": tensors(), "optimizer": OPTIMIZER, "step": 3})
    return folder


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


class TestDistributed(SourceTests):
    @pytest.fixture
    def case(self, sharded: Path, tmp_path: Path) -> SourceCase:
        copied, other = tmp_path / "a", tmp_path / "b"
        shutil.copytree(sharded, copied)
        checkpoint.save({**tensors(), "scalar": torch.zeros(2)}, checkpoint_id=other, no_dist=True)
        expected = {name: as_array(tensor) for name, tensor in sorted(tensors().items(), key=lambda x: natural_key(x[0]))}

        def opener(folder: Path) -> Any:
            return lambda: open_files(files(folder), None, "it").source

        return SourceCase(opener(copied), expected, opener(other))


def test_it_is_what_pytorch_makes_of_it(sharded: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(sharded, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    with open_checkpoint(sharded) as opened:
        assert list(opened) == sorted(whole, key=natural_key)
        for name, tensor in whole.items():
            np.testing.assert_array_equal(opened[name], as_array(tensor))
        assert "'model'" in str(opened.notes[0])
        assert "'optimizer'" in str(opened.notes[0])
        assert opened.left_out == ()


def test_the_optimizer_of_megatron_is_no_part_of_the_model(tmp_path: Path) -> None:
    model = {"decoder.layers.mlp.linear_fc1.weight": torch.randn(3, 8, 4), "decoder.final_layernorm.weight": torch.ones(4)}
    states = {
        f"{start}.exp_avg.{name}": torch.ones(2) for name in model for start in ("optimizer.state", "chained_1.optimizer.state")
    }
    checkpoint.save({**model, **states}, checkpoint_id=tmp_path / "c", no_dist=True)
    with open_checkpoint(tmp_path / "c") as opened:
        assert set(opened) == set(model)
        np.testing.assert_array_equal(opened["decoder.layers.mlp.linear_fc1.weight"], as_array(next(iter(model.values()))))
        assert opened.notes[0].what == "ignored: 4 tensors of the optimizer"


@pytest.mark.parametrize("key", ["model", "app.model", ""])
def test_where_the_state_dict_is(key: str, tmp_path: Path) -> None:
    state: Any = tensors()
    for part in reversed(key.split(".") if key else []):
        state = {part: state, "optim": OPTIMIZER}
    checkpoint.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    with open_checkpoint(tmp_path / "c") as opened:
        assert set(opened) == set(tensors())


def test_two_state_dicts_are_refused(tmp_path: Path) -> None:
    checkpoint.save({"ema": {"model": tensors()}, "model": tensors()}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(FormatError, match=r"several state dicts: 'ema.model', 'model'"):
        open_checkpoint(tmp_path / "c")
    checkpoint.save({"optimizer": OPTIMIZER}, checkpoint_id=tmp_path / "o", no_dist=True)
    with pytest.raises(Unsupported, match="no tensors of a model"):
        open_checkpoint(tmp_path / "o")


@pytest.mark.long
def test_a_merge_and_a_quantisation_of_a_training_folder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("base", "tuned"):
        state = {key: rng.standard_normal(array.shape).astype(np.float32) for key, array in plan_help.decoder(2).items()}
        write_checkpoint(tmp_path / name, state, plan_help.config(2))
    run, tuned = tmp_path / "checkpoint-10", tmp_path / "tuned"
    write_sharded(run / "pytorch_model_fsdp_0", {"model": {key: torch.from_numpy(array) for key, array in state.items()}})
    shutil.copy(tuned / "config.json", run)
    (run / "optimizer_0").mkdir()
    (run / "optimizer_0" / "__0_0.distcp").write_bytes(b"")
    for model in (tuned, run):
        entry = {"model": str(model), "parameters": {"density": 0.5, "weight": 1}}
        recipe = {"merge_method": "ties", "base_model": str(tmp_path / "base"), "models": [entry]}
        weightsmith.merge(recipe, tmp_path / f"merge of {model.name}")
        weightsmith.quantize(model, tmp_path / f"w8 of {model.name}", "fp8-dynamic")
    for kind in ("merge", "w8"):
        one, other = (tmp_path / f"{kind} of {model.name}" for model in (tuned, run))
        assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
        assert (one / "config.json").read_bytes() == (other / "config.json").read_bytes()


# ---- damaged and hostile


@pytest.fixture
def small(tmp_path: Path) -> Path:
    checkpoint.save({"w": torch.ones(4, 3), "b": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    return tmp_path / "c"


def refuse(folder: Path, change: Any, words: str, kind: type[Exception] = FormatError) -> None:
    """After a change to the metadata, the folder is refused with these words."""
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata, protocol=4))
    with pytest.raises(kind, match=re.escape(words)):
        open_checkpoint(folder)


def place_of(metadata: Any, name: str = "w") -> Any:
    return metadata.storage_data[MetadataIndex(name, [0] * (2 if name == "w" else 1))]


def set_chunks(metadata: Any, *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    metadata.state_dict_metadata["w"].chunks = [
        ChunkStorageMetadata(torch.Size(first), torch.Size(shape)) for first, shape in chunks
    ]
    place = place_of(metadata)
    for first, _ in chunks:
        metadata.storage_data[MetadataIndex("w", first)] = place


CHANGES = {
    "a file elsewhere": (lambda m: setattr(place_of(m), "relative_path", "../x.distcp"), "1 of 2 files are missing"),
    "beyond the file": (lambda m: setattr(place_of(m), "offset", 10**6), "and the file ends at"),
    "below it": (lambda m: setattr(place_of(m), "offset", -1), "at byte -1"),
    "another length": (lambda m: setattr(place_of(m), "length", 20), "the zip archive"),
    "another shape": (lambda m: set_chunks(m, ((0, 0), (4, 2))), "and .metadata says (4, 2)"),
    "other dimensions": (lambda m: set_chunks(m, ((0,), (12,))), "a part at (0,) of shape (12,)"),
    "no part": (lambda m: set_chunks(m), "its parts have 0 of 12 elements"),
    "twice": (lambda m: set_chunks(m, ((0, 0), (4, 3)), ((1, 0), (4, 3))), "its part at (1, 0)"),
    "no place": (lambda m: m.storage_data.clear(), "no file is said to have its part"),
    "a large shape": (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([2**40, 2**40])), "overflows"),
    "no tensor": (
        lambda m: (lambda a, b: (setattr(a, "offset", b.offset), setattr(a, "length", b.length)))(
            place_of(m), place_of(m, "b")
        ),
        "it is (2,) F32, and .metadata says (4, 3) F32",
    ),
    "no shape": (lambda m: setattr(m.state_dict_metadata["w"], "size", "large"), "its shape is 'large'"),
    "a dtype": (lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.bfloat16), "says (4, 3) BF16"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_damaged_table_is_refused(name: str, small: Path) -> None:
    change, words = CHANGES[name]
    refuse(small, change, words)


def test_compression_and_programs_are_refused(small: Path) -> None:
    refuse(small, lambda m: setattr(place_of(m), "transform_descriptors", ["zstd"]), "in a form that is not read", Unsupported)
    (small / METADATA).write_bytes(b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85R.")
    with pytest.raises(Unsupported, match=r"'os.system', which is not needed"):
        open_checkpoint(small)
    (small / METADATA).write_bytes(b"\x80\x04N.")
    with pytest.raises(FormatError, match="not what PyTorch writes there"):
        open_checkpoint(small)


def test_a_missing_file_and_an_incomplete_folder(sharded: Path, tmp_path: Path) -> None:
    shutil.copytree(sharded, tmp_path / "c")
    (tmp_path / "c" / "__1_0.distcp").unlink()
    with pytest.raises(FormatError, match=r"1 of 2 files are missing: '__1_0.distcp'"):
        open_checkpoint(tmp_path / "c")
    shutil.copy(sharded / "__1_0.distcp", tmp_path / "c")
    (tmp_path / "c" / METADATA).unlink()
    with pytest.raises(Unsupported, match="no file holds the model"):
        open_checkpoint(tmp_path / "c")
    save_file({"w": torch.ones(2)}, tmp_path / "c" / "model.safetensors")  # a whole model beside parts comes first
    with open_checkpoint(tmp_path / "c") as opened:
        assert list(opened) == ["w"]


def test_a_member_of_an_enum_as_python_3_11_0_pickles_it() -> None:
    class Pickled:
        def __init__(self, *of: object) -> None:
            self.of = of

        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, self.of

    member = pickle.dumps(Pickled(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT"))
    name = f"{_MEM_FORMAT_ENCODING.__module__}._MEM_FORMAT_ENCODING"
    instance = interpret(member, {name})
    assert isinstance(instance, Instance)
    assert (instance.kind, instance.args) == (name, ("TORCH_PRESERVE_FORMAT",))
    with pytest.raises(Unsupported, match=r"uses 'builtins\.getattr'"):
        interpret(member)
    with pytest.raises(FormatError, match="an attribute of something that is no class"):
        interpret(pickle.dumps(Pickled(torch.Tensor, "data")), {name})
