"""Workers that share nothing but a bucket: the bytes of one process, whatever happens to them."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests.bucket_help import MemoryBucket
from tests.execution.distributed.threads import Died, Threads
from tests.output_help import open_staging, tree
from tests.outputs.bucket.conftest import memory, spool
from weightsmith._base.errors import ParameterError, StoreError, WorkerLost
from weightsmith._execution import execute as execution
from weightsmith._execution.distributed import driver
from weightsmith._execution.distributed.driver import share_out
from weightsmith._execution.distributed.work import Answer, Failed, Lost, Order, Share, do
from weightsmith._execution.options import RunOptions
from weightsmith._execution.run import NO_CALLBACKS, Callbacks, Merged
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._outputs.bucket import lock, parts, uploads
from weightsmith._outputs.bucket.backend import together
from weightsmith._outputs.bucket.journal import FollowedParts, State
from weightsmith._outputs.bucket.prefix import parse_prefix
from weightsmith._outputs.staging import Staging
from weightsmith._planning.options import RecipeOptions
from weightsmith._plans import Plan
from weightsmith._plans.parts import parts_of
from weightsmith.abc.output import Built, Finished

pytestmark = pytest.mark.store

__all__ = ["memory", "spool"]

LINEAR = {"merge_method": "linear", "models": [{"model": f"./{name}", "parameters": {"weight": 0.5}} for name in "ab"]}
TIES = {
    "merge_method": "ties",
    "base_model": "./a",
    "models": [{"model": "./b", "parameters": {"weight": 1}}, {"model": "./c", "parameters": {"weight": 0.5}}],
    "parameters": {"density": 0.3},
    "dtype": "bfloat16",
}
MODEL_WIDE = TIES | {"parameters": {"density": 0.3, "scope": "model"}}
STACK = {
    "merge_method": "passthrough",
    "slices": [{"sources": [{"model": f"./{name}", "layer_range": [0, 1]}]} for name in "ab"],
}
FP8 = LINEAR, {"quantize": "fp8-dynamic"}
OUT = "s3://bkt/models/out"
STAGING = "models/.out.weightsmith-staging"


@pytest.fixture
def here(linked: Path, tmp_path: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(parts, "PART_BYTES", 200_000)
    monkeypatch.setattr(uploads, "SAVE_SECONDS", 0.0)
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} <= {*"abc", "out"}, "products are removed"


def merge(workers: Threads, recipe: Any = TIES, callbacks: Callbacks = NO_CALLBACKS, **options: Any) -> Merged:
    """A merge into the bucket, whose parts these workers do. options: of the recipe."""
    with prepare_any(recipe, RecipeOptions(check_loading=False, **options), QuantizeSettings()) as prepared:
        try:
            running, helpers = RunOptions(threads=1), partial(share_out, workers=workers)
            return execution.execute(prepared, OUT, running, callbacks, helpers=helpers)
        finally:
            workers.join()


def alone(recipe: Any = TIES, **options: Any) -> dict[str, bytes]:
    """What a run in one process writes into a folder."""
    weightsmith.merge(recipe, "out", progress=False, **options)
    return tree(Path("out"))


def stop_after(tensors: int) -> Callable[[weightsmith.Progress], None]:
    """A function for the progress, which interrupts the run."""

    def stop(now: weightsmith.Progress) -> None:
        if now.tensors > tensors:
            raise KeyboardInterrupt

    return stop


def part_count(plan: Plan) -> int:
    """Parts of all uploads."""
    return sum(len(group.parts) for group in parts.cut(plan.layout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (LINEAR, {}),
        (TIES, {}),
        (MODEL_WIDE, {}),
        (STACK, {"max_shard_bytes": 1_000_000}),
        FP8,
    ],
    ids=["linear", "tensor", "model", "stack", "fp8"],
)
def test_the_objects_are_the_files_of_one_process(here: Path, memory: MemoryBucket, recipe: Any, options: Any) -> None:
    wanted = alone(recipe, **options)
    workers = Threads(3)
    merged = merge(workers, recipe, **options)
    assert memory.contents("models/out") == wanted
    assert {*memory.objects} == {f"models/out/{name}" for name in wanted}, "nothing else is left"
    assert memory.pending == {}
    assert merged.resumed == 0
    assert memory.calls.count("upload") == part_count(merged.plan), "each part once"
    if "quantize" not in options:  # there, one process must do a file: see `bucket.backend.together`
        assert len(workers.started) > 3


@pytest.mark.slow
def test_no_two_parts_of_a_plan_have_bytes_of_one_part_of_an_upload(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 2_000_000)  # of two or three tensors
    plan = weightsmith.plan(LINEAR)
    divided = parts_of(plan, 10, together(parse_prefix(OUT), plan.layout))
    own = [{out.name for step in steps for out in step.outs} for steps in divided]
    assert sorted(name for names in own for name in names) == sorted(plan.layout.places)
    for group in parts.cut(plan.layout):
        assert len([names for names in own if names & {*group.tensors}]) == 1
    workers = Threads(3)
    merge(workers, LINEAR)
    assert memory.calls.count("upload") == part_count(plan), "by one worker each"
    assert len(workers.started) > 1
    assert memory.contents("models/out") == alone(LINEAR)


@pytest.mark.slow
def test_a_store_that_wants_equal_parts_has_one_worker_for_each_file(here: Path, memory: MemoryBucket) -> None:
    memory.equal_parts = True
    workers = Threads(3)
    merged = merge(workers, LINEAR, max_shard_bytes=4_000_000)
    assert 1 < len(workers.started) <= len(merged.plan.layout.shards)
    assert memory.contents("models/out") == alone(LINEAR, max_shard_bytes=4_000_000)


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["other groups", "more parts"])
def test_a_worker_that_cuts_the_files_otherwise_is_an_error(here: Path, monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    plain = Staging.hand_over

    def hand_over(self: Staging) -> Built:
        built = plain(self)
        if cut == "more parts":
            return built._replace(groups={key: (*etags, etags[0]) for key, etags in built.groups.items()})
        return built._replace(groups={(*key[:3], key[3] + 1): etags for key, etags in built.groups.items()})

    monkeypatch.setattr(Staging, "hand_over", hand_over)
    with pytest.raises(StoreError, match="a worker has cut the weight files into other parts"):
        merge(Threads(1), LINEAR)


def test_steps_that_a_set_of_tensors_links_are_in_one_part(here: Path) -> None:
    plan = weightsmith.plan(LINEAR)
    linked = [[plan.steps[i].out.name for i in pair] for pair in ((0, 4), (4, 2))]
    first, *others = parts_of(plan, len(plan.steps), linked)
    assert [step.out.name for step in first] == [plan.steps[i].out.name for i in (0, 2, 4)]
    assert sum(map(len, others)) == len(plan.steps) - 3


@pytest.mark.slow
def test_products_are_made_by_one_worker_and_read_by_all_others(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    wanted = alone(MODEL_WIDE)

    def put(self: MemoryBucket, key: str, data: bytes, token: str = "") -> str:
        if "/products/" in key:
            made.append(key)
        return plain(self, key, data, token)

    plain = MemoryBucket.put
    monkeypatch.setattr(MemoryBucket, "put", put)
    workers = Threads(3)
    merge(workers, MODEL_WIDE)
    assert len(made) == len({*made}) > 0
    assert Counter(share.part for share in workers.started)[None] == 1
    assert workers.started[0].part is None, "all parts need it"
    assert memory.contents("models/out") == wanted


@pytest.mark.slow
def test_a_product_that_is_damaged_in_the_bucket_is_not_used(here: Path, memory: MemoryBucket) -> None:
    wanted = alone(MODEL_WIDE)
    damaged: list[str] = []

    def before(share: Share) -> None:
        for key, (data, token, written) in [*memory.objects.items()]:
            if "/products/" in key and share.part and not damaged:
                damaged.append(key)
                memory.objects[key] = bytes([data[0] ^ 1]) + data[1:], token, written

    merge(Threads(1, before), MODEL_WIDE)
    assert damaged
    assert memory.contents("models/out") == wanted


@pytest.mark.slow
def test_a_part_of_a_lost_worker_is_done_again_and_keeps_what_was_uploaded(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = alone()
    finished: list[str] = []
    plain = Staging.finish

    def finish(self: Staging, name: str, done: Any) -> None:
        plain(self, name, done)
        finished.append(name)
        if len(finished) == 2:
            self.backend.weights.drain()
            raise Died

    monkeypatch.setattr(Staging, "finish", finish)
    workers = Threads(1)
    merged = merge(workers)
    assert len(workers.started) == len(set(workers.started)) + 1
    assert sorted(finished) == sorted(step.out.name for step in merged.plan.steps), "none was made twice"
    assert memory.contents("models/out") == wanted


@pytest.mark.slow
def test_workers_that_are_lost_again_and_again_are_an_error_and_the_run_resumes(here: Path, memory: MemoryBucket) -> None:
    def before(share: Share) -> None:
        if share.part is not None and share.part[0] == 2:
            raise Died

    with pytest.raises(WorkerLost, match=r"the worker of part 2 of \d+ was lost 4 times") as caught:
        merge(Threads(2, before))
    assert f"kept in {OUT}; run again to resume" in str(caught.value)
    assert f"{STAGING}/lock" not in memory.objects
    sent = memory.calls.count("upload")
    assert sent > 0
    merged = merge(Threads(2))
    assert merged.resumed > 0
    assert memory.calls.count("upload") == part_count(merged.plan)
    assert memory.contents("models/out") == alone()


@pytest.mark.slow
def test_a_run_in_one_process_resumes_what_workers_have_uploaded(here: Path, memory: MemoryBucket) -> None:
    workers = Threads(2, lambda share: time.sleep(0.1))
    with pytest.raises(KeyboardInterrupt):
        merge(workers, MODEL_WIDE, Callbacks(stop_after(0)))
    assert workers.stopped
    assert memory.contents("models/out") == {}
    merged = weightsmith.merge(MODEL_WIDE, OUT, progress=False)
    assert merged.resumed > 0
    assert memory.calls.count("upload") == part_count(merged.plan)
    assert memory.contents("models/out") == alone(MODEL_WIDE)
    assert {*memory.objects} == {f"models/out/{name}" for name in memory.contents("models/out")}


@pytest.mark.slow
def test_workers_resume_what_a_run_in_one_process_has_uploaded(here: Path, memory: MemoryBucket) -> None:
    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge(TIES, OUT, progress=stop_after(3))
    assert merge(Threads(2)).resumed > 0
    assert memory.contents("models/out") == alone()


@pytest.mark.slow
@pytest.mark.parametrize("again", ["workers", "one process"])
def test_tensors_that_were_not_checked_for_nan_are_computed_again(here: Path, memory: MemoryBucket, again: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge(LINEAR, OUT, progress=stop_after(3), allow_nonfinite=True)
    merged = merge(Threads(2), LINEAR) if again == "workers" else weightsmith.merge(LINEAR, OUT, progress=False)
    assert merged.resumed == 0
    assert memory.contents("models/out") == alone(LINEAR)
    assert memory.calls.count("upload") == part_count(merged.plan), "the parts have the same bytes"


@pytest.mark.slow
def test_a_driver_that_was_killed_leaves_work_that_the_next_one_adopts(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has entered nothing of what its workers have finished, and nothing is cleaned up."""

    class Killed(BaseException):
        pass

    def adopt(self: Staging, built: Built) -> None:
        raise Killed

    with monkeypatch.context() as broken:
        broken.setattr(Staging, "adopt", adopt)
        broken.setattr(Staging, "close", lambda self: self.backend.lock.release() if self._spec.part else None)
        with pytest.raises(Killed):
            merge(Threads(1))
    del memory.objects[f"{STAGING}/lock"]  # as it is after a while
    assert [key for key in memory.objects if key.startswith(f"{STAGING}/parts/")]
    sent = memory.calls.count("upload")
    merged = merge(Threads(2))
    assert sent > 0
    assert merged.resumed > 0
    assert memory.calls.count("upload") == part_count(merged.plan)
    assert memory.contents("models/out") == alone()


@pytest.mark.slow
def test_a_worker_that_is_cut_off_and_goes_on_after_the_end_changes_nothing(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = alone()
    published, answers = threading.Event(), list[Answer]()

    class CutOff(Threads):
        """The first worker is taken for lost when it has begun, and goes on once the model is published."""

        def _work(self, order: Order, share: Share) -> None:
            if len(self.started) > 1:
                super()._work(order, share)
            else:
                answers.append(pickle.loads(do(order, share, self.machine)))

        def lose(self) -> None:
            self._answers.put((self.started[0], Lost("cut off")))

        def join(self) -> None:
            published.set()
            super().join()

    cut_off, write_now = list[Staging](), Staging.write

    def write(self: Staging, name: str, start: int, buffer: Any) -> None:
        if not cut_off:
            cut_off.append(self)
            workers.lose()
        if cut_off[0] is self:
            assert published.wait(30)
            assert memory.contents("models/out") == wanted
        write_now(self, name, start, buffer)

    monkeypatch.setattr(Staging, "write", write)
    workers = CutOff(1)
    merge(workers)
    (answer,) = answers
    assert isinstance(answer, Failed)
    assert "NoSuchUpload" in str(answer.error)
    assert memory.contents("models/out") == wanted
    assert memory.pending == {}


@pytest.mark.slow
def test_bytes_that_a_cut_off_worker_computes_differently_are_replaced(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = alone()
    changed: list[tuple[str, int]] = []
    plain = Staging.adopt

    def adopt(self: Staging, built: Built) -> None:
        plain(self, built)
        if built.groups and not changed:
            ((file, number, _, _), *_) = built.groups
            for _, _, uploaded in memory.pending.values():
                uploaded[number] = bytes(len(uploaded[number]))
            changed.append((file, number))

    monkeypatch.setattr(Staging, "adopt", adopt)
    merge(Threads(2))
    assert changed
    assert memory.contents("models/out") == wanted


@pytest.mark.slow
def test_a_slow_part_is_done_by_a_second_worker_and_both_upload(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "SLOW_SECONDS", 0.2)
    go_on = threading.Event()

    def before(share: Share) -> None:
        if share.part is not None and share.part[0] == 1 and not share.second:
            assert go_on.wait(30)

    workers = Threads(2, before)
    stop = workers.stop
    monkeypatch.setattr(workers, "stop", lambda share: (stop(share), go_on.set()))
    merge(workers)
    assert Share(workers.started[0].part, second=True) in workers.started
    assert memory.contents("models/out") == alone()


def test_progress_counts_what_workers_have_finished_of_their_parts(here: Path, memory: MemoryBucket) -> None:
    done = Finished("0" * 32)
    for label, names in (("1-of-2", "ab"), ("2-of-2", "c")):
        state = State("plan", "layout", token="token", tensors=dict.fromkeys(names, done))
        memory.put(f"{STAGING}/parts/journal-{label}", state.encode())
    followed = FollowedParts(MemoryBucket("bkt"), f"{STAGING}/parts/journal-")
    seen = [followed.look(["2-of-2", "1-of-2"]) for _ in range(2)]
    assert {*map(frozenset, seen)} == {frozenset("ab"), frozenset("c")}
    assert followed.look(["3-of-2"]) == followed.look([]) == set()


def test_a_worker_ends_soon_after_its_driver(here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEW_SECONDS", 0.05)
    plan = weightsmith.plan(LINEAR)
    opened: Callable[..., Staging] = partial(open_staging, OUT, plan.layout)
    with pytest.raises(StoreError, match="the process that this one works for has ended"):
        opened("plan", part="1-of-2", names={*plan.layout.places})
    with opened("plan", names=set()) as leading, leading.shared():
        with pytest.raises(StoreError, match="another run has taken the unfinished work"):
            opened("other", part="1-of-2", names={*plan.layout.places})
        worker = opened("plan", part="1-of-2", names={*plan.layout.places})
        worker.backend.weights.check()
    deadline = time.monotonic() + 60
    while worker.backend.lock._id:  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(StoreError, match="the process that this one works for has ended"):
        worker.write(min(plan.layout.places), 0, bytes(1))
    worker.close()


def test_results_of_other_recipes_that_must_be_written_first_are_refused(here: Path) -> None:
    last = TIES | {"models": [{"model": "first", "parameters": {"weight": 1}}]}
    with pytest.raises(ParameterError, match="must be written first, to a folder that other machines do not see"):
        merge(Threads(1), [MODEL_WIDE | {"name": "first"}, last])
