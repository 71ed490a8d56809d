"""Has the parts of a plan done by other processes, on any number of machines that share a folder or write to a bucket.

work.py    what a worker gets, does and gives back; the interface of workers
driver.py  gives out the parts, sees to those that are lost or slow, and puts together what was done
on_ray.py  the workers of a Ray cluster; ray is imported nowhere else
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from weightsmith._execution import execute as execution
from weightsmith._execution.options import RunOptions
from weightsmith._execution.output import check_options
from weightsmith._execution.run import NO_CALLBACKS, Callbacks, Merged
from weightsmith._planning.planner import Prepared

if TYPE_CHECKING:
    from weightsmith._engine.memory import JobMemory


def execute(
    prepared: Prepared,
    out: str | os.PathLike[str],
    options: RunOptions,
    callbacks: Callbacks = NO_CALLBACKS,
    *,
    began: float | None = None,
    memory: JobMemory | None = None,
) -> Merged:
    """`execution.execute`; with `options.ray`, a Ray cluster does the parts of the plan. The bytes are the same."""
    if options.ray is None:
        return execution.execute(prepared, out, options, callbacks, began=began, memory=memory)
    from weightsmith._execution.distributed.driver import share_out
    from weightsmith._execution.distributed.on_ray import RayWorkers

    check_options(out, options)  # before a cluster is started
    with RayWorkers.connect(options) as workers:
        return execution.execute(prepared, out, options, callbacks, began=began, helpers=partial(share_out, workers=workers))
