"""Parts of a plan that share nothing but a bucket, without a driver: the bytes of one process, whatever happens to them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests.bucket_help import MemoryBucket
from tests.execution.distributed.test_bucket import FP8, LINEAR, MODEL_WIDE, OUT, SHARD, STACK, TIES, alone
from tests.execution.distributed.threads import Died
from tests.outputs.bucket.conftest import memory, spool
from weightsmith._base.errors import Busy, CannotResume, NotFound, OutputExists, ParameterError, StoreError
from weightsmith._execution import run as execution_run
from weightsmith._outputs import bucket_parts, weight_files
from weightsmith._outputs.bucket import BucketTarget
from weightsmith._outputs.places import find_unfinished
from weightsmith._outputs.staging import Staging
from weightsmith._plans import Plan

pytestmark = pytest.mark.store

__all__ = ["memory", "spool"]

STAGING = "models/.out.weightsmith-staging"


@pytest.fixture
def here(linked: Path, tmp_path: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(recipe: Any = LINEAR, **options: Any) -> Plan:
    return weightsmith.plan(recipe, check_loading=False, **{"max_shard_bytes": SHARD, **options})


def run(plan: Plan, part: tuple[int, int] | None = None, machine: str = "", **options: Any) -> weightsmith.Merged | None:
    """Run a part, or what is left, on a machine with a disk of its own."""
    folder = Path(f"disk-{machine or part}")
    folder.mkdir(exist_ok=True)
    return weightsmith.run(plan, OUT, part=part, staging=str(folder), progress=False, threads=1, **options)


def finished(plan: Plan, **options: Any) -> weightsmith.Merged:
    merged = run(plan, None, "last", **options)
    assert merged is not None
    return merged


def records(memory: MemoryBucket) -> set[str]:
    """The labels of the records."""
    return {*memory.contents(f"{STAGING}/parts")}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes this process one of another machine."""
    return lambda name: monkeypatch.setattr(bucket_parts.socket, "gethostname", lambda: name)


class Killed:
    """Ends a process at a moment: nothing that it would do then is done."""

    def __init__(self, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests = 0
        self.reached: Callable[[], bool] = lambda: False
        self.dead = False
        memory.before = self._before
        plain = Staging.close

        def close(staging: Staging) -> None:
            if self.dead:
                staging._close_files()
                staging._locks.close()
            else:
                plain(staging)

        monkeypatch.setattr(Staging, "close", close)

    def _before(self, operation: str, key: str) -> None:
        self.requests += 1
        if self.dead or self.reached():
            self.dead = True
            raise Died

    def run(self, at: int | Callable[[], bool], work: Callable[[], object]) -> bool:
        """Do something, and end before a request, of this number or at which this is true: whether it was reached."""
        self.requests, self.dead = 0, False
        self.reached = at if callable(at) else lambda: self.requests == at
        try:
            work()
        except BaseException:  # what runs makes other errors of it
            if not self.dead:
                raise
        ended, self.reached, self.dead = self.dead, lambda: False, False
        return ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options"),
    [(LINEAR, {}), (TIES, {}), (MODEL_WIDE, {}), (STACK, {"max_shard_bytes": 1_000_000}), FP8],
    ids=["linear", "tensor", "model", "stack", "fp8"],
)
def test_the_objects_are_the_files_of_one_process(here: Path, memory: MemoryBucket, recipe: Any, options: Any) -> None:
    plan = planned(recipe, **options)
    for k in (2, 1, 3):
        assert run(plan, (k, 3)) is None
    assert "models/out/config.json" not in memory.objects, "no loader takes it for a model"
    assert records(memory) == {"1-of-3", "2-of-3", "3-of-3"}
    merged = finished(plan)
    assert merged.resumed == len(plan.steps)
    assert merged.written_bytes == 0
    expected = alone(recipe, **options)
    assert memory.contents("models/out") == expected
    assert {*memory.objects} == {f"models/out/{name}" for name in expected}, "nothing else is left"
    sent = [key for key in memory.sent() if key.endswith(".safetensors")]
    assert len(sent) == len({*sent}) == len(plan.layout.shards), "each file once"
    assert {path.name for path in here.glob("disk-*/.*")} == set()


def test_what_no_part_has_done_the_last_run_does(here: Path, memory: MemoryBucket) -> None:
    plan = planned()
    run(plan, (2, 3))
    merged = finished(plan)
    assert 0 < merged.resumed < len(plan.steps)
    assert memory.contents("models/out") == alone(LINEAR)
    assert {*memory.objects} == {f"models/out/{name}" for name in alone(LINEAR)}


def test_parts_of_several_divisions(here: Path, memory: MemoryBucket) -> None:
    plan = planned()
    run(plan, (1, 2))
    run(plan, (2, 3))
    assert finished(plan).resumed > 0
    assert memory.contents("models/out") == alone(LINEAR)


@pytest.mark.slow
def test_a_part_that_is_killed_goes_on_elsewhere(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[str], None]
) -> None:
    plan = planned()
    killed = Killed(memory, monkeypatch)
    monkeypatch.setattr(bucket_parts, "is_running", lambda process: False)
    elsewhere("node-1")

    def has_two_files() -> bool:
        return len([key for key in memory.objects if key.endswith(".safetensors")]) >= 2

    assert killed.run(has_two_files, lambda: run(plan, (1, 2), "node-1"))
    assert not finished_parts(memory)
    elsewhere("node-2")
    sent = len(memory.sent())
    run(plan, (1, 2), "node-2")
    again = [key for key in memory.sent()[sent:] if key.endswith(".safetensors")]
    files = {plan.layout.shards[plan.layout.places[step.out.name].shard].name for step in plan.steps}
    assert len(again) < len(files) / 2 + 1
    run(plan, (2, 2))
    finished(plan)
    assert memory.contents("models/out") == alone(LINEAR)


def interrupt(killed: Killed, memory: MemoryBucket, label: str, work: Callable[[], object]) -> None:
    """Do something, and end once it has a record."""
    at = 1
    while label not in records(memory):
        assert killed.run(at, work)
        at += 1


def finished_parts(memory: MemoryBucket) -> set[str]:
    return {label for label, data in memory.contents(f"{STAGING}/parts").items() if b'["note","done",true]' in data}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [LINEAR, MODEL_WIDE], ids=["linear", "model"])
def test_a_part_that_ends_before_any_request(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[str], None], recipe: Any
) -> None:
    plan, expected = planned(recipe, max_shard_bytes=1_500_000), alone(recipe, max_shard_bytes=1_500_000)
    killed, at, reached = Killed(memory, monkeypatch), 0, True
    while reached:
        at += 1
        elsewhere("node-1")
        reached = killed.run(at, lambda: run(plan, (1, 2), "node-1"))
        elsewhere("node-2" if at % 2 else "node-1")
        monkeypatch.setattr(bucket_parts, "is_running", lambda process: False)
        run(plan, (1, 2), "node-2" if at % 2 else "node-1")
        finished(plan)
        assert memory.contents("models/out") == expected, at
        assert {*memory.objects} == {f"models/out/{name}" for name in expected}, at
        forget(here, memory)
    assert at > 15


@pytest.mark.slow
def test_a_last_run_that_ends_before_any_request(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[str], None]
) -> None:
    """It goes on elsewhere, unless all is published."""
    plan, expected = planned(max_shard_bytes=1_500_000), alone(LINEAR, max_shard_bytes=1_500_000)
    killed, at, reached = Killed(memory, monkeypatch), 0, True
    while reached:
        at += 1
        elsewhere("node-1")
        run(plan, (1, 2), "node-1")
        reached = killed.run(at, lambda: run(plan, None, "node-1"))
        elsewhere("node-2" if at % 2 else "node-1")
        monkeypatch.setattr(bucket_parts, "is_running", lambda process: False)
        if reached:
            try:
                run(plan, None, "node-2" if at % 2 else "node-1")
            except OutputExists:
                assert "models/out/weightsmith.json" in memory.objects, at
        assert memory.contents("models/out") == expected, at
        forget(here, memory)
    assert at > 20


def forget(here: Path, memory: MemoryBucket) -> None:
    """Remove all objects, and all disks."""
    for key in memory.objects:
        memory.delete(key)
    for path in here.glob("disk-*"):
        shutil.rmtree(path)


def test_the_last_run_does_not_wait_for_parts_that_may_run(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[str], None]
) -> None:
    plan, killed = planned(), Killed(memory, monkeypatch)
    elsewhere("node-1")
    interrupt(killed, memory, "2-of-3", lambda: run(plan, (2, 3)))
    elsewhere("node-2")
    with pytest.raises(Busy, match=r"part 2 of 3, process \d+ on node-1, is building this output now, or was") as caught:
        finished(plan)
    assert "--part 2/3" in caught.value.finding.fix
    run(plan, (2, 3))
    finished(plan)
    assert memory.contents("models/out") == alone(LINEAR)


def test_a_part_whose_process_has_ended_here_is_left_to_the_last_run(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, killed = planned(), Killed(memory, monkeypatch)
    interrupt(killed, memory, "2-of-3", lambda: run(plan, (2, 3)))
    with pytest.raises(Busy, match="is building this output now"):
        finished(plan)
    with pytest.raises(Busy, match="another process is doing part 2 of 3"):
        run(plan, (2, 3), "another")
    monkeypatch.setattr(bucket_parts, "is_running", lambda process: False)
    finished(plan)
    assert memory.contents("models/out") == alone(LINEAR)


@pytest.mark.slow
def test_a_part_that_is_started_twice_is_done_by_the_second(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[str], None]
) -> None:
    plan, put, taken, ended = planned(), BucketTarget.put, list[str](), threading.Event()

    def interrupted(self: BucketTarget, name: str, file: Path) -> Any:
        value = put(self, name, file)
        if not taken:
            taken.append(name)
            elsewhere("node-2")
            while not ended.is_set():
                with suppress(Busy):  # another thread of the first process may write the record at the same moment
                    run(plan, (1, 2), "node-2")
                    ended.set()
        return value

    monkeypatch.setattr(BucketTarget, "put", interrupted)
    elsewhere("node-1")
    with pytest.raises(Busy, match="another process has taken over part 1 of 2"):
        run(plan, (1, 2), "node-1")
    assert ended.wait(120)
    finished(plan)
    assert memory.contents("models/out") == alone(LINEAR)


def test_parts_and_the_last_run_keep_each_other_out(here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, killed = planned(), Killed(memory, monkeypatch)
    run(plan, (1, 3))
    interrupt(killed, memory, bucket_parts.LAST, lambda: run(plan, None, "last"))
    with pytest.raises(Busy, match=r"the last run, process .* is publishing this output, or was interrupted"):
        run(plan, (2, 3))
    monkeypatch.setattr(bucket_parts, "is_running", lambda process: False)
    finished(plan)
    with pytest.raises(OutputExists):
        run(plan, (2, 3))
    assert memory.contents("models/out") == alone(LINEAR)


def test_parts_of_another_plan_are_told_apart(here: Path, memory: MemoryBucket) -> None:
    run(planned(), (1, 2))
    other = planned(LINEAR | {"parameters": {"normalize": False}})
    for part in ((1, 2), None):
        with pytest.raises(CannotResume, match="those of another plan") as caught:
            run(other, part, "other")
        assert "parameters.normalize" in str(caught.value)
        assert "weightsmith clean s3://bkt/models/out --yes" in caught.value.finding.fix
    merged = finished(other, resume=False)
    assert merged.resumed == 0
    assert {*memory.objects} == {f"models/out/{name}" for name in memory.contents("models/out")}


def test_clean_lists_and_removes_what_parts_have_done(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, killed = planned(), Killed(memory, monkeypatch)
    run(plan, (1, 2))
    [unfinished] = find_unfinished("s3://bkt/models")
    assert 0 < unfinished.tensors < len(plan.steps)
    assert unfinished.nbytes > 0
    assert unfinished.reason == ""
    interrupt(killed, memory, "2-of-2", lambda: run(plan, (2, 2)))
    [unfinished] = find_unfinished("s3://bkt/models/out")
    assert unfinished.reason == "a process is working on it"
    with pytest.raises(Busy):
        unfinished.remove()
    monkeypatch.setattr(bucket_parts, "is_running", lambda process: False)
    unfinished.remove()
    assert memory.objects == {}


def test_the_status_of_parts_is_that_of_their_records(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[str], None]
) -> None:
    plan, killed = planned(), Killed(memory, monkeypatch)
    with pytest.raises(NotFound):
        weightsmith.status(OUT)
    run(plan, (1, 2))
    elsewhere("node-2")
    interrupt(killed, memory, "2-of-2", lambda: run(plan, (2, 2)))
    elsewhere("node-3")
    status = weightsmith.status(OUT)
    first, second = status.builders
    assert (first.part, first.done, first.tensors) == ("1-of-2", True, first.total)
    assert (second.part, second.done, second.machine, second.running) == ("2-of-2", False, "node-2", None)
    assert 0 < second.began <= second.changed + 1
    assert (status.tensors, status.total) == (first.tensors + second.tensors, len(plan.steps))
    assert first.total + second.total == len(plan.steps)
    assert (status.folder, status.published) == (None, False)


def test_a_run_of_the_whole_and_parts_exclude_each_other(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    with pytest.raises(Died):
        weightsmith.run(plan, OUT, staging=".", threads=1, progress=lambda now: stop() if now.tensors > 4 else None)
    with pytest.raises(Busy, match=r"process \d+ on .* is building this output"):
        run(plan, (1, 2))
    assert records(memory) == set()


def stop() -> None:
    raise Died


@pytest.mark.slow
def test_a_value_that_one_part_has_computed_others_read(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, kept = planned(MODEL_WIDE), list[str]()
    plain = Staging.keep

    def keep(self: Staging, product: Any, arrays: Any) -> Any:
        kept.append(product.name)
        return plain(self, product, arrays)

    monkeypatch.setattr(Staging, "keep", keep)
    for k in (1, 2, 3):
        run(plan, (k, 3))
    finished(plan)
    assert len(kept) == len(plan.products), "each was computed once"
    assert memory.contents("models/out") == alone(MODEL_WIDE)


def test_a_file_that_changes_after_it_was_recorded_is_made_again(here: Path, memory: MemoryBucket) -> None:
    import obstore

    plan = planned()
    run(plan, (1, 2))
    run(plan, (2, 2))
    [key, other, *_] = [key for key in memory.objects if key.endswith(".safetensors")]
    [token] = {memory_mark(memory, key).split()[0]}
    obstore.put(memory.store, key, b"other", attributes={"weightsmith": f"{token} other"})
    memory.delete(other)
    assert finished(plan).resumed < len(plan.steps)
    assert memory.contents("models/out") == alone(LINEAR)


def memory_mark(memory: MemoryBucket, key: str) -> str:
    import obstore

    return str({name.lower(): value for name, value in obstore.get(memory.store, key).attributes.items()}["weightsmith"])


def test_a_local_folder_of_a_part_can_be_removed_without_the_work_of_others(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, killed = planned(), Killed(memory, monkeypatch)
    run(plan, (1, 2))
    assert killed.run(16, lambda: run(plan, (2, 2), "same"))
    before = memory.objects
    [unfinished] = find_unfinished("disk-same")
    unfinished.remove()
    assert memory.objects == before


@pytest.mark.parametrize("part", [(1, 2), (2, 2)])
def test_what_parts_in_a_bucket_cannot_do_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch, part: Any) -> None:
    plan = planned()
    monkeypatch.setattr(execution_run, "_download", lambda *_: pytest.fail("it downloads"))
    with pytest.raises(ParameterError, match="parts replace no output there"):
        run(plan, part, overwrite=True)
    with pytest.raises(ParameterError, match="parts of a plan share a folder or a bucket"):
        weightsmith.run(plan, "hf://org/name", part=part, progress=False)


def test_an_output_that_is_there_is_not_mixed_with_parts(here: Path, memory: MemoryBucket) -> None:
    memory.put("models/out/model.safetensors", b"someone's")
    with pytest.raises(OutputExists):
        run(planned(), (1, 2))
    assert memory.objects == {"models/out/model.safetensors": b"someone's"}


def test_a_damaged_record_is_no_record(here: Path, memory: MemoryBucket) -> None:
    plan = planned()
    run(plan, (1, 2))
    memory.put(f"{STAGING}/parts/1-of-2", b"not a journal\n")
    run(plan, (1, 2))
    assert finished(plan).resumed > 0
    assert memory.contents("models/out") == alone(LINEAR)


def test_a_claim_that_is_gone_ends_a_part(here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    put = BucketTarget.put

    def discarded(self: BucketTarget, name: str, file: Path) -> Any:
        value = put(self, name, file)
        memory.delete(f"{STAGING}/claim")  # as `weightsmith clean` does
        return value

    monkeypatch.setattr(BucketTarget, "put", discarded)
    with pytest.raises(StoreError, match="another run has taken this output over"):
        run(planned(), (1, 2))


def test_two_parts_that_start_at_once_share_one_claim(here: Path, memory: MemoryBucket) -> None:
    """The other part creates the claim between this one's look and its own attempt."""
    plan, began = planned(), list[str]()

    def before(operation: str, key: str) -> None:
        if operation == "a small object" and key.endswith("/claim") and not began:
            began.append(key)
            run(plan, (2, 2))

    memory.before = before
    run(plan, (1, 2))
    assert began
    assert records(memory) == {"1-of-2", "2-of-2"}
    finished(plan)
    assert memory.contents("models/out") == alone(LINEAR)


def test_a_last_run_that_was_taken_over_deletes_nothing(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[str], None]
) -> None:
    """The second one takes it over while the first uploads a file, and then has that file too."""
    plan, put, second = planned(), BucketTarget._put, list[threading.Thread]()
    uploaded, ended = threading.Event(), threading.Event()

    def publish() -> None:
        run(plan, None, "node-2")

    def before(operation: str, key: str) -> None:
        if operation == "a file" and key.endswith("weightsmith.json"):
            uploaded.set()
            assert ended.wait(120)

    def taken_over(self: BucketTarget, name: str, file: Path) -> Any:
        value = put(self, name, file)
        if not second:
            elsewhere("node-2")
            memory.before = before
            second.append(threading.Thread(target=publish))
            second[0].start()
            assert uploaded.wait(120)
        return value

    run(plan, (1, 3))
    monkeypatch.setattr(BucketTarget, "_put", taken_over)
    elsewhere("node-1")
    with pytest.raises(Busy, match="another process has taken over the last run"):
        run(plan, None, "node-1")
    ended.set()
    second[0].join(120)
    assert memory.contents("models/out") == alone(LINEAR)


def test_parts_that_run_here_are_not_discarded(here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, killed = planned(), Killed(memory, monkeypatch)
    run(plan, (1, 2))
    interrupt(killed, memory, "2-of-2", lambda: run(plan, (2, 2)))
    before = memory.objects
    with pytest.raises(Busy, match=r"part 2 of 2, process \d+ on .*, is building this output now"):
        finished(plan, resume=False)
    assert memory.objects == before
    monkeypatch.setattr(bucket_parts, "is_running", lambda process: False)
    assert finished(plan, resume=False).resumed == 0
    assert memory.contents("models/out") == alone(LINEAR)


@pytest.mark.parametrize(("part", "options"), [((1, 2), {}), (None, {"resume": False})], ids=["a part", "the whole"])
def test_a_container_that_is_started_again_goes_on(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch, part: Any, options: dict[str, Any]
) -> None:
    """It has the name and the process number of the one that was killed, and an empty disk."""
    plan, killed = planned(), Killed(memory, monkeypatch)

    assert killed.run(lambda: bool(memory.sent()), lambda: run(plan, part, "pod"))
    shutil.rmtree("disk-pod")
    with pytest.raises(Busy):
        run(plan, part, "pod", **options)
    shutil.rmtree("disk-pod", ignore_errors=True)
    monkeypatch.setattr(bucket_parts, "_MADE", set())
    run(plan, part, "pod", **options)
    if part is not None:
        finished(plan)
    assert memory.contents("models/out") == alone(LINEAR)


def test_a_part_that_begins_while_its_output_is_published_leaves_nothing(here: Path, memory: MemoryBucket) -> None:
    plan, published = planned(), list[object]()
    run(plan, (1, 2))

    def before(operation: str, key: str) -> None:
        if operation == "a small object" and key.endswith("/2-of-2") and not published:
            published.append(key)
            published.append(finished(plan))

    memory.before = before
    with pytest.raises(Busy, match="another run has taken this output over"):
        run(plan, (2, 2))
    assert published
    expected = alone(LINEAR)
    assert memory.contents("models/out") == expected
    assert {*memory.objects} == {f"models/out/{name}" for name in expected}


def test_a_part_that_begins_while_the_last_run_does_gives_up(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, began = planned(), list[str]()
    run(plan, (1, 2))
    take = bucket_parts.OwnRecord.take

    def late(self: bucket_parts.OwnRecord) -> Any:
        began.append(self.label)
        if self.label == "2-of-2":
            bucket_parts.OwnRecord(self.store, self.folder, bucket_parts.LAST, self.token, self.spec).take()
        return take(self)

    monkeypatch.setattr(bucket_parts.OwnRecord, "take", late)
    with pytest.raises(Busy, match=r"the last run, process .* is publishing this output"):
        run(plan, (2, 2))
    assert records(memory) == {"1-of-2", bucket_parts.LAST}


@pytest.mark.parametrize("of_a_run", [True, False], ids=["after a published run", "without a run"])
def test_a_record_without_a_claim_is_removed_by_clean_and_blocks_nothing(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[str], None], of_a_run: bool
) -> None:
    """Its process was killed right after it had written the record, and its output was published or discarded."""
    import obstore

    plan, killed, key = planned(), Killed(memory, monkeypatch), f"{STAGING}/parts/2-of-2"
    elsewhere("node-1")
    interrupt(killed, memory, "2-of-2", lambda: run(plan, (2, 2)))
    elsewhere("node-2")
    data, mark = memory.get(key), memory_mark(memory, key)
    if of_a_run:
        memory.delete(key)
        finished(plan)
    else:
        memory.delete(f"{STAGING}/claim")
    obstore.put(memory.store, key, data, attributes={"weightsmith": mark})
    published = memory.contents("models/out")
    [unfinished] = find_unfinished(OUT)
    assert (unfinished.tensors, unfinished.reason) == (0, "")
    with pytest.raises(NotFound):
        weightsmith.status(OUT)
    if not of_a_run:
        run(plan, (1, 3))
        finished(plan)
        published = memory.contents("models/out")
        [unfinished] = find_unfinished(OUT)
    unfinished.remove()
    assert published == memory.contents("models/out") == alone(LINEAR)
    assert {*memory.objects} == {f"models/out/{name}" for name in published}


def test_a_finished_part_without_files_is_shown_as_done(here: Path, memory: MemoryBucket) -> None:
    plan = planned(max_shard_bytes=100_000_000)
    for k in (1, 2):
        run(plan, (k, 2))
    builders = weightsmith.status(OUT).builders
    assert sorted(builder.total for builder in builders) == [0, len(plan.steps)]
    assert [builder.done for builder in builders] == [True, True]


@pytest.mark.parametrize("disk", ["last", "another"])
def test_a_last_run_that_goes_on_elsewhere_makes_its_own_files_again(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    monkeypatch.setattr(weight_files, "UPLOADS", 1)  # a file is noted before the next is sent
    plan, killed = planned(), Killed(memory, monkeypatch)
    run(plan, (1, 2))
    parts = {*memory.sent()}
    monkeypatch.setattr(bucket_parts, "is_running", lambda process: False)
    assert killed.run(lambda: len({*memory.sent()} - parts) == 2, lambda: run(plan, None, "last"))
    first = {*memory.sent()} - parts - {memory.sent()[-1]}
    sent = len(memory.sent())
    run(plan, None, disk)
    again = {*memory.sent()[sent:]}
    assert (first & again == first) is (disk == "another")
    assert not parts & again
    assert memory.contents("models/out") == alone(LINEAR)
