"""A recipe as a tree of values with positions, from YAML or a Python mapping.

`where` is `file:line:column`, counted from 1, for YAML and a key path, `models[0].parameters.weight`, for Python.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightsmith._base.errors import Finding, MethodError, SyntaxProblem, WeightsmithError, raised_at
from weightsmith._base.redaction import redacted
from weightsmith._base.tensors import dtype_name

MAX_NODES = 200_000  # values in a recipe, aliases expanded: 100 times the largest ones published
MAX_DEPTH = 64  # the grammar itself is 9 deep; the walk over the tree is recursive

Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Node:
    """One value.

    value    a scalar, None, a tuple of nodes (a list) or a dict of pairs (a mapping, in the user's order)
    where    position of the value
    size     values in this tree, itself included and aliases expanded
    anchors  names of the YAML anchors defined inside it
    """

    value: Scalar | tuple[Node, ...] | dict[str, Pair] | None
    where: str
    size: int = 1
    anchors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """One `key: value` of a mapping; `where` is the position of the key."""

    where: str
    value: Node


@dataclass(frozen=True, slots=True)
class Document:
    """A document that was read: the tree (None if there is none), problems, warnings, the anchors in use, and its text."""

    root: Node | None
    problems: tuple[WeightsmithError, ...] = ()
    findings: tuple[Finding, ...] = ()
    aliased: frozenset[str] = field(default=frozenset())
    text: str = ""


def describe(value: object) -> str:
    """A value in a few words, for messages; long text is cut.

    >>> describe(Node("x", "r.yml:1:1")), describe(3), describe(None)
    ("the text 'x'", 'the number 3', 'nothing')
    """
    if isinstance(value, Node):
        value = value.value
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {short(value)!r}"
    if isinstance(value, dict):
        return f"a mapping with the keys {short(', '.join(value))}" if value else "an empty mapping"
    if isinstance(value, tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, int) and math.isinf(float_of(value)):
        return "a number too large for a float"  # str() of an int of 5,000 digits raises
    return f"the number {value}"


def float_of(value: object) -> float:
    """A number as float; an int too large for one is infinite.

    >>> float_of(3), float_of(10**400)
    (3.0, inf)
    """
    assert isinstance(value, int | float)
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def short(text: str) -> str:
    """Text cut to 60 characters, without secrets: part of one would not look like one."""
    text = redacted(text)
    return text if len(text) <= 60 else text[:57] + "..."


def plain(node: Node) -> Any:
    """The tree as plain Python lists, dicts and scalars.

    >>> plain(from_python({"models": [{"model": "a"}]}).root)
    {'models': [{'model': 'a'}]}
    """
    if isinstance(node.value, dict):
        return {name: plain(pair.value) for name, pair in node.value.items()}
    if isinstance(node.value, tuple):
        return [plain(item) for item in node.value]
    return node.value


def from_python(source: Mapping[str, Any], place: str = "", *, within: str = "") -> Document:
    """The tree of a Python mapping: lists, tuples, mappings, scalars, paths, dtypes, numpy scalars; others are problems.

    place   the position of everything in it, instead of key paths
    within  the key path of the mapping itself

    >>> from_python({"models": [{"model": "a"}]}).root.value["models"].value.value[0].where
    'models[0]'
    """
    reader = _PythonReader(place)
    try:
        root = reader.node(source, within, 0)
    except (SyntaxProblem, MethodError) as problem:  # too deep or too large, or no merge method: no tree
        return Document(None, (*reader.problems, problem))
    return Document(root, tuple(reader.problems))


class _PythonReader:
    def __init__(self, place: str) -> None:
        self.place = place
        self.problems: list[WeightsmithError] = []
        self.count = 0

    def node(self, value: Any, where: str, depth: int) -> Node:
        self.count += 1
        where = self.place or where
        if depth > MAX_DEPTH or self.count > MAX_NODES:
            limit = f"nested more than {MAX_DEPTH} deep" if depth > MAX_DEPTH else f"of more than {MAX_NODES:,} values"
            raise SyntaxProblem(f"a recipe {limit} is refused", where=where)
        if isinstance(value, Mapping):
            pairs: dict[str, Pair] = {}
            for key, item in value.items():
                inner = self.place or (f"{where}.{key}" if where else str(key))
                if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool) and key >= 0):
                    pairs[str(key)] = Pair(inner, self.node(item, inner, depth + 1))
                else:
                    self.problems.append(SyntaxProblem(f"a key must be a string, not {key!r}", where=inner, fix="Quote it."))
            return Node(pairs, where)
        if isinstance(value, list | tuple):
            return Node(tuple(self.node(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)), where)
        return Node(self.scalar(value, where), where)

    def scalar(self, value: Any, where: str) -> Scalar | None:
        if hasattr(value, "dtype") and getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = value.item()  # a numpy scalar
        if type(value).__name__ == "dtype" or isinstance(value, type) or hasattr(value, "newbyteorder"):
            value = dtype_name(value)  # torch.bfloat16, np.float32, np.dtype("float32")
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if where.rpartition(".")[2] == "merge_method" and not isinstance(value, str | type(None) | bool | int | float):
            return self._method(value, where)
        if isinstance(value, str) and not is_text(value):
            self.problems.append(SyntaxProblem("text that is not valid Unicode (a lone surrogate)", where=where))
            return ""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        what = f"a recipe cannot hold a value of type {type(value).__name__}"
        self.problems.append(SyntaxProblem(what, where=where, fix="Use mappings, lists, text, numbers, True, False or None."))
        return None

    def _method(self, value: Any, where: str) -> str:
        """The name of a merge method of the user's own: the function itself. Raises MethodError."""
        from weightsmith._methods.user_files import name_of

        with raised_at(where):
            return name_of(value)


def is_text(value: str) -> bool:
    """False if the text holds a lone surrogate and therefore can be neither printed nor written.

    >>> is_text("é"), is_text(chr(0xD800))
    (True, False)
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
