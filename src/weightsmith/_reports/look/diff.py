"""`weightsmith diff A B`: what a model differs in from another, by tensor, layer and part, and in words.

`weightsmith diff --base BASE A B C`: the task vectors of several models side by side.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations, combinations_with_replacement
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import ParameterError, nearest
from weightsmith._base.report.blocks import Report, Reported, report_by
from weightsmith._base.text import count
from weightsmith._kernels.codecs import BLOCK
from weightsmith._kernels.combine import LANES, gram
from weightsmith._kernels.differences import agreement, sketch_deltas
from weightsmith._kernels.select import HIGH_BINS, Scores, count_high, find_bin
from weightsmith._methods.jobs.combination import symmetric
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.tokenizers.vocabulary import Vocabulary
from weightsmith._plans import Product, Step
from weightsmith._reports.look.difference import Difference, Leading, MovedRow, TensorDifference, read_difference
from weightsmith._reports.look.differences import VALUES, WIDTH, Floats, analyse_sketch, differences, measured, sparse_signs
from weightsmith._reports.look.models import (
    LayerPlace,
    MatchedTensor,
    by_layer_and_part,
    compare_files,
    fetch_small,
    is_floating,
    is_merge,
    json_of,
    lineage,
    match,
    opened,
    vocabulary_of,
)
from weightsmith._reports.look.surveys import (
    NonFiniteCounts,
    Survey,
    Watching,
    added,
    compact,
    counted,
    decoded,
    of_rows,
    sentences,
    survey_kind,
    survey_product,
    together,
)
from weightsmith.abc.job import Matrix, Tile
from weightsmith.abc.product import Arrays

Name = str | os.PathLike[str]


@overload
def diff(
    a: Name,
    b: Name,
    /,
    *,
    tensors: Sequence[str] = (),
    threads: int | None = None,
    stream: bool = False,
    progress: Watching = True,
) -> Difference: ...
@overload
def diff(
    *models: Name,
    base: Name,
    tensors: Sequence[str] = (),
    threads: int | None = None,
    stream: bool = False,
    progress: Watching = True,
) -> Comparison: ...
def diff(
    *models: Name,
    base: Name | None = None,
    tensors: Sequence[str] = (),
    threads: int | None = None,
    stream: bool = False,
    progress: Watching = True,
) -> Difference | Comparison:
    """Compare two models; or, with a base, the task vectors of two or more models.

    models    as in a recipe: a folder, a weight file, a Hub id, `base+adapter`; stored in any format that weightsmith reads
    base      the model that all were fine-tuned from
    tensors   globs of tensor names of A, or of the base; default: all tensors
    threads   default: all available processors; does not affect the result
    stream    stream weights of Hub models that are not cached, instead of downloading them
    progress  called about ten times per second; True: a bar in terminals and notebooks, False: none

    Returns a Difference, or with a base a Comparison. Tensors are matched as in a merge. If embeddings have different numbers
    of tokens, the rows that both have are compared.

    Raises PlanError for models that cannot be opened, UnknownName for a glob that matches no tensor, and ParameterError for a
    wrong number of models.

    Cost: two passes over both models, and one pass over tensors that do not differ. With a base: one pass, and an eighth of
    one. Memory does not depend on the size of the models.

    >>> weightsmith.diff("base", "base-german").reading  # doctest: +SKIP
    ('A change of low rank, as LoRA makes it, or a merge of such models: rank about 8 in all linear layers of all layers.', ...)
    >>> weightsmith.diff("german", "french", base="base").total.cosines  # doctest: +SKIP
    (0.2093,)
    """
    if base is not None:
        if len(models) < 2:
            what = f"--base compares two or more models, but got {len(models)}"
            raise ParameterError(what, fix=f"run weightsmith diff {base} MODEL, to compare one model with its base")
        return compare(base, models, tensors=tensors, threads=threads, stream=stream, progress=progress)
    if len(models) != 2:
        fix = "run weightsmith diff A B, or weightsmith diff --base BASE A B C"
        raise ParameterError(f"diff needs two models, but got {len(models)}", fix=fix)
    return _differ(models[0], models[1], tensors, threads, progress, stream=stream)


def _differ(a: Name, b: Name, tensors: Sequence[str], threads: int | None, progress: Watching, *, stream: bool) -> Difference:
    with opened(a, b, stream=stream) as models:
        first, second = models
        for model in models:
            fetch_small(model)
        seen: dict[str, Vocabulary] = {}
        vocabularies = vocabulary_of(first, seen), vocabulary_of(second, seen)
        files = compare_files(first, second, vocabularies)
        matching = match(models, tensors)
        rows = measured("differences", differences, matching.matrices, models, threads=threads, progress=progress, passes=2)
        compared, moved = list[TensorDifference](), list[_Rows]()
        for matched, arrays in rows:
            tensor, moved_rows = _tensor(matched, arrays, models)
            compared.append(tensor)
            if moved_rows:
                moved.append((tensor.name, moved_rows))
        difference = Difference(
            (first.ref, second.ref),
            files,
            tuple(compared),
            matching.missing[0],
            matching.strange[0],
            matching.different,
            _moved(moved, vocabularies),
            (first.decoded, second.decoded),
            lineage(second) if is_merge(second) else None,
            tuple(tensors),
        )
        return replace(difference, reading=read_difference(difference))


_Moved = tuple[tuple[int, float], ...]
"""Rows of an embedding that moved most, and their squared shares."""
_Rows = tuple[str, _Moved]
"""The same, with the tensor's name."""


def _tensor(matched: MatchedTensor, arrays: Arrays, models: Sequence[Checkpoint]) -> tuple[TensorDifference, _Moved]:
    sums, nonfinite, values, upper, rank, moved, powers = arrays
    aa, ad, dd, changed, largest, noise, bb, ab = sums.tolist()
    in_a, in_b = of_rows(nonfinite)
    # Undefined where it is not of numbers, where a sum overflows, and where the squares of a delta vanish.
    known = math.isfinite(aa + ad + dd) and (dd > 0 or not changed)
    delta, a = math.sqrt(dd) if known else math.nan if changed else 0.0, _root(aa)
    b = _root(bb)
    dtypes = tuple(model.natural_dtype(read.tensor).name for model, read in zip(models, matched.step.inputs, strict=True))
    linear, leading = matched.step.role == "linear", None
    if linear and changed and known:
        k = min(VALUES, *matched.step.out.shape) if math.isfinite(rank) else 0
        leading = Leading(array("d", values[:k].tobytes()), array("d", upper[:k].tobytes()), int(rank) if rank >= 0 else None)
    size = matched.step.out.size
    tensor = TensorDifference(
        matched.step.out.name,
        matched.place,
        matched.step.out.shape,
        (dtypes[0], dtypes[1]),
        size,
        delta,
        a,
        b,
        _cosine(aa, ad, dd, bb, ab) if known else math.nan,
        int(changed),
        largest if known else 0.0 if not changed else math.nan,
        math.sqrt(noise * size),
        linear,
        leading,
        (in_a, in_b),
        matched.rows,
        compact(powers),
    )
    return tensor, tuple((int(row), float(share)) for row, share in moved.tolist() if share > 0)


def _root(square: float) -> float:
    return math.sqrt(square) if math.isfinite(square) else math.nan


def _cosine(aa: float, ad: float, dd: float, bb: float, ab: float) -> float:
    """The cosine of a and b = a + d; nan if either is zero.

    >>> _cosine(1, 0, 0, 1, 1), _cosine(1, -1, 1, 0, 0), _cosine(1e-200, 0, 1e-200, 2e-200, 1e-200) == math.sqrt(0.5)
    (1.0, nan, True)
    """
    if not (aa > 0 and bb > 0):
        return math.nan
    if dd > 0.1 * aa:
        return max(-1.0, min(1.0, ab / math.sqrt(aa) / math.sqrt(bb)))
    # From the part of d that is not along a: near 1 the quotient of sums has lost its digits.
    across = max(0.0, dd / bb - (ad / aa) * (ad / bb))  # sin²
    return math.sqrt(max(0.0, 1 - across))


def _moved(rows: Iterable[_Rows], vocabularies: tuple[Vocabulary | None, Vocabulary | None]) -> tuple[MovedRow, ...]:
    known = vocabularies[1] or vocabularies[0]
    tokens = {} if known is None else known.tokens
    moved = [MovedRow(name, row, tokens.get(row, ""), math.sqrt(share)) for name, shares in rows for row, share in shares]
    return tuple(sorted(moved, key=lambda row: -row.share))


# ---- With a base


# ---- The `alignments` product: how the task vectors of several models lie to each other.
#
# It streams: a first pass samples magnitudes, to find what the largest elements are; a second makes inner products, counts
# and sketches. Its steps have the base as their first input.

OP = "alignments"

LARGE_SHARE = 0.01
"""The share of a delta's elements that count as its largest."""

DIRECTIONS = 8
"""Leading singular vectors whose span is compared."""

_NO_FACTORS = np.zeros(0)

Count = npt.NDArray[np.int64]
Sums = npt.NDArray[np.float64]


def alignments(name: str, steps: Sequence[Step]) -> Product:
    """The product. steps: each with the base and k models, of floating numbers; subspaces are of the weights of linear layers.

    Its arrays have a row for each step: `products` float64 [steps, pairs] (inner products of the deltas, pairs (i, j) with
    i <= j in row order), `counts` int64 [steps, 2 + pairs] (see `kernels.differences`), `cosines` float64 [steps, pairs,
    DIRECTIONS] (of the principal angles, descending; nan where there are fewer), `nonfinite` int64 [steps, 1 + k, 2] (of each
    input, how many elements are NaN, and infinite).
    """
    k = len(steps[0].inputs) - 1 if steps else 0
    pairs = k * (k + 1) // 2
    shapes = {"products": (pairs,), "counts": (2 + pairs,), "cosines": (pairs, DIRECTIONS), "nonfinite": (1 + k, 2)}
    return survey_product(name, OP, steps, shapes, integers=("counts", "nonfinite"))


@dataclass(slots=True)
class _Sampled:
    name: str
    bins: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.uint32]]]


@dataclass(slots=True)
class _TileProducts:
    name: str
    first_row: int
    products: Sums
    counts: Count
    nonfinite: Count | None
    sketch: Floats | None


class Alignments(Survey):
    """The sums of `alignments`, tile by tile."""

    def __init__(self, product: Product) -> None:
        super().__init__(product)
        self._products, self._counts, self._cosines, self._nonfinite = self.totals
        self._cosines.fill(np.nan)
        self._k = self._nonfinite.shape[1] - 1
        self._bins: dict[str, Count] = {}
        self._limits = np.zeros((len(self.specs), self._k), np.uint32)
        self._sketches: dict[str, Floats] = {}

    def passes(self) -> int:
        return 2

    def sampled(self, number: int) -> bool:
        return number == 0

    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> _Sampled | _TileProducts:
        return self._sample(matrix, tile) if number == 0 else self._compare(matrix, tile)

    def _sample(self, matrix: Matrix, tile: Tile) -> _Sampled:
        scratch, bins = tile.scratch, []
        rows = scratch.rows(2, matrix.codes, matrix.out_code)
        for i in range(1, 1 + self._k):
            counts = scratch.counts(HIGH_BINS)
            scores = Scores(tile.raw, matrix.codes, i, _NO_FACTORS, matrix.cols, rows, scratch.bits)
            count_high(scores, tile.size, counts)
            used = np.flatnonzero(counts)
            bins.append((used, counts[used]))
        return _Sampled(matrix.name, bins)

    def _compare(self, matrix: Matrix, tile: Tile) -> _TileProducts:
        i, pairs = self.row[matrix.name], self._products.shape[1]
        products, counts = np.empty((tile.grains(matrix.grain), pairs)), np.zeros(2 + pairs, np.int64)
        rows = tile.scratch.rows(1 + self._k, matrix.codes, matrix.out_code, matrix.cols)
        gram(tile.raw, matrix.codes, tile.size, matrix.grain, True, products, rows, np.empty((pairs, LANES)))
        nonfinite = None if np.isfinite(products).all() else counted(decoded(matrix, tile))
        marks = np.empty((3 + self._k, BLOCK), np.uint8)
        agreement(tile.raw, matrix.codes, tile.size, self._limits[i], counts, rows, marks)
        if matrix.name not in self.linear:
            return _TileProducts(matrix.name, 0, products, counts, nonfinite, None)
        signs, shifts = sparse_signs(matrix.cols)
        count = tile.size // matrix.cols
        sketch = np.zeros((self._k, count, min(WIDTH, matrix.cols)), np.float32)
        sketch_deltas(tile.raw, matrix.codes, count, matrix.cols, signs, shifts, sketch, rows)
        return _TileProducts(matrix.name, tile.start // matrix.cols, products, counts, nonfinite, sketch)

    def take(self, number: int, result: _Sampled | _TileProducts) -> None:
        if isinstance(result, _Sampled):
            held = self._bins.setdefault(result.name, np.zeros((self._k, HIGH_BINS), np.int64))
            for held_bins, (used, counts) in zip(held, result.bins, strict=True):
                held_bins[used] += counts
            return
        i = self.row[result.name]
        self._products[i] = added(self._products[i], result.products)
        if result.nonfinite is not None:
            self._nonfinite[i] += result.nonfinite
        self._counts[i] += result.counts
        if result.sketch is not None:
            shape = self._k, self.specs[i].shape[0], result.sketch.shape[2]
            held_sketch = self._sketches.setdefault(result.name, np.zeros(shape, np.float32))
            held_sketch[:, result.first_row : result.first_row + result.sketch.shape[1]] = result.sketch

    def end(self, number: int) -> None:
        if number == 0:
            for name, bins in self._bins.items():
                for i, counts in enumerate(bins):
                    rank = max(1, round(LARGE_SHARE * int(counts.sum())))
                    self._limits[self.row[name], i] = int(find_bin(counts, rank)[0]) << 16
            self._bins.clear()
            return
        for name in list(self._sketches):
            self._compare_directions(self.row[name], self._sketches.pop(name))

    def _compare_directions(self, i: int, sketches: Floats) -> None:
        cols = self.specs[i].shape[1]
        bases = [analyse_sketch(s, cols).basis[:, :DIRECTIONS] if np.isfinite(s).all() and s.any() else None for s in sketches]
        for at, (p, q) in enumerate(combinations_with_replacement(bases, 2)):
            if p is not None and q is not None:
                cosines = np.minimum(1, np.linalg.svd(p.astype(np.float64).T @ q.astype(np.float64), compute_uv=False))
                self._cosines[i, at, : len(cosines)] = cosines


def _problem(steps: Sequence[Step]) -> str:
    counts = {len(step.inputs) for step in steps}
    if len(counts) != 1 or min(counts) < 3 or any(not step.out.size for step in steps):
        return "its steps do not have a base and the same number of models, two or more"
    if any(step.role == "linear" and len(step.out.shape) != 2 for step in steps):
        return "a matrix of it has not two dimensions"
    return ""


KIND = survey_kind("comparing", Alignments, alignments, _problem)


ALIKE, OPPOSED = 0.5, -0.1
"""Cosines of task vectors from which on two models count as alike, or as opposed."""

_NEARLY = 0.2
"""Cosines below this are nearly those of orthogonal vectors."""

LONG = 3.0
"""How much longer than the shortest a task vector must be to be named."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """How the deltas of k models lie to each other, in a tensor, a layer, a part or all tensors.

    elements   of the tensors
    measured   how many of the tensors hold finite numbers in the base and in all models. What follows is of them alone
    norms      of the delta of each model; nan without such tensors
    cosines    of the deltas of each pair, (i, j) with i < j in row order; nan where one is zero
    shared     elements where two or more deltas are not zero
    conflicts  those of them where two signs differ
    overlaps   for each pair, the share of the largest elements (1% of each delta) that both have; by chance it is 1%; nan
               where one is zero
    nonfinite  NaN and infinities in the base, and in each model
    subspaces  for each pair, the mean squared cosine of the principal angles between the spans of the 8 leading singular
               vectors, over the linear layers; 1: the same span; nan where there is none
    """

    name: str
    place: LayerPlace | None
    tensors: int
    elements: int
    measured: int
    norms: tuple[float, ...]
    cosines: tuple[float, ...]
    shared: int
    conflicts: int
    overlaps: tuple[float, ...]
    subspaces: tuple[float, ...]
    nonfinite: tuple[NonFiniteCounts, ...]

    @property
    def conflict_share(self) -> float:
        """conflicts / shared; nan where nothing is shared."""
        return self.conflicts / self.shared if self.shared else math.nan

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        values = asdict(self) | {"conflict_share": self.conflict_share}
        place = values.pop("place")
        return values | (place or {})


@dataclass(frozen=True, slots=True)
class _Sums:
    """What is added up over tensors. gram: float64 [k, k]; large: int64 [k, k]; spans: float64 [m, pairs], of m matrices."""

    place: LayerPlace
    name: str
    elements: int
    gram: npt.NDArray[np.float64]
    shared: int
    conflicts: int
    large: npt.NDArray[np.int64]
    spans: npt.NDArray[np.float64]
    nonfinite: tuple[NonFiniteCounts, ...]

    @property
    def measured(self) -> bool:
        return bool(np.isfinite(self.gram).all())


@dataclass(frozen=True)
class Comparison(Reported):
    """The task vectors of several models, side by side. Returned by `weightsmith.diff` with a base.

    base, names  as they were given
    tensors      of each tensor that all have
    layers, parts, total   sums of them: of each layer, of each part over all layers, of all
    missing      tensors of the base that some model does not have, or in another shape
    chosen       the globs of tensors that were compared; () for all
    """

    base: str
    names: tuple[str, ...]
    tensors: tuple[Alignment, ...]
    layers: tuple[Alignment, ...]
    parts: tuple[Alignment, ...]
    total: Alignment
    missing: tuple[str, ...]
    chosen: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Short: a dataclass's own would list every tensor."""
        return f"<Comparison of {', '.join(self.names)} with base {self.base}: {len(self.tensors):,} tensors>"

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The pairs of models, in the order of all tuples of pairs."""
        return tuple(combinations(range(len(self.names)), 2))

    @cached_property
    def reading(self) -> tuple[str, ...]:
        """The conclusions for a merge, in sentences. Models are A, B, C, … in their order."""
        return tuple(_read(self))

    def table(self, by: Literal["tensor", "layer", "part"] = "tensor") -> list[dict[str, Any]]:
        """A row for each tensor, layer or part, for pandas: `pandas.DataFrame(comparison.table())`.

        Columns: name, tensors, elements, conflict_share; `norm MODEL` of each model; `cosine A, B`, `overlap A, B` and
        `subspace A, B` of each pair. They are as in `tensors`; nan for what is undefined.
        """
        groups = {"tensor": self.tensors, "layer": self.layers, "part": self.parts}
        if by not in groups:
            raise ParameterError(f"by must be one of {', '.join(groups)}{nearest(str(by), groups)}, not {by!r}")
        pairs = [f"{self.names[i]}, {self.names[j]}" for i, j in self.pairs]
        rows = []
        for one in groups[by]:
            row = {"name": one.name, "tensors": one.tensors, "elements": one.elements, "conflict_share": one.conflict_share}
            row |= {f"norm {name}": norm for name, norm in zip(self.names, one.norms, strict=True)}
            for what, values in (("cosine", one.cosines), ("overlap", one.overlaps), ("subspace", one.subspaces)):
                row |= {f"{what} {pair}": value for pair, value in zip(pairs, values, strict=True)}
            rows.append(row)
        return rows

    def report(self) -> Report:
        return report_by("_reports.look.reports:comparison_report", self)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; null for what is undefined."""
        return json_of(self, "base models reading pairs total layers parts tensors missing", models=self.names)


def compare(
    base: str | os.PathLike[str],
    models: Sequence[str | os.PathLike[str]],
    *,
    tensors: Sequence[str] = (),
    threads: int | None = None,
    stream: bool = False,
    progress: Watching = True,
) -> Comparison:
    """The task vectors of some models; see `weightsmith.diff`."""
    with opened(base, *models, stream=stream) as checkpoints:
        matching = match(checkpoints, tensors)
        chosen = [matched for matched in matching.matrices if is_floating(matched.step, checkpoints)]
        rows = measured("alignments", alignments, chosen, checkpoints, threads=threads, progress=progress)
        sums = [_sums(matched.place, matched.step, *arrays) for matched, arrays in rows]
        lacking = [name for names in matching.missing for name in names]
        missing = dict.fromkeys([*lacking, *(name for name, _ in matching.different)])
        refs = [checkpoint.ref for checkpoint in checkpoints]
    layers, parts = by_layer_and_part(sums)
    return Comparison(
        refs[0],
        tuple(refs[1:]),
        tuple(_aligned(group.name, [group], len(models), group.place) for group in sums),
        tuple(_aligned(name, group, len(models)) for name, group in layers.items()),
        tuple(_aligned(name, group, len(models)) for name, group in parts.items()),
        _aligned("all", sums, len(models)),
        tuple(missing),
        tuple(tensors),
    )


def _sums(
    place: LayerPlace,
    step: Step,
    products: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
    cosines: npt.NDArray[np.float64],
    nonfinite: npt.NDArray[np.int64],
) -> _Sums:
    k = len(step.inputs) - 1
    large = np.zeros((k, k), np.int64)
    large[np.triu_indices(k)] = counts[2:]
    apart = np.flatnonzero(np.not_equal(*np.triu_indices(k)))
    squares = np.square(cosines[apart])
    known = np.isfinite(squares).any(1)
    spans = np.full(len(apart), np.nan)
    spans[known] = np.nansum(squares[known], axis=1) / np.isfinite(squares[known]).sum(1)
    gram = symmetric(products, k)
    return _Sums(
        place, step.out.name, step.out.size, gram, int(counts[0]), int(counts[1]), large, spans[None], of_rows(nonfinite)
    )


def _aligned(name: str, every: Sequence[_Sums], k: int, place: LayerPlace | None = None) -> Alignment:
    sums = [one for one in every if one.measured]
    gram = np.sum([one.gram for one in sums], axis=0) if sums else np.zeros((k, k))
    large = np.sum([one.large for one in sums], axis=0) if sums else np.zeros((k, k), np.int64)
    spans = np.concatenate([one.spans for one in sums]) if sums else np.empty((0, k * (k - 1) // 2))
    norms = np.sqrt(np.diag(gram)) if sums else np.full(k, np.nan)
    pairs = list(combinations(range(k), 2))
    known = np.isfinite(spans)
    with np.errstate(invalid="ignore"):
        means = np.where(known, spans, 0).sum(0) / known.sum(0)
    return Alignment(
        name,
        place,
        len(every),
        sum(one.elements for one in every),
        len(sums),
        tuple(norms.tolist()),
        tuple(_quotient(float(gram[i, j]), float(norms[i]), float(norms[j])) for i, j in pairs),
        sum(one.shared for one in sums),
        sum(one.conflicts for one in sums),
        tuple(int(large[i, j]) / n if (n := int(min(large[i, i], large[j, j]))) else math.nan for i, j in pairs),
        tuple(means.tolist()),
        tuple(together(one.nonfinite[i] for one in every) for i in range(1 + k)),
    )


def _quotient(product: float, a: float, b: float) -> float:
    """The cosine of two vectors; nan if one is zero."""
    return max(-1.0, min(1.0, product / a / b)) if a > 0 and b > 0 else math.nan


def letters(count: int) -> list[str]:
    """Names of models in tables: A to Z, then M27, M28.

    >>> letters(28)[25:]
    ['Z', 'M27', 'M28']
    """
    return [chr(65 + i) if i < 26 else f"M{i + 1}" for i in range(count)]


def _read(comparison: Comparison) -> list[str]:
    names, total = letters(len(comparison.names)), comparison.total
    texts = sentences(["The base", *names], [(tensor.name, tensor.nonfinite) for tensor in comparison.tensors])
    if not comparison.tensors:
        texts.append(f"The models have no {'such tensor' if comparison.chosen else 'tensor'} in common that can be compared.")
    elif not total.measured:
        texts.append("No norm and no cosine is defined.")
    elif total.measured < total.tensors:
        left_out = total.tensors - total.measured
        texts.append(f"All numbers of several tensors leave {count(left_out, 'tensor')} out, which cannot be measured.")
    texts += _read_measured(comparison, names)
    if comparison.missing:
        lacking = f"{count(len(comparison.missing), 'tensor')} that some models lack or have in another shape"
        texts.append(f"Not compared: {lacking}, such as {comparison.missing[0]}.")
    if comparison.chosen:
        texts.append(f"Only tensors that match {', '.join(map(repr, comparison.chosen))} were compared.")
    return texts


def _read_measured(comparison: Comparison, names: Sequence[str]) -> list[str]:
    total, texts = comparison.total, []
    same = [names[i] for i, norm in enumerate(total.norms) if norm == 0]
    if same:
        texts.append(f"{', '.join(same)}: no difference from the base.")
    of_pairs = zip(comparison.pairs, total.cosines, strict=True)
    pairs = [(names[i], names[j], cosine) for (i, j), cosine in of_pairs if math.isfinite(cosine)]
    alike = [f"{a} and {b} (cosine {cosine:.2f})" for a, b, cosine in pairs if cosine >= ALIKE]
    opposed = [f"{a} and {b} (cosine {cosine:.2f})" for a, b, cosine in pairs if cosine <= OPPOSED]
    if alike:
        texts.append(f"Much the same was learned by {'; '.join(alike)}: sum their weights to about 1.")
    if opposed:
        texts.append(f"Opposed are {'; '.join(opposed)}: a merge undoes part of both.")
    if pairs and not alike and not opposed:
        a, b, cosine = max(pairs, key=lambda pair: abs(pair[2]))
        most = f"cosines are at most {abs(cosine):.2f} ({a} and {b})"
        texts.append(f"The task vectors are {'nearly' if abs(cosine) < _NEARLY else 'not far from'} orthogonal: {most}.")
    if total.shared:
        share = total.conflict_share
        chance = 1 - 0.5 ** (len(names) - 1)
        text = f"Where two or more differ from the base, their signs conflict in {share:.0%} of the elements"
        texts.append(f"{text}{f'; by chance it would be {chance:.0%}' if len(names) == 2 else ''}.")
    norms = {name: norm for name, norm in zip(names, total.norms, strict=True) if norm > 0}
    if len(norms) > 1 and max(norms.values()) > LONG * min(norms.values()):
        long, short = max(norms, key=norms.__getitem__), min(norms, key=norms.__getitem__)
        times = f"{norms[long] / norms[short]:.1f} times as long as that of {short}"
        texts.append(f"The task vector of {long} is {times}: at equal weights it dominates.")
    return texts
