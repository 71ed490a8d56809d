"""What a worker gets, does and gives back.

A worker needs the plan's JSON, and the inputs and the output under the same paths or addresses as on the driver's machine. It
opens the inputs as `weightsmith run` does, and finds out for itself whether they are those of the plan.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from weightsmith._base.errors import ParameterError, legible
from weightsmith._base.options import named
from weightsmith._execution.execute import PRODUCTS_LABEL, PartDone, execute_part, execute_products
from weightsmith._execution.identity import facts, work_identity
from weightsmith._execution.options import RunOptions
from weightsmith._files.safetensors import collector_paused
from weightsmith._outputs.journal import changes
from weightsmith._outputs.local import is_address
from weightsmith._planning.planner.prepared import Prepared, download, missing_files, stream
from weightsmith._planning.planner.reopen import reopen
from weightsmith._plans import plan_from_json
from weightsmith._plans.parts import label


@dataclass(frozen=True, slots=True)
class Order:
    """What all workers of a run get.

    plan        its JSON
    out         the output: a folder, or an address in a bucket
    folder      the driver's current folder, where relative paths of models start; not needed where there are none
    options     of the run
    allow_code  the plan's merge method is a file of the user's, which the driver was allowed to run
    identity, facts   of the work, as the driver sees program and inputs: see `weightsmith._execution.identity`
    """

    plan: bytes
    out: str
    folder: str
    options: RunOptions
    allow_code: bool
    identity: str
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker does: part k of n, or the products of all parts (None).

    second    of two workers that do the same part
    products  checksums of those that are made
    """

    part: tuple[int, int] | None
    second: bool = False
    products: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def label(self) -> str:
        """Of its lock and its journal."""
        return PRODUCTS_LABEL if self.part is None else label(self.part) + "-again" * self.second

    def __str__(self) -> str:
        return "the products" if self.part is None else f"part {self.part[0]} of {self.part[1]}"


@dataclass(frozen=True, slots=True)
class Done:
    """A share is done."""

    part: PartDone


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker raised an error, which a run without workers would raise too."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker has ended without an answer: it was killed, or its machine is gone. why: what is known."""

    why: str


Answer = Done | Failed | Lost


class Workers(Protocol):
    """Processes that do shares, each by `do`."""

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
        if share.part is None:
            built = execute_products(prepared, order.out, order.options, share.products)
        else:
            built = execute_part(prepared, order.out, share.part, order.options, helping=share.label, products=share.products)
        return pickle.dumps(Done(built))
    except Exception as error:
        return pickle.dumps(Failed(_portable(error)))


_open: dict[str, Prepared] = {}
"""The plan that this process has open, by the identity of the work: most workers do several parts of one."""
_opening = threading.Lock()


def _reopened(order: Order) -> Prepared:
    key = f"{order.identity} {order.folder}"
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
    raise ParameterError(
        f"the worker on {socket.gethostname()} does not have the program, or does not see the files, of this run",
        where=named("ray"),
        details=changes(order.facts, facts(prepared.plan, prepared.inputs, options.device)),
        fix="install the same versions on all machines, and share the folders of the inputs (HF_HOME for models on the Hub), "
        "or name them by address",
    )


def _portable(error: Exception) -> Exception:
    """The error, or one with its text if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(legible(f"{type(error).__name__}: {error}"))
    return error
