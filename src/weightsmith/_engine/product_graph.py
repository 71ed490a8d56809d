"""Computes the products of a plan in the graph of a run: when each begins, and what follows when it is finished.

Products that stream share the threads of the steps. Those that compute have a thread of their own, one after another. Large
arrays (`ProductKind.released`) wait for the steps that read earlier ones, and are removed after their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from weightsmith._base.errors import WeightsmithError
from weightsmith._base.process import return_freed
from weightsmith._engine.products import find_kind
from weightsmith._engine.reader import Reader
from weightsmith._engine.resources import Buffers, Cut, Resources, Workload
from weightsmith._engine.results import Results
from weightsmith._engine.schedule import Reduced, ReductionPass, Scheduler, Task
from weightsmith._engine.tile_work import Finite
from weightsmith._kernels.jit import leave
from weightsmith._plans import Plan, Product, Step
from weightsmith.abc.job import Tile
from weightsmith.abc.output import Output
from weightsmith.abc.product import Arrays, Cancelled, ProductContext, TensorSink


@dataclass(frozen=True, slots=True)
class Computation:
    """A product that is being computed, and how far it is, in units of its own. total: 0 while that is not known."""

    doing: str
    done: int
    total: int


class ProductGraph:
    """The unfinished products of a run.

    unmade       by name; those that are removed later only if something unfinished needs them
    computation  the product that is being computed
    """

    def __init__(
        self,
        reader: Reader,
        finite: Finite,
        output: Output,
        steps: Sequence[Step],
        products: Sequence[Product],
        resources: Resources,
        workload: Workload,
        make: Callable[[Sequence[Step], Mapping[str, TensorSink], Callable[[], None]], None],
    ) -> None:
        """make: makes steps and hands their bytes to targets; calls the function from time to time, which may raise."""
        self._reader = reader
        self._finite = finite
        self._output = output
        self._resources = resources
        self._folders = workload.folders
        self._reduction = workload.reduction
        self._tasks, self._later = workload.tasks, frozenset(workload.later)
        self._make = make
        self._makes_products = bool(products)
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._computing = Computing(self._compute, self._keeps)
        self._released = _released(reader.plan) if workload.release else frozenset()
        self._left = {step.out.name: reader.plan.needs(step) for step in steps}
        self.unmade = _unmade(self._left.values(), products, reader.results, self._released)
        self._unbegun = dict(self.unmade)
        self.computation: Computation | None = None

    def start(self, scheduler: Scheduler) -> None:
        """Begin every product that needs no other. scheduler: takes reductions, and hears of finished products."""
        self._scheduler = scheduler
        self._forget()
        self._begin()

    def close(self) -> None:
        """Cancel the computation that is under way, and wait for it."""
        self._cancelled.set()
        self._computing.close()

    def release(self) -> None:
        """Let go of the output, after `close` and a run that ended well."""
        del self._computing

    def reduce(self, reduction: ReductionPass, task: Task, buffers: Buffers) -> tuple[Any, int]:
        """Statistics of a tile for a product that streams, and the bytes that were read."""
        assert task.reduced is not None
        (matrix, inputs), place = task.reduced, task.place
        raw, read = self._reader.read(inputs, place.start, place.size, buffers)
        self._finite.take_constants(task.step, place, inputs, raw)
        tile = Tile(place.start, place.size, raw, buffers.scratch)
        return reduction.reduction.statistics(task.phase, matrix, tile), read

    def done(self, product: Product, arrays: Arrays) -> None:
        """A product is finished: keep it, and begin what waited for it."""
        self._reader.results.put(product, self._output.keep(product, arrays))
        with self._lock:
            del self.unmade[product.name]
            self.computation = None
        self._forget()
        self._begin()
        self._scheduler.product_finished(product.name)

    def step_finished(self, step: Step) -> None:
        """A step is finished: remove what only it needed."""
        with self._lock:
            needs = self._left.pop(step.out.name)
        self._reader.results.release(needs)
        if not needs.isdisjoint(self._released):
            self._forget()

    def _begin(self) -> None:
        """Begin every product whose own needs are finished."""
        with self._lock:
            begun = [p for p in self._unbegun.values() if not any(name in self.unmade for name in p.needs)]
            for product in begun:
                del self._unbegun[product.name]
        computed = [product for product in begun if find_kind(product.op).reduce is None]
        self._computing.add(computed, self._scheduler.fail)
        for product in begun:
            kind = find_kind(product.op)
            if kind.reduce is None:
                continue
            reduction = ReductionPass(product, self._reduction or kind.reduce(product), partial(self._tiles, product))
            if reduction.empty:
                self.done(product, reduction.reduction.arrays())
            else:
                self._scheduler.add(reduction)

    def _forget(self) -> None:
        """Remove products that are transient, or released, and that nothing unfinished needs."""
        if not self._makes_products:  # it runs for a product, whose own needs are in use
            return
        with self._lock:
            needed = {name for needs in (*(p.needs for p in self.unmade.values()), *self._left.values()) for name in needs}
        results = self._reader.results
        for product in self._reader.plan.products:
            if not _passes(product, self._released) or product.name in needed or product.name in self._later:
                continue
            if results.finished(product.name):
                results.drop(product)
                self._output.forget(product)

    def _tiles(self, product: Product) -> Iterator[tuple[Reduced, Step, Cut]]:
        for leaf in self._reader.plan.leaves_of(product):
            reduced = self._reader.matrix(leaf), self._reader.inputs_of(leaf.inputs)
            for place in self._reader.cuts(leaf):
                yield reduced, leaf, place

    def _keeps(self, product: Product) -> bool:
        """Whether no arrays are released sooner because of this product."""
        return self._released.isdisjoint(product.needs)

    def _reads_released(self, step: Step) -> bool:
        """Whether a step reads products that are removed after use: True also while the disk is removing them."""
        return not self._released.isdisjoint(self._reader.plan.needs(step))

    def _compute(self, product: Product) -> None:
        compute = find_kind(product.op).compute
        assert compute is not None
        with self._lock:
            if product.name not in self.unmade:
                return  # another product has made it on the way
        if product.name in self._released and not self._scheduler.wait_for(self._reads_released):
            raise Cancelled
        others: dict[str, tuple[Product, Arrays]] = {}
        arrays_made = compute(self.context(product, others))
        for made_product, arrays in ((product, arrays_made), *others.values()):
            self.done(made_product, arrays)

    def context(self, product: Product, others: dict[str, tuple[Product, Arrays]]) -> ProductContext:
        """The context in which a product is computed. others: receives products made on the way, by name."""
        doing, resources = find_kind(product.op).doing, self._resources
        steps = {step.out.name: step for step in product.steps}

        def check() -> None:
            if self._cancelled.is_set():
                raise Cancelled

        def make(targets: Mapping[str, TensorSink]) -> None:
            check()
            pending = dict(targets)
            try:
                self._make([steps[name] for name in pending], pending, check)
            finally:
                pending.clear()  # a run is in reference cycles, which would keep whole matrices until garbage is collected

        def arrays(name: str) -> Arrays:
            assert name in product.needs, (product.name, name)
            return self._reader.results.arrays(name)

        def also(condition: Callable[[Product], bool]) -> Arrays | None:
            other = self._computable(product, condition)
            if other is None or other.name in others:
                return None
            arrays = self._created(other)
            others[other.name] = other, arrays
            return arrays

        def progress(done: int, total: int) -> None:
            check()
            with self._lock:
                self.computation = Computation(doing, done, total)

        progress(0, 0)
        return ProductContext(
            product,
            resources.device,
            resources.workers,
            resources.product_bytes,
            self._folders,
            make,
            arrays,
            partial(self._created, product),
            progress,
            also,
            self._tasks,
        )

    def _created(self, product: Product) -> Arrays:
        """Arrays of zeros for a product, in a file if the output has one."""
        arrays = self._output.create(product)
        return [np.zeros(out.shape, out.dtype.numpy) for out in product.outs] if arrays is None else arrays

    def _computable(self, product: Product, condition: Callable[[Product], bool]) -> Product | None:
        """Another product that could be computed now, and meets a condition."""
        with self._lock:
            ready = [p for p in self.unmade.values() if p.name not in self._unbegun and p.name != product.name]
        computing = (p for p in ready if find_kind(p.op).compute is not None)
        return next((p for p in computing if condition(p)), None)


class Computing:
    """A thread that computes products, one after another; it starts with the first of them.

    later  whether a product lets others, that are asked for after it, go first
    """

    def __init__(self, compute: Callable[[Product], None], later: Callable[[Product], bool]) -> None:
        self._compute = compute
        self._later = later
        self._queue: list[Product] = []
        self._condition = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, products: Sequence[Product], on_error: Callable[[BaseException], None]) -> None:
        """Compute these too. on_error: called with what a computation raises; no other follows it.

        The queue gets all of them at once, so that the first cannot be finished before the last is in it. Otherwise the
        statistics of one model could be a layer ahead of another's, and the disk would hold those of two layers.
        """
        with self._condition:
            self._queue += products
            if products and self._thread is None:
                self._thread = threading.Thread(target=self._work, args=(on_error,), name="weightsmith-product", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def _work(self, on_error: Callable[[BaseException], None]) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                product = min(self._queue, key=self._later)
                self._queue.remove(product)
            try:
                self._compute(product)
                return_freed()
            except Cancelled:
                return
            except BaseException as error:
                if isinstance(error, WeightsmithError):
                    error.product = product.name
                on_error(error)
                return

    def close(self) -> None:
        """End the thread, and wait for it. A computation ends when it next reports its progress."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not None:
            leave([self._thread])


def _released(plan: Plan) -> frozenset[str]:
    return frozenset(product.name for product in plan.products if find_kind(product.op).released)


def _passes(product: Product, released: Collection[str]) -> bool:
    """Whether it is removed once all that need it are finished."""
    return product.transient or product.name in released


def _unmade(
    steps: Iterable[Collection[str]],
    products: Sequence[Product],
    results: Results,
    released: Collection[str],
) -> dict[str, Product]:
    """The unfinished products; of those that are removed later, what is needed by an unfinished step or product.

    steps     what each needs
    products  all that the steps and each other need, in plan order
    """
    needed = {p.name for p in products if not _passes(p, released)} | {name for needs in steps for name in needs}
    unmade = {}
    for product in reversed(products):
        if product.name in needed and not results.finished(product.name):
            unmade[product.name] = product
            needed.update(product.needs)
    return {p.name: p for p in products if p.name in unmade}


def needed_later(plan: Plan, products: Iterable[Product], finished: Collection[str]) -> frozenset[str]:
    """What the unfinished products of a plan need, but for these ones. finished: names; transient ones count as unfinished."""
    here = {product.name for product in products}
    needed = {p.name for p in plan.products if not p.transient} | {name for step in plan.steps for name in plan.needs(step)}
    later: set[str] = set()
    for product in reversed(plan.products):
        if product.name in needed and (product.transient or product.name not in finished):
            needed.update(product.needs)
            if product.name not in here:
                later.update(product.needs)
    return frozenset(later)


def most_bytes(plan: Plan) -> int:
    """The most bytes that the arrays of a plan's products take at a time, in a run of all of it.

    Products are taken in the order of `Computing`; steps are as slow as `ProductGraph` lets them be.
    """
    released = _released(plan) if plan.then is None else frozenset[str]()
    steps = [plan.needs(step) for step in plan.steps]
    unmade = _unmade(steps, plan.products, Results(plan), released)
    unbegun, queue, live, needed, most = dict(unmade), list[Product](), list[Product](), set[str](), 0
    while unbegun or queue:
        queue += [unbegun.pop(p.name) for p in list(unbegun.values()) if unmade.keys().isdisjoint(p.needs)]
        product = min(queue, key=lambda p: released.isdisjoint(p.needs))
        queue.remove(product)
        gone = {*released} if product.name in released else set[str]()
        live = [p for p in live if p.name in needed or not _passes(p, gone)]
        del unmade[product.name]
        live.append(product)
        most = max(most, sum(out.nbytes for p in live for out in p.outs))
        steps = [needs for needs in steps if not unmade.keys().isdisjoint(needs)]
        needed = {name for needs in (*(p.needs for p in unmade.values()), *steps) for name in needs}
    return most
