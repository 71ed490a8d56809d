"""Help is quick, complete, and says the same as docs/cli.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import weightsmith
from tests.cli_help import Cli, cli, run_process
from weightsmith._app.cli import exits, mergekit_flags
from weightsmith._app.cli.exits import Exit

__all__ = ["cli"]

COMMANDS = (
    "merge",
    "moe",
    "plan",
    "preview",
    "inspect",
    "diff",
    "eval",
    "studio",
    "quantize",
    "dequantize",
    "extract-lora",
    "transplant-tokenizer",
    "run",
    "verify",
    "init",
    "methods",
    "schema",
    "clean",
    "doctor",
)
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


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    ran = run_process("--help", code=_LOADED)
    assert ran.code == 0
    assert ran.err.splitlines()[-1] == "LOADED []"


@pytest.mark.slow
@pytest.mark.parametrize("args", [("merge", "--help"), ("--version",)])
def test_help_of_a_command_imports_no_more_than_typer_does(args: tuple[str, ...]) -> None:
    ran = run_process(*args, code=_LOADED)
    assert ran.code == 0
    # typer 0.29 reads options through pydantic; earlier ones do not.
    assert ran.err.splitlines()[-1] in ("LOADED []", "LOADED ['pydantic']")


@pytest.mark.slow
def test_what_counts_as_heavy_is_seen_when_it_is_loaded() -> None:
    ran = run_process("methods", code="import numpy\n" + _LOADED)
    assert "'numpy'" in ran.err.splitlines()[-1]


@pytest.mark.slow
def test_the_module_runs_like_the_command_and_knows_its_version() -> None:
    ran = run_process("--version")
    assert (ran.code, ran.out) == (0, f"weightsmith {weightsmith.__version__}\n")


def test_the_help_names_every_command_and_every_exit_code(cli: Cli) -> None:
    ran = cli("--help")
    assert ran.code == 0
    commands = ran.out[ran.out.index("Commands:") : ran.out.index("Exit codes:")]
    assert tuple(re.findall(r"^  ([\w-]+) ", commands, re.M)) == COMMANDS
    assert "..." not in commands  # each first sentence fits
    for code, meaning in exits.MEANINGS.items():
        assert re.search(rf"^ +{code:d} +{re.escape(meaning)}$", ran.out, re.M)
    assert set(exits.MEANINGS) == set(Exit)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_its_options_are_in_the_docs(cli: Cli, command: str) -> None:
    ran = cli(command, "--help")
    assert ran.code == 0
    usage, description = ran.out.splitlines()[0], ran.out.splitlines()[2]
    assert usage.startswith(f"Usage: weightsmith {command} ")
    assert len(description) > 20
    docs = DOCS.read_text()
    section = docs[docs.index(f"## weightsmith {command}") :].split("\n## ")[0]
    for option in re.findall(r"--[a-z][a-z-]+", ran.out[ran.out.index("Options:") :]):
        if option != "--help":
            assert f"`{option}" in section, option
        assert re.search(rf"{option}\b[\s,].*\S", ran.out)


def test_the_docs_hold_the_tables_that_the_program_works_by() -> None:
    docs = DOCS.read_text()
    assert exits.markdown() in docs
    assert mergekit_flags.markdown() in docs


def test_no_command_at_all_prints_the_help(cli: Cli) -> None:
    ran = cli()
    assert ran.code == 2
    assert "Commands:" in ran.out + ran.err


@pytest.mark.slow
def test_output_survives_a_terminal_that_knows_only_ascii() -> None:
    ran = run_process("methods", "ties", env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, fresh=True)
    assert ran.code == 0
    assert r"\u03b4" in ran.out  # the delta of the formula
