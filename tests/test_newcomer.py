"""The newcomer's transcript: its steps run, and the page shows what the script has. tests/test_release.py installs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.cli_help import environment
from tests.script_help import load

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[1]


def script() -> ModuleType:
    return load(ROOT / "scripts" / "newcomer.py")


def numbers_hidden(text: str) -> list[str]:
    """The lines without numbers, units of time and widths, which differ between runs."""
    return [" ".join(re.sub(r"[\d.,]+( [mµ]?s\b| [kMG]?B(/s)?)?", "N", line).split()) for line in text.splitlines()]


@pytest.mark.slow
def test_the_steps_run_and_print_what_the_page_shows(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "weightsmith"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m weightsmith "$@"\n')
    program.chmod(0o755)
    (tmp_path / "work").mkdir()
    env = environment(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}", LC_ALL="C.UTF-8", COLUMNS="100")
    sections = [script().section(step, ran) for step, ran in script().steps(tmp_path / "work", env)]
    shown = script().PAGE.read_text(encoding="utf-8").partition("## Try it")[2].partition("## Next")[0]
    assert numbers_hidden("## Try it" + shown) == numbers_hidden("\n\n".join(sections) + "\n\n")


def test_a_command_that_fails_ends_the_script(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="failed with status 2:\nls: cannot access"):
        script().run("ls nowhere", tmp_path, {"PATH": os.environ["PATH"], "LC_ALL": "C"})


def test_the_page_begins_with_the_installation_and_names_the_machine() -> None:
    text = script().PAGE.read_text(encoding="utf-8")
    assert "$ pip install './weightsmith-" in text.partition("## Try it")[0]
    assert "2 cores, no GPU" in text
    assert "/tmp/" not in text
