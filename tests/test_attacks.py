"""`scripts/attacks.py`, on one small merge: kills happen, resumed work is compared, and wrong bytes are noticed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from tests.outputs.bucket.test_runs import RECIPES, make_llamas
from tests.script_help import load

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[1] / "scripts" / "attacks.py"


@pytest.fixture(scope="module")
def attacks() -> ModuleType:
    return load(SCRIPT)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "inputs"
    folder.mkdir()
    make_llamas(folder)
    for name, (_, recipe, _) in RECIPES.items():
        (folder / f"{name}.yml").write_text(json.dumps(recipe))
    return folder


@pytest.mark.slow
def test_killed_merges_have_the_bytes_of_undisturbed_ones(attacks: ModuleType, inputs: Path, tmp_path: Path) -> None:
    replacing = attacks.Command("replacing", [("merge", "ties.yml", "OUT", "--overwrite")], ("merge", "linear.yml", "OUT"))
    kills = 0
    for command in (attacks.Command("new", [("merge", "ties.yml", "OUT")]), replacing):
        expected = attacks.undisturbed(command, inputs, tmp_path / command.name)
        assert "model.safetensors" in expected.after
        kills += sum(
            attacks.kill_case(command, inputs, tmp_path / f"{command.name}-{seed}", expected, random.Random(seed))
            for seed in (1, 2)
        )
    assert kills > 0


@pytest.mark.slow
def test_other_bytes_and_files_left_beside_the_output_are_noticed(attacks: ModuleType, inputs: Path, tmp_path: Path) -> None:
    command = attacks.Command("new", [("merge", "linear.yml", "OUT")])
    expected = attacks.undisturbed(command, inputs, tmp_path / "first")
    (tmp_path / "first" / "left").touch()
    with pytest.raises(attacks.Failure, match="left beside OUT: left"):
        attacks._check_alone(tmp_path / "first")
    expected.after["model.safetensors"] = "0"
    with pytest.raises(attacks.Failure, match=r"model\.safetensors \(other bytes\)"):
        attacks.kill_case(command, inputs, tmp_path / "second", expected, random.Random(1))
