"""A staging folder, or a file in one, that weightsmith did not make: it is refused, and nothing behind it is touched."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.output_help import NAMES, build, layout, open_staging, put, tree
from weightsmith._base.errors import CannotResume, Finding, StoreError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._outputs import disk, local
from weightsmith._outputs.area import ProductFiles, StagingArea, staged_plan, staging_folder
from weightsmith._outputs.journal import Journal
from weightsmith._outputs.places import verify
from weightsmith._outputs.save import save_model


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work" / "out"


class Hung(BaseException):
    pass


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def hung(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def staged(out: Path, names: tuple[str, ...] = NAMES[:3]) -> Path:
    """Interrupted work; its staging folder."""
    with open_staging(out, layout(), "plan") as staging:
        put(staging, names)
    return staging.folder


def refused(out: Path, *words: str, resume: bool = True) -> None:
    before = {p: p.lstat().st_mtime_ns for p in sorted(out.parent.rglob("*"))}
    with pytest.raises(StoreError) as caught:
        open_staging(out, layout(), "plan", resume=resume)
    assert not isinstance(caught.value, CannotResume)
    message = str(caught.value)
    for word in (*words, "Nothing was written.", "\n  -> "):
        assert word in message
    changed = {p for p, time in before.items() if not os.path.lexists(p) or p.lstat().st_mtime_ns != time}
    assert changed <= {staging_folder(out) / "lock"}


# the folder


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    "files",
    [
        {"thesis.txt": "x"},
        {"content/thesis.txt": "x"},
        {"lock": "", "thesis.txt": "x"},
        {"lock": "combination 12-34", "journal": ""},
        {"lock": "", "journal": "dear diary"},
        {"journal": "dear diary"},
        {"lock": "", "journal": "", "content/model.safetensors": "x"},
        {"lock": "", "old/model.safetensors": "x"},
    ],
)
def test_a_folder_of_the_users_that_bears_the_name_is_kept(out: Path, files: dict[str, str], resume: bool) -> None:
    for name, text in files.items():
        path = staging_folder(out) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = tree(out.parent)
    refused(out, "not created by weightsmith", str(staging_folder(out)), resume=resume)
    with pytest.raises(StoreError):
        save_model({}, out)
    assert tree(out.parent) == before


def test_a_file_or_link_that_bears_the_name_is_kept(out: Path) -> None:
    staging_folder(out).write_text("mine")
    refused(out, "not a folder")
    staging_folder(out).unlink()
    staging_folder(out).symlink_to("nowhere")
    refused(out, "symbolic link")


def test_what_is_left_of_a_start_or_an_end_that_was_cut_off_is_ours(out: Path) -> None:
    for lock, journal in (("", None), ("process 1 on x", None), ("process 1 on x", b""), ("process 1 on x", b"0123 [torn")):
        staging_folder(out).mkdir()
        (staging_folder(out) / "lock").write_text(lock)
        if journal is not None:
            (staging_folder(out) / "journal").write_bytes(journal)
        open_staging(out, layout(), "plan").discard()
        assert not staging_folder(out).exists()
    staging_folder(out).mkdir()
    build(out)


def test_the_journal_is_there_before_the_content(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[list[str]] = []
    fsync = os.fsync

    def recorded(fd: int) -> None:
        synced.append(sorted(p.name for p in staging_folder(out).iterdir()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recorded)
    open_staging(out, layout(), "plan").close()
    assert synced[0] == ["journal", "lock"]


def test_a_note_left_in_the_staging_folder_is_kept(out: Path) -> None:
    folder = staged(out)
    (folder / "note.txt").write_text("mine")
    with open_staging(out, layout(), "plan") as staging:
        put(staging)
        staging.publish({}, fsync=False)
    verify(out)
    assert tree(folder) == {"note.txt": b"mine"}


# what is in it


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)


def make_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, make_socket, make_link, Path.mkdir])
@pytest.mark.parametrize("name", ["lock", "journal"])
def test_a_pipe_socket_link_or_folder_in_the_place_of_a_file_is_refused(
    out: Path, name: str, make: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = staged(out)
    (folder / name).unlink(missing_ok=True)
    monkeypatch.chdir(folder)  # the name of a socket is short
    make(folder / name)
    refused(out, name)
    refused(out, name, resume=False)
    if name == "journal":
        with pytest.raises(StoreError, match="journal"):
            staged_plan(out)


@pytest.mark.parametrize("make", [os.mkfifo, make_socket])
@pytest.mark.parametrize("name", [layout().shards[0].name, "config.json"])
def test_a_pipe_or_socket_in_the_content_is_refused(
    out: Path, name: str, make: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = staged(out) / "content"
    (content / name).unlink(missing_ok=True)
    monkeypatch.chdir(content)
    make(content / name)
    refused(out, name)


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", ["content", "old"])
def test_content_that_is_a_link_is_refused_and_what_it_leads_to_is_kept(out: Path, name: str, resume: bool) -> None:
    folder = staged(out)
    mine = out.parent / "mine"
    mine.mkdir()
    for file in ("thesis.txt", layout().shards[0].name):
        (mine / file).write_text("mine")
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).symlink_to(mine)
    before = tree(mine)
    refused(out, name, "symbolic link", resume=resume)
    assert tree(mine) == before


# hard links


def test_a_weight_file_with_another_name_is_made_anew(out: Path) -> None:
    folder = staged(out)
    shutil.copytree(folder / "content", out.parent / "kept", copy_function=os.link)
    before = tree(out.parent / "kept")
    with open_staging(out, layout(), "plan") as staging:
        put(staging, seed=7)
        staging.publish({}, fsync=False)
    assert tree(out.parent / "kept") == before
    verify(out)


def test_a_lock_and_a_journal_with_another_name_are_left_to_it(out: Path) -> None:
    folder = staged(out)
    for name in ("lock", "journal"):
        os.link(folder / name, out.parent / name)
    before = {name: (out.parent / name).read_bytes() for name in ("lock", "journal")}
    (out.parent / "lock").write_text("process 1 on elsewhere")
    before["lock"] = b"process 1 on elsewhere"
    with open_staging(out, layout(), "plan") as staging:
        assert len(staging.finished) == 3, "what the journal says is still believed"
        put(staging)
        with pytest.raises(StoreError, match="building this output now"):
            open_staging(out, layout(), "plan")
    assert {name: (out.parent / name).read_bytes() for name in before} == before
    with open_staging(out, layout(), "plan") as staging:
        assert staging.finished == set(NAMES)


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_products_are_not_written_through_a_link(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    folder = tmp_path / "products"
    folder.mkdir()
    (tmp_path / "mine").write_text("mine")
    products = ProductFiles(folder)
    path = products.path("router")
    for name in (path, path.with_name(f"{path.name}.{os.getpid()}.part")):
        link(tmp_path / "mine", name)
    checksum = products.write("router", [np.arange(3)])
    assert (tmp_path / "mine").read_text() == "mine"
    arrays = products.read("router", [TensorSpec("x", DTYPES["I64"], (3,))], checksum)
    assert arrays is not None
    assert arrays[0].tolist() == [0, 1, 2]


def test_a_folder_of_products_that_is_a_link_is_refused(out: Path, tmp_path: Path) -> None:
    folder = staged(out)
    (tmp_path / "mine").mkdir()
    (folder / "products").symlink_to(tmp_path / "mine")
    with pytest.raises(StoreError, match="products in it is a symbolic link"):
        open_staging(out, layout(), "plan")


class Cut(Exception):
    pass


def cut(*_: object, **__: object) -> None:
    raise Cut


def test_a_model_whose_hard_links_were_replaced_is_never_written(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(out.parent / "model", "old", seed=1)
    shutil.copytree(model, out, copy_function=os.link)
    before = tree(model)
    with monkeypatch.context() as patch, open_staging(out, layout(), "plan", overwrite=True) as staging:
        put(staging)
        patch.setattr(StagingArea, "remove_replaced", cut)  # killed right after the exchange
        with pytest.raises(Cut):
            staging.publish({}, fsync=False)
    assert tree(staging.folder / "content") == before
    shutil.rmtree(out)
    refused(out, "replaced", str(staging.folder / "content"))
    assert tree(model) == before
    assert tree(staging.folder / "content") == before, "it may be the only one"


def is_left(name: str, warnings: Sequence[Finding]) -> bool:
    """The one warning says that the output is published, and what is left of the other."""
    (warning,) = warnings
    text = str(warning)
    return "published and complete, but cleaning up failed" in text and name in text and "\n  -> " in text


def build_and_write_late(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint in `out`, into which the user writes a file while it is being replaced."""
    build(out, "old")
    exchange = disk.exchange

    def late(first: Path, second: Path) -> bool:
        (out / "thesis.txt").write_text("years of work")
        return exchange(first, second)

    monkeypatch.setattr(disk, "exchange", late)


def test_what_arrived_in_the_replaced_checkpoint_at_the_last_moment_is_kept(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_and_write_late(out, monkeypatch)
    with open_staging(out, layout(), "new", overwrite=True) as staging:
        put(staging)
        staging.publish({}, fsync=False)
    assert is_left("thesis.txt", staging.warnings)
    assert verify(out).plan == "new"
    assert (staging.folder / "content" / "thesis.txt").read_text() == "years of work"
    with pytest.raises(StoreError, match=r"thesis\.txt"):
        open_staging(out, layout(), "next", overwrite=True)
    assert (staging.folder / "content" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("closed", ["content", "content/model-00001-of-00002.safetensors"])
def test_a_replaced_checkpoint_that_cannot_be_removed_is_named_and_the_output_is_published(
    out: Path, closed: str, no_root: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(out, "old")
    exchange = disk.exchange

    def close(first: Path, second: Path) -> bool:
        done = exchange(first, second)
        (first.parent / closed).chmod(0)
        return done

    monkeypatch.setattr(disk, "exchange", close)
    with open_staging(out, layout(), "new", overwrite=True) as staging:
        put(staging)
        assert staging.publish({}, fsync=False) == out
    content = staging.folder / "content"
    assert is_left(str(content), staging.warnings)
    (staging.folder / closed).chmod(0o700)
    assert (content / "weightsmith.json").is_file()
    assert verify(out).plan == "new"
    monkeypatch.undo()
    build(out, "next", overwrite=True)
    assert not staging.folder.exists()


def test_a_folder_that_cannot_be_removed_is_an_error_of_ours(tmp_path: Path, no_root: None) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(StoreError, match="cannot be removed: Permission denied") as caught:
        disk.remove_tree(tmp_path / "closed")
    assert caught.value.finding.where == str(tmp_path / "closed")
    (tmp_path / "closed").chmod(0o700)


def test_what_is_added_while_the_replaced_checkpoint_is_removed_stays(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(out, "old")
    checked = local.check_made_here

    def late(path: Path, refused: Any) -> object:
        outcome = checked(path, refused)
        if path.name == "content":
            (path / "thesis.txt").write_text("years of work")
        return outcome

    monkeypatch.setattr(local, "check_made_here", late)
    with open_staging(out, layout(), "new", overwrite=True) as staging:
        put(staging)
        staging.publish({}, fsync=False)
    assert is_left(str(staging.folder / "content"), staging.warnings)
    assert tree(staging.folder / "content") == {"thesis.txt": b"years of work"}


def test_save_model_too_keeps_what_arrived_at_the_last_moment(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    build_and_write_late(out, monkeypatch)
    saved = save_model({"a": np.ones(3)}, out, overwrite=True, fsync=False)
    assert is_left("thesis.txt", saved.warnings)
    assert (staging_folder(out) / "content" / "thesis.txt").read_text() == "years of work"


def test_discarding_what_is_published_keeps_what_arrived_at_the_last_moment(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(out, "old")
    staging = open_staging(out, layout(), "new", overwrite=True)
    put(staging)
    with monkeypatch.context() as patch:
        patch.setattr(StagingArea, "remove_replaced", cut)  # Ctrl-C right after the exchange
        with pytest.raises(Cut):
            staging.publish({}, fsync=False)
    (staging.folder / "content" / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match=r"thesis\.txt"):
        staging.discard()
    staging.close()
    assert (staging.folder / "content" / "thesis.txt").read_text() == "years of work"


# the journal


def test_a_journal_made_to_crash_its_reader_is_read_as_damaged(out: Path) -> None:
    import xxhash

    folder = staged(out)
    with (folder / "journal").open("ab") as file:
        for body in (b"[" * 100_000, b"9" * 5000, b"[}", b"\xff"):
            file.write(xxhash.xxh3_64_hexdigest(body).encode() + b" " + body + b"\n")
    with open_staging(out, layout(), "plan") as staging:
        assert len(staging.finished) == 3


def test_closing_a_journal_twice_closes_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    close = os.close

    def interrupted(fd: int) -> None:
        close(fd)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            journal.close()
    journal.close()
