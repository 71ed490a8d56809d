"""A numba that was not tested: kernels compute the same without its inside, and a warning says so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numba
import pytest

from tests.cli_help import LINEAR, make_models, run_process
from weightsmith._kernels import compiler

PLAIN = """
import sys, numba
{change}
from weightsmith._app.cli import main
sys.argv = ["weightsmith", "merge", "linear.yml", sys.argv[1], "--no-fsync"]
main()
"""
CHANGES = {
    "newer": "numba.__version__ = '0.99.1'",
    "missing": "sys.modules['weightsmith._kernels.internals'] = None",  # as if one of its imports had failed
    "other": "import numba.core.codegen; del numba.core.codegen.JITCodeLibrary",
}


def test_the_ceiling_is_that_of_the_project_and_what_is_installed_was_tested() -> None:
    file = Path(__file__).parents[2] / "pyproject.toml"
    (line,) = [each for each in tomllib.loads(file.read_text())["project"]["dependencies"] if each.startswith("numba")]
    ceiling = re.search(r"<(\d+)\.(\d+)$", line)
    assert ceiling is not None
    assert (int(ceiling[1]), int(ceiling[2]) - 1) == compiler.TESTED
    assert tuple(map(int, numba.__version__.split(".")[:2])) <= compiler.TESTED
    assert compiler.internals() is not None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", CHANGES)
def test_another_numba_makes_the_same_bytes_with_one_warning(how: str, tmp_path: Path) -> None:
    make_models(tmp_path)
    (tmp_path / "linear.yml").write_text(LINEAR)
    assert run_process("merge", "linear.yml", "ours", "--no-fsync", cwd=tmp_path).code == 0
    cache = tmp_path / "cache"
    env = {"NUMBA_CACHE_DIR": str(cache), "NUMBA_DISABLE_JIT": "0"}  # also where the tests run as plain Python
    for out in ("first", "second"):  # compiled, then from numba's own cache
        ran = run_process(out, code=PLAIN.format(change=CHANGES[how]), cwd=tmp_path, env=env)
        assert ran.code == 0, ran.err
        assert ran.err.count("kernels compile more slowly with numba") == 1
        made, wanted = (tmp_path / name / "model.safetensors" for name in (out, "ours"))
        assert made.read_bytes() == wanted.read_bytes()
    kept = [path.suffix for path in cache.rglob("*") if path.is_file()]
    assert {".nbi", ".nbc"} <= set(kept)
