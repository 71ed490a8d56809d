"""The approximations of missing tokens: one file each, with a record of its name. Adding one is adding the file, and its name.

`base.py` is the record of an approximation, and the problem that it solves.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from weightsmith.errors import UnknownName, nearest
from weightsmith.transplant.approximations.base import Approximation

NAMES = (
    *("omp", "hybrid", "common_interpolation", "subword", "landmark_pca", "stb", "mp_rope"),
    *("john_hewitt", "mean", "zero", "randn"),
)


@cache
def find_approximation(name: str) -> Approximation:
    """The approximation of this name. Raises UnknownName.

    >>> find_approximation("subword").pieces
    True
    """
    if name not in NAMES:
        what = f"no approximation is called '{name}'{nearest(name, NAMES)}"
        raise UnknownName(what, where="approximation", fix=f"write one of {', '.join(NAMES)}")
    found: Approximation = getattr(import_module(f"weightsmith.transplant.approximations.{name}"), name)
    return found


def all_approximations() -> tuple[Approximation, ...]:
    """All, in the order of the docs."""
    return tuple(map(find_approximation, NAMES))
