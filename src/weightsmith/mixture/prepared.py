"""What a recipe of `weightsmith moe` becomes before the engine runs it, whatever its kind."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from weightsmith.planner.build import Prepared

if TYPE_CHECKING:
    from weightsmith.mixture.routing.report import Report
    from weightsmith.mixture.routing.route import Progress


@dataclass(frozen=True, slots=True)
class PreparedMixture(ABC):
    """A plan, and what must be computed from the models' data before the engine can run it. Close it, or use `with`."""

    prepared: Prepared

    @abstractmethod
    def fill(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        report: bool | None = None,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> Report | None:
        """Compute it: the engine can run the plan then.

        out       the folder that will be made: what took long may be kept beside it until `forget`
        report    of the routing: True, False, or None for where it costs nothing more
        device    for what is computed with torch, as torch names it
        progress  called with bytes of weights that are done, and all of them
        """

    def forget(self, out: str | os.PathLike[str]) -> None:  # noqa: B027  most keep nothing
        """Remove what `fill` kept beside the output."""

    def close(self) -> None:
        """Close the checkpoints."""
        self.prepared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()
