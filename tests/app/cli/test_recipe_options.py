"""A recipe from standard input, values put into it, errors as JSON, and a plan with the options of a merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli_help import LINEAR, Cli, cli, environment, run_process, work
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._planning.recipe import load

__all__ = ["cli", "work"]


# ---- standard input


@pytest.mark.process
@pytest.mark.slow
def test_a_recipe_comes_from_standard_input(work: Path) -> None:
    ran = run_process("merge", "-", "out", "--quiet", cwd=work, input=LINEAR)
    assert (ran.code, ran.err) == (0, "")
    assert (work / "out/recipe.yml").read_text().strip() == LINEAR.strip()
    ran = run_process("plan", "-", cwd=work, input=LINEAR.replace("linear", "linaer"))
    assert ran.code == 1
    assert "error[unknown-method]: <stdin>:1:1: no merge method is called 'linaer'" in ran.err


@pytest.mark.long
def test_standard_input_that_is_not_text_is_an_error(work: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "weightsmith", "plan", "-"]
    done = subprocess.run(command, input=b"a: \xff\n", capture_output=True, cwd=work, env=environment())
    assert done.returncode == 1
    assert b"not UTF-8 text: byte 0xff" in done.stderr


# ---- --set


def test_a_value_is_put_into_the_recipe_and_the_result_says_so(cli: Cli, work: Path) -> None:
    ran = cli("merge", "linear.yml", "out", "--set", "models[1].parameters.weight=3.75", "--set", "dtype=float16", "--quiet")
    assert ran.code == 0
    assert "weight: 3.75" in (work / "out/recipe.yml").read_text()
    with open_checkpoint(work / "a") as a, open_checkpoint(work / "b") as b, open_checkpoint(work / "out") as out:
        name = "model.norm.weight"
        assert out.specs[name].dtype.name == "F16"
        assert abs(out.read(name).astype("f4") - (a.read(name) + 15 * b.read(name)) / 16).max() < 2e-3


def test_a_wrong_value_is_an_error_at_the_option_and_others_keep_their_lines(cli: Cli, work: Path) -> None:
    ran = cli("plan", "linear.yml", "--set", "parameters.normalize=maybe", "--set", "models[0].model=nowhere")
    assert ran.code == 1
    assert "error[parameter]: --set parameters.normalize: normalize must be true or false, not 'maybe'" in ran.err
    assert "error[not-found]: --set models[0].model: nowhere: no such folder or file" in ran.err
    ran = cli("plan", "linear.yml", "--set", "dtyp=float32", "--set", "models[0].parameters.weight=0.5")
    assert "error[unknown-key]: --set dtyp: unknown key 'dtyp' at the top level (did you mean 'dtype'?)" in ran.err


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("models[7].model=a", "the recipe has no entry [7] there, but 2, counted from 0"),
        ("merge_method.x=1", "'x' cannot be set in the text 'linear'"),
        ("models.model=a", "'model' cannot be set in a list of 2"),
        ("a..b=1", "this is not the place of a value in the recipe"),
    ],
)
def test_a_place_that_the_recipe_does_not_have_is_an_error(cli: Cli, work: Path, setting: str, said: str) -> None:
    ran = cli("plan", "linear.yml", "--set", setting)
    assert ran.code == 1
    assert said in ran.err


@pytest.mark.parametrize("setting", ["parameters.t", "=3", "a={"])
def test_what_sets_nothing_is_a_wrong_command_line(cli: Cli, work: Path, setting: str) -> None:
    assert cli("plan", "linear.yml", "--set", setting).code == 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"parameters.t": 0.3}, {"t": 0.3}),
        ({"parameters.t": [0, 1], "parameters.normalize": True}, {"t": (0, 1), "normalize": True}),
    ],
)
def test_mappings_on_the_way_are_made(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    loaded = load({"merge_method": "slerp", "models": [{"model": "a"}]}, settings=settings, parameter_names=("t", "normalize"))
    assert loaded.problems == ()
    assert loaded.recipe is not None
    values = {name: setting.entries[0].value for name, setting in loaded.recipe.parameters.items()}  # type: ignore[union-attr]
    assert values == expected


# ---- --json


def test_errors_are_json_too(cli: Cli, work: Path) -> None:
    (work / "bad.yml").write_text(LINEAR.replace("weight: 0.25", "wieght: 1") + "dtyp: bfloat16\n")
    ran = cli("merge", "bad.yml", "out", "--json")
    printed = json.loads(ran.out)
    assert (ran.code, printed["exit_code"], printed["state"]) == (1, 1, "Nothing was written.")
    assert [(e["code"], e["where"], e["fix"]) for e in printed["errors"]] == [
        ("unknown-parameter", "bad.yml:4:18", "Write 'weight'."),
        ("unknown-key", "bad.yml:8:1", "Write 'dtype'."),
    ]
    assert "error[unknown-parameter]" in ran.err


@pytest.mark.parametrize("command", ["merge", "moe", "plan", "run", "verify", "methods"])
def test_every_command_with_json_has_errors_as_json(cli: Cli, work: Path, command: str) -> None:
    out = ["out"] if command in ("merge", "moe", "run") else []
    ran = cli(command, "nowhere", *out, "--json")
    assert ran.code in (1, 3)
    printed = json.loads(ran.out)
    assert printed["exit_code"] == ran.code
    assert printed["errors"][0]["code"] in ("not-found", "unknown-method")


@pytest.mark.slow
def test_a_wrong_command_line_is_json_too(cli: Cli, work: Path) -> None:
    ran = cli("merge", "linear.yml", "out", "--json", "--threads", "none")
    printed = json.loads(ran.out)
    assert (ran.code, printed["exit_code"], printed["errors"][0]["code"]) == (2, 2, "parameter")
    assert printed["errors"][0]["where"] == "--threads (threads)"
    assert cli("merge", "linear.yml", "out", "--threads", "none").out == ""


# ---- plan


def test_a_plan_takes_the_command_line_of_a_merge(cli: Cli, work: Path) -> None:
    options = ["--overwrite", "--no-resume", "--no-fsync", "--no-card", "--allow-nonfinite", "--allow-crimes", "--cuda"]
    ran = cli("plan", "linear.yml", "out", *options)
    assert ran.code == 0
    assert "method   linear" in ran.out
    assert "--cuda is not needed" in ran.err
    quiet = cli("plan", "linear.yml", "out", *options, "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    assert not (work / "out").exists()


@pytest.mark.slow
def test_explain_takes_a_pattern(cli: Cli, work: Path) -> None:
    ran = cli("plan", "linear.yml", "--explain", "*.mlp.*")
    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines() if "made by linear" in line] == [
        f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)
    ]
    printed = json.loads(cli("plan", "linear.yml", "--explain", "*.mlp.*", "--json").out)
    assert [tensor["tensor"] for tensor in printed] == [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)]
    one = json.loads(cli("plan", "linear.yml", "--explain", "model.norm.weight", "--json").out)
    assert one["tensor"] == "model.norm.weight"
    assert cli("plan", "linear.yml", "--explain", "*.attn.*").code == 1
