"""The line that ends a run of the tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.not_run import PAGE, missing

pytestmark = pytest.mark.repository

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


@pytest.fixture(autouse=True)
def of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs are not parts of this one."""
    for variable in ("WEIGHTSMITH_REPETITIONS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(variable, raising=False)


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


@pytest.mark.parametrize("ring", ["not second and not sweep", "second and not sweep", ""])
def test_the_last_line_of_the_first_ring_names_the_second(tmp_path: Path, ring: str) -> None:
    (tmp_path / "test_x.py").write_text("def test_a(): ...")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "tests.not_run", "-p", "no:cacheprovider", "-m", ring]
    ran = subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", tmp_path, tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    said = ran.stdout.splitlines()[-1] == "not run: the second ring (make test-all)"
    assert said == ring.startswith("not second"), ran.stdout


def test_shares_of_repetitions_are_all_of_them_once(tmp_path: Path) -> None:
    """A slow test has its first case and its last in the first ring; `matrix` says which others."""
    (tmp_path / "test_x.py").write_text("""
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("n", range(9))
def test_a(n): ...

@pytest.mark.matrix("3", "4")
@pytest.mark.parametrize("n", range(9))
def test_b(n): ...

def test_c(): ...
""")

    def run(ring: str, share: str = "0/1") -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--collect-only", "-m", ring, "-p", "no:cacheprovider"]
        command += ["-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
        variables = {**os.environ, "WEIGHTSMITH_REPETITIONS": share}
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=variables)
        return [line.partition("::")[2] for line in ran.stdout.splitlines() if "::" in line]

    assert run("not second and not sweep") == ["test_a[0]", "test_a[8]", "test_b[3]", "test_b[4]", "test_c"]
    assert run("not second and not sweep", "1/3") == run("not second and not sweep")
    shares = [run("second and not sweep", f"{k}/3") for k in range(3)]
    assert all(0 < len(share) < 14 for share in shares)
    assert sorted(name for share in shares for name in share) == sorted(run("second and not sweep"))
    assert len(run("second and not sweep")) == 7 + 7


def test_the_rings_are_those_of_the_makefile() -> None:
    """Each mark of the second ring is explained, and both rings together are all tests but the sweeps."""
    from tests.conftest import SECOND_RING

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert {*SECOND_RING, "second"} < {mark.partition(":")[0] for mark in settings["markers"]}
    rules = re.findall(r"^(test\S*):.*\n\t.*-m '([^']*)'", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert dict(rules).items() >= {"test": "not second and not sweep", "test-second": "second and not sweep"}.items()


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
