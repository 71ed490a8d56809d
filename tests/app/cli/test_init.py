"""`weightsmith init`: what it writes is a recipe that plans."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli_help import Cli, cli, environment, make_models, work
from weightsmith._app.cli.recipes import goal_names, method_names, preset_names
from weightsmith._app.goals import GOALS

__all__ = ["cli", "work"]


def options(goal: str) -> list[str]:
    least = GOALS[goal].least
    models = [f"--model={name}" for name in "abc"[:least]]
    return [f"--goal={goal}", *models, *(["--base=base"] if GOALS[goal].base == "needed" else [])]


@pytest.mark.parametrize("goal", [goal for goal in GOALS if goal not in ("bake", "experts")])
def test_the_recipe_of_a_goal_is_commented_and_plans_without_a_warning(cli: Cli, work: Path, goal: str) -> None:
    make_models(work, ("base",))
    ran = cli("init", *options(goal))
    assert ran.code == 0
    assert "next: weightsmith plan recipe.yml, then weightsmith merge recipe.yml OUT" in ran.out
    text = (work / "recipe.yml").read_text()
    assert text.count("#") >= 2
    planned = cli("plan", "recipe.yml", "--json")
    assert (planned.code, planned.err) == (0, "")
    models = {model["ref"] for model in json.loads(planned.out)["models"]}
    assert models == ({"a", "base"} if goal == "add" else {"a", "b", "base"} if goal == "combine" else {"a", "b"})


def test_an_adapter_and_experts_are_written_as_such(cli: Cli, work: Path) -> None:
    assert cli("init", "-", *options("bake")).out.count("model: base+a") == 1
    ran = cli("init", "moe.yml", *options("experts"))
    assert "weightsmith moe moe.yml OUT" in ran.out
    assert (work / "moe.yml").read_text().count("source_model") == 2
    from weightsmith._planning.recipe import load

    assert load(work / "moe.yml", "moe").problems == ()


def test_a_model_is_quoted_where_yaml_needs_it(cli: Cli, work: Path) -> None:
    text = cli("init", "-", "--goal=average", "--model=a: b", "--model=123", "--model=./x+y").out
    assert '- model: "a: b"\n' in text
    assert '- model: "123"\n' in text
    assert "- model: ./x+y\n" in text


def test_a_file_that_exists_is_kept_unless_forced(cli: Cli, work: Path) -> None:
    before = (work / "linear.yml").read_text()
    ran = cli("init", "linear.yml", "--preset", "ties-paper")
    assert ran.code == 2
    assert "already exists" in ran.err
    assert (work / "linear.yml").read_text() == before
    assert cli("init", "linear.yml", "--preset", "ties-paper", "--force").code == 0
    assert "TIES as in its paper" in (work / "linear.yml").read_text()


@pytest.mark.slow
def test_the_presets_are_listed_and_written(cli: Cli, work: Path) -> None:
    listed = cli("init", "--list").out
    names = preset_names()
    assert len(names) == 21
    for name in (*names, *GOALS):
        assert f"\n{name} " in listed
    assert cli("init", "-", "--preset", "ties_paper").out == cli("init", "-", "--preset", "ties-paper").out
    assert "merge_method: ties" in cli("init", "-", "--preset", "ties-paper").out
    ran = cli("init", "-", "--preset", "ties-papr")
    assert ran.code == 2
    assert "did you mean 'ties-paper'?" in ran.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--goal=combin"], "did you mean 'combine'?"),
        (["--goal=combine", "--model=a"], "combine takes 2 or more --model and --base"),
        (["--goal=blend", "--model=a", "--model=b", "--model=c"], "blend takes 2 --model"),
        ([], "write one of combine"),
    ],
)
def test_what_is_missing_without_a_terminal_is_a_wrong_command_line(cli: Cli, work: Path, args: list[str], said: str) -> None:
    ran = cli("init", *args)
    assert ran.code == 2
    assert said in ran.err
    assert not (work / "recipe.yml").exists()


def test_an_adapter_may_be_named_with_its_base(cli: Cli, work: Path) -> None:
    apart = cli("init", "-", "--goal=bake", "--base=base", "--model=my lora.safetensors").out
    assert "base+my lora.safetensors" in apart
    assert cli("init", "-", "--goal=bake", "--model=base+my lora.safetensors").out == apart


@pytest.mark.long
def test_on_a_terminal_it_asks(work: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "weightsmith", "init"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), cwd=work)
    os.close(theirs)
    os.write(ours, b"combine\nbase\na\nb\n\n")
    text = b""
    try:
        while part := os.read(ours, 65536):
            text += part
    except OSError:  # the other end is closed
        pass
    assert process.wait(60) == 0, text
    os.close(ours)
    written = (work / "recipe.yml").read_text()
    assert "merge_method: task_arithmetic\nbase_model: base " in written
    assert written.count("- model:") == 2


def test_names_are_completed() -> None:
    assert method_names("dare") == ["dare_linear", "dare_ties"]
    assert preset_names("dare-t") == ["dare-ties", "dare-ties-stage1", "dare-ties-stage2"]
    assert goal_names("b") == ["blend", "bake"]


@pytest.mark.long
def test_the_shell_completes_the_names_of_methods() -> None:
    variables = {"_WEIGHTSMITH_COMPLETE": "complete_bash", "COMP_WORDS": "weightsmith methods bread", "COMP_CWORD": "2"}
    command = [sys.executable, "-c", "from weightsmith._app.cli import main; main()"]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True)
    assert done.stdout.split() == ["breadcrumbs", "breadcrumbs_ties"]


def test_the_presets_are_in_the_package() -> None:
    import weightsmith

    assert (Path(weightsmith.__file__).parent / "_app" / "cli" / "presets" / "ties-paper.yml").is_file()


def test_in_a_pipe_no_description_is_cut(cli: Cli) -> None:
    ran = cli("init", "--list")
    assert ran.code == 0
    assert "…" not in ran.out
