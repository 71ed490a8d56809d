"""The approximations of missing tokens, one file each.

To add one, add its file here and its name to `_base/options/records.py`.
`base.py` is the record of an approximation, and the problem that it solves.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from weightsmith._base.options import APPROXIMATIONS
from weightsmith._features.transplant.approximations.base import Approximation


@cache
def find_approximation(name: str) -> Approximation:
    """The approximation with this name, one of `APPROXIMATIONS`.

    >>> find_approximation("subword").pieces
    True
    """
    found: Approximation = getattr(import_module(f"weightsmith._features.transplant.approximations.{name}"), name)
    return found


def all_approximations() -> tuple[Approximation, ...]:
    """All, in the order of the docs."""
    return tuple(map(find_approximation, APPROXIMATIONS))
