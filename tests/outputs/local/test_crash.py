"""Killed before every single system call of a build, then run again: never a half-made output, always the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.output_help import NAMES, build, layout, open_staging, put, tree
from weightsmith._base.errors import OutputExists
from weightsmith._outputs import disk
from weightsmith._outputs.area import staging_folder
from weightsmith._outputs.local import LocalTarget
from weightsmith._outputs.places import verify

pytestmark = pytest.mark.process

CALLS = ("mkdir", "rename", "unlink", "rmdir", "write", "pwrite", "ftruncate", "fsync", "fdatasync")


def kill_before(call_number: int, can_exchange: bool) -> None:
    """In a child process: SIGKILL at the given call of the functions that change the disk."""
    count = 0
    opened = os.open

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call_number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    def open_to_write(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        return (counted(opened) if flags & os.O_CREAT else opened)(path, flags, *args, **kwargs)

    os.open = open_to_write
    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    disk.exchange = counted(disk.exchange if can_exchange else lambda *_: False)
    disk.reserve = counted(disk.reserve)


def killed(work: Callable[[], object], call_number: int, can_exchange: bool = True) -> bool:
    """Run `work` in a fork that is killed at a call; False when it ended before that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads of libraries; the child uses none
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            kill_before(call_number, can_exchange)
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def build_more(out: Path) -> Path:
    """A checkpoint with files that are known as ours by the manifest alone."""
    with open_staging(out, layout(), "old") as staging:
        put(staging, seed=1)
        for name in ("aaa.py", "own.py", "1_Pooling/config.json", "zzz/own.py"):
            staging.add_file(name, b"{}")
        return staging.publish({}, fsync=False)


STEPS = [pytest.param(5, id="some"), pytest.param(1, id="all", marks=pytest.mark.sweep)]
"""How far the calls before which a run is killed lie apart."""


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("can_exchange", [True, False])
def test_killed_at_any_point_of_an_overwrite(tmp_path: Path, can_exchange: bool, step: int) -> None:
    old = tree(build_more(tmp_path / "old"))
    new = tree(build(tmp_path / "new", "new", seed=2))
    out = tmp_path / "work" / "out"
    reached = False
    for call_number in range(1 if can_exchange else 30, 1000, step):  # up to there both ways are the same
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()
        shutil.copytree(tmp_path / "old", out)
        if not killed(lambda: build(out, "new", seed=2, overwrite=True, fsync=can_exchange), call_number, can_exchange):
            break
        state = tree(out) if out.exists() else None
        assert state in (old, new) or (state is None and not can_exchange)
        if state is None:  # no way to swap names here: the old checkpoint is whole, beside
            assert tree(staging_folder(out) / "old") == old
        published = state == new
        reached |= published
        if published:
            with pytest.raises(OutputExists):  # clears up what is left of the old checkpoint
                open_staging(out, layout(), "new")
        else:
            build(out, "new", seed=2, overwrite=True)
        assert tree(out) == new
        verify(out)
        assert [p.name for p in out.parent.iterdir()] == ["out"]
    else:
        pytest.fail("the work never ended")
    assert reached
    assert call_number > 40


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_point_of_a_first_build_keeps_what_was_finished(tmp_path: Path, step: int) -> None:
    whole = tree(build(tmp_path / "whole"))
    out = tmp_path / "work" / "out"
    most = 0
    for call_number in range(1, 1000, step):
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()
        if not killed(lambda: build(out), call_number):
            break
        if out.exists():
            assert tree(out) == whole
            continue
        with open_staging(out, layout(), "plan") as staging:
            kept = len(staging.finished)
            assert kept >= most or kept == 0  # later kills lose nothing that an earlier one kept
            most = max(most, kept)
        build(out)
        assert tree(out) == whole
    else:
        pytest.fail("the work never ended")
    assert most == len(NAMES)


def test_a_publish_that_was_cut_off_before_the_rename_only_has_to_be_called_again(tmp_path: Path) -> None:
    out = tmp_path / "out"

    class Cut(Exception):
        pass

    def cut(*_: object, **__: object) -> None:
        raise Cut

    with pytest.MonkeyPatch.context() as patch, open_staging(out, layout(), "plan") as staging:
        put(staging)
        patch.setattr(LocalTarget, "publish", cut)
        with pytest.raises(Cut):
            staging.publish({})
    with open_staging(out, layout(), "plan") as staging:
        assert staging.finished == set(NAMES)
        staging.publish({})
    verify(out)


def test_an_overwrite_cut_off_between_two_renames_gives_the_old_checkpoint_its_name_back(tmp_path: Path) -> None:
    out = build(tmp_path / "out", "old")
    with open_staging(out, layout(), "new", overwrite=True) as staging:
        put(staging)
    out.rename(staging_folder(out) / "old")
    with pytest.raises(OutputExists):
        open_staging(out, layout(), "new")
    assert verify(out).plan == "old"


def test_a_new_folder_in_the_place_of_an_interrupted_overwrite_is_not_touched(tmp_path: Path) -> None:
    from weightsmith._base.errors import StoreError

    out = build(tmp_path / "out", "old")
    with open_staging(out, layout(), "new", overwrite=True) as staging:
        put(staging)
    out.rename(staging_folder(out) / "old")  # cut off between the two renames
    out.mkdir()
    (out / "theirs").write_text("x")
    with pytest.raises(StoreError, match="Move one of the two away"):
        open_staging(out, layout(), "new", overwrite=True)
    assert tree(out) == {"theirs": b"x"}
    verify(staging_folder(out) / "old")
