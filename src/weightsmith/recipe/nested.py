"""Values that are lists, of lists, of numbers: which experts, in which groups, with which weights; perhaps layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from weightsmith.errors import ParameterError
from weightsmith.recipe.grammar import Key
from weightsmith.recipe.nodes import Node, Pair, describe, float_of
from weightsmith.recipe.report import Report

_EXAMPLES = {1: "[0, 2, 5]", 2: "[[0, 3], [1, 2]]"}


def read_nested(pair: Pair, key: Key, report: Report, *, depth: int, whole: bool) -> tuple[Any, ...] | None:
    """Numbers in `depth` levels of lists, none of them empty.

    whole  expert numbers: whole and from 0 on; else any finite numbers
    """
    return _listed(pair.value, key, report, depth, whole, depth)


def read_by_layer(pair: Pair, key: Key, report: Report, *, depth: int, whole: bool) -> dict[str, tuple[Any, ...]] | None:
    """A mapping of layers to what `read_nested` reads."""
    value = pair.value.value
    if not isinstance(value, dict) or not value:
        fix = f"Write each layer under its number: {{0: {_EXAMPLES[depth]}}}."
        report.problem(f"{key.name!r} takes a mapping of layers, not {describe(pair.value)}", pair.value.where, fix)
        return None
    found = {layer: _listed(inner.value, key, report, depth, whole, depth) for layer, inner in value.items()}
    return None if None in found.values() else found  # type: ignore[return-value]


def read_flag(pair: Pair, key: Key, report: Report) -> bool | None:
    """true or false."""
    if isinstance(pair.value.value, bool):
        return pair.value.value
    report.problem(f"{key.name!r} takes true or false, not {describe(pair.value)}", pair.value.where)
    return None


NESTED: Mapping[str, Callable[..., Any]] = {
    "experts": partial(read_nested, depth=1, whole=True),
    "experts_by_layer": partial(read_by_layer, depth=1, whole=True),
    "groups": partial(read_nested, depth=2, whole=True),
    "groups_by_layer": partial(read_by_layer, depth=2, whole=True),
    "weights": partial(read_nested, depth=2, whole=False),
    "weights_by_layer": partial(read_by_layer, depth=2, whole=False),
}
"""Kind of value in the grammar → its reader."""


def _listed(node: Node, key: Key, report: Report, depth: int, whole: bool, of: int) -> tuple[Any, ...] | None:
    """The lists of one value that is `of` levels deep, `depth` of which are left."""
    if not isinstance(node.value, tuple):
        what = "a list of numbers" if depth == 1 else "a list of lists of numbers"
        report.problem(f"{key.name!r} takes {what}, not {describe(node)}", node.where, f"Write {_EXAMPLES[of]}.")
        return None
    if not node.value:
        what = f"a group in {key.name!r} is empty" if depth < of else f"{key.name!r} is empty"
        report.problem(what, node.where, f"Write {_EXAMPLES[of]}.")
        return None
    read = [
        _number(item, key, report, whole) if depth == 1 else _listed(item, key, report, depth - 1, whole, of)
        for item in node.value
    ]
    return None if None in read else tuple(read)


def _number(node: Node, key: Key, report: Report, whole: bool) -> float | None:
    value = node.value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(float_of(value)):
        if not whole or (value == int(value) and value >= 0):
            return int(value) if whole else float(value)
    what = "whole numbers from 0 on" if whole else "finite numbers"
    fix = "Experts are numbered from 0." if whole else ""
    report.problem(f"{key.name!r} takes {what}, not {describe(node)}", node.where, fix, ParameterError)
    return None
