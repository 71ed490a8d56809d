"""Which group of config.json a module belongs to, as compressed-tensors finds it.

`targets` of a group are names of modules, regular expressions after `re:` that fit the beginning of a name, and names of
classes. If several fit a module, names come first, then expressions in alphabetical order, then classes. The expressions are
strangers', so RE2 matches them, in linear time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._base.errors import FormatError
from weightsmith._base.files import show
from weightsmith._models.lora.patterns import INSTRUCTIONS, MAX_PATTERNS, MAX_STEPS, compiled

_EXPRESSION = "re:"
_CLASSES, _EMBEDDING_CLASSES = ("Linear", "LinearBase", "Module"), ("Embedding", "Module")
"""Classes of modules that have a matrix of codes, by which groups name them."""
_EMBEDDING = "embed"
"""What names of embeddings contain."""


class Targets:
    """The targets of all groups.

    groups  name of a group in config.json → its targets
    """

    def __init__(self, groups: Mapping[str, object], where: str) -> None:
        """Raises FormatError for targets that are no texts, and for expressions that are not read."""
        self._where = where
        self._group_of: dict[str, str] = {}
        for group, given in groups.items():
            for target in ["Linear"] if given is None else given if isinstance(given, list) else [given]:
                if not isinstance(target, str):
                    raise self._unread(f"config_groups.{group}.targets holds {show(target)}, not a text")
                # compressed-tensors takes the later of two groups. That may be a mistake, so such a target tells nothing.
                self._group_of[target] = "" if target in self._group_of else group
        texts = sorted(target for target in self._group_of if target.startswith(_EXPRESSION))
        if len(texts) > MAX_PATTERNS:
            raise self._unread(f"config_groups has {len(texts):,} regular expressions, and at most {MAX_PATTERNS:,} are read")
        self._expressions = {text: self._compiled(text) for text in texts}
        self._left = MAX_STEPS

    def group_of(self, module: str) -> str:
        """The group of a module whose matrix is stored as codes; "" if no target fits, or several groups have it. Raises
        FormatError."""
        if module in self._group_of:
            return self._group_of[module]
        if self._expressions and not (module.isascii() and module.isprintable()):  # RE2's classes are those of ASCII
            raise self._unread(f"the targets of config_groups are compared with the name {show(module)}, which is not ASCII")
        self._left -= len(module) * sum(each.programsize for each in self._expressions.values()) // INSTRUCTIONS
        if self._left < 0:
            raise self._unread("the targets of config_groups take too long to match with the names of all modules")
        for target, expression in self._expressions.items():
            if expression.match(module):
                return self._group_of[target]
        classes = _EMBEDDING_CLASSES if _EMBEDDING in module.rpartition(".")[2] else _CLASSES
        return next((self._group_of[each] for each in classes if each in self._group_of), "")

    def _compiled(self, text: str) -> Any:
        try:
            return compiled(text.removeprefix(_EXPRESSION))
        except ValueError as error:
            raise self._unread(f"config_groups has a target {show(text)} that is not read: {error}") from None

    def _unread(self, what: str) -> FormatError:
        return FormatError(what, where=self._where, fix="Write names of modules in place of regular expressions.")
