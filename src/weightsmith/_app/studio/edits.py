"""Edits of a recipe's text in place: comments, order and spaces around the edit stay. Pure functions.

They take texts that `can_edit` accepts. Every edit is checked: the new text must hold the wanted values. If it cannot be edited
in place, the recipe is written again from its values, without comments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import yaml

from weightsmith.plugin import in_yaml, value_end

Path = tuple[str | int, ...]

_MAX_LINE_PAIRS = 1_000_000
"""Most line comparisons when merging two edits. They take a tenth of a second."""


def parsed(text: str) -> Any:
    """The recipe as values; None if it is not one YAML document."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        return None


def can_edit(text: str) -> bool:
    """Whether values of the text can be edited: it is one mapping, and without aliases, which can stand for very much."""
    try:
        aliased = any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=yaml.SafeLoader))
        return not aliased and isinstance(parsed(text), Mapping)
    except (yaml.YAMLError, RecursionError, ValueError):
        return False


def at(tree: Any, path: Path) -> Any:
    """The value at a path; None if there is none."""
    for step in path:
        try:
            tree = tree[step]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def put(text: str, path: Path, value: Any) -> str:
    """The text with one value set or added.

    >>> print(put("a: 1 # one\\nb: [2, 3]", ("b", 0), 4))
    a: 1 # one
    b: [4, 3]
    """
    before, value = parsed(text), _rounded(value)
    if at(before, path) == value and not isinstance(value, bool):
        return text
    return _checked(text, _put(before, path, value), lambda: _spliced(text, path, _flow(value)))


def removed(text: str, path: Path) -> str:
    """The text without a key or an item, its lines and the comments on them. A mapping that becomes empty goes too.

    >>> print(removed("a: 1\\nb: # two\\n  c: 2 # gone\\nd: 3", ("b", "c")))
    a: 1
    d: 3
    """
    before = parsed(text)
    *above, last = path
    owner = at(before, tuple(above))
    if at(before, path) is None and not (isinstance(owner, Mapping) and last in owner):
        return text
    if isinstance(owner, Mapping) and len(owner) == 1 and above:
        return removed(text, tuple(above))
    return _checked(text, _without(before, path), lambda: _cut(text, path))


def moved(text: str, path: Path, start: int, end: int) -> str:
    """The text with one item of the list at `path` moved to another place, with its lines and the comments above it."""
    before = parsed(text)
    items = at(before, path)
    if not isinstance(items, list) or not (0 <= start < len(items) and 0 <= end < len(items)) or start == end:
        return text
    order = [i for i in range(len(items)) if i != start]
    order.insert(end, start)
    return _checked(text, _put(before, path, [items[i] for i in order]), lambda: _ordered(text, path, order))


def inserted(text: str, path: Path, item: Mapping[str, Any]) -> str:
    """The text with a mapping added at the end of the list at `path`."""
    before = parsed(text)
    items, item = at(before, path), _rounded(item)
    if not isinstance(items, list):
        return put(text, path, [item])
    return _checked(text, _put(before, path, [*items, item]), lambda: _appended(text, path, item))


def merged(base: str, current: str, mine: str) -> str:
    """Two edits of one text, line by line. Where both changed a line, mine wins.

    >>> merged("a\\nb\\nc\\n", "A\\nb\\nc\\n", "a\\nb\\nC\\n")
    'A\\nb\\nC\\n'
    """
    if current in (base, mine):
        return mine
    if mine == base:
        return current
    old, theirs, mine_lines = (text.splitlines(keepends=True) for text in (base, current, mine))
    start = _common(old, theirs, mine_lines)
    end = _common(old[start:][::-1], theirs[start:][::-1], mine_lines[start:][::-1])
    head, tail = old[:start], old[len(old) - end :]
    old, theirs, mine_lines = (lines[start : len(lines) - end] for lines in (old, theirs, mine_lines))
    if len(old) * max(len(theirs), len(mine_lines)) > _MAX_LINE_PAIRS:
        return mine
    ours = [op for op in SequenceMatcher(None, old, mine_lines, autojunk=False).get_opcodes() if op[0] != "equal"]
    other = [op for op in SequenceMatcher(None, old, theirs, autojunk=False).get_opcodes() if op[0] != "equal"]
    kept = [(i, j, theirs[a:b]) for _, i, j, a, b in other if not any(_touch(i, j, k, n) for _, k, n, _, _ in ours)]
    hunks = sorted([*kept, *((i, j, mine_lines[a:b]) for _, i, j, a, b in ours)], key=lambda hunk: hunk[:2])
    merged_lines, done = list[str](), 0
    for i, j, lines in hunks:
        merged_lines += [*old[done:i], *lines]
        done = j
    return "".join([*head, *merged_lines, *old[done:], *tail])


def _common(*texts: Sequence[str]) -> int:
    """The number of common lines at the beginning."""
    return next((i for i, lines in enumerate(zip(*texts, strict=False)) if len(set(lines)) > 1), min(map(len, texts)))


def _touch(i: int, j: int, k: int, n: int) -> bool:
    return (i < n and k < j) or (i == k and (i == j or k == n))


# ---- values


def _checked(text: str, values: Any, edit: Callable[[], str | None]) -> str:
    try:
        new = edit()
        if new is not None and yaml.safe_load(new) == values:
            return new
    except (yaml.YAMLError, RecursionError, ValueError):
        pass
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _put(tree: Any, path: Path, value: Any) -> Any:
    """A copy of a tree with one value set."""
    if not path:
        return value
    step, *rest = path
    if isinstance(step, int):
        return [_put(item, tuple(rest), value) if i == step else item for i, item in enumerate(tree)]
    inner = dict(tree or {})
    return inner | {step: _put(inner.get(step), tuple(rest), value)}


def _without(tree: Any, path: Path) -> Any:
    step, *rest = path
    if isinstance(tree, list):
        return [_without(item, tuple(rest)) if i == step else item for i, item in enumerate(tree) if rest or i != step]
    return {k: _without(v, tuple(rest)) if k == step and rest else v for k, v in tree.items() if rest or k != step}


def _rounded(value: Any) -> Any:
    """A value with its numbers as they are written: to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list | tuple):
        return [*map(_rounded, value)]
    return {key: _rounded(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _flow(value: Any) -> str:
    """A value on one line.

    >>> _flow([0.00001, 1.0, True]), _flow({"weight": 0.5})
    ('[0.00001, 1.0, true]', '{weight: 0.5}')
    """
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_flow(k)}: {_flow(v)}' for k, v in value.items())}}}"
    return in_yaml(value)


# ---- characters


def _root(text: str) -> Any:
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _node(text: str, path: Path) -> Any:
    node = _root(text)
    for step in path:
        node = _child(node, step)
    return node


def _child(node: Any, step: str | int) -> Any:
    if isinstance(step, int):
        return node.value[step] if isinstance(node, yaml.SequenceNode) and step < len(node.value) else None
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for key, value in pairs if key.value == step), None)


def _end(text: str, node: Any) -> int:
    """Where a value ends. A block scalar's own end is behind its line ends."""
    index = value_end(node)
    return len(text[:index].rstrip("\n ")) if text[:index].endswith("\n") else index


def _line_end(text: str, index: int) -> int:
    """Behind the end of the line."""
    end = text.find("\n", index)
    return len(text) if end < 0 else end + 1


def _spliced(text: str, path: Path, written: str) -> str | None:
    node: Any = _root(text)
    for i, step in enumerate(path):
        inner = _child(node, step)
        if inner is None:
            return _added(text, node, path[i:], written)
        node = inner
    return _replaced(text, node, written)


def _replaced(text: str, node: Any, written: str) -> str:
    """The text with another value. An empty value ends at its colon."""
    start = node.start_mark.index
    gap = " " if text[start - 1 : start] == ":" else ""
    return f"{text[:start]}{gap}{written}{text[_end(text, node) :]}"


def _added(text: str, node: Any, path: Path, written: str) -> str | None:
    """The text with a key added to a mapping, or to nothing."""
    key, *rest = path
    for step in reversed(rest):
        written = f"{{{step}: {written}}}"
    if isinstance(node, yaml.ScalarNode) and not node.value:
        return _replaced(text, node, f"{{{key}: {written}}}")
    if not isinstance(node, yaml.MappingNode) or not node.value:
        return None
    if node.flow_style:
        return _behind(text, node.value[-1][1], f", {key}: {written}")
    end = _line_end(text, _end(text, node))
    indent = " " * node.value[0][0].start_mark.column
    gap = "" if text[:end].endswith("\n") else "\n"
    return f"{text[:end]}{gap}{indent}{key}: {written}\n{text[end:]}"


def _behind(text: str, node: Any, written: str) -> str:
    """The text with something added right after a value, before a comma or comment."""
    end = _end(text, node)
    return f"{text[:end]}{written}{text[end:]}"


def _cut(text: str, path: Path) -> str | None:
    *above, last = path
    owner = _node(text, tuple(above))
    if isinstance(owner, yaml.SequenceNode):
        return _ordered(text, tuple(above), [i for i in range(len(owner.value)) if i != last])
    pairs = owner.value
    number = next(i for i, (key, _) in enumerate(pairs) if key.value == last)
    if owner.flow_style:
        return _cut_flow(text, [(key.start_mark.index, _end(text, value)) for key, value in pairs], number)
    key, value = pairs[number]
    end = _line_end(text, _end(text, value))
    start = text.rfind("\n", 0, key.start_mark.index) + 1
    if text[start : key.start_mark.index].strip():  # behind a dash: the next key takes its place
        return None if number + 1 == len(pairs) else text[: key.start_mark.index] + text[pairs[1][0].start_mark.index :]
    return text[:start] + text[end:]


def _cut_flow(text: str, spans: Sequence[tuple[int, int]], number: int) -> str:
    """The text without one entry of a flow collection, and without what is between it and the next, or else the last."""
    start, end = spans[number]
    if number + 1 < len(spans):
        end = spans[number + 1][0]
    elif number:
        start = spans[number - 1][1]
    return text[:start] + text[end:]


def _ordered(text: str, path: Path, order: Sequence[int]) -> str | None:
    """The text with the items of a list in another order, or without one of them."""
    node = _node(text, path)
    if node.flow_style:
        spans = [(item.start_mark.index, _end(text, item)) for item in node.value]
        if len(order) < len(spans):
            return _cut_flow(text, spans, next(i for i in range(len(spans)) if i not in order))
        parts, done = list[str](), 0
        for (start, end), i in zip(spans, order, strict=True):
            parts += [text[done:start], text[slice(*spans[i])]]
            done = end
        return "".join([*parts, text[done:]])
    if not order:
        return None
    starts = [_item_start(text, item) for item in node.value]
    end = _line_end(text, _end(text, node))
    parts = [text[a:b] for a, b in zip(starts, [*starts[1:], end], strict=True)]
    parts = [part if part.endswith("\n") else f"{part}\n" for part in parts]
    return text[: starts[0]] + "".join(parts[i] for i in order) + text[end:]


def _dash(text: str, node: Any) -> int:
    """Where the dash of an item of a block list is."""
    tokens = yaml.scan(text, Loader=yaml.SafeLoader)
    dashes: list[int] = [token.start_mark.index for token in tokens if isinstance(token, yaml.BlockEntryToken)]
    return max(index for index in dashes if index <= node.start_mark.index)


def _item_start(text: str, node: Any) -> int:
    """Where the lines of an item of a block list begin: at its dash, or at the comments above it."""
    start = text.rfind("\n", 0, _dash(text, node)) + 1
    while start:
        above = text.rfind("\n", 0, start - 1) + 1
        if not text[above:start].strip().startswith("#"):
            break
        start = above
    return start


def _appended(text: str, path: Path, item: Mapping[str, Any]) -> str | None:
    node = _node(text, path)
    if not node.value:
        return _replaced(text, node, f"[{_flow(item)}]")
    if node.flow_style:
        return _behind(text, node.value[-1], f", {_flow(item)}")
    dash = _dash(text, node.value[0])
    indent = " " * (dash - text.rfind("\n", 0, dash) - 1)
    inner = [f"{key}: {_flow(value)}" for key, value in item.items()]
    lines = "".join(f"{indent}{'- ' if i == 0 else '  '}{line}\n" for i, line in enumerate(inner))
    end = _line_end(text, _end(text, node))
    gap = "" if text[:end].endswith("\n") else "\n"
    return f"{text[:end]}{gap}{lines}{text[end:]}"
