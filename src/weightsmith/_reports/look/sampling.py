"""A sample of a plan, and what it says of a merge.

A sample has the same merges, of some rows of each matrix.

A matrix is divided into equal parts, and one run of rows is taken from each, at a place that depends only on the tensor's name.
Vectors and small matrices are taken whole. Statistics of whole matrices (thresholds, norms, singular vectors) are those of the
sample instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith._base.tensors import TensorSpec
from weightsmith._kernels.differences import SURVIVAL, survival
from weightsmith._methods import get
from weightsmith._planning.planner.steps import with_needs
from weightsmith._plans import PLAIN, Block, Gather, Plan, PlanDraft, Product, Read, Step, Table
from weightsmith._reports.look.surveys import Survey, added, counted, decoded, differs, survey_kind, survey_product
from weightsmith.abc.job import Matrix, Tile

SAMPLE_ELEMENTS = 1 << 17
"""Elements of a matrix that are taken, about."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A plan of some rows, and for each of its steps how many elements the whole matrix has.

    left_out  tensors that cannot be sampled
    """

    plan: Plan
    sizes: dict[str, int]
    left_out: tuple[str, ...]


def merging_leaves(plan: Plan) -> list[Step]:
    """The logical matrices that a method makes, of plain numbers."""
    leaves = [leaf for step in plan.steps for leaf in step.leaves if leaf.merges and leaf.out.size and len(leaf.inputs) > 1]
    return [replace(leaf, encoding=PLAIN, stored=(), weighted=-1) for leaf in leaves]


def sample(plan: Plan) -> Sampled:
    """The sample of a plan of merges."""
    tables = _Tables(plan.tables)
    steps, sizes, left_out = [], {}, []
    for leaf in merging_leaves(plan):
        sizes[leaf.out.name] = leaf.out.size
        rows = _chosen(leaf.out)
        if rows is None:
            steps.append(replace(leaf, needs=()))
            continue
        reads = [_sampled(read, leaf.out, rows, tables) for read in leaf.inputs]
        if any(read is None for read in reads):
            left_out.append(leaf.out.name)
            continue
        spec = replace(leaf.out, shape=(len(rows), leaf.out.shape[-1]))
        steps.append(replace(leaf, out=spec, inputs=tuple(read for read in reads if read is not None), needs=()))
    decided, products = with_needs(steps, plan.settings, get(steps[0].op)) if steps else ([], ())
    roles = {leaf.out.name: leaf.role for leaf in merging_leaves(plan)}
    draft = PlanDraft.of(plan)
    draft.steps = [replace(step, role=roles[step.out.name]) for step in decided]
    draft.products, draft.tables, draft.then = list(products), tables.all, None
    return Sampled(draft.finish(stored=False), sizes, tuple(left_out))


def _chosen(spec: TensorSpec) -> npt.NDArray[np.int64] | None:
    """The rows that are taken of a tensor: ascending; None for all."""
    if len(spec.shape) < 2 or spec.size <= SAMPLE_ELEMENTS:
        return None
    cols = spec.shape[-1]
    rows, run = spec.size // cols, max(1, GROUP_ELEMENTS // cols)
    count = max(2, SAMPLE_ELEMENTS // (run * cols))
    if count * run >= rows:
        return None
    random = np.random.Generator(np.random.Philox(xxhash.xxh64_intdigest(spec.name.encode())))
    edges = np.linspace(0, rows, count + 1).astype(np.int64)
    starts = edges[:-1] + (random.random(count) * np.maximum(1, np.diff(edges) - run + 1)).astype(np.int64)
    chosen: npt.NDArray[np.int64] = (starts[:, None] + np.arange(run)).reshape(-1)
    return chosen


class _Tables:
    """The tables of a plan, and those that are added; equal ones once."""

    def __init__(self, known: Sequence[Table]) -> None:
        self._known = list(known)
        self._numbers: dict[bytes, int] = {}

    @property
    def all(self) -> list[Table]:
        return self._known

    def rows(self, number: int) -> npt.NDArray[np.int32]:
        return self._known[number].array

    def add(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> int:
        table = Table.of(rows)
        if table.data not in self._numbers:
            self._numbers[table.data] = len(self._known)
            self._known.append(table)
        return self._numbers[table.data]


def _sampled(read: Read, out: TensorSpec, rows: npt.NDArray[np.int64], tables: _Tables) -> Read | None:
    """A read of some rows; None for one whose rows do not follow each other, or are in an order that a product determines."""
    cols, height = out.shape[-1], out.size // out.shape[-1]
    view = read.view
    if view is None or (isinstance(view, Block) and view.whole_rows):
        offset = 0 if view is None else view.offset
        return replace(read, view=Gather(tables.add(rows), Block(offset, height, cols, cols)))
    if isinstance(view, Block) or isinstance(view.table, str) or view.axis == 1:
        return None
    fallback = [_sampled(other, out, rows, tables) for other in view.fallback]
    if any(other is None for other in fallback):
        return None
    taken = tables.add(tables.rows(view.table)[rows])
    return replace(read, view=replace(view, table=taken, fallback=tuple(other for other in fallback if other is not None)))


# ---- The `survival` product: what of each model's delta is in a merge. It streams, in one pass.
#
# Its steps have the base, the merge and then the models as inputs. The sums are of groups of elements, and so are their
# squares: a sample of groups tells how far the whole may be from it.

OP = "survival"

GROUP_ELEMENTS = 1 << 13
"""Elements of a group, about: whole rows."""

Sums = npt.NDArray[np.float64]


def survivals(name: str, steps: Sequence[Step]) -> Product:
    """The product. steps: each with base, merge and models of floating numbers; up to k models.

    Its arrays have a row for each step: `sums` float64 [steps, 1 + k, SURVIVAL] (see `kernels.differences`), `squares` float64
    [steps, k, 3] (Σ kept², Σ kept · energy, Σ energy² over the groups), `groups` float64 [steps] (how many there are),
    `nonfinite` float64 [steps, 2 + k, 2] (of each input, how many elements are NaN, and infinite), `constants` float64 [steps]
    (how many are the same in the base and all models). The sums of a step with such elements are not numbers.
    """
    k = max((len(step.inputs) for step in steps), default=2) - 2
    shapes = {"sums": (1 + k, SURVIVAL), "squares": (k, 3), "groups": (), "nonfinite": (2 + k, 2), "constants": ()}
    return survey_product(name, OP, steps, shapes)


@dataclass(slots=True)
class _Part:
    name: str
    sums: Sums
    nonfinite: npt.NDArray[np.int64] | None
    constants: int


class Survivals(Survey):
    """See `survivals`."""

    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> _Part:
        row = min(matrix.cols, matrix.grain)
        group = max(1, GROUP_ELEMENTS // row) * row
        sums = np.empty((-(-tile.size // group), len(matrix.codes) - 1, SURVIVAL))
        survival(tile.raw, matrix.codes, tile.size, group, sums, tile.scratch.rows(3, matrix.codes, matrix.out_code))
        if np.isfinite(sums).all():
            return _Part(matrix.name, sums, None, 0)
        numbers = decoded(matrix, tile)
        base, models = numbers[0], numbers[2:]
        same = ~np.isfinite(base) & ~np.logical_or.reduce([differs(base, model) for model in models])
        return _Part(matrix.name, sums, counted(numbers), int(same.sum()))

    def take(self, number: int, result: _Part) -> None:
        sums, squares, groups, nonfinite, constants = self.totals
        i, result_sums, k = self.row[result.name], result.sums, result.sums.shape[1] - 1
        if result.nonfinite is not None:
            nonfinite[i, : 2 + k] += result.nonfinite
        sums[i, : 1 + k] = added(sums[i, : 1 + k], result_sums)
        energy, kept = result_sums[:, 1:, 0], result_sums[:, 1:, 1]
        with np.errstate(invalid="ignore", over="ignore"):
            products = np.stack([kept * kept, kept * energy, energy * energy], axis=2)
        squares[i, :k] = added(squares[i, :k], products)
        groups[i] += len(result_sums)
        constants[i] += result.constants


def _problem(steps: Sequence[Step]) -> str:
    wrong = not steps or any(len(step.inputs) < 3 or not step.out.size for step in steps)
    return "its steps do not have a base, a merge and models" if wrong else ""


KIND = survey_kind("previewing", Survivals, survivals, _problem)
