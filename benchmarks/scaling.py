"""How a run scales with the number of machines: fixed costs measured here, storage and network assumed, the rest simulated.

    python -m benchmarks.scaling measure     # the fixed costs of driver and worker, for 115,623 tensors: about three minutes
    python -m benchmarks.scaling             # the tables of docs/scale.md, from COSTS

`measure` does a linear merge of two mixtures of 115,623 tiny tensors, whose plan is as large as that of 1 TB, with a worker in
this process, and prints processor seconds. The simulation is of the same plan with full-sized tensors: parts are given out as
`_execution/cluster.py` gives them out, and the machines that work share the storage's bandwidth equally at every moment.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.bench import WORK
from benchmarks.planning import NAMES, Mixture, recipes
from weightsmith._execution import cluster
from weightsmith._execution.cluster import PARTS_PER_SLOT, Answer, Order, Share, _open, do, share_out
from weightsmith._execution.execute import execute
from weightsmith._execution.options import RunOptions
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, measured: `measure` for the plan's size, the others as docs/scale.md says.

    plan, order, publish   of the driver, once: planning; the order for the workers; taking over, other files, publishing
    open, attach           of a worker: opening the plan, once; entering the staging folder, for each part
    cluster, task          of Ray: joining a cluster, starting a task
    byte                   of one processor for each byte read or written
    """

    plan: float
    order: float
    publish: float
    open: float
    attach: float
    cluster: float
    task: float
    byte: float


COSTS = Costs(
    plan=4.3,
    order=3.8,
    publish=4.7,
    open=5.5,
    attach=0.33,
    cluster=1.0,
    task=0.001,
    byte=5.1 / 6.6e9,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Assumed: a storage, and the machines at it. Bytes a second."""

    name: str
    storage: float
    network: float = 25e9 / 8 * 0.9
    processors: int = 16


PLACES = (
    Place("one NFS server, 3 GB/s", 3e9),
    Place("parallel file system, 50 GB/s", 50e9),
    Place("parallel file system, 200 GB/s", 200e9),
)
MACHINES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Seconds of a run: in all, and of it alone on the driver; share of the storage's bandwidth in use while parts run."""

    seconds: float
    driver: float
    storage: float


FILES = 209
"""Weight files of the output: a part is some of them."""


def simulate(machines: int, nbytes: float, place: Place, costs: Costs = COSTS, files: int = FILES) -> Simulated:
    """A run on machines with one worker each. nbytes: read and written in all. files: of the output, all of one size.

    >>> simulate(1, 3e12, PLACES[0]).seconds > 3e12 / PLACES[0].network
    True
    >>> simulate(64, 3e12, PLACES[0]).seconds > 3e12 / PLACES[0].storage
    True
    """
    n = min(PARTS_PER_SLOT * machines, files)
    fastest = min(place.network, place.processors / costs.byte)
    waiting = deque(nbytes / files * ((i + 1) * files // n - i * files // n) for i in range(n))
    fixed: dict[int, float] = {}  # machine → when its worker begins to read
    moving: dict[int, float] = {}  # machine → bytes left
    now, started = 0.0, 0.0
    for machine in range(machines):
        started += costs.task  # the driver starts one task after the other
        fixed[machine] = started + costs.open + costs.attach
    while fixed or moving:
        rate = min(fastest, place.storage / len(moving)) if moving else 0.0
        ends = now + min(moving.values()) / rate if moving else float("inf")
        begins = min(fixed.values(), default=float("inf"))
        until = min(ends, begins)
        for machine in moving:
            moving[machine] -= (until - now) * rate
        now = until
        for machine in [m for m, at in fixed.items() if at <= now]:
            del fixed[machine]
            if waiting:
                moving[machine] = waiting.popleft()
        for machine in [m for m, remaining in moving.items() if remaining <= 1e-6 * nbytes / files]:
            del moving[machine]
            if waiting:
                fixed[machine] = now + costs.task + costs.attach
    alone = costs.plan + costs.cluster + costs.order + costs.publish
    return Simulated(alone + now, alone, nbytes / now / place.storage)


def tables(nbytes: float, files: int = FILES) -> None:
    """The tables of docs/scale.md."""
    for place in PLACES:
        print(f"\n{place.name}\n")
        print("| machines | seconds | speed-up | driver alone | storage in use |")
        print("| ---: | ---: | ---: | ---: | ---: |")
        one = simulate(1, nbytes, place, files=files)
        for machines in MACHINES:
            simulated = simulate(machines, nbytes, place, files=files)
            times, alone = one.seconds / simulated.seconds, simulated.driver / simulated.seconds
            print(f"| {machines} | {simulated.seconds:,.0f} | {times:.1f} | {alone:.0%} | {simulated.storage:.0%} |")


class Inline:
    """A worker in this process, which notes the processor seconds of its shares."""

    setting, advice, several_machines = "ray", "", True

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.begun = 0.0
        self._shares: deque[Share] = deque()

    def begin(self, order: Order) -> None:
        """The time of the driver until then is that of the order."""
        self._order: Order = pickle.loads(pickle.dumps(order))
        _open.clear()  # a process of its own would open the plan itself
        self.begun = time.process_time()

    def slots(self) -> int:
        return 4

    def start(self, share: Share) -> None:
        self._shares.append(share)

    def answers(self, seconds: float) -> list[tuple[Share, Answer]]:
        share, began = self._shares.popleft(), time.process_time()
        answer = do(self._order, share)
        self.seconds.append(time.process_time() - began)
        return [(share, pickle.loads(answer))]

    def stop(self, share: Share) -> None:
        raise AssertionError(share)


def measure(folder: Path = WORK / "scaling") -> None:
    """Print the processor seconds of a merge whose plan has 115,623 tensors, by what they are spent on.

    All tensors are finished first, by a run that ends before it publishes: what is left of a part then is its fixed cost, and
    the check of its few bytes.
    """
    shape = Mixture(hidden=64)
    for name in NAMES[1:]:
        shape.build(folder / name)
    os.chdir(folder)
    cluster.PART_BYTES = 1 << 20
    options = RunOptions(threads=1, fsync=False, overwrite=True)
    clock = time.process_time
    began = clock()
    with prepare_any(recipes(60)["linear"], RecipeOptions(check_loading=False), QuantizeSettings()) as prepared:
        print(f"plan {clock() - began:.2f}")

        def ending(*arguments: Any, **named: Any) -> NoReturn:
            share_out(*arguments, **named, workers=Inline())
            raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            execute(prepared, "out", options, helpers=ending)
        workers, began = Inline(), clock()
        execute(prepared, "out", options, helpers=partial(share_out, workers=workers))
        print(f"order {workers.begun - began:.2f}")
        print(f"open and attach {workers.seconds[0]:.2f}; attach {' '.join(f'{s:.2f}' for s in workers.seconds[1:])}")
        print(f"publish {clock() - workers.begun - sum(workers.seconds):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="How a run scales with the number of machines.")
    parser.add_argument("what", nargs="?", choices=["measure", "simulate"], default="simulate")
    args = parser.parse_args()
    if args.what == "measure":
        measure()
    else:
        tables(3 * sum(spec.nbytes for spec in Mixture().specs()))


if __name__ == "__main__":
    main()
