"""The merge methods: one file each. Adding one is adding a file with a `METHOD` and its name to `NAMES`.

`base.py` is the form a method fills in, `job.py` what the engine runs; `combination.py`, `task_vectors.py` and `vectors.py`
are jobs that several methods share.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from weightsmith.errors import UnknownName, nearest
from weightsmith.methods.base import Method

NAMES = (
    "linear",
    "task_arithmetic",
    "slerp",
    "nuslerp",
    "ties",
    "dare_linear",
    "dare_ties",
    "passthrough",
)


@cache
def get(name: str) -> Method:
    """The method of this name; UnknownName with the nearest one otherwise.

    >>> get("ties").base
    'required'
    """
    if name not in NAMES:
        raise UnknownName(f"no merge method is called '{name}'{nearest(name, NAMES)}", fix=f"methods: {', '.join(NAMES)}")
    method: Method = import_module(f"weightsmith.methods.{name}").METHOD
    return method


def all_methods() -> tuple[Method, ...]:
    """Every method, in the order of the docs."""
    return tuple(get(name) for name in NAMES)
