"""Values that `weightsmith tune` chooses: `{tune: [0, 1]}` for a number, `{choice: [ties, dare_ties]}` for another value.

They are found and filled in the tree of a recipe, before its grammar is read: no mapping of the grammar knows them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import yaml

from weightsmith._base.errors import ParameterError, PlanError, SyntaxProblem, WeightsmithError
from weightsmith._planning.recipe.kinds import Schema
from weightsmith._planning.recipe.records import numeric
from weightsmith._planning.recipe.written import Source, WrittenRecipe, as_yaml, read_source, with_settings
from weightsmith._planning.recipe.yaml import Node, Pair, Scalar, describe, float_of, plain, read_yaml

TUNE, CHOICE, START = "tune", "choice", "start"

PARAMETERS = "parameters"
CHOOSABLE = ("merge_method", "model", "base_model")
"""Keys outside `parameters` that a choice can stand for."""

MAX_TUNABLES = 1000

EXAMPLE = "Write weight: {tune: [0, 1]}."


@dataclass(frozen=True, slots=True)
class Tunable:
    """A value to tune. An aliased one is one value, wherever it is used.

    name       key path of its first place: `models[0].parameters.weight`
    where      position
    parameter  the parameter that it is a value of, or the key of a choice
    low, high  the range of a number; None: a choice
    choices    the values of a choice; () for a number
    start      the value that the search starts from: the middle of the range, or the first choice, unless `start` says another
    """

    name: str
    where: str
    parameter: str
    low: float | None
    high: float | None
    choices: tuple[Scalar, ...]
    start: Scalar

    @property
    def is_choice(self) -> bool:
        """Whether it is a choice."""
        return bool(self.choices)

    @property
    def chooses_models(self) -> bool:
        """Whether its value changes the method or the models."""
        return self.parameter in CHOOSABLE


def is_tunable(node: Node) -> bool:
    """Whether a value is one to tune, perhaps a wrong one."""
    value = node.value
    return isinstance(value, dict) and any(key in value and isinstance(value[key].value.value, tuple) for key in (TUNE, CHOICE))


def tunables(root: Node) -> tuple[tuple[Tunable, ...], list[WeightsmithError]]:
    """The values to tune in a tree, in the order of the text, and the problems of wrong ones."""
    tunable_at: dict[tuple[str, int], Tunable | None] = {}
    problems: list[WeightsmithError] = []
    for path, node in _places(root, ()):
        key = node.where, id(node)
        if key not in tunable_at:
            tunable_at[key] = _read(path, node, problems)
        if (problem := _misplaced(path, node)) is not None:
            problems.append(problem)
    if len(tunable_at) > MAX_TUNABLES:
        what = f"the recipe has {len(tunable_at):,} values to tune: at most {MAX_TUNABLES:,} can be tuned"
        problems = [ParameterError(what, where=root.where, fix="Tune fewer values.")]
    return tuple(tunable for tunable in tunable_at.values() if tunable is not None), problems


def _places(node: Node, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Node]]:
    if is_tunable(node):
        yield path, node
    elif isinstance(node.value, dict):
        for name, pair in node.value.items():
            if not name.startswith(("x-", "_")):
                yield from _places(pair.value, (*path, name))
    elif isinstance(node.value, tuple):
        for i, item in enumerate(node.value):
            yield from _places(item, (*path, i))


def _path(path: Sequence[str | int]) -> str:
    """A key path as `--set` takes it."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def _parameter(path: Sequence[str | int]) -> str:
    """The parameter of a place, or the last key."""
    places = [i for i, step in enumerate(path[:-1]) if step == PARAMETERS]
    keys = [step for step in path[places[-1] + 1 :] if isinstance(step, str)] if places else []
    return keys[0] if keys else next((step for step in reversed(path) if isinstance(step, str)), "")


def _misplaced(path: Sequence[str | int], node: Node) -> WeightsmithError | None:
    if PARAMETERS in path[:-1]:
        return None
    if isinstance(node.value, dict) and CHOICE in node.value and path and path[-1] in CHOOSABLE:
        return None
    fix = f"Tune numbers inside 'parameters'; 'choice' can also stand for {', '.join(CHOOSABLE)}."
    return SyntaxProblem(f"'{_path(path)}' cannot be tuned", where=node.where, fix=fix)


def _read(path: Sequence[str | int], node: Node, problems: list[WeightsmithError]) -> Tunable | None:
    assert isinstance(node.value, dict)
    kind = TUNE if TUNE in node.value else CHOICE
    others = [name for name in node.value if name not in (kind, START)]
    if others:
        what = f"a value to tune takes {kind!r} and {START!r}, not {others[0]!r}"
        problems.append(SyntaxProblem(what, where=node.value[others[0]].where, fix=f"Remove '{others[0]}'."))
        return None
    alternatives = node.value[kind].value
    start = node.value[START].value if START in node.value else None
    name, parameter = _path(path), _parameter(path)
    return (_number if kind == TUNE else _choice)(name, parameter, node, alternatives, start, problems)


def _number(
    name: str, parameter: str, node: Node, ends: Node, start: Node | None, problems: list[WeightsmithError]
) -> Tunable | None:
    def wrong(what: str, at: Node, fix: str = EXAMPLE) -> None:
        problems.append(ParameterError(what, where=at.where, fix=fix))

    assert isinstance(ends.value, tuple)
    numbers = [_finite(item) for item in ends.value]
    low, high = (numbers[0], numbers[1]) if len(numbers) == 2 else (None, None)
    if low is None or high is None:
        shown = ", ".join(describe(item).removeprefix("the number ") for item in ends.value[:4])
        wrong(f"'{TUNE}' takes two finite numbers, not [{shown}]", ends)
        return None
    if low >= high:
        wrong(f"'{TUNE}' takes a range from low to high, not from {low:g} to {high:g}", ends)
        return None
    first: float | None = (low + high) / 2
    if start is not None:
        first = _finite(start)
    if first is None or not low <= first <= high:
        assert start is not None
        wrong(f"'{START}' takes a number from {low:g} to {high:g}, not {describe(start)}", start, f"Write start: {low:g}.")
        return None
    return Tunable(name, node.where, parameter, low, high, (), first)


def _choice(
    name: str, parameter: str, node: Node, alternatives: Node, start: Node | None, problems: list[WeightsmithError]
) -> Tunable | None:
    assert isinstance(alternatives.value, tuple)
    values = [item.value for item in alternatives.value]
    fix = f"Write {parameter}: {{{CHOICE}: [first, second]}}."
    for item in alternatives.value:
        if item.value is None or isinstance(item.value, dict | tuple) or (_is_number(item.value) and _finite(item) is None):
            what = f"'{CHOICE}' takes texts, finite numbers, true and false, not {describe(item)}"
            problems.append(ParameterError(what, where=item.where, fix=fix))
            return None
    choices: tuple[Scalar, ...] = tuple(v for v in values if isinstance(v, bool | int | float | str))
    if len(choices) < 2 or len({(type(v), v) for v in choices}) < len(choices):
        what = f"'{CHOICE}' takes at least two values, all different"
        problems.append(ParameterError(what, where=alternatives.where, fix=fix))
        return None
    first = choices[0]
    if start is not None:
        if start.value not in choices:
            what = f"'{START}' takes one of the choices, not {describe(start)}"
            problems.append(ParameterError(what, where=start.where, fix=f"Write start: {choices[0]}."))
            return None
        first = next(v for v in choices if v == start.value)
    return Tunable(name, node.where, parameter, None, None, choices, first)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(node: Node) -> float | None:
    """The number that a value or text means, if it is finite."""
    if not isinstance(node.value, bool | int | float | str):
        return None
    number = numeric(node.value)
    return None if number is None or not math.isfinite(float_of(number)) else float(number)


def filled(node: Node, values: Mapping[str, Scalar]) -> Node:
    """The tree with values in the places to tune, at the same positions. values: by `Tunable.where`."""
    if node.where in values and is_tunable(node):
        return replace(node, value=values[node.where])
    if isinstance(node.value, dict):
        pairs = {name: Pair(pair.where, filled(pair.value, values)) for name, pair in node.value.items()}
        return replace(node, value=pairs)
    if isinstance(node.value, tuple):
        return replace(node, value=tuple(filled(item, values) for item in node.value))
    return node


# ---- the text of a filled recipe


def spliced(text: str, values: Mapping[str, Scalar]) -> str:
    """A YAML text with a value in each place to tune; its comments and layout stay. values: by `line:column`.

    >>> print(spliced("t: {tune: [0, 1]}  # shared", {"1:4": 0.25}))
    t: 0.25  # shared
    """
    spans = sorted(span for span in _spans(text) if span[2] in values)
    parts, end = [], 0
    for first, last, place in spans:
        anchor = re.match(r"&\S+\s+", text[first:last])
        parts += [text[end:first], anchor[0] if anchor else "", in_yaml(values[place])]
        end = last
    return "".join([*parts, text[end:]])


def _spans(text: str) -> Iterator[tuple[int, int, str]]:
    """Begin and end of each mapping to tune, and its `line:column`."""
    seen: set[int] = set()
    to_visit = [*filter(None, yaml.compose_all(text, yaml.SafeLoader))]
    while to_visit:
        node = to_visit.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = {key.value: value for key, value in node.value if isinstance(key, yaml.ScalarNode)}
            if any(isinstance(keys.get(key), yaml.SequenceNode) for key in (TUNE, CHOICE)):
                mark = node.start_mark
                yield mark.index, value_end(node), f"{mark.line + 1}:{mark.column + 1}"
            else:
                to_visit += [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            to_visit += node.value


def value_end(node: yaml.Node) -> int:
    """Where a value ends. A block's own mark is at the next token, behind comments."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return value_end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def in_yaml(value: Scalar) -> str:
    """A value as YAML reads it; numbers without an exponent.

    >>> in_yaml(0.00001), in_yaml(2.0), in_yaml("ties"), in_yaml("no"), in_yaml(True)
    ('0.00001', '2.0', 'ties', '"no"', 'true')
    """
    if isinstance(value, float):
        return np.format_float_positional(value, trim="0")
    is_plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z./][\w./@+-]*", value) and yaml.safe_load(value) == value
    return str(value) if is_plain else json.dumps(value, ensure_ascii=False)


# ---- JSON Schema


def or_choice(schema: Schema) -> Schema:
    """A schema of a value that a choice may stand for."""
    return {"anyOf": [schema, _choice_schema(schema)]}


def tuned_schemas(scalar: Schema, number: Schema | None) -> list[Schema]:
    """The schemas of a value to tune. scalar: of the choices; number: of the ends of a range; None: not a number."""
    schemas = [_choice_schema(scalar)]
    if number is not None:
        ends = {"type": "array", "items": number, "minItems": 2, "maxItems": 2}
        schemas.append(_mapping_schema(TUNE, ends, number))
    return schemas


def _choice_schema(scalar: Schema) -> Schema:
    return _mapping_schema(CHOICE, {"type": "array", "items": scalar, "minItems": 2, "uniqueItems": True}, scalar)


def _mapping_schema(key: str, values: Schema, start: Schema) -> Schema:
    return {"type": "object", "properties": {key: values, START: start}, "required": [key], "additionalProperties": False}


# ---- a recipe with such values


@dataclass(frozen=True, slots=True)
class Template:
    """A recipe with values to tune.

    tunables  in the order of the text
    """

    tunables: tuple[Tunable, ...]
    written: WrittenRecipe
    is_text: bool

    @property
    def start(self) -> tuple[Scalar, ...]:
        """The values that a search starts from."""
        return tuple(tunable.start for tunable in self.tunables)

    def fill(self, values: Sequence[Scalar], *, layout: bool = True) -> WrittenRecipe:
        """The recipe with these values: a source for `load`, and its text. values: of `tunables`.

        Comments and layout of a YAML text stay; with `layout=False` they do not, which takes a third of the time.
        """
        value_at = {tunable.where: value for tunable, value in zip(self.tunables, values, strict=True)}
        documents = []
        for document in self.written.documents:
            assert document.root is not None
            root = filled(document.root, value_at)
            documents.append(replace(document, root=root, text=as_yaml(root)))
        text = "---\n".join(document.text for document in documents)
        if self.is_text and layout:
            spliced_text = spliced(
                self.written.text, {where.removeprefix(f"{self.written.filename}:"): v for where, v in value_at.items()}
            )
            read = read_yaml(spliced_text, self.written.filename)
            if [d.root and plain(d.root) for d in read] == [d.root and plain(d.root) for d in documents]:
                text = spliced_text
        return replace(self.written, documents=tuple(documents), text=text)


def read_template(source: Source, *, settings: Mapping[str, Any] | None = None, lenient: bool = False) -> Template:
    """A recipe with values to tune. settings, lenient: as for `load`. Raises PlanError with all problems of these values.

    >>> made = read_template("models: [{model: a, parameters: {weight: {tune: [0, 1]}}}]\\n")
    >>> made.tunables[0].name, made.fill((0.25,)).text
    ('models[0].parameters.weight', 'models: [{model: a, parameters: {weight: 0.25}}]\\n')
    """
    written = read_source(source, lenient=lenient)
    if isinstance(written, WeightsmithError):
        raise PlanError([written])
    if settings:
        written = with_settings(written, settings)
    all_tunables: list[Tunable] = []
    problems = [problem for document in written.documents for problem in document.problems]
    for document in written.documents:
        if document.root is not None:
            tunables_of_document, wrong = tunables(document.root)
            all_tunables += tunables_of_document
            problems += wrong
    if not all_tunables and not problems:
        fix = "Write a range in place of a number, weight: {tune: [0, 1]}, or choices: {choice: [ties, dare_ties]}."
        problems.append(ParameterError("the recipe has no value to tune", where=written.filename, fix=fix))
    if problems:
        raise PlanError(problems, written.shown)
    return Template(tuple(all_tunables), written, bool(written.shown[0]) and not settings)
