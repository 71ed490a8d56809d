"""What is compiled again after a change: the kernel that was changed and its callers, and nothing else."""

from __future__ import annotations

import importlib
import math
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numba.core.config
import numpy as np
import pytest

import weightsmith
from weightsmith._kernels import compiler, internals, jit
from weightsmith._kernels.jit import Kernel, Switch, kernel

compiled = pytest.mark.skipif(bool(numba.core.config.DISABLE_JIT), reason="numba does not compile")

SOURCE = '''
from typing import NamedTuple
import math
import numpy as np
from weightsmith._kernels.jit import Switch, kernel

ADDED = 1
TABLE = np.array([0.5, 0.25])
STEPS = (2.0, 3.0)
LARGE = Switch("size", {3, 4})

class Pair(NamedTuple):
    first: float
    second: float

@kernel
def inner(x):
    """Add."""
    return x + ADDED

@kernel
def middle(x):
    return inner(x) * STEPS[1]

@kernel(size="size")
def outer(x, size):
    if LARGE:
        return math.sqrt(middle(x))
    return middle(x)  # at the end

@kernel
def alone(x):
    return x + TABLE[1] if x in (1.0, 5.0) else x

@kernel
def difference(pair):
    return pair.first - pair.second
'''
NAMES = "inner", "middle", "outer", "alone", "difference"


def module_of(source: str) -> ModuleType:
    """The module `cached`, as another process has it."""
    module = ModuleType("cached")
    exec(compile(source, "cached.py", "exec"), module.__dict__)
    return module


def digests(source: str, size: int = 1) -> dict[str, str]:
    """Of each kernel."""
    module = module_of(source)
    return {name: getattr(module, name).digest({"size": [size]}) for name in NAMES}


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("return x + ADDED", "return ADDED + x", {"inner", "middle", "outer"}),
        ("return inner(x) *", "return inner(x) /", {"middle", "outer"}),
        ("ADDED = 1\n", "ADDED = 2\n", {"inner", "middle", "outer"}),
        ("ADDED = 1\n", "ADDED = 1.0\n", {"inner", "middle", "outer"}),
        ("ADDED = 1\n", "ADDED = np.int64(1)\n", {"inner", "middle", "outer"}),
        ("(2.0, 3.0)", "(2.0, 3.5)", {"middle", "outer"}),
        ("{3, 4}", "{1, 4}", {"outer"}),
        ("math.sqrt", "math.cbrt", {"outer"}),
        ("0.25]", "0.125]", {"alone"}),
        ("0.25]", "0.25], np.float32", {"alone"}),
        ("(1.0, 5.0)", "(1.0, 6.0)", {"alone"}),
        ("{1.0, 5.0}", "{1.0, 6.0}", {"alone"}),
        ("@kernel\ndef inner", "@kernel\n\n# A comment.\ndef inner", set()),
        ("# at the end", "", set()),
        ('"""Add."""', '"""Sum."""', set()),
        ("LARGE = ", "UNUSED = 1\nLARGE = ", set()),
    ],
)
def test_what_a_change_changes(old: str, new: str, changed: set[str]) -> None:
    source = SOURCE.replace("(1.0, 5.0)", "{1.0, 5.0}") if old[0] == "{" and "." in old else SOURCE
    assert old in source
    before, after = digests(source), digests(source.replace(old, new))
    assert {name for name in NAMES if before[name] != after[name]} == changed


def test_a_variant_has_the_digest_of_its_branches() -> None:
    one, two, large = digests(SOURCE, 1), digests(SOURCE, 2), digests(SOURCE, 3)
    assert one == two
    assert {name for name in NAMES if one[name] != large[name]} == {"outer"}


@pytest.mark.long
def test_a_digest_is_the_same_in_every_process() -> None:
    source = SOURCE.replace("x in (1.0, 5.0)", 'str(x) in {"one", "two", "three"}')
    code = f"from tests.kernels.test_identity import digests\nprint(digests({source!r}))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for seed in "12":
        ran = subprocess.run([sys.executable, "-c", code], env=env | {"PYTHONHASHSEED": seed}, capture_output=True, text=True)
        assert ran.stdout == f"{digests(source)}\n", ran.stderr


def package_kernels() -> Iterator[Kernel]:
    """All of the package."""
    for module in pkgutil.walk_packages(weightsmith.__path__, "weightsmith."):
        if "._kernels." in module.name or "._methods." in module.name:
            yield from (one for one in vars(importlib.import_module(module.name)).values() if isinstance(one, Kernel))


def test_every_kernel_has_a_digest_of_its_own() -> None:
    kernels = {id(one): one for one in package_kernels()}.values()
    assert len(kernels) > 150
    assert len({one.digest({}) for one in kernels} - {""}) == len(kernels)


def plain(x: float) -> float:
    return x


njitted = numba.njit(plain)
UNSURE: Any = object()


@kernel
def calls_njitted(x: float) -> float:
    return njitted(x) + math.pi


@kernel
def names_a_module(x: float) -> Any:
    return os.fspath  # another module may be another one tomorrow


@kernel
def names_an_object(x: float) -> Any:
    return UNSURE


@kernel
def calls_one_that_does(x: float) -> Any:
    return names_an_object(x)


def test_what_cannot_be_told_apart_has_no_digest() -> None:
    assert [one.digest({}) for one in (names_a_module, names_an_object, calls_one_that_does)] == ["", "", ""]


@compiled
def test_a_function_that_numba_compiles_by_itself_is_told_by_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    before = calls_njitted.digest({})
    monkeypatch.setattr(sys.modules[__name__], "njitted", numba.njit(lambda x: x + 1))
    assert before != calls_njitted.digest({}) != ""
    monkeypatch.setattr(sys.modules[__name__], "njitted", plain)
    assert calls_njitted.digest({}) == ""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where kernels are kept."""
    monkeypatch.setattr(compiler, "cache_folder", lambda: str(tmp_path))
    return tmp_path


def files(folder: Path) -> dict[str, int]:
    """By the name of the file's kernel, its variant and signature, what tells it from one that was written later."""
    return {path.name.removeprefix("cached."): path.stat().st_ino for path in folder.iterdir()}


@pytest.mark.long
@compiled
def test_a_kernel_without_a_digest_is_not_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @kernel
    def unsure(x: float) -> float:
        return x + 1 if UNSURE is None else x

    monkeypatch.setattr(sys.modules[__name__], "UNSURE", None)
    monkeypatch.setattr(Kernel, "digest", lambda *_: "")
    assert unsure(1.0) == 2
    assert not files(kept)


@pytest.mark.long
@compiled
@pytest.mark.parametrize(
    ("old", "new", "again", "results"),
    [
        ("return x + ADDED", "return x - ADDED", {"middle", "outer"}, (24.0, 9.0, 5.25, -4.0)),
        ("second: float\n", "second: float\n    # said again\n", set(), (30.0, 15.0, 5.25, -4.0)),
        (
            "    first: float\n    second: float\n",
            "    second: float\n    first: float\n",
            {"difference"},
            (30, 15, 5.25, 4),
        ),
    ],
)
def test_a_change_compiles_again_what_it_changed_alone(
    old: str, new: str, again: set[str], results: tuple[float, ...], kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(source: str) -> tuple[float, ...]:
        module = module_of(source)
        monkeypatch.setitem(sys.modules, "cached", module)
        pair = module.Pair(1.0, 5.0)
        return module.middle(9.0), module.outer(4.0, 1), module.alone(5.0), module.difference(pair)

    assert run(SOURCE) == (30.0, 15.0, 5.25, -4.0)
    first = files(kept)
    assert len(first) == 4
    assert run(SOURCE.replace(old, new)) == results
    assert {name.split("_")[0] for name, _ in files(kept).items() - first.items()} == again


@pytest.mark.slow
@compiled
def test_a_kernel_that_names_a_class_that_has_moved_is_compiled_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_args: object) -> None:
        raise ModuleNotFoundError("No module named 'moved'")

    for _ in range(2):
        module = module_of(SOURCE)
        monkeypatch.setitem(sys.modules, "cached", module)
        assert module.alone(5.0) == 5.25
        monkeypatch.setattr(internals.compiler.CompileResult, "_rebuild", gone)


def test_the_settings_of_numba_are_a_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {jit.compiler_digest.__wrapped__()}
    for name, value in (("OPT", 1), ("BOUNDSCHECK", True), ("SLP_VECTORIZE", 1)):
        monkeypatch.setattr(numba.core.config, name, value)
        seen.add(jit.compiler_digest.__wrapped__())
    monkeypatch.setattr(numba, "__version__", "0.1")
    assert len(seen | {jit.compiler_digest.__wrapped__()}) == 5


def test_what_replaces_steps_of_numba_is_a_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    before = internals.steps_digest.__wrapped__()
    assert internals.steps_digest.__wrapped__() == before
    monkeypatch.setattr(internals.CompilerForCallers, "define_pipelines", lambda self: [])
    assert internals.steps_digest.__wrapped__() != before


DIGITS = "0123456789abcdef" * 2


def test_kernels_are_removed_a_month_after_their_last_use(tmp_path: Path) -> None:
    old = [f"weightsmith._kernels.rows.sums_01.{DIGITS}{end}" for end in ("", ".nbc", f".nbc.{DIGITS}")]
    others = ["notes.nbc", f"{DIGITS}.nbc", f"kernel.{DIGITS[1:]}.nbc", f"kernel.{DIGITS}.txt", f"linked.{DIGITS}.nbc"]
    recent = [f"weightsmith.other.<locals>.{DIGITS}.nbc", f"numbas.{DIGITS}"]
    for name in (*others[:-1], *old[1:], recent[0]):
        (tmp_path / name).touch()
    for name in (old[0], recent[1]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.nbi").touch()
    (tmp_path / others[-1]).symlink_to(tmp_path / "notes.nbc")
    for name in (*old, *others, *recent):
        days = 29 if name in recent else 31
        os.utime(tmp_path / name, (time.time() - days * 86_400,) * 2, follow_symlinks=False)
    compiler.remove_unused.__wrapped__(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {*others, *recent}
    compiler.remove_unused.__wrapped__(str(tmp_path / "missing"))


@compiled
def test_a_kernel_that_is_loaded_was_used_and_one_that_is_kept_removes_others(kept: Path) -> None:
    def again() -> Callable[[float], float]:
        @kernel
        def one_more(x: float) -> float:
            return x + 1

        return one_more

    forgotten = kept / f"forgotten.{DIGITS}.nbc"
    forgotten.touch()
    os.utime(forgotten, (0, 0))
    compiler.remove_unused.cache_clear()
    again()(1.0)
    (file,) = kept.iterdir()
    forgotten.touch()
    os.utime(file, (0, 0))
    os.utime(forgotten, (0, 0))
    again()(1.0)
    assert file.stat().st_mtime > time.time() - 100
    assert forgotten.exists()  # nothing was compiled


TOGETHER = """
import sys, time
from weightsmith._kernels.jit import kernel

@kernel
def one_more(x):
    return x + 1

while time.time() < float(sys.argv[1]):
    pass
print(one_more(1), one_more(1.5))
"""


@pytest.mark.process
@pytest.mark.slow
@compiled
def test_processes_that_compile_a_kernel_at_once_keep_one_that_all_can_load(tmp_path: Path) -> None:
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TOGETHER]
    started = [subprocess.Popen([*command, str(time.time() + 2)], env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [one.communicate()[0] for one in started] == ["2 2.5\n"] * 3
    assert len([*(tmp_path / "kernels").iterdir()]) == 2
    again = subprocess.run([*command, "0"], env=env, capture_output=True, text=True, check=True)
    assert again.stdout == "2 2.5\n"


def test_a_switch_is_no_value_of_its_own() -> None:
    """`Switch` outside the codes of a kernel says nothing; inside it is on or off."""
    module = module_of(SOURCE)
    assert isinstance(module.LARGE, Switch)
    assert module.outer.digest({"size": [3]}) == module.outer.digest({}) != module.outer.digest({"size": [1]})
    assert np.isclose(module.outer.function(4.0, 1), math.sqrt(15))
