"""The interface of a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.planner import Prepared
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store a whole checkpoint.

    name      as users write it: `fp8-dynamic`
    summary   one line: what is stored, and how many bits a weight takes
    readers   the programs that load it
    apply     (the draft of plain tensors, settings): makes it the draft of the format. Reads headers and small files of
              `assembled.inputs[assembled.draft.donor]` only, never tensor data. Raises PlanError with all problems
    settings  fields of `QuantizeSettings` that it reads; any other that is given is an error before `apply` is called
    follow    if `apply` sets `then`: (as for `apply`, the measured products, their arrays by name): makes the draft of plain
              tensors the draft of the format; returns files to add to the output
    """

    name: str
    summary: str
    readers: str
    apply: Callable[[Prepared, QuantizeSettings], None]
    settings: frozenset[str] = frozenset()
    follow: Callable[[Prepared, QuantizeSettings, Sequence[Product], Mapping[str, Arrays]], Mapping[str, bytes]] | None = None
