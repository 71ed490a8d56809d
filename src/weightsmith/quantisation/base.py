"""The interface of a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weightsmith.options import QuantizeSettings
from weightsmith.planner import Plan, Prepared
from weightsmith.products.base import Arrays


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store a whole checkpoint.

    name      as users write it: `fp8-dynamic`
    summary   one line: what is stored, and how many bits a weight takes
    readers   the programs that load it
    apply     (the prepared plan of plain tensors, settings) → the plan of the format. Reads headers and small files of
              `prepared.inputs[prepared.plan.donor]` only, never tensor data. Raises PlanError with all problems
    settings  fields of `QuantizeSettings` that it reads; any other that is given is an error before `apply` is called
    follow    if `apply` returns a plan with `Plan.then`: (as for `apply`, the arrays of the products by name) → the plan of the
              format, and files to add to the output
    """

    name: str
    summary: str
    readers: str
    apply: Callable[[Prepared, QuantizeSettings], Plan]
    settings: frozenset[str] = frozenset()
    follow: Callable[[Prepared, QuantizeSettings, Mapping[str, Arrays]], tuple[Plan, Mapping[str, bytes]]] | None = None
