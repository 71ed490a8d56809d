"""A checkpoint built in a bucket: the bytes of a local one, resumed at any point, and nothing lost."""

from __future__ import annotations

import errno
import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.bucket_help import MemoryBucket, tag
from tests.output_help import BY_NAME, NAMES, build, data, layout, open_staging, put, tree
from weightsmith._base.errors import Busy, CannotResume, Corrupt, NoSpace, OutputExists, StoreError
from weightsmith._base.files import Extent
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._files.containers import make_layout
from weightsmith._files.remote.folder import RemoteFile
from weightsmith._outputs.bucket import lock, parts, uploads
from weightsmith._outputs.bucket.client import md5_of
from weightsmith._outputs.bucket.journal import read_state
from weightsmith._outputs.bucket.prefix import Prefix
from weightsmith._outputs.bucket.unfinished import check_free, find_uploads
from weightsmith._outputs.checksum import combine, grain_bytes, hash_grains
from weightsmith._outputs.places import verify
from weightsmith._outputs.staging import Staging
from weightsmith._plans import Product
from weightsmith.abc.output import Finished

OUT = Prefix("s3", "bkt", "models/out")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 200)
    monkeypatch.setattr(uploads, "SAVE_SECONDS", -1.0)  # after every group


def open_out(plan: str = "plan", *, resume: bool = True, overwrite: bool = False, reads: tuple[str, ...] = ()) -> Staging:
    facts = {"seed": plan}
    return open_staging(OUT, layout(), plan, facts=facts, resume=resume, overwrite=overwrite, reads=reads)


def build_out(plan: str = "plan", seed: int = 0, *, overwrite: bool = False, names: tuple[str, ...] = NAMES) -> None:
    with open_out(plan, overwrite=overwrite) as staging:
        put(staging, names, seed=seed)  # type: ignore[arg-type]
        staging.add_file("config.json", b'{"model_type": "tiny"}')
        staging.publish({"recipe": "none"})


def put_some() -> None:
    """An interrupted run: all but the last tensor."""
    with open_out() as staging:
        put(staging, NAMES[:4])  # type: ignore[arg-type]
        staging.backend.weights.drain()


def finished(name: str, seed: int = 0) -> Finished:
    return Finished(combine(hash_grains(data(name, seed), grain_bytes(BY_NAME[name]))))


def test_the_objects_are_the_files_of_a_local_output(memory: MemoryBucket, tmp_path: Path) -> None:
    build_out()
    assert memory.contents("models/out") == tree(build(tmp_path / "out"))
    assert [*memory.contents("models")] == [f"out/{name}" for name in memory.contents("models/out")]  # no lock, no journal
    assert memory.pending == {}
    assert verify(str(OUT)).tensors == len(NAMES)


def test_bytes_in_any_order_from_many_threads(memory: MemoryBucket, tmp_path: Path) -> None:
    with open_out() as staging:
        pieces = [(name, start) for name in NAMES for start in range(0, BY_NAME[name].nbytes, 7)]
        np.random.default_rng(0).shuffle(pieces)

        def work(own: list[tuple[str, int]]) -> None:
            for name, start in own:
                staging.write(name, int(start), data(name)[int(start) : int(start) + 7])

        threads = [threading.Thread(target=work, args=(pieces[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in NAMES:
            staging.finish(name, finished(name))
        staging.add_file("config.json", b'{"model_type": "tiny"}')
        staging.publish({"recipe": "none"})
    assert memory.contents("models/out") == tree(build(tmp_path / "out"))


def test_parts_wait_in_the_folder_of_the_spool(memory: MemoryBucket, spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, plainly = [], tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **given: seen.append(given["dir"]) or plainly(**given))
    build_out()
    assert seen == [spool]


def test_files_appear_in_an_order_that_no_reader_takes_for_a_model(memory: MemoryBucket) -> None:
    seen: list[set[str]] = []
    memory.before = lambda call: seen.append(set(memory.contents("models/out")))
    build_out()
    weights = {shard.name for shard in layout().shards}
    for names in seen:
        assert not names & {"config.json", "model.safetensors.index.json"} or weights <= names
        assert "weightsmith.json" not in names or names == set(memory.contents("models/out"))


def test_an_interrupted_run_resumes_and_uploads_nothing_again(memory: MemoryBucket, tmp_path: Path) -> None:
    put_some()
    sent = memory.calls.count("upload")
    assert sent > 0
    with open_out() as staging:
        taken = staging.finished
        assert taken
        put(staging)  # type: ignore[arg-type]
        staging.add_file("config.json", b'{"model_type": "tiny"}')
        staging.publish({"recipe": "none"})
    whole = sum(len(parts) for parts in staging_parts())
    assert memory.calls.count("upload") == whole
    assert memory.contents("models/out") == tree(build(tmp_path / "out"))


def staging_parts() -> Iterator[list[object]]:
    for group in parts.cut(layout()):
        yield [*group.parts]


def test_parts_without_a_journal_are_compared_and_not_uploaded_again(memory: MemoryBucket, tmp_path: Path) -> None:
    """Killed before the journal was written again: the store still lists the parts."""
    with open_out() as staging:
        journal = memory.objects[f"{OUT.staging}/journal"]
        put(staging)  # type: ignore[arg-type]
        staging.backend.weights.drain()
    memory.objects[f"{OUT.staging}/journal"] = journal
    sent = memory.calls.count("upload")
    with open_out() as staging:
        assert not staging.finished
        put(staging)  # type: ignore[arg-type]
        staging.add_file("config.json", b'{"model_type": "tiny"}')
        staging.publish({"recipe": "none"})
        assert memory.calls.count("upload") == sent
    assert memory.contents("models/out") == tree(build(tmp_path / "out"))


def test_a_part_that_is_computed_differently_is_uploaded_again(memory: MemoryBucket, tmp_path: Path) -> None:
    with open_out() as staging:
        journal = memory.objects[f"{OUT.staging}/journal"]
        put(staging, seed=1)  # type: ignore[arg-type]
        staging.backend.weights.drain()
    memory.objects[f"{OUT.staging}/journal"] = journal
    build_out()
    assert memory.contents("models/out") == tree(build(tmp_path / "out"))


@pytest.mark.parametrize("before", [0, 1])
def test_a_finished_tensor_that_is_computed_again_takes_its_group_with_it(
    memory: MemoryBucket, tmp_path: Path, before: int
) -> None:
    with open_out() as staging:
        put(staging, seed=before)  # type: ignore[arg-type]
        staging.backend.weights.drain()
    sent = memory.calls.count("upload")
    with open_out() as staging:
        with pytest.raises(ValueError, match="head is finished: `redo` comes first"):
            staging.write("head", 0, data("head"))
        for group in parts.cut(layout()):
            was = staging.finished
            staging.redo(group.tensors[:1])
            assert staging.finished == was - {*group.tensors}
        put(staging)  # type: ignore[arg-type]
        staging.add_file("config.json", b'{"model_type": "tiny"}')
        staging.publish({"recipe": "none"})
    assert (memory.calls.count("upload") > sent) == (before == 1), "the same bytes are not uploaded again"
    assert memory.contents("models/out") == tree(build(tmp_path / "out"))


@pytest.mark.parametrize("part_bytes", [(1500, 2000), (1500, 2100), (1000, 2000), (2000, 1000)])
def test_parts_of_another_cut_are_not_taken_for_those_of_this_one(
    memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch, part_bytes: tuple[int, int]
) -> None:
    """The first two cuts give parts 4 and 5 the same size, and the bytes of other tensors."""
    specs = [TensorSpec(name, DTYPES["U8"], (nbytes,)) for name, nbytes in (("a", 1504), ("b", 2000), ("c", 2000), ("d", 2000))]
    whole = make_layout(specs, 10**9)
    for size in part_bytes:
        monkeypatch.setattr(parts, "PART_BYTES", size)
        with open_staging(OUT, whole, "plan", facts={}, resume=True, overwrite=False, reads=()) as staging:
            for spec in specs:
                if spec.name not in staging.finished:
                    raw = np.frombuffer(spec.name.encode() * spec.nbytes, np.uint8)
                    staging.write(spec.name, 0, raw)
                    staging.finish(spec.name, Finished(combine(hash_grains(raw, grain_bytes(spec)))))
            staging.backend.weights.drain()
            if size == part_bytes[-1]:
                staging.publish({})
    assert verify(str(OUT)).tensors == len(specs)


class Killed(BaseException):
    """Nothing is cleaned up after it."""


def test_parts_of_one_size_are_resumed_by_their_md5(memory: MemoryBucket, tmp_path: Path) -> None:
    memory.equal_parts = True
    put_some()
    sent = memory.calls.count("upload")
    assert sent > 0
    build_out()
    assert memory.contents("models/out") == tree(build(tmp_path / "out"))
    assert memory.calls.count("upload") == sum(len(group.parts) for group in parts.cut(layout(), equal=True)) > sent


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_before_any_request_the_next_run_completes_it(memory: MemoryBucket, tmp_path: Path, overwrite: bool) -> None:
    wanted = tree(build(tmp_path / "out"))
    for number in range(1, 200):
        memory.objects.clear()
        memory.pending.clear()
        memory.before = lambda call: None
        if overwrite:
            build_out("old", seed=5)
        left = number
        dead = threading.Event()

        def kill(call: str, dead: threading.Event = dead) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                dead.set()
                raise Killed

        memory.before = kill
        try:
            build_out(overwrite=overwrite)
        except (Killed, StoreError, ValueError):
            pass
        memory.before = lambda call: None
        if not dead.is_set():
            break
        names = set(memory.contents("models/out"))
        if "config.json" in names and not overwrite:
            assert {shard.name for shard in layout().shards} <= names
        memory.objects.pop(f"{OUT.staging}/lock", None)  # as it is after a while
        if memory.contents("models/out") != wanted or f"{OUT.staging}/journal" in memory.objects:
            build_out(overwrite=overwrite)
        assert memory.contents("models/out") == wanted
        assert [key for key in memory.objects if "staging" in key] == []
    else:
        pytest.fail("it never ended")
    assert number > 20


def test_two_writers_the_second_is_told_who_builds_it(memory: MemoryBucket) -> None:
    with open_out() as first:
        put(first, NAMES[:2])  # type: ignore[arg-type]
        with pytest.raises(Busy, match=r"process \d+ on .* is building this output") as found:
            open_out()
        assert "run again in 120 s" in str(found.value)
        put(first)  # type: ignore[arg-type]
        first.publish({})


def test_a_lock_that_is_not_renewed_is_taken_over_and_its_owner_stops(
    memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_out()
    put(first, NAMES[:2])  # type: ignore[arg-type]
    memory.now += lock.STALE_SECONDS + 1
    with open_out() as second:
        put(second)  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="another process has taken over this output"):
            first.backend.lock.renew()
        with pytest.raises(StoreError, match="another process has taken over"):
            first.write("head", 0, data("head"))
        first.close()
        assert f"{OUT.staging}/lock" in memory.objects  # the second one's
        second.publish({})


@pytest.mark.slow
def test_an_owner_that_has_lost_its_lock_changes_no_more_of_the_output(memory: MemoryBucket) -> None:
    """Lost at any request of `publish` up to that for the manifest: the next change is not made."""
    key = f"{OUT.staging}/lock"
    for number in range(100):
        memory.before = lambda call: None
        memory.objects.clear()
        with open_staging(OUT, layout(10_000), "old", facts={}, resume=True, overwrite=False, reads=()) as staging:
            put(staging)  # type: ignore[arg-type]
            staging.add_file("old.json", b"{}")
            staging.add_file("config.json", b"{}")
            staging.publish({})
        staging = open_out(overwrite=True)
        put(staging, seed=1)  # type: ignore[arg-type]
        staging.backend.weights.drain()
        for name in ("vocab.json", "config.json"):
            staging.add_file(name, b"{}")
        after: list[str] = []
        left = number

        def lose(call: str, lock: lock.Lock = staging.backend.lock, after: list[str] = after) -> None:
            nonlocal left
            left -= 1
            if left < -1:
                after.append(call)
            elif left == -1:
                memory.objects[key] = b"{}", {}, memory.now
                lock._lost = True

        memory.before = lose
        said = [*staging.warnings]
        try:
            staging.publish({})
        except StoreError as error:
            said.append(error.finding)
        assert "another process has taken over" in [*said, *staging.warnings][-1].what
        if {"weightsmith.json", "vocab.json"} <= memory.contents("models/out").keys():
            break
        staging.close()
        assert {*after} <= {"names", "read", "read_range", "head", "replace"}
        assert memory.objects[key][0] == b"{}"
    staging.close()
    assert number > 12


def test_a_renewal_whose_answer_was_lost_is_no_loss_of_the_lock(memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    own = lock.Lock(memory, "x/lock", "out")  # type: ignore[arg-type]
    own.take()
    replace = MemoryBucket.replace

    def lost(self: MemoryBucket, key: str, data: bytes, etag: str) -> None:
        replace(self, key, data, etag)
        raise StoreError("no answer")

    for _ in range(2):
        monkeypatch.setattr(MemoryBucket, "replace", lost)
        with pytest.raises(StoreError, match="no answer"):
            own.renew()
        monkeypatch.setattr(MemoryBucket, "replace", replace)
        own.renew()
    monkeypatch.setattr(MemoryBucket, "replace", lost)
    with pytest.raises(StoreError, match="no answer"):
        own.renew()
    own.release()
    assert memory.objects == {}


def test_the_lock_of_a_process_of_this_machine_that_is_dead_is_taken_over_at_once(
    memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not lock._this_process():
        pytest.skip("the system does not say which processes there are")
    machine = lock._this_process().rpartition(" ")[0]
    monkeypatch.setattr(lock, "_this_process", lambda: f"{machine} 999999999@1")
    first = open_out()
    monkeypatch.undo()
    monkeypatch.setattr("weightsmith._outputs.bucket.backend.open_bucket", MemoryBucket.open)
    open_out().close()
    first.close()


def test_a_renewal_that_comes_too_late_stops_the_run(memory: MemoryBucket) -> None:
    staging = open_out()
    staging.backend.lock._renewed -= lock.STALE_SECONDS
    with pytest.raises(StoreError, match="could not be renewed in time"):
        staging.write("head", 0, data("head"))
    staging.close()


def test_a_store_without_conditional_writes_is_used_with_a_warning(memory: MemoryBucket) -> None:
    memory.conditions = False
    with open_out() as staging:
        assert "no conditional writes" in staging.warnings[0].what
        put(staging)  # type: ignore[arg-type]
        staging.publish({})
    assert [key for key in memory.objects if "staging" in key] == []


def test_a_store_that_replaces_without_a_condition_is_used_with_a_warning(memory: MemoryBucket) -> None:
    memory.replaces = False
    with open_out() as staging:
        assert "replaces objects without a condition" in staging.warnings[0].what
        staging.backend.lock.renew()
        other = b'{"owner": "process 7 on other", "id": "00"}'
        memory.put(f"{OUT.staging}/lock", other)
        with pytest.raises(StoreError, match="another process has taken over"):
            staging.backend.lock.renew()
    assert memory.objects[f"{OUT.staging}/lock"][0] == other
    memory.now += lock.STALE_SECONDS + 1
    with open_out() as staging:
        put(staging)  # type: ignore[arg-type]
        staging.publish({})
    assert [key for key in memory.objects if "staging" in key] == []


def test_work_of_another_plan_is_not_mixed_in_and_can_be_discarded(memory: MemoryBucket) -> None:
    put_some()
    with pytest.raises(CannotResume, match="does not match this run") as found:
        open_out("other")
    assert "seed: plan -> other" in str(found.value)
    with open_out("other", resume=False) as staging:
        assert not staging.finished
        assert len(memory.pending) == len(layout().shards)
        put(staging)  # type: ignore[arg-type]
        staging.publish({})


@pytest.mark.parametrize(("old", "new"), [(10_000, 600), (600, 10_000), (600, 300)])
def test_while_an_output_is_replaced_a_new_config_is_never_beside_old_weights(memory: MemoryBucket, old: int, new: int) -> None:
    def build(plan: str, max_shard_bytes: int) -> None:
        shards = layout(max_shard_bytes)
        with open_staging(OUT, shards, plan, facts={}, resume=True, overwrite=plan == "new", reads=()) as staging:
            put(staging, seed=len(plan) + max_shard_bytes)  # type: ignore[arg-type]
            staging.add_file("config.json", plan.encode())
            staging.publish({})

    build("old", old)
    before = memory.contents("models/out")
    seen = 0

    def look(call: str) -> None:
        nonlocal seen
        found = memory.contents("models/out")
        if found.get("config.json", b"old") != b"old" or found.get("model.safetensors.index.json", b"") not in (
            b"",
            before.get("model.safetensors.index.json"),
        ):
            seen += 1
            assert [name for name in found if name.endswith(".safetensors") and found[name] == before.get(name)] == []

    memory.before = look
    build("new", new)
    assert seen


@pytest.mark.parametrize("count", [1, 2])
def test_half_published_work_may_be_discarded_by_the_next_plan(memory: MemoryBucket, tmp_path: Path, count: int) -> None:
    """What it has written, and what it was about to replace, is replaced without --overwrite."""

    def kill(call: str) -> None:
        if memory.calls.count("complete") == count:
            raise Killed

    memory.before = kill
    with pytest.raises(Killed):
        build_out("old", seed=5)
    memory.before = lambda call: None
    memory.delete(f"{OUT.staging}/lock")
    with pytest.raises(CannotResume):
        open_out()
    with open_out(resume=False) as staging:
        put(staging)  # type: ignore[arg-type]
        staging.add_file("config.json", b'{"model_type": "tiny"}')
        staging.publish({"recipe": "none"})
    assert memory.contents("models/out") == tree(build(tmp_path / "out"))
    assert memory.pending == {}


def test_a_run_that_may_not_write_there_discards_nothing(memory: MemoryBucket) -> None:
    put_some()
    memory.put(f"{OUT.prefix}/note.txt", b"mine")
    before, uploaded = memory.objects[f"{OUT.staging}/journal"], dict(memory.pending)
    with pytest.raises(OutputExists) as found:
        open_out(resume=False)
    assert found.value.state == "Nothing was written."
    assert (memory.objects[f"{OUT.staging}/journal"], memory.pending) == (before, uploaded)


@pytest.mark.parametrize("what", ["a note", "no manifest", "a damaged manifest"])
def test_what_no_manifest_of_ours_lists_is_never_replaced(memory: MemoryBucket, what: str) -> None:
    build_out("old", seed=5)
    manifest = f"{OUT.prefix}/weightsmith.json"
    if what == "a note":
        memory.put(f"{OUT.prefix}/sub/note.txt", b"mine")
    elif what == "no manifest":
        memory.delete(manifest)
    else:
        memory.put(manifest, memory.objects[manifest][0][:-9])
    before = dict(memory.objects)
    for attempt in (lambda: build_out(overwrite=True), lambda: check_free(OUT, overwrite=True, reads=())):
        with pytest.raises(OutputExists, match="will not be overwritten"):
            attempt()
    assert memory.objects == before


@pytest.mark.parametrize(
    "read",
    [
        "s3://bkt/models/out",
        "s3://bkt/models/out/sub",
        "base+s3://bkt/models",
        "s3://bkt/models/out/",
        "S3://bkt/models/out",
        "s3://bkt/models/out/a+b",
    ],
)
def test_what_the_run_reads_is_never_replaced(memory: MemoryBucket, read: str) -> None:
    build_out("old", seed=5)
    with pytest.raises(StoreError, match="the run reads"):
        open_out(overwrite=True, reads=("./a", read))
    open_out(overwrite=True, reads=("s3://bkt/models/other", "s3://bkt2/models/out")).close()


def test_a_folder_with_a_plus_in_its_name_is_not_replaced_either(memory: MemoryBucket) -> None:
    memory.put("models/a+b/config.json", b"{}")
    with pytest.raises(StoreError, match="the run reads"):
        check_free(Prefix("s3", "bkt", "models/a+b"), overwrite=True, reads=("s3://bkt/models/a+b",))


def test_an_object_that_appears_meanwhile_is_not_written_over(memory: MemoryBucket) -> None:
    with open_out() as staging:
        put(staging)  # type: ignore[arg-type]
        memory.put(f"{OUT.prefix}/config.json", b"theirs")
        with pytest.raises(OutputExists) as found:
            staging.publish({})
        assert "Everything is uploaded" in str(found.value)
    assert memory.contents("models/out") == {"config.json": b"theirs"}


def test_an_upload_that_someone_has_discarded_is_begun_again(memory: MemoryBucket, tmp_path: Path) -> None:
    put_some()
    memory.pending.clear()
    build_out()
    assert memory.contents("models/out") == tree(build(tmp_path / "out"))


def test_a_failed_upload_is_one_error_and_what_is_uploaded_stays(memory: MemoryBucket, tmp_path: Path) -> None:
    def fail(call: str) -> None:
        if call == "upload" and memory.calls.count("upload") == 2:
            raise StoreError("the store kept answering SlowDown (503) to UploadPart")

    memory.before = fail
    with pytest.raises(StoreError, match="SlowDown") as found:
        build_out()
    assert "Uploaded parts are kept at s3://bkt/models/out; run again to resume." in str(found.value)
    memory.before = lambda call: None
    build_out()
    assert memory.contents("models/out") == tree(build(tmp_path / "out"))


def test_unfinished_work_is_listed_and_discarded(memory: MemoryBucket) -> None:
    with open_out() as staging:
        put(staging, NAMES[:4])  # type: ignore[arg-type]
        staging.backend.weights._pool.shutdown(wait=True)
        (found,) = find_uploads(OUT)
        assert found.reason == "a process is working on it"
        with pytest.raises(Busy):
            found.remove()
    for where in (OUT, Prefix("s3", "bkt", "models")):
        (found,) = find_uploads(where)
        assert (found.out, found.reason) == (OUT, "")
        assert found.tensors > 0
        assert found.nbytes > 0
    found.remove()
    assert (memory.objects, memory.pending) == ({}, {})


def test_work_that_is_half_published_is_not_discarded(memory: MemoryBucket) -> None:
    def kill(call: str) -> None:
        if call == "complete" and "complete" in memory.calls:
            raise Killed

    memory.before = kill
    with pytest.raises(Killed):
        build_out()
    memory.before = lambda call: None
    (found,) = find_uploads(OUT)
    assert "the same command completes it" in found.reason
    with pytest.raises(StoreError, match="not removed"):
        found.remove()
    build_out()
    assert verify(str(OUT)).tensors == len(NAMES)


def test_uploads_of_others_to_the_same_keys_are_not_aborted(memory: MemoryBucket) -> None:
    """Nor those without parts: a store does not say whose they are."""
    key = OUT.key(layout().shards[0].name)
    memory.begin(key, "")
    memory.upload(key, memory.begin(key, ""), 1, b"x", md5_of(b"x"))
    others = set(memory.pending)
    put_some()
    (left,) = find_uploads(OUT)
    left.remove()
    assert memory.pending.keys() == others
    put_some()
    with open_out("other", resume=False) as staging:
        put(staging)  # type: ignore[arg-type]
        staging.publish({})
    assert memory.pending.keys() == others


# objects of other programs below the staging prefix


@pytest.mark.parametrize("text", [b"mine", b"", b"{}", b'{"id": "x", "owner": "terraform"}', b"[1, 2]\n"])
@pytest.mark.parametrize("name", ["lock", "journal"])
@pytest.mark.parametrize("conditions", [True, False])
def test_a_lock_or_a_journal_of_another_program_is_never_touched(
    memory: MemoryBucket, name: str, text: bytes, conditions: bool
) -> None:
    memory.conditions = conditions
    key = f"{OUT.staging}/{name}"
    memory.put(key, text)
    memory.now += 10 * lock.STALE_SECONDS
    for resume in (True, False):
        with pytest.raises(StoreError, match="weightsmith did not write it") as caught:
            open_out(resume=resume, overwrite=True)
        assert key in str(caught.value)
        assert "Nothing was written." in str(caught.value)
    (found,) = find_uploads(OUT)
    assert "weightsmith did not write it" in found.reason
    with pytest.raises(StoreError, match="weightsmith did not write it"):
        found.remove()
    assert memory.contents(OUT.staging) == {name: text}


def test_parts_and_products_of_another_program_are_left_alone(memory: MemoryBucket) -> None:
    foreign = {"parts/journal-1-of-2": b"mine", "parts/notes": b"", "products/thesis.txt": b"years of work"}
    for name, text in foreign.items():
        memory.put(f"{OUT.staging}/{name}", text)
    build_out()
    assert memory.contents(OUT.staging) == foreign
    for name in memory.contents(OUT.prefix):
        memory.delete(OUT.key(name))
    put_some()
    (left,) = find_uploads(OUT)
    left.remove()
    assert memory.contents(OUT.staging) == foreign


def test_a_part_does_not_write_over_the_journal_of_another_program(memory: MemoryBucket) -> None:
    from weightsmith._outputs.bucket.products import put_product

    with open_out() as staging:
        memory.put(f"{OUT.staging}/parts/journal", b"mine")
        with pytest.raises(StoreError, match="weightsmith did not write it"), staging.shared():
            pass
    assert memory.objects[f"{OUT.staging}/parts/journal"][0] == b"mine"
    put_product(memory, "p", "router", [np.arange(3)], "token")
    put_product(memory, "p", "router", [np.arange(4)], "token")
    (key,) = memory.contents("p")
    memory.put(f"p/{key}", b"mine")
    with pytest.raises(StoreError, match="weightsmith did not write it"):
        put_product(memory, "p", "router", [np.arange(3)], "token")
    assert memory.contents("p") == {key: b"mine"}


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors"])
def test_what_another_program_wrote_while_a_publish_was_interrupted_is_kept(memory: MemoryBucket, name: str) -> None:
    def stop(call: str) -> None:
        if call == "complete":
            raise StoreError("cut")

    memory.before = stop
    with pytest.raises(StoreError, match="cut"):
        build_out()
    memory.before = lambda call: None
    memory.put(OUT.key(name), b"theirs")
    for plan in ("plan", "other"):
        with pytest.raises(StoreError, match=r"already exists|will not be overwritten") as caught:
            open_out(plan, resume=plan == "plan", overwrite=plan == "other")
        assert name in str(caught.value)
    assert memory.objects[OUT.key(name)][0] == b"theirs"


@pytest.mark.parametrize("change", ["edited", "of another size", "another header", "no manifest"])
def test_an_output_that_was_changed_is_not_replaced(memory: MemoryBucket, change: str) -> None:
    build_out()
    weights = OUT.key(layout().shards[0].name)
    data = memory.objects[weights][0]
    if change == "edited":
        memory.put(OUT.key("config.json"), b'{"model_type": "TINY"}')
    elif change == "of another size":
        memory.put(weights, data + b"x")
    elif change == "another header":
        memory.put(weights, data[:8] + data[8:100].swapcase() + data[100:])
    else:
        memory.delete(OUT.key("weightsmith.json"))
    before = memory.contents(OUT.prefix)
    why = "will not be overwritten: (files in it were changed|weightsmith did not make it)"
    for check in (lambda: open_out("new", overwrite=True), lambda: check_free(OUT, overwrite=True, reads=[])):
        with pytest.raises(OutputExists, match=why):
            check()
    assert memory.contents(OUT.prefix) == before


class Ranges:
    """An object, as `remote.retries.Ranges` names it."""

    def __init__(self, where: str, data: bytes) -> None:
        self.where, self.nbytes, self.version = where, len(data), tag(data)


@pytest.mark.parametrize("source", ["as it is", "changed", "gone", "other bytes", "not in a store"])
def test_parts_that_an_object_has_are_copied_in_the_store_or_uploaded(
    memory: MemoryBucket, tmp_path: Path, source: str
) -> None:
    """Whatever the object holds by then, the bytes are those that were written."""
    local = tree(build(tmp_path / "out"))
    whole = b"before" + b"".join(data(name).tobytes() for name in ("embed", "head"))
    memory.put("in/model", whole)
    file = RemoteFile(Ranges("https://bkt/in/model" if "store" in source else "s3://bkt/in/model", whole))  # type: ignore[arg-type]
    if source == "other bytes":  # what the source says is not true
        memory.put("in/model", whole[::-1])
        file.ranges.version = tag(whole[::-1])  # type: ignore[misc]
    elif source == "changed":
        memory.put("in/model", whole[::-1])
    elif source == "gone":
        memory.delete("in/model")
    with open_out() as staging:
        for name, at in (("embed", 6), ("head", 6 + BY_NAME["embed"].nbytes)):
            for start in range(0, BY_NAME[name].nbytes, 96):
                piece = data(name)[start : start + 96]
                staging.equal(name, start, Extent(file, at + start, len(piece)))
                staging.write(name, start, piece)
            staging.finish(name, finished(name))
        put(staging)  # type: ignore[arg-type]
        staging.add_file("config.json", b'{"model_type": "tiny"}')
        staging.publish({"recipe": "none"})
    assert memory.contents("models/out") == local
    whole_parts = sum(len(group.parts) for group in parts.cut(layout()))
    copies, sent = memory.calls.count("copy"), memory.calls.count("upload")
    assert (copies > 0) == (source != "not in a store")
    assert sent == whole_parts - (copies if source == "as it is" else 0)


def test_the_products_of_outputs_of_the_same_name_are_kept_apart(
    memory: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = {"facts": {}, "resume": True, "overwrite": False, "reads": ()}
    with (
        open_staging(Prefix("s3", "bkt", "x/out"), layout(), "plan", **chosen) as one,  # type: ignore[arg-type]
        open_staging(Prefix("s3", "bkt", "y/out"), layout(), "plan", **chosen) as other,  # type: ignore[arg-type]
    ):
        assert one.backend.local.folder != other.backend.local.folder


def test_a_full_disk_is_that_of_the_products(memory: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsmith._outputs.journal import Journal

    def full(journal: Journal, line: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(tmp_path)
    product = Product("p", "magnitudes", (TensorSpec("p", DTYPES["F32"], (2,)),), {})
    with open_out() as staging:
        staging.backend.local  # noqa: B018  opens it
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "_write", full)
            with pytest.raises(NoSpace) as caught:
                staging.keep(product, [np.zeros(2, np.float32)])
    assert caught.value.finding.where == str(tmp_path)
    assert "needed     0 bytes" in caught.value.finding.details, "tensors are not kept there"


def test_discarded_work_leaves_nothing(memory: MemoryBucket) -> None:
    with open_out() as staging:
        put(staging, NAMES[:3])  # type: ignore[arg-type]
        staging.discard()
        assert not staging.is_open
    assert (memory.objects, memory.pending) == ({}, {})


@pytest.mark.parametrize("change", ["tensor", "header", "file", "missing", "stray"])
def test_verify_names_what_differs(memory: MemoryBucket, change: str) -> None:
    build_out()
    shard = layout().shards[0]
    key = f"{OUT.prefix}/{shard.name if change in ('tensor', 'header', 'missing') else 'config.json'}"
    whole = bytearray(memory.objects[key][0])
    if change == "missing":
        memory.delete(key)
    elif change == "stray":
        memory.put(f"{OUT.prefix}/model-more.safetensors", b"")
    else:
        whole[9 if change == "header" else -1] ^= 1
        memory.put(key, bytes(whole))
    with pytest.raises(Corrupt) as found:
        verify(str(OUT))
    wanted = {"tensor": "tensor embed: differs", "header": "its header differs", "file": "config.json: differs"}
    wanted |= {"missing": f"{shard.name}: is missing", "stray": "model-more.safetensors: is not of this checkpoint"}
    assert wanted[change] in str(found.value)


@pytest.mark.slow
def test_a_journal_of_unknown_origin_is_one_error_or_ignored(memory: MemoryBucket, tmp_path: Path) -> None:
    put_some()
    key = f"{OUT.staging}/journal"
    whole = memory.objects[key][0]
    rng, wanted = np.random.default_rng(0), tree(build(tmp_path / "out"))
    for _ in range(30):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(damaged), 4):
            damaged[place] = rng.integers(0, 256)
        memory.put(key, bytes(damaged[: rng.integers(1, len(damaged))]))
        try:
            with open_out() as staging:
                put(staging)  # type: ignore[arg-type]
                staging.add_file("config.json", b'{"model_type": "tiny"}')
                staging.publish({"recipe": "none"})
        except StoreError:
            continue
        assert memory.contents("models/out") == wanted
        memory.objects.clear()


def test_padding_between_tensors_is_zeros(memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsmith._models.formats.gguf.layout import make_layout as make_gguf_layout

    specs = [TensorSpec(f"t{i}", DTYPES["F32"], (33,)) for i in range(9)]
    padded = make_gguf_layout(specs, 1 << 40, b"header")
    for seed in (1, 2):  # slots are used again
        with open_staging(OUT, padded, str(seed), facts={}, resume=True, overwrite=True, reads=()) as staging:
            for spec in specs:
                staging.write(spec.name, 0, np.full(spec.nbytes, 255, np.uint8))
                staging.finish(spec.name, Finished(combine(hash_grains(b"\xff" * spec.nbytes, grain_bytes(spec)))))
            staging.publish({})
    (shard,) = padded.shards
    wanted = bytearray(shard.nbytes)
    wanted[: len(shard.header)] = shard.header
    for place in padded.places.values():
        wanted[place.offset : place.offset + place.nbytes] = b"\xff" * place.nbytes
    assert memory.contents("models/out")[shard.name] == bytes(wanted)
    assert json.loads(memory.contents("models/out")["weightsmith.json"])["plan"] == "2"


def test_an_output_that_is_complete_but_for_its_journal_is_replaced_only_with_overwrite(memory: MemoryBucket) -> None:
    """Its run was killed after the manifest was written."""

    def kill(call: str) -> None:
        if call == "delete" and f"{OUT.prefix}/weightsmith.json" in memory.objects:
            raise Killed

    memory.before = kill
    with pytest.raises(Killed):
        build_out("old", seed=5)
    memory.before = lambda call: None
    memory.delete(f"{OUT.staging}/lock")
    before = memory.contents("models/out")
    assert verify(str(OUT)).tensors == len(NAMES)
    with pytest.raises(OutputExists, match="the output already exists"):
        open_out(resume=False)
    assert memory.contents("models/out") == before


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc", "a/../../b", "a\0b"])
def test_a_journal_that_names_what_is_not_in_the_output_is_not_followed(memory: MemoryBucket, name: str) -> None:
    """Some clients resolve `..` in the path of a request: it would be another object that is deleted."""
    with open_out() as staging:
        put(staging)  # type: ignore[arg-type]
        staging.backend.weights.drain()
        staging.backend.state.publishing = (), (name,)
        staging.backend.state.uploads[name] = "u"
    found = read_state(memory, f"{OUT.staging}/journal")
    assert found is not None
    assert name not in found.state.uploads
    assert found.state.publishing is None


def test_an_output_whose_journal_cannot_be_deleted_is_complete_and_a_warning_says_so(
    memory: MemoryBucket, tmp_path: Path
) -> None:
    def refuse(call: str) -> None:
        if call == "delete" and f"{OUT.prefix}/weightsmith.json" in memory.objects:
            raise StoreError("the store refused delete: AccessDenied", where="s3://bkt")

    memory.before = refuse
    with open_out() as staging:
        put(staging)
        staging.add_file("config.json", b'{"model_type": "tiny"}')
        staging.publish({"recipe": "none"})
    (left,) = staging.warnings
    memory.before = lambda call: None
    assert "weightsmith clean s3://bkt/models/out" in left.fix
    assert "published and complete, but cleaning up failed: the store refused" in left.what
    assert memory.contents("models/out") == tree(build(tmp_path / "out"))
    memory.delete(f"{OUT.staging}/lock")
    (left,) = find_uploads(OUT)
    left.remove()
    assert [key for key in memory.objects if "staging" in key] == []
