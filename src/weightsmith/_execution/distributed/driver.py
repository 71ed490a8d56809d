"""Gives out the parts of a plan, and puts together what was done.

The driver holds the staging folder, shared, or the claim of an output in a bucket, as long as workers are in it, so that no
other run can take it. It alone decides what is done again:

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
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith._base.errors import Busy, Finding, WorkerLost
from weightsmith._base.options import named
from weightsmith._base.text import count
from weightsmith._engine.local import Progress
from weightsmith._engine.reader import Reader
from weightsmith._engine.results import Results
from weightsmith._execution.distributed.work import Answer, Done, Failed, Lost, Order, Share, Workers
from weightsmith._execution.identity import facts, work_identity
from weightsmith._execution.options import RunOptions
from weightsmith._execution.run import Helped, RunRequest, finished_steps, kept_products
from weightsmith._files.containers import GGUF
from weightsmith._files.safetensors import collector_paused
from weightsmith._methods.jobs.requires import named_device
from weightsmith._outputs.places import place_of
from weightsmith._planning.planner import Prepared
from weightsmith._plans import COPY, Plan
from weightsmith._plans.parts import parts_of, units_of

if TYPE_CHECKING:
    from weightsmith._outputs.staging import Staging

PART_BYTES = 256 << 20
"""Parts are not smaller than that without need: each costs a worker some tens of milliseconds."""
PARTS_PER_SLOT = 4
"""So that a slow or lost worker holds up little."""
MOST_LOSSES = 3
"""Of one share; then the workers, or the share, have a problem that another attempt does not solve."""
BUSY_SECONDS = 120.0
"""How long the lock of a lost worker is waited for: NFS gives up the locks of a machine that is gone after 90 s."""
SLOW = 2.0
"""A part is slow if it takes so many times as long as the median."""
SLOW_SECONDS = 10.0
"""And at least so long."""
LOOK_SECONDS = 1.0
"""Between two looks at the journals of running parts, for the progress: hundreds of files, perhaps on a network file system."""


def share_out(prepared: Prepared, staging: Staging, request: RunRequest, *, workers: Workers) -> Helped:
    """Have workers do all parts of a plan, in a staging folder that is open here. The caller publishes.

    Raises what a worker raised, WorkerLost for a part whose workers are lost again and again, and what the callbacks
    raise. All workers have ended then, and what they finished can be resumed.
    """
    workers.begin(_order(prepared, request.out, request.options))
    driver = Driver(prepared, staging, workers, request)
    with staging.shared():
        try:
            driver.go()
        finally:
            driver.stop()
    return driver.helped


def _order(prepared: Prepared, out: str | os.PathLike[str], options: RunOptions) -> Order:
    plan = prepared.plan
    with collector_paused():
        data = json.dumps(plan.to_json(), separators=(",", ":")).encode()
    return Order(
        plan=data,
        out=place_of(out).absolute,
        folder=str(Path.cwd()),
        options=replace(options, ray=None, resume=True, push=None, commit_message=None, device=named_device(options.device)),
        allow_code=plan.provenance.code is not None,
        identity=work_identity(plan, prepared.inputs, options.device),
        facts=facts(plan, prepared.inputs, options.device),
    )


@dataclass(slots=True)
class _State:
    """One share. losses: workers that were lost; busy_since: its lock is held by a lost worker; not_before: next attempt."""

    began: float = 0.0
    losses: int = 0
    busy_since: float = 0.0
    not_before: float = 0.0


class Driver:
    """The shares of one plan: which wait, which run, what was done."""

    def __init__(self, prepared: Prepared, staging: Staging, workers: Workers, request: RunRequest) -> None:
        plan, allow_nonfinite = prepared.plan, request.options.allow_nonfinite
        self.plan, self.staging, self.workers, self.callbacks = plan, staging, workers, request.callbacks
        slots = workers.slots()
        self.helped = Helped(warnings=few_files(plan, slots))
        self.n = part_count(plan, slots)
        parts = dict(enumerate(parts_of(plan, self.n), 1))
        if staging.target.streams:  # a worker on another machine does not see what an earlier run has finished
            done = finished_steps(plan, staging, kept_products(plan, staging), allow_nonfinite)
            for k in [k for k, steps in parts.items() if all(step.out.name in done for step in steps)]:
                self.helped += Helped(len(parts.pop(k)))
        later = {k for k, steps in parts.items() if any(plan.needs(step) for step in steps)}
        first = [Share((k, self.n)) for k, steps in parts.items() if steps and k not in later]
        self._ready = deque([*([Share(None)] if plan.products else []), *first])
        self._after_products = [Share((k, self.n)) for k in sorted(later)]
        self._states: dict[Share, _State] = {}
        self._running: set[Share] = set()
        self._durations: list[float] = []
        self._second_is_safe = is_portable(prepared)
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
        if free > 0 and not self._ready and (slow := self._slow(now)) is not None:
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
        state = self._state(share)
        match answer:
            case Done(part):
                self._durations.append(time.monotonic() - state.began)
                self.staging.adopt(part.built)
                self._count(part.built.tensors)
                self.helped += part.helped
                other = replace(share, second=not share.second)
                if other in self._running:
                    self._running.discard(other)
                    self.workers.stop(other)
                if share.part is None:
                    self._ready.extend(self._after_products)
            case Failed(Busy() as error):
                now = time.monotonic()
                state.busy_since = state.busy_since or now
                if now - state.busy_since > BUSY_SECONDS:
                    raise error
                self._again(share, 1.0)
            case Failed(error):
                raise error
            case Lost(why):
                state.losses, state.busy_since = state.losses + 1, 0.0
                if state.losses > MOST_LOSSES:
                    raise WorkerLost(
                        f"the worker of {share} was lost {state.losses} times: {why}",
                        where=named("ray"),
                        fix="read the logs of Ray; if the machines are short of memory, lower --max-memory or --threads",
                        state=f"Finished tensors are kept in {self.staging.folder}; run again to resume.",
                    )
                self._again(share, 0.0)

    def _again(self, share: Share, seconds: float) -> None:
        if replace(share, second=not share.second) in self._running:
            return  # another worker has the part
        self._state(share).not_before = time.monotonic() + seconds
        self._ready.append(share)

    # ---- progress

    def _report(self) -> None:
        if self.callbacks.waiting is not None and self._running == {Share(None)}:
            self.callbacks.waiting()
        if self.callbacks.progress is None:
            return
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            self._looked = now
            self._count(self._followed.look(share.label for share in self._running))
        self.callbacks.progress(
            Progress(
                written_bytes=self._counted_bytes,
                total_bytes=self._total_bytes,
                read_bytes=self.helped.read_bytes,
                tensors=self._total_tensors - len(self._uncounted),
                total_tensors=self._total_tensors,
                seconds=now - self._began,
            )
        )

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


def few_files(plan: Plan, slots: int) -> tuple[Finding, ...]:
    """The warning that not all workers have work, for a file is made by one of them."""
    units = len(units_of(plan))
    if units >= slots:
        return ()
    what = f"{count(units, 'worker')} of {slots} had work: each makes whole weight files, and there are {units}"
    smaller = max(1_000_000, plan.nbytes // (2 * slots))
    return (
        Finding(
            what, named("ray"), (), f"make smaller files, which feed all workers: --max-shard-size {smaller // 1_000_000}MB"
        ),
    )


def is_portable(prepared: Prepared) -> bool:
    """Whether every machine writes the same bytes, so that two may do the same part."""
    plan = prepared.plan
    if plan.container == GGUF or any(stage.plan.provenance.code for stage in prepared.stages):  # others' code
        return False
    reader = Reader(plan, prepared.inputs, Results(plan))
    known: dict[object, bool] = {}
    for step in plan.steps:
        for leaf in step.leaves:
            key = leaf.op, leaf.settings, leaf.base, leaf.out.shape, leaf.role
            if leaf.op != COPY and leaf.out.size and key not in known:
                known[key] = reader.job(leaf).portable
    return all(known.values())
