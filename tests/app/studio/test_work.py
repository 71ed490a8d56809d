"""One merge at a time: its progress, its end, cancelled and resumed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import weightsmith
import weightsmith._app.studio.work
from tests.app.studio.models import make, recipe
from weightsmith._app.studio import show
from weightsmith._app.studio.work import Status, StudioWork, unfinished
from weightsmith._base.errors import Busy, OutputExists


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("work").resolve()
    make(root)
    return root


def tensors(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.long
def test_a_merge_ends_with_its_report(root: Path) -> None:
    work = StudioWork()
    assert show.status(work.status) == ""
    work.start(recipe(root), root / "out" / "first")
    done = work.wait(60)
    assert (done.state, done.problem) == ("done", None)
    assert done.merged is not None
    assert (done.merged.out / "report.html").is_file()
    assert "Done: <b>" in show.status(done)
    weightsmith.merge(recipe(root), root / "out" / "same", progress=False)
    assert tensors(root / "out" / "first") == tensors(root / "out" / "same")


@pytest.mark.slow
def test_cancelled_work_is_kept_and_resumed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, out, seen = StudioWork(), root / "out" / "cancelled", list[Status]()
    whole = weightsmith._app.studio.work._Watching.show

    def show_reading(self: Any, reading: Any) -> None:
        if reading.detail and int(reading.detail.split()[0]) > 3:  # some are finished
            work.cancel()
        whole(self, reading)
        seen.append(work.status)

    def one_at_a_time(*args: Any, **options: Any) -> Any:
        return weightsmith.merge(*args, **options, threads=1)

    monkeypatch.setattr(weightsmith._app.studio.work, "merge", one_at_a_time)
    monkeypatch.setattr(weightsmith._app.studio.work._Watching, "show", show_reading)
    monkeypatch.setattr("threading.Thread.join", _often(threading.Thread.join))
    work.start(recipe(root), out)
    assert work.wait().state in ("cancelled", "done")
    if work.status.state == "done":
        pytest.skip("the merge was faster than the look at its progress")
    assert "are kept" in show.status(work.status)
    assert not out.exists()
    assert unfinished(out)
    monkeypatch.setattr(weightsmith._app.studio.work._Watching, "show", whole)
    work.start(recipe(root), out)
    done = work.wait()
    assert done.state == "done"
    assert done.merged is not None
    assert done.merged.resumed > 3
    assert not unfinished(out)


def _often(join: Any) -> Any:
    """The engine looks at its threads every 0.1 s: a small merge is over by then."""
    return lambda self, timeout=None: join(self, None if timeout is None else min(timeout, 0.0005))


def test_a_second_merge_waits_for_the_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def merge(*args: Any, **options: Any) -> None:
        begun.set()
        ended.wait(30)
        raise ValueError("no <b>merge</b>")

    monkeypatch.setattr(weightsmith._app.studio.work, "merge", merge)
    work = StudioWork()
    work.start("a: b\n", root / "out" / "busy")
    begun.wait(30)
    assert work.status.state == "running"
    assert "<b>busy</b> planning" in show.status(work.status)
    with pytest.raises(Busy):
        work.start("a: b\n", root / "out" / "other")
    ended.set()
    failed = work.wait(30)
    assert (failed.state, str(failed.problem)) == ("failed", "no <b>merge</b>")
    assert "no &lt;b&gt;merge" in show.error(failed.problem)


def test_errors_are_shown_in_full(root: Path) -> None:
    work = StudioWork()
    (root / "out" / "mine").mkdir(parents=True)
    (root / "out" / "mine" / "notes.txt").write_text("mine")
    work.start(recipe(root), root / "out" / "mine", overwrite=True)
    failed = work.wait(60)
    assert failed.state == "failed"
    assert isinstance(failed.problem, OutputExists)
    assert (root / "out" / "mine" / "notes.txt").read_text() == "mine"
