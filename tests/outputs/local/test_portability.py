"""Every call that only Linux has, or that a file system may refuse, is switched off: the same bytes come out."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.mini import write_checkpoint
from tests.output_help import layout, open_staging, put
from weightsmith._base import files
from weightsmith._base.errors import Busy, StoreError
from weightsmith._engine.resources import Resources, processors
from weightsmith._outputs import disk
from weightsmith._outputs.places import verify
from weightsmith._outputs.save import save_file

RECIPE: dict[str, Any] = {
    "merge_method": "ties",
    "base_model": "base",
    "models": [{"model": name, "parameters": {"weight": 0.5, "density": 0.5}} for name in ("a", "b")],
}
Patch = pytest.MonkeyPatch


def without(name: str) -> Callable[[Patch], None]:
    """As on a system whose Python has no `os.name`."""
    return lambda patch: patch.delattr(os, name)


def refusing(module: Any, name: str, code: int) -> Callable[[Patch], None]:
    """As on a file system that refuses the call."""

    def refuse(*args: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    return lambda patch: patch.setattr(module, name, refuse)


def without_libc(*names: str) -> Callable[[Patch], None]:
    """As where the C library has none of these functions."""
    real = disk._libc

    def libc(name: str) -> Any:
        return None if name in names else real(name)

    return lambda patch: patch.setattr(disk, "_libc", libc)


def refusing_libc(name: str, code: int) -> Callable[[Patch], None]:
    """As where the kernel or the file system does not know the call."""
    real = disk._libc

    def refuse(*args: object) -> int:
        ctypes.set_errno(code)
        return -1

    return lambda patch: patch.setattr(disk, "_libc", lambda asked: refuse if asked == name else real(asked))


def all_of(*changes: Callable[[Patch], None]) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        for change in changes:
            change(patch)

    return apply


def folders_without_fsync(patch: Patch) -> None:
    """As on network file systems that sync files only."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):  # noqa: PTH112
            raise OSError(errno.EINVAL, "Invalid argument")
        real(fd)

    patch.setattr(os, "fsync", fsync)


def without_mac_limits(patch: Patch) -> None:
    """macOS refuses a limit of open files beyond 10,240, although it calls the hard limit infinite."""

    def setrlimit(kind: int, limits: tuple[int, int]) -> None:
        if limits[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")

    patch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    patch.setattr(resource, "setrlimit", setrlimit)


MAC = all_of(
    without("copy_file_range"),
    without("O_DIRECT"),
    without("posix_fadvise"),
    without("fdatasync"),
    without("sched_getaffinity"),
    without_libc("renameat2", "fallocate"),
    without_mac_limits,
    lambda patch: patch.setattr(sys, "platform", "darwin"),
    lambda patch: patch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False),
)

SWITCHED_OFF: dict[str, Callable[[Patch], None]] = {
    "preadv": without("preadv"),
    "preadv of the kernel (ENOSYS)": refusing(os, "preadv", errno.ENOSYS),
    "preadv and pread": all_of(without("preadv"), without("pread")),
    "copy_file_range": without("copy_file_range"),
    "O_DIRECT": without("O_DIRECT"),
    "posix_fadvise": without("posix_fadvise"),
    "posix_fadvise (ENOSYS)": refusing(os, "posix_fadvise", errno.ENOSYS),
    "fdatasync": without("fdatasync"),
    "fsync of folders (EINVAL)": folders_without_fsync,
    "sched_getaffinity": without("sched_getaffinity"),
    "renameat2": without_libc("renameat2"),
    "renameat2 (EINVAL)": refusing_libc("renameat2", errno.EINVAL),
    "fallocate": without_libc("fallocate"),
    "fallocate (EOPNOTSUPP)": refusing_libc("fallocate", errno.EOPNOTSUPP),
    "fstatfs": without_libc("fstatfs"),
    "flock": lambda patch: patch.delattr(fcntl, "flock"),
    "flock (ENOLCK)": refusing(fcntl, "flock", errno.ENOLCK),
    "setrlimit": without_mac_limits,
    "all that macOS lacks": MAC,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("base", "a", "b")):
        rng = np.random.default_rng(seed)
        shapes = {"model.layers.0.mlp.up_proj.weight": (300, 64), "model.norm.weight": (64,)}
        tensors = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
        write_checkpoint(tmp_path / name, tensors, {"model_type": "llama", "num_hidden_layers": 1})
    return tmp_path


def weights(folder: str) -> bytes:
    return Path(folder, "model.safetensors").read_bytes()


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("name", SWITCHED_OFF)
def test_a_merge_without_one_call_has_the_same_bytes(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weightsmith.merge(RECIPE, "with")
    weightsmith.merge({**RECIPE, "models": RECIPE["models"][:1]}, "without")
    with monkeypatch.context() as patch:
        SWITCHED_OFF[name](patch)
        weightsmith.merge(RECIPE, "without", overwrite=True, fsync=True)
        verify("without")
    assert weights("without") == weights("with")
    assert {path.name for path in here.iterdir()} == {"base", "a", "b", "with", "without"}


@pytest.mark.parametrize("name", SWITCHED_OFF)
def test_interrupted_work_is_resumed_without_one_call(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SWITCHED_OFF[name](monkeypatch)
    with open_staging(tmp_path / "out", layout(), "plan", other_bytes=5000) as staging:
        put(staging, ["embed", "norm"])
        locks = not staging.warnings
    assert locks == ("flock" not in name)
    with open_staging(tmp_path / "out", layout(), "plan", other_bytes=5000) as staging:
        assert staging.finished == {"embed", "norm"}
        put(staging)
        staging.add_file("config.json", b"{}")
        staging.publish({})
    verify(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_is_saved_where_there_are_no_hard_links(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_libc("renameat2")(monkeypatch)
    refusing(os, "link", code)(monkeypatch)
    save_file({"a": np.ones(3)}, tmp_path / "m.safetensors", overwrite=False)
    (tmp_path / "other").touch()
    with pytest.raises(FileExistsError):
        disk.rename_new(tmp_path / "other", tmp_path / "m.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"m.safetensors", "other"}


def test_parts_are_refused_without_locks(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fcntl, "flock")
    with pytest.raises(StoreError, match="this file system has no locks, which the processes that do parts need"):
        weightsmith.run(weightsmith.plan(RECIPE), "out", part=(1, 2))


def test_locks_exclude_where_there_are_some(tmp_path: Path) -> None:
    with open_staging(tmp_path / "out", layout(), "plan"), pytest.raises(Busy):
        open_staging(tmp_path / "out", layout(), "plan")


def test_sharing_is_not_asked_of_other_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(disk, "_libc", asked.append)
    monkeypatch.setattr(sys, "platform", "freebsd14")
    with (tmp_path / "a").open("wb") as file:
        assert not disk.copies_by_reference(file.fileno())
    assert asked == []  # its struct statfs would overflow the buffer


def test_the_processors_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7})
    assert processors() == Resources().workers == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 11)
    assert processors() == 11
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processors() == 1
    assert Resources(threads=4).workers == 4


def test_the_limit_of_open_files_is_raised_as_far_as_macos_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[int] = []

    def setrlimit(kind: int, limits: tuple[int, int]) -> None:
        if limits[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")
        raised.append(limits[0])

    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    assert files.raise_open_files(65_536)
    assert files.raise_open_files(300)
    assert not files.raise_open_files(200)
    assert raised == [10_240, 300]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 512))
    assert files.raise_open_files(65_536)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10_240, resource.RLIM_INFINITY))
    assert not files.raise_open_files(65_536)
    assert raised == [10_240, 300, 512]
    monkeypatch.setitem(sys.modules, "resource", None)
    assert not files.raise_open_files(65_536)


def test_reading_into_a_buffer_moves_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    try:
        for missing in ((), ("preadv",), ("preadv", "pread")):
            for name in missing:
                monkeypatch.delattr(os, name, raising=False)
            out = bytearray(b"\xff" * 30)
            assert files.read_into(fd, memoryview(out), 80) == 20
            assert out == bytes(range(80, 100)) + b"\xff" * 10
            assert files.read_into(fd, memoryview(out), 100) == 0
    finally:
        os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.read_into(fd, memoryview(bytearray(1)), 0)


def test_on_macos_bytes_are_synced_past_the_memory_of_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, what: called.append(f"fcntl {what}"))
    monkeypatch.setattr(os, "fdatasync", lambda fd: called.append("fdatasync"))
    disk.sync_data(0)
    assert called == ["fcntl 51"]
    refusing(fcntl, "fcntl", errno.ENOTSUP)(monkeypatch)
    disk.sync_data(0)
    assert called == ["fcntl 51", "fdatasync"]
