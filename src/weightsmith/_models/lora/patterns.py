"""Patterns of `rank_pattern` and `alpha_pattern`: untrusted regular expressions, matched in linear time.

PEFT matches the end of a module's name, `(.*\\.)?(PATTERN)$`, and takes the first pattern that fits. Python's `re` may take for
ever to do so: `a?a?a?…aaa` and `(a|a)(a|a)…` are exponential. Here most patterns are module names and are looked up in a
dict; RE2, whose time is linear in the name, matches the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from weightsmith._base.errors import FormatError
from weightsmith._base.files import show

MAX_LENGTH = 1000
"""Characters of a pattern that is no plain name."""
MAX_PATTERNS = 100
"""Patterns that are no plain names."""
MAX_STEPS = 20_000_000
"""The most steps for all names and patterns: about 5 s."""
INSTRUCTIONS = 50
"""Size of a compiled pattern that counts as one step for each character of a name."""
_MAX_GROUPS = 1000  # of plain names with equal lengths and dots: 30 in an adapter of a large mixture of experts

_PLAIN = re.compile(r"\^?[\w.-]+\$?", re.ASCII)
_DIFFERENT = re.compile(r"\\[^\W_dDwWsS]|\(\?(?!:)|\[:|\{,\d")
"""Syntax that RE2 and Python's `re` do not read alike: other escapes, flags, character classes, `{,2}`."""


class Patterns:
    """Numbers by pattern: the first pattern that fits a module's name decides."""

    def __init__(self, numbers: Mapping[str, float], key: str, where: str) -> None:
        """key: of the config; where: for messages. Raises FormatError."""
        self._key, self._where = key, where
        self._numbers = list(numbers.values())
        # (length, places of dots, whole) → name → number
        self._names: dict[tuple[int, tuple[int, ...], bool], dict[str, int]] = {}
        self._others: dict[int, Any] = {}
        self._left = MAX_STEPS
        for number, text in enumerate(numbers):
            if _PLAIN.fullmatch(text):
                name, whole = text.removeprefix("^").removesuffix("$"), text.startswith("^")
                dots = tuple(i for i, c in enumerate(name) if c == ".")
                self._names.setdefault((len(name), dots, whole), {}).setdefault(name, number)
            elif len(self._others) == MAX_PATTERNS:
                raise self._unread(f"more than {MAX_PATTERNS} patterns are no plain names", text)
            else:
                self._others[number] = self._compiled(text)
        if len(self._names) > _MAX_GROUPS:
            raise self._unread("too many different forms of names", next(iter(numbers)))

    def find(self, name: str, otherwise: float) -> float:
        """The number of the first pattern that fits a module's name. Raises FormatError where that takes too long."""
        if self._others and not (name.isascii() and name.isprintable()):  # RE2's classes are those of ASCII
            raise self._unread(f"it is compared with the name {show(name)}, which is not ASCII")
        instructions = sum(pattern.programsize for pattern in self._others.values())
        self._left -= len(self._names) + len(name) * instructions // INSTRUCTIONS
        if self._left < 0:
            raise self._unread("the patterns take too long to match with the names of all modules")
        positions = [n for n in (self._plain(name), self._other(name)) if n is not None]
        return self._numbers[min(positions)] if positions else otherwise

    def _plain(self, name: str) -> int | None:
        """Of the patterns that are names. A dot in a pattern stands for any character."""
        positions = []
        for (length, dots, whole), names in self._names.items():
            start = len(name) - length
            if start == 0 or (start > 0 and not whole and name[start - 1] == "."):
                part = list(name[start:])
                for i in dots:
                    part[i] = "."
                if (number := names.get("".join(part))) is not None:
                    positions.append(number)
        return min(positions, default=None)

    def _other(self, name: str) -> int | None:
        return next((number for number, pattern in self._others.items() if pattern.fullmatch(name)), None)

    def _compiled(self, text: str) -> Any:
        """RE2's pattern of the names that end so."""
        try:
            return compiled(text, r"(?:.*\.)?")
        except ValueError as error:
            raise self._unread(str(error), text) from None

    def _unread(self, why: str, text: str = "") -> FormatError:
        shown = f" {show(text)}" if text else ""
        fix = "Write the names of the modules in place of the pattern."
        return FormatError(f"{self._key} has a pattern{shown} that is not read: {why}", where=self._where, fix=fix)


def compiled(text: str, before: str = "") -> Any:
    """RE2's pattern of a stranger's regular expression. before: a pattern in front of it.

    Raises ValueError with the reason if RE2 cannot read it, or would read it otherwise than Python's `re`.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"{len(text):,} characters, at most {MAX_LENGTH:,} are read")
    if unsupported := _DIFFERENT.search(text):
        raise ValueError(f"'{unsupported[0]}' is not read")
    import re2

    options = re2.Options()
    options.log_errors, options.never_capture = False, True
    try:
        re2.compile(text, options)  # by itself, because it might close the group
        return re2.compile(f"{before}(?:{text})", options)
    except re2.error as error:
        raise ValueError(error.args[0].decode(errors="replace")) from None
