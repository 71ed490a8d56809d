"""What a run of the tests leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("of-{name}")
    (folder / "x").write_text("x")
    return folder

def test_{name}(made, tmp_path):
    (tmp_path / "y").write_text("y")
    assert {passes}
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_leaves_the_folders_of_failed_tests_alone(tmp_path: Path, workers: int) -> None:
    tests, kept = tmp_path / "tests", tmp_path / "left"
    tests.mkdir()
    kept.mkdir()
    for name, passes in (("good", True), ("bad", False)):
        (tests / f"test_{name}.py").write_text(TESTS.format(name=name, passes=passes))
    (tests / "pytest.ini").write_text("[pytest]\ntmp_path_retention_policy = failed\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "-p", "tests.folders", "-p", "no:cacheprovider"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {"TMPDIR": str(kept)}
    ran = subprocess.run(
        [*command, "-c", tests / "pytest.ini", tests], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert "1 failed, 1 passed" in ran.stdout
    assert {path.parent.name for path in kept.rglob("*") if path.is_file() and path.name in "xy"} == {"of-bad0", "test_bad0"}
