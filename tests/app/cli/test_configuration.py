"""Settings of files and variables: which one counts, what is wrong with them, and what a stranger's file cannot do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import weightsmith
from tests.cli_help import Cli, cli, work
from weightsmith._app.cli.options import in_force, settings
from weightsmith._base.errors import ParameterError

__all__ = ["cli", "work"]


@pytest.fixture
def user_file(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own file, in a home of its own; the current folder has models and a recipe."""
    for setting in settings().values():
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.delenv("WEIGHTSMITH_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(work / "home"))
    file = work / "home/weightsmith/weightsmith.toml"
    file.parent.mkdir(parents=True)
    return file


def test_flag_variable_project_own_file_and_default_in_this_order(
    cli: Cli, user_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEIGHTSMITH_CONFIG", raising=False)

    def threads(*flags: str) -> int:
        count: int = json.loads(cli("plan", "linear.yml", "--json", *flags).out)["summary"]["threads"]
        return count

    default = threads()
    user_file.write_text("threads = 5\n")
    assert threads() == 5
    Path("weightsmith.toml").write_text("threads = 6\n")
    assert threads() == 6
    monkeypatch.setenv("WEIGHTSMITH_THREADS", "7")
    assert threads() == 7
    assert threads("--threads", "8") == 8
    monkeypatch.setenv("WEIGHTSMITH_CONFIG", "")
    monkeypatch.delenv("WEIGHTSMITH_THREADS")
    Path("weightsmith.toml").unlink()
    assert threads() == default


@pytest.mark.slow
def test_a_switch_that_a_file_turns_off_is_turned_on_by_its_flag(cli: Cli, user_file: Path) -> None:
    Path("weightsmith.toml").write_text("card = false\nquiet = true\nmax-memory = '1GB'\n")
    ran = cli("merge", "linear.yml", "out")
    assert (ran.code, ran.out) == (0, "")
    assert not Path("out/README.md").exists()
    assert cli("merge", "linear.yml", "again", "--card").code == 0
    assert Path("again/README.md").exists()


def test_python_reads_no_settings(user_file: Path) -> None:
    Path("weightsmith.toml").write_text("card = false\nnonsense = 1\n")
    assert (weightsmith.merge("linear.yml", "out", fsync=False).out / "README.md").exists()


def test_a_table_of_pyproject_counts_where_there_is_no_file_of_ours(user_file: Path) -> None:
    Path("pyproject.toml").write_text("[project]\nname = 'weightsmith-user'\n\n[tool.weightsmith]\nthreads = 3\n")
    assert (in_force()["threads"].value, in_force()["threads"].source) == (3, "pyproject.toml:5")
    Path("weightsmith.toml").write_text("quiet = true\n")
    assert [*in_force()] == ["quiet"]
    Path("weightsmith.toml").unlink()
    Path("pyproject.toml").write_text("not TOML = [")  # another program's business
    assert in_force() == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("threads = 2\nthreds = 1\n", "weightsmith.toml:2: unknown setting 'threds' (did you mean 'threads'?)"),
        ("\n\nthreads = 0\n", "weightsmith.toml:3: threads must be at least 1, not 0"),
        ("threads = 'four'\n", "weightsmith.toml:1: threads must be a whole number, not 'four'"),
        ("card = 'no'\n", "weightsmith.toml:1: must be true or false"),
        ("max-memory = '2XB'\n", "weightsmith.toml:1: max-memory must be a size such as 800MB, 5GB or 2GiB"),
        ("threads = \n", "weightsmith.toml:1: not valid TOML"),
        ("[tool.weightsmith]\nthreads = 1\n", "weightsmith.toml:1: unknown setting 'tool'"),
        ("overwrite = true\n", "weightsmith.toml:1: unknown setting 'overwrite'"),
        ("allow-code = true\n", "weightsmith.toml:1: unknown setting 'allow-code'"),
        ("push = 'org/name'\n", "weightsmith.toml:1: unknown setting 'push'"),
        ("hub-endpoint = 'https://elsewhere'\n", "weightsmith.toml:1: hub-endpoint decides where models come from"),
        ("quiet = true\nhub-cache = 'models'\n", "weightsmith.toml:2: hub-cache decides where models come from"),
    ],
)
def test_what_a_project_s_file_cannot_say_is_one_error_with_its_line(cli: Cli, user_file: Path, text: str, said: str) -> None:
    Path("weightsmith.toml").write_text(text)
    with pytest.raises(ParameterError) as caught:
        in_force()
    assert said.replace(": must be true", ": card must be true") in str(caught.value)
    ran = cli("merge", "linear.yml", "out")
    assert ran.code == 2
    assert ran.err.count("error[") == 1
    assert not Path("out").exists()
    assert "HF_ENDPOINT" not in os.environ


def test_a_wrong_variable_is_named(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSMITH_CARD", "maybe")
    with pytest.raises(ParameterError, match="WEIGHTSMITH_CARD: must be 1 or 0, not 'maybe'"):
        in_force()


def test_the_endpoint_of_one_s_own_file_is_followed_unless_the_variable_is_set(
    cli: Cli, user_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEIGHTSMITH_CONFIG", raising=False)
    user_file.write_text("hub-endpoint = 'https://mirror.example'\n")
    monkeypatch.setenv("HF_ENDPOINT", "https://variable.example")
    assert in_force()["hub-endpoint"].value == "https://variable.example"
    monkeypatch.delenv("HF_ENDPOINT")
    assert cli("methods", "ties").code == 0
    assert os.environ.pop("HF_ENDPOINT") == "https://mirror.example"


def test_a_file_that_is_named_and_missing_or_no_file_is_an_error(
    cli: Cli, user_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSMITH_CONFIG", "nowhere.toml")
    assert "nowhere.toml" in cli("methods").err
    monkeypatch.setenv("WEIGHTSMITH_CONFIG", "")
    os.mkfifo("weightsmith.toml")
    ran = cli("methods")
    assert ran.code == 2
    assert "weightsmith.toml" in ran.err


def test_settings_in_force_are_shown_with_their_source(cli: Cli, user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("weightsmith.toml").write_text("threads = 1\n")
    monkeypatch.setenv("WEIGHTSMITH_DEVICE", "cpu")
    assert json.loads(cli("doctor", "--json").out)["settings"] == {
        "threads": {"value": 1, "source": "weightsmith.toml:1"},
        "device": {"value": "cpu", "source": "variable WEIGHTSMITH_DEVICE"},
    }
    assert "threads = 1 (weightsmith.toml:1)" in cli("methods", "ties", "-v").err
