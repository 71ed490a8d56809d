"""Limits and tasks of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith._engine.results import Results
from weightsmith._engine.tiles import ALIGNED_BYTES, RESIDENT_BYTES, TILE_BYTES
from weightsmith._files.remote import STREAM_CACHE_BYTES
from weightsmith._plans import Product, Step
from weightsmith.abc.output import Finished

if TYPE_CHECKING:
    from weightsmith._engine.memory import JobMemory


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a run.

    threads         default: the processors this process may use
    tile_bytes      of each input; the result does not depend on it
    aligned_bytes   the same, of tiles with as many rows as an input prefers
    product_bytes   that a product that computes may hold besides its arrays; None: no limit
    resident_bytes  that methods of whole matrices may hold; a matrix that needs more is merged alone
    device          for products that compute and for whole matrices, as torch names it, or auto
    cache_bytes     on disk, for bytes of remote files
    """

    threads: int = 0
    tile_bytes: int = TILE_BYTES
    resident_bytes: int = RESIDENT_BYTES
    device: str = "cpu"
    aligned_bytes: int = ALIGNED_BYTES
    product_bytes: int | None = None
    cache_bytes: int = STREAM_CACHE_BYTES

    @property
    def workers(self) -> int:
        """Number of threads."""
        return self.threads or processors()


DEFAULTS = Resources()


def processors() -> int:
    """The processors that this process may use; where the system does not say which, all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Workload:
    """The part of a plan to run, and what exists already.

    steps     of the plan; None: all
    products  of the plan, including all that these and the steps need; None: all
    skip      output tensors (`Step.out`) that are finished already
    results   with the products that are finished already; None: none
    folders   of each model's files, for products that read them
    release   remove the arrays of a product (`ProductKind.released`) once all steps and products that need it are finished;
              False where another run reads them
    allow_nonfinite  merge NaN and infinities like any number; False raises NonFinite
    memory    for runs of plans that merge the same inputs in other ways: what the jobs of a tensor remember. None: nothing
    """

    steps: Sequence[Step] | None = None
    products: Sequence[Product] | None = None
    skip: Mapping[str, Finished] | None = None
    results: Results | None = None
    folders: Sequence[Path] = ()
    allow_nonfinite: bool = False
    release: bool = False
    memory: JobMemory | None = None


WHOLE = Workload()
