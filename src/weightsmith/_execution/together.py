"""Parts of a plan, which several processes do: `run --part`, and the workers of a driver. They make its products together.

**Products that stream** are measured by all processes that need them, without a leader. The tensors that a product reads are
divided into at most `UNITS` units, which depend on the plan alone. Each process takes units that no other has taken, and writes
their counts to the staging folder (`SharedResults`). Then each process adds up the counts of all units. Counts are integers, so
every process gets the result that a single process would get.

**Products that compute** are computed by one process, the leader. It may offer tasks, such as the weights of a layer, to the
processes that wait for the product (`TaskBoard`). The result of a task does not depend on the process that does it.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import xxhash

from weightsmith._base.errors import ParameterError
from weightsmith._base.options import named
from weightsmith._engine.products import divisible, find_kind, has_tasks
from weightsmith._engine.resources import Workload
from weightsmith._execution.execute import check_computable
from weightsmith._execution.options import RunOptions
from weightsmith._execution.output import check_options
from weightsmith._execution.run import (
    NO_CALLBACKS,
    Callbacks,
    RunRequest,
    StagedRun,
    WorkDone,
    finished_steps,
    kept_products,
    staged,
)
from weightsmith._outputs.shared import SharedResults, TaskBoard
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._plans import Plan, Product, Step
from weightsmith._plans.parts import label, part_of
from weightsmith.abc.product import StreamingReduction

if TYPE_CHECKING:
    from weightsmith._engine.resources import Resources
    from weightsmith._outputs.shared import ArrayKinds
    from weightsmith.abc.job import Matrix, Tile
    from weightsmith.abc.output import Built
    from weightsmith.abc.product import Arrays
    from weightsmith.abc.tensors import Tensors

PRODUCTS_LABEL = "products-alone"
"""The label of the process that computes the products of all parts; any process that computes some holds `lock-products`."""
HELPER_LABEL = "helper-"
"""Prefix of the labels of the processes that do tasks for that one."""


@dataclass(frozen=True, slots=True)
class PartDone:
    """The finished work of a process that did a part, and its cost."""

    built: Built
    helped: WorkDone


def execute_part(
    prepared: Prepared,
    out: str | os.PathLike[str],
    part: tuple[int, int],
    options: RunOptions,
    callbacks: Callbacks = NO_CALLBACKS,
    *,
    helping: str = "",
    products: Mapping[str, str] = MappingProxyType({}),
) -> PartDone:
    """Run one part of a prepared plan, in parallel with other processes; see `run`.

    helping   label of the part if it is done for a driver: not `label(part)` for a second process that does the same part
    products  checksums of those that the driver has
    """
    from weightsmith._engine.product_graph import needed_later
    from weightsmith._engine.results import Results

    _check_part(prepared, out, options, bool(helping))
    plan = prepared.plan
    steps = part_of(plan, *part)
    request = RunRequest(out, options, callbacks)
    with staged(prepared, request, helping or label(part), steps, products if helping else None) as run:
        staging, measured_together = run.staging, WorkDone()
        if needed := plan.products_for(steps):
            if not staging.target.streams and are_here(prepared.inputs):
                measured_together = measure_together(run, needed, first=(part[0] - 1) / part[1])
            helper = Helper.of(run)
            with closing(helper), staging.only_process(callbacks.waiting, helper):  # other processes reuse these products
                helper.close()
                results = kept_products(plan, staging, products=needed)
                later = needed_later(plan, needed, staging.products)
                board = TaskBoard.of(staging)
                outcome = run.compute(Workload(steps=(), products=needed, results=results, tasks=board, later=later))
                measured_together += WorkDone.of(outcome)
        else:
            results = Results(plan)
        done = finished_steps(plan, staging, results, options.allow_nonfinite, steps)
        outcome = run.compute(Workload(steps=steps, products=(), skip=done, results=results))
        for model in prepared.inputs:
            model.check_unchanged()
        helped = WorkDone.of(outcome, len(done)) + measured_together
        return PartDone(staging.hand_over(durable=options.fsync and not helping), helped)


def execute_products(
    prepared: Prepared, out: str | os.PathLike[str], options: RunOptions, products: Mapping[str, str]
) -> PartDone:
    """Compute the products of a prepared plan for a driver, before other processes do its parts."""
    _check_part(prepared, out, options, helping=True)
    with staged(prepared, RunRequest(out, options), PRODUCTS_LABEL, (), products) as run:
        staging = run.staging
        with staging.only_process():
            results = kept_products(prepared.plan, staging)
            board = TaskBoard.of(staging, processes=options.processes)
            outcome = run.compute(Workload(steps=(), results=results, tasks=board))
        for model in prepared.inputs:
            model.check_unchanged()
        return PartDone(staging.hand_over(), WorkDone.of(outcome))


def execute_helper(
    prepared: Prepared, out: str | os.PathLike[str], options: RunOptions, products: Mapping[str, str], number: int
) -> NoReturn:
    """Do tasks for the process that runs `execute_products` for the same driver, until the driver stops this one.

    Raises StoreError once the driver has ended.
    """
    _check_part(prepared, out, options, helping=True)
    with staged(prepared, RunRequest(out, options), f"{HELPER_LABEL}{number}", (), products) as run:
        with closing(Helper.of(run)) as helper:
            while True:
                run.staging.check_led()
                helper()
                time.sleep(PAUSE_SECONDS)


def _check_part(prepared: Prepared, out: str | os.PathLike[str], options: RunOptions, helping: bool) -> None:
    check_options(out, options, part=not helping)
    if not options.resume:
        fix = "run once without a part and with --no-resume (resume=False), or remove the staging folder"
        raise ParameterError("a part cannot discard the work of other parts", fix=fix)
    if options.ray is not None:
        raise ParameterError("a cluster does all parts", where="ray", fix="leave out the part")
    if options.processes != 1 and not helping:
        raise ParameterError("the processes do all parts", where=named("processes"), fix="leave out the part")
    if prepared.plan.then is not None:
        raise ParameterError("a plan that begins with a measurement has no parts", fix="run the whole plan")
    check_computable(prepared)


# ---- products that all processes measure

UNITS = 32
"""At most so many: enough for several per worker of a cluster. Each costs one file per pass."""
UNIT_ELEMENTS = 1 << 24
"""Units are not smaller than this, unless the product is."""
PAUSE_SECONDS = 0.1
"""Pause between two looks at units that other processes have taken."""


def are_here(inputs: Sequence[Tensors]) -> bool:
    """Whether all inputs are on disks of this machine: each pass reads them again, which would fetch remote ones again."""
    return all(path.is_file() for source in inputs for path in source.paths)


def measure_together(run: StagedRun, products: Sequence[Product], first: float) -> WorkDone:
    """Measure the divisible ones of some products, together with the other processes in the staging folder.

    first  position of the first unit to take, 0 … 1: a process begins with the units of its own part

    Returns the work of this process. Raises as `StagedRun.compute` does.
    """
    staging, helped = run.staging, WorkDone()
    staging.look_for_products()
    for product in products:
        if divisible(product) and staging.product(product) is None:
            measuring = _Measuring(run, product, first)
            measuring.go()
            helped += measuring.helped
            with staging.only_process():
                if staging.product(product) is None:
                    staging.keep(product, measuring.reduction.arrays())
    return helped


class _Measuring:
    """The measurement of one product by several processes."""

    def __init__(self, run: StagedRun, product: Product, first: float) -> None:
        reduce = find_kind(product.op).reduce
        assert reduce is not None
        self.reduction = reduce(product)
        self.helped = WorkDone()
        self._product, self._results, self._run = product, SharedResults.of(run.staging), run
        self._units = units_of(run.prepared.plan, product)
        start = int(first * len(self._units))
        self._order = [*range(start, len(self._units)), *range(start)]
        self._counting = self.reduction
        # Hash of the division into units and of all counts so far: an earlier run may have left counts of other units.
        self._state = xxhash.xxh3_64(f"{product.name} {[*map(len, self._units)]}".encode())

    def go(self) -> None:
        """Measure the product; returns when all units are counted."""
        number = 0
        while number < self.reduction.passes():
            self._pass(number)
            number += 1

    def _pass(self, number: int) -> None:
        """Measure one pass. The counts of a unit are added as they come: together, those of float32 models are gigabytes."""
        # An earlier run may have left counts of another window: their keys differ.
        keys = [f"{self._state.hexdigest()}-{number}-{unit}" for unit in range(len(self._units))]
        self._counting = copy.deepcopy(self.reduction)  # it begins the pass again for each unit that is counted here
        self._counting.begin(number)
        counts = self._counting.partial(number)
        fits = [_fitting(counts, self._most_rows(unit)) for unit in range(len(self._units))]
        self.reduction.begin(number)
        digests: dict[int, bytes] = {}
        while True:
            for unit in self._order:
                if unit not in digests:
                    arrays = self._results.take(keys[unit], partial(self._measure, number, unit), fits[unit])
                    if arrays is not None:
                        self.reduction.add(number, arrays)
                        digests[unit] = _digest(arrays)
            if len(digests) == len(self._units):
                break
            if self._run.request.callbacks.waiting is not None:
                self._run.request.callbacks.waiting()
            time.sleep(PAUSE_SECONDS)
        self.reduction.end(number)
        for unit in range(len(self._units)):
            self._state.update(digests[unit])

    def _most_rows(self, unit: int) -> int:
        """More than the counts of a unit have: each is of at least one element of at least one input."""
        return len(self._product.models) + sum(leaf.out.size * len(leaf.inputs) for leaf in self._units[unit])

    def _measure(self, number: int, unit: int) -> Arrays:
        """Count one unit here."""
        from weightsmith._engine.local import DiscardedOutput

        of_unit = replace(self._product, steps=self._units[unit], outs=())
        one_pass = _OnePass(self._counting, number)
        outcome = self._run.compute(Workload(steps=(), products=(of_unit,), reduction=one_pass), DiscardedOutput())
        self.helped += WorkDone.of(outcome)
        return self._counting.partial(number)


def _fitting(counts: Arrays, most_rows: int) -> Callable[[ArrayKinds], bool]:
    """Whether arrays have the dtypes and shapes of these, with other lengths up to `most_rows`."""
    expected = [(array.dtype, array.shape[1:]) for array in counts]
    most = [max(len(array), most_rows) for array in counts]

    def fits(kinds: ArrayKinds) -> bool:
        alike = [(dtype, shape[1:]) for dtype, shape in kinds] == expected
        return alike and all(shape and shape[0] <= rows for (_, shape), rows in zip(kinds, most, strict=True))

    return fits


def _digest(arrays: Arrays) -> bytes:
    hasher = xxhash.xxh3_128()
    for array in arrays:
        hasher.update(array.tobytes())
    return hasher.digest()


class _OnePass(StreamingReduction):
    """One pass of a reduction whose earlier passes are finished."""

    def __init__(self, reduction: StreamingReduction, number: int) -> None:
        self._reduction, self._number = reduction, number

    def passes(self) -> int:
        return 1

    def sampled(self, number: int) -> bool:
        return self._reduction.sampled(self._number)

    def begin(self, number: int) -> None:
        self._reduction.begin(self._number)

    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> Any:
        return self._reduction.statistics(self._number, matrix, tile)

    def take(self, number: int, result: Any) -> None:
        self._reduction.take(self._number, result)

    def arrays(self) -> Arrays:
        return ()


def units_of(plan: Plan, product: Product) -> list[tuple[Step, ...]]:
    """The leaves that a product reads, in plan order, divided into units of about equal size. Depends on the plan alone."""
    leaves = list(plan.leaves_of(product))
    total = sum(leaf.out.size for leaf in leaves)
    n = max(1, min(UNITS, total // UNIT_ELEMENTS, len(leaves)))
    units: list[list[Step]] = [[] for _ in range(n)]
    before = 0
    for leaf in leaves:
        units[min((before + leaf.out.size // 2) * n // total, n - 1)].append(leaf)
        before += leaf.out.size
    return [tuple(unit) for unit in units if unit]


# ---- products that one process computes


class Helper:
    """Does tasks for the process that computes products, while this one waits for them. Call it repeatedly."""

    def __init__(self, board: TaskBoard | None, resources: Resources) -> None:
        """Do nothing yet. board: None if the plan has no tasks."""
        self._board, self._threads, self._memory_bytes = board, resources.workers, resources.product_bytes
        self._tried: set[str] = set()
        self._shown = ExitStack()
        self._is_shown = False

    @classmethod
    def of(cls, run: StagedRun) -> Helper:
        """The helper that a process calls while it waits for the products of a plan."""
        return cls(TaskBoard.of(run.staging) if has_tasks(run.prepared.plan) else None, run.resources)

    def __call__(self) -> None:
        """Do one task, if there is one. Errors of a task are ignored: the leader does it again, and reports them.

        Raises StoreError if the lock of helpers is not a file; OSError.
        """
        board = self._board
        if board is None:
            return
        if not self._is_shown:
            self._shown.close()
            self._is_shown = self._shown.enter_context(board.helping())
        for key, task in board.tasks():
            if key not in self._tried:
                self._tried.add(key)
                try:
                    if self._done(board, key, task):
                        return
                except Exception:
                    continue

    def _done(self, board: TaskBoard, key: str, task: Mapping[str, Any]) -> bool:
        """Do a task, unless another process is doing it. False if it was not done."""
        kind = find_kind(str(task.get("op")))
        limit = self._memory_bytes
        if kind.help is None or (limit is not None and board.task_bytes(task) * TASK_FACTOR > limit):
            return False
        help = kind.help

        def make() -> Arrays:
            if not board.is_open(key):
                raise FileNotFoundError(key)
            return help(task, board, self._threads)

        arrays = board.take(key, make)
        if arrays is None:
            self._tried.discard(key)  # the other process may be killed
        return arrays is not None

    def close(self) -> None:
        """Stop waiting: the leader no longer sees this helper."""
        self._shown.close()


TASK_FACTOR = 6
"""Bytes of memory that a task takes per byte of its arrays: factorising a Hessian takes 13 bytes per float32, and some more."""
