"""What a recipe of `weightsmith moe` becomes before the engine runs it, whatever its kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from weightsmith.planner.build import Prepared

if TYPE_CHECKING:
    from weightsmith.mixture.routing.report import Report
    from weightsmith.mixture.routing.route import Progress


@dataclass(frozen=True, slots=True)
class PreparedMixture(ABC):
    """A plan, and what must be computed from the models' data before the engine can run it. Close it, or use `with`."""

    prepared: Prepared

    beside: ClassVar[bool] = False
    """It may be computed while the engine does what does not need it; else first."""

    @abstractmethod
    def fill(
        self,
        folder: Path | None = None,
        *,
        report: bool | None = None,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> Report | None:
        """Compute it. Where it may be done beside the engine, the steps that need it wait.

        folder    where what took long may be kept, and is found again
        report    of the routing: True, False, or None for where it costs nothing more
        device    for what is computed with torch, as torch names it
        progress  called with bytes of weights that are done, and all of them
        """

    def close(self) -> None:
        """Close the checkpoints."""
        self.prepared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()
