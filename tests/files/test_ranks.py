"""Parts of checkpoints of distributed training are refused, with the command that makes a model of them, or the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightsmith._base.errors import Unsupported, WeightsmithError
from weightsmith._files.hf_folder import of_ranks
from weightsmith._models.checkpoint import open_checkpoint

LAYOUTS = {
    "verl in another folder": (["critic/model_world_size_2_rank_0.pt"], "with the files of all processes in it: '{}/critic'"),
    "fsdp": (["c/pytorch_model_fsdp_0/.metadata", "c/pytorch_model_fsdp_0/__0_0.distcp"], "in it: '{}/c/pytorch_model_fsdp_0'"),
    "dcp without its table": (["__0_0.distcp"], "Name its folder, with the files of all processes in it: '{}'"),
    "deepspeed without an optimizer": (
        ["zero_to_fp32.py", "global_step5/zero_pp_rank_0_mp_rank_00_model_states.pt"],
        "with the files of all processes in it: '{}/global_step5'",
    ),
    "megatron": (
        ["iter_0000010/mp_rank_00/distrib_optim.pt"],
        "with the files of all processes in it: '{}/iter_0000010'",
    ),
    "vllm": (["config.json", "model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"], "Use the model"),
    "tensorrt-llm": (["rank0.safetensors", "rank1.safetensors"], "Use the model"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_part_is_taken_for_the_model(name: str, tmp_path: Path) -> None:
    files, command = LAYOUTS[name]
    folder = tmp_path / "a run"
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"")
    with pytest.raises(Unsupported) as refused:
        open_checkpoint(folder)
    assert "no file holds the model" in str(refused.value)
    assert command.replace("{}", str(folder)) in refused.value.finding.fix
    assert "emove" not in str(refused.value)


def test_one_file_that_is_named_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "model_world_size_8_rank_0.pt"
    path.write_bytes(b"")
    with pytest.raises(Unsupported, match="no file holds the model"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "names",
    [["model.safetensors"], ["lora_rank_64.safetensors"], ["model_world_size_1_rank_0.pt"], ["rank8.pt", "rank16.pt"]],
)
def test_other_files_are_no_parts(names: list[str]) -> None:
    assert of_ranks(names, "here") is None


def test_a_whole_model_beside_parts_is_read(tmp_path: Path) -> None:
    from tests import plan_help

    plan_help.model(tmp_path / "a")
    (tmp_path / "a" / "global_step5").mkdir()
    (tmp_path / "a" / "global_step5" / "mp_rank_00_model_states.pt").write_bytes(b"")
    try:
        open_checkpoint(tmp_path / "a").close()
    except WeightsmithError as error:
        raise AssertionError(error) from error
