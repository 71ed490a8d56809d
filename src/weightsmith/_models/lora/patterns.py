"""Patterns of `rank_pattern` and `alpha_pattern`: untrusted regular expressions, matched in linear time.

PEFT matches the end of a module's name, `(.*\\.)?(PATTERN)$`, and takes the first pattern that fits. Python's `re` may take for
ever to do so: `a?a?a?…aaa` and `(a|a)(a|a)…` are exponential. Here most patterns are module names and are looked up in a
dict; the others become an automaton that is in all its states at once (Thompson 1968), one step for each character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

MAX_LENGTH = 1000
"""Characters of a pattern that is no plain name."""
MAX_PATTERNS = 100
"""Patterns that are no plain names."""
MAX_STATES = 2000
MAX_STEPS = 20_000_000
"""The most steps for all names and patterns: about 5 s."""
_MAX_GROUPS = 1000  # of plain names with equal lengths and dots: 30 in an adapter of a large mixture of experts
_MAX_NESTED = 20

_PLAIN = re.compile(r"\^?[\w.-]+\$?", re.ASCII)
_CLASS = re.compile(r"\[\^?\]?(?:[^\\\[\]]|\\.)*\]", re.DOTALL)
_COUNTS = re.compile(r"\{(?!\})([0-9]*)(,?)([0-9]*)\}")
_REPEATS: Mapping[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}

Tree = tuple[Any, ...]  # ("one", Pattern), ("all", [Tree]), ("any", [Tree]), ("times", Tree, least, most), ("^",), ("$",)


class PatternError(ValueError):
    """Why a pattern is not one that is matched, as the end of a sentence."""


class Patterns:
    """Numbers by pattern: the first pattern that fits a module's name decides."""

    def __init__(self, numbers: Mapping[str, float]) -> None:
        """Raises PatternError, whose second argument is the pattern."""
        self._numbers = list(numbers.values())
        # (length, places of dots, whole) → name → number
        self._names: dict[tuple[int, tuple[int, ...], bool], dict[str, int]] = {}
        self._automata: list[tuple[int, _Automaton]] = []
        self._left = MAX_STEPS
        for number, text in enumerate(numbers):
            if _PLAIN.fullmatch(text):
                name, whole = text.removeprefix("^").removesuffix("$"), text.startswith("^")
                dots = tuple(i for i, c in enumerate(name) if c == ".")
                self._names.setdefault((len(name), dots, whole), {}).setdefault(name, number)
            else:
                try:
                    if len(self._automata) == MAX_PATTERNS:
                        raise PatternError(f"more than {MAX_PATTERNS} patterns are no plain names")
                    self._automata.append((number, _Automaton(text)))
                except PatternError as error:
                    raise PatternError(str(error), text) from None
        if len(self._names) > _MAX_GROUPS:
            raise PatternError("too many different forms of names", next(iter(numbers)))

    def find(self, name: str, otherwise: float) -> float:
        """The number of the first pattern that fits a module's name. Raises PatternError where that takes too long."""
        self._left -= len(self._names)
        if self._left < 0:
            raise PatternError("the patterns take too long to match with the names of all modules")
        found = [n for n in (self._plain(name), self._other(name)) if n is not None]
        return self._numbers[min(found)] if found else otherwise

    def _plain(self, name: str) -> int | None:
        """Of the patterns that are names. A dot in a pattern stands for any character."""
        found = []
        for (length, dots, whole), names in self._names.items():
            start = len(name) - length
            if start == 0 or (start > 0 and not whole and name[start - 1] == "."):
                part = list(name[start:])
                for i in dots:
                    part[i] = "."
                if (number := names.get("".join(part))) is not None:
                    found.append(number)
        return min(found, default=None)

    def _other(self, name: str) -> int | None:
        for number, automaton in self._automata:
            fits, steps = automaton.fits(name)
            self._left -= steps
            if fits:
                return number
        return None


class _Automaton:
    """A pattern as states. A state is a test of one character and what comes after, or a fork without a test."""

    def __init__(self, text: str) -> None:
        self._tests: list[re.Pattern[str] | str] = []  # "" of a fork, "^" and "$" of places, "end" of the last
        self._after: list[list[int]] = []
        end = self._state("end", [])
        before = ("times", ("all", [("times", ("one", re.compile(".")), 0, None), ("one", re.compile(r"\."))]), 0, 1)
        self._start = self._build(("all", [before, _Parser(text).tree()]), end)
        self._next: dict[tuple[frozenset[int], str], frozenset[int]] = {}  # made as names come by, and small: a cache

    def fits(self, name: str) -> tuple[bool, int]:
        """The whole name is one that the pattern describes, and how many steps it took to see that."""
        steps, states = 0, self._reached([self._start], "^" if name else "^$")
        for i, character in enumerate(name):
            last = i == len(name) - 1
            key = states, "$" + character if last else character
            steps += 1
            if (found := self._next.get(key)) is None:
                passed = [s for s in states if isinstance(test := self._tests[s], re.Pattern) and test.match(character)]
                found = self._reached([n for s in passed for n in self._after[s]], "$" if last else "")
                steps += 10 * (len(states) + len(found))
                if len(self._next) > 10_000:
                    self._next.clear()
                self._next[key] = found
            states = found
            if not states:
                break
        return any(self._tests[s] == "end" for s in states), steps

    def _reached(self, starts: Iterable[int], place: str) -> frozenset[int]:
        """The states that are reached without a character. place: "^" at the beginning of the name, "$" at its end."""
        found: set[int] = set()
        todo = list(starts)
        while todo:
            state = todo.pop()
            if state not in found:
                found.add(state)
                test = self._tests[state]
                if isinstance(test, str) and test in ("", *place):
                    todo += self._after[state]
        return frozenset(found)

    def _state(self, test: re.Pattern[str] | str, after: list[int]) -> int:
        if len(self._tests) == MAX_STATES:
            raise PatternError(f"more than {MAX_STATES:,} states")
        self._tests.append(test)
        self._after.append(after)
        return len(self._tests) - 1

    def _build(self, tree: Tree, after: int) -> int:
        """The first state of a part of the pattern, given the first one of what comes after it."""
        match tree:
            case ("one", test):
                return self._state(test, [after])
            case ("all", parts):
                for part in reversed(parts):
                    after = self._build(part, after)
                return after
            case ("any", ways):
                return self._state("", [self._build(way, after) for way in ways])
            case ("times", part, least, most):
                if most is None:
                    loop = self._state("", [after])
                    self._after[loop].append(self._build(part, loop))
                    after = loop
                for _ in range(0 if most is None else most - least):
                    after = self._state("", [self._build(part, after), after])
                for _ in range(least):
                    after = self._build(part, after)
                return after
        return self._state(tree[0], [after])


class _Parser:
    """Parser for the subset of Python's regular expressions that matches in linear time and occurs in adapters."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise PatternError(f"{len(text):,} characters, at most {MAX_LENGTH:,} are read")
        self.text, self.at, self.depth = text, 0, 0

    def tree(self) -> Tree:
        found = self._ways()
        if self.at < len(self.text):
            raise PatternError("a ')' that closes nothing")
        return found

    def _ways(self) -> Tree:
        ways, parts = list[Tree](), list[Tree]()
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self._take("|"):
                ways.append(("all", parts))
                parts = []
            else:
                parts.append(self._repeated(self._part()))
        return ("any", [*ways, ("all", parts)])

    def _part(self) -> Tree:
        text, at = self.text, self.at
        if self._take("("):
            if text.startswith("?", self.at) and not self._take("?:"):
                raise PatternError(f"{text[at : at + 3]!r} is not read")
            self.depth += 1
            if self.depth > _MAX_NESTED:
                raise PatternError(f"more than {_MAX_NESTED} groups in each other")
            inner = self._ways()
            self.depth -= 1
            if not self._take(")"):
                raise PatternError("a '(' without its ')'")
            return inner
        if text[at] in "*+?":
            raise PatternError(f"nothing to repeat before {text[at]!r}")
        if self._take("^") or self._take("$"):
            return (text[at],)
        if text[at] == "[":
            found = _CLASS.match(text, at)
            if found is None or re.search(r"--|&&|\|\||~~", found[0]):
                raise PatternError(f"the set at character {at} is not read")
            self.at = found.end()
            return ("one", self._compiled(found[0]))
        if self._take("\\"):
            escaped = text[self.at : self.at + 1]
            if not escaped or (escaped.isalnum() and escaped not in "dDwWsS"):
                raise PatternError(f"'\\{escaped}' is not read")
            self.at += 1
            return ("one", self._compiled(f"\\{escaped}"))
        self.at += 1
        return ("one", self._compiled(text[at] if text[at] == "." else re.escape(text[at])))

    def _repeated(self, part: Tree) -> Tree:
        """The part, with the times that are written behind it."""
        found = _COUNTS.match(self.text, self.at)
        if found:
            self.at = found.end()
            if max(map(len, found.groups())) > 4:
                raise PatternError(f"{found[0][:20]!r} is too often")
            least = int(found[1] or 0)
            most = int(found[3]) if found[3] else None if found[2] else least
            if most is not None and most < least:
                raise PatternError(f"{found[0]!r} counts backwards")
        elif sign := next((sign for sign in _REPEATS if self._take(sign)), ""):
            least, most = _REPEATS[sign]
        else:
            return part
        self._take("?")  # which of several ways is taken makes no difference to whether there is one
        if self.text[self.at : self.at + 1] in ("*", "+", "?") or _COUNTS.match(self.text, self.at):
            raise PatternError(f"two numbers of times at character {self.at}")
        return ("times", part, least, most)

    def _compiled(self, one: str) -> re.Pattern[str]:
        try:
            return re.compile(one)
        except re.error as error:
            raise PatternError(f"{one!r}: {error}") from None

    def _take(self, sign: str) -> bool:
        if found := self.text.startswith(sign, self.at):
            self.at += len(sign)
        return found
