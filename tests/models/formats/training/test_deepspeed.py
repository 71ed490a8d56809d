"""DeepSpeed's checkpoints are read as its zero_to_fp32.py reads them.

The files are made here by DeepSpeed's rules. `reference` says what its script makes of them, in torch's operations.
"""

from __future__ import annotations

import math
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weightsmith
from tests import plan_help
from tests.mini import write_checkpoint
from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._files.hf_folder import natural_key
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._models.formats.training.deepspeed import open_files
from weightsmith.testing import SourceCase, SourceTests

BUFFER = torch.arange(4.0).bfloat16()


def weights(shift: float = 0) -> list[dict[str, torch.Tensor]]:
    """Of two groups; sizes that no number of processes divides."""
    torch.manual_seed(0)
    return [
        {"layers.2.w": torch.randn(7, 5) + shift, "layers.10.w": torch.randn(3, 5, 4), "one": torch.randn(1)},
        {"norm": torch.randn(11), "scalar": torch.randn(())},
    ]


FROZEN = {"embed": torch.arange(15.0).reshape(5, 3).bfloat16()}


def padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % multiple), value=float("nan"))


class LossScaler:
    """As DeepSpeed's, which is in the files."""

    def __init__(self) -> None:
        self.cur_scale = 1.0


LossScaler.__module__ = "deepspeed.runtime.fp16.loss_scaler"


@pytest.fixture(autouse=True, scope="module")
def scaler_is_importable() -> Any:
    module = types.ModuleType(LossScaler.__module__)
    module.LossScaler = LossScaler  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
        patch.setitem(sys.modules, LossScaler.__module__, module)
        yield


def write(folder: Path, stage: int, world: int, groups: list[dict[str, torch.Tensor]], arrays: int = 1) -> Path:
    """A checkpoint of ZeRO; arrays: in how many a process of ZeRO 3 keeps its part of a group."""
    folder.mkdir(parents=True)
    shapes = [OrderedDict((name, tensor.shape) for name, tensor in group.items()) for group in groups]
    for rank in range(world):
        model: dict[str, Any] = {
            "module": {**{name: tensor.bfloat16() for name, tensor in FROZEN.items()}, "seen": BUFFER},
            "buffer_names": ["seen"],
            "param_shapes": shapes,
            "frozen_param_shapes": {name: tensor.shape for name, tensor in FROZEN.items()},
            "shared_params": {"head": "layers.2.w"},
            "ds_config": {"train_batch_size": 8, "zero_optimization": {"stage": stage}},
            "ds_version": "0.18.2",
            "counts": np.int64(3),
        }
        optimizer: dict[str, Any] = {
            "zero_stage": stage,
            "partition_count": world if stage == 3 else [world] * len(groups),
            "loss_scaler": LossScaler(),
            "optimizer_state_dict": {"state": {0: {"exp_avg": torch.ones(3)}}},
        }
        if stage == 3:
            parts = [padded(tensor, world).chunk(world)[rank] for group in groups for tensor in group.values()]
            optimizer["fp32_flat_groups"] = [piece.clone() for piece in torch.cat(parts).tensor_split(arrays)]
            fragments = {name: padded(tensor, world).chunk(world)[rank].clone() for name, tensor in FROZEN.items()}
            torch.save(
                {**model, "frozen_param_fragments": fragments}, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            )
        else:
            flat = [padded(torch.cat([t.reshape(-1) for t in group.values()]), 2 * world) for group in groups]
            optimizer["single_partition_of_fp32_groups"] = [group.chunk(world)[rank].clone() for group in flat]
            torch.save({**model, "frozen_param_fragments": FROZEN}, folder / "mp_rank_00_model_states.pt")
        torch.save({"optimizer_state_dict": optimizer}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def reference(folder: Path) -> dict[str, torch.Tensor]:
    """What zero_to_fp32.py makes of it; without its conversion of buffers to float32."""
    models, optims = (
        [
            torch.load(path, weights_only=False)
            for path in sorted(folder.glob(f"*_{kind}_states.pt"), key=lambda path: natural_key(path.name))
        ]
        for kind in ("model", "optim")
    )
    states = [state["optimizer_state_dict"] for state in optims]
    world, result = len(states), {"seen": models[0]["module"]["seen"]}
    if states[0]["zero_stage"] == 3:
        for name, shape in models[0]["frozen_param_shapes"].items():
            whole = torch.cat([state["frozen_param_fragments"][name] for state in models])
            result[name] = whole.narrow(0, 0, shape.numel()).view(shape)
        flat, at = [torch.cat(state["fp32_flat_groups"]) for state in states], 0
        for name, shape in {k: v for group in models[0]["param_shapes"] for k, v in group.items()}.items():
            n = math.ceil(shape.numel() / world)
            result[name] = torch.cat([part.narrow(0, at, n) for part in flat]).narrow(0, 0, shape.numel()).view(shape)
            at += n
    else:
        result |= models[0]["frozen_param_fragments"]
        for number, group in enumerate(models[0]["param_shapes"]):
            whole, at = torch.cat([state["single_partition_of_fp32_groups"][number] for state in states]), 0
            for name, shape in group.items():
                result[name] = whole.narrow(0, at, shape.numel()).view(shape)
                at += shape.numel()
    return {**result, **{name: result[other] for name, other in models[0]["shared_params"].items()}}


def as_array(tensor: torch.Tensor) -> np.ndarray:
    from tests.models.sources.test_pytorch import as_array

    return as_array(tensor)


LAYOUTS = [(1, 2, 1), (2, 3, 1), (2, 1, 1), (3, 2, 1), (3, 4, 3), (3, 12, 2)]


@pytest.mark.parametrize(("stage", "world", "arrays"), LAYOUTS)
def test_it_is_what_deepspeed_makes_of_it(stage: int, world: int, arrays: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "run" / "global_step5", stage, world, weights(), arrays)
    expected = reference(folder)
    assert torch.equal(expected["layers.2.w"], weights()[0]["layers.2.w"])
    for named in (folder, folder.parent):
        with open_checkpoint(named) as opened:
            assert set(opened) == set(expected)
            for name, tensor in expected.items():
                np.testing.assert_array_equal(opened[name], as_array(tensor), err_msg=name)


class TestZero(SourceTests):
    @pytest.fixture(params=[2, 3])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> SourceCase:
        a = write(tmp_path / "a", request.param, 2, weights())
        b = write(tmp_path / "b", request.param, 2, [{"w": torch.ones(2)}])
        expected = {name: as_array(t) for name, t in sorted(reference(a).items(), key=lambda item: natural_key(item[0]))}

        def opener(folder: Path) -> Any:
            return lambda: open_files(sorted(folder.iterdir()), None, "it").source

        return SourceCase(opener(a), expected, opener(b))


def test_a_merge_of_a_training_folder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = {key: rng.standard_normal(array.shape).astype(np.float32) for key, array in plan_help.decoder(2).items()}
    config = plan_help.config(2)
    write_checkpoint(tmp_path / "whole", {**state, "embed": as_array(FROZEN["embed"]), "seen": as_array(BUFFER)}, config)
    run = tmp_path / "checkpoint-5"
    write(run / "global_step5", 3, 2, [{key: torch.from_numpy(array) for key, array in state.items()}])
    for path in (run / "global_step5").glob("*model_states.pt"):  # no shared tensor in this model
        model = torch.load(path, weights_only=False)
        torch.save({**model, "shared_params": {}}, path)
    (run / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    (run / "latest").write_text("global_step5")
    (run / "zero_to_fp32.py").write_text("")
    for model in (tmp_path / "whole", run):
        recipe = {"merge_method": "linear", "models": [{"model": str(model), "parameters": {"weight": 1}}], "dtype": "bfloat16"}
        weightsmith.merge(recipe, tmp_path / f"merge of {model.name}")
    one, other = (tmp_path / f"merge of {model}" / "model.safetensors" for model in ("whole", "checkpoint-5"))
    assert one.read_bytes() == other.read_bytes()


def change(path: Path, **changes: Any) -> None:
    state = torch.load(path, weights_only=False)
    inner = state.get("optimizer_state_dict", state)
    inner.update(changes)
    torch.save(state, path)


@pytest.mark.parametrize("stage", [2, 3])
def test_damaged_checkpoints_are_refused(stage: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", stage, 2, weights())
    optim = folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    model = min(folder.glob("*model_states.pt"))
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"

    def refused(words: str, kind: type[Exception] = FormatError) -> None:
        with pytest.raises(kind, match=words):
            open_checkpoint(folder)

    kept = optim.read_bytes()
    change(optim, **{key: [torch.ones(3)] * (1 if stage == 3 else 2)})
    refused("elements, and its")
    change(optim, **{key: [torch.ones(3), 5]})
    refused("is 5, not a tensor")
    change(optim, **{key: 5})
    refused("not a list of")
    change(optim, zero_stage=7)
    refused("its stage is 7", Unsupported)
    change(optim, zero_stage=stage, partition_count=3)
    refused("3 files with optim_states are expected, and 2 are there")
    optim.write_bytes(kept)
    change(model, param_shapes=[{"w": torch.Size([2**40, 2**40])}, {}])
    if stage == 3:
        refused("zero_pp_rank_1_mp_rank_00_model_states.pt names other weights than zero_pp_rank_0")
        change(folder / "zero_pp_rank_1_mp_rank_00_model_states.pt", param_shapes=[{"w": torch.Size([2**40, 2**40])}, {}])
    refused("elements, and its")
    change(model, param_shapes={"w": 3})
    refused("param_shapes is a dict", Unsupported)
    change(model, param_shapes=[{"w": "large"}])
    refused("'w' has the shape 'large'")
    optim.unlink()
    refused("2 files with optim_states are expected, and 1 are there|3 files")


def test_slices_of_tensor_parallel_runs_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", 2, 1, weights())
    (folder / "mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(Unsupported, match="pipeline stages, experts or tensor-parallel slices"):
        open_checkpoint(folder)
    write(tmp_path / "run" / "global_step5", 2, 1, weights())
    write(tmp_path / "run" / "global_step6", 2, 1, weights())
    with pytest.raises(FormatError, match="checkpoints of 2 steps: 'global_step5', 'global_step6'"):
        open_checkpoint(tmp_path / "run")
