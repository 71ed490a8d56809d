"""Router weights. Each way to make them is one file with a function that fills `Rows`; `MODES` names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import numpy.typing as npt

from weightsmith.mixture.assembly import Assembly
from weightsmith.mixture.dense import Dense
from weightsmith.recipe import Expert, Upcycling

Rows = npt.NDArray[np.float32]
"""float32 [layers, experts, hidden]: the routed experts' rows, then those of shared experts that have one."""


@dataclass(frozen=True, slots=True)
class Gating:
    """What router weights are made from.

    experts  that get a row, shared ones last
    seed     of what is random
    """

    recipe: Upcycling
    base: Dense
    assembly: Assembly
    experts: Sequence[Expert]
    seed: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, experts, hidden."""
        return len(self.base.layers), len(self.experts), self.base.hidden


MODES: Mapping[str, str] = {"random": "random:normal", "uniform_random": "random:uniform"}
"""Gate mode → file and function in it."""

NEEDS_PROMPTS = frozenset({"router_input", "hidden", "hidden_avg", "hidden_last", "cheap_embed"})
"""Modes that take each expert's prompts."""


def rows(mode: str, gating: Gating) -> Rows:
    """The rows of a gate mode."""
    file, _, function = MODES[mode].partition(":")
    make: Callable[[Gating], Rows] = getattr(import_module(f"weightsmith.mixture.gates.{file}"), function)
    return make(gating)
