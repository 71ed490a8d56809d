"""Parameter values as written, and their values for one tensor: gradients over layers, filters on names.

Pure and fast: a plan of 100,000 tensors needs a million values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from weightsmith.recipe.nodes import Scalar, float_of
from weightsmith.recipe.schedules import Schedule

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def numeric(value: Scalar) -> int | float | None:
    """The finite number that a value or text means, or None (YAML 1.1 reads `1e-5` as text).

    Booleans are not numbers here: the parameter decides whether `true` may mean 1.

    >>> numeric(2), numeric("1e-5"), numeric("3"), numeric(True), numeric("union")
    (2, 1e-05, 3, None, None)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value):
            return None
        digits = value.lstrip("+-")
        value = int(value) if digits.isdigit() and len(digits) < 19 else float(value)
    return value if math.isfinite(float_of(value)) else None


def gradient(values: Sequence[Scalar], t: float, *, stepped: bool = False) -> Scalar | None:
    """The value of a list at depth t, 0..1: linear between numbers (see `numeric`), a step when one entry is none.

    t        position in the slice: layer i of L has i / (L - 1); a slice of one layer has 1; tensors outside layers have 0
    stepped  of a flag or a choice: there is nothing between its values, 0 and 1 among them

    None for an empty list. Numbers between which it is linear come back as float.

    >>> gradient([0, 0.5, 1], 0.25), gradient(["1e-3", "3e-3"], 0.5), gradient([0, 1], 0.9, stepped=True)
    (0.25, 0.002, 0)
    """
    n = len(values)
    if n == 0:
        return None
    s = t * (n - 1)
    i = min(math.floor(s), n - 1)
    numbers = [numeric(v) for v in values]
    low, high = numbers[i], numbers[min(i + 1, n - 1)]
    if stepped or low is None or high is None or None in numbers:
        return values[i]
    return (1.0 - (s - i)) * low + (s - i) * high


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of a parameter, with the filter it holds for.

    value         a scalar, a tuple of scalars: a gradient, or a schedule of weights
    filter        part of a tensor name; None or `*`: every tensor
    where         position of the value
    filter_where  position of the filter, "" when there is none
    """

    value: Scalar | tuple[Scalar, ...] | Schedule
    filter: str | None
    where: str
    filter_where: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that one `parameters:` block says about one parameter.

    entries  in the user's order; the first whose filter fits counts. Empty when the value was refused: its problem is
             reported already, so a missing value must not be reported on top of it (`reported`)
    where    position of the parameter's name
    """

    entries: tuple[Entry, ...]
    where: str
    _rules: tuple[_Rule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rules", tuple(_Rule(entry) for entry in self.entries))

    @property
    def reported(self) -> bool:
        """True if the value was wrong and has been reported."""
        return not self.entries

    def at(self, name: str, t: float, *, stepped: bool = False) -> tuple[Scalar | Schedule, Entry] | None:
        """The value for a tensor and the entry it came from; None when no filter fits, or the list that fits is empty.

        name        tensor name the filters look at; plain case-sensitive substrings: `layers.1` also fits `layers.10`
        t, stepped  see `gradient`; `stepped` is a property of the parameter, and the same in all calls

        >>> s = Setting((Entry((0.0, 1.0), "mlp", "r.yml:3:5"), Entry(0.5, None, "r.yml:4:5")), "r.yml:2:3")
        >>> s.at("layers.3.mlp.up.weight", 0.25)[0], s.at("lm_head.weight", 0.0)[0]
        (0.25, 0.5)
        """
        for rule in self._rules:
            if rule.part in name:
                try:
                    return rule.known[t]
                except KeyError:
                    return rule.evaluate(t, stepped)
        return None


class _Rule:
    """A prepared entry: `known` caches the value for each depth, one per layer of a model."""

    __slots__ = ("entry", "known", "part")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.part = "" if entry.filter in (None, "*") else str(entry.filter)  # "" is part of every name
        self.known: dict[float, tuple[Scalar | Schedule, Entry] | None] = {}

    def evaluate(self, t: float, stepped: bool) -> tuple[Scalar | Schedule, Entry] | None:
        entry = self.entry
        value = gradient(entry.value, t, stepped=stepped) if isinstance(entry.value, tuple) else entry.value
        found = None if value is None else (value, entry)
        self.known[t] = found
        return found
