"""Workers that share nothing but a bucket: the bytes of one process, whatever happens to them."""

from __future__ import annotations

import shutil
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
from tests.output_help import tree
from tests.outputs.bucket.conftest import memory, spool
from weightsmith._base.errors import ParameterError, StoreError, WorkerLost
from weightsmith._execution import cluster
from weightsmith._execution import execute as execution
from weightsmith._execution.cluster import Share, share_out
from weightsmith._execution.options import RunOptions
from weightsmith._execution.run import NO_CALLBACKS, Callbacks, Merged
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._outputs.bucket import BucketTarget
from weightsmith._outputs.staging import Staging
from weightsmith._planning.options import RecipeOptions
from weightsmith.abc.output import Built

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
SHARD = 500_000


@pytest.fixture
def here(linked: Path, tmp_path: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "PART_BYTES", 1 << 20)
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} <= {*"abc", "out"}, "products are removed"


def merge(workers: Threads, recipe: Any = TIES, callbacks: Callbacks = NO_CALLBACKS, **options: Any) -> Merged:
    """A merge into the bucket, whose parts these workers do. options: of the recipe."""
    options = {"max_shard_bytes": SHARD, **options}
    overwrite = options.pop("overwrite", False)
    with prepare_any(recipe, RecipeOptions(check_loading=False, **options), QuantizeSettings()) as prepared:
        try:
            running, helpers = RunOptions(threads=1, overwrite=overwrite), partial(share_out, workers=workers)
            return execution.execute(prepared, OUT, running, callbacks, helpers=helpers)
        finally:
            workers.join()


def alone(recipe: Any = TIES, **options: Any) -> dict[str, bytes]:
    """What a run in one process writes into a folder."""
    weightsmith.merge(recipe, "out", progress=False, overwrite=True, **{"max_shard_bytes": SHARD, **options})
    return tree(Path("out"))


def stop_after(tensors: int) -> Callable[[weightsmith.Progress], None]:
    """A function for the progress, which interrupts the run."""

    def stop(now: weightsmith.Progress) -> None:
        if now.tensors > tensors:
            raise KeyboardInterrupt

    return stop


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
    expected = alone(recipe, **options)
    workers = Threads(3)
    merged = merge(workers, recipe, **options)
    assert memory.contents("models/out") == expected
    assert {*memory.objects} == {f"models/out/{name}" for name in expected}, "nothing else is left"
    assert merged.resumed == 0
    sent = [key for key in memory.sent() if key.endswith(".safetensors")]
    assert len(sent) == len({*sent}) == len(merged.plan.layout.shards), "each file once"
    if "quantize" not in options:  # there, steps join files: see `plans.parts.units_of`
        assert len(workers.started) > 3


@pytest.mark.slow
def test_workers_that_are_lost_again_and_again_are_an_error_and_the_run_resumes(here: Path, memory: MemoryBucket) -> None:
    def before(share: Share) -> None:
        if share.part is not None and share.part[0] == 2:
            raise Died

    with pytest.raises(WorkerLost, match=r"the worker of part 2 of \d+ was lost 4 times") as caught:
        merge(Threads(2, before))
    assert "run again to resume" in str(caught.value)
    sent = memory.sent()
    assert sent
    assert not [key for key in memory.objects if key.endswith("config.json")]
    merged = merge(Threads(2))
    assert merged.resumed > 0
    assert len({*sent} & {*memory.sent()[len(sent) :]}) < len(sent), "those that were adopted are not made again"
    assert memory.contents("models/out") == alone()


@pytest.mark.slow
def test_a_run_in_one_process_resumes_what_workers_have_uploaded(here: Path, memory: MemoryBucket) -> None:
    workers = Threads(2, lambda share: time.sleep(0.1))
    with pytest.raises(KeyboardInterrupt):
        merge(workers, MODEL_WIDE, Callbacks(stop_after(0)))
    assert workers.stopped
    assert all(name.endswith(".safetensors") for name in memory.contents("models/out"))
    merged = weightsmith.merge(MODEL_WIDE, OUT, progress=False, max_shard_bytes=SHARD)
    assert merged.resumed > 0
    assert memory.contents("models/out") == alone(MODEL_WIDE)
    assert {*memory.objects} == {f"models/out/{name}" for name in memory.contents("models/out")}


@pytest.mark.slow
def test_workers_resume_what_a_run_in_one_process_has_uploaded(here: Path, memory: MemoryBucket) -> None:
    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge(TIES, OUT, progress=stop_after(6), max_shard_bytes=SHARD)
    assert merge(Threads(2)).resumed > 0
    assert memory.contents("models/out") == alone()


@pytest.mark.slow
@pytest.mark.parametrize("again", ["workers", "one process"])
def test_tensors_that_were_not_checked_for_nan_are_computed_again(here: Path, memory: MemoryBucket, again: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge(LINEAR, OUT, progress=stop_after(6), allow_nonfinite=True, max_shard_bytes=SHARD)
    merged = (
        merge(Threads(2), LINEAR)
        if again == "workers"
        else weightsmith.merge(LINEAR, OUT, progress=False, max_shard_bytes=SHARD)
    )
    assert merged.resumed == 0
    assert memory.contents("models/out") == alone(LINEAR)


@pytest.mark.slow
def test_a_slow_part_is_done_by_a_second_worker_and_both_upload(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "SLOW_SECONDS", 0.2)
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


@pytest.mark.slow
def test_a_worker_that_is_stopped_too_late_removes_nothing_that_was_published(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has uploaded its file, and finds that the claim is gone: the run has published what a second worker made."""
    monkeypatch.setattr(cluster, "SLOW_SECONDS", 0.2)
    put, publish, put_and_check = BucketTarget._put, BucketTarget.publish, BucketTarget.put
    late, published, ended = list[str](), threading.Event(), threading.Event()
    slow = list[int]()

    def put_slowly(self: BucketTarget, name: str, file: Path) -> Any:
        value = put(self, name, file)
        if not late:
            late.append(name)
            slow.append(threading.get_ident())
            assert published.wait(60)
        return value

    def tell(self: BucketTarget, *args: Any, **options: Any) -> None:
        publish(self, *args, **options)
        published.set()

    def check_and_tell(self: BucketTarget, name: str, file: Path) -> Any:
        try:
            return put_and_check(self, name, file)
        finally:
            if threading.get_ident() in slow:
                ended.set()

    monkeypatch.setattr(BucketTarget, "_put", put_slowly)
    monkeypatch.setattr(BucketTarget, "publish", tell)
    monkeypatch.setattr(BucketTarget, "put", check_and_tell)
    merge(Threads(2))
    assert ended.wait(60)
    time.sleep(0.2)
    assert late[0] in alone()
    assert memory.contents("models/out") == alone()


def test_results_of_other_recipes_that_must_be_written_first_are_refused(here: Path) -> None:
    last = TIES | {"models": [{"model": "first", "parameters": {"weight": 1}}]}
    with pytest.raises(ParameterError, match="must be written first, to a folder that other machines do not see"):
        merge(Threads(1), [MODEL_WIDE | {"name": "first"}, last])


@pytest.mark.slow
def test_products_are_made_by_one_worker_and_read_by_all_others(here: Path, memory: MemoryBucket) -> None:
    workers = Threads(3)
    merge(workers, MODEL_WIDE)
    product_keys = [key for key in memory.sent() if "/products/" in key]
    assert len(product_keys) == len({*product_keys}) > 0
    assert Counter(share.part for share in workers.started)[None] == 1
    assert workers.started[0].part is None, "all parts need it"
    assert memory.contents("models/out") == alone(MODEL_WIDE)


@pytest.mark.slow
def test_a_product_that_is_damaged_in_the_bucket_is_not_used(here: Path, memory: MemoryBucket) -> None:
    damaged: list[str] = []

    def before(share: Share) -> None:
        for key, data in memory.objects.items():
            if "/products/" in key and share.part and not damaged:
                damaged.append(key)
                memory.put(key, bytes([data[0] ^ 1]) + data[1:])

    merge(Threads(1, before), MODEL_WIDE)
    assert damaged
    assert memory.contents("models/out") == alone(MODEL_WIDE)


@pytest.mark.slow
def test_a_part_of_a_lost_worker_is_done_again_and_keeps_what_was_finished(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[str] = []
    plain, close = Staging.finish, Staging.close

    def finish(self: Staging, name: str, done: Any) -> None:
        plain(self, name, done)
        finished.append(name)
        if len(finished) == 2:
            raise Died

    def killed(self: Staging) -> None:
        """Only what ends with a process ends."""
        if len(finished) == 2 and self._spec.part:
            self._close_files()
            self._locks.close()
        else:
            close(self)

    monkeypatch.setattr(Staging, "finish", finish)
    monkeypatch.setattr(Staging, "close", killed)
    workers = Threads(1)
    merged = merge(workers)
    assert workers.started_again() == {*workers.died}, "the part of the lost worker, and no other"
    assert len(workers.died) == 1
    assert sorted(finished) == sorted(step.out.name for step in merged.plan.steps), "none was made twice"
    assert memory.contents("models/out") == alone()


@pytest.mark.slow
def test_a_file_that_changes_after_it_was_reported_is_made_again(
    here: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a worker that was taken for lost, and goes on."""
    plain, changed = Staging.adopt, list[str]()

    def adopt(self: Staging, built: Built) -> None:
        plain(self, built)
        if built.files and not changed:
            changed.extend(built.files)
            token = self._notes["token"]
            key = f"models/out/{changed[0]}"
            import obstore

            obstore.put(memory.store, key, b"other", attributes={"weightsmith": f"{token} other"})

    monkeypatch.setattr(Staging, "adopt", adopt)
    with pytest.raises(StoreError, match="1 of the uploaded files are gone"):
        merge(Threads(2))
    assert "models/out/config.json" not in memory.objects
    monkeypatch.setattr(Staging, "adopt", plain)
    assert merge(Threads(2)).resumed > 0
    assert memory.contents("models/out") == alone()


@pytest.mark.slow
def test_a_worker_that_goes_on_after_another_run_has_taken_over_changes_nothing(here: Path, memory: MemoryBucket) -> None:
    def before(share: Share) -> None:
        claim = next(key for key in memory.objects if key.endswith("/claim"))
        memory.delete(claim)  # as `weightsmith clean` does

    with pytest.raises(StoreError, match="another run has taken the unfinished work"):
        merge(Threads(1, before))
    for leftover in here.glob(".out*"):
        shutil.rmtree(leftover)
    assert not [key for key in memory.objects if key.endswith((".safetensors", ".json"))]


@pytest.mark.slow
def test_an_output_that_is_replaced_is_no_model_while_workers_put_files(here: Path, memory: MemoryBucket) -> None:
    weightsmith.merge(LINEAR, OUT, progress=False, max_shard_bytes=SHARD)
    seen: list[set[str]] = []
    merge(Threads(2, lambda share: seen.append({*memory.contents("models/out")})), overwrite=True)
    assert not any(names & {"config.json", "model.safetensors.index.json", "weightsmith.json"} for names in seen)
    assert memory.contents("models/out") == alone()
    assert weightsmith.verify(OUT).extra == ()
    assert BucketTarget("s3", "bkt", "models/out").staging not in str(memory.objects.keys())
