"""What a kind of input is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Rng = random.Random
MEGABYTES = 500
"""That a case may take."""


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    make    writes good inputs into an empty folder, which is the current one
    files   those of them that are mutated, one for each case
    mutate  the bytes of such a file -> others
    use     what weightsmith does with the folder (the current one), as calls; gets the name of the mutated file, and the rng.
            Each call ends in success or in a WeightsmithError, whatever the others do
    start   what is done once with the folder before the first case
    ways    how many of the choices of `use` are tried with the good inputs
    """

    make: Callable[[], None]
    files: tuple[str, ...]
    mutate: Callable[[Rng, bytes], bytes]
    use: Callable[[str, Rng], Iterator[Callable[[], Any]]]
    start: Callable[[], None] = lambda: None
    ways: int = 9


LINEAR = {"merge_method": "linear", "models": [{"model": name, "parameters": {"weight": 0.5}} for name in ("a", "b")]}


def merge(recipe: Any, **options: Any) -> Any:
    import weightsmith

    return weightsmith.merge(recipe, "out", threads=1, fsync=False, **options)
