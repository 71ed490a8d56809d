"""What a terminal shows: no line longer than it is wide, at 60 and at 80 columns, and no name cut."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli_help import LINEAR, Cli, cli, environment, make_models
from tests.fork_help import Forked
from tests.sampling import sampled
from weightsmith._app.cli import WORKING, main
from weightsmith._app.cli.app import make_app
from weightsmith._base.text import end_status, note, say, status, status_line, table, wrapped

__all__ = ["cli"]

THREE_CAUSES = """merge_method: ties
base_model: ./nowhere
models:
  - model: a
    parameters: {weight: 0.5, densty: 0.5}    # a comment that makes this line longer than eighty columns, as comments do
  - model: b
    parameters: {weight: 0.5}
  - model: ./missing
    parameters: {weight: 0.5}
dtyp: bfloat16
"""
STACK = """merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 2]}]
  - sources: [{model: b, layer_range: [1, 2]}]
"""
TIES = "merge_method: ties\nbase_model: a\nmodels: [{model: b, parameters: {weight: 1}}, {model: c, parameters: {weight: 1}}]\n"
MOE = "base_model: a\nexperts: [{source_model: a}, {source_model: b}]\ngate_mode: random\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and the recipes of the captures."""
    folder = tmp_path_factory.mktemp("terminal")
    make_models(folder, ("a", "b", "c"))
    for model in "abc":
        words = {"model": {"type": "WordLevel", "vocab": {f"word{i}": i for i in range(8)}, "unk_token": "word0"}}
        (folder / model / "tokenizer.json").write_text(json.dumps(words))
    for name, text in (("linear", LINEAR), ("wrong", THREE_CAUSES), ("stack", STACK), ("ties", TIES), ("moe", MOE)):
        (folder / f"{name}.yml").write_text(text)
    return folder


def terminal(columns: int) -> tuple[int, int]:
    """Both ends of a terminal so wide, ours first."""
    ours, theirs = pty.openpty()
    widen(theirs, columns)
    return ours, theirs


def widen(theirs: int, columns: int) -> None:
    """Make a terminal so wide."""
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))


def terminal_environment() -> dict[str, str]:
    """The environment of a process on a terminal."""
    env = environment(TERM="xterm-256color", LC_ALL="C.UTF-8", HF_HUB_OFFLINE="1")
    env.pop("COLUMNS", None)
    return env


def read_until(ended: Callable[[], bool], ours: int) -> str:
    """What is shown on a terminal until a process has ended, with what it draws over."""
    data, end = b"", time.monotonic() + 120
    while time.monotonic() < end:
        ready, _, _ = select.select([ours], [], [], 0.2)
        try:
            part = os.read(ours, 65536) if ready else b""
        except OSError:
            break  # the process has ended
        data += part
        if not part and ended():
            break
    os.close(ours)
    return data.decode().replace("\r\n", "\n")


def captured(folder: Path, columns: int, *args: str, code: str) -> str:
    """What a new interpreter shows that runs `python -c code …` on a terminal so wide."""
    ours, theirs = terminal(columns)
    command, env = [sys.executable, "-c", code, *args], terminal_environment()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=folder)
    os.close(theirs)
    shown = read_until(lambda: process.poll() is not None, ours)
    process.wait(60)
    return shown


def lines_of(text: str) -> list[str]:
    """The lines as they were seen: each as it was last drawn, without colours and movements."""
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part) for line in text.split("\n") for part in line.split("\r")]


COMMANDS = {
    "merge": ["merge", "linear.yml", "OUT"],
    "error": ["merge", "wrong.yml", "OUT2"],
    "methods": ["methods"],
    "method": ["methods", "ties"],
    "plan": ["plan", "stack.yml", "--no-check-loading"],
    "explain": ["plan", "linear.yml", "--explain", "*norm*"],
    "distance": ["plan", "ties.yml", "--distance"],
    "presets": ["init", "--list"],
    "doctor": ["doctor"],
    "inspect": ["inspect", "a", "*", "--stats"],
    "diff": ["diff", "a", "b", "--tensors", "*"],
    "diff of three": ["diff", "b", "c", "--base", "a"],
    "preview": ["preview", "ties.yml"],
    "formats": ["quantize", "--list"],
    "quantize": ["quantize", "a", "OUT3", "--format", "fp8-dynamic"],
    "dequantize": ["dequantize", "a", "OUT4"],
    "extraction plan": ["extract-lora", "a", "b", "--plan"],
    "extraction": ["extract-lora", "a", "b", "OUT5"],
    "verify": ["verify", "OUT"],
    "status": ["status", "OUT"],
    "clean": ["clean"],
}


def screens(folder: Path, widths: Mapping[int, Mapping[str, list[str]]]) -> dict[tuple[int, str], str]:
    """What each of these commands shows at each width of the terminal, by width and name: run in one copy of this process."""
    ours, theirs = terminal(80)

    def work() -> None:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(theirs, number)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))
        for columns, commands in widths.items():
            widen(1, columns)
            for name, command in commands.items():
                print(f"<<{columns} {name}>>", flush=True)
                sys.argv = ["weightsmith", *command]
                with suppress(SystemExit):
                    main()
                sys.stdout.flush()

    process = Forked(work, env=terminal_environment(), cwd=folder)
    os.close(theirs)
    shown = read_until(process.ended, ours)
    assert process.wait().code == 0, shown
    parts = re.split(r"<<(\d+) ([\w -]+)>>\n", shown)[1:]
    return {(int(width), name): text for width, name, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, pytest.param(80, marks=pytest.mark.sweep)])
def test_no_line_is_longer_than_the_terminal(columns: int, folder: Path) -> None:
    commands = {n: [f"{a}-{columns}" if a.startswith("OUT") else a for a in arguments] for n, arguments in COMMANDS.items()}
    shown = {name: text for (_, name), text in screens(folder, {columns: commands}).items()}
    assert list(shown) == list(COMMANDS)
    wrong: dict[str, list[str]] = {}
    for name, text in shown.items():
        lines = [line for line in lines_of(text) if not re.match(r" +\d* \| ", line)]  # a recipe's line stays whole
        # Paths, links and names are never cut: a line with one may be longer if it has little else.
        wide = [line for line in lines if len(line) > columns and len(max(line.split(), key=len)) < columns - 24]
        if wide or ("error[" in text) != (name == "error"):
            wrong[name] = wide or lines
    assert wrong == {}
    lines = lines_of(shown["error"])
    assert sum("error[" in line for line in lines) == 3
    assert "\x1b[1;31m      |             ^^^^^^^^^\x1b[0m" in shown["error"]
    assert lines[-2] == "Nothing was written. (4 problems)"
    if columns > 60:
        assert "\x1b[1;31merror[not-found]:\x1b[0m wrong.yml:2:13: ./nowhere: no such folder or file" in shown["error"]
        assert "sce                     select by variance, weigh by it, erase minority signs" in lines_of(shown["methods"])
    assert f"OUT-{columns}: 6 tensors" in " ".join(shown["merge"].split())


@pytest.mark.parametrize("columns", [60, 80])
def test_tables_in_a_pipe_are_as_wide_as_columns_says(
    columns: int, folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(columns))
    ran = cli("extract-lora", "a", "b", f"piped-{columns}", "--overwrite")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()[:-2]  # the result, a sentence, is last
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("module ") for line in lines)
    assert any(line.startswith("self_attn.q_proj ") for line in lines)


def test_a_table_too_wide_is_cut_into_tables_with_the_first_column() -> None:
    head = ("module", "matrices", "kept", "best possible", "least kept, in")
    rows = [("mlp.down_proj", "30", "93.6%", "94.1%", "77.4%, model.layers.3.mlp.down_proj")]
    whole = table(head, rows, right={1, 2, 3})
    assert whole == table(head, rows, right={1, 2, 3}, width=max(map(len, whole)))
    assert table(head, rows, right={1, 2, 3}, width=50) == [
        "module         matrices   kept  best possible",
        "mlp.down_proj        30  93.6%          94.1%",
        "",
        "module         least kept, in",
        "mlp.down_proj  77.4%, model.layers.3.mlp.down_proj",
    ]
    assert table(head[:4], rows=[rows[0][:4]], right={1, 2, 3}, width=41) == [
        "module         matrices   kept       best",
        "                                 possible",
        "mlp.down_proj        30  93.6%      94.1%",
    ]


def test_a_word_that_fits_no_table_is_a_line_of_its_own() -> None:
    rows = [("model.layers.0.self_attn.q_proj.weight", "a long reason"), ("b", "")]
    assert table(("name", "why"), rows, width=30) == [
        "name  why",
        "model.layers.0.self_attn.q_proj.weight",
        "    a long reason",
        "b",
    ]


def test_a_table_is_wrapped_at_spaces_and_its_names_stay_whole() -> None:
    rows = [("model.layers.0.self_attn.q_proj.weight", "a reason of several words"), ("b", "short")]
    lines = table(("name", "why"), rows, width=52)
    assert lines == [
        "name                                    why",
        "model.layers.0.self_attn.q_proj.weight  a reason of",
        "                                        several",
        "                                        words",
        "b                                       short",
    ]
    assert table(("name", "why"), rows)[1].endswith("a reason of several words")


def test_a_pipe_has_no_width() -> None:
    assert wrapped("a " * 100, None) == "a " * 100
    assert wrapped("  -> one two three", 12) == "  -> one two\n      three"


# ---- the status line

WATCHED = """
import os, sys

heavy = {"numpy", "numba", "torch", "transformers", "tokenizers", "starlette", "uvicorn", "typer"}
seen = set()

def say(what):
    if what not in seen:
        seen.add(what)
        os.write(2, f"[{what}]".encode())

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in heavy:
            say(name)

def hook(event, args):
    if event == "open" and str(args[0]).endswith((".safetensors", ".yml", "plan.json")):
        say("file")
        os._exit(0)

sys.meta_path.insert(0, Finder())
sys.addaudithook(hook)
from weightsmith._app.cli import main
main()
"""
"""Runs a command, and marks on the terminal when it imports a large package. Ends when it opens a recipe or weights."""

STARTED: dict[str, list[str]] = {
    "merge": ["linear.yml", "OUT"],
    "moe": ["moe.yml", "OUT"],
    "plan": ["linear.yml"],
    "preview": ["linear.yml"],
    "inspect": ["a", "--stats"],
    "diff": ["a", "b"],
    "eval": ["a", "--text", "built-in"],
    "tune": ["linear.yml", "OUT.yml", "--text", "built-in"],
    "studio": ["nowhere"],
    "quantize": ["a", "OUT", "--format", "fp8-dynamic"],
    "dequantize": ["a", "OUT"],
    "extract-lora": ["a", "b", "OUT"],
    "convert-lora": ["a", "OUT"],
    "transplant-tokenizer": ["a", "b", "OUT"],
    "statistics": ["a", "built-in", "OUT"],
    "auto": ["a", "b", "c", "OUT"],
    "write": ["a", "OUT.jsonl"],
    "run": ["plan.json", "OUT"],
    "verify": ["a"],
    "status": ["out"],
    "clean": [],
    "doctor": [],
    "demo": ["out"],
}
"""Some of them end with an error, which comes after the first words too."""

SEEN = {"merge", "moe", "plan", "preview", "inspect", "diff", "quantize", "dequantize", "extract-lora", "run"}
"""They open a file of those that are marked."""


def test_every_command_says_what_it_does_or_is_done_at_once() -> None:
    known = {command.name or getattr(command.callback, "__name__", "") for command in make_app().registered_commands}
    assert {name.replace("_", "-") for name in known} - set(WORKING) == {"init", "methods", "schema", "help"}
    assert sorted(STARTED) == sorted(WORKING)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(WORKING, {"merge", "inspect", "extract-lora", "studio"}))
def test_something_is_said_before_anything_is_loaded_or_read(folder: Path, name: str) -> None:
    """By the order of events, as times mean nothing on a busy machine."""
    (folder / "plan.json").write_text("{}")
    (folder / "moe.yml").write_text("base_model: a\nexperts: [{source_model: a}, {source_model: b}]\ngate_mode: random\n")
    shown = captured(folder, 80, name, *(f"{name}-out" if arg == "OUT" else arg for arg in STARTED[name]), code=WATCHED)
    assert shown.startswith("\r\x1b[2Kstarting"), shown[:200]
    starting, line, *_ = shown.split("\r\x1b[2K")[1:]
    assert set(re.findall(r"\[(\w+)\]", starting)) <= {"typer", "numpy"}  # what it takes to read a command line
    assert line.startswith(("reading ", "loading ", "looking ", "checking ", "making ")), line[:200]
    assert ("[file]" in shown) or name not in SEEN


@pytest.mark.slow
def test_nothing_is_said_if_that_was_asked(folder: Path) -> None:
    names, flags = ("inspect", "plan", "verify"), ("--quiet", "--json")
    commands = {f"{name} {flag}": [name, STARTED[name][0], flag] for name in names for flag in flags}
    asked = screens(folder, {80: {"inspect": ["inspect", "a"]} | commands})
    assert "reading" in asked.pop((80, "inspect")).partition("error[")[0]
    assert len(asked) == len(commands)
    for shown in asked.values():
        assert "starting" not in shown
        assert "reading" not in shown.partition("error[")[0]


@pytest.mark.slow
def test_a_log_has_one_line_of_it(folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    ran = cli("merge", "linear.yml", "logged")
    assert ran.code == 0
    first, *others = ran.err.splitlines()
    assert first == "reading the recipe and the models' headers"
    assert not [line for line in others if line.startswith(("starting", "reading", "planning", "preparing"))]
    assert cli("plan", "linear.yml", "--json").err == ""


def test_a_line_of_output_takes_the_place_of_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    status("before a command: nothing")
    with status_line("reading headers of a long name\x1b", quiet=False):
        status("planning\nmore")
        say("done")
        note("a note")
        status("storing")
        end_status()
        status("after the bar took over: nothing")
    erase = "\r\x1b[2K"
    planning = r"planning\nmore"  # on one line
    assert screen.getvalue() == f"{erase}reading headers of {erase}{planning}{erase}done\na note\n{erase}storing{erase}"
