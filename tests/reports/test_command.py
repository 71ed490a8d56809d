"""A command of the user's: where its number is found, and how it may fail."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from weightsmith._base.errors import NonFinite, ParameterError
from weightsmith._reports.command import Command, CommandFailed
from weightsmith._reports.options import EvaluateSettings

JSON = "import json; print(json.dumps({'results': {'mine': {'acc,none': 0.25, 'name': 'x'}}, 'n': [3, 4]}, indent=INDENT))"
WRITES = """import json, sys
for name, value in VALUES:
    with open(sys.argv[2] + '/' + name, 'w') as file:
        json.dump(value, file)
"""


def command(code: str, arguments: str = "{model}", **settings: Any) -> Command:
    """A command that runs some Python."""
    text = f"{shlex.quote(sys.executable)} -I -S -c {shlex.quote(code)} {arguments}"
    parsed = Command.asked(EvaluateSettings(command=text, **settings))
    assert parsed is not None
    return parsed


FOUND: dict[str, tuple[Command, float]] = {
    "the last line": (command("print('words'); print(' 2.5 '); print()"), 2.5),
    "JSON in the last line": (command("print('{'); " + JSON.replace("INDENT", "None"), metric="results/mine/acc,none"), 0.25),
    "JSON of several lines": (command("print('words'); " + JSON.replace("INDENT", "1"), metric="results/mine/acc,none"), 0.25),
    "a place in a list, with the other sign": (command(JSON.replace("INDENT", "None"), metric="-n/1"), -4),
    "a file": (command(WRITES.replace("VALUES", "[('a.json', {'x': 7}), ('b.json', {})]"), "{model} {output}", metric="x"), 7),
    "the folder, absolute": (command("import sys, os; print(int(os.path.isabs(sys.argv[1])))"), 1),
    "a shell": (Command("command", "echo 3 {model} | cut -c 1", "", 60, True), 3),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_number_is_found(name: str) -> None:
    asked, expected = FOUND[name]
    assert asked.measured(Path("a folder")) == expected


FAILURES: dict[str, tuple[Command, str, str]] = {
    "it fails": (command("import sys; sys.exit('no such task')"), "the command ended with status 1", "no such task"),
    "it prints no number": (command("print('done')"), "the last line of the command is no number", "done"),
    "it prints nothing": (command("pass"), "the command printed nothing", "--metric"),
    "another key": (
        command(JSON.replace("INDENT", "1"), metric="results/acc"),
        "no number results/acc",
        "results/mine/acc,none",
    ),
    "a text": (command(JSON.replace("INDENT", "1"), metric="results/mine/name"), "no number results/mine/name", "there are"),
    "no JSON": (command("print('done')", metric="x"), "there is no number x", "done"),
    "no file": (command("print('done')", "{model} {output}", metric="x"), "the command wrote no .json file", "done"),
    "files that differ": (
        command(WRITES.replace("VALUES", "[('a.json', {'x': 7}), ('b.json', {'x': 8})]"), "{model} {output}", metric="x"),
        "2 files have different values of x",
        "one file",
    ),
    "a file that is no JSON": (
        command("import sys; open(sys.argv[2] + '/a.json', 'w').write('{')", "{model} {output}", metric="x"),
        "a.json, which the command wrote",
        "Check the command",
    ),
    "no program": (Command("command", "no-such-program {model}", "", 60, False), "no-such-program cannot be run", "Check"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_shows_what_the_command_said(name: str) -> None:
    asked, message, detail = FAILURES[name]
    with pytest.raises(CommandFailed) as error:
        asked.measured(Path("model"))
    assert message in str(error.value)
    assert detail in str(error.value)


@pytest.mark.long
def test_a_command_that_takes_too_long_ends_with_what_it_started(tmp_path: Path) -> None:
    text = "sleep 1000 & echo $! > pid; echo begun; wait; : {model}"
    with pytest.raises(CommandFailed, match="took longer than 3 s") as error:
        Command("command", f"cd {shlex.quote(str(tmp_path))}; {text}", "", 3, True).measured(tmp_path)
    assert "begun" in str(error.value)
    assert "--command-timeout" in str(error.value)
    state = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    for _ in range(100):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("what the command started still runs")


def test_no_shell_runs_what_does_not_ask_for_one(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    number = command("import sys; print(len(sys.argv))", f"{{model}} ; touch {mark}").measured(tmp_path)
    assert number == 5
    assert not mark.exists()


def test_the_folder_is_one_word_for_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "a 'b'; false"
    folder.mkdir()
    assert Command("command", "ls -d {model} >/dev/null && echo 1", "", 60, True).measured(folder) == 1


def test_a_number_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(NonFinite, match="nan"):
        command("print('nan')").measured(Path("model"))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no place for the model": ({"command": "true"}, "the command does not name the model"),
    "quotes that do not end": ({"command": "true '{model}"}, "the command cannot be read"),
    "a file without a key": ({"command": "true {model} {output}"}, "where in them the number is"),
    "a time that is none": ({"command": "true {model}", "command_timeout": "soon"}, "must be a time"),
    "a key alone": ({"metric": "x"}, "it is for a command"),
    "a shell alone": ({"shell": True}, "it is for a command"),
}


@pytest.mark.parametrize("name", WRONG)
def test_options_that_do_not_fit(name: str) -> None:
    settings, message = WRONG[name]
    with pytest.raises(ParameterError, match=message):
        Command.asked(EvaluateSettings(**settings))


@pytest.mark.parametrize("shell", [False, True])
def test_a_folder_whose_name_looks_like_a_place_stays(tmp_path: Path, shell: bool) -> None:
    (tmp_path / "{output}").mkdir()
    code = "import sys, os; print(int(os.path.isdir(sys.argv[1]) and os.path.basename(sys.argv[1]) == '{' + 'output}'))"
    assert command(code, shell=shell).measured(tmp_path / "{output}") == 1
