"""A calibration by several workers: one runs the text, all quantise weights, and the bytes are those of one process."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.execution.distributed.threads import Died, Threads
from tests.output_help import tree
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.resources import Resources
from weightsmith._execution import cluster
from weightsmith._execution import execute as execution
from weightsmith._execution.cluster import Share, share_out
from weightsmith._execution.options import RunOptions
from weightsmith._execution.together import Helper, execute_part
from weightsmith._features.any_recipe import prepare_any
from weightsmith._outputs.shared import MAX_TASK_BYTES, TaskBoard
from weightsmith._outputs.staging import Staging
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.prepared import Prepared
from weightsmith.abc.product import ProductKind

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file

from tests.calibration_help import save_model, settings
from weightsmith._features.quantisation.calibration import layer

SHARD = 20_000
"""So that there is a weight file for each part."""
SEEN_SECONDS = 5.0
"""How long the leader of a test waits for helpers."""
OPTIONS = RunOptions(threads=1, fsync=False)
CASES: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "gptq": ("llama-128", "w4a16", {"bits": None, "uniform": False}),
    "mixture": ("mixtral", "w4a16", {"bits": None, "uniform": False, "group_size": 32}),
    "exl3": ("llama-128", "exl3", {"bits": 2, "uniform": False}),
}


def calibrated(case: str = "gptq") -> Prepared:
    name, format, options = CASES[case]
    folder = Path(f"model-{name}")
    if not folder.exists():
        save_model(folder, name)
    recipe = {"merge_method": "passthrough", "models": [{"model": str(folder)}]}
    return prepare_any(recipe, RecipeOptions(quantize=format, max_shard_bytes=SHARD), settings(Path(), **options))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "PART_BYTES", 2000)
    return tmp_path


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """Thread and weights of each task that was done. The leader waits for helpers, and tasks take a while."""
    noted: list[tuple[str, tuple[str, ...]]] = []
    plain, has_helpers = layer.quantise_task, TaskBoard.has_helpers

    def note(task: Mapping[str, Any], *args: Any) -> Any:
        time.sleep(0.1)
        arrays = plain(task, *args)
        noted.append((threading.current_thread().name, tuple(task["weights"])))
        return arrays

    def wait(self: TaskBoard) -> bool:
        until = time.monotonic() + SEEN_SECONDS
        while not has_helpers(self) and time.monotonic() < until:
            time.sleep(0.02)
        return has_helpers(self)

    use(monkeypatch, note)
    monkeypatch.setattr(TaskBoard, "has_helpers", wait)
    return noted


def use(monkeypatch: pytest.MonkeyPatch, quantise: Callable[..., Any]) -> None:
    """Have leader and helpers do tasks in this way."""
    from weightsmith._engine.products import find_kind
    from weightsmith._execution import together

    def kind_of(op: str) -> ProductKind:
        kind = find_kind(op)
        return kind if kind.help is None else replace(kind, help=quantise)

    monkeypatch.setattr(layer, "quantise_task", quantise)
    monkeypatch.setattr(together, "find_kind", kind_of)


def alone(case: str) -> None:
    with calibrated(case) as prepared:
        execution.execute(prepared, "alone/out", OPTIONS)


def shared(workers: Threads, case: str) -> None:
    with calibrated(case) as prepared:
        try:
            execution.execute(prepared, "shared/out", OPTIONS, helpers=partial(share_out, workers=workers))
        finally:
            workers.join()


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_one_process(here: Path, done: list[tuple[str, tuple[str, ...]]], case: str) -> None:
    alone(case)
    workers = Threads(3)
    shared(workers, case)
    assert tree(here / "shared") == tree(here / "alone")
    assert len({thread for thread, _ in done}) > 1
    names = [name for _, weights in done for name in weights]
    assert len(names) == len(set(names)), "none was quantised twice"
    assert sorted(share.helper for share in workers.started if share.part is None) == [0, 1, 2]
    assert {share.helper for share in workers.stopped} == {1, 2}


@pytest.mark.long
def test_weights_of_equal_bytes_and_other_shapes_are_told_apart(here: Path, done: list[tuple[str, tuple[str, ...]]]) -> None:
    """An MLP that does nothing, as layers that are added for later training have: zeros of 96 x 128 and of 128 x 96."""
    [path] = save_model(Path("model-llama-128"), "llama-128").glob("*.safetensors")
    tensors = load_file(path)
    zeros = [name for name in tensors if ".layers.0.mlp." in name]
    assert {tuple(tensors[name].shape) for name in zeros} == {(96, 128), (128, 96)}
    path.unlink()  # it may be a link to the model of other tests
    save_file(tensors | {name: torch.zeros_like(tensors[name]) for name in zeros}, path, metadata={"format": "pt"})
    alone("gptq")
    shared(Threads(2), "gptq")
    assert {*zeros} <= {name for _, weights in done for name in weights}
    assert tree(here / "shared") == tree(here / "alone")


LEADER = "weightsmith-product"
"""The thread that computes products."""


@pytest.mark.matrix("leader")
@pytest.mark.long
@pytest.mark.parametrize("who", ["leader", "helper"])
def test_what_a_lost_worker_was_at_others_do(
    here: Path, done: list[tuple[str, tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    alone("gptq")
    plain, lost = layer.quantise_task, list[str]()

    def quantise(*arguments: Any) -> Any:
        if not lost and (threading.current_thread().name == LEADER) == (who == "leader") and len(done) > 2:
            lost.append(who)
            raise Died
        return plain(*arguments)

    use(monkeypatch, quantise)
    workers = Threads(3)
    shared(workers, "gptq")
    assert lost == [who]
    assert workers.started.count(Share(None)) == (2 if who == "leader" else 1)
    names = [name for _, weights in done for name in weights]
    assert len(names) == len(set(names)), "none was quantised twice"
    assert tree(here / "shared") == tree(here / "alone")


@pytest.mark.long
def test_what_a_helper_cannot_do_the_leader_does(
    here: Path, done: list[tuple[str, tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone("gptq")
    plain, failed = layer.quantise_task, list[str]()

    def quantise(*arguments: Any) -> Any:
        if threading.current_thread().name != LEADER:
            failed.append("")
            raise MemoryError
        return plain(*arguments)

    use(monkeypatch, quantise)
    shared(Threads(2), "gptq")
    assert failed
    assert {thread for thread, _ in done} == {LEADER}
    assert tree(here / "shared") == tree(here / "alone")


@pytest.mark.long
def test_tasks_for_which_the_disk_has_no_room_the_leader_does(
    here: Path, done: list[tuple[str, tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone("gptq")
    asked = list[str]()

    def put(self: TaskBoard, array: Any) -> str:
        asked.append("")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TaskBoard, "put", put)
    shared(Threads(2), "gptq")
    assert asked
    assert not done
    assert tree(here / "shared") == tree(here / "alone")


@pytest.mark.matrix("in turn")
@pytest.mark.long
@pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "at once"])
def test_parts_make_each_product_once(
    here: Path, done: list[tuple[str, tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    alone("gptq")
    kept, plain = list[str](), Staging.keep

    def keep(self: Staging, product: Any, arrays: Any) -> Any:
        kept.append(product.name)
        return plain(self, product, arrays)

    if not at_once:
        monkeypatch.setattr(TaskBoard, "has_helpers", lambda self: False)

    def part(k: int) -> None:
        with calibrated() as prepared:
            execute_part(prepared, "shared/out", (k, 3), OPTIONS)

    monkeypatch.setattr(Staging, "keep", keep)
    parts = [threading.Thread(target=part, args=(k,)) for k in (1, 2, 3)]
    for thread in parts:
        thread.start()
        if not at_once:
            thread.join()
    for thread in parts:
        thread.join()
    assert len(kept) == len(set(kept))
    with calibrated() as prepared:
        execution.execute(prepared, "shared/out", OPTIONS)
    assert tree(here / "shared") == tree(here / "alone")


def test_arrays_of_equal_bytes_have_names_by_dtype_and_shape(tmp_path: Path) -> None:
    board = TaskBoard(tmp_path / "tasks", tmp_path / "lock")
    wide, tall, integers = np.zeros((2, 8), np.float32), np.zeros((8, 2), np.float32), np.zeros((2, 8), np.int32)
    names = [board.put(array) for array in (wide, tall, integers, tall.T)]
    assert names[3] == names[0]
    assert len(set(names)) == 3
    read = [board.array(name) for name in names]
    assert [(array.dtype.name, array.shape) for array in read] == [
        ("float32", (2, 8)),
        ("float32", (8, 2)),
        ("int32", (2, 8)),
        ("float32", (2, 8)),
    ]


def test_a_result_of_other_shapes_or_dtypes_is_made_again(tmp_path: Path) -> None:
    board, calls = TaskBoard(tmp_path / "tasks", tmp_path / "lock"), list[str]()
    spec = TensorSpec("x", DTYPES["F32"], (2, 3))

    def make() -> Any:
        calls.append("")
        return [np.ones((2, 3), np.float32)]

    for other in ([np.ones((3, 2), np.float32)], [np.ones((2, 3), np.int32)], [], [np.ones((2, 3), np.float32)] * 2):
        calls.clear()
        (tmp_path / "tasks" / "results" / "1").unlink(missing_ok=True)
        board.take("1", lambda other=other: other)
        for _ in range(2):
            arrays = board.take("1", make, [spec])
            assert arrays is not None
            assert [(array.dtype.name, array.shape) for array in arrays] == [("float32", (2, 3))]
        assert len(calls) == 1


@pytest.mark.parametrize("change", ["cut", "bit", "gone", "other"])
def test_a_damaged_array_is_an_error(tmp_path: Path, change: str) -> None:
    board = TaskBoard(tmp_path / "tasks", tmp_path / "lock")
    name = board.put(np.arange(6.0).reshape(2, 3))
    assert board.array(name).tolist() == [[0, 1, 2], [3, 4, 5]]
    path = tmp_path / "tasks" / f"{name}.array"
    data = bytearray(path.read_bytes())
    if change == "gone":
        path.unlink()
    elif change == "other":
        (tmp_path / "tasks" / f"{board.put(np.ones(6))}.array").replace(path)
    else:
        data[-1] ^= 1
        path.write_bytes(data[:-3] if change == "cut" else data)
    with pytest.raises(OSError, match=r"damaged|No such file"):
        board.array(name)


def test_helpers_are_seen_while_they_wait(tmp_path: Path) -> None:
    board = TaskBoard(tmp_path / "tasks", tmp_path / "lock")
    assert not board.has_helpers()
    with board.helping() as first, board.helping() as second:
        assert (first, second) == (True, True)
        assert board.has_helpers()
    assert not board.has_helpers()
    assert board.tasks() == []
    key = board.offer({"op": "x"})
    assert board.tasks() == [(key, {"op": "x"})]
    (tmp_path / "tasks" / f"{key}.task").write_bytes(b'{"op":"y"}')
    assert board.tasks() == []


@pytest.mark.parametrize("what", ["link", "dangling link", "folder", "pipe", "large"])
def test_what_is_no_task_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    board, tried = TaskBoard(tmp_path / "tasks", tmp_path / "lock"), list[str]()

    def quantise(*_: Any) -> Any:
        tried.append("")
        return []

    use(monkeypatch, quantise)
    key = board.offer({"op": "quantised_layer"})
    stray = tmp_path / "tasks" / f"{'0' * 32}.task"  # before the task, in order
    (tmp_path / "elsewhere").write_text("{}")
    make: dict[str, Callable[[], object]] = {
        "link": lambda: stray.symlink_to(tmp_path / "elsewhere"),
        "dangling link": lambda: stray.symlink_to("nowhere"),
        "folder": lambda: (stray / "inner").mkdir(parents=True),
        "pipe": lambda: os.mkfifo(stray),
        "large": lambda: stray.write_bytes(bytes(MAX_TASK_BYTES + 1)),
    }
    make[what]()
    assert board.tasks() == [(key, {"op": "quantised_layer"})]
    helper = Helper(board, Resources(threads=1))
    helper()
    assert len(tried) == 1
    helper.close()
    board.clear()
    assert not (tmp_path / "tasks").exists()
    assert (tmp_path / "elsewhere").read_text() == "{}"


def test_tasks_behind_a_link_are_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results would be written there."""
    TaskBoard(tmp_path / "elsewhere", tmp_path / "lock").offer({"op": "quantised_layer"})
    (tmp_path / "tasks").symlink_to("elsewhere")
    board = TaskBoard(tmp_path / "tasks", tmp_path / "lock")
    use(monkeypatch, lambda *_: [])
    helper = Helper(board, Resources(threads=1))
    helper()
    helper.close()
    assert board.tasks() == []
    assert [path.suffix for path in (tmp_path / "elsewhere").iterdir()] == [".task"]


def test_a_task_that_was_removed_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper may have seen it before the leader had all results."""
    board, tried = TaskBoard(tmp_path / "tasks", tmp_path / "lock"), list[str]()

    def quantise(*_: Any) -> Any:
        tried.append("")
        return []

    use(monkeypatch, quantise)
    board.offer({"op": "quantised_layer"})
    seen = board.tasks()
    helper = Helper(board, Resources(threads=1))
    monkeypatch.setattr(TaskBoard, "tasks", lambda self: seen)
    board.clear()
    helper()
    assert not tried
    board.offer({"op": "quantised_layer"})
    helper = Helper(board, Resources(threads=1))
    helper()
    helper()
    assert len(tried) == 1
    helper.close()
