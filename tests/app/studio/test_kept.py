"""What a studio keeps beside its results: across restarts, one studio at a time, nothing half written."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from weightsmith._app.studio import kept
from weightsmith._app.studio.kept import FOLDER, KeptRuns, StudioRun
from weightsmith._base.errors import Busy, StoreError


def run(number: int, kind: str = "try") -> StudioRun:
    return StudioRun(number, kind, 1.0, "title", "recipe\n", numbers={"distance": "1%"}, report=True)


def test_recipe_and_runs_are_there_after_a_restart(tmp_path: Path) -> None:
    first = KeptRuns(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    first.save("# one\n", "a", 4)
    first.save("merge_method: ties\n", "b", 1)
    first.add(run(first.next_id()), "<p>one</p>")
    first.close()
    again = KeptRuns(tmp_path / "out")
    assert (again.text, again.version, again.runs) == ("merge_method: ties\n", 2, [run(1)])
    assert again.taken == {"a": 4, "b": 1}
    assert (again.report(1), again.report(2), again.next_id()) == ("<p>one</p>", None, 2)


def test_a_preview_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    kept_runs = KeptRuns(tmp_path)
    for kind in ("preview", "preview", "try", "preview"):
        kept_runs.add(run(kept_runs.next_id(), kind), "page")
    assert [entry.kind for entry in kept_runs.runs] == ["preview", "try", "preview"]
    assert len(list((tmp_path / FOLDER).glob("*.html"))) == 3


def test_the_oldest_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_RUNS", 3)
    kept_runs = KeptRuns(tmp_path)
    for _ in range(5):
        kept_runs.add(run(kept_runs.next_id()), "page")
    assert [entry.id for entry in kept_runs.runs] == [3, 4, 5]
    assert sorted(path.stem for path in (tmp_path / FOLDER).glob("*.html")) == ["3", "4", "5"]


def test_one_studio_at_a_time(tmp_path: Path) -> None:
    first = KeptRuns(tmp_path)
    first.save("a\n")
    with pytest.raises(Busy, match="another studio writes its results here"):
        KeptRuns(tmp_path)
    first.close()
    assert KeptRuns(tmp_path).text == "a\n"


def test_a_studio_that_wrote_here_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    first, second = KeptRuns(tmp_path / "out"), KeptRuns(tmp_path / "out")
    first.save("# first\n")
    first.close()
    with pytest.raises(Busy, match="another studio has written"):
        second.save("# second\n")
    assert second.text == ""
    assert KeptRuns(tmp_path / "out").text == "# first\n"


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    kept_runs = KeptRuns(tmp_path / "out")
    kept_runs.save("# one\n")
    shutil.rmtree(tmp_path / "out")
    kept_runs.save("# two\n")
    kept_runs.add(run(1), "page")
    kept_runs.close()
    again = KeptRuns(tmp_path / "out")
    assert (again.text, again.report(1)) == ("# two\n", "page")


def test_what_is_broken_is_left_out_and_a_link_is_not_followed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / FOLDER).mkdir(parents=True)
    (tmp_path / "a" / FOLDER / "recipe.json").write_text("{")
    (tmp_path / "a" / FOLDER / "runs.json").write_text(
        '[{"id": 1}, 3, {"id": "1", "kind": "try", "when": 1.0, "title": "", "recipe": ""}]'
    )
    kept_runs = KeptRuns(tmp_path / "a")
    assert (kept_runs.text, kept_runs.version, kept_runs.runs) == ("", 0, [])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / FOLDER).symlink_to(tmp_path / "b" / FOLDER)
    with pytest.raises(StoreError, match="is a link"):
        KeptRuns(tmp_path / "c")
    (tmp_path / "d").write_text("a file")
    with pytest.raises(StoreError):
        KeptRuns(tmp_path / "d").save("x\n")


# ---- a disk that refuses


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """No file takes more than a few bytes, as on a disk without space."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """For a test that may not do more than the permissions say: the fixture `no_root`."""
    folder.chmod(0o555)
    try:
        yield
    finally:
        folder.chmod(0o755)


@contextmanager
def replaced(folder: Path) -> Iterator[None]:
    """The results were deleted, and a file is in their place."""
    shutil.rmtree(folder.parent)
    folder.parent.write_text("a file")
    try:
        yield
    finally:
        folder.parent.unlink()


@pytest.mark.usefixtures("no_root")
@pytest.mark.parametrize(
    ("refusing", "why"),
    [
        (full, os.strerror(errno.EFBIG)),
        (read_only, "the folder is not writable"),
        (replaced, f"{os.strerror(errno.EEXIST)}|{os.strerror(errno.ENOTDIR)}"),
    ],
)
def test_what_the_disk_refuses_is_kept_until_it_takes_it(
    tmp_path: Path, refusing: Callable[[Path], AbstractContextManager[None]], why: str
) -> None:
    kept_runs = KeptRuns(tmp_path / "out")
    kept_runs.save("# one\n")
    with refusing(kept_runs.folder):
        for _ in range(2):
            with pytest.raises(StoreError, match=why):
                kept_runs.save("# two\n", "a", 7)
        with pytest.raises(StoreError, match=why):
            kept_runs.add(run(1), "<p>page</p>")
        with pytest.raises(StoreError, match=why):
            kept_runs.flush()
        assert (kept_runs.text, kept_runs.version, kept_runs.runs) == ("# two\n", 2, [run(1)])
    kept_runs.flush()
    kept_runs.flush()
    kept_runs.close()
    again = KeptRuns(tmp_path / "out")
    assert (again.text, again.version, again.runs, again.taken) == ("# two\n", 2, [run(1)], {"a": 7})
    assert again.report(1) == "<p>page</p>"
    assert not list(again.folder.glob("*.part"))


@pytest.mark.usefixtures("no_root")
def test_the_first_edit_is_kept_where_no_folder_can_be_made(tmp_path: Path) -> None:
    with read_only(tmp_path):
        kept_runs = KeptRuns(tmp_path / "out")
        with pytest.raises(StoreError, match="the folder is not writable"):
            kept_runs.save("# one\n")
        assert (kept_runs.text, kept_runs.version) == ("# one\n", 1)
    kept_runs.flush()
    kept_runs.close()
    assert KeptRuns(tmp_path / "out").text == "# one\n"


def test_a_folder_that_was_removed_is_written_again_without_an_edit(tmp_path: Path) -> None:
    kept_runs = KeptRuns(tmp_path / "out")
    kept_runs.save("# one\n")
    kept_runs.add(run(1))
    shutil.rmtree(tmp_path / "out")
    kept_runs.flush()
    with pytest.raises(Busy):
        KeptRuns(tmp_path / "out")
    kept_runs.close()
    again = KeptRuns(tmp_path / "out")
    assert (again.text, [entry.id for entry in again.runs]) == ("# one\n", [1])


# ---- a studio that is killed


def test_what_ran_is_known_to_the_next_studio(tmp_path: Path) -> None:
    first = KeptRuns(tmp_path)
    first.began("try", "the merge")
    first.began("merge", "merged")
    first.ended("try")
    leftover = first.folder / "tune-abc"
    leftover.mkdir()
    first.close()
    second = KeptRuns(tmp_path)
    assert second.interrupted == {"merge": "merged"}
    assert not leftover.exists()
    second.began("sweep", "density")
    second.ended("sweep")
    second.close()
    third = KeptRuns(tmp_path)
    assert third.interrupted == {}
    third.close()
    (tmp_path / FOLDER / "running.json").write_text(json.dumps({"try": 3}))
    assert KeptRuns(tmp_path).interrupted == {}
