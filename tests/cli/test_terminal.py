"""What a terminal shows: no line longer than it is wide, at 80 and at 120 columns, and no name cut."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.cli_help import LINEAR, environment, make_models
from weightsmith.text import table, wrapped

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and the recipes of the captures."""
    folder = tmp_path_factory.mktemp("terminal")
    make_models(folder)
    for name, text in (("linear", LINEAR), ("wrong", THREE_CAUSES), ("stack", STACK)):
        (folder / f"{name}.yml").write_text(text)
    return folder


def captured(folder: Path, columns: int, *args: str) -> str:
    """What a command shows on a terminal so wide; what it draws over is left out."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = environment(TERM="xterm-256color", LC_ALL="C.UTF-8", HF_HUB_OFFLINE="1")
    env.pop("COLUMNS", None)
    command = [sys.executable, "-m", "weightsmith", *args]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=folder)
    os.close(theirs)
    data, end = b"", time.monotonic() + 120
    while time.monotonic() < end:
        ready, _, _ = select.select([ours], [], [], 0.2)
        try:
            part = os.read(ours, 65536) if ready else b""
        except OSError:
            break  # the process has ended
        data += part
        if not part and process.poll() is not None:
            break
    process.wait(10)
    os.close(ours)
    return data.decode().replace("\r\n", "\n")


def lines_of(text: str) -> list[str]:
    """The lines as they were seen: each as it was last drawn, without colours and movements."""
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part) for line in text.split("\n") for part in line.split("\r")]


COMMANDS = {
    "merge": ["merge", "linear.yml", "OUT"],
    "error": ["merge", "wrong.yml", "OUT"],
    "methods": ["methods"],
    "method": ["methods", "ties"],
    "plan": ["plan", "stack.yml", "--no-check-loading"],
    "explain": ["plan", "linear.yml", "--explain", "*norm*"],
    "presets": ["init", "--list"],
    "doctor": ["doctor"],
}


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_longer_than_the_terminal(folder: Path, name: str, columns: int) -> None:
    shown = captured(folder, columns, *(f"out{columns}" if arg == "OUT" else arg for arg in COMMANDS[name]))
    lines = lines_of(shown)
    words = {word for line in lines for word in line.split()}
    assert [line for line in lines if len(line) > max(columns, *map(len, words))] == []
    if name not in ("doctor", "method"):  # paths and links are never cut
        assert max(map(len, lines)) <= columns
    if name == "error":
        assert "\x1b[1;31merror[not-found]:\x1b[0m wrong.yml:2:13: ./nowhere: no such folder or file; and 1" in shown
        assert sum("error[" in line for line in lines) == 3
        assert "\x1b[1;31m      |             ^^^^^^^^^\x1b[0m" in shown
        assert lines[-2] == "Nothing was written. (4 problems)"
    if name == "merge":
        assert f"out{columns}: 6 tensors" in shown
    if name == "methods":
        assert "sce                  select by variance, calculate shares, erase minority signs" in lines


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
    assert max(map(len, table(("name", "why"), rows, width=10))) == len("model.layers.0.self_attn.q_proj.weight  several")
    assert table(("name", "why"), rows)[1].endswith("a reason of several words")


def test_a_pipe_has_no_width() -> None:
    assert wrapped("a " * 100, None) == "a " * 100
    assert wrapped("  -> one two three", 12) == "  -> one two\n      three"
