"""The kinds of lists of numbers: which experts, in which groups, with which weights; perhaps layer by layer."""

from __future__ import annotations

import math
from typing import Any

from weightsmith.errors import ParameterError
from weightsmith.recipe.kinds import Key, Kind, Schema, Walk, list_schema
from weightsmith.recipe.nodes import Node, Pair, describe, float_of

_EXAMPLES = {1: "[0, 2, 5]", 2: "[[0, 3], [1, 2]]"}


def _lists(depth: int, *, whole: bool) -> tuple[Kind, Kind]:
    """The kind of numbers in `depth` levels of lists, none of them empty; and that of a mapping of layers to these.

    whole  expert numbers, from 0 on; else any finite numbers
    """
    example = f"Write {_EXAMPLES[depth]}."

    def number(node: Node, key: Key, walk: Walk) -> float | None:
        value = node.value
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(float_of(value)):
            if not whole or (value == int(value) and value >= 0):
                return int(value) if whole else float(value)
        what = "whole numbers from 0 on" if whole else "finite numbers"
        fix = "Write numbers from 0 on." if whole else ""
        walk.problem(f"{key.name!r} takes {what}, not {describe(node)}", node.where, fix, ParameterError)
        return None

    def listed(node: Node, key: Key, walk: Walk, left: int = depth) -> Any:
        if left == 0:
            return number(node, key, walk)
        if not isinstance(node.value, tuple):
            what = "a list of numbers" if left == 1 else "a list of lists of numbers"
            walk.problem(f"{key.name!r} takes {what}, not {describe(node)}", node.where, example)
            return None
        if not node.value:
            what = f"a group in {key.name!r} is empty" if left < depth else f"{key.name!r} is empty"
            walk.problem(what, node.where, example)
            return None
        read = [listed(item, key, walk, left - 1) for item in node.value]
        return None if None in read else tuple(read)

    def by_layer(pair: Pair, key: Key, walk: Walk) -> dict[str, Any] | None:
        value = pair.value.value
        if not isinstance(value, dict) or not value:
            fix = f"Write each layer under its number: {{0: {_EXAMPLES[depth]}}}."
            walk.problem(f"{key.name!r} takes a mapping of layers, not {describe(pair.value)}", pair.value.where, fix)
            return None
        found = {layer: listed(inner.value, key, walk) for layer, inner in value.items()}
        return None if None in found.values() else found

    schema: Schema = {"type": "integer", "minimum": 0} if whole else {"type": "number"}
    for _ in range(depth):
        schema = list_schema(schema)
    layers = {"type": "object", "additionalProperties": schema, "minProperties": 1}
    words = f"a list of {'lists of ' * (depth - 1)}{'expert numbers' if whole else 'numbers'}"
    every = Kind(lambda pair, key, walk: listed(pair.value, key, walk), schema, words)
    return every, Kind(by_layer, layers, f"layers, each with {words}")


EXPERTS, EXPERTS_BY_LAYER = _lists(1, whole=True)
GROUPS, GROUPS_BY_LAYER = _lists(2, whole=True)
WEIGHTS, WEIGHTS_BY_LAYER = _lists(2, whole=False)
