"""The driver: what it does about lost, slow and failing workers, and that the bytes are those of one process."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.cli_help import CONFIG
from tests.execution.distributed.threads import Died, Threads
from tests.execution.test_run import files
from tests.mini import write_checkpoint
from tests.output_help import open_staging
from weightsmith._app.cli.failures import Exit, exit_code
from weightsmith._base.errors import Busy, CheckpointError, NonFinite, ParameterError, StoreError, WeightsmithError, WorkerLost
from weightsmith._execution import cluster
from weightsmith._execution import execute as execution
from weightsmith._execution.cluster import Share, few_files, is_portable, part_count, share_out
from weightsmith._execution.options import RunOptions
from weightsmith._execution.run import NO_CALLBACKS, Callbacks, Merged
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._outputs import disk
from weightsmith._outputs.area import staged_plan, staging_folder
from weightsmith._outputs.locks import is_held
from weightsmith._outputs.staging import Staging
from weightsmith._planning.options import RecipeOptions
from weightsmith._plans.parts import parts_of as plan_parts
from weightsmith.abc.output import OutputSpec, Target

TIES = {
    "merge_method": "ties",
    "base_model": "./a",
    "models": [{"model": "./b", "parameters": {"weight": 1, "density": 0.4}}, {"model": "./c", "parameters": {"weight": 0.5}}],
    "parameters": {"density": 0.3},
    "dtype": "bfloat16",
}
SHARD = 500_000
"""So that there are more files than workers: each makes whole ones."""
MODEL_WIDE = TIES | {"parameters": {"density": 0.3, "scope": "model"}}


@pytest.fixture
def here(linked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "PART_BYTES", 1 << 20)
    yield tmp_path
    for lock in tmp_path.glob("*/lock"):
        assert not is_held(lock.parent)


def merge(workers: Threads, recipe: Any = TIES, callbacks: Callbacks = NO_CALLBACKS, **options: Any) -> Merged:
    """A merge whose parts these workers do."""
    with prepare_any(recipe, RecipeOptions(max_shard_bytes=SHARD), QuantizeSettings()) as prepared:
        try:
            return execution.execute(
                prepared,
                "out",
                RunOptions(fsync=False, threads=1, **options),
                callbacks,
                helpers=partial(share_out, workers=workers),
            )
        finally:
            workers.join()


def parts_of(workers: Threads) -> list[tuple[int, int] | None]:
    return [share.part for share in workers.started]


@pytest.mark.long
@pytest.mark.parametrize("recipe", [TIES, MODEL_WIDE], ids=["tensor", "model"])
def test_the_bytes_are_those_of_one_process(here: Path, recipe: Any) -> None:
    alone = weightsmith.merge(recipe, "whole", progress=False, max_shard_bytes=SHARD)
    workers = Threads(3)
    merged = merge(workers, recipe=recipe)
    assert files(here / "out") == files(here / "whole")
    assert merged.resumed == 0
    assert (merged.read_bytes, merged.written_bytes) == (alone.read_bytes, alone.written_bytes), "nothing was done twice"
    assert merged.distance == alone.distance
    assert len(workers.started) > 3
    assert not any(share.second for share in workers.started), "no part was slow"
    assert not staging_folder(here / "out").exists()


@pytest.mark.long
def test_a_part_of_a_lost_worker_is_done_again_and_keeps_what_was_finished(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weightsmith.merge(TIES, "whole", progress=False, max_shard_bytes=SHARD)
    finished: list[str] = []
    plain = Staging.finish

    def finish(self: Staging, name: str, done: Any) -> None:
        plain(self, name, done)
        finished.append(name)
        if len(finished) == 2:
            raise Died

    monkeypatch.setattr(Staging, "finish", finish)
    workers = Threads(1)
    merged = merge(workers)
    assert workers.started_again() == {*workers.died}, "the part of the lost worker, and no other"
    assert len(workers.died) == 1
    assert sorted(finished) == sorted(step.out.name for step in merged.plan.steps), "none was made twice"
    assert files(here / "out") == files(here / "whole")


@pytest.mark.long
def test_workers_that_are_lost_again_and_again_are_an_error(here: Path) -> None:
    def before(share: Share) -> None:
        if share.part is not None and share.part[0] == 2:
            raise Died

    workers = Threads(2, before)
    with pytest.raises(WorkerLost, match=r"the worker of part 2 of \d+ was lost 4 times: killed") as caught:
        merge(workers)
    assert sum(part is not None and part[0] == 2 for part in parts_of(workers)) == 4
    assert "run again to resume" in str(caught.value)
    merged = merge(Threads(2))
    assert merged.resumed > 0
    weightsmith.merge(TIES, "whole", progress=False, max_shard_bytes=SHARD)
    assert files(here / "out") == files(here / "whole")


@pytest.mark.long
def test_a_part_whose_lock_a_lost_worker_still_holds_waits_for_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a machine is cut off from the cluster, but not from the shared folder."""
    weightsmith.merge(TIES, "whole", progress=False, max_shard_bytes=SHARD)
    lost = threading.Event()
    plain, shares = Staging.open.__func__, []  # type: ignore[attr-defined]

    def opened(cls: type, target: Target, spec: OutputSpec) -> Staging:
        staging: Staging = plain(cls, target, spec)
        if spec.part.startswith("1-of") and not shares:
            shares.append(staging)  # it keeps the lock
            raise Died
        return staging

    monkeypatch.setattr(Staging, "open", classmethod(opened))
    workers = Threads(1)
    threading.Timer(1.5, lambda: (shares[0].close(), lost.set())).start()
    merge(workers)
    assert lost.is_set()
    assert parts_of(workers).count(workers.started[0].part) >= 3
    assert files(here / "out") == files(here / "whole")


@pytest.mark.long
def test_a_lock_that_stays_is_an_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "BUSY_SECONDS", 0.5)

    def before(share: Share) -> None:
        if share.part is not None and share.part[0] == 1 and not held:
            (staging_folder(here / "out") / "parts").mkdir(exist_ok=True)
            held.append(open_staging("out", prepared.plan.layout, order().identity, part=f"1-of-{share.part[1]}"))

    held: list[Staging] = []
    workers = Threads(1, before)

    def order() -> Any:
        return workers.orders[-1]

    with prepare_any(TIES, RecipeOptions(max_shard_bytes=SHARD), QuantizeSettings()) as prepared:
        with pytest.raises(Busy, match="another process is doing part 1 of"):
            merge(workers)
        for staging in held:
            staging.close()


@pytest.mark.long
def test_a_disk_that_is_away_for_a_moment_is_waited_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weightsmith.merge(TIES, "whole", progress=False, max_shard_bytes=SHARD)
    monkeypatch.setattr(cluster, "MISSING_PAUSE_SECONDS", 0.1)
    seen: list[bool] = []

    def before(share: Share) -> None:
        cluster._open.clear()  # as in a new process
        if len(seen) == 0:
            (here / "b").rename(here / "away")
        elif len(seen) == 2:
            (here / "away").rename(here / "b")
        seen.append((here / "b").exists())

    merge(Threads(1, before))
    assert seen[:3] == [False, False, True]
    assert files(here / "out") == files(here / "whole")


def test_a_disk_that_stays_away_ends_the_run_and_the_work_is_kept(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "MISSING_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(cluster, "MISSING_SECONDS", 0.1)

    def before(share: Share) -> None:
        cluster._open.clear()  # as in a new process
        if (here / "b").exists():
            (here / "b").rename(here / "away")

    with pytest.raises(WorkerLost, match=r"workers cannot read the files of part 1 of \d+, for 0 s now") as caught:
        merge(Threads(1, before))
    assert "Finished tensors are kept in" in str(caught.value.state)
    assert exit_code(caught.value) == Exit.INPUT_FAILED


@pytest.mark.long
def test_a_slow_part_is_done_by_a_second_worker_and_the_first_answer_counts(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weightsmith.merge(TIES, "whole", progress=False, max_shard_bytes=SHARD)
    monkeypatch.setattr(cluster, "SLOW_SECONDS", 0.2)
    monkeypatch.setattr("weightsmith._outputs.staging.ATTACH_SECONDS", 1)  # the first worker finds nothing
    go_on = threading.Event()

    def before(share: Share) -> None:
        if share.part is not None and share.part[0] == 1 and not share.second:
            assert go_on.wait(30)

    workers = Threads(2, before)
    plain = workers.stop

    def stop(share: Share) -> None:
        plain(share)
        go_on.set()

    workers.stop = stop  # type: ignore[method-assign]
    merge(workers)
    first = workers.started[0]
    assert workers.stopped == [first]
    assert Share(first.part, second=True) in workers.started
    assert files(here / "out") == files(here / "whole")


def test_what_torch_may_round_otherwise_has_no_second_worker(here: Path) -> None:
    pytest.importorskip("torch")
    recipes = {
        True: TIES,
        False: TIES | {"merge_method": "tsv_m", "parameters": {}, "models": [{"model": "./b"}, {"model": "./c"}]},
    }
    for expected, recipe in recipes.items():
        with prepare_any(recipe, RecipeOptions(max_shard_bytes=SHARD), QuantizeSettings()) as prepared:
            assert is_portable(prepared) == expected


def test_the_error_of_a_worker_is_that_of_one_process(here: Path) -> None:
    bad = np.ones((900, 512), np.float32)
    bad[3, 4] = np.nan
    write_checkpoint(here / "d", {"model.layers.0.mlp.up_proj.weight": bad}, CONFIG)
    write_checkpoint(here / "e", {"model.layers.0.mlp.up_proj.weight": np.ones_like(bad)}, CONFIG)
    recipe = {"merge_method": "linear", "models": [{"model": f"./{m}", "parameters": {"weight": 1}} for m in "de"]}
    with pytest.raises(NonFinite) as alone:
        weightsmith.merge(recipe, "whole", progress=False, max_shard_bytes=SHARD)
    with pytest.raises(NonFinite) as caught:
        merge(Threads(2), recipe=recipe)
    assert str(caught.value) == str(alone.value)
    assert caught.value.code == alone.value.code


@pytest.mark.long
def test_ctrl_c_ends_the_workers_and_leaves_work_that_resumes_in_one_process(here: Path) -> None:
    def progress(now: weightsmith.Progress) -> None:
        if 0 < now.tensors < now.total_tensors:
            raise KeyboardInterrupt

    workers = Threads(2, lambda share: time.sleep(0.1))
    with pytest.raises(KeyboardInterrupt):
        merge(workers, callbacks=Callbacks(progress))
    assert workers.stopped
    assert not is_held(staging_folder(here / "out"))
    merged = weightsmith.merge(TIES, "out", progress=False, max_shard_bytes=SHARD)
    assert 0 < merged.resumed
    weightsmith.merge(TIES, "whole", progress=False, max_shard_bytes=SHARD)
    assert files(here / "out") == files(here / "whole")


@pytest.mark.long
def test_progress_counts_each_tensor_once_and_ends_full(here: Path) -> None:
    seen: list[weightsmith.Progress] = []
    began = time.monotonic()
    merged = merge(Threads(2), callbacks=Callbacks(seen.append))
    elapsed = time.monotonic() - began
    assert all(0 <= now.seconds <= elapsed for now in seen)
    counts = [now.tensors for now in seen]
    assert counts == sorted(counts)
    assert counts[-1] == seen[-1].total_tensors == len(merged.plan.steps)
    assert any(0 < count < len(merged.plan.steps) for count in counts)
    assert seen[-1].written_bytes == seen[-1].total_bytes


def test_another_program_or_other_files_are_an_error_that_says_what_differs(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(share: Share) -> None:
        monkeypatch.setattr("weightsmith._execution.identity.program_digest", lambda: "another")

    with pytest.raises(ParameterError, match="does not have the program") as caught:
        merge(Threads(1, before))
    assert "program code, or the version of numpy, numba, torch or libgguf: changed" in str(caught.value)


def test_an_input_that_changes_is_found_by_the_worker(here: Path) -> None:
    def before(share: Share) -> None:
        (here / "b" / "model.safetensors").touch()

    with pytest.raises(WeightsmithError) as caught:
        merge(Threads(1, before))
    assert isinstance(caught.value, CheckpointError | ParameterError)


def test_locks_that_other_machines_do_not_see_are_an_error_before_a_tensor_is_written(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver_thread, lock = threading.current_thread(), disk.lock

    def local_lock(fd: int, *, shared: bool = False) -> bool:
        return threading.current_thread() is not driver_thread or lock(fd, shared=shared)

    monkeypatch.setattr(disk, "lock", local_lock)
    with pytest.raises(StoreError, match="the locks of this folder are not shared between machines") as caught:
        merge(Threads(1))
    assert "NFS: without nolock" in str(caught.value)
    with open_staging("out", weightsmith.plan(TIES).layout, staged_plan("out")) as staging:
        assert not staging.holds_work


@pytest.mark.slow
def test_a_worker_that_does_not_see_the_folder_is_an_error(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsmith._outputs.staging.ATTACH_SECONDS", 0.2)
    own_disk = tmp_path_factory.mktemp("other")
    workers = Threads(1)
    begin = workers.begin
    monkeypatch.setattr(workers, "begin", lambda order: begin(replace(order, out=str(own_disk / "out"))))
    with pytest.raises(StoreError, match="this machine does not see the folder of the driver"):
        merge(workers)
    assert not list(own_disk.iterdir())


def test_parts_are_not_smaller_than_they_need_be(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = weightsmith.plan(TIES, max_shard_bytes=SHARD)
    assert part_count(plan, 1) == 1
    assert part_count(plan, 2) == 8
    assert part_count(plan, 100) == len(plan.layout.shards)
    monkeypatch.setattr(cluster, "PART_BYTES", 256 << 20)
    assert part_count(plan, 2) == 2


@pytest.mark.long
def test_no_resume_discards_what_was_there(here: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        merge(Threads(1), callbacks=Callbacks(interrupt))
    other = TIES | {"parameters": {"density": 0.1}}
    merged = merge(Threads(1), recipe=other, resume=False)
    assert merged.resumed == 0


def interrupt(now: weightsmith.Progress) -> None:
    if now.tensors:
        raise KeyboardInterrupt


def test_a_part_is_a_set_of_whole_files(here: Path) -> None:
    plan = weightsmith.plan(TIES, max_shard_bytes=SHARD)
    files_of = [{plan.layout.places[step.out.name].shard for step in steps} for steps in plan_parts(plan, 4)]
    assert sum(map(len, files_of)) == len(set().union(*files_of)) == len(plan.layout.shards)
    assert all(files_of)


@pytest.mark.long
def test_one_file_has_one_worker_and_the_others_are_said_to_have_no_work(here: Path) -> None:
    workers = Threads(3)
    with prepare_any(TIES, RecipeOptions(), QuantizeSettings()) as prepared:
        running, helpers = RunOptions(fsync=False, threads=1), partial(share_out, workers=workers)
        merged = execution.execute(prepared, "out", running, helpers=helpers)
        workers.join()
    assert len(workers.started) == 1
    (warning,) = [warning for warning in merged.warnings if "had work" in warning.what]
    assert "1 worker of 3" in warning.what
    size = re.search(r"--max-shard-size (\d+)MB", warning.fix)
    assert size is not None
    assert few_files(weightsmith.plan(TIES, max_shard_bytes=int(size[1]) * 1_000_000), 3, "ray") == ()
