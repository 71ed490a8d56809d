"""The form of the grammar: a kind of value, a key of a mapping, a level of mappings. The kinds that hold mappings.

A `Kind` is everything there is to know of a kind of value, so adding one is one entry in one file: here, in `single.py`
(single values), `references.py` (models) or `parameters.py`.

    FLAG = Kind(_flag, {"type": "boolean"}, "`true`, `false`")
    Key("match", FLAG, "Reorder the neurons of each expert to match the group's first; false by default.")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weightsmith._base.errors import Finding, SyntaxProblem, WeightsmithError
from weightsmith._planning.recipe.nodes import Node, Pair, describe
from weightsmith._planning.recipe.records import Recipe, Section

Schema = Mapping[str, Any]


class Walk:
    """One reading of a document. What a kind's reader needs of it; `walk.Walker` reads the mappings.

    filename  for positions
    lenient   settings that mergekit silently ignores are warnings instead of errors
    problems  errors, in the order found
    findings  warnings, in the order found: an ordered set, because an aliased value is read at each of its uses
    whole     False once the skeleton of the recipe has a hole
    stages    the recipes that are models of others, see `Recipe.stages`
    depth     of the recipes inside recipes that are being read
    """

    def __init__(
        self, filename: str, findings: Iterable[Finding], stages: dict[str, Recipe | None] | None, *, lenient: bool
    ) -> None:
        self.filename = filename
        self.lenient = lenient
        self.problems: list[WeightsmithError] = []
        self.findings = dict.fromkeys(findings)
        self.whole = True
        self.stages: dict[str, Recipe | None] = {} if stages is None else stages
        self.depth = 0

    def problem(
        self,
        what: str,
        where: str,
        fix: str = "",
        error: type[WeightsmithError] = SyntaxProblem,
        details: tuple[str, ...] = (),
    ) -> None:
        """Add an error."""
        self.problems.append(error(what, where=where, details=details, fix=fix))

    def wrong(self, node: Node, key: Key, expected: str, fix: str = "", error: type[WeightsmithError] = SyntaxProblem) -> None:
        """Add the error that a key takes another kind of value."""
        self.problem(f"{key.name!r} takes {expected}, not {describe(node)}", node.where, fix, error)

    def warn(self, what: str, where: str, fix: str = "") -> None:
        """Add a warning."""
        self.findings[Finding(what, where, fix=fix)] = None

    def misused(self, what: str, where: str, fix: str, error: type[WeightsmithError], *, harmless: bool = False) -> bool:
        """Report a setting that mergekit ignores; True if it is an error, False if it is a warning."""
        if harmless or self.lenient:
            self.warn(what, where, fix)
            return False
        self.problem(what, where, fix, error)
        return True

    def mapping(self, node: Node, level: Level) -> Any:
        """Read a mapping of a level; None if it is not a mapping, or a required key is missing or wrong."""
        raise NotImplementedError

    def is_parameter(self, name: str, where: str) -> bool:
        """True if any method has a parameter of this name; reported if not. The planner checks it against the method."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A kind of value.

    read    the value; or None, with the problem and its position reported to the walk
    schema  JSON Schema of what `read` accepts
    words   the same as Markdown, for the reference page
    of      the level of the mappings inside the value
    """

    read: Callable[[Pair, Key, Walk], Any]
    schema: Schema
    words: str
    of: Level | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Key:
    """One key of a mapping; `doc` is one sentence for messages, editors and the reference page."""

    name: str
    kind: Kind
    doc: str
    required: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """One kind of mapping in a recipe.

    name    for the schema's $defs and the headings of the reference page
    place   for messages: "unknown key 'x' <place>"
    one_of  exactly one of these keys must be given
    make    the value of such a mapping; called only when no required key is missing
    """

    name: str
    place: str
    doc: str
    keys: tuple[Key, ...]
    one_of: tuple[str, ...] = ()
    make: Callable[[Section], Any] = lambda section: section

    def key(self, name: str) -> Key | None:
        """The key of this name, or None."""
        return next((key for key in self.keys if key.name == name), None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the keys, in the order shown to users."""
        return tuple(key.name for key in self.keys)

    @property
    def schema(self) -> Schema:
        """A reference to the level's definition."""
        return {"$ref": f"#/$defs/{self.name}"}

    @property
    def words(self) -> str:
        """A link to the level's heading."""
        return f"[{self.name}](#{self.name})"


def list_schema(items: Schema) -> Schema:
    """A list that is not empty."""
    return {"type": "array", "items": items, "minItems": 1}


def section(level: Level) -> Kind:
    """A mapping of a level."""
    return Kind(lambda pair, key, walk: walk.mapping(pair.value, level), level.schema, level.words, level)


def list_of(level: Level) -> Kind:
    """A list of mappings of a level, not empty. Mappings with problems are left out."""

    def read(pair: Pair, key: Key, walk: Walk) -> tuple[Any, ...] | None:
        entries = pair.value.value
        if not isinstance(entries, tuple):
            fix = f"Write each entry after a dash: - {level.names[0]}: ..."
            walk.wrong(pair.value, key, "a list", fix)
        elif not entries:
            walk.problem(f"{key.name!r} is empty", pair.value.where, f"Write at least one entry: - {level.names[0]}: ...")
        else:
            return tuple(entry for node in entries if (entry := walk.mapping(node, level)) is not None)
        return None

    return Kind(read, list_schema(level.schema), f"a list of {level.words}", level)


NOT_IN_MIXTURES: Mapping[str, tuple[str, str]] = {
    "tokenizer_source": (
        "tokenizer_source is not supported in a recipe of `weightsmith moe`",
        "Remove this line: the base's tokenizer is then copied, as 'base' would ask for.",
    ),
    "tokenizer": (
        "tokenizer is not supported in a recipe of `weightsmith moe`",
        "Remove this block: the base's tokenizer is then copied.",
    ),
    "chat_template": (
        "chat_template is not supported in a recipe of `weightsmith moe`",
        "Remove this line: the base's chat template is then copied.",
    ),
}
"""Keys of a merge that a mixture does not take: the error and the next step."""

NO_EFFECT: Mapping[str, str] = {
    "residual_weight": "residual_weight has no effect: mergekit read it and never used it",
    "override_architecture": "override_architecture is not needed and has no effect: structure comes from tensor names",
}
"""Keys of the kind UNUSED: the warning."""


UNUSED = Kind(lambda pair, key, walk: walk.warn(NO_EFFECT[key.name], pair.where, "Remove it."), {}, "anything; a warning")
