"""Help is quick, complete, and says the same as docs/cli.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import weightsmith
from tests.app.cli import snapshots
from tests.cli_help import Cli, cli, run_process
from weightsmith._app.cli.app import make_app
from weightsmith._app.cli.failures import MEANINGS, Exit
from weightsmith._app.cli.help import page_of
from weightsmith._base.options import GROUPS

__all__ = ["cli"]

PROGRAM: Any = get_command(make_app())
COMMANDS = tuple(PROGRAM.commands)
DOCS = Path(__file__).parents[3] / "docs" / "cli.md"
HEAVY = ("torch", "transformers", "numba", "numpy", "ml_dtypes", "huggingface_hub", "yaml", "xxhash", "rich", "pydantic")

_LOADED = f"""
import sys
from weightsmith._app.cli import main
try:
    main()
finally:
    print("LOADED", [m for m in {HEAVY} if m in sys.modules], file=sys.stderr)
"""


@pytest.mark.long
def test_help_imports_nothing_heavy() -> None:
    ran = run_process("--help", code=_LOADED)
    assert ran.code == 0
    assert ran.err.splitlines()[-1] == "LOADED []"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("args", [("merge", "--help"), ("--version",)])
def test_help_of_a_command_imports_nothing_heavy(args: tuple[str, ...]) -> None:
    ran = run_process(*args, code=_LOADED)
    assert ran.code == 0
    assert ran.err.splitlines()[-1] == "LOADED []"


@pytest.mark.process
@pytest.mark.slow
def test_what_counts_as_heavy_is_seen_when_it_is_loaded() -> None:
    ran = run_process("methods", code="import numpy\n" + _LOADED)
    assert "'numpy'" in ran.err.splitlines()[-1]


@pytest.mark.long
def test_the_module_runs_like_the_command_and_knows_its_version() -> None:
    ran = run_process("--version")
    assert (ran.code, ran.out) == (0, f"weightsmith {weightsmith.__version__}\n")


def test_the_help_names_every_command_and_every_exit_code(cli: Cli) -> None:
    ran = cli("--help")
    assert ran.code == 0
    commands = ran.out[ran.out.index("Make a model:") : ran.out.index("Options:")]
    assert tuple(re.findall(r"^  ([\w-]+) ", commands, re.M)) == COMMANDS
    assert all(len(line) <= 80 for line in ran.out.splitlines())
    for code, meaning in MEANINGS.items():
        assert re.search(rf"^ +{code:d} +{re.escape(meaning)}$", ran.out, re.M)
    assert set(MEANINGS) == set(Exit)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_its_options_are_in_the_docs(cli: Cli, command: str) -> None:
    ran = cli(command, "--help-all")
    assert ran.code == 0
    usage, description = ran.out.splitlines()[0], ran.out.splitlines()[2]
    assert usage.startswith(f"Usage: weightsmith {command} ")
    assert len(description) > 20
    docs = DOCS.read_text()
    section = docs[docs.index(f"## weightsmith {command}") :].split("\n## ")[0]
    for anchor in re.findall(r"\(#options-of-([\w-]+)\)", section):
        section += docs[docs.index(f"## Options of {anchor.replace('-', ' ')}") :].split("\n## ")[0]
    options = {name for option in _options(command) for name in (*option.opts, *option.secondary_opts)}
    assert {"--verbose"} <= options
    for option in options - {"-v", "--verbose"}:
        assert f"`{option}" in section, option
        assert re.search(rf"(^  |, ){option}\b", ran.out, re.M)


def _options(command: str) -> list[Any]:
    return [
        parameter
        for parameter in PROGRAM.commands[command].params
        if parameter.param_type_name == "option" and not parameter.hidden
    ]


def test_help_shows_what_most_people_need_and_help_all_the_rest(cli: Cli) -> None:
    brief, whole = (re.findall(r"^  (?:-\w, )?(--[\w-]+)", cli("merge", flag).out, re.M) for flag in ("--help", "--help-all"))
    assert "--help-all" in brief
    assert len(brief) <= 24
    hidden = {*whole} - {*brief}
    assert {*brief} - {*whole} == {"--help-all"}
    assert {"--out-dtype", "--quantize", "--overwrite"} <= {*brief}
    assert {"--bits", "--fsync", "--stream-cache"} <= hidden
    assert f"Show all options, {len(hidden)} more." in cli("merge", "--help").out
    assert "--help-all" not in cli("schema", "--help").out  # it has nothing more to show


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_one_sentence_under_a_heading_that_help_knows(command: str) -> None:
    for option in _options(command):
        assert option.rich_help_panel in (None, *GROUPS)
        words = option.help.partition(" [default: ")[0]
        assert re.fullmatch(r"([A-Z]|[a-z_ -]+ only: ).*[^.]\.", words), words
        assert not re.search(r"\. [A-Z]|if not given|may be given|\( ", words), words
        assert len(re.sub(r" \(.*\)\.$", "", words)) <= 80, words  # besides a list of choices


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_two_examples_that_its_parser_takes(command: str) -> None:
    examples = page_of(PROGRAM.commands[command], f"weightsmith {command}").examples
    assert len(examples) == 2
    for example in examples:
        assert len(example) <= 78
        program, name, *args = shlex.split(example.partition(" > ")[0])
        assert (program, name) == ("weightsmith", command)
        PROGRAM.commands[command].make_context(name, args)


def test_the_help_is_as_in_the_snapshots() -> None:
    assert snapshots.stale(snapshots.help_pages(), "help-*/*.txt") == [], "run python -m tests.app.cli.snapshots --write"


@pytest.mark.slow
def test_what_mistakes_are_told_is_as_in_the_snapshots() -> None:
    assert snapshots.stale(snapshots.mistakes(), "mistakes/*.txt") == [], "run python -m tests.app.cli.snapshots --write"


@pytest.mark.parametrize("name", snapshots.MISTAKES)
def test_a_mistake_is_one_error_that_says_the_next_step(name: str) -> None:
    said = (snapshots.FOLDER / f"mistakes/{name}.txt").read_text()
    assert said.count("error[") == 1
    assert re.search(r"\n  -> [A-Z].*\.\n", said) or "must be" in said or "did you mean" in said
    assert re.search(r"--- exit code [1235]\n$", said)
    assert not re.search(r"Traceback|more like it|/tmp/", said)


@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_of_help_is_wider_than_the_terminal(columns: int) -> None:
    pages = {name: text for name, text in snapshots.help_pages().items() if name.startswith(f"help-{columns}/")}
    assert len(pages) == len(COMMANDS) + 1
    assert [(name, line) for name, text in pages.items() for line in text.splitlines() if len(line) > columns] == []


@pytest.mark.long
def test_help_is_a_command_too(cli: Cli) -> None:
    assert cli("help", "merge").out == cli("merge", "--help-all").out
    assert cli("help").out == cli("--help").out
    ran = cli("help", "mrege")
    assert (ran.code, ran.out) == (2, "")
    assert "there is no command 'mrege' (did you mean 'merge'?)" in ran.err


@pytest.mark.long
def test_the_short_flags_for_version_and_traceback(cli: Cli, tmp_path: Path) -> None:
    assert cli("-V").out == cli("--version").out
    (tmp_path / "r.yml").write_text("merge_method: linear\n")
    for args in (["-v", "plan", tmp_path / "r.yml"], ["plan", tmp_path / "r.yml", "-v"]):
        assert "| Traceback" in cli(*args).err
    assert "| Traceback" not in cli("plan", tmp_path / "r.yml").err


def test_no_command_at_all_prints_the_help(cli: Cli) -> None:
    ran = cli()
    assert ran.code == 2
    assert "Start here:" in ran.err


@pytest.mark.long
def test_output_survives_a_terminal_that_knows_only_ascii() -> None:
    ran = run_process("methods", "ties", env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, fresh=True)
    assert ran.code == 0
    assert r"\u03b4" in ran.out  # the delta of the formula
