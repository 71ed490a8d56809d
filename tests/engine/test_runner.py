"""A run of a plan: what ends it, what a later run takes over, and the order of products."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from weightsmith._base.errors import Unsupported
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.local import DiscardedOutput, Outcome, Run, run
from weightsmith._engine.resources import Resources, Workload
from weightsmith._engine.tile_work import Merger
from weightsmith._files.arrays import view_of
from weightsmith._methods.jobs.combination import CombinationJob
from weightsmith._models.sources.composed import StateDict
from weightsmith._plans import ModelInput, Plan, Product, Provenance, Read, Settings, Step
from weightsmith.abc import product as base
from weightsmith.abc.output import Finished
from weightsmith.abc.product import Arrays, ProductContext, ProductKind

NAMES = ("a", "b", "c")
SHAPE = (1500, 300)


class Kept(DiscardedOutput):
    """Keeps tensors in memory, and says which products were forgotten."""

    def __init__(self, plan: Plan) -> None:
        self.data = {step.out.name: np.zeros(step.out.nbytes, np.uint8) for step in plan.steps}
        self.finished: list[str] = []
        self.log: list[str] = []

    def write(self, name: str, start_byte: int, buffer: Any) -> None:
        data = np.frombuffer(buffer, np.uint8)
        self.data[name][start_byte : start_byte + data.size] = data

    def finish(self, name: str, done: Finished) -> None:
        self.finished.append(name)

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        self.log.append(product.name)
        return arrays

    def forget(self, product: Product) -> None:
        self.log.append(f"-{product.name}")


def plan_of(method: str, shared: dict[str, Any], products: tuple[Product, ...] = ()) -> Plan:
    steps = tuple(
        Step(TensorSpec(name, DTYPES["BF16"], SHAPE), method, (Read(0, name), Read(1, name)), method == "slerp")
        for name in NAMES
    )
    models = tuple(ModelInput(f"m{i}", "", "") for i in range(2))
    return Plan(Provenance("test"), models, steps, (Settings(shared, ({"weight": 0.5}, {"weight": 0.5})),), products)


LINEAR = plan_of("linear", {"normalize": True})
SLERP = plan_of("slerp", {"t": 0.3})


def inputs() -> list[StateDict]:
    rng = np.random.default_rng(0)
    models = [{name: rng.standard_normal(SHAPE).astype(ml_dtypes.bfloat16) for name in NAMES} for _ in range(2)]
    return [StateDict({n: view_of(n, array) for n, array in m.items()}, f"m{i}") for i, m in enumerate(models)]


def go(plan: Plan, output: DiscardedOutput, threads: int = 3, **workload: Any) -> Outcome:
    return run(plan, inputs(), output, Resources(threads, tile_bytes=1), Workload(**workload))


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_of_a_kernel_in_one_thread_ends_all(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, lock, count, before = CombinationJob.apply, threading.Lock(), [0], {*threading.enumerate()}

    def apply(self: CombinationJob, tile: Any, out: Any) -> None:
        with lock:
            count[0] += 1
            number = count[0]
        if number == 5:
            raise ZeroDivisionError("of tile 5")
        plain(self, tile, out)

    monkeypatch.setattr(CombinationJob, "apply", apply)
    with pytest.raises(ZeroDivisionError, match="of tile 5"):
        go(LINEAR, Kept(LINEAR), threads)
    assert count[0] < 5 + 2 * threads  # each thread may finish the tile that it has
    assert {*threading.enumerate()} <= before


def test_after_an_error_threads_that_wait_are_woken() -> None:
    waiting, woken = threading.Event(), threading.Event()

    class Slow(DiscardedOutput):
        def write(self, name: str, start_byte: int, buffer: Any) -> None:
            if name == "a" and start_byte == 0:
                assert waiting.wait(20)
                raise OSError("no space")
            waiting.set()
            assert woken.wait(20)

    resources = Resources(2, tile_bytes=1)
    with pytest.raises(OSError, match="no space"):
        run(LINEAR, inputs(), Slow(), resources, abandon=woken.set)
    assert woken.is_set()


@pytest.mark.long
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_run_that_ended_in_a_pass_is_done_again_from_the_last_finished_tensor(
    stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor has 7 tiles in the statistics pass and 7 more in the last one: the run ends in the second tensor."""
    expected = Kept(SLERP)
    go(SLERP, expected)
    output, done, count = Kept(SLERP), {}, [0]
    plain, step_done = Merger.statistics, Run._step_done

    def statistics(self: Merger, *arguments: Any) -> Any:
        count[0] += 1
        if len(output.finished) == 1 and count[0] >= 7 + stop:
            raise KeyboardInterrupt
        return plain(self, *arguments)

    def remember(self: Run, active: Any) -> None:
        step_done(self, active)
        done.update(self.finished)

    with monkeypatch.context() as patch:
        patch.setattr(Merger, "statistics", statistics)
        patch.setattr(Run, "_step_done", remember)
        with pytest.raises(KeyboardInterrupt):
            go(SLERP, output, 1)
    assert output.finished == ["a"]
    again = go(SLERP, output, skip=done)
    assert {name: data.tobytes() for name, data in output.data.items()} == {n: d.tobytes() for n, d in expected.data.items()}
    assert output.finished[0] == "a"
    assert sorted(output.finished) == ["a", "b", "c"]
    assert again.read_bytes == 2 * 2 * 2 * SLERP.steps[0].out.nbytes  # two tensors, two models, two passes


# ---- products


def products(monkeypatch: pytest.MonkeyPatch, compute: Any) -> tuple[Product, ...]:
    """x, then y, which needs x and is transient, then z, which needs y."""
    kind = ProductKind("counting", compute=compute, transient=True)
    monkeypatch.setattr("weightsmith._engine.product_graph.find_kind", lambda op: kind)
    monkeypatch.setattr("weightsmith._engine.local.find_kind", lambda op: kind)

    def of(name: str, needs: Sequence[str] = (), *, transient: bool = False) -> Product:
        return Product(name, "counting", (TensorSpec(name, DTYPES["I64"], (1,)),), {}, needs=tuple(needs), transient=transient)

    return of("x"), of("y", ["x"], transient=True), of("z", ["y"])


@pytest.mark.long
def test_products_are_made_in_their_order_and_transient_ones_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(context: ProductContext) -> Arrays:
        before = [int(context.arrays(name)[0][0]) for name in context.product.needs]
        context.progress(1, 1)
        return [np.array([1 + sum(before)])]

    plan = plan_of("linear", {"normalize": True}, products(monkeypatch, compute))
    output = Kept(plan)
    results = go(plan, output).results
    assert output.log == ["x", "y", "z", "-y"]
    assert [int(results.array(name)[0]) for name in "xz"] == [1, 3]
    assert not results.finished("y")
    again = Kept(plan)
    go(plan, again, results=results)
    assert again.log == []  # nothing needs y any more


def test_the_output_is_let_go_of_without_a_search_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("slerp", {"t": 0.5}, products(monkeypatch, lambda context: [np.zeros(1, np.int64)]))
    output = Kept(plan)
    known = weakref.ref(output)
    gc.disable()
    try:
        go(plan, output)
        del output
        assert known() is None
    finally:
        gc.enable()


def test_an_error_of_a_product_names_it_and_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(context: ProductContext) -> Arrays:
        if context.product.name == "y":
            raise Unsupported("not this one")
        return [np.array([1])]

    plan = plan_of("linear", {"normalize": True}, products(monkeypatch, compute))
    with pytest.raises(Unsupported) as caught:
        go(plan, Kept(plan))
    assert caught.value.product == "y"


@pytest.mark.long
def test_a_product_that_nobody_waits_for_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), []

    def compute(context: ProductContext) -> Arrays:
        try:
            while True:
                context.progress(0, 1)
                begun.set()
        except base.Cancelled:
            ended.append(context.product.name)
            raise

    plan = plan_of("linear", {"normalize": True}, products(monkeypatch, compute))

    def stop(now: object) -> None:
        if begun.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, inputs(), Kept(plan), Resources(1), progress=stop)
    assert ended == ["x"]


def test_a_product_sees_the_tensors_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, np.ndarray] = {}
    whole = inputs()[0]
    step = Step(TensorSpec("a", DTYPES["BF16"], SHAPE), "copy", (Read(0, "a"),))

    def compute(context: ProductContext) -> Arrays:
        array = np.empty(SHAPE, np.float32)
        context.fill({"a": array})
        seen.update(fill=array, rows=context.rows("a", [0, 700, 1499]), largest=context.largest(["a"]))
        return [np.array([1])]

    kind = ProductKind("looking", compute=compute)
    monkeypatch.setattr("weightsmith._engine.product_graph.find_kind", lambda op: kind)
    monkeypatch.setattr("weightsmith._engine.local.find_kind", lambda op: kind)
    product = Product("p", "looking", (TensorSpec("p", DTYPES["I64"], (1,)),), {}, steps=(step,))
    plan = plan_of("linear", {"normalize": True}, (product,))
    go(plan, Kept(plan), steps=())
    expected = np.empty(SHAPE, ml_dtypes.bfloat16)
    whole.read_into("a", 0, expected.reshape(-1).view(np.uint8))
    np.testing.assert_array_equal(seen["fill"], expected.astype(np.float32))
    np.testing.assert_array_equal(seen["rows"], expected[[0, 700, 1499]].astype(np.float32))
    assert seen["largest"] == np.abs(expected.astype(np.float32)).max()
