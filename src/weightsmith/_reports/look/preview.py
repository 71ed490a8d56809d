"""`weightsmith preview RECIPE`: what a merge will do to its models, from a sample of it, or computed in full.

The merge is a source that computes its tiles when a survey reads them, to compare them with the models.

The sample is a plan of its own, with the same merges, of some rows of each matrix. A matrix is divided into equal parts. From
each part one run of rows is taken, at a place that depends only on the tensor's name. Vectors and small matrices are taken
whole. Statistics of whole matrices (thresholds, norms, singular vectors) are those of the sample instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith._base.errors import Finding, Unsupported
from weightsmith._base.idioms import grouped
from weightsmith._base.options import lists_options, read_options
from weightsmith._base.report.blocks import Report, Reported, finite_or_mark, report_by, written
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.local import open_merge
from weightsmith._engine.resources import Resources
from weightsmith._execution.execute import check_computable
from weightsmith._execution.options import RunOptions
from weightsmith._execution.progress import Meter
from weightsmith._execution.report import share_of
from weightsmith._execution.summary import summarise
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._kernels.differences import SURVIVAL, survival
from weightsmith._methods import get
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import analyse
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.prepared import download
from weightsmith._planning.planner.steps import with_needs
from weightsmith._planning.recipe import Source
from weightsmith._plans import COPY, PLAIN, PRODUCTS, Block, Gather, Plan, PlanDraft, Product, Read, Step, Table
from weightsmith._plans.summary import Summary
from weightsmith._reports.look.difference import in_layers
from weightsmith._reports.look.models import LayerPlace, by_layer_and_part, json_of, place_of
from weightsmith._reports.look.surveys import (
    NonFiniteCounts,
    Survey,
    Watching,
    added,
    counted,
    decoded,
    differs,
    of_rows,
    sentences,
    survey,
    survey_kind,
    survey_product,
    together,
)
from weightsmith.abc.job import Matrix, Tile

if TYPE_CHECKING:
    from weightsmith._planning.planner.prepared import Prepared
    from weightsmith._reports.keywords import PlanKeywords


LOST = 0.2
"""A model that keeps less of its energy than this in a layer is warned about."""

FAR = 1.25
"""A merge that moves so much further from the base than its models do is warned about."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What of one model's delta is in the merge, in some tensors.

    All but `error` are nan where no tensor can be measured.

    norm      of the delta
    survives  share of its energy (squared norm): Σ min(|m|, |d|)² / Σ d², over elements where merge and model move the base
              in the same direction; m and d are the deltas of merge and model. nan if the model does not differ from the base
    error     the share is off by no more than this, but for a probability of about 5%; 0 if nothing was sampled
    against   of the elements that the model changed, the share that the merge moves the other way; nan if there are none
    dropped   the share that the merge leaves as in the base; nan as above
    apart     ‖merge - model‖ / ‖model's delta‖; nan as above
    """

    norm: float
    survives: float
    error: float
    against: float
    dropped: float
    apart: float


@dataclass(frozen=True, slots=True)
class GroupPreview:
    """Some tensors together: a layer, a part of all layers, or all.

    elements  of the tensors
    measured  how many of the tensors hold finite numbers in the base, the models and the merge. What follows is of them alone
    delta     ‖merge - base‖; nan without such tensors
    base      norm of the base; nan as above
    models    in the order of the preview's names; None for one that is not merged there
    nonfinite NaN and infinities in the base, in the merge, and in each model, of what was looked at
    """

    name: str
    tensors: int
    elements: int
    measured: int
    delta: float
    base: float
    models: tuple[Kept | None, ...]
    nonfinite: tuple[NonFiniteCounts, ...]

    @property
    def share(self) -> float:
        """delta / base; 0 if the merge is the base, infinite if only the base is zero, nan without numbers."""
        return share_of(self.delta, self.base)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"share": self.share}


@dataclass(frozen=True)
class Preview(Reported):
    """The estimated effect of a merge. Returned by `weightsmith.preview`.

    method   of the merge
    base     the model that deltas are from: the recipe's base, or its first model if it has none
    names    of the other models
    looked_at, elements   elements that were computed, and of all tensors that are merged
    layers, parts, total  see `GroupPreview`
    cells    of each part of each layer
    left_out tensors that are merged and cannot be sampled
    stops    tensors at which the merge will stop, as they have NaN or infinities that are not the same in all models
    plan     of the merge
    summary  of the merge: what it reads, writes and holds; see `Plan.summary`
    """

    method: str
    base: str
    names: tuple[str, ...]
    looked_at: int
    elements: int
    layers: tuple[GroupPreview, ...]
    parts: tuple[GroupPreview, ...]
    total: GroupPreview
    cells: tuple[tuple[LayerPlace, GroupPreview], ...]
    left_out: tuple[str, ...]
    stops: tuple[str, ...]
    plan: Plan
    summary: Summary

    def __repr__(self) -> str:
        """Short: a dataclass's own would list every layer."""
        share = written(finite_or_mark(self.total.share), "share")
        return f"<Preview of {self.method} on {', '.join(self.names)}: {share} from {self.base}, {len(self.warnings)} warnings>"

    @cached_property
    def warnings(self) -> tuple[Finding, ...]:
        """What may be wrong with the merge, in words; besides the plan's own warnings."""
        return tuple(_warn(self))

    def report(self) -> Report:
        return report_by("_reports.look.reports:preview_report", self)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; null for what is undefined or infinite."""
        names = "method base models looked_at elements warnings total layers parts cells left_out stops"
        warnings = [finding.what for finding in self.warnings]
        cells = [asdict(place) | group.to_json() for place, group in self.cells]
        return json_of(self, names, models=self.names, warnings=warnings, cells=cells)


@lists_options("preview", RecipeOptions)
def preview(
    recipe: Source,
    *,
    full: bool = False,
    threads: int | None = None,
    stream: bool = False,
    progress: Watching = True,
    **options: Unpack[PlanKeywords],
) -> Preview:
    """Estimate the effect of a merge on its models, from a sample.

    recipe    as for `merge`
    full      compute all of it; False: about 131,000 elements of each matrix, in runs of rows that depend on its name alone
    threads   default: all available processors; does not affect the result
    stream    stream weights of Hub models that are not cached, instead of downloading them
    progress  called about ten times per second; True: a bar in terminals and notebooks, False: none

    Nothing is written. Whole-matrix statistics (thresholds, norms, singular vectors) are estimated from the sampled rows.
    Raises PlanError as `merge` does, and Unsupported for a recipe of a mixture or of adapters.

    >>> seen = weightsmith.preview("ties.yml")  # doctest: +SKIP
    >>> seen.total.models[0].survives, seen.summary.memory.peak_bytes  # doctest: +SKIP
    (0.62, 312475648)
    """
    planning, settings = read_options("preview", {**options, "quantize": None}, RecipeOptions, QuantizeSettings)
    with prepare_any(recipe, planning, settings, check=True) as prepared:
        if isinstance(progress, Meter) and progress.announce is not None:
            progress.announce(prepared.plan, prepared.source)
        summary = summarise(prepared, RunOptions(threads=threads, stream=stream))  # streams, if asked
        return _previewed(prepared, summary, full=full, threads=threads, progress=progress)


def _previewed(prepared: Prepared, summary: Summary, *, full: bool, threads: int | None, progress: Watching) -> Preview:
    plan = prepared.plan
    leaves = merging_leaves(plan)
    if not leaves or any(read.model == PRODUCTS for leaf in leaves for read in leaf.inputs):
        what = "nothing is merged" if not leaves else "what is merged are adapters, or a product makes it"
        raise Unsupported(f"{what}, so there is nothing to preview", fix="run weightsmith plan RECIPE")
    check_computable(prepared)
    download(prepared.inputs)
    looked = _look(prepared, threads, full=full)
    label = f"survival in {plan.provenance.name}"
    product = survivals(label, looked.steps)
    models = [*prepared.inputs, looked.merged]
    outcome = survey("preview", models, [product], threads=threads, progress=progress, doing="previewing", tables=looked.tables)
    return _preview(plan, summary, looked, *outcome.results.arrays(label))


# ---- what is looked at


@dataclass(frozen=True, slots=True)
class _Looked:
    """steps: of the survey, with base, merge and models; sizes: elements of each whole matrix."""

    merged: Checkpoint
    steps: tuple[Step, ...]
    tables: tuple[Table, ...]
    sizes: dict[str, int]
    left_out: tuple[str, ...]


def _look(prepared: Prepared, threads: int | None, *, full: bool) -> _Looked:
    if full:
        draft, left_out = PlanDraft.of(prepared.plan), tuple[str, ...]()
        draft.steps = [replace(step, encoding=PLAIN, stored=(), weighted=-1) for step in draft.steps]
        plan = draft.finish(stored=False)
        sizes = {leaf.out.name: leaf.out.size for leaf in merging_leaves(plan)}
    elif any(leaf.statistics for step in prepared.plan.steps for leaf in step.leaves):
        what = f"{prepared.plan.provenance.name} measures the models on a text, which a sample does not"
        raise Unsupported(what, fix="add --full; or merge, and compare: weightsmith diff --base BASE MERGED A B")
    else:
        sampled = sample(prepared.plan)
        plan, sizes, left_out = sampled.plan, sampled.sizes, sampled.left_out
    merged = open_merge(plan, prepared.inputs, "the merge", Resources(threads or 0), allow_nonfinite=True)
    steps, number = [], len(prepared.inputs)
    for step in plan.steps:
        origin = 0
        for leaf in step.leaves:
            if leaf.merges and leaf.out.size and len(leaf.inputs) > 1:
                block = Block(origin, 1, leaf.out.size, leaf.out.size) if step.pieces else None
                steps.append(_compared(leaf, Read(number, step.out.name, block)))
            origin += leaf.out.size
    return _Looked(Checkpoint("the merge", merged), tuple(steps), plan.tables, sizes, left_out)


def _compared(leaf: Step, merged: Read) -> Step:
    """The step of the survey: the base (or the first model), the merge, the others. Rows are float32, unless one is F64."""
    base, *models = leaf.inputs
    return Step(replace(leaf.out, dtype=DTYPES["BF16"]), COPY, (base, merged, *models), role=leaf.role)


# ---- what was found


@dataclass(frozen=True, slots=True)
class _Matrix:
    """What was sampled of one matrix.

    weight                  elements for each that was looked at
    sums, squares, groups   see `survivals`
    models                  indices
    """

    place: LayerPlace
    size: int
    weight: float
    sums: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]
    groups: float
    models: tuple[int, ...]
    nonfinite: tuple[NonFiniteCounts, ...]

    @property
    def measured(self) -> bool:
        return bool(np.isfinite(self.sums).all())


def _preview(
    plan: Plan,
    summary: Summary,
    looked: _Looked,
    sums: npt.NDArray[np.float64],
    squares: npt.NDArray[np.float64],
    counts: npt.NDArray[np.float64],
    nonfinite: npt.NDArray[np.float64],
    constants: npt.NDArray[np.float64],
) -> Preview:
    structure = analyse([step.out for step in plan.steps], plan.config)
    merged = len(plan.models)
    bases = [step.inputs[0].model for step in looked.steps]
    base = max(dict.fromkeys(bases), key=bases.count)
    used = dict.fromkeys(read.model for step in looked.steps for read in step.inputs[2:])
    names = [model for model in range(merged) if model in used]
    matrices, stops = [], []
    for i, step in enumerate(looked.steps):
        size, models = looked.sizes[step.out.name], tuple(names.index(read.model) for read in step.inputs[2:])
        place = place_of(structure, step.out.name)
        in_all = of_rows(nonfinite[i, : len(step.inputs)])
        if any(item.nans + item.infinities != constants[i] for item in in_all):
            stops.append(step.out.name)
        else:  # a merge copies constants; the preview has computed with them
            in_all = (in_all[0], in_all[0], *in_all[2:])
        by_model = dict(zip(models, in_all[2:], strict=True))
        held = (*in_all[:2], *(by_model.get(model, NonFiniteCounts()) for model in range(len(names))))
        matrices.append(_Matrix(place, size, size / step.out.size, sums[i], squares[i], float(counts[i]), models, held))
    by_place = grouped((item.place, item) for item in matrices)
    layers, parts = by_layer_and_part(matrices)
    return Preview(
        plan.provenance.name,
        plan.models[base].ref,
        tuple(plan.models[model].ref for model in names),
        sum(step.out.size for step in looked.steps),
        sum(looked.sizes.values()),
        tuple(_group(name, members, len(names)) for name, members in layers.items()),
        tuple(_group(name, members, len(names)) for name, members in parts.items()),
        _group("all", matrices, len(names)),
        tuple((place, _group(f"{place.group}.{place.part}", members, len(names))) for place, members in by_place.items()),
        looked.left_out,
        tuple(stops),
        plan,
        summary,
    )


def _group(name: str, matrices: Sequence[_Matrix], models: int) -> GroupPreview:
    measured = [f for f in matrices if f.measured]
    delta, base = (
        math.sqrt(sum(f.weight * float(f.sums[0, column]) for f in measured)) if measured else math.nan for column in (0, 1)
    )
    kept = tuple(_kept(matrices, model) for model in range(models))
    nonfinite = tuple(together(f.nonfinite[i] for f in matrices) for i in range(2 + models))
    return GroupPreview(name, len(matrices), sum(f.size for f in matrices), len(measured), delta, base, kept, nonfinite)


def _kept(matrices: Sequence[_Matrix], model: int) -> Kept | None:
    pairs = [(f, k) for f in matrices for k, other in enumerate(f.models) if other == model]
    if not pairs:
        return None
    pairs = [(f, k) for f, k in pairs if f.measured]
    if not pairs:
        return Kept(math.nan, math.nan, 0.0, math.nan, math.nan, math.nan)
    energy, kept, used, against, dropped, apart = sum(f.weight * f.sums[1 + k] for f, k in pairs).tolist()
    if not energy:
        return Kept(math.nan if used else 0.0, math.nan, 0.0, math.nan, math.nan, math.nan)
    share = kept / energy
    variance = sum(_variance(f, k, share) for f, k in pairs)
    return Kept(
        math.sqrt(energy),
        share,
        2 * math.sqrt(variance) / energy,
        against / used,
        dropped / used,
        math.sqrt(apart / energy),
    )


def _variance(matrix: _Matrix, k: int, share: float) -> float:
    """The variance of the sum of kept - share · energy over a whole matrix, from its sampled groups (a ratio estimator)."""
    n = matrix.groups
    if n < 2 or matrix.weight <= 1:
        return 0.0
    energy, kept = matrix.sums[1 + k, 0], matrix.sums[1 + k, 1]
    of_kept, of_both, of_energy = matrix.squares[k]
    rest = kept - share * energy
    spread = max(0.0, of_kept - 2 * share * of_both + share**2 * of_energy - rest**2 / n) / (n - 1)
    return float(matrix.weight**2 * n * spread * (1 - 1 / matrix.weight))


def _warn(preview: Preview) -> list[Finding]:
    texts = []
    if preview.stops:
        held = sentences(
            [preview.base, "the merge", *preview.names], [(group.name, group.nonfinite) for _, group in preview.cells]
        )
        texts += [text.rstrip(".") for text in held]
        texts.append(f"the merge will stop with an error at {preview.stops[0]}; the numbers leave such tensors out")
    for i, name in enumerate(preview.names):
        lost: dict[int, float] = {}
        for number, group in enumerate(preview.layers):
            kept = group.models[i]
            if kept is not None and kept.survives < LOST:
                lost[number] = kept.survives
        whole = preview.total.models[i]
        if whole is not None and whole.norm == 0:
            texts.append(f"{name} does not differ from {preview.base} in anything that is merged")
        elif lost and whole is not None:
            every = len(lost) == len(preview.layers)
            mean = 1 - (whole.survives if every else sum(lost.values()) / len(lost))
            where = "" if every else f" in {_layers(preview, lost)}"
            texts.append(f"{name} loses {mean:.0%} of the energy of its delta{where}")
    norms = [kept.norm for kept in preview.total.models if kept is not None and math.isfinite(kept.norm)]
    if norms and preview.total.delta > FAR * max(norms) > 0:
        times = preview.total.delta / max(norms)
        texts.append(f"the merge moves {times:.1f} times as far from {preview.base} as the model that moves furthest")
    return [Finding(text) for text in texts]


def _layers(preview: Preview, numbers: Sequence[int] | dict[int, float]) -> str:
    """`layers 0 to 5`, or the names of what is not a layer."""
    names = [preview.layers[number].name for number in numbers]
    stacks: dict[str, list[int]] = {}
    others = []
    for name in names:
        prefix, _, last = name.rpartition(".")
        if last.isdigit():
            stacks.setdefault(prefix, []).append(int(last))
        else:
            others.append(name)
    texts = [f"{in_layers(numbers_of)}{f' of {prefix}' if len(stacks) > 1 else ''}" for prefix, numbers_of in stacks.items()]
    return " and ".join([*texts, *others])


# ---- the sample


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
    return (starts[:, None] + np.arange(run)).reshape(-1)


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
class _TileSurvival:
    name: str
    sums: Sums
    nonfinite: npt.NDArray[np.int64] | None
    constants: int


class Survivals(Survey):
    """The sums of `survivals`, tile by tile."""

    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> _TileSurvival:
        row = min(matrix.cols, matrix.grain)
        group = max(1, GROUP_ELEMENTS // row) * row
        sums = np.empty((-(-tile.size // group), len(matrix.codes) - 1, SURVIVAL))
        survival(tile.raw, matrix.codes, tile.size, group, sums, tile.scratch.rows(3, matrix.codes, matrix.out_code))
        if np.isfinite(sums).all():
            return _TileSurvival(matrix.name, sums, None, 0)
        numbers = decoded(matrix, tile)
        base, models = numbers[0], numbers[2:]
        same = ~np.isfinite(base) & ~np.logical_or.reduce([differs(base, model) for model in models])
        return _TileSurvival(matrix.name, sums, counted(numbers), int(same.sum()))

    def take(self, number: int, result: _TileSurvival) -> None:
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
