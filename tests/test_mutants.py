"""The script that changes tokens of the program knows today's modules and tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import mutants

pytestmark = pytest.mark.repository

SOURCES = mutants.ROOT / mutants.PACKAGE
MODULES = sorted(path.relative_to(mutants.ROOT) for path in SOURCES.rglob("*.py") if path.stat().st_size)


def test_the_modules_and_tests_of_the_table_exist() -> None:
    missing = [module for module in mutants.BESIDE if not (SOURCES / module).exists()]
    missing += [test for tests in mutants.BESIDE.values() for test in tests if not (mutants.ROOT / "tests" / test).exists()]
    assert missing == []


@pytest.mark.slow
def test_every_module_has_tests_that_a_mutant_has_to_survive() -> None:
    assert [str(module) for module in MODULES if not any(mutants.tests_of(module))] == []


def test_mutants_of_kernels_run_as_plain_python_first_and_are_kept_apart() -> None:
    for module, kernels in (
        ("_kernels/select.py", ["plain", "apart"]),
        ("_kernels/jit.py", ["plain", "compiled"]),
        ("_base/tensors.py", ["apart"]),
        ("_engine/runner.py", ["kept"]),
    ):
        assert [stage.kernels for stage in mutants.stages(mutants.PACKAGE / module, True)] == kernels


def test_the_lines_of_equivalent_mutants_are_in_the_sources() -> None:
    stale = []
    for said in mutants.EQUIVALENT:
        file, _, change = said.partition(": ")
        path = Path(mutants.ROOT, file)
        if not path.exists() or change.partition(" -> ")[0] not in path.read_text():
            stale.append(said)
    assert stale == []
