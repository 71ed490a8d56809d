"""A numba that was not tested: kernels compute the same without its inside, and a warning says so."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numba
import numba.core.codegen
import numpy as np
import pytest

from tests.cli_help import run_process
from weightsmith import _kernels
from weightsmith._base.tensors import DTYPES
from weightsmith._kernels import compiler
from weightsmith._kernels.codecs import BLOCK
from weightsmith._kernels.combine import combine

CODE = DTYPES["BF16"].code
COMBINE = f"""
import sys, numba, numpy as np
numba.__version__ = "0.99.1"
from weightsmith._kernels.combine import combine

raw, out = np.frombuffer(bytes.fromhex(sys.argv[1]), np.uint8).copy().reshape(2, -1), np.zeros(200, np.uint8)
codes, rows, sums = np.full(2, {CODE}), np.empty((1, {BLOCK}), np.float32), np.empty((1, {BLOCK}))
combine(raw, codes, np.array([0.3, 0.7]), 100, out, {CODE}, rows, sums)
kept = combine.variant({{"in": [{CODE}], "out": [{CODE}]}}).stats
print(out.tobytes().hex(), len(kept.cache_hits), len(kept.cache_misses))
"""


def newer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(numba, "__version__", "0.99.1")


def missing(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(_kernels, "internals")
    patch.setitem(sys.modules, "weightsmith._kernels.internals", None)  # as if one of its imports had failed


def other(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(_kernels, "internals")
    patch.delitem(sys.modules, "weightsmith._kernels.internals")
    patch.delattr(numba.core.codegen, "JITCodeLibrary")


def test_the_ceiling_is_that_of_the_project_and_what_is_installed_was_tested() -> None:
    file = Path(__file__).parents[2] / "pyproject.toml"
    (line,) = [
        requirement
        for requirement in tomllib.loads(file.read_text())["project"]["dependencies"]
        if requirement.startswith("numba")
    ]
    ceiling = re.search(r"<(\d+)\.(\d+)$", line)
    assert ceiling is not None
    assert (int(ceiling[1]), int(ceiling[2]) - 1) == compiler.TESTED
    assert tuple(map(int, numba.__version__.split(".")[:2])) <= compiler.TESTED
    assert compiler.internals() is not None


@pytest.mark.parametrize("change", [newer, missing, other])
def test_another_numba_is_one_warning(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compiler.internals() is not None
    with monkeypatch.context() as patch:
        change(patch)
        assert compiler.internals.__wrapped__() is None
    assert capsys.readouterr().err.count("kernels compile more slowly with numba") == 1


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_another_numba_makes_the_same_bytes_and_keeps_its_kernels(tmp_path: Path) -> None:
    raw = np.random.default_rng(0).normal(size=(2, 100)).astype(ml_dtypes.bfloat16).view(np.uint8)
    out = np.zeros(200, np.uint8)
    rows, sums = np.empty((1, BLOCK), np.float32), np.empty((1, BLOCK))
    combine(raw, np.full(2, CODE), np.array([0.3, 0.7]), 100, out, CODE, rows, sums)
    env = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_DISABLE_JIT": "0"}  # also where the tests run as plain Python
    for hits, misses in ((0, 1), (1, 0)):  # compiled, then from numba's own cache
        ran = run_process(raw.tobytes().hex(), code=COMBINE, cwd=tmp_path, env=env)
        assert ran.err.count("kernels compile more slowly with numba") == 1, ran.err
        assert ran.out.split() == [out.tobytes().hex(), str(hits), str(misses)]
