"""YAML text to a tree of values with positions, with all errors of the text.

PyYAML's SafeLoader reads the text into events and decides what `yes`, `0x10` and `1e-5` are (YAML 1.1, as mergekit).
The tree is built here from those events and not by PyYAML, which keeps no position of keys and aliases, takes the last
of two equal keys silently, and expands `&a [*b, *b, *b]` chains until memory is full.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from weightsmith._base.errors import Finding, MethodError, SyntaxProblem, WeightsmithError, raised_at
from weightsmith._base.redaction import redacted
from weightsmith._base.tensors import dtype_name

# ---- A recipe as a tree of values with positions, from YAML or a Python mapping


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
        from weightsmith._methods.user import name_of

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


MAX_BYTES = 2_000_000  # 50 times the largest recipes published; PyYAML reads 0.1 MB in a second

MAX_NUMBER = 1000  # characters of a number

_TAG = "tag:yaml.org,2002:"
_WHOLE = re.compile(r"0|[1-9][0-9]{0,8}")  # a layer's number, as the only key that need not be text
# A recipe has no use for dates, and `=` or `<<` as a value are plain text: these stay as they were written.
_AS_TEXT = {_TAG + "str", _TAG + "timestamp", _TAG + "value", _TAG + "merge"}
_CONVERTED = {_TAG + "null": "null", _TAG + "bool": "bool", _TAG + "int": "int", _TAG + "float": "float"}

# What PyYAML says of the common slips, what it means, and the next step.
_SLIPS = (
    ("'\\t' that cannot start", "a tab where spaces are needed", "Indent with spaces: YAML does not allow tabs."),
    (
        "mapping values are not allowed",
        "a ':' where no key can be",
        "Check the indentation of this line, or put a value that holds ': ' in quotes.",
    ),
    ("could not find expected ':'", "a key without ':'", "Write a colon and a space after the key."),
    (
        "expected <block end>",
        "this line does not line up with the lines above",
        "Start the keys of one mapping, and the dashes of one list, in the same column.",
    ),
    ("unknown escape character", "", "Write a Windows path in single quotes, or with forward slashes."),
    ("found unexpected end of stream", "a quote that is never closed", ""),
    ("cannot start any token", "", "Put a value that starts with this character in quotes."),
)


def read_yaml(text: str, filename: str, *, lenient: bool = False) -> tuple[Document, ...]:
    """The trees of the YAML documents in a text, at least one. Never raises: errors in the text are in `problems`.

    lenient  equal keys in one mapping are a warning and the last one counts, as in mergekit; otherwise an error

    Of several documents, those without a value are left out: a `---` before the first or after the last means nothing.

    >>> read_yaml("a: 1\\na: 2\\n", "r.yml")[0].problems[0].finding.where
    'r.yml:2:1'
    >>> [document.text for document in read_yaml("a: 1\\n---\\nb: 2\\n", "r.yml")]
    ['a: 1\\n', '---\\nb: 2\\n']
    """
    if len(text) > MAX_BYTES or len(text.encode(errors="replace")) > MAX_BYTES:
        what = f"the recipe is larger than {MAX_BYTES:,} bytes"
        return (Document(None, (SyntaxProblem(what, where=f"{filename}:1:1"),)),)
    reader = _TreeReader(text, filename, lenient)
    documents: list[Document] = []
    try:
        reader.begin()
        while reader.has_more:
            documents.append(reader.document())
    except SyntaxProblem as problem:
        documents.append(reader.result(None, problem))
    except yaml.YAMLError as error:
        documents.append(reader.result(None, reader.translate(error)))
    except Exception as error:
        # PyYAML leaks ValueError and kin on some hostile text (`"\UFFFFFFFF"`, `%YAML 1<5000 digits>`): still not YAML.
        documents.append(reader.result(None, SyntaxProblem(f"not valid YAML: {short(str(error))}", where=reader.here())))
    filled = [d for d in documents if d.problems or d.root is None or d.root.value is not None]
    return tuple(filled or documents[:1])


class _TreeReader:
    def __init__(self, text: str, filename: str, lenient: bool) -> None:
        self.text = text
        self.filename = filename
        self.lenient = lenient
        self.problems: list[WeightsmithError] = []
        self.findings: list[Finding] = []
        self.anchors: dict[str, Node | None] = {}  # None while the anchored value is still open
        self.aliased: set[str] = set()
        self.count = 0
        self.ended = 0
        self.expanded = 0
        self.loader: Any = None

    def result(self, root: Node | None, problem: WeightsmithError | None = None, text: str = "") -> Document:
        """What was read since the last document; names of anchors do not outlive their document."""
        problems = (*self.problems, problem) if problem else tuple(self.problems)
        document = Document(root, problems, tuple(self.findings), frozenset(self.aliased), text)
        self.problems, self.findings, self.anchors, self.aliased = [], [], {}, set()
        return document

    def where(self, mark: Any) -> str:
        return f"{self.filename}:{mark.line + 1}:{mark.column + 1}"

    def here(self) -> str:
        return self.where(self.loader.get_mark()) if self.loader else f"{self.filename}:1:1"

    def problem(self, what: str, where: str, fix: str = "", details: tuple[str, ...] = ()) -> None:
        self.problems.append(SyntaxProblem(what, where=where, fix=fix, details=details))

    # --- the document ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.loader = yaml.SafeLoader(self.text)
        self.loader.get_event()  # start of the stream
        if not self.has_more:
            fix = "Write a recipe with `weightsmith init`."
            raise SyntaxProblem("the recipe is empty", where=f"{self.filename}:1:1", fix=fix)

    @property
    def has_more(self) -> bool:
        return not self.loader.check_event(yaml.StreamEndEvent)

    def document(self) -> Document:
        """The next document. Its text begins where the one before it ends."""
        first, self.ended = self.ended, len(self.text)
        self.loader.get_event()  # start of the document
        root = self.node(0)
        self.expanded += root.size
        self.bound(self.expanded, root.where)
        self.loader.get_event()  # end of the document
        if self.has_more:
            self.ended = self.loader.peek_event().start_mark.index
        return self.result(root, text=self.text[first : self.ended])

    def node(self, depth: int) -> Node:
        event: Any = self.loader.get_event()
        where = self.where(event.start_mark)
        self.count += 1
        self.bound(self.count, where)
        if depth > MAX_DEPTH:
            raise SyntaxProblem(f"nested more than {MAX_DEPTH} deep", where=where)
        if isinstance(event, yaml.AliasEvent):
            return self.alias(str(event.anchor), where)
        if event.anchor:
            self.anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node = Node(self.scalar(event, where), where)
        elif isinstance(event, yaml.SequenceStartEvent):
            self.check_tag(event, "seq", where)
            node = self.sequence(where, depth)
        else:
            self.check_tag(event, "map", where)
            node = self.mapping(where, depth)
        if event.anchor:
            node = Node(node.value, node.where, node.size, (event.anchor, *node.anchors))
            self.anchors[event.anchor] = node
        return node

    def alias(self, name: str, where: str) -> Node:
        if name not in self.anchors:
            fix = f"Mark the value meant with &{name}, above this line."
            raise SyntaxProblem(f"the alias *{name} has no anchor", where=where, fix=fix)
        node = self.anchors[name]
        if node is None:
            fix = f"Write the value out instead of *{name}."
            raise SyntaxProblem(f"the alias *{name} is inside the value that it refers to", where=where, fix=fix)
        self.aliased.add(name)
        return node

    def bound(self, size: int, where: str) -> None:
        if size > MAX_NODES:
            what = f"the recipe has more than {MAX_NODES:,} values once its aliases are expanded"
            raise SyntaxProblem(what, where=where)

    def check_tag(self, event: Any, kind: str, where: str) -> None:
        if event.tag not in (None, "!", _TAG + kind):
            self.refuse_tag(event.tag, where)

    def refuse_tag(self, tag: str, where: str) -> None:
        name = "!!" + tag.removeprefix(_TAG) if tag.startswith(_TAG) else tag
        self.problem(f"the tag {short(name)} is refused: a recipe holds plain values only", where, "Remove the tag.")

    # --- values ------------------------------------------------------------------------------------------------------

    def scalar(self, event: Any, where: str) -> Scalar | None:
        tag = self.tag(event)
        if not is_text(event.value):
            self.problem("text that is not valid Unicode (a lone surrogate)", where)
            return ""
        if tag in _CONVERTED and len(event.value) > MAX_NUMBER:  # PyYAML takes minutes for `1:1:1:...` (base 60) of 1 MB
            self.problem(f"{short(event.value)!r} has more than {MAX_NUMBER} characters, and no {_CONVERTED[tag]} has", where)
            return ""
        if tag in _CONVERTED:
            convert = getattr(self.loader, f"construct_yaml_{_CONVERTED[tag]}")
            try:
                value: Scalar | None = convert(yaml.ScalarNode(tag, event.value))
            except (ValueError, KeyError, IndexError, OverflowError):
                self.problem(f"{short(event.value)!r} is not a valid {_CONVERTED[tag]}", where)
                return str(event.value)
            return value
        if tag not in _AS_TEXT:
            self.refuse_tag(tag, where)
        return str(event.value)

    def tag(self, event: Any) -> str:
        if event.tag in (None, "!"):
            return str(self.loader.resolve(yaml.ScalarNode, event.value, event.implicit))
        return str(event.tag)

    def sequence(self, where: str, depth: int) -> Node:
        items: list[Node] = []
        size = 1
        anchors: list[str] = []
        while not self.loader.check_event(yaml.SequenceEndEvent):
            at = self.where(self.loader.peek_event().start_mark)
            item = self.node(depth + 1)
            items.append(item)
            size += item.size
            anchors += item.anchors
            self.bound(size, at)
        self.loader.get_event()
        return Node(tuple(items), where, size, tuple(anchors))

    def mapping(self, where: str, depth: int) -> Node:
        pairs: dict[str, Pair] = {}
        merged: dict[str, Pair] = {}
        size = 1
        anchors: list[str] = []
        merge_seen = False
        while not self.loader.check_event(yaml.MappingEndEvent):
            event: Any = self.loader.peek_event()
            at = self.where(event.start_mark)
            is_merge = isinstance(event, yaml.ScalarEvent) and self.tag(event) == _TAG + "merge"
            name = self.key(at, depth)
            value = self.node(depth + 1)
            size += 1 + value.size
            anchors += value.anchors
            self.bound(size, at)
            if is_merge:
                if merge_seen:
                    fix = "Write one key: <<: [*first, *second]."
                    self.problem("duplicate key '<<' in this mapping", at, fix)
                merge_seen = True
                self.merge(value, at, merged)
            elif name is not None:
                if name in pairs:
                    self.duplicate(name, at, pairs[name].where)
                pairs[name] = Pair(at, value)
        self.loader.get_event()
        # Merged keys come first and are overridden in place, as in SafeLoader.
        return Node({**merged, **pairs}, where, size, tuple(anchors))

    def key(self, where: str, depth: int) -> str | None:
        event: Any = self.loader.peek_event()
        if isinstance(event, yaml.ScalarEvent) and not event.anchor:
            self.loader.get_event()
            value = self.scalar(event, where)
            if isinstance(value, str) or _WHOLE.fullmatch(event.value):
                return str(value)
            if event.value:
                fix = f'Put it in quotes: "{short(event.value)}".'
                self.problem(f"a key must be text, but {short(event.value)!r} reads as {describe(value)}", where, fix)
            else:
                self.problem("a key is empty", where, "Write a name before the colon.")
            return None
        key = self.node(depth + 1)
        if isinstance(key.value, str):
            return key.value
        self.problem(f"a key must be a string, not {describe(key)}", where)
        return None

    def duplicate(self, name: str, where: str, first: str) -> None:
        what = f"duplicate key {short(name)!r} in this mapping"
        details = (f"first at {first}", "mergekit silently took the last one")
        if self.lenient:
            self.findings.append(Finding(what, where, details))
        else:
            self.problem(what, where, "Keep one of the two.", details)

    def merge(self, value: Node, where: str, into: dict[str, Pair]) -> None:
        parts = value.value if isinstance(value.value, tuple) else (value,)
        for part in parts:
            if isinstance(part.value, dict):
                for name, pair in part.value.items():
                    into.setdefault(name, pair)  # the first mapping of a list wins
            else:
                self.problem(f"'<<' takes a mapping or a list of mappings, not {describe(part)}", where)

    # --- PyYAML's own errors -----------------------------------------------------------------------------------------

    def translate(self, error: yaml.YAMLError) -> SyntaxProblem:
        if isinstance(error, yaml.reader.ReaderError):
            before = self.text[: error.position]
            line = before.count("\n") + 1
            column = error.position - (before.rfind("\n") + 1) + 1
            code = error.character if isinstance(error.character, int) else ord(error.character)
            what = f"the character U+{code:04X} is not allowed in YAML text"
            return SyntaxProblem(what, where=f"{self.filename}:{line}:{column}", fix="Remove it.")
        if not isinstance(error, yaml.MarkedYAMLError):
            return SyntaxProblem(f"not valid YAML: {short(str(error))}", where=self.here())
        mark: Any = error.problem_mark or error.context_mark
        details = []
        if error.context and error.context_mark:
            details.append(f"{error.context}, from {self.where(error.context_mark)}")
        lines = self.text.splitlines()
        if mark and mark.line < len(lines) and lines[mark.line].strip():
            details.append(f"the line reads: {short(lines[mark.line].strip())}")
        problem = error.problem or error.context or "no reason given"
        meaning, fix = next(((meaning, fix) for sign, meaning, fix in _SLIPS if sign in problem), ("", ""))
        where = self.where(mark) if mark else self.here()
        return SyntaxProblem(f"not valid YAML: {meaning or problem}", where=where, details=details, fix=fix)
