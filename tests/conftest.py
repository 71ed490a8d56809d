"""Settings of all tests."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import FunctionType
from typing import Any

# One thread of linear algebra in each worker, set before numpy is imported. With one for each core in each worker the threads
# wait for each other by spinning: 16 s of processor time instead of 1 in the tests of methods on whole matrices.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# torch makes this folder when it is imported, in /tmp if it is not told where.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / "build/torchinductor"))

os.environ.setdefault("WEIGHTSMITH_RUNS", "")  # how long tests take says nothing about a user's runs

# Test modules whose assertions pytest has rewritten are kept with their bytecode. Without, each worker rewrites all 500 in each
# run: 39 s of processor time instead of 21 to collect the tests.
sys.dont_write_bytecode = False

os.environ.pop("COLUMNS", None)  # xdist gives its workers 80; the tables of a pipe are as wide as they need to be

import numba.core.config  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402

from tests import folders  # noqa: E402
from tests.not_run import pytest_sessionfinish  # noqa: E402, F401
from weightsmith._base import torch_use  # noqa: E402

if "WEIGHTSMITH_TESTS_DEVICE" in os.environ:
    # Before the modules that import it by name: what a test computes on the CPU is computed on this device.
    torch_use.named_device = lambda device: os.environ["WEIGHTSMITH_TESTS_DEVICE"] if device == "cpu" else device

from weightsmith._kernels import compiler  # noqa: E402
from weightsmith._planning.planner import loading  # noqa: E402


def fsync(fd: int) -> None:
    """What is not synced is lost if the machine loses power, which no test sees. Each sync takes milliseconds."""
    os.fstat(fd)  # that of no file fails as ever


os.fsync = os.fdatasync = fsync

_njit = compiler.njit
_locks = tempfile.gettempdir()


def pytest_configure(config: pytest.Config) -> None:
    """The workers of xdist have folders beside each other, which pytest removes at the end."""
    global _locks
    if config.pluginmanager.get_plugin("weightsmith-folders") is None:
        config.pluginmanager.register(folders, "weightsmith-folders")
    if "PYTEST_XDIST_WORKER" in os.environ:
        _locks = str(Path(config.option.basetemp).parent)


SECOND_RING = {"long", "matrix", "process", "reader", "repository", "store"}
"""Marks of tests that `make test` leaves to `make test-all`; pyproject.toml says what each is."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give the tests of the second ring one mark, by which they are chosen.

    `matrix("a", "b-*")` is not for the cases whose ids are, or are like, one of these.
    """
    case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
    for mark in item.iter_markers():
        if mark.name in SECOND_RING and not any(fnmatchcase(case, pattern) for pattern in mark.args):
            item.add_marker("second")


REPETITIONS = os.environ.get("WEIGHTSMITH_REPETITIONS", "0/1")
"""Which cases that repeat behaviours the second ring runs: `2/3` is the last of three shares. The others become sweeps."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep only the first and last case of a slow test in the first ring, unless `matrix` names the cases."""
    cases: dict[str, list[pytest.Item]] = {}
    repetitions = list[pytest.Item]()
    for item in items:
        if item.get_closest_marker("matrix") is not None:
            repetitions += [item] if item.get_closest_marker("second") is not None else []
        elif item.get_closest_marker("slow") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for between in (listed[1:-1] for listed in cases.values()):
        for item in between:
            item.add_marker("second")
        repetitions += between
    share, shares = map(int, REPETITIONS.split("/"))
    for item in repetitions:
        if zlib.crc32(item.nodeid.encode()) % shares != share:
            item.add_marker("sweep")


def njit_once(function: FunctionType, called_by_kernel: bool, digest: str) -> Any:
    """A kernel that two workers need is compiled by one of them. The other waits, and finds it in the cache."""
    compiled = _njit(function, called_by_kernel, digest)
    if called_by_kernel or compiled is function or not (digest and compiler.cache_folder()):
        return compiled
    compile_ = compiled.compile

    def compile_once(*args: Any) -> Any:
        with Path(_locks, f"{function.__module__}.{function.__qualname__}.{digest}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return compile_(*args)

    compiled.compile = compile_once
    return compiled


if "PYTEST_XDIST_WORKER" in os.environ:
    compiler.njit = njit_once

# What tests keep is mostly the tests, torch and transformers: to look through all that for garbage, as Python does again and
# again while young objects become old ones, takes a tenth of the time and finds little.
gc.set_threshold(700, 10, 1000)

# The first call of a kernel compiles it, which takes seconds; a deadline would fail whichever test comes first. On a busy
# machine it takes seconds to make examples too: a time is not what a test is to find.
# As plain Python an example takes a hundred times as long. What goes wrong there (an index out of bounds) goes wrong in most.
# The same examples in every run, so that a change is not rejected for what it did not do; `--hypothesis-profile search` takes
# others each time.
settings.register_profile(
    "weightsmith",
    derandomize=True,
    deadline=None,
    max_examples=20 if numba.core.config.DISABLE_JIT else 100,
    suppress_health_check=[HealthCheck.too_slow],
)
# Hypothesis also draws constants from the modules imported so far, so examples would depend on which tests ran before. Each
# worker would also parse 600 modules for them. There is no setting to turn this off.
providers.is_local_module_file = lambda _path: False
settings.register_profile("search", settings.get_profile("weightsmith"), derandomize=False)
settings.load_profile("weightsmith")


@pytest.fixture(autouse=True)
def unasked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks transformers about a stack: a process for each takes seconds. Tests of that have the mark `loading`."""
    monkeypatch.setattr(loading, "key_of", lambda *_question: "")  # nor is kept what it says
    if request.node.get_closest_marker("loading") is None:
        monkeypatch.setattr(loading, "installed", lambda: False)


@pytest.fixture
def no_root() -> Iterator[None]:
    """What root may do besides what its files' permissions say, this thread may not."""
    libc = ctypes.CDLL(None)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3, this thread
    assert libc.capget(header, sets) == 0
    effective = sets[0]
    sets[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, sets) == 0
    yield
    sets[0] = effective
    assert libc.capset(header, sets) == 0
