"""The `survival` product: what of each model's delta is in a merge. It streams, in one pass.

Its steps have the base, the merge and then the models as inputs. The sums are of groups of elements, and so are their squares:
a sample of groups tells how far the whole may be from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsmith.jobs.job import Matrix, Tile
from weightsmith.kernels.agreement import SURVIVAL, survival
from weightsmith.look.nonfinite import counted, decoded, differs
from weightsmith.plans import Product, Step
from weightsmith.products.base import Arrays, ProductKind, StreamingReduction
from weightsmith.tensors import DTYPES, TensorSpec

OP = "survival"

GROUP_ELEMENTS = 1 << 13
"""Elements of a group, about: whole rows."""

Sums = npt.NDArray[np.float64]


def survivals(name: str, steps: Sequence[Step]) -> Product:
    """The product. steps: each with base, merge and models of floating numbers; up to k models.

    Its arrays have a row for each step: `sums` float64 [steps, 1 + k, SURVIVAL] (see `kernels.agreement`), `squares` float64
    [steps, k, 3] (Σ kept², Σ kept · energy, Σ energy² over the groups), `groups` float64 [steps] (how many there are),
    `nonfinite` float64 [steps, 2 + k, 2] (of each input, how many elements are NaN, and infinite), `constants` float64 [steps]
    (how many are the same in the base and all models). The sums of a step with such elements are not numbers.
    """
    n, k = len(steps), max((len(step.inputs) for step in steps), default=2) - 2
    shapes: dict[str, tuple[int, ...]] = {"sums": (n, 1 + k, SURVIVAL), "squares": (n, k, 3), "groups": (n,)}
    shapes |= {"nonfinite": (n, 2 + k, 2), "constants": (n,)}
    outs = tuple(TensorSpec(f"{name}: {what}", DTYPES["F64"], shape) for what, shape in shapes.items())
    return Product(name, OP, outs, {}, tuple(steps))


@dataclass(slots=True)
class _Part:
    name: str
    sums: Sums
    nonfinite: npt.NDArray[np.int64] | None
    constants: int


class Survivals(StreamingReduction):
    """See `survivals`."""

    def __init__(self, product: Product) -> None:
        self._steps = {step.out.name: i for i, step in enumerate(product.steps)}
        n, k = len(product.steps), max((len(step.inputs) for step in product.steps), default=2) - 2
        self._sums, self._squares, self._groups = np.zeros((n, 1 + k, SURVIVAL)), np.zeros((n, k, 3)), np.zeros(n)
        self._nonfinite, self._constants = np.zeros((n, 2 + k, 2)), np.zeros(n)

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> _Part:
        row = min(matrix.cols, matrix.grain)
        group = max(1, GROUP_ELEMENTS // row) * row
        found = np.empty((-(-tile.size // group), len(matrix.codes) - 1, SURVIVAL))
        survival(tile.raw, matrix.codes, tile.size, group, found, tile.scratch.rows(3, matrix.codes, matrix.out_code))
        if np.isfinite(found).all():
            return _Part(matrix.name, found, None, 0)
        numbers = decoded(matrix, tile)
        base, models = numbers[0], numbers[2:]
        same = ~np.isfinite(base) & ~np.logical_or.reduce([differs(base, model) for model in models])
        return _Part(matrix.name, found, counted(numbers), int(same.sum()))

    def take(self, number: int, result: _Part) -> None:
        found = result.sums
        i, k = self._steps[result.name], found.shape[1] - 1
        if result.nonfinite is not None:
            self._nonfinite[i, : 2 + k] += result.nonfinite
            self._constants[i] += result.constants
        # cumsum adds group after group; sum would add in an order that depends on the tiles.
        with np.errstate(invalid="ignore", over="ignore"):
            self._sums[i, : 1 + k] = np.cumsum(np.concatenate([self._sums[i, None, : 1 + k], found]), axis=0)[-1]
            energy, kept = found[:, 1:, 0], found[:, 1:, 1]
            squares = np.stack([kept * kept, kept * energy, energy * energy], axis=2)
            self._squares[i, :k] = np.cumsum(np.concatenate([self._squares[i, None, :k], squares]), axis=0)[-1]
        self._groups[i] += len(found)

    def arrays(self) -> Arrays:
        return [self._sums, self._squares, self._groups, self._nonfinite, self._constants]


def _check(product: Product) -> str:
    if not product.steps or any(len(step.inputs) < 3 or not step.out.size for step in product.steps):
        return "its steps do not have a base, a merge and models"
    return "" if product.outs == survivals(product.name, product.steps).outs else "its arrays are not those of its steps"


KIND = ProductKind("previewing", reduce=Survivals, check=_check)
