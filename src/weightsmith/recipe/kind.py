"""Which command a recipe is for, by its top-level keys."""

from __future__ import annotations

from typing import Literal

from weightsmith.errors import SyntaxProblem
from weightsmith.recipe.nodes import Node
from weightsmith.recipe.surgery_grammar import SURGERY

Kind = Literal["merge", "moe"]

_MERGE_KEYS = frozenset({"merge_method", "models", "slices", "modules"})
_MOE_KEYS = frozenset({"experts", *SURGERY.one_of})


def kind_of(root: Node | None) -> Kind | None:
    """The command; None where the keys are those of both, or of neither."""
    keys = root.value if root is not None and isinstance(root.value, dict) else {}
    merge, moe = not _MERGE_KEYS.isdisjoint(keys), not _MOE_KEYS.isdisjoint(keys)
    return None if merge == moe else "merge" if merge else "moe"


def for_other_command(root: Node | None, wanted: Kind) -> SyntaxProblem | None:
    """The one error for a recipe of the other command: that its keys are unknown here would say nothing."""
    found = kind_of(root)
    if root is None or found is None or found == wanted:
        return None
    what = f"this is a recipe of `weightsmith {found}`, not of `weightsmith {wanted}`"
    return SyntaxProblem(what, where=root.where, fix=f"Run `weightsmith {found}` (in Python: weightsmith.{found}).")
