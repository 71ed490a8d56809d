"""Where the walk over a recipe writes down what it finds."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from weightsmith.errors import Finding, SyntaxProblem, WeightsmithError
from weightsmith.recipe.misuse import Misuse


class Report:
    """Problems and warnings in the order found, each once.

    lenient          what mergekit ignores without a word is a warning instead of an error
    parameter_names  of all methods
    whole            False once the skeleton of the recipe (method, models, layers) has a hole
    """

    def __init__(self, lenient: bool, parameter_names: Collection[str], findings: Iterable[Finding]) -> None:
        self.lenient = lenient
        self.parameter_names = parameter_names
        self.problems: list[WeightsmithError] = []
        self.findings = dict.fromkeys(findings)  # an ordered set: an aliased value is walked at each of its uses
        self.whole = True

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

    def warn(self, what: str, where: str, fix: str = "") -> None:
        """Add a warning."""
        self.findings[Finding(what, where, fix=fix)] = None

    def misused(self, misuse: Misuse, where: str) -> bool:
        """Add a misuse; True when it is an error, False when a warning."""
        if misuse.harmless or self.lenient:
            self.warn(misuse.what, where, misuse.fix)
            return False
        self.problem(misuse.what, where, misuse.fix, misuse.error)
        return True
