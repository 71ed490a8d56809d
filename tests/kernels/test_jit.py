"""Kernels are compiled only with the branches that a call takes; who compiles is known, and can be left alone."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba.core.config
import numba.core.errors
import numpy as np
import pytest
from numba.core import event

from tests.cli_help import run_process
from tests.mini import write_checkpoint
from weightsmith._kernels import compiler, internals
from weightsmith._kernels.jit import Abandoned, Switch, is_compiling, kernel, leave, writable

EVEN, ODD = Switch("parity", [0]), Switch("parity", [1])
compiled = pytest.mark.skipif(bool(numba.core.config.DISABLE_JIT), reason="numba does not compile")


@kernel
def inner(out: np.ndarray) -> None:
    if EVEN:
        out[0] += 1
    if ODD:
        out[1].no_such_attribute()  # numba cannot compile this


@kernel(parities="parity")
def outer(parities: np.ndarray, out: np.ndarray) -> None:
    inner(out)
    if ODD and parities[0] == 1:
        out.no_such_attribute()


@kernel(known={"parity": [0]})
def always_even(out: np.ndarray) -> None:
    inner(out)


@kernel
def called(x: float) -> float:
    return x + 1


@kernel
def calling(x: float) -> float:
    return called(x) + called(x + 1)


def test_compiled_kernels_are_kept_where_numba_keeps_its_own_else_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    for numbas, folder in ((str(tmp_path / "numba"), tmp_path / "numba"), ("", tmp_path / "user" / "weightsmith")):
        monkeypatch.setattr(numba.core.config, "CACHE_DIR", numbas)
        assert Path(compiler.cache_folder.__wrapped__()).parent == folder


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where kernels are kept."""
    monkeypatch.setattr(compiler, "cache_folder", lambda: str(tmp_path))
    return tmp_path


def again() -> Any:
    """A kernel as another process has it."""

    @kernel
    def one_more(x: Any) -> Any:
        return x + 1

    return one_more


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.long
@compiled
def test_what_is_kept_of_a_kernel_is_one_file_for_each_signature(kept: Path) -> None:
    """Two processes that compile it at once, each for another one, would lose what they share."""
    again()(1)
    [first] = files(kept)
    content = first.read_bytes()
    first.unlink()
    again()(1.0)
    [second] = files(kept)
    again()(1)
    assert files(kept) == sorted([first, second])
    first.write_bytes(content)
    assert (again()(1), again()(1.5)) == (2, 2.5)


FROM_THE_CACHE = """
import sys
import numpy as np
from weightsmith._base.tensors import DTYPES
from weightsmith._kernels.elementwise import count_varying  # allocates an array
models = np.array([[0, 0], [1, 2], [1, 3]], np.float32).view(np.uint8)
print(count_varying(models, np.full(3, DTYPES["F32"].code), 2, np.zeros((2, 2), np.float32)), "numba.np.linalg" in sys.modules)
"""


@pytest.mark.process
@pytest.mark.slow
@compiled
def test_a_kernel_from_the_cache_needs_little_of_numba(tmp_path: Path) -> None:
    """All that numba can compile takes half a second to import, scipy with it."""
    command = [sys.executable, "-c", FROM_THE_CACHE]
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    printed = [subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert printed == ["1 True\n", "1 False\n"]


@pytest.mark.long
@compiled
@pytest.mark.parametrize("size_left", [0, 100])
def test_a_kernel_whose_file_is_damaged_is_compiled_again(size_left: int, kept: Path) -> None:
    again()(1)
    for path in files(kept):
        path.write_bytes(path.read_bytes()[:size_left])
    assert again()(1) == 2
    assert all(path.stat().st_size > 100 for path in files(kept))


@compiled
@pytest.mark.parametrize(("owner", "name"), [(internals.serialize, "dumps"), (Path, "write_bytes"), (Path, "replace")])
def test_a_kernel_that_cannot_be_kept_is_compiled_all_the_same(
    owner: Any, name: str, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one_more = again()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full)
        assert one_more(1) == 2
    assert files(kept) == []


def test_a_branch_that_no_value_takes_is_not_compiled() -> None:
    out = np.zeros(2)
    outer(np.array([0]), out)
    outer(np.array([0, 0]), out)
    always_even(out)
    assert out.tolist() == [3, 0]


@pytest.mark.slow
@compiled
def test_a_branch_that_a_value_takes_is_compiled() -> None:
    for parities in ([1], [0, 1]):
        with pytest.raises(numba.core.errors.TypingError, match="no_such_attribute"):
            outer(np.array(parities), np.zeros(2))
    with pytest.raises(numba.core.errors.TypingError, match="no_such_attribute"):
        inner(np.zeros(2))  # nothing rules it out


HIDDEN = Switch("parity", [1], behind=Switch("depth", [2]))


@kernel(parity="parity", depth="depth")
def switched(parity: int, depth: int) -> int:
    return 1 if HIDDEN and depth == 2 and parity == 1 else 0


def test_a_switch_behind_another_makes_no_variants_where_that_one_is_off() -> None:
    variants = [switched.variant({"parity": [parity], "depth": [depth]}) for parity in (0, 1) for depth in (1, 2)]
    assert variants[0] is variants[1] is variants[2] is not variants[3]
    assert (switched(1, 1), switched(0, 2), switched(1, 2)) == (0, 0, 1)
    assert switched.digest({"depth": [1]}) == switched.digest({"parity": [0]}) != switched.digest({})


@kernel
def plus(x: Any, y: Any) -> Any:
    return x + y


@kernel
def adds_constants(x: int) -> int:
    return plus(x, 1) + plus(x, 2) + plus(x, x)


@compiled
@pytest.mark.usefixtures("uncached")
def test_a_kernel_that_is_called_with_several_constants_is_compiled_once() -> None:
    with event.install_recorder("numba:compile") as recorder:
        assert adds_constants(1) == 7
    compiled_for = [each.data["args"] for _, each in recorder.buffer if each.is_start]
    assert [len(args) for args in compiled_for] == [1, 2]


def test_an_array_that_may_not_be_written_is_copied_for_a_kernel() -> None:
    x = np.arange(3.0)
    assert writable(x) is x
    x.flags.writeable = False
    assert writable(x).flags.writeable
    assert writable(x).tolist() == [0, 1, 2]


@compiled
def test_a_kernel_that_kernels_call_is_not_compiled_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def emit(library: Any) -> None:
        compiled.append(library.name)
        known(library)

    known = internals.codegen.JITCodeLibrary._finalize_specific
    monkeypatch.setattr(internals.codegen.JITCodeLibrary, "_finalize_specific", emit)
    assert calling(1.0) == 5
    assert any(name.startswith("calling") for name in compiled)
    assert not any(name.startswith("called") for name in compiled)


class Worker(threading.Thread, event.Listener):  # type: ignore[misc]
    """Compiles a kernel, and stops in the compiler until it may go on."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.ended_with: BaseException | None = None
        self.result = -1

    def on_start(self, timing_event: object) -> None:
        if threading.current_thread() is self:
            self.reached.set()
            self.go_on.wait(60)

    def on_end(self, timing_event: object) -> None:
        pass

    def run(self) -> None:
        @kernel
        def fresh(x: int) -> int:
            return x + 1

        try:
            with event.install_listener("numba:run_pass", self):
                self.result = fresh(1)
        except BaseException as error:
            self.ended_with = error


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that an earlier run of the tests has kept would be loaded, not compiled."""
    monkeypatch.setattr(compiler, "cache_folder", lambda: "")


@compiled
@pytest.mark.usefixtures("uncached")
def test_a_thread_in_the_compiler_is_not_waited_for_and_does_nothing_more() -> None:
    assert not is_compiling()
    worker = Worker()
    worker.start()
    assert worker.reached.wait(60)
    assert is_compiling()
    assert not gc.isenabled()
    leave([worker])  # returns, though it has not ended
    assert worker.is_alive()
    worker.go_on.set()
    worker.join(60)
    assert isinstance(worker.ended_with, Abandoned)
    assert worker.result == -1
    assert not is_compiling()
    assert gc.isenabled()


@compiled
@pytest.mark.usefixtures("uncached")
def test_a_thread_that_is_not_left_gets_its_kernel() -> None:
    worker = Worker()
    worker.start()
    assert worker.reached.wait(60)
    worker.go_on.set()
    worker.join(60)
    assert (worker.ended_with, worker.result) == (None, 2)
    assert gc.isenabled()


def test_a_thread_that_does_not_compile_is_waited_for() -> None:
    done: list[int] = []
    release = threading.Event()

    def work() -> None:
        release.wait(60)
        done.append(1)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    threading.Timer(0.1, release.set).start()
    leave([thread])
    assert done == [1]


@compiled
def test_a_thread_that_was_left_begins_no_kernel() -> None:
    ended: list[BaseException] = []
    told, release = threading.Event(), threading.Event()

    @kernel
    def fresh(x: int) -> int:
        return x + 1

    def work() -> None:
        told.set()
        release.wait(60)
        try:
            fresh(1)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    told.wait(60)
    threading.Timer(0.1, release.set).start()
    leave([thread])
    assert [type(error) for error in ended] == [Abandoned]


@pytest.mark.slow
@compiled
def test_threads_do_not_undo_each_others_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Without it, numba takes "" for the folder now and then, and the cache lands where the user is.
    seen = set()

    class Function:
        def enable_caching(self) -> None:
            for _ in range(3):
                time.sleep(0.0005)
                seen.add(compiler.config.CACHE_DIR)

    monkeypatch.setattr(compiler.config, "CACHE_DIR", "before")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: compiler._keep_by_numba(Function(), tmp_path / "own"), range(64)))
    assert seen == {str(tmp_path / "own")}
    assert compiler.config.CACHE_DIR == "before"


FIRST_RUN = """
import sys, weightsmith
seen = []
weightsmith.merge(sys.argv[1], sys.argv[2], progress=lambda now: seen.append(now.compiling), fsync=False)
print(any(seen))
"""


@pytest.mark.process
@pytest.mark.slow
@compiled
def test_progress_says_that_kernels_are_compiled_in_the_first_run_alone(tmp_path: Path) -> None:
    tensors = {"w": np.ones((8, 8), np.float32)}
    for name in "ab":
        write_checkpoint(tmp_path / name, tensors)
    recipe = tmp_path / "linear.yml"
    recipe.write_text(
        f"merge_method: linear\nmodels: [{{model: {tmp_path}/a}}, {{model: {tmp_path}/b}}]\nparameters: {{weight: 1}}\n"
    )
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    ran = [run_process(recipe, tmp_path / out, code=FIRST_RUN, env=cache) for out in ("cold", "warm")]
    assert [(one.out, one.err) for one in ran] == [("True\n", ""), ("False\n", "")]
