"""Scripts in a bounded process: what they get, and how their end is told."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from weightsmith._activations import bounded
from weightsmith._activations.bounded import BoundedScript

SCRIPT = """
import json, os, sys
DOING = "it"
def load():
    return json.load(sys.stdin)
def run(asked):
    exec(asked)
"""


@pytest.fixture
def code_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is the script's stdin: the code that it runs."""
    shutil.copy(bounded._RUNNER, tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setattr(bounded, "_RUNNER", tmp_path / bounded._RUNNER.name)
    return tmp_path / "given.json"


def ran(code_file: Path, code: str, **env: str) -> tuple[str, str]:
    """What it wrote, and why it ended."""
    code_file.write_text(json.dumps(code))
    with code_file.open("rb") as file, BoundedScript("script", "doing it", 64 << 20, 1, file, **env) as script:
        return script.out.read().decode(), script.failure()


def test_a_script_gets_no_secret_of_the_environment(code_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "hidden-value")
    out, why = ran(code_file, "print(json.dumps(dict(os.environ)))", MINE="yes")
    environment = json.loads(out)
    assert why == ""
    assert environment["MINE"] == "yes"
    assert environment["PATH"] == os.environ["PATH"]
    assert "hidden-value" not in environment.values()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ValueError('first\\nsecond')", "first"),
        ("while True: pass", "doing it takes more than 1 seconds"),
        ("x = bytearray(1 << 30)", "it takes more than 64 MiB of memory"),
        ("os._exit(3)", "its process ended with status 3"),
        ("sys.exit('too much')", "too much"),
    ],
)
def test_why_a_script_ended(code: str, said: str, code_file: Path) -> None:
    assert ran(code_file, code) == ("", said)
