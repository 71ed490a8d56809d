"""Recipes written as sums of models in Python: `base + 0.5 * (fr - base)`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from numbers import Real
from typing import Any

from weightsmith._base.errors import ParameterError

_TOLERANCE = 1e-6
"""Of the sum of the coefficients: (a + b + c) / 3 has 0.9999999999999999."""


def model(name: str | os.PathLike[str]) -> Sum:
    """A model in a sum, which is a recipe.

    name  folder, Hub id or `base+adapter`, or an open or merged model

    >>> base, fr, de = model("base"), model("fr"), model("de")
    >>> base + 0.5 * (fr - base)
    <base + 0.5 * (fr - base)>
    >>> dict((fr + de) / 2)["merge_method"]
    'linear'
    """
    return Sum({os.fspath(name): 1.0}, (os.fspath(name),))


class Sum(Mapping[str, Any]):
    """Models times numbers: a recipe, with the keys that the same recipe has as a dict. See `weightsmith.model`.

    coefficients       model → number, in the order of the sum
    added, subtracted  models with a plus before them, and with a minus, in order; some have both

    A sum whose coefficients add up to 1 is a model. If one model alone is subtracted, and added too, the sum is that model
    plus task vectors: `merge_method: task_arithmetic`. Other sums are `linear`.

    >>> base, fr, de = model("base"), model("fr"), model("de")
    >>> dict(base + 0.5 * (fr - base))
    {'merge_method': 'task_arithmetic', 'base_model': 'base', 'models': [{'model': 'fr', 'parameters': {'weight': 0.5}}]}
    >>> recipe = {**(fr + de) / 2, "dtype": "bfloat16"}
    """

    __array_ufunc__ = None  # numpy leaves `np.float64(2) * sum` to the sum

    def __init__(self, coefficients: Mapping[str, float], added: Iterable[str], subtracted: Iterable[str] = ()) -> None:
        self.coefficients = dict(coefficients)
        self.added, self.subtracted = tuple(dict.fromkeys(added)), tuple(dict.fromkeys(subtracted))

    def __add__(self, other: object) -> Sum:
        if not isinstance(other, Sum):
            return NotImplemented
        coefficients = dict(self.coefficients)
        for name, coefficient in other.coefficients.items():
            coefficients[name] = coefficients.get(name, 0.0) + coefficient
        return Sum(coefficients, (*self.added, *other.added), (*self.subtracted, *other.subtracted))

    def __sub__(self, other: object) -> Sum:
        return self + -other if isinstance(other, Sum) else NotImplemented

    def __mul__(self, factor: object) -> Sum:
        number = _number(factor)
        if number is None:
            return NotImplemented
        if not math.isfinite(number):
            raise ParameterError(f"a model times {number} is no model", fix="write a finite number")
        signs = (self.added, self.subtracted) if number >= 0 else (self.subtracted, self.added)
        return Sum({name: coefficient * number for name, coefficient in self.coefficients.items()}, *signs)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> Sum:
        number = _number(divisor)
        if number is None:
            return NotImplemented
        if not number:
            raise ParameterError("a model divided by 0 is no model", fix="write another number")
        return self * (1 / number)

    def __neg__(self) -> Sum:
        return self * -1.0

    @property
    def _base(self) -> str | None:
        """The model that the others are task vectors of, if the sum is written so."""
        return self.subtracted[0] if len(self.subtracted) == 1 and self.subtracted[0] in self.added else None

    @cached_property
    def _recipe(self) -> dict[str, Any]:
        total = math.fsum(self.coefficients.values())
        if abs(total - 1) > _TOLERANCE:
            what = f"the coefficients of {self!r} add up to {total:g}, and those of a model to 1"
            fix = "add a base, as in base + 0.5 * (fr - base); or write a recipe with merge_method linear and normalize false"
            raise ParameterError(what, fix=fix)
        weights = {name: weight for name, weight in self.coefficients.items() if weight}
        if self._base is not None and weights.keys() != {self._base}:
            models = _entries({name: weight for name, weight in weights.items() if name != self._base})
            return {"merge_method": "task_arithmetic", "base_model": self._base, "models": models}
        if len(weights) == 1:
            return {"merge_method": "passthrough", "models": [{"model": name} for name in weights]}
        return {"merge_method": "linear", "models": _entries(weights), "parameters": {"normalize": False}}

    def __getitem__(self, key: str) -> Any:
        return self._recipe[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._recipe)

    def __len__(self) -> int:
        return len(self._recipe)

    def __repr__(self) -> str:
        """As one would write it, with the coefficients added up."""
        total = math.fsum(self.coefficients.values())
        if self._base is not None and abs(total - 1) <= _TOLERANCE:
            others = {name: factor for name, factor in self.coefficients.items() if name != self._base and factor}
            return (
                f"<{_joined([self._base, *(f'{_times(factor)}({name} - {self._base})' for name, factor in others.items())])}>"
            )
        return f"<{_joined([f'{_times(factor)}{name}' for name, factor in self.coefficients.items() if factor]) or '0'}>"


def _number(value: object) -> float | None:
    return None if isinstance(value, bool) or not isinstance(value, Real) else float(value)


def _entries(weights: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"model": name, "parameters": {"weight": weight}} for name, weight in weights.items()]


def _times(number: float) -> str:
    return {1.0: "", -1.0: "-"}.get(number, f"{number:g} * ")


def _joined(terms: list[str]) -> str:
    """Terms with the signs between them.

    >>> _joined(["a", "-0.5 * b", "c"])
    'a - 0.5 * b + c'
    """
    return " + ".join(terms).replace("+ -", "- ")
