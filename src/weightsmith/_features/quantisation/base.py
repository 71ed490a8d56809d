"""The interface of a format, and `--target kl=0.02`: a divergence that a result must not exceed, instead of a size.

The format chooses the settings of a size, from its measurement; which size, is found by evaluating results
(`_execution/targets.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weightsmith._base.options import assignment, named, option_error
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import SHARD_BYTES
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
    shard_bytes  maximum size of a weight file, unless the user says another
    """

    name: str
    summary: str
    readers: str
    apply: Callable[[Prepared, QuantizeSettings], None]
    settings: frozenset[str] = frozenset()
    follow: Callable[[Prepared, QuantizeSettings, Sequence[Product], Mapping[str, Arrays]], Mapping[str, bytes]] | None = None
    shard_bytes: int = SHARD_BYTES


# ---- a divergence instead of a size


_KL = re.compile(r"kl\s*=\s*([0-9.]+(?:e-?[0-9]+)?)", re.IGNORECASE)


def read_target(settings: QuantizeSettings) -> float | None:
    """The largest divergence, in nats per token; None if the settings have no target. Raises ParameterError.

    >>> read_target(QuantizeSettings(target="kl=0.02"))
    0.02
    """
    if settings.target is None:
        return None
    match = _KL.fullmatch(settings.target.strip())
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        fix = f"write {assignment('target', 'kl=0.02')}, in nats per token"
        raise option_error("target", f"'{settings.target}' is not a divergence above 0", fix)
    return value


def check_target(settings: QuantizeSettings) -> float | None:
    """`read_target`, for settings that a user gives. Raises ParameterError for a target beside a size or bits, too."""
    value = read_target(settings)
    contradicting = [name for name in ("bits", "size_bytes") if getattr(settings, name) is not None]
    if value is not None and contradicting:
        what = "the size follows from the target"
        raise option_error("target", what, f"leave out {named(*contradicting)} or {named('target')}")
    return value
