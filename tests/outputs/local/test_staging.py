"""Building beside the final name, resuming, publishing, refusing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.output_help import NAMES, build, data, layout, open_staging, put, tree
from weightsmith._base.errors import Busy, CannotResume, OutputExists, StoreError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._files.containers import make_layout
from weightsmith._outputs import disk
from weightsmith._outputs.area import staged_plan, staging_folder
from weightsmith._outputs.locks import Locks
from weightsmith._outputs.places import verify
from weightsmith._outputs.staging import Staging
from weightsmith._outputs.weight_files import StagedFiles
from weightsmith._plans import Product
from weightsmith.abc.output import Finished

ZERO = "0" * 32


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


# publishing


def test_publishing_leaves_the_checkpoint_and_nothing_else(out: Path) -> None:
    assert build(out) == out
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    assert sorted(tree(out)) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "weightsmith.json",
    ]


def test_written_bytes_are_at_their_place(out: Path) -> None:
    build(out)
    files = tree(out)
    for name, place in layout().places.items():
        raw = files[layout().shards[place.shard].name]
        assert raw[place.offset : place.offset + place.nbytes] == data(name).tobytes()


def test_the_manifest_is_json_and_holds_what_the_caller_gave(out: Path) -> None:
    build(out)
    manifest = json.loads((out / "weightsmith.json").read_text())
    assert manifest["recipe"] == "none"
    assert manifest["plan"] == "plan"
    assert list(manifest["tensors"]) == [t.name for s in layout().shards for t in s.tensors]


def test_the_manifests_own_keys_cannot_be_given(out: Path) -> None:
    with open_staging(out, layout(), "plan") as staging:
        put(staging)
        with pytest.raises(StoreError, match="own keys cannot be given: tensors"):
            staging.publish({"tensors": {}})


def test_equal_work_makes_equal_bytes(tmp_path: Path) -> None:
    assert tree(build(tmp_path / "a")) == tree(build(tmp_path / "b"))


def test_an_unfinished_tensor_is_not_published(out: Path) -> None:
    with open_staging(out, layout(), "plan") as staging:
        put(staging, NAMES[1:])
        with pytest.raises(StoreError, match="tensor embed is not finished"):
            staging.publish({}, fsync=False)
    assert not out.exists()


def test_an_overwritten_header_or_a_wrong_size_is_not_published(out: Path) -> None:
    with open_staging(out, layout(), "plan") as staging:
        put(staging)
        fd, _ = staging.location("embed")
        os.pwrite(fd, b"x", 20)
        os.ftruncate(staging.location("head")[0], 7)
        with pytest.raises(StoreError) as caught:
            staging.publish({}, fsync=False)
    assert "header of model-00001-of-00002.safetensors was overwritten" in str(caught.value)
    assert "model-00002-of-00002.safetensors has 7 bytes" in str(caught.value)


def test_a_file_that_someone_else_put_into_the_staging_folder_is_not_published(out: Path) -> None:
    with open_staging(out, layout(), "plan") as staging:
        put(staging)
        (staging.folder / "content" / "model.safetensors").write_bytes(b"?")
        with pytest.raises(StoreError, match=r"not ours: model\.safetensors"):
            staging.publish({}, fsync=False)


@pytest.mark.parametrize("fsync", [True, False])
def test_an_empty_folder_at_the_final_name_is_fine(out: Path, fsync: bool) -> None:
    out.mkdir()
    with open_staging(out, layout(), "plan") as staging:
        put(staging)
        staging.publish({}, fsync=fsync)
    verify(out)


def test_a_folder_made_meanwhile_is_not_replaced_and_the_work_is_kept(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_staging(out, layout(), "plan") as staging:
        put(staging)
        monkeypatch.setattr("weightsmith._outputs.local.check_vacant", lambda *_, **__: None)  # lost the race
        out.mkdir()
        (out / "theirs").write_text("x")
        with pytest.raises(OutputExists, match="meanwhile"):
            staging.publish({}, fsync=False)
    assert tree(out) == {"theirs": b"x"}
    (out / "theirs").unlink()
    with open_staging(out, layout(), "plan") as staging:
        assert staging.finished == set(NAMES)
        staging.publish({}, fsync=False)
    verify(out)


# overwriting


def test_an_existing_output_is_refused_saying_what_is_there_and_both_ways_on(out: Path) -> None:
    build(out)
    before = tree(out)
    with pytest.raises(OutputExists) as caught:
        open_staging(out, layout(), "plan")
    for word in ("config.json", "another folder", "--overwrite", "Nothing was written."):
        assert word in str(caught.value)
    assert tree(out) == before
    assert not staging_folder(out).exists()


@pytest.mark.parametrize("can_exchange", [True, False])
def test_overwriting_replaces_the_whole_checkpoint(out: Path, can_exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    build(out)
    (out / "README.md").unlink(missing_ok=True)
    if not can_exchange:
        monkeypatch.setattr(disk, "exchange", lambda *_: False)
    build(out, "other", seed=1, overwrite=True)
    assert verify(out).plan == "other"
    assert "stale.safetensors" not in tree(out)
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_the_old_checkpoint_stands_until_the_new_one_is_published(out: Path) -> None:
    build(out)
    before = tree(out)
    with open_staging(out, layout(), "other", overwrite=True) as staging:
        put(staging, seed=1)
        assert tree(out) == before
    assert tree(out) == before


def make_project(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text('{"compilerOptions": {}}')
    (folder / "thesis.tex").write_text("years of work")


def make_clone(folder: Path) -> None:
    build(folder)
    (folder / ".git").mkdir()


def make_file(folder: Path) -> None:
    folder.write_text("a file")


@pytest.mark.parametrize(
    ("make", "words"),
    [(make_project, "it has no weightsmith.json"), (make_clone, ".git"), (make_file, "a file has this name")],
)
def test_only_a_checkpoint_is_overwritten(out: Path, make: Callable[[Path], None], words: str) -> None:
    make(out)
    before = tree(out.parent)
    with pytest.raises(OutputExists) as caught:
        open_staging(out, layout(), "plan", overwrite=True)
    assert words in str(caught.value)
    assert tree(out.parent) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/", "root of the file system"),
        ("~", "home folder"),
        (".", "current folder"),
        ("..", "it is, or contains, your home"),
        ("file/out", "is a file"),
        ("file/missing/out", "file is a file"),
        ("nowhere/out", "nowhere is a symbolic link to gone, which does not exist"),
        ("link", "symbolic link"),
        ("x" * 300, "too long"),
        ("", "not a path"),
        ("nul\0byte", "not a path"),
        ("/proc", "mount point"),
    ],
)
def test_odd_outputs_are_refused(
    tmp_path: Path, path: str, words: str, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    Path("file").write_text("x")
    Path("link").symlink_to(tmp_path)
    Path("nowhere").symlink_to("gone")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(StoreError) as caught:
        open_staging(path.replace("~", str(tmp_path / "home")), layout(), "plan", overwrite=overwrite)
    assert words in str(caught.value)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_folders_on_the_way_are_made_when_the_staging_begins_and_stay(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "today" / "out"
    with open_staging(out, layout(), "plan") as staging:
        assert out.parent.is_dir()
        put(staging, NAMES[:1])
        staging.discard()
    assert list(out.parent.iterdir()) == []
    assert build(out) == out
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_folders_on_the_way_are_made_by_nothing_but_staging(tmp_path: Path) -> None:
    assert staged_plan(tmp_path / "runs" / "out") == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_parent_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="may not write"):
        open_staging(tmp_path / "out", layout(), "plan")


# resuming


def test_finished_tensors_are_taken_up_and_the_result_is_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with open_staging(out, layout(), "plan") as staging:
        put(staging, NAMES[:3])
    with open_staging(out, layout(), "plan") as staging:
        assert staging.finished == set(NAMES[:3])
        put(staging)
        staging.add_file("config.json", b'{"model_type": "tiny"}')
        staging.publish({"recipe": "none"})
    assert tree(out) == tree(build(tmp_path / "whole"))


def test_an_exception_keeps_the_work_and_closes_the_files(out: Path) -> None:
    def interrupted() -> None:
        nonlocal staging
        with staging:
            put(staging, NAMES[:2])
            raise KeyboardInterrupt

    staging = open_staging(out, layout(), "plan")
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(ValueError, match="closed"):
        staging.write("head", 0, b"x")
    assert staged_plan(out) == "plan"


def test_a_tensor_whose_bytes_were_lost_is_made_again(out: Path) -> None:
    with open_staging(out, layout(), "plan") as staging:
        put(staging, NAMES[:3])
        fd, offset = staging.location("norm")
        os.pwrite(fd, b"\0" * 32, offset)  # a power loss: the journal reached the disk, the page did not
    with open_staging(out, layout(), "plan") as staging:
        assert staging.finished == {"embed", "scale"}


def test_a_weight_file_cut_short_is_made_again(out: Path) -> None:
    with open_staging(out, layout(), "plan") as staging:
        put(staging)
        os.ftruncate(staging.location("embed")[0], 4200)
    with open_staging(out, layout(), "plan") as staging:
        assert "embed" not in staging.finished
        put(staging)
        staging.publish({}, fsync=False)
    verify(out)


def test_a_weight_file_that_grew_is_cut_to_its_size(out: Path) -> None:
    with open_staging(out, layout(), "plan") as staging:
        put(staging)
        os.ftruncate(staging.location("embed")[0], 100_000)
    with open_staging(out, layout(), "plan") as staging:
        staging.publish({}, fsync=False)
    verify(out)


def test_progress_of_the_recheck_ends_at_the_total(out: Path) -> None:
    with open_staging(out, layout(), "plan") as staging:
        put(staging)
    seen: list[tuple[int, int]] = []
    with open_staging(out, layout(), "plan", progress=lambda done, total: seen.append((done, total))):
        pass
    assert seen[-1] == (1000, 1000)


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_torn_last_line_is_ignored_and_the_next_lines_are_whole(out: Path, cut: int) -> None:
    with open_staging(out, layout(), "plan") as staging:
        put(staging, NAMES[:2])
    journal = staging_folder(out) / "journal"
    raw = journal.read_bytes()
    journal.write_bytes(raw[:-cut])
    torn = cut > 1  # without its newline the line is still whole
    with open_staging(out, layout(), "plan") as staging:
        assert staging.finished == ({"embed"} if torn else {"embed", "norm"})
        put(staging, NAMES[2:3])
    with open_staging(out, layout(), "plan") as staging:
        assert staging.finished == ({"embed", "scale"} if torn else {"embed", "norm", "scale"})


@pytest.mark.parametrize("position", range(0, 300, 7))
def test_a_damaged_journal_never_vouches_for_wrong_bytes(out: Path, position: int) -> None:
    with open_staging(out, layout(), "plan") as staging:
        put(staging)
    journal = staging_folder(out) / "journal"
    raw = bytearray(journal.read_bytes())
    raw[position] ^= 1
    journal.write_bytes(raw)
    try:
        with open_staging(out, layout(), "plan") as staging:
            assert len(staging.finished) >= len(NAMES) - 2
    except CannotResume as error:  # the damage is in the first line
        assert "unreadable" in str(error)  # noqa: PT017


def test_work_of_another_plan_is_not_resumed_and_not_lost(out: Path) -> None:
    with open_staging(out, layout(), "first", facts={"t": "0.3", "files of b": "#1", "seed": "0"}) as staging:
        put(staging, NAMES[:2])
    before = tree(staging_folder(out))
    with pytest.raises(CannotResume) as caught:
        open_staging(out, layout(), "second", facts={"t": "0.4", "files of b": "#2", "seed": "0"})
    assert caught.value.finding.details == (
        "t: 0.3 -> 0.4",
        "files of b: changed",
        f"discarding it would lose: 2 of {len(NAMES)} tensors",
    )
    for word in ("does not match this run", "--no-resume", str(staging_folder(out))):
        assert word in str(caught.value)
    after = tree(staging_folder(out))
    assert {**after, "lock": b""} == {**before, "lock": b""}


def test_work_of_another_plan_that_finished_nothing_is_replaced(out: Path) -> None:
    with open_staging(out, layout(), "first") as staging:
        staging.add_file("stale.json", b"x")
    with open_staging(out, layout(), "second") as staging:
        assert staged_plan(out) == "second"
        put(staging)
        staging.publish({}, fsync=False)
    assert "stale.json" not in tree(out)


def test_what_a_killed_process_wrote_of_a_product_is_removed(out: Path) -> None:
    whole, cut = (Product(name, "thresholds", (TensorSpec(name, DTYPES["F32"], (5,)),), {}) for name in ("whole", "cut"))
    with open_staging(out, layout(), "plan") as staging:
        staging.keep(whole, [np.arange(5, dtype=np.float32)])
        assert staging.create(cut) is not None
    products = staging.folder / "products"
    assert len(list(products.iterdir())) == 2
    with open_staging(out, layout(), "plan", part="1-of-2") as staging:  # takes the folder alone for a moment
        assert len(list(products.iterdir())) == 1
        assert staging.create(cut) is not None
        with open_staging(out, layout(), "plan", part="2-of-2") as other:  # what another process writes stays
            assert len(list(products.iterdir())) == 2
            assert other.product(whole) is not None


def test_a_finished_product_of_another_plan_is_not_lost(out: Path) -> None:
    product = Product("rows", "test", (TensorSpec("rows", DTYPES["F32"], (2,)),), {})
    with open_staging(out, layout(), "first") as staging:
        staging.keep(product, {"rows": np.zeros(2, np.float32)})
    with pytest.raises(CannotResume, match="would lose: a computed product"):
        open_staging(out, layout(), "second")


def test_the_same_plan_with_another_layout_is_not_resumed(out: Path) -> None:
    with open_staging(out, layout(), "plan") as staging:
        put(staging, NAMES[:2])
    with pytest.raises(CannotResume, match="laid out otherwise"):
        open_staging(out, layout(10_000), "plan")


def test_no_resume_discards_earlier_work(out: Path) -> None:
    with open_staging(out, layout(), "first") as staging:
        put(staging)
        staging.add_file("notes/a.txt", b"x")
    with open_staging(out, layout(), "second", resume=False) as staging:
        assert staging.finished == set()
        assert not (staging.folder / "content" / "notes").exists()
        assert staged_plan(out) == "second"


def test_files_of_the_earlier_run_do_not_slip_into_the_output(out: Path) -> None:
    with open_staging(out, layout(), "plan") as staging:
        staging.add_file("sub/stale.py", b"x")
        staging.add_file("stale.json", b"x")
    with open_staging(out, layout(), "plan") as staging:
        put(staging)
        staging.publish({}, fsync=False)
    assert not any("stale" in name for name in tree(out))


def test_discard_removes_everything_but_the_final_folder(out: Path) -> None:
    build(out)
    before = tree(out)
    staging = open_staging(out, layout(), "plan", overwrite=True)
    put(staging)
    staging.discard()
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    assert tree(out) == before


# locking


@pytest.mark.long
def test_a_second_process_is_told_who_is_at_work(out: Path) -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from tests.output_help import layout, open_staging\n"
        "s = open_staging(sys.argv[1], layout(), 'plan'); print('ready', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(out), *sys.path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(StoreError, match=f"process {process.pid} on .* is building this output now"):
            open_staging(out, layout(), "plan", resume=False)
        process.stdin.close()
    open_staging(out, layout(), "plan").discard()


def test_a_process_that_helps_leaves_the_journals_of_others_alone_where_locks_are_not_shared(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_staging(out, layout(), "plan", names=()) as driver:
        with driver.shared(), open_staging(out, layout(), "plan", part="1-of-2", names=NAMES[:2], helping=True) as worker:
            put(worker, NAMES[:1])
            with monkeypatch.context() as other_machine:
                other_machine.setattr(disk, "lock", lambda fd, shared=False: True)
                with pytest.raises(StoreError, match="the locks of this folder are not shared between machines"):
                    open_staging(out, layout(), "plan", part="2-of-2", names=NAMES[2:], helping=True)
            put(worker, NAMES[1:2])
    with open_staging(out, layout(), "plan") as staging:
        assert staging.finished == set(NAMES[:2])


def test_a_process_that_helps_changes_nothing_after_its_driver_died(out: Path) -> None:
    with open_staging(out, layout(), "plan") as driver, suppress(KeyboardInterrupt), driver.shared():
        with open_staging(out, layout(), "plan", part="1-of-2", names=NAMES[:2], helping=True) as worker:
            put(worker, NAMES[:2])
        raise KeyboardInterrupt
    before = tree(staging_folder(out))
    with pytest.raises(StoreError, match="or the driver has ended"):
        open_staging(out, layout(), "plan", part="2-of-2", names=NAMES[2:], helping=True)
    assert tree(staging_folder(out)) == before


def test_headers_are_on_the_disk_before_others_are_let_in(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    sync, let_in = disk.sync_data, Locks.let_in
    monkeypatch.setattr(disk, "sync_data", lambda fd: (done.append(os.fstat(fd).st_ino), sync(fd)))
    monkeypatch.setattr(Locks, "let_in", lambda self: (done.append("let in"), let_in(self)))
    with open_staging(out, layout(), "plan") as staging, staging.shared():
        shards = [(staging.folder / "content" / shard.name).stat().st_ino for shard in staging.layout.shards]
    assert len(shards) > 1
    assert done[-len(shards) - 1 :] == [*shards, "let in"]


def test_two_stagings_in_one_process_exclude_each_other(out: Path) -> None:
    with open_staging(out, layout(), "plan"), pytest.raises(StoreError, match=f"process {os.getpid()}"):
        open_staging(out, layout(), "plan")
    open_staging(out, layout(), "plan").close()


# writing


def test_threads_write_and_finish_at_once(out: Path) -> None:
    count = 200
    from weightsmith._base.tensors import DTYPES, TensorSpec
    from weightsmith._outputs.checksum import combine, grain_bytes, hash_grains

    specs = [TensorSpec(f"t{i}", DTYPES["U8"], (50,)) for i in range(count)]
    with open_staging(out, make_layout(specs, 1000), "plan") as staging:

        def work(part: list[TensorSpec]) -> None:
            for spec in part:
                raw = spec.name.encode().ljust(50)
                staging.write(spec.name, 0, raw)
                staging.finish(spec.name, Finished(combine(hash_grains(raw, grain_bytes(spec)))))

        threads = [threading.Thread(target=work, args=(specs[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with open_staging(out, make_layout(specs, 1000), "plan") as staging:
        assert len(staging.finished) == count
        staging.publish({}, fsync=False)
    assert verify(out).tensors == count


# other files


def test_files_are_added_from_bytes_and_from_paths(out: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"tokens" * 1000)
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "blob")  # the Hub's cache is made of links
    with open_staging(out, layout(), "plan") as staging:
        put(staging)
        staging.add_file("tokenizer.json", tmp_path / "tokenizer.json")
        staging.add_file("1_Pooling/config.json", b"{}")
        staging.publish({}, fsync=False)
    assert tree(out)["tokenizer.json"] == b"tokens" * 1000
    assert not (out / "tokenizer.json").is_symlink()
    assert tree(out)["1_Pooling/config.json"] == b"{}"
    assert verify(out).files == 3


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/", "a\\b", "a\0b", "a\nb",
     "model.safetensors", "sub/x.safetensors", "model.safetensors.index.json", "weightsmith.json"],
)  # fmt: skip
def test_names_that_leave_the_folder_or_pass_for_weights_are_refused(out: Path, name: str) -> None:
    with open_staging(out, layout(), "plan") as staging, pytest.raises(StoreError, match="cannot be the name"):
        staging.add_file(name, b"x")


def test_a_link_in_the_staging_folder_is_not_followed(out: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("precious")
    with open_staging(out, layout(), "plan") as staging:
        (staging.folder / "content" / "sub").symlink_to(victim)
        (staging.folder / "content" / "config.json").symlink_to(victim / "file")
        with pytest.raises(StoreError, match="symbolic link"):
            staging.add_file("sub/file", b"gone")
        staging.add_file("config.json", b"{}")
    assert tree(victim) == {"file": b"precious"}


def test_a_staging_folder_that_is_a_link_is_refused(out: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    staging_folder(out).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"):
        open_staging(out, layout(), "plan")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_weight_file_that_is_a_link_is_replaced_and_not_followed(out: Path, tmp_path: Path) -> None:
    with open_staging(out, layout(), "plan") as staging:
        shard = staging.folder / "content" / layout().shards[0].name
    (tmp_path / "victim").write_text("precious")
    shard.unlink()
    shard.symlink_to(tmp_path / "victim")
    open_staging(out, layout(), "plan").close()
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_source_file_that_is_missing_is_named(out: Path, tmp_path: Path) -> None:
    with open_staging(out, layout(), "plan") as staging, pytest.raises(StoreError, match=r"gone\.json.*cannot be read"):
        staging.add_file("config.json", tmp_path / "gone.json")


# names of the output folder


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsmith._app.cli.work import interrupted
    from weightsmith._outputs.save import save_file, save_model

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    with open_staging("~/a", layout(), "plan") as staging:
        put(staging, NAMES[:1])
        assert str(staging.folder) in interrupted("~/a")
        put(staging)
        assert staged_plan("~/a") == "plan"
        assert staging.publish({}, fsync=False) == tmp_path / "home" / "a"
    assert save_model({}, "~/b", fsync=False).path == tmp_path / "home" / "b"
    assert save_file({}, "~/c.safetensors", fsync=False).path == tmp_path / "home" / "c.safetensors"
    assert verify("~/a").folder == tmp_path / "home" / "a"
    assert sorted(p.name for p in (tmp_path / "home").iterdir()) == ["a", "b", "c.safetensors"]
    assert not (tmp_path / "~").exists()


def test_a_machine_without_a_home_folder_is_fine(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def nobody(*_: object) -> None:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    build(out)


def test_a_name_that_is_not_text_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not UTF-8") as caught:
        open_staging(tmp_path / "out\udcff", layout(), "plan")
    str(caught.value).encode()
    assert list(tmp_path.iterdir()) == []


# Ctrl-C while the lock is released


def test_interrupted_at_any_line_of_letting_go(out: Path) -> None:
    import inspect

    letting_go = (Locks.close, Staging.close, Staging._close_files, StagedFiles.close)
    codes = {inspect.unwrap(f).__code__ for f in letting_go}
    count = stop_at = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code not in codes:
            return None
        if event == "line":
            count += 1
            if count == stop_at:
                raise KeyboardInterrupt
        return trace

    for attempt in range(1, 100):
        stop_at = attempt
        staging = open_staging(out, layout(), "plan")
        count = 0
        sys.settrace(trace)
        try:
            staging.close()
        except KeyboardInterrupt:
            sys.settrace(None)
            mine = os.open(out.parent, os.O_RDONLY)  # takes the number of what was closed
            staging.close()
            os.fstat(mine)
            os.close(mine)
        else:
            break
        finally:
            sys.settrace(None)
    assert stop_at > 5


def test_closing_twice_after_an_interrupted_close_is_fine(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = open_staging(out, layout(), "plan")
    close = os.close

    def interrupted(fd: int) -> None:
        close(fd)
        raise KeyboardInterrupt

    for _ in range(20):
        with monkeypatch.context() as patch:
            patch.setattr(os, "close", interrupted)
            try:
                staging.close()
                break
            except KeyboardInterrupt:
                pass
    staging.close()
    open_staging(out, layout(), "plan").discard()


@pytest.mark.slow
def test_parts_enter_a_folder_that_is_shared_and_no_other_run(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsmith._outputs.staging.ATTACH_SECONDS", 0.1)
    with open_staging(out, layout(), "plan") as staging:
        with pytest.raises(Busy):
            open_staging(out, layout(), "plan", part="1-of-2")
        with staging.shared():
            with open_staging(out, layout(), "plan", part="1-of-2"):
                pass
            with pytest.raises(Busy, match="is building this output now"):
                open_staging(out, layout(), "plan")
        with pytest.raises(Busy):
            open_staging(out, layout(), "plan", part="1-of-2")


def test_a_part_that_stays_keeps_the_folder_from_being_taken_back(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsmith._outputs.staging.ATTACH_SECONDS", 0.1)
    with open_staging(out, layout(), "plan") as staging, ExitStack() as stack:
        with pytest.raises(Busy, match="still doing a part of it"), staging.shared():
            stack.enter_context(open_staging(out, layout(), "plan", part="1-of-2"))


def test_a_folder_that_another_run_has_removed_is_not_taken_back(out: Path) -> None:
    with open_staging(out, layout(), "plan") as staging:
        for name in ("lock", "content"):
            with pytest.raises(Busy, match="another"), staging.shared():
                (staging.folder / name).rename(staging.folder / "gone")
            (staging.folder / "gone").rename(staging.folder / name)
