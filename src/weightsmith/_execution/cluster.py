"""Has the parts of a plan done by other processes, on any number of machines that share a folder or write to a bucket.

A worker gets an order once, and then shares of the plan. It needs the plan's JSON, and the inputs and the output under the
same paths or addresses as on the driver's machine. It opens the inputs as `weightsmith run` does, and finds out for itself
whether they are those of the plan.

The driver gives out the shares, and puts together what was done. It holds the staging folder, shared, or the claim of an
output in a bucket, as long as workers are in it, so that no other run can take it. It alone decides what is done again:

* A part whose worker was lost is done by another one, which keeps the finished tensors whose checksums are right. In a folder,
  the lock of the part keeps it out until the lost worker, if it still runs somewhere, has really ended. In a bucket, both may
  put the same files: the driver compares what is there with what was reported, before it publishes.
* A part that takes long when no other part waits is done by a second worker too, and the first answer counts. Both write the
  same bytes to the same places, and each has a journal of its own. This is not so where torch computes whole matrices, which
  another machine may round differently, and not for products: these have one worker.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from weightsmith._base.errors import (
    Busy,
    CheckpointError,
    Finding,
    NotFound,
    ParameterError,
    PlanError,
    WorkerLost,
    first_line,
    legible,
)
from weightsmith._base.files import expand_user
from weightsmith._base.options import named
from weightsmith._base.text import count
from weightsmith._base.torch_use import named_device
from weightsmith._engine.local import Progress
from weightsmith._engine.product_graph import Computation
from weightsmith._engine.products import divisible, find_kind, has_tasks
from weightsmith._engine.reader import Reader
from weightsmith._engine.results import Results
from weightsmith._execution.identity import facts, work_identity
from weightsmith._execution.options import RunOptions
from weightsmith._execution.run import RunRequest, WorkDone, finished_steps, kept_products
from weightsmith._execution.together import (
    HELPER_LABEL,
    PRODUCTS_LABEL,
    PartDone,
    are_here,
    execute_helper,
    execute_part,
    execute_products,
)
from weightsmith._files.containers import GGUF, GGUF_ADAPTER
from weightsmith._files.safetensors import collector_paused
from weightsmith._outputs.journal import changes
from weightsmith._outputs.local import is_address
from weightsmith._outputs.places import place_of
from weightsmith._planning.planner.prepared import Prepared, download, missing_files, stream
from weightsmith._planning.planner.reopen import reopen
from weightsmith._plans import COPY, Plan, plan_from_json
from weightsmith._plans.parts import label, parts_of, units_of

if TYPE_CHECKING:
    from weightsmith._outputs.staging import Staging


@dataclass(frozen=True, slots=True)
class Order:
    """What all workers of a run get.

    plan        its JSON
    out         the output: a folder, or an address in a bucket
    folder      the driver's current folder, where relative paths of models start; not needed where there are none
    options     of the run
    allow_code  the plan's merge method is a file of the user's, which the driver was allowed to run
    identity, facts   of the work, as the driver sees program and inputs: see `weightsmith._execution.identity`
    setting     the option that asked for workers, and `several_machines`: see `Workers`
    """

    plan: bytes
    out: str
    folder: str
    options: RunOptions
    allow_code: bool
    identity: str
    facts: Mapping[str, str]
    setting: str = "ray"
    several_machines: bool = True


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker does: part k of n, or the products of all parts (None).

    second    of two workers that do the same part
    helper    number of a worker that does tasks for the one that computes these products, until it is stopped; 0: no helper
    products  checksums of those that are made
    """

    part: tuple[int, int] | None
    second: bool = False
    helper: int = 0
    products: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def label(self) -> str:
        """The label that its lock and its journal have."""
        if self.helper:
            return f"{HELPER_LABEL}{self.helper}"
        return PRODUCTS_LABEL if self.part is None else label(self.part) + "-again" * self.second

    def __str__(self) -> str:
        return "the products" if self.part is None else f"part {self.part[0]} of {self.part[1]}"


@dataclass(frozen=True, slots=True)
class Done:
    """A share is done."""

    part: PartDone


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker raised an error, which a run without workers would raise too.

    missing   it did not find or could not read a file: the disk that has it may be away for a moment
    """

    error: BaseException
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker has ended without an answer: it was killed, or its machine is gone. why: what is known."""

    why: str


Answer = Done | Failed | Lost


class Workers(Protocol):
    """Processes that do shares, each by `do`.

    setting           the option that asked for them, for messages
    advice            what to do if they are lost again and again
    several_machines  they may be on others than this one
    """

    @property
    def setting(self) -> str: ...

    @property
    def advice(self) -> str: ...

    @property
    def several_machines(self) -> bool: ...

    def begin(self, order: Order) -> None:
        """What the shares that are started from now on belong to."""

    def slots(self) -> int:
        """How many shares can run at once now; at least 1."""

    def start(self, share: Share) -> None:
        """Have a share done. It is not running already."""

    def answers(self, seconds: float) -> list[tuple[Share, Answer]]:
        """The shares that have ended; waits at most so long for the first."""

    def stop(self, share: Share) -> None:
        """End a running share's process, if it has not ended. It gives no answer."""


def do(order: Order, share: Share) -> bytes:
    """Do a share in this process; its answer, `Done` or `Failed`, pickled."""
    try:
        if not is_address(order.out) or Path(order.folder).is_dir():
            os.chdir(order.folder)
        prepared = _reopened(order)
        _check_same(order, prepared)
        if share.helper:
            execute_helper(prepared, order.out, order.options, share.products, share.helper)
        elif share.part is None:
            built = execute_products(prepared, order.out, order.options, share.products)
        else:
            built = execute_part(prepared, order.out, share.part, order.options, helping=share.label, products=share.products)
        return pickle.dumps(Done(built))
    except Exception as error:
        return pickle.dumps(Failed(portable(error), _is_missing(error)))


def _is_missing(error: BaseException) -> bool:
    """An input is not there, or cannot be read."""
    if isinstance(error, PlanError):
        return all(map(_is_missing, error.problems))
    return isinstance(error, NotFound | OSError) or (
        isinstance(error, CheckpointError) and isinstance(error.__cause__, OSError)
    )


_open: dict[str, Prepared] = {}
"""The plan that this process has open, by the identity of the work: most workers do several parts of one."""
_opening = threading.Lock()


def _reopened(order: Order) -> Prepared:
    key = f"{order.identity} {order.folder} {order.options.local_copy or ''}"
    with _opening:
        if key not in _open:
            while _open:
                _open.popitem()[1].close()
            with collector_paused():
                _open[key] = reopen(plan_from_json(json.loads(order.plan)), allow_code=order.allow_code)
        return _open[key]


def _check_same(order: Order, prepared: Prepared) -> None:
    """Raise ParameterError if this machine has another program, or sees other files, than the driver's."""
    options = order.options
    if options.stream:
        stream(prepared.inputs)  # or the weights would be missing
    if missing_files(prepared.inputs):
        download(prepared.inputs)
    if work_identity(prepared.plan, prepared.inputs, options.device) == order.identity:
        return
    what = f"the worker on {socket.gethostname()} does not have the program, or does not see the files, of this run"
    fix = (
        "install the same versions on all machines, and share the folders of the inputs (HF_HOME for models on the Hub), "
        "or name them by address"
    )
    if not order.several_machines:
        what, fix = "the program, or a file that it reads, has changed since this run began", "run the same command again"
    details = changes(order.facts, facts(prepared.plan, prepared.inputs, options.device))
    raise ParameterError(what, where=named(order.setting), details=details, fix=fix)


def portable(error: Exception) -> Exception:
    """The error, or one with its text if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(legible(f"{type(error).__name__}: {error}"))
    return error


PART_BYTES = 256 << 20
"""Parts are not smaller than that without need: each costs a worker some tens of milliseconds."""
PARTS_PER_SLOT = 4
"""So that a slow or lost worker holds up little."""
MOST_LOSSES = 3
"""How often one share may be lost: after that, another attempt would not help."""
BUSY_SECONDS = 120.0
"""How long the lock of a lost worker is waited for: NFS gives up the locks of a machine that is gone after 90 s."""
MISSING_SECONDS = 120.0
"""How long files that the driver saw and a worker does not are waited for: a shared disk may be mounted again."""
MISSING_PAUSE_SECONDS = 5.0
SLOW = 2.0
"""A part is slow if it takes so many times as long as the median."""
SLOW_SECONDS = 10.0
"""And at least so long."""
LOOK_SECONDS = 1.0
"""Between two looks at the journals of running parts, for the progress: hundreds of files, perhaps on a network file system."""


def share_out(prepared: Prepared, staging: Staging, request: RunRequest, *, workers: Workers) -> WorkDone:
    """Have workers do all parts of a plan, in a staging folder that is open here. The caller publishes.

    Raises what a worker raised, WorkerLost for a part whose workers are lost again and again, and what the callbacks
    raise. All workers have ended then, and what they finished can be resumed.
    """
    order = _order(prepared, request.out, request.options)
    workers.begin(replace(order, setting=workers.setting, several_machines=workers.several_machines))
    driver = Driver(prepared, staging, workers, request)
    with staging.shared():
        try:
            driver.go()
        except WorkerLost as error:
            error.state = error.state or f"Finished tensors are kept in {staging.folder}; run again to resume."
            raise
        finally:
            driver.stop()
    return driver.helped


def _order(prepared: Prepared, out: str | os.PathLike[str], options: RunOptions) -> Order:
    plan, copies = prepared.plan, options.local_copy
    with collector_paused():
        data = json.dumps(plan.to_json(), separators=(",", ":")).encode()
    return Order(
        plan=data,
        out=place_of(out).absolute,
        folder=str(Path.cwd()),
        options=replace(
            options,
            ray=None,
            resume=True,
            push=None,
            commit_message=None,
            device=named_device(options.device),
            local_copy=None if copies is None else str(expand_user(copies).absolute()),
        ),
        allow_code=plan.provenance.code is not None,
        identity=work_identity(plan, prepared.inputs, options.device),
        facts=facts(plan, prepared.inputs, options.device),
    )


@dataclass(slots=True)
class _State:
    """One share.

    losses         workers that were lost
    busy_since     its lock is held by a lost worker
    missing_since  workers do not see files of it
    not_before     when the next attempt begins
    """

    began: float = 0.0
    losses: int = 0
    busy_since: float = 0.0
    missing_since: float = 0.0
    not_before: float = 0.0


class Driver:
    """The shares of one plan: which wait, which run, what was done."""

    def __init__(self, prepared: Prepared, staging: Staging, workers: Workers, request: RunRequest) -> None:
        plan, allow_nonfinite = prepared.plan, request.options.allow_nonfinite
        self.staging, self.workers, self.callbacks = staging, workers, request.callbacks
        slots = workers.slots()
        self.helped, self.n = WorkDone(), part_count(plan, slots)
        parts = dict(enumerate(parts_of(plan, self.n), 1))
        if staging.target.streams:  # a worker on another machine does not see what an earlier run has finished
            done = finished_steps(plan, staging, kept_products(plan, staging), allow_nonfinite)
            for k in [k for k, steps in parts.items() if all(step.out.name in done for step in steps)]:
                self.helped += WorkDone(len(parts.pop(k)))
        # Workers in one folder measure what they can together, when they begin their parts.
        one_measures = staging.target.streams or not are_here(prepared.inputs)
        alone = {p.name for p in plan.products if one_measures or not divisible(p)}
        later = {k for k, steps in parts.items() if any(not alone.isdisjoint(plan.needs(step)) for step in steps)}
        first = [Share((k, self.n)) for k, steps in parts.items() if steps and k not in later]
        self._ready = deque([*([Share(None)] if alone else []), *first])
        self._alone = [p for p in plan.products if p.name in alone and p.name not in staging.products]
        self._helpers = 0 if not alone or staging.target.streams or not has_tasks(plan) else slots - 1
        if not self._helpers:  # which share work that is not of files
            self.helped += WorkDone(warnings=few_files(plan, slots, workers.setting))
        self._after_products = [Share((k, self.n)) for k in sorted(later)]
        self._inputs = prepared.inputs
        self._states: dict[Share, _State] = {}
        self._running: set[Share] = set()
        self._durations: list[float] = []
        self._second_is_safe = workers.several_machines and is_portable(prepared)
        self._uncounted = {step.outs[0].name: step.nbytes for step in plan.steps}
        self._total_tensors, self._total_bytes, self._counted_bytes = len(self._uncounted), sum(self._uncounted.values()), 0
        self._followed = staging.followed()
        self._began = self._looked = time.monotonic()

    def go(self) -> None:
        """Until all shares are done."""
        while self._ready or self._running:
            self._start()
            for share, answer in self.workers.answers(0.1):
                self._take(share, answer)
            self._report()

    def stop(self) -> None:
        """End all that still run."""
        for share in list(self._running):
            self._running.discard(share)
            self.workers.stop(share)

    # ---- starting

    def _start(self) -> None:
        free, now = self.workers.slots() - len(self._running), time.monotonic()
        for _ in range(len(self._ready)):
            if free <= 0:
                return
            share = self._ready.popleft()
            if self._state(share).not_before > now:
                self._ready.append(share)
                continue
            self._run(share)
            free -= 1
        if self._helpers and Share(None) in self._running:
            for _ in range(min(free, self._helpers)):
                self._run(Share(None, helper=self._helpers))
                self._helpers -= 1
        elif free > 0 and not self._ready and (slow := self._slow(now)) is not None:
            self._run(slow)

    def _run(self, share: Share) -> None:
        self._state(share).began = time.monotonic()
        self._running.add(share)
        self.workers.start(replace(share, products=self.staging.products))

    def _state(self, share: Share) -> _State:
        return self._states.setdefault(share, _State())

    def _slow(self, now: float) -> Share | None:
        """A second worker's share of the part that has run longest, if that is too long."""
        alone = [
            s for s in self._running if s.part is not None and not s.second and replace(s, second=True) not in self._running
        ]
        if not alone or not self._durations or not self._second_is_safe:
            return None
        longest = min(alone, key=lambda share: self._state(share).began)
        limit = max(SLOW_SECONDS, SLOW * statistics.median(self._durations))
        return replace(longest, second=True) if now - self._state(longest).began > limit else None

    # ---- answers

    def _take(self, share: Share, answer: Answer) -> None:
        self._running.discard(share)
        if share.helper:  # the others do its tasks
            return
        state = self._state(share)
        match answer:
            case Done(part):
                self._durations.append(time.monotonic() - state.began)
                self._adopt(share, part)
            case Failed(Busy() as error):
                now = time.monotonic()
                state.busy_since = state.busy_since or now
                if now - state.busy_since > BUSY_SECONDS:
                    raise error
                self._again(share, 1.0)
            case Failed(error, missing=True) if self.workers.several_machines:
                now = time.monotonic()
                if not state.missing_since or now - state.began > MISSING_SECONDS:  # or it has worked meanwhile
                    state.missing_since = now
                if now - state.missing_since > MISSING_SECONDS:
                    raise self._stays_missing(share, error)
                self._again(share, MISSING_PAUSE_SECONDS)
            case Failed(error):
                if not self.workers.several_machines:  # it sees the same files, so one that has changed is the reason
                    for model in self._inputs:
                        model.check_unchanged()
                raise error
            case Lost(why):
                state.losses, state.busy_since = state.losses + 1, 0.0
                if state.losses > MOST_LOSSES:
                    raise WorkerLost(
                        f"the worker of {share} was lost {state.losses} times: {why}",
                        where=named(self.workers.setting),
                        fix=self.workers.advice,
                    )
                if not self.workers.several_machines:
                    self.helped += WorkDone(
                        warnings=(Finding(f"the process of {share} was lost, and it is done again: {why}"),)
                    )
                self._again(share, 0.0)

    def _adopt(self, share: Share, part: PartDone) -> None:
        """Take over what a worker has done. Others that did the same, or helped it, are not needed any more."""
        self.staging.adopt(part.built)
        self._count(part.built.tensors)
        # What a lost worker of this run had finished was not finished by an earlier run.
        self.helped += replace(part.helped, resumed=0) if self._state(share).losses else part.helped
        idle = {replace(share, second=not share.second)} & self._running
        if share.part is None:
            self._helpers = 0
            idle |= {running for running in self._running if running.helper}
            self._ready.extend(self._after_products)
        for running in idle:
            self._running.discard(running)
            self.workers.stop(running)

    def _stays_missing(self, share: Share, error: BaseException) -> WorkerLost:
        return WorkerLost(
            f"workers cannot read the files of {share}, for {MISSING_SECONDS:.0f} s now",
            where=named(self.workers.setting),
            details=[first_line(error.problems[0] if isinstance(error, PlanError) else error)],
            fix="check that the disk with these files is mounted on all machines, and run again",
        )

    def _again(self, share: Share, seconds: float) -> None:
        if replace(share, second=not share.second) in self._running:
            return  # another worker has the part
        self._state(share).not_before = time.monotonic() + seconds
        self._ready.append(share)

    # ---- progress

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            self._looked = now
            self._count(self._followed.look(share.label for share in self._running))
        waiting = bool(self._running) and all(share.part is None for share in self._running)
        computation = self._computation() if waiting else None
        if waiting and computation is None and self.callbacks.waiting is not None:
            self.callbacks.waiting()
        if self.callbacks.progress is None:
            return
        self.callbacks.progress(
            Progress(
                written_bytes=self._counted_bytes,
                total_bytes=self._total_bytes,
                read_bytes=self.helped.read_bytes,
                copied_bytes=self.helped.copied_bytes,
                tensors=self._total_tensors - len(self._uncounted),
                total_tensors=self._total_tensors,
                seconds=now - self._began,
                waiting=computation is not None,
                computation=computation,
            )
        )

    def _computation(self) -> Computation | None:
        """The products that one worker makes, and how many are finished; None if that is not known."""
        finished = self._followed.products
        unmade = [product for product in self._alone if product.name not in finished]
        if not finished or not unmade:
            return None
        return Computation(find_kind(unmade[0].op).doing, len(self._alone) - len(unmade), len(self._alone))

    def _count(self, names: Iterable[str]) -> None:
        """Enter finished tensors into the progress, each once."""
        for name in names:
            self._counted_bytes += self._uncounted.pop(name, 0)


def part_count(plan: Plan, slots: int) -> int:
    """How many parts a plan is divided into for so many workers at once; one for a single worker."""
    if slots == 1:  # if it is lost, the next one keeps what it has finished; at the end of a part its threads wait
        return 1
    parts = min(PARTS_PER_SLOT * slots, max(slots, -(-plan.nbytes // PART_BYTES)))
    return max(1, min(parts, len(units_of(plan))))


def few_files(plan: Plan, slots: int, setting: str) -> tuple[Finding, ...]:
    """The warning that not all workers have work, for a file is made by one of them. setting: `Workers.setting`."""
    units = len(units_of(plan))
    if units >= slots:
        return ()
    what = f"{count(units, 'worker')} of {slots} had work: each makes whole weight files, and there are {units}"
    smaller = max(1_000_000, plan.nbytes // (2 * slots))
    return (
        Finding(
            what, named(setting), (), f"make smaller files, which feed all workers: --max-shard-size {smaller // 1_000_000}MB"
        ),
    )


def is_portable(prepared: Prepared) -> bool:
    """Whether every machine writes the same bytes, so that two may do the same part."""
    plan = prepared.plan
    if plan.container in (GGUF, GGUF_ADAPTER) or any(stage.plan.provenance.code for stage in prepared.stages):  # others' code
        return False
    reader = Reader(plan, prepared.inputs, Results(plan))
    known: dict[object, bool] = {}
    for step in plan.steps:
        for leaf in step.leaves:
            key = leaf.op, leaf.settings, leaf.base, leaf.out.shape, leaf.role
            if leaf.op != COPY and leaf.out.size and key not in known:
                known[key] = reader.job(leaf).portable
    return all(known.values())
