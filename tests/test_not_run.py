"""The line that ends a run of the tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.not_run import PAGE, missing

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.mark.skipif(True, reason="needs vLLM: WEIGHTSMITH_VLLM")
@pytest.mark.parametrize("n", range(3))
def test_a(n): ...

def test_b():
    pytest.importorskip("no_such_package.part")

@pytest.mark.skipif(True, reason="not for vectors")
def test_c(): ...

def test_d(): ...
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_the_last_line_names_what_was_not_run(tmp_path: Path, workers: int) -> None:
    (tmp_path / "test_x.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "-p", "tests.not_run", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", tmp_path, tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout
    *_, before, last = ran.stdout.splitlines()
    assert "1 passed, 5 skipped" in before
    assert last == f"not run: 3 tests of vLLM, 1 of no_such_package. How to get them: {PAGE}"


@pytest.mark.slow
def test_a_run_that_lacks_nothing_ends_as_ever(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("def test_a(): ...")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "tests.not_run", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", tmp_path, tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.stdout.splitlines()[-1].startswith("1 passed")


def test_every_program_that_a_test_needs_is_explained() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("## Programs that tests need")[1].split("\n## ")[0]
    rows = {row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")}
    sources = "\n".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    named = missing(re.findall(r'(?:reason=|pytest\.skip\()"(needs [^"]+)"', sources))
    installed = {"moto", "ray", "torch and transformers", "torch, transformers and cmaes"}  # by the extra `test`
    assert named.keys() - installed == rows - {"program", "---", "a package of PyPI"}
