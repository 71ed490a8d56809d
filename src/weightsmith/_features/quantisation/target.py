"""`--target kl=0.02`: a divergence that a result must not exceed, instead of a size.

The format chooses the settings of a size, from its measurement; which size, is found by evaluating results
(`_execution/targets.py`).
"""

from __future__ import annotations

import math
import re

from weightsmith._base.options import assignment, named, option_error
from weightsmith._features.quantisation.options import QuantizeSettings

_KL = re.compile(r"kl\s*=\s*([0-9.]+(?:e-?[0-9]+)?)", re.IGNORECASE)


def read_target(settings: QuantizeSettings) -> float | None:
    """The largest divergence, in nats per token; None if the settings have no target. Raises ParameterError.

    >>> read_target(QuantizeSettings(target="kl=0.02"))
    0.02
    """
    if settings.target is None:
        return None
    found = _KL.fullmatch(settings.target.strip())
    try:
        value = float(found[1]) if found else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        fix = f"write {assignment('target', 'kl=0.02')}, in nats per token"
        raise option_error("target", f"'{settings.target}' is not a divergence above 0", fix)
    return value


def check_target(settings: QuantizeSettings) -> float | None:
    """`read_target`, for settings that a user gives. Raises ParameterError for a target beside a size or bits, too."""
    value = read_target(settings)
    beside = [name for name in ("bits", "size_bytes") if getattr(settings, name) is not None]
    if value is not None and beside:
        what = "the size follows from the target"
        raise option_error("target", what, f"leave out {named(*beside)} or {named('target')}")
    return value
